"""Exchanges in two steps: between nodes each row travels once to a node, and there on to the ranks that need it.

Ranks are numbered node by node: rank = node * ranks_per_node + place.

    step 1, between nodes    rank (n, p) sends each row once to rank (m, p) of every node m that needs it, its own too
    step 2, within a node    rank (m, p) sends what has arrived on to the ranks (m, 0), (m, 1), ... that need it

Step 1 is an exchange between the ranks of one place, step 2 one between the ranks of one node. Rows arrive by the place
of the rank that they come from, then by its node. `group_reduce` takes the steps backwards: rows for one node are
combined in the node that they come from, and travel once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from torch_magi.plan.dispatch import IntArray
from torch_magi.plan.overlap import merge_ranges
from torch_magi.plan.types import CommPlan

# (source rank, target rank) -> int64 [n, 2]: ranges of the source's rows, in the order in which the target gets them
RangesOf = Callable[[int, int], IntArray]


def in_two_steps(ranges_of: RangesOf, num_rows: int, rank: int, size: int, ranks_per_node: int) -> CommPlan:
    """Return the part of `rank` in an exchange in two steps.

    Args:
        ranges_of: who receives which rows.
        num_rows: rows of this rank.
        rank, size: whose part, of how many ranks.
        ranks_per_node: a divisor of `size`.
    """
    node, place = divmod(rank, ranks_per_node)
    nodes = range(size // ranks_per_node)

    def to_node(source: int, target: int) -> IntArray:
        ranks = range(target * ranks_per_node, (target + 1) * ranks_per_node)
        return merge_ranges(np.concatenate([ranges_of(source, r) for r in ranks]))

    sends = [to_node(rank, n) for n in nodes]
    sources = [n * ranks_per_node + place for n in nodes]  # of what arrives in step 1
    arriving = [to_node(source, node) for source in sources]
    begins = np.cumsum([0, *map(_count, arriving)])
    onwards = [
        [
            _positions(ranges_of(source, node * ranks_per_node + p), rows) + begin
            for source, rows, begin in zip(sources, arriving, begins, strict=False)
        ]
        for p in range(ranks_per_node)
    ]
    intra = CommPlan(
        np.concatenate([r for ranges in onwards for r in ranges]),
        tuple(sum(map(_count, ranges)) for ranges in onwards),
        tuple(sum(_count(ranges_of(n * ranks_per_node + p, rank)) for n in nodes) for p in range(ranks_per_node)),
        num_rows=int(begins[-1]),
        rank=place,
    )
    return CommPlan(
        np.concatenate(sends),
        tuple(map(_count, sends)),
        tuple(map(_count, arriving)),
        num_rows,
        rank,
        intra,
        np.concatenate([ranges_of(rank, r) for r in range(size)]),
    )


def hierarchical_comm_plan(
    send_rows: Sequence[Sequence[Sequence[tuple[int, int]]]],
    num_rows: Sequence[int],
    rank: int,
    ranks_per_node: int,
) -> CommPlan:
    """Make one rank's part of an exchange in two steps, for `group_cast` and `group_reduce` over a mesh of nodes.

    Args:
        send_rows: of every rank, for every rank, the half-open ranges of the first one's rows that go to the second.
        num_rows: of every rank, the rows of its tensor.
        rank: this rank, node * ranks_per_node + place in its node.
        ranks_per_node: must divide the number of ranks.

    Returns:
        The plan. Rows arrive by the place in its node of the rank that they come from, then by its node.

    Raises:
        ValueError: if the lists contradict each other, or a range lies outside its tensor.
    """
    size = len(num_rows)
    if len(send_rows) != size or any(len(to) != size for to in send_rows):
        raise ValueError(
            f"send_rows must have {size} x {size} entries as num_rows, got {[len(to) for to in send_rows]}"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    if ranks_per_node < 1 or size % ranks_per_node:
        raise ValueError(f"ranks_per_node must divide the number of ranks, {size}, got {ranks_per_node}")
    for source, to in enumerate(send_rows):
        rows = num_rows[source]
        for a, b in (r for ranges in to for r in ranges):
            if not 0 <= a <= b <= rows:
                raise ValueError(
                    f"send_rows of rank {source} must lie in [0, {rows}] and not be reversed, got ({a}, {b})"
                )

    def ranges_of(source: int, target: int) -> IntArray:
        return np.array(send_rows[source][target], np.int64).reshape(-1, 2)

    return in_two_steps(ranges_of, num_rows[rank], rank, size, ranks_per_node)


def _count(ranges: IntArray) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _positions(ranges: IntArray, union: IntArray) -> IntArray:
    """Return where ranges lie in the concatenation of the sorted ranges that cover them."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    i = np.searchsorted(union[:, 0], ranges[:, 0], side="right") - 1
    lengths = union[:, 1] - union[:, 0]
    begins = np.cumsum(lengths) - lengths
    positions: IntArray = ranges + (begins - union[:, 0])[i, None]
    return positions
