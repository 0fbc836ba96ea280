"""Which keys arrive in which stage.

Every rank needs the keys that its query rows see. Keys of its own are computed with first; the others arrive
in `overlap_degree` stages of about equal size. The keys of the next rank come first, then those of the one
after it, so that in every stage the ranks send about as much as they receive.
"""

from __future__ import annotations

import numpy as np

from torch_magi import _planner
from torch_magi.plan.dispatch import DispatchPlan, IntArray


def intersect(ranges: IntArray, segments: IntArray) -> tuple[IntArray, IntArray]:
    """Return the parts of disjoint ranges that lie in segments, cut at the segments' borders.

    Args:
        ranges: int64 [n, 2], disjoint.
        segments: int64 [m, >= 2], sorted and disjoint.

    Returns:
        pieces int64 [p, 2], in the order of the ranges; the index of each piece's segment, int64 [p].
    """
    if not len(ranges) or not len(segments):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    first = np.searchsorted(segments[:, 1], ranges[:, 0], side="right")
    last = np.searchsorted(segments[:, 0], ranges[:, 1], side="left")
    counts = last - first
    owner = np.repeat(np.arange(len(ranges)), counts)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
    pieces = np.stack(
        [np.maximum(ranges[owner, 0], segments[index, 0]), np.minimum(ranges[owner, 1], segments[index, 1])], 1
    )
    return pieces, index


def merge_ranges(ranges: IntArray) -> IntArray:
    """Return the union of ranges, int64 [n, 2], as sorted ranges that neither overlap nor touch."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    first = np.flatnonzero(np.append(True, ranges[1:, 0] > ends[:-1])[: len(ranges)])
    last = np.append(first[1:], len(ranges))[: len(first)] - 1
    return np.stack([ranges[first, 0], ends[last]], 1)


def needed_keys(bands: IntArray, dispatch: DispatchPlan, rank: int) -> tuple[IntArray, IntArray]:
    """Return the keys that `rank` needs, cut by owner: pieces int64 [p, 2], segment of each int64 [p]."""
    seen = _planner.key_ranges(bands, dispatch.ranges(rank))
    return intersect(seen, dispatch.segments)


def split_into_stages(
    bands: IntArray, dispatch: DispatchPlan, overlap_degree: int, ranks_per_node: int = 1
) -> list[list[tuple[IntArray, IntArray]]]:
    """Return the pieces that every rank receives in each exchange, as in `needed_keys`, by rank.

    Pieces come in the order in which they arrive: by the owner's place in its node, then by node, then by row; with
    one rank per node that is by owner. With `overlap_degree` 0 there is one exchange, and it holds the rank's own keys
    as well. All ranks of a node receive a row in the same exchange, so that it has to come to the node only once.
    """
    nodes = range(0, dispatch.cp_size, ranks_per_node)
    return [
        stages
        for first in nodes
        for stages in _stages_of_node(bands, dispatch, overlap_degree, range(first, first + ranks_per_node))
    ]


def _stages_of_node(
    bands: IntArray, dispatch: DispatchPlan, overlap_degree: int, ranks: range
) -> list[list[tuple[IntArray, IntArray]]]:
    needed = [needed_keys(bands, dispatch, rank) for rank in ranks]
    if overlap_degree == 0:
        return [[_in_order(pieces, dispatch, len(ranks))] for pieces, _ in needed]
    remote = [pieces[dispatch.segments[i, 2] != rank] for rank, (pieces, i) in zip(ranks, needed, strict=True)]
    if len(ranks) == 1:
        return [[_in_order(part, dispatch, 1) for part in _cut(remote[0], dispatch, overlap_degree, ranks)]]
    together, _ = intersect(merge_ranges(np.concatenate(remote)), dispatch.segments)
    by_stage = _cut(together, dispatch, overlap_degree, ranks)
    return [
        [_in_order(intersect(pieces, merge_ranges(part))[0], dispatch, len(ranks)) for part in by_stage]
        for pieces in remote
    ]


def _cut(pieces: IntArray, dispatch: DispatchPlan, overlap_degree: int, ranks: range) -> list[IntArray]:
    """Return the pieces that come to a node, in stages of equal size; the rows of the next nodes come first."""
    owner = dispatch.segments[_segments_of(pieces, dispatch), 2]
    pieces = pieces[np.argsort((owner - ranks.start) % dispatch.cp_size, kind="stable")]
    ends = np.cumsum(pieces[:, 1] - pieces[:, 0])
    total = int(ends[-1]) if len(ends) else 0
    stages = []
    for stage in range(overlap_degree):
        # rows [lo, hi) of the concatenated pieces
        lo, hi = total * stage // overlap_degree, total * (stage + 1) // overlap_degree
        begins = ends - (pieces[:, 1] - pieces[:, 0])
        cut = np.stack([pieces[:, 0] + np.maximum(lo - begins, 0), pieces[:, 1] - np.maximum(ends - hi, 0)], 1)
        stages.append(cut[cut[:, 0] < cut[:, 1]])
    return stages


def _in_order(pieces: IntArray, dispatch: DispatchPlan, per_node: int) -> tuple[IntArray, IntArray]:
    """Return pieces, each of one segment, in the order in which they arrive, and their segments."""
    index = _segments_of(pieces, dispatch)
    owner = dispatch.segments[index, 2]
    nodes = dispatch.cp_size // per_node
    order = np.argsort(owner % per_node * nodes + owner // per_node, kind="stable")
    return pieces[order], index[order]


def _segments_of(pieces: IntArray, dispatch: DispatchPlan) -> IntArray:
    return np.searchsorted(dispatch.segments[:, 0], pieces[:, 0], side="right") - 1
