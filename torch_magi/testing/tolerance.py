"""When a result is accepted: one rule for every kernel, backend and number of ranks.

    err(x) = max |x - truth|
    err(kernel) <= 2 * err(low) + one rounding band of the dtype at max |truth|
    err(kernel) <= 1e-12 * max(1, max |truth|)                  for float64

`truth` is dense float64 attention, `low` the same done naively in the tested dtype, and err(low) the largest
error of a few orders of summation (see `reference.run_lows`). Results are finite everywhere, but for
infinities at exactly the positions where truth has them.

max_logits of 16-bit inputs has a band for every 16 dimensions of a head: tensor cores add 16 products at a time to
a float32 sum and cut off what float32 arithmetic rounds, up to a whole unit in the last place each time. The largest
of many such logits is found, so the errors do not average out as they do in every other result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_magi.masks import AttnMask
from torch_magi.testing.reference import Results, Runner, run_lows, run_reference

Tensor = torch.Tensor
FLOAT64_TOLERANCE = 1e-12


def rounding_band(dtype: torch.dtype, magnitude: float) -> float:
    """Return how far apart numbers of `dtype` lie at `magnitude`, at most.

    Example:
        >>> rounding_band(torch.bfloat16, 1.0) == 2.0**-7
        True
    """
    info = torch.finfo(dtype)
    return float(info.eps * max(magnitude, info.tiny))


def assert_close_to_truth(
    actual: Tensor,
    truth: Tensor,
    low: Tensor | Sequence[Tensor] | None,
    dtype: torch.dtype | None = None,
    *,
    name: str = "result",
    bands: int = 1,
) -> None:
    """Accept or refuse a result by the rule at the top of this module.

    Args:
        actual: the result under test.
        truth: float64, of the same shape.
        low: of the same shape, or several of them; None stands for an error of 0, and is what float64 results
            take.
        dtype: of the inputs of the computation; None: that of `actual`.
        name: what the result is called where it fails.
        bands: rounding bands that are allowed on top of the error of `low`.

    Raises:
        AssertionError: saying where the error is largest, how large, and how large it may be.
    """
    dtype = actual.dtype if dtype is None else dtype
    if actual.shape != truth.shape:
        raise AssertionError(f"{name} must have shape {list(truth.shape)}, got {list(actual.shape)}")
    if not actual.numel():
        return
    found, wanted = actual.detach().double().cpu(), truth.detach().double().cpu()
    finite = wanted.isfinite()
    _check_infinities(found, wanted, name)
    found, wanted = torch.where(finite, found, 0.0), torch.where(finite, wanted, 0.0)
    error, largest = (found - wanted).abs(), float(wanted.abs().max())
    if dtype == torch.float64:
        low_error, bound = 0.0, FLOAT64_TOLERANCE * max(1.0, largest)
    else:
        lows = [low] if isinstance(low, Tensor) else low or []
        low_error = max((_error_of_low(x, wanted, finite, name) for x in lows), default=0.0)
        bound = 2 * low_error + bands * rounding_band(dtype, largest)
    worst = float(error.max())
    if worst <= bound:
        return
    at = _position(error, int(error.argmax()))
    count = int((error > bound).sum())
    raise AssertionError(
        f"{name} is off by {worst:.3e} at {at} (got {found[at]:.9g}, truth {wanted[at]:.9g}), "
        f"{worst / bound:.2f} times the allowed {bound:.3e} for {str(dtype).removeprefix('torch.')} "
        f"(error of low {low_error:.3e}, max |truth| {largest:.3e}); {count} of {error.numel()} elements "
        "exceed it" + _where(error > bound)
    )


def _check_infinities(found: Tensor, wanted: Tensor, name: str) -> None:
    wrong = found.isnan() | (found.isinf() != wanted.isinf()) | (found.isinf() & (found.sign() != wanted.sign()))
    if wanted.isnan().any():
        raise AssertionError(f"the truth of {name} has NaN at {_position(wanted, int(wanted.isnan().int().argmax()))}")
    if wrong.any():
        at = _position(found, int(wrong.int().argmax()))
        raise AssertionError(
            f"{name} is {found[at]} at {at} where truth is {wanted[at]:.9g}; {int(wrong.sum())} of "
            f"{found.numel()} elements are like that" + _where(wrong)
        )


def _error_of_low(low: Tensor, wanted: Tensor, finite: Tensor, name: str) -> float:
    error = torch.where(finite, (low.detach().double().cpu() - wanted).abs(), 0.0)
    if not error.isfinite().all():
        raise AssertionError(f"low of {name} is not finite, so it allows anything; test with smaller inputs")
    return float(error.max())


def _position(x: Tensor, flat: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape))


def _where(wrong: Tensor) -> str:
    """Return which rows (dimension 0) are wrong, as ranges."""
    if wrong.ndim < 2:
        return ""
    rows = wrong.flatten(1).any(1).nonzero().flatten().tolist()
    ranges: list[list[int]] = []
    for r in rows:
        if ranges and ranges[-1][1] == r:
            ranges[-1][1] = r + 1
        else:
            ranges.append([r, r + 1])
    shown = ", ".join(f"[{a}, {b})" for a, b in ranges[:5])
    return f", in rows {shown}" + (f" and {len(ranges) - 5} more ranges" if len(ranges) > 5 else "")


def assert_results_close(
    actual: Results, truth: Results, low: Sequence[Results], dtype: torch.dtype, head_dim: int
) -> None:
    """Apply `assert_close_to_truth` to every result of an attention call.

    Args:
        actual: the results under test; max_logits may be None.
        truth, low: of `run_reference` and `run_lows`. For float64 inputs low is computed in float32, for the
            results that are float32 even then: max_logits and dsink.
        dtype, head_dim: of query, key and value.

    Raises:
        AssertionError: naming every result that is off, or one that has the wrong dtype.
    """
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = {"lse": accumulation, "max_logits": torch.float32, "dsink": torch.float32}
    failed = []
    for name in Results._fields:
        x, y = getattr(actual, name), getattr(truth, name)
        if x is None and (name == "max_logits" or y is None):
            continue
        if x is None or y is None:
            raise AssertionError(f"{name} is {'missing' if x is None else 'present only in the result'}")
        expected = dtypes.get(name, dtype)
        if x.dtype != expected:
            raise AssertionError(f"{name} must be {expected} for {dtype} inputs, got {x.dtype}")
        rule = expected if name in dtypes else dtype
        bands = max(head_dim // 16, 1) if name == "max_logits" and dtype.itemsize == 2 else 1
        z = [getattr(one, name) for one in low] if rule != torch.float64 else None
        try:
            assert_close_to_truth(x, y, z, rule, name=name, bands=bands)
        except AssertionError as error:
            failed.append(str(error))
    if failed:
        raise AssertionError("\n".join(failed))


def check_attention(
    runner: Runner, query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any
) -> Results:
    """Run attention forward and backward, and compare everything with the references.

    Args:
        runner: what is tested; see `reference.make_runner`.
        query, key, value, mask: as in `reference.reference_attention`.
        options: scale, softcap, sink, dout, dlse; backward runs where dout or dlse is given.

    Returns:
        The results of the runner.

    Raises:
        AssertionError: if a result is refused.

    Example:
        >>> from torch_magi.testing import check_attention, named_masks, random_inputs, run_low
        >>> mask = named_masks()["causal"]
        >>> x = random_inputs(mask, dtype=torch.float32, seed=0)
        >>> results = check_attention(run_low, x.query, x.key, x.value, mask, dout=x.dout)
    """
    actual = runner(query, key, value, mask, **options)
    truth = run_reference(query, key, value, mask, **options)
    q, k, v = (x.float() if x.dtype == torch.float64 else x for x in (query, key, value))
    low = run_lows(q, k, v, mask, **options)
    assert_results_close(actual, truth, low, query.dtype, query.shape[2])
    return actual
