"""group_cast and group_reduce: send each row to the ranks that need it, and sum what comes back."""

from __future__ import annotations

from typing import Any

import torch

from torch_magi.comm.exchange import add_returned, start_cast, start_reduce, wait
from torch_magi.comm.groups import Group, group_name_of
from torch_magi.ops._library import TAGS, lib
from torch_magi.ops.autograd import wants_grad
from torch_magi.ops.plan_types import COMM_PLAN, Size, plan_size
from torch_magi.plan import CommPlan

Tensor = torch.Tensor


def _cast(x: Tensor, plan: CommPlan, received: int, group_name: str) -> Tensor:
    arrived: Tensor = wait(start_cast(x, plan, 0, received, group_name))
    return arrived


def _reduce(x: Tensor, plan: CommPlan, sent: int, rows: int, group_name: str) -> Tensor:
    return add_returned(wait(start_reduce(x, plan, 0, sent, group_name)), plan, 0, rows)


class _GroupCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: CommPlan, sent: int, received: int, group_name: str) -> Tensor:
        ctx.plan, ctx.sent, ctx.rows, ctx.group_name = plan, sent, x.shape[0], group_name
        return _cast(x, plan, received, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce(grad, ctx.plan, ctx.sent, ctx.rows, ctx.group_name), None, None, None, None


class _GroupReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: CommPlan, sent: int, rows: int, group_name: str) -> Tensor:
        ctx.plan, ctx.received, ctx.group_name = plan, x.shape[0], group_name
        return _reduce(x, plan, sent, rows, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _cast(grad, ctx.plan, ctx.received, ctx.group_name), None, None, None, None


def _group_cast(x: Tensor, plan: CommPlan, sent: int, received: int, group_name: str) -> Tensor:
    if wants_grad(x):
        cast: Tensor = _GroupCast.apply(x, plan, sent, received, group_name)  # type: ignore[no-untyped-call]
        return cast
    return _cast(x, plan, received, group_name)


def _group_reduce(x: Tensor, plan: CommPlan, sent: int, rows: int, group_name: str) -> Tensor:
    if wants_grad(x):
        reduced: Tensor = _GroupReduce.apply(x, plan, sent, rows, group_name)  # type: ignore[no-untyped-call]
        return reduced
    return _reduce(x, plan, sent, rows, group_name)


# These two decompose while they are traced, in forward and backward, so that a compiler sees start and wait.
for _name, _kernel in (("group_cast", _group_cast), ("group_reduce", _group_reduce)):
    lib.define(f"{_name}(Tensor x, {COMM_PLAN} plan, SymInt sent, SymInt rows, str group_name) -> Tensor", tags=TAGS)
    lib.impl(_name, _kernel, "CompositeImplicitAutograd")


def group_cast(x: Tensor, comm_plan: CommPlan, group: Group) -> Tensor:
    """Send rows to the ranks that need them. Differentiable: its backward is `group_reduce`.

    Args:
        x: [comm_plan.num_rows, ...]; the local rows.
        comm_plan: which rows go where; every rank holds its own part of the same exchange.
        group: ProcessGroup, one-dimensional DeviceMesh or group name. Every rank of it must call, also one
            with nothing to send or receive.

    Returns:
        [comm_plan.num_received, ...]; the rows from rank 0 first.

    Raises:
        TypeError: if `comm_plan` or `group` is something else.
        ValueError: if the rows or the group's size are not those of the plan.
    """
    group_name = _check(comm_plan, group)
    sent, received = plan_size(x, comm_plan, Size.SENT), plan_size(x, comm_plan, Size.RECEIVED)
    cast: Tensor = torch.ops.torch_magi.group_cast(x, comm_plan, sent, received, group_name)
    return cast


def group_reduce(x: Tensor, comm_plan: CommPlan, group: Group, op: str = "sum") -> Tensor:
    """Return rows to where `group_cast` took them from, and add them up. Its backward is `group_cast`.

    Args:
        x: [comm_plan.num_received, ...]; one row for every row that `group_cast` returned.
        comm_plan, group: as given to `group_cast`.
        op: "sum".

    Returns:
        [comm_plan.num_rows, ...]; the sum over all copies of a row, zero for a row that was sent nowhere.
        16-bit rows are added in float32. The order of the sum is fixed.

    Raises:
        TypeError, ValueError: as `group_cast`; ValueError for another `op`.
    """
    if op != "sum":
        raise ValueError(f"op must be 'sum', got {op!r}")
    group_name = _check(comm_plan, group)
    sent, rows = plan_size(x, comm_plan, Size.SENT), plan_size(x, comm_plan, Size.LOCAL)
    reduced: Tensor = torch.ops.torch_magi.group_reduce(x, comm_plan, sent, rows, group_name)
    return reduced


def _check(comm_plan: CommPlan, group: Group) -> str:
    if not isinstance(comm_plan, CommPlan):
        raise TypeError(f"comm_plan must be a CommPlan, got {type(comm_plan).__name__}; see CommPlan.from_splits")
    return group_name_of(group, comm_plan.size)
