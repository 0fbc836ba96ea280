"""What is sent: rows and split sizes of `group_cast` (and, read backwards, of `group_reduce`)."""

from __future__ import annotations

import numpy as np

from torch_magi.plan.dispatch import DispatchPlan, IntArray
from torch_magi.plan.types import CommPlan

Received = list[tuple[IntArray, IntArray]]  # per rank: pieces and their segments, as in overlap.needed_keys


def make_comm_plan(received: Received, dispatch: DispatchPlan, rank: int) -> CommPlan:
    """Return the part of `rank` in an exchange.

    Args:
        received: for every rank, the pieces it receives, grouped by owner in rank order.
        dispatch: who holds which rows.
        rank: whose part.
    """
    segments = dispatch.segments
    send, input_split_sizes = [], []
    for pieces, index in received:
        mine = segments[index, 2] == rank
        where = segments[index[mine]]
        local = pieces[mine] - where[:, :1] + where[:, 3:]
        send.append(local)
        input_split_sizes.append(int((local[:, 1] - local[:, 0]).sum()))
    pieces, index = received[rank]
    output_split_sizes = np.bincount(
        segments[index, 2], weights=pieces[:, 1] - pieces[:, 0], minlength=dispatch.cp_size
    )
    return CommPlan(
        np.concatenate(send) if send else np.zeros((0, 2), np.int64),
        tuple(input_split_sizes),
        tuple(int(n) for n in output_split_sizes),
        num_rows=dispatch.tokens_per_rank[rank],
        rank=rank,
    )
