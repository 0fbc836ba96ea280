"""merge_state: the attention over two sets of keys becomes that over their union."""

from __future__ import annotations

from typing import Any

import torch

from torch_magi.ops._library import define, lib
from torch_magi.ops.autograd import wants_grad
from torch_magi.ops.dtensors import note_dtensors

Tensor = torch.Tensor

_merge = define(
    "merge_state(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
    lambda out_a, lse_a, out_b, lse_b: (out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)),
)


def merged_side_grad(
    side: Tensor, lse_side: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of one side of a merge, given the merged (out, lse).

    out = wa * a + wb * b with w = exp(lse_x - lse), so d lse_x = w * (dout . (x - out) + dlse).
    """
    empty = torch.isinf(lse_side)
    weight = torch.where(empty, 0.0, torch.exp(lse_side - lse))
    change = (dout * (side - out)).sum(-1)
    change = change if dlse is None else change + dlse
    dside = torch.where(empty[..., None], 0.0, weight[..., None] * dout)  # dout of an empty row may be anything
    return dside, torch.where(empty, 0.0, weight * change)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _merge(out_a, lse_a, out_b, lse_b)
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out_a, lse_a, out_b, lse_b, out, lse = ctx.saved_tensors
        return (
            *merged_side_grad(out_a, lse_a, out, lse, dout, dlse),
            *merged_side_grad(out_b, lse_b, out, lse, dout, dlse),
        )


def _autograd(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
    if wants_grad(out_a, lse_a, out_b, lse_b):
        return _Merge.apply(out_a, lse_a, out_b, lse_b)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _merge(out_a, lse_a, out_b, lse_b)


lib.impl("merge_state", _autograd, "Autograd")


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys. Differentiable.

    lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
    (FlashInfer's attention state, arXiv:2501.01005, section 2.2).

    An empty side, lse -inf, is the identity bit for bit; +inf, with which FlashAttention-2 marks an empty row,
    counts as -inf. Far-apart lse do not overflow.

    Args:
        out_a, out_b: [rows, heads, head_dim], float32 or float64.
        lse_a, lse_b: [rows, heads], the same dtype, natural logarithm.

    Returns:
        out [rows, heads, head_dim] and lse [rows, heads].

    Raises:
        RuntimeError: for shapes or dtypes that do not fit together.
    """
    note_dtensors(out_a)
    out, lse = _merge(out_a, lse_a, out_b, lse_b)
    return out, lse
