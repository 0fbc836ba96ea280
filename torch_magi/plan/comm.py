"""What is sent: rows and split sizes of `group_cast` (and, read backwards, of `group_reduce`)."""

from __future__ import annotations

import numpy as np

from torch_magi.plan.config import Transport
from torch_magi.plan.dispatch import DispatchPlan, IntArray
from torch_magi.plan.hierarchy import in_two_steps
from torch_magi.plan.types import CommPlan, Move, Moves

Received = list[tuple[IntArray, IntArray]]  # per rank: pieces and their segments, as in overlap.needed_keys


def make_comm_plan(
    received: Received,
    dispatch: DispatchPlan,
    rank: int,
    ranks_per_node: int | None = None,
    transport: Transport = "all_to_all",
) -> CommPlan:
    """Return the part of `rank` in an exchange.

    Args:
        received: for every rank, the pieces it receives, in the order of `overlap.split_into_stages`.
        dispatch: who holds which rows.
        rank: whose part.
        ranks_per_node: for an exchange in two steps; None: in one.
        transport: as in `PlanConfig`.
    """
    segments = dispatch.segments

    def ranges_of(source: int, target: int) -> IntArray:
        pieces, index = received[target]
        theirs = segments[index, 2] == source
        where = segments[index[theirs]]
        local: IntArray = pieces[theirs] - where[:, :1] + where[:, 3:]
        return local

    num_rows, size = dispatch.tokens_per_rank[rank], dispatch.cp_size
    if ranks_per_node is not None:
        return in_two_steps(ranges_of, num_rows, rank, size, ranks_per_node)
    send = [ranges_of(rank, target) for target in range(size)]
    pieces, index = received[rank]
    output_split_sizes = np.bincount(segments[index, 2], weights=pieces[:, 1] - pieces[:, 0], minlength=size)
    return CommPlan(
        np.concatenate(send),
        tuple(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in send),
        tuple(int(n) for n in output_split_sizes),
        num_rows,
        rank,
        moves=_make_moves(received, dispatch, rank) if transport == "symmetric_memory" else None,
    )


def _make_moves(received: Received, dispatch: DispatchPlan, rank: int) -> Moves:
    """Return what `rank` reads: the rows it receives, and later, out of what others received, its own.

    The next rank's rows come first, so that not all ranks read from one.
    """
    segments = dispatch.segments
    pieces, index = received[rank]
    lengths = pieces[:, 1] - pieces[:, 0]
    owner, first = segments[index, 2], pieces[:, 0] - segments[index, 0] + segments[index, 3]
    columns = (owner, first, first + lengths, np.cumsum(lengths) - lengths)
    cast = [Move(*row) for row in np.stack(columns, 1).tolist()]
    reduce, at, most = [], 0, max(dispatch.tokens_per_rank)
    for other, (pieces, index) in enumerate(received):
        lengths, owner = pieces[:, 1] - pieces[:, 0], segments[index, 2]
        begin, rows = int(lengths[owner < rank].sum()), int(lengths[owner == rank].sum())
        if rows:
            reduce.append(Move(other, begin, begin + rows, at))
        at, most = at + rows, max(most, int(lengths.sum()))

    def by_distance(moves: list[Move]) -> tuple[Move, ...]:
        return tuple(sorted(moves, key=lambda move: (move.rank - rank) % dispatch.cp_size))

    return Moves(by_distance(cast), by_distance(reduce), most)
