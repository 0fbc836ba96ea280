"""What is sent: rows and split sizes of `group_cast` (and, read backwards, of `group_reduce`)."""

from __future__ import annotations

import numpy as np

from torch_magi.plan.dispatch import DispatchPlan, IntArray
from torch_magi.plan.hierarchy import in_two_steps
from torch_magi.plan.types import CommPlan

Received = list[tuple[IntArray, IntArray]]  # per rank: pieces and their segments, as in overlap.needed_keys


def make_comm_plan(
    received: Received, dispatch: DispatchPlan, rank: int, ranks_per_node: int | None = None
) -> CommPlan:
    """Return the part of `rank` in an exchange.

    Args:
        received: for every rank, the pieces it receives, in the order of `overlap.split_into_stages`.
        dispatch: who holds which rows.
        rank: whose part.
        ranks_per_node: for an exchange in two steps; None: in one.
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
    )
