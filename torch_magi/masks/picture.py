"""A mask as text: a picture in characters, and an explanation in words."""

from __future__ import annotations

from torch_magi.masks.mask import INF, AttnMask, coverage


def to_string(mask: AttnMask, max_size: int = 64) -> str:
    """Draw the mask: '#' visible, '.' hidden, '+' partly visible where a cell stands for several pairs.

    Args:
        mask: what to draw.
        max_size: the most cells in a row or column.
    """
    if max_size < 1:
        raise ValueError(f"max_size must be positive, got {max_size}")
    cells = coverage(mask, max_size)
    lines = ["".join("#" if c >= 1.0 else "." if c <= 0.0 else "+" for c in row) for row in cells]
    sq, sk = mask.shape
    if cells.size and max(sq, sk) > max_size:
        lines.append(f"(one character is about {-(-sq // len(cells))} queries x {-(-sk // cells.shape[1])} keys)")
    return "\n".join(lines)


def explain(mask: AttnMask) -> str:
    """Describe the mask in words: its size, then one line per band."""
    sq, sk = mask.shape
    lines = [
        f"{sq} queries x {sk} keys: {mask.area} of {sq * sk} pairs are visible ({100 * (1 - mask.sparsity()):.1f} %)"
        if sq * sk
        else f"{sq} queries x {sk} keys: no pairs"
    ]
    for q0, q1, k0, k1, dlo, dhi, step in mask.bands.tolist():
        q = "q" if step == 1 else f"{step} * ((q - {q0}) // {step}) + {q0}"
        low = f"max({k0}, {_offset(q, dlo)})" if dlo > -INF else str(k0)
        high = f"min({k1}, {_offset(q, dhi)})" if dhi < INF else str(k1)
        lines.append(f"  queries [{q0}, {q1}): query q sees keys [{low}, {high})")
    return "\n".join(lines)


def _offset(q: str, d: int) -> str:
    return q if d == 0 else f"{q} {'+' if d > 0 else '-'} {abs(d)}"
