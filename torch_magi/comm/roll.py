"""roll: every dispatched row takes what its neighbour in the same document holds, wherever that lies."""

from __future__ import annotations

from typing import Any

import torch

from torch_magi.comm import lowerings
from torch_magi.comm.dispatch import check_plan
from torch_magi.comm.exchange import Step, all_to_all, wait
from torch_magi.comm.groups import Group, group_name_of
from torch_magi.masks.ranges import Integers, int_array
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.autograd import wants_grad
from torch_magi.ops.plan_types import ATTN_PLAN
from torch_magi.plan import AttnPlan
from torch_magi.plan.roll import roll_plan_of

Tensor = torch.Tensor
Number = int | float | bool


def _start_roll(x: Tensor, plan: AttnPlan, shift: int, wrap: bool, group_name: str) -> Tensor:
    """Start the exchange; the first rows of the result will be those that arrive."""
    comm = roll_plan_of(plan, shift, wrap).comm
    if x.shape[0] != comm.num_rows:
        raise ValueError(f"x must have {comm.num_rows} rows as the plan says, got {x.shape[0]}")
    send = torch.ops.torch_magi.range_gather(x, comm.send_ranges_on(x.device), comm.num_sent)
    if comm.size == 1:
        return torch.cat([send, send.new_empty((comm.num_rows - comm.num_sent, *x.shape[1:]))])
    return all_to_all(send, comm.num_rows, Step(comm.input_split_sizes, comm.output_split_sizes, group_name))


def _place_rolled(arrived: Tensor, plan: AttnPlan, shift: int, fill: Number | None) -> Tensor:
    """Return the rows that have arrived where they belong, and `fill` elsewhere."""
    comm, target_rows = roll_plan_of(plan, shift, fill is None)
    rows = plan.cached(
        ("roll", shift, fill is None, arrived.device), lambda: torch.from_numpy(target_rows).to(arrived.device)
    )
    out = torch.full_like(arrived, 0 if fill is None else fill)
    return out.index_copy_(0, rows, arrived[: comm.num_received])


def _fake_start(x: Tensor, plan: object, shift: int, wrap: bool, group_name: str) -> Tensor:
    lowerings.register()
    return x.new_empty(x.shape)


lib.define(
    f"roll_all_to_all(Tensor x, {ATTN_PLAN} plan, int shift, bool wrap, str group_name) -> Tensor",
    tags=PLAN_TAGS,
)
lib.impl("roll_all_to_all", _start_roll, "CompositeExplicitAutograd")
torch.library.register_fake("torch_magi::roll_all_to_all", _fake_start, lib=lib)
lib.define(f"place_rolled(Tensor x, {ATTN_PLAN} plan, int shift, Scalar? fill) -> Tensor", tags=PLAN_TAGS)
lib.impl("place_rolled", _place_rolled, "CompositeExplicitAutograd")
torch.library.register_fake("torch_magi::place_rolled", lambda x, plan, shift, fill: x.new_empty(x.shape), lib=lib)
lowerings.START_OPS.append(torch.ops.torch_magi.roll_all_to_all)


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttnPlan, shift: int, fill: Number | None, group_name: str) -> Tensor:
        ctx.plan, ctx.shift, ctx.wrap, ctx.group_name = plan, shift, fill is None, group_name
        arrived = wait(torch.ops.torch_magi.roll_all_to_all(x, plan, shift, fill is None, group_name))
        rolled: Tensor = torch.ops.torch_magi.place_rolled(arrived, plan, shift, fill)
        return rolled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = _roll(grad, ctx.plan, -ctx.shift, None if ctx.wrap else 0, ctx.group_name)
        return back, None, None, None, None


def _roll(x: Tensor, plan: AttnPlan, shift: int, fill: Number | None, group_name: str) -> Tensor:
    if wants_grad(x):
        rolled: Tensor = _Roll.apply(x, plan, shift, fill, group_name)  # type: ignore[no-untyped-call]
        return rolled
    arrived = wait(torch.ops.torch_magi.roll_all_to_all(x, plan, shift, fill is None, group_name))
    rolled = torch.ops.torch_magi.place_rolled(arrived, plan, shift, fill)
    return rolled


# Decomposes while it is traced, so that a compiler sees start and wait.
lib.define(f"roll(Tensor x, {ATTN_PLAN} plan, int shift, Scalar? fill, str group_name) -> Tensor", tags=PLAN_TAGS)
lib.impl("roll", _roll, "CompositeImplicitAutograd")


def roll(
    x_local: Tensor,
    shift: int,
    plan: AttnPlan,
    group: Group | None,
    cu_seqlens: Integers | None = None,
    fill: Number | None = None,
) -> Tensor:
    """Shift dispatched rows along their documents, as `torch.roll` does with a whole one. Differentiable.

    Global row g becomes row g - shift of the same document: with shift=-1 every token gets the next one, which
    makes the labels of next-token prediction, and shift=-2 those of the one after (multi-token prediction). Each
    row travels at most once, to the rank that takes it.

    Args:
        x_local: [plan.num_tokens_local, ...], any dtype; this rank's rows of labels, embeddings, or others.
        shift: may be larger than documents, negative or 0.
        plan: who holds which rows.
        group: ProcessGroup, one-dimensional DeviceMesh or group name; may be None for one rank. Every rank of it
            must call, also one without rows.
        cu_seqlens: int [num_documents + 1]; where documents begin in the whole sequence. None: as the plan says,
            which is one document, or one per element of a batch, unless `plan.with_documents(cu_seqlens)` set
            others. In compiled code only the plan can say it. Rows behind the last value belong to no document.
        fill: what rows hold for which the document has no row g - shift, and rows of no document: for example
            -100, which cross_entropy ignores. None: what leaves a document at one end enters it at the other, as
            in `torch.roll`, and rows of no document stay as they are.

    Returns:
        [plan.num_tokens_local, ...]. The gradient is the reverse roll, exactly.

    Raises:
        TypeError: if `plan` or `group` is something else, for `cu_seqlens` in compiled code, or a float to fill
            integers with.
        ValueError: if the rows, the group's size, `cu_seqlens` or `fill` do not fit.

    Example:
        >>> from torch_magi import make_attn_plan, masks, roll
        >>> plan = make_attn_plan(masks.document([0, 3, 8]), 1, 1, 8).with_documents([0, 3, 8])
        >>> roll(torch.arange(8), -1, plan, None, fill=-100).tolist()
        [1, 2, -100, 4, 5, 6, 7, -100]
    """
    check_plan(plan)
    group_name = group_name_of(group, plan)
    if fill is not None and not (x_local.is_floating_point() or x_local.is_complex()):
        if isinstance(fill, float):
            raise TypeError(f"fill must be an int for x_local of {x_local.dtype}, got {fill}")
        low, high = (
            (0, 1) if x_local.dtype == torch.bool else (torch.iinfo(x_local.dtype).min, torch.iinfo(x_local.dtype).max)
        )
        if not low <= fill <= high:
            raise ValueError(f"fill must be in [{low}, {high}] for x_local of {x_local.dtype}, got {fill}")
    if cu_seqlens is not None:
        if torch.compiler.is_compiling():
            raise TypeError(
                "cu_seqlens cannot be read inside torch.compile; set the documents outside, with "
                "plan.with_documents(cu_seqlens), and pass that plan"
            )
        documents = int_array("cu_seqlens", cu_seqlens)
        key = ("documents", documents.tobytes())
        plan = plan.cached(key, lambda: plan.with_documents(documents))
    rolled: Tensor = torch.ops.torch_magi.roll(x_local, plan, shift, fill, group_name)
    return rolled
