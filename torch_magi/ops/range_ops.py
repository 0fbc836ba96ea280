"""range_gather and range_scatter_add: take ranges of rows out of a tensor, and add such rows up again."""

from __future__ import annotations

from typing import Any

import torch

from torch_magi.ops._library import define, lib
from torch_magi.ops.autograd import wants_grad
from torch_magi.ops.dtensors import note_dtensors

Tensor = torch.Tensor

_gather = define(
    "range_gather(Tensor x, Tensor ranges, SymInt n_out) -> Tensor",
    lambda x, ranges, n_out: x.new_empty((n_out, *x.shape[1:])),
)
_scatter_add = define(
    "range_scatter_add(Tensor y, Tensor ranges, SymInt n_rows) -> Tensor",
    lambda y, ranges, n_rows: y.new_empty((n_rows, *y.shape[1:])),
)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: Tensor, n_out: int) -> Tensor:
        ctx.save_for_backward(ranges)
        ctx.n_rows = x.shape[0]
        with torch._C._AutoDispatchBelowAutograd():
            rows: Tensor = _gather(x, ranges, n_out)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter_add(grad, *ctx.saved_tensors, ctx.n_rows), None, None


class _ScatterAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranges: Tensor, n_rows: int) -> Tensor:
        ctx.save_for_backward(ranges)
        ctx.n_out = y.shape[0]
        with torch._C._AutoDispatchBelowAutograd():
            added: Tensor = _scatter_add(y, ranges, n_rows)
        return added

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, *ctx.saved_tensors, ctx.n_out), None, None


def _autograd(function: Any, op: Any) -> Any:
    def kernel(x: Tensor, ranges: Tensor, size: int) -> Tensor:
        if wants_grad(x):
            result: Tensor = function.apply(x, ranges, size)
            return result
        with torch._C._AutoDispatchBelowAutograd():
            result = op(x, ranges, size)
        return result

    return kernel


lib.impl("range_gather", _autograd(_Gather, _gather), "Autograd")
lib.impl("range_scatter_add", _autograd(_ScatterAdd, _scatter_add), "Autograd")


def range_gather(x: Tensor, ranges: Tensor, n_out: int) -> Tensor:
    """Return the rows of `x` in `ranges`, one range behind the other. Differentiable.

    Args:
        x: [rows, ...].
        ranges: int64 [n, 2], on the device of `x`; half-open ranges of rows, which may overlap and repeat.
            On a GPU they are not checked against `x`.
        n_out: the number of rows in all ranges.

    Returns:
        [n_out, ...].

    Raises:
        RuntimeError: for ranges outside `x`, or another number of rows (CPU).
    """
    note_dtensors(x)
    rows: Tensor = _gather(x, ranges, n_out)
    return rows


def range_scatter_add(y: Tensor, ranges: Tensor, n_rows: int) -> Tensor:
    """Return zeros with the rows of `y` added where `range_gather` would have taken them. Differentiable.

    16-bit rows are added in float32. The order of the sums is that of the ranges: the bits are the same every
    time.

    Args:
        y: [rows in all ranges, ...].
        ranges: int64 [n, 2], on the device of `y`. On a GPU they are not checked against `y` and `n_rows`.
        n_rows: rows of the result.

    Returns:
        [n_rows, ...].

    Raises:
        RuntimeError: for ranges outside the result, or another number of rows (CPU).
    """
    note_dtensors(y)
    added: Tensor = _scatter_add(y, ranges, n_rows)
    return added
