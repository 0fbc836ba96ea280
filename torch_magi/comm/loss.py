"""cp_mean_loss: the mean of a loss over the tokens of all ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch

from torch_magi.comm.exchange import wait
from torch_magi.comm.groups import Group, group_name_of
from torch_magi.ops._library import TAGS, lib
from torch_magi.ops.autograd import wants_grad

Tensor = torch.Tensor


def _mean(loss_sum: Tensor, count: Tensor, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, the number of tokens (1 where there are none) and the number of ranks."""
    # float64, in which counts are exact; the number of ranks comes along rather than from the group, whose size
    # would become a constant of compiled code that is kept under the group's name.
    mine = torch.stack([loss_sum.double(), count.double(), torch.ones_like(count, dtype=torch.float64)])
    total, number, ranks = (
        wait(torch.ops._c10d_functional.all_reduce(mine, "sum", group_name)) if group_name else mine
    ).unbind()
    number = torch.where(number == 0, 1.0, number)
    return (total / number).to(loss_sum.dtype), number, ranks


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, count: Tensor, group_name: str, averaged: bool) -> Tensor:
        mean, number, ranks = _mean(loss_sum, count, group_name)
        ctx.save_for_backward(ranks / number if averaged else 1.0 / number)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return (grad * weight).to(grad.dtype), None, None, None


def _cp_mean_loss(loss_sum: Tensor, count: Tensor, group_name: str, averaged: bool) -> Tensor:
    if wants_grad(loss_sum):
        mean: Tensor = _MeanLoss.apply(loss_sum, count, group_name, averaged)  # type: ignore[no-untyped-call]
        return mean
    return _mean(loss_sum, count, group_name)[0]


# Decomposes while it is traced, so that a compiler sees the collective and its wait.
lib.define("cp_mean_loss(Tensor loss_sum, Tensor count, str group_name, bool averaged) -> Tensor", tags=TAGS)
lib.impl("cp_mean_loss", _cp_mean_loss, "CompositeImplicitAutograd")


def cp_mean_loss(
    loss_sum: Tensor,
    count: Tensor | int,
    group: Group | None,
    *,
    grad_reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Return the mean of a loss over all tokens of all ranks. Differentiable; the backward communicates nothing.

    The mean of the ranks' own means is something else where ranks hold different numbers of valid tokens. Each
    rank's gradient is that of the result with respect to its own `loss_sum`, grad / (tokens of all ranks), so the
    gradients of parameters are partial: their sum over ranks is the gradient of the whole.

    Args:
        loss_sum: [...]; the sum of the loss of this rank's valid tokens; several losses at once if not a scalar.
        count: [...] like `loss_sum`, or int; how many tokens, or the sum of their weights. 0 is ordinary: where
            all ranks have 0, the result is the sum itself.
        group: ProcessGroup, one-dimensional DeviceMesh or group name; may be None for one rank.
        grad_reduction: how the gradients of parameters are combined over the ranks of `group` afterwards. "sum":
            as they are. "mean": with a wrapper that averages them, as DDP and FSDP do unless told otherwise;
            gradients are then multiplied by the number of ranks.

    Returns:
        [...] in the dtype of `loss_sum`; the same on every rank.

    Raises:
        TypeError: if `group` is something else, or `loss_sum` holds integers.
        ValueError: if `count` has another shape than `loss_sum`, or for another `grad_reduction`.

    Example:
        >>> import torch
        >>> from torch_magi import cp_mean_loss
        >>> cp_mean_loss(torch.tensor(6.0), 4, None)
        tensor(1.5000)
    """
    if grad_reduction not in ("sum", "mean"):
        raise ValueError(f"grad_reduction must be 'sum' or 'mean', got {grad_reduction!r}")
    if not loss_sum.is_floating_point():
        raise TypeError(f"loss_sum must be floating point, got {loss_sum.dtype}")
    number = count if isinstance(count, Tensor) else torch.full_like(loss_sum, count, dtype=torch.float64)
    if number.shape != loss_sum.shape:
        raise ValueError(f"count must have shape {list(loss_sum.shape)} as loss_sum, got {list(number.shape)}")
    group_name = group_name_of(group)
    mean: Tensor = torch.ops.torch_magi.cp_mean_loss(loss_sum, number, group_name, grad_reduction == "mean")
    return mean
