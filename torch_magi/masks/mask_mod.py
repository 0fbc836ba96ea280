"""A mask as FlexAttention's `mask_mod(b, h, q_idx, kv_idx)`, and back: exactly, and without an S x S table.

The pairs of a mask_mod are read from one run on symbols (mask_mod_symbolic.py) where its operations allow it, which
takes time for what it describes, not for S x S pairs. Else it is asked for all pairs, in blocks, as `create_mask` of
torch asks. Which way was taken is logged by the logger "torch_magi.masks.mask_mod", at level INFO, and at level WARNING
before minutes of asking.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_mask
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_magi import _planner
from torch_magi.masks.mask import AttnMask, Bands, MaskGrid, MaskMod
from torch_magi.masks.mask_mod_symbolic import trace_mask_mod
from torch_magi.masks.ranges import IntArray, check_length, check_positive

# Pairs that are asked for at once: their tables take some 100 MB, and larger ones were slower (8192 x 8192 pairs
# of packed documents on 2 CPU cores: 0.5 s like this, 1.2 s at once, 2.5 s in blocks of an eighth).
PAIRS = 1 << 22
MANY_PAIRS = 1 << 33  # half a minute or more

logger = logging.getLogger(__name__)


def to_mask_mod(mask: AttnMask, device: torch.device | str = "cpu") -> MaskMod:
    """Return `mask_mod(b, h, q_idx, kv_idx)` with the pairs of a mask.

    It looks up the row's intervals of keys in captured int32 tables on `device`: two of [sq] for each interval
    of the row that has most.
    """
    offsets, intervals = mask.row_intervals()
    counts = np.diff(offsets)
    most = int(counts.max()) if len(counts) else 0
    lo = np.zeros((most, mask.shape[0]), np.int32)
    hi = np.zeros((most, mask.shape[0]), np.int32)
    rows = np.repeat(np.arange(mask.shape[0]), counts)
    nth = np.arange(len(rows)) - np.repeat(offsets[:-1], counts)
    lo[nth, rows], hi[nth, rows] = intervals[:, 0], intervals[:, 1]
    tables = [(torch.from_numpy(a).to(device), torch.from_numpy(b).to(device)) for a, b in zip(lo, hi, strict=True)]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        seen = (q_idx < 0) & (kv_idx < 0)
        for first, last in tables:
            seen = seen | ((kv_idx >= first[q_idx]) & (kv_idx < last[q_idx]))
        return seen

    return mask_mod


def from_mask_mod(
    mask_mod: MaskMod, q_len: int, kv_len: int, *, B: int | None = None, H: int | None = None,
    device: torch.device | str = "cpu",
) -> AttnMask | MaskGrid:  # fmt: skip
    """Return the pairs that a mask_mod shows; see `AttnMask.from_mask_mod`."""
    shape = check_length("q_len", q_len), check_length("kv_len", kv_len)
    sizes = {name: check_positive(name, n) for name, n in (("B", B), ("H", H)) if n is not None}
    used = used_indices(mask_mod, torch.device(device)) if all(shape) else frozenset()
    for name, what in (("b", "element of the batch"), ("h", "head")):
        if name in used and name.upper() not in sizes:
            raise ValueError(
                f"mask_mod depends on {name}, the {what}, so it is several masks; pass {name.upper()}=, their number, "
                "to get one for each"
            )

    def make(b: int, h: int) -> AttnMask:
        traced = traced_mask(mask_mod, *shape, b, h)
        if traced is not None:
            return traced
        level = logging.WARNING if shape[0] * shape[1] > MANY_PAIRS else logging.INFO
        logger.log(level, "mask_mod asked for all %d x %d pairs", *shape)
        return AttnMask.from_bands(
            evaluated_bands(mask_mod, b, h, whole_range(shape[0]), [whole_range(shape[1])], device), *shape
        )

    grid = mask_grid(make, sizes.get("B", 1), sizes.get("H", 1), used)
    return grid if sizes else grid[0][0]


def mask_grid(make: Callable[[int, int], AttnMask], B: int, H: int, used: frozenset[str]) -> MaskGrid:
    """Return make(b, h) for every b and h as masks[b][h]; equal masks are one object.

    Args:
        make: called once for each b and h that can differ.
        B, H: how many there are.
        used: which of "b" and "h" matter.
    """
    known: dict[AttnMask, AttnMask] = {}
    made: dict[tuple[int, int], AttnMask] = {}
    for b in range(B if "b" in used else 1):
        for h in range(H if "h" in used else 1):
            mask = make(b, h)
            made[b, h] = known.setdefault(mask, mask)
    return tuple(tuple(made[b * ("b" in used), h * ("h" in used)] for h in range(H)) for b in range(B))


def whole_range(length: int) -> IntArray:
    """Return [[0, length]]."""
    return np.array([[0, length]], np.int64)


class _Index(torch.Tensor):
    """An index of which it is noted whether its value matters."""

    label: str
    seen: set[str]

    # What needs the index but not its value: torch's own noop_mask and and_masks begin with b.new_ones.
    free = (
        torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.new_empty,
        torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.Tensor.size, torch.Tensor.dim,
        *(getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "shape", "ndim")),
    )  # fmt: skip

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if func not in cls.free:
            for x in tree_leaves(given):
                if isinstance(x, _Index):
                    x.seen.add(x.label)
        args, kwargs = tree_map_only(_Index, lambda x: x.as_subclass(torch.Tensor), given)
        return func(*args, **kwargs)


def used_indices(mask_mod: MaskMod, device: torch.device) -> frozenset[str]:
    """Return which of "b" and "h" a mask_mod computes with, found by calling it for one pair."""
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {type(mask_mod).__name__}")
    seen: set[str] = set()

    def index(label: str) -> torch.Tensor:
        made = torch.zeros((), dtype=torch.int64, device=device).as_subclass(_Index)
        made.label, made.seen = label, seen
        return made

    def noted(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        # Where torch cannot map table[b, :] this fails as in FlexAttention; with one index it would go unnoticed.
        mask_mod(b, h, q_idx, kv_idx)
        return mask_mod(index("b"), index("h"), q_idx, kv_idx)

    create_mask(noted, 1, 1, 1, 1, device)
    return frozenset(seen)


def traced_mask(mask_mod: MaskMod, q_len: int, kv_len: int, b: int, h: int) -> AttnMask | None:
    """Return the pairs of a mask_mod if they can be read from a run on symbols."""
    mask = trace_mask_mod(mask_mod, q_len, kv_len, b, h)
    if mask is not None:
        logger.info("mask_mod read from a run on symbols, %d x %d pairs", q_len, kv_len)
    return mask


def evaluated_bands(
    mask_mod: MaskMod, b: int, h: int, q_ranges: IntArray, k_ranges: list[IntArray], device: torch.device | str
) -> Bands:
    """Return the pairs that a mask_mod shows in some rectangles, by asking for each pair.

    Args:
        mask_mod: the function.
        b, h: element of the batch, and head.
        q_ranges: int64 [n, 2]; half-open ranges of rows.
        k_ranges: for each of them the keys it is crossed with: int64 [m, 2], sorted, disjoint.
        device: where mask_mod is called.

    Returns:
        Bands that are disjoint, int64 [n, 7].

    Raises:
        TypeError: if the results are not boolean.
    """
    found = []
    for (first, last), ranges in zip(q_ranges.tolist(), k_ranges, strict=True):
        keys = np.concatenate([np.arange(lo, hi) for lo, hi in ranges])
        offsets = np.append(0, np.cumsum(ranges[:, 1] - ranges[:, 0]))
        packed = np.stack([offsets[:-1], offsets[1:]], 1)
        step = max(PAIRS // max(len(keys), 1), 1)
        for row in range(first, last, step):
            n = min(step, last - row)
            bands = _planner.from_dense(_evaluate(mask_mod, b, h, row, n, keys, device))
            found.append(_planner.shift(_planner.remap(bands, whole_range(n), packed, ranges[:, 0]), row, 0))
    return np.concatenate(found) if found else np.empty((0, 7), np.int64)


def _evaluate(
    mask_mod: MaskMod, b: int, h: int, first_row: int, n_rows: int, keys: IntArray, device: torch.device | str
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    b_idx, h_idx = (torch.tensor(i, device=device) for i in (b, h))
    table = torch.from_numpy(keys).to(device)

    def moved(_b: torch.Tensor, _h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return mask_mod(b_idx, h_idx, q_idx + first_row, table[kv_idx])

    visible = create_mask(moved, 1, 1, n_rows, len(keys), torch.device(device))[0, 0]
    if visible.dtype != torch.bool:
        raise TypeError(f"mask_mod must return a boolean tensor, got {visible.dtype}; compare it (x != 0) first")
    return visible.cpu().numpy()
