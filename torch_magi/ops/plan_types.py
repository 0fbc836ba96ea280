"""Plans as operator arguments: their schema types, and their sizes as symbols that never recompile."""

from __future__ import annotations

import enum

import torch

from torch_magi._torch_internals import register_reference_type
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.autograd import refuse_vmap
from torch_magi.plan import AttnPlan, CommPlan

# Traced code may read these fields of an AttnPlan; another value of one of them recompiles.
ATTN_PLAN = register_reference_type(AttnPlan, constants=("cp_size", "num_stages", "starts_local"))
COMM_PLAN = register_reference_type(CommPlan, constants=("size",))


class Size(enum.IntEnum):
    """Which size `plan_size` returns."""

    SENT = 0  # rows that this rank sends in an exchange
    RECEIVED = 1  # rows that it receives
    LOCAL = 2  # rows that it holds
    PADDED = 3  # rows that the rank with most rows holds
    TOTAL = 4  # rows of the whole sequence


def comm_plan_of(plan: AttnPlan | CommPlan, stage: int) -> CommPlan:
    """Return the exchange of a stage; `stage` is ignored for a CommPlan, which is one exchange."""
    if isinstance(plan, CommPlan):
        return plan
    comm = plan.stages[stage].comm
    assert comm is not None, f"stage {stage} has no exchange"
    return comm


def _plan_size(anchor: torch.Tensor, plan: AttnPlan | CommPlan, stage: int, which: int) -> int:
    if which == Size.SENT:
        return comm_plan_of(plan, stage).num_sent
    if which == Size.RECEIVED:
        return comm_plan_of(plan, stage).num_received
    if isinstance(plan, CommPlan):
        return plan.num_rows
    if which == Size.LOCAL:
        return plan.num_tokens_local
    if which == Size.PADDED:
        return max(plan.dispatch.tokens_per_rank)
    return plan.dispatch.total_tokens


def _fake_plan_size(anchor: torch.Tensor, plan: object, stage: int, which: int) -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size(min=0)


for _name, _type in (("plan_size", ATTN_PLAN), ("comm_plan_size", COMM_PLAN)):
    # The anchor tells Inductor the device.
    lib.define(f"{_name}(Tensor anchor, {_type} plan, int stage, int which) -> SymInt", tags=PLAN_TAGS)
    lib.impl(_name, _plan_size, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_magi::{_name}", _fake_plan_size, lib=lib)
    refuse_vmap(_name)  # with which group_cast, dispatch and the like begin


def plan_size(anchor: torch.Tensor, plan: AttnPlan | CommPlan, which: Size, stage: int = 0) -> int:
    """Return a size of a plan: an int in eager code, an unbacked symbol in traced code.

    Args:
        anchor: any tensor on the device of the computation.
        plan: an AttnPlan, or a CommPlan (which has SENT, RECEIVED and LOCAL).
        which: the size wanted.
        stage: whose exchange, for SENT and RECEIVED of an AttnPlan.
    """
    op = torch.ops.torch_magi.comm_plan_size if isinstance(plan, CommPlan) else torch.ops.torch_magi.plan_size
    size: int = op(anchor, plan, stage, int(which))
    return size
