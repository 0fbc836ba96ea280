"""group_reduce: rows return to where group_cast took them from, and are added up, averaged or merged by their lse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from torch_magi.comm.exchange import merge_returned, start_cast, start_reduce, wait
from torch_magi.comm.group_cast import check_plan_and_group, dtypes_of, pack, tensors_of, unpack
from torch_magi.comm.groups import Group
from torch_magi.comm.lse_columns import attach, detach
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.autograd import refuse_second_derivative, wants_grad
from torch_magi.ops.merge_state import merge_state
from torch_magi.ops.plan_types import COMM_PLAN, Size, plan_size
from torch_magi.plan import CommPlan

Tensor = torch.Tensor
Dtype = torch.dtype


def _num_copies(anchor: Tensor, plan: CommPlan, rows: int) -> Tensor:
    return plan.num_copies_on(anchor.device)


lib.define(f"num_copies(Tensor anchor, {COMM_PLAN} plan, SymInt rows) -> Tensor", tags=PLAN_TAGS)
lib.impl("num_copies", _num_copies, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_magi::num_copies", lambda anchor, plan, rows: anchor.new_empty(rows, dtype=torch.int64), lib=lib
)


def _merge(
    x: Tensor, lse: Tensor, plan: CommPlan, sent: int, rows: int, comm_dtype: Dtype, reduce_dtype: Dtype,
    group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    back = wait(start_reduce(attach(x, [lse], comm_dtype), plan, 0, sent, group_name, merge=True))
    x, lse = detach(back, 1, reduce_dtype)
    return merge_returned(x, lse, plan, rows)


class _GroupMerge(torch.autograd.Function):
    """out = sum of w_c x_c, w_c = exp(lse_c - lse), over the copies c of a row.

    dx_c = w_c dout, dlse_c = w_c (dout . x_c - delta), delta = dout . out - dlse: what a copy needs to know is dout,
    lse and delta of its row, which `group_cast` brings.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lse: Tensor, plan: CommPlan, sent: int, rows: int, comm_dtype: Dtype,
        reduce_dtype: Dtype, group_name: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse_out = _merge(x, lse, plan, sent, rows, comm_dtype, reduce_dtype, group_name)
        ctx.save_for_backward(x, lse, out, lse_out)
        ctx.plan, ctx.comm_dtype, ctx.group_name = plan, comm_dtype, group_name
        return out, lse_out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(dout, dlse)
        x, lse, out, lse_out = ctx.saved_tensors
        dout = dout.to(ctx.comm_dtype).to(out.dtype)  # as it arrives: so the change of a row's copies still adds up
        delta = (dout * out).sum(-1) - dlse
        rows = attach(dout, [lse_out, delta], ctx.comm_dtype)
        arrived = wait(start_cast(rows, ctx.plan, 0, x.shape[0], ctx.group_name))
        dout, lse_out, delta = detach(arrived, 2, out.dtype)
        empty = torch.isinf(lse)
        weight = torch.exp(lse - lse_out)
        dx = torch.where(empty[..., None], 0.0, weight[..., None] * dout)
        change = torch.where(empty, 0.0, weight * ((dout * x).sum(-1) - delta))
        return dx.to(x.dtype), change.to(lse.dtype), *(None,) * 6


def _group_merge(x: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if wants_grad(x, lse):
        merged: tuple[Tensor, Tensor] = _GroupMerge.apply(x, lse, *rest)  # type: ignore[no-untyped-call]
        return merged
    return _merge(x, lse, *rest)


# Decomposes while it is traced, so that a compiler sees start and wait.
lib.define(
    f"group_merge(Tensor x, Tensor lse, {COMM_PLAN} plan, SymInt sent, SymInt rows, ScalarType comm_dtype, "
    "ScalarType reduce_dtype, str group_name) -> (Tensor out, Tensor lse_out)",
    tags=PLAN_TAGS,
)
lib.impl("group_merge", _group_merge, "CompositeImplicitAutograd")


def group_reduce(
    x: Tensor | Sequence[Tensor],
    comm_plan: CommPlan,
    group: Group,
    op: Literal["sum", "avg", "lse"] = "sum",
    *,
    into: Tensor | Sequence[Tensor] | None = None,
    comm_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Any:
    """Return rows to where `group_cast` took them from, and combine the copies of each row. Differentiable.

    Args:
        x: [comm_plan.num_received, ...]; one row for every row that `group_cast` returned. Or several such tensors
            of one dtype, which then travel in one exchange. For "lse" the pair (out, lse) of partial attention:
            out [num_received, heads, head_dim] and lse [num_received, heads], float32 or float64.
        comm_plan, group: as given to `group_cast`.
        op: "sum", whose backward is `group_cast`; "avg", the mean of the copies of a row; "lse", which merges the
            attention of the same queries over disjoint sets of keys as `merge_state` does.
        into: [comm_plan.num_rows, ...], shaped as the result: counts as one more copy of each row, is overwritten
            with the result, and returned. Several for several. It is rounded once, to its own dtype.
        comm_dtype: what rows, and in the backward their gradients, are rounded to while they travel; None: not
            rounded. The lse of bfloat16 rows travels with all its bits; float16, which cannot hold it, is refused
            for "lse", and such rows travel as float32.
        reduce_dtype: torch.float32 or torch.float64; what copies are combined in, in a fixed order. None: float64
            for float64 rows, else float32.

    Returns:
        [comm_plan.num_rows, ...] in the dtype of `x`, or `into`; a tuple of them for several. A row that was sent
        nowhere is 0, and its lse -inf.

    Raises:
        TypeError: if `comm_plan`, `group` or a dtype is something else, or several tensors differ in dtype.
        ValueError: for another `op`, and if the rows or the group's size are not those of the plan.
        RuntimeError: as `group_cast`.
    """
    if op not in ("sum", "avg", "lse"):
        raise ValueError(f"op must be 'sum', 'avg' or 'lse', got {op!r}")
    group_name = check_plan_and_group(comm_plan, group)
    if op == "lse":
        return _reduce_lse(x, comm_plan, group_name, into, comm_dtype, reduce_dtype)
    parts = tensors_of(x)
    if not parts[0].is_floating_point():
        raise TypeError(f"x must be floating point, got {parts[0].dtype}")
    wire, sums = dtypes_of(parts[0].dtype, comm_dtype, reduce_dtype)
    targets = None if into is None else _targets(into, isinstance(x, Tensor), len(parts))
    packed = pack(parts)
    sent = plan_size(packed, comm_plan, Size.SENT)
    rows = plan_size(packed, comm_plan, Size.LOCAL) if targets is None else targets[0].shape[0]
    dtype = packed.dtype if op == "sum" and into is None else sums
    total = torch.ops.torch_magi.group_reduce(packed, comm_plan, sent, rows, wire, sums, dtype, group_name)
    results = unpack(total, parts)
    if targets is not None:
        _check_targets(targets, results)
        results = tuple(a.to(sums) + b for a, b in zip(targets, results, strict=True))
    if op == "avg":
        copies = torch.ops.torch_magi.num_copies(total, comm_plan, rows) + (into is not None)
        share = 1.0 / copies.clamp(min=1).to(sums)
        results = tuple(r * share.view(-1, *(1,) * (r.ndim - 1)) for r in results)
    if targets is not None:
        results = tuple(a.copy_(b) for a, b in zip(targets, results, strict=True))
    else:
        results = tuple(r.to(part.dtype) for r, part in zip(results, parts, strict=True))
    return results[0] if isinstance(x, Tensor) else results


def _reduce_lse(
    x: Tensor | Sequence[Tensor], plan: CommPlan, group_name: str, into: Tensor | Sequence[Tensor] | None,
    comm_dtype: Dtype | None, reduce_dtype: Dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if isinstance(x, Tensor) or len(x) != 2:
        got = "one tensor" if isinstance(x, Tensor) else f"{len(x)} tensors"
        raise ValueError(f"x must be the pair (out, lse) for op='lse', got {got}")
    out, lse = x
    if out.ndim != 3 or lse.shape != out.shape[:2]:
        raise ValueError(
            "out and lse must have shapes [rows, heads, head_dim] and [rows, heads], got "
            f"{list(out.shape)} and {list(lse.shape)}"
        )
    if not out.is_floating_point() or lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"out must be floating point and lse float32 or float64, got {out.dtype} and {lse.dtype}")
    wire, sums = dtypes_of(out.dtype, comm_dtype, reduce_dtype)
    if comm_dtype == torch.float16:
        raise TypeError("comm_dtype must be torch.bfloat16 or wider for op='lse', got torch.float16")
    wire = torch.float32 if wire == torch.float16 else wire
    before = None if into is None else _targets(into, False, 2)
    sent = plan_size(out, plan, Size.SENT)
    rows = plan_size(out, plan, Size.LOCAL) if before is None else before[0].shape[0]
    merged: tuple[Tensor, Tensor] = torch.ops.torch_magi.group_merge(out, lse, plan, sent, rows, wire, sums, group_name)
    if before is None:
        return merged[0].to(out.dtype), merged[1].to(lse.dtype)
    _check_targets(before, merged)
    # Copies: `before` is about to be overwritten, and the backward reads what it was.
    out_before, lse_before = (x.to(sums, copy=True) for x in before)
    merged = merge_state(out_before, lse_before, *merged)
    before[0].copy_(merged[0])
    before[1].copy_(merged[1])
    return before[0], before[1]


def _targets(into: Tensor | Sequence[Tensor], single: bool, number: int) -> tuple[Tensor, ...]:
    targets = (into,) if isinstance(into, Tensor) else tuple(into)
    if isinstance(into, Tensor) != single or len(targets) != number:
        wanted = "one tensor" if single else f"{number} tensors"
        got = "one tensor" if isinstance(into, Tensor) else f"{len(targets)} tensors"
        raise ValueError(f"into must be {wanted} as x is, got {got}")
    return targets


def _check_targets(targets: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    for target, result in zip(targets, results, strict=True):
        if target.shape != result.shape:
            raise ValueError(f"into must have shape {list(result.shape)}, got {list(target.shape)}")
        if not target.is_floating_point():
            raise TypeError(f"into must be floating point, got {target.dtype}")
