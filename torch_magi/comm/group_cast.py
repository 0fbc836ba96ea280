"""group_cast: send each row to the ranks that need it. With its adjoint, the sum of what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_magi.comm.exchange import add_returned, start_cast, start_reduce, wait
from torch_magi.comm.groups import Group, group_name_of
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.autograd import refuse_second_derivative, wants_grad
from torch_magi.ops.plan_types import COMM_PLAN, Size, plan_size
from torch_magi.plan import CommPlan

Tensor = torch.Tensor
Dtype = torch.dtype


def _cast(x: Tensor, plan: CommPlan, received: int, comm_dtype: Dtype, group_name: str) -> Tensor:
    arrived: Tensor = wait(start_cast(x.to(comm_dtype), plan, 0, received, group_name))
    return arrived.to(x.dtype)


def _reduce(
    x: Tensor, plan: CommPlan, sent: int, rows: int, comm_dtype: Dtype, reduce_dtype: Dtype, dtype: Dtype,
    group_name: str,
) -> Tensor:  # fmt: skip
    back = wait(start_reduce(x.to(comm_dtype), plan, 0, sent, group_name))
    if not (back.dtype == dtype and back.dtype.itemsize == 2 and reduce_dtype == torch.float32):
        back = back.to(reduce_dtype)  # else `add_returned` does the same without another copy of the rows
    return add_returned(back, plan, 0, rows).to(dtype)


class _GroupCast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: CommPlan, sent: int, received: int, comm_dtype: Dtype, reduce_dtype: Dtype,
        group_name: str,
    ) -> Tensor:  # fmt: skip
        ctx.plan, ctx.sent, ctx.rows, ctx.group_name = plan, sent, x.shape[0], group_name
        ctx.dtypes = (comm_dtype, reduce_dtype, x.dtype)
        return _cast(x, plan, received, comm_dtype, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        comm_dtype, reduce_dtype, dtype = ctx.dtypes
        dx = _reduce(grad, ctx.plan, ctx.sent, ctx.rows, comm_dtype, reduce_dtype, dtype, ctx.group_name)
        return dx, *(None,) * 6


class _GroupReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: CommPlan, sent: int, rows: int, comm_dtype: Dtype, reduce_dtype: Dtype,
        dtype: Dtype, group_name: str,
    ) -> Tensor:  # fmt: skip
        ctx.plan, ctx.received, ctx.group_name = plan, x.shape[0], group_name
        ctx.comm_dtype, ctx.dtype = comm_dtype, x.dtype
        return _reduce(x, plan, sent, rows, comm_dtype, reduce_dtype, dtype, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        dx = _cast(grad, ctx.plan, ctx.received, ctx.comm_dtype, ctx.group_name).to(ctx.dtype)
        return dx, *(None,) * 7


def _group_cast(
    x: Tensor, plan: CommPlan, sent: int, received: int, comm_dtype: Dtype, reduce_dtype: Dtype, group_name: str
) -> Tensor:
    if wants_grad(x):
        cast: Tensor = _GroupCast.apply(x, plan, sent, received, comm_dtype, reduce_dtype, group_name)  # type: ignore[no-untyped-call]
        return cast
    return _cast(x, plan, received, comm_dtype, group_name)


def _group_reduce(
    x: Tensor, plan: CommPlan, sent: int, rows: int, comm_dtype: Dtype, reduce_dtype: Dtype, dtype: Dtype,
    group_name: str,
) -> Tensor:  # fmt: skip
    arguments = (x, plan, sent, rows, comm_dtype, reduce_dtype, dtype, group_name)
    if wants_grad(x):
        reduced: Tensor = _GroupReduce.apply(*arguments)  # type: ignore[no-untyped-call]
        return reduced
    return _reduce(*arguments)


# These two decompose while they are traced, in forward and backward, so that a compiler sees start and wait.
lib.define(
    f"group_cast(Tensor x, {COMM_PLAN} plan, SymInt sent, SymInt received, ScalarType comm_dtype, "
    "ScalarType reduce_dtype, str group_name) -> Tensor",
    tags=PLAN_TAGS,
)
lib.impl("group_cast", _group_cast, "CompositeImplicitAutograd")
lib.define(
    f"group_reduce(Tensor x, {COMM_PLAN} plan, SymInt sent, SymInt rows, ScalarType comm_dtype, "
    "ScalarType reduce_dtype, ScalarType dtype, str group_name) -> Tensor",
    tags=PLAN_TAGS,
)
lib.impl("group_reduce", _group_reduce, "CompositeImplicitAutograd")


def group_cast(
    x: Tensor | Sequence[Tensor],
    comm_plan: CommPlan,
    group: Group,
    *,
    comm_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Any:
    """Send rows to the ranks that need them. Differentiable: its backward is `group_reduce`.

    Args:
        x: [comm_plan.num_rows, ...]; the local rows. Or several such tensors of one dtype, for example key and
            value, which then travel in one exchange.
        comm_plan: which rows go where; every rank holds its own part of the same exchange.
        group: ProcessGroup, one-dimensional DeviceMesh or group name; for a plan from `hierarchical_comm_plan` a
            DeviceMesh of shape (nodes, ranks per node). Every rank must call, also one with nothing to send or receive.
        comm_dtype: what rows, and in the backward their gradients, are rounded to while they travel; None: not
            rounded.
        reduce_dtype: of the sums in the backward, as in `group_reduce`.

    Returns:
        [comm_plan.num_received, ...] in the dtype of `x`; the rows from rank 0 first, or in the order of
        `hierarchical_comm_plan`. A tuple of them for several.

    Raises:
        TypeError: if `comm_plan`, `group` or a dtype is something else, or several tensors differ in dtype.
        ValueError: if the rows or the group's size are not those of the plan.
        RuntimeError: with TORCH_DISTRIBUTED_DEBUG=DETAIL, on every rank, if the ranks' plans contradict each other.
    """
    group_name = check_plan_and_group(comm_plan, group)
    parts = tensors_of(x)
    wire, sums = dtypes_of(parts[0].dtype, comm_dtype, reduce_dtype)
    rows = pack(parts)
    sent, received = plan_size(rows, comm_plan, Size.SENT), plan_size(rows, comm_plan, Size.RECEIVED)
    cast: Tensor = torch.ops.torch_magi.group_cast(rows, comm_plan, sent, received, wire, sums, group_name)
    return cast if isinstance(x, Tensor) else unpack(cast, parts)


def check_plan_and_group(comm_plan: CommPlan, group: Group) -> str:
    """Return the name of the group; TypeError or ValueError if it, or the plan, is not one."""
    if not isinstance(comm_plan, CommPlan):
        raise TypeError(f"comm_plan must be a CommPlan, got {type(comm_plan).__name__}; see CommPlan.from_splits")
    return group_name_of(group, comm_plan, nodes=True)


def tensors_of(x: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return one or several tensors as a tuple; TypeError or ValueError if they cannot travel together."""
    parts = (x,) if isinstance(x, Tensor) else tuple(x)
    if not parts:
        raise ValueError("x must be a tensor or several, got none")
    for part in parts:
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"x must be a tensor or several, got {type(part).__name__}")
        if not part.ndim:
            raise ValueError("x must have rows, got a tensor without dimensions")
    for part in parts[1:]:
        if part.dtype != parts[0].dtype:
            raise TypeError(f"tensors of one exchange must have one dtype, got {parts[0].dtype} and {part.dtype}")
        if part.shape[0] != parts[0].shape[0]:
            raise ValueError(
                f"tensors of one exchange must have as many rows, got {parts[0].shape[0]} and {part.shape[0]}"
            )
    return parts


def dtypes_of(dtype: Dtype, comm_dtype: Dtype | None, reduce_dtype: Dtype | None) -> tuple[Dtype, Dtype]:
    """Return the dtypes of rows while they travel and of their sums; TypeError if they make no sense."""
    for name, given in (("comm_dtype", comm_dtype), ("reduce_dtype", reduce_dtype)):
        if given is not None and not (dtype.is_floating_point and given.is_floating_point):
            raise TypeError(f"{name} must be a floating point dtype, for floating point rows, got {given} for {dtype}")
    if reduce_dtype not in (None, torch.float32, torch.float64):
        raise TypeError(f"reduce_dtype must be torch.float32 or torch.float64, got {reduce_dtype}")
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return comm_dtype or dtype, reduce_dtype or sums


def pack(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the rows of several tensors side by side, [rows, ...]."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.reshape(part.shape[0], math.prod(part.shape[1:])) for part in parts], 1)


def unpack(rows: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors, shaped `like` others but for the number of rows, that `pack` put side by side."""
    if len(like) == 1:
        return (rows,)
    columns = rows.split([math.prod(part.shape[1:]) for part in like], 1)
    return tuple(c.reshape(rows.shape[0], *part.shape[1:]) for c, part in zip(columns, like, strict=True))
