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
    """Cut sorted disjoint ranges at the borders of sorted adjacent segments.

    Args:
        ranges: int64 [n, 2].
        segments: int64 [m, >= 2], sorted, each beginning where the one before ends.

    Returns:
        pieces int64 [p, 2], sorted; the index of each piece's segment, int64 [p].
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


def needed_keys(bands: IntArray, dispatch: DispatchPlan, rank: int) -> tuple[IntArray, IntArray]:
    """Return the keys that `rank` needs, cut by owner: pieces int64 [p, 2], segment of each int64 [p]."""
    seen = _planner.key_ranges(bands, dispatch.ranges(rank))
    return intersect(seen, dispatch.segments)


def split_into_stages(
    bands: IntArray, dispatch: DispatchPlan, rank: int, overlap_degree: int
) -> list[tuple[IntArray, IntArray]]:
    """Return the pieces that `rank` receives in each exchange, as in `needed_keys`, grouped by owner.

    With `overlap_degree` 0 there is one exchange, and it holds the rank's own keys as well.
    """
    pieces, index = needed_keys(bands, dispatch, rank)
    owner = dispatch.segments[index, 2]
    if overlap_degree == 0:
        order = np.argsort(owner, kind="stable")
        return [(pieces[order], index[order])]
    remote = owner != rank
    pieces, index, owner = pieces[remote], index[remote], owner[remote]
    order = np.argsort((owner - rank) % dispatch.cp_size, kind="stable")
    pieces, index = pieces[order], index[order]
    ends = np.cumsum(pieces[:, 1] - pieces[:, 0])
    total = int(ends[-1]) if len(ends) else 0
    stages = []
    for stage in range(overlap_degree):
        # rows [lo, hi) of the concatenated pieces
        lo, hi = total * stage // overlap_degree, total * (stage + 1) // overlap_degree
        begins = ends - (pieces[:, 1] - pieces[:, 0])
        cut = np.stack([pieces[:, 0] + np.maximum(lo - begins, 0), pieces[:, 1] - np.maximum(ends - hi, 0)], 1)
        keep = cut[:, 0] < cut[:, 1]
        cut, cut_index = cut[keep], index[keep]
        order = np.argsort(dispatch.segments[cut_index, 2], kind="stable")
        stages.append((cut[order], cut_index[order]))
    return stages
