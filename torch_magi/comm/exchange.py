"""The two exchanges as start operators: what `group_cast` and `group_reduce`, and the stage loop, are built on.

A start operator packs the rows, starts an all_to_all and returns the tensor that is being received. The caller
waits for it with `wait` where it uses the rows, so that a compiler, or the order of the eager code, can put
computation in between. The operator names contain "all_to_all" and end in `group_name`: Inductor's passes
recognise them by that. Over a mesh of nodes an exchange has two steps (plan/hierarchy.py), which one operator starts.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_magi.comm import lowerings
from torch_magi.comm.groups import LEVELS, check_levels, resolve_group
from torch_magi.comm.lse_columns import attach, detach
from torch_magi.comm.symmetric import copy_stream, start_copies
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.plan_types import ATTN_PLAN, COMM_PLAN, comm_plan_of
from torch_magi.plan import AttnPlan, CommPlan

Tensor = torch.Tensor
Plan = AttnPlan | CommPlan

_c10d: Any = torch._C._distributed_c10d
wait = torch.ops._c10d_functional.wait_tensor.default


class Step(NamedTuple):
    """One exchange: how many rows go to, and come from, each rank of a group, the rows for rank 0 first."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    group_name: str


def _issue(send: Tensor, out: Tensor, step: Step) -> Any:
    """Start an all_to_all into the first rows of `out` and return its work."""
    _check_splits_in_debug_mode(send.device, step)
    into, group = out[: sum(step.receives)], resolve_group(step.group_name)
    return dist.all_to_all_single(into, send, list(step.receives), list(step.sends), group=group, async_op=True)


def all_to_all(send: Tensor, rows: int, step: Step) -> Tensor:
    """Start an exchange and return the tensor being received, to be read after `wait`.

    Args:
        send: [sum(step.sends), ...].
        rows: rows of the result: sum(step.receives), or more, of which the last stay as they are.
        step: who sends how much.
    """
    out = send.new_empty((rows, *send.shape[1:]))
    _c10d._register_work(out, _issue(send, out, step))  # `wait` finds the work by the tensor's storage
    return out


class _SecondStep(dist.Work):
    """The second of two exchanges, started by the wait for it: where there are no streams that could order them."""

    def __init__(self, first: Any, start: Callable[[], Any]) -> None:
        super().__init__()
        self._first, self._start = first, start

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._first.wait()
        self._start().wait()
        return True


def two_all_to_alls(send: Tensor, rows: int, first: Step, between: Callable[[Tensor], Tensor], second: Step) -> Tensor:
    """Start two exchanges, of which the second sends what `between` makes of the rows that the first brings.

    On GPUs the second one follows on a stream of its own: nothing waits for the first one but this stream.
    """
    out = send.new_empty((rows, *send.shape[1:]))

    def start_first() -> tuple[Tensor, Any]:
        arrived = send.new_empty((sum(first.receives), *send.shape[1:]))
        return arrived, _issue(send, arrived, first)

    if not send.is_cuda:
        arrived, work = start_first()
        _c10d._register_work(out, _SecondStep(work, lambda: _issue(between(arrived), out, second)))
        return out
    current, relay = torch.cuda.current_stream(send.device), copy_stream(send.device)
    relay.wait_stream(current)
    send.record_stream(relay)
    with torch.cuda.stream(relay):
        arrived, work = start_first()
        work.wait()  # of the stream, not of the host
        onwards = between(arrived)
        onwards.record_stream(current)  # which waits for the second exchange, and may free these rows then
        _c10d._register_work(out, _issue(onwards, out, second))
    return out


def _check_splits_in_debug_mode(device: torch.device, step: Step) -> None:
    """Raise RuntimeError on every rank where one rank expects other rows than another sends."""
    if _c10d.get_debug_level() != _c10d.DebugLevel.DETAIL:
        return
    group = resolve_group(step.group_name)
    mine = torch.tensor([step.sends, step.receives], device=device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    sent, expected = torch.stack([x[0] for x in everyone]), torch.stack([x[1] for x in everyone]).T
    for source, target in (sent != expected).nonzero().tolist():
        raise RuntimeError(
            f"the ranks' plans contradict each other: rank {source} sends {sent[source, target]} rows to rank "
            f"{target}, which expects {expected[source, target]}; every rank must plan the same mask with the same "
            "config"
        )


def _start_cast(x: Tensor, after: Tensor | None, plan: Plan, stage: int, num_received: int, group_name: str) -> Tensor:
    comm = comm_plan_of(plan, stage)
    if x.shape[0] != comm.num_rows:
        raise ValueError(f"x must have {comm.num_rows} rows as the plan says, got {x.shape[0]}")
    check_levels(comm, group_name)
    names = group_name.split(LEVELS)
    first = Step(comm.input_split_sizes, comm.output_split_sizes, names[0])
    if comm.moves is not None:
        _check_splits_in_debug_mode(x.device, first)
        return start_copies(x, comm.num_received, comm.moves.cast, comm, group_name)
    send, intra = _gather(x, comm), comm.intra
    if intra is None:
        return all_to_all(send, comm.num_received, first)
    second = Step(intra.input_split_sizes, intra.output_split_sizes, names[1])
    return two_all_to_alls(send, comm.num_received, first, lambda rows: _gather(rows, intra), second)


def _start_reduce(
    x: Tensor, after: Tensor | None, plan: Plan, stage: int, merge: bool, num_returned: int, group_name: str
) -> Tensor:
    comm = comm_plan_of(plan, stage)
    if x.shape[0] != comm.num_received:
        raise ValueError(f"x must have {comm.num_received} rows as the plan says, got {x.shape[0]}")
    check_levels(comm, group_name)
    names = group_name.split(LEVELS)
    last = Step(comm.output_split_sizes, comm.input_split_sizes, names[0])
    if comm.moves is not None:
        _check_splits_in_debug_mode(x.device, last)
        return start_copies(x, comm.num_sent, comm.moves.reduce, comm, group_name)
    intra = comm.intra
    if intra is None:
        return all_to_all(x.contiguous(), comm.num_sent, last)
    first = Step(intra.output_split_sizes, intra.input_split_sizes, names[1])
    combine = _merge_packed if merge else _add
    return two_all_to_alls(x.contiguous(), comm.num_sent, first, lambda rows: combine(rows, intra), last)


def _gather(x: Tensor, comm: CommPlan) -> Tensor:
    rows: Tensor = torch.ops.torch_magi.range_gather(x, comm.send_ranges_on(x.device), comm.num_sent)
    return rows


def _add(x: Tensor, comm: CommPlan) -> Tensor:
    added: Tensor = torch.ops.torch_magi.range_scatter_add(x, comm.send_ranges_on(x.device), comm.num_rows)
    return added


def _merge_packed(rows: Tensor, comm: CommPlan) -> Tensor:
    x, lse = detach(rows, 1, torch.promote_types(rows.dtype, torch.float32))
    out, lse = _merge_returned(x, lse, comm, comm.num_rows)
    return attach(out, [lse], rows.dtype)


def _add_returned(x: Tensor, plan: Plan, stage: int, num_rows: int) -> Tensor:
    comm = comm_plan_of(plan, stage)
    _check_rows(comm, num_rows)
    return _add(x, comm)


def _check_rows(comm: CommPlan, num_rows: int) -> None:
    if num_rows != comm.num_rows:  # of a tensor that the sums go into; compiled code sees it only here
        raise ValueError(f"into must have {comm.num_rows} rows as the plan says, got {num_rows}")


def _merge_returned(x: Tensor, lse: Tensor, plan: CommPlan, num_rows: int) -> tuple[Tensor, Tensor]:
    _check_rows(plan, num_rows)
    rows, ranges = plan.send_rows_on(x.device), plan.send_ranges_on(x.device)
    empty = torch.isinf(lse)
    lse = lse.masked_fill(empty, -torch.inf)
    top = lse.new_full((num_rows, lse.shape[1]), -torch.inf)
    top.scatter_reduce_(0, rows[:, None].expand_as(lse), lse, "amax")
    weight = torch.exp(lse - top[rows]).masked_fill(empty, 0.0)
    weighted = (x * weight[..., None]).masked_fill(empty[..., None], 0.0)  # an empty row may hold anything
    total = torch.ops.torch_magi.range_scatter_add(weight, ranges, num_rows)
    out = torch.ops.torch_magi.range_scatter_add(weighted, ranges, num_rows)
    return out / total.masked_fill(total == 0, 1.0)[..., None], top + total.log()


def _fake_start(x: Tensor, after: Tensor | None, plan: object, stage: int, *rest: Any) -> Tensor:
    lowerings.register()
    return x.new_empty((rest[-2], *x.shape[1:]))


def _fake_add(x: Tensor, plan: object, stage: int, num_rows: int) -> Tensor:
    return x.new_empty((num_rows, *x.shape[1:]))


def _fake_merge(x: Tensor, lse: Tensor, plan: object, num_rows: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((num_rows, *x.shape[1:])), lse.new_empty((num_rows, *lse.shape[1:]))


for _suffix, _type in (("", ATTN_PLAN), ("_rows", COMM_PLAN)):
    for _name, _merge, _kernel in ((f"group_cast_all_to_all{_suffix}", "", _start_cast),
                                   (f"group_reduce_all_to_all{_suffix}", "bool merge, ", _start_reduce)):  # fmt: skip
        lib.define(
            f"{_name}(Tensor x, Tensor? after, {_type} plan, int stage, {_merge}SymInt rows, str group_name) -> Tensor",
            tags=PLAN_TAGS,
        )
        lib.impl(_name, _kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"torch_magi::{_name}", _fake_start, lib=lib)
    _name = f"add_returned{_suffix}"
    lib.define(f"{_name}(Tensor x, {_type} plan, int stage, SymInt num_rows) -> Tensor", tags=PLAN_TAGS)
    lib.impl(_name, _add_returned, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_magi::{_name}", _fake_add, lib=lib)

lib.define(
    f"merge_returned(Tensor x, Tensor lse, {COMM_PLAN} plan, SymInt num_rows) -> (Tensor, Tensor)", tags=PLAN_TAGS
)
lib.impl("merge_returned", _merge_returned, "CompositeExplicitAutograd")
torch.library.register_fake("torch_magi::merge_returned", _fake_merge, lib=lib)

_ops = torch.ops.torch_magi
lowerings.START_OPS.extend(
    [
        _ops.group_cast_all_to_all,
        _ops.group_reduce_all_to_all,
        _ops.group_cast_all_to_all_rows,
        _ops.group_reduce_all_to_all_rows,
    ]
)


def start_cast(
    x: Tensor, plan: Plan, stage: int, num_received: int, group_name: str, after: Tensor | None = None
) -> Tensor:
    """Start sending rows of `x` to the ranks that need them.

    Args:
        x: [rows, ...]; the local rows.
        plan, stage: an AttnPlan and the stage whose exchange is meant, or a CommPlan (stage 0).
        num_received: rows that will arrive, from `plan_size`.
        group_name: the process group, or both groups of a mesh of nodes; every rank must call.
        after: a tensor that is not read, but must exist before. The backward passes its incoming gradient:
            without it a compiler would take the second exchange for the first and keep the rows instead.

    Returns:
        [num_received, ...]; to be read after `wait`.
    """
    op = _ops.group_cast_all_to_all_rows if isinstance(plan, CommPlan) else _ops.group_cast_all_to_all
    started: Tensor = op(x, after, plan, stage, num_received, group_name)
    return started


def start_reduce(x: Tensor, plan: Plan, stage: int, num_sent: int, group_name: str, *, merge: bool = False) -> Tensor:
    """Start returning rows to the ranks that they came from: the adjoint of `start_cast`.

    Args:
        x: [num_received, ...]; one row for every row that `start_cast` received.
        plan, stage, group_name: as given to `start_cast`.
        num_sent: rows that `start_cast` sent, from `plan_size`.
        merge: rows are attention with its lse, from `lse_columns.attach`: where nodes combine rows before they send
            them back, merge them instead of adding them up.

    Returns:
        [num_sent, ...]; to be read after `wait`, and summed by `add_returned`, or merged by `merge_returned`.
    """
    op = _ops.group_reduce_all_to_all_rows if isinstance(plan, CommPlan) else _ops.group_reduce_all_to_all
    started: Tensor = op(x, None, plan, stage, merge, num_sent, group_name)
    return started


def add_returned(x: Tensor, plan: Plan, stage: int, num_rows: int) -> Tensor:
    """Sum the rows that came back into the local rows that they were copies of.

    Args:
        x: [num_sent, ...]; what `start_reduce` returned, after `wait`.
        plan, stage: as given to `start_cast`.
        num_rows: local rows.

    Returns:
        [num_rows, ...]; zero for a row that was sent nowhere. The order of the sums is fixed.
    """
    op = _ops.add_returned_rows if isinstance(plan, CommPlan) else _ops.add_returned
    added: Tensor = op(x, plan, stage, num_rows)
    return added


def merge_returned(x: Tensor, lse: Tensor, plan: CommPlan, num_rows: int) -> tuple[Tensor, Tensor]:
    """Merge attention that came back, over disjoint sets of keys, into that of the local rows it belongs to.

    Args:
        x: [num_sent, heads, head_dim], float32 or float64.
        lse: [num_sent, heads], the same dtype; infinite for what saw no key.
        plan: as given to `start_cast`.
        num_rows: local rows.

    Returns:
        [num_rows, heads, head_dim] and its lse; 0 and -inf for a row that was sent nowhere. One copy keeps its bits.
    """
    merged: tuple[Tensor, Tensor] = _ops.merge_returned(x, lse, plan, num_rows)
    return merged
