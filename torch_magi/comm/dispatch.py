"""dispatch and undispatch: from the whole sequence to this rank's rows, and back."""

from __future__ import annotations

from typing import Any, Literal

import torch

from torch_magi.comm.exchange import wait
from torch_magi.comm.groups import Group, group_name_of
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.autograd import refuse_second_derivative, wants_grad
from torch_magi.ops.dtensors import note_dtensors
from torch_magi.ops.plan_types import ATTN_PLAN, Size, plan_size
from torch_magi.plan import AttnPlan

Tensor = torch.Tensor
_functional = torch.ops._c10d_functional

# Three views of the sequence, as row counts: whole [total], mine [local], and every rank's rows padded to the
# longest shard and laid end to end [cp_size * padded]. `rows_between` moves rows from one view to another.
WHOLE, LOCAL, SHARDS, SHARD = "whole", "local", "shards", "shard"


def _source_rows(plan: AttnPlan, source: str, target: str) -> tuple[Tensor, Tensor | None, int]:
    """Return (source rows, target rows or None for all in order, number of target rows)."""
    dispatch, rank = plan.dispatch, plan.cp_rank
    mine = torch.from_numpy(dispatch.rows(rank))
    padded = max(dispatch.tokens_per_rank)
    if (source, target) == (WHOLE, LOCAL):
        return mine, None, len(mine)
    if (source, target) == (LOCAL, WHOLE):
        return torch.arange(len(mine)), mine, dispatch.total_tokens
    if (source, target) == (LOCAL, SHARD):
        return torch.arange(len(mine)), torch.arange(len(mine)), padded
    if (source, target) == (SHARD, LOCAL):
        return torch.arange(len(mine)), None, len(mine)
    whole = torch.cat([torch.from_numpy(dispatch.rows(r)) for r in range(plan.cp_size)])
    slots = torch.cat([torch.arange(n) + r * padded for r, n in enumerate(dispatch.tokens_per_rank)])
    if (source, target) == (SHARDS, WHOLE):
        return slots[torch.argsort(whole)], None, dispatch.total_tokens
    assert (source, target) == (WHOLE, SHARDS)
    return whole, slots, plan.cp_size * padded


def _rows_between(x: Tensor, plan: AttnPlan, source: str, target: str, num_rows: int) -> Tensor:
    expected = {WHOLE: plan.dispatch.total_tokens, LOCAL: plan.num_tokens_local}.get(source)
    if expected is not None:
        _check_rows(x, expected)

    def make() -> tuple[Tensor, Tensor | None, int]:
        taken, put, rows = _source_rows(plan, source, target)
        return taken.to(x.device), None if put is None else put.to(x.device), rows

    taken, put, rows = plan.cached((source, target, x.device), make)
    if put is None:
        return x.index_select(0, taken)
    return x.new_zeros((rows, *x.shape[1:])).index_copy_(0, put, x.index_select(0, taken))


def _check_rows(x: Tensor, expected: int) -> None:
    if x.shape[0] != expected:
        raise ValueError(f"x must have {expected} rows as the plan says, got {x.shape[0]}")


lib.define(
    f"rows_between(Tensor x, {ATTN_PLAN} plan, str source, str target, SymInt num_rows) -> Tensor", tags=PLAN_TAGS
)
lib.impl("rows_between", _rows_between, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_magi::rows_between",
    lambda x, plan, source, target, num_rows: x.new_empty((num_rows, *x.shape[1:])),
    lib=lib,
)
rows_between = torch.ops.torch_magi.rows_between.default


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttnPlan, local: int) -> Tensor:
        ctx.plan, ctx.total = plan, x.shape[0]
        moved: Tensor = rows_between(x, plan, WHOLE, LOCAL, local)
        return moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        return rows_between(grad, ctx.plan, LOCAL, WHOLE, ctx.total), None, None


def _dispatch(x: Tensor, plan: AttnPlan, local: int) -> Tensor:
    if wants_grad(x):
        moved: Tensor = _Dispatch.apply(x, plan, local)  # type: ignore[no-untyped-call]
    else:
        moved = rows_between(x, plan, WHOLE, LOCAL, local)
    return moved


def _gather(x: Tensor, plan: AttnPlan, padded: int, total: int, cp_size: int, group_name: str) -> Tensor:
    shard = rows_between(x, plan, LOCAL, SHARD, padded)
    shards = wait(_functional.all_gather_into_tensor(shard, cp_size, group_name))
    moved: Tensor = rows_between(shards, plan, SHARDS, WHOLE, total)
    return moved


class _Undispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttnPlan, padded: int, total: int, cp_size: int, group_name: str,
                grad: str) -> Tensor:  # fmt: skip
        ctx.plan, ctx.local, ctx.padded, ctx.cp_size = plan, x.shape[0], padded, cp_size
        ctx.group_name, ctx.grad = group_name, grad
        return _gather(x, plan, padded, total, cp_size, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(grad)
        rest = (None,) * 6
        if ctx.grad == "replicated":
            return rows_between(grad, ctx.plan, WHOLE, LOCAL, ctx.local), *rest
        dtype = grad.dtype
        if dtype in (torch.bfloat16, torch.float16):
            grad = grad.float()
        shards = rows_between(grad, ctx.plan, WHOLE, SHARDS, ctx.cp_size * ctx.padded)
        shard = wait(_functional.reduce_scatter_tensor(shards, "sum", ctx.cp_size, ctx.group_name))
        return rows_between(shard, ctx.plan, SHARD, LOCAL, ctx.local).to(dtype), *rest


def _undispatch(x: Tensor, plan: AttnPlan, padded: int, total: int, cp_size: int, group_name: str, grad: str) -> Tensor:
    if wants_grad(x):
        moved: Tensor = _Undispatch.apply(x, plan, padded, total, cp_size, group_name, grad)  # type: ignore[no-untyped-call]
        return moved
    return _gather(x, plan, padded, total, cp_size, group_name)


lib.define(f"dispatch(Tensor x, {ATTN_PLAN} plan, SymInt local) -> Tensor", tags=PLAN_TAGS)
lib.impl("dispatch", _dispatch, "CompositeImplicitAutograd")
lib.define(
    f"undispatch(Tensor x, {ATTN_PLAN} plan, SymInt padded, SymInt total, int cp_size, str group_name, str grad)"
    " -> Tensor",
    tags=PLAN_TAGS,
)
lib.impl("undispatch", _undispatch, "CompositeImplicitAutograd")


def dispatch(x: Tensor, plan: AttnPlan) -> Tensor:
    """Return this rank's rows of a tensor that every rank holds whole. Communicates nothing.

    The gradient of `x` on each rank is that of the rank's own rows, zero elsewhere; the sum over ranks is the
    gradient of the whole.

    Args:
        x: [total_tokens, ...]; flatten a batch [B, S, ...] first.
        plan: who holds which rows.

    Returns:
        [plan.num_tokens_local, ...]; row i is row plan.position_ids[i] of x.

    Raises:
        TypeError: if `plan` is not an AttnPlan, or `x` a DTensor.
        ValueError: if `x` has another number of rows than the plan.
    """
    check_plan(plan)
    _refuse_dtensor("dispatch", x)
    moved: Tensor = torch.ops.torch_magi.dispatch(x, plan, plan_size(x, plan, Size.LOCAL))
    return moved


def undispatch(
    x: Tensor, plan: AttnPlan, group: Group | None, *, grad: Literal["replicated", "partial"] = "replicated"
) -> Tensor:
    """Return the whole tensor, on every rank, from the ranks' rows: the inverse of `dispatch`.

    Args:
        x: [plan.num_tokens_local, ...]; this rank's rows.
        plan: who holds which rows.
        group: ProcessGroup, one-dimensional DeviceMesh or group name; may be None for one rank.
        grad: what the gradient of the result is on each rank. "replicated": every rank computes the same loss
            from the whole tensor, so every rank already holds the whole gradient; the backward takes the
            rank's rows and communicates nothing. "partial": the ranks' losses differ and the loss that is
            meant is their sum; the backward sums the gradients over the ranks.

    Returns:
        [total_tokens, ...].

    Raises:
        TypeError: if `plan` or `group` is something else, or `x` a DTensor.
        ValueError: if the rows, the group's size or `grad` do not fit.
    """
    check_plan(plan)
    _refuse_dtensor("undispatch", x)
    if grad not in ("replicated", "partial"):
        raise ValueError(f"grad must be 'replicated' or 'partial', got {grad!r}")
    group_name = group_name_of(group, plan)
    if plan.cp_size == 1:
        if not torch.compiler.is_compiling():
            _check_rows(x, plan.num_tokens_local)
        return x
    padded, total = plan_size(x, plan, Size.PADDED), plan_size(x, plan, Size.TOTAL)
    moved: Tensor = torch.ops.torch_magi.undispatch(x, plan, padded, total, plan.cp_size, group_name, grad)
    return moved


def check_plan(plan: AttnPlan) -> None:
    """Raise TypeError if `plan` is something else than an AttnPlan."""
    if not isinstance(plan, AttnPlan):
        raise TypeError(f"plan must be an AttnPlan, got {type(plan).__name__}; make one with make_attn_plan")


def _refuse_dtensor(name: str, x: Tensor) -> None:
    if note_dtensors(x):
        raise TypeError(f"x must be a local tensor, got a DTensor; see torch_magi.tensor.{name}")
