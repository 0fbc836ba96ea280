"""Sets of (q, k) pairs given by functions of q and of k, and their bands.

A set is a tree: conditions on one index (`Rows`, `Keys`), conditions f(q) + g(k) in some intervals (`Within`), and
intersections and unions of sets. Nothing is evaluated pair by pair: f and g fall into runs on which they rest or move
by one, two runs meet in one rectangle or band, and only runs that can meet are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from torch_magi import _planner
from torch_magi.masks.mask import INF, Bands
from torch_magi.masks.ranges import IntArray

MOST_PIECES = 1 << 20  # rectangles and bands of one condition, before they are joined
MOST_JOINED = 1 << 18  # equal runs that are paired without looking at where the rest of the tree is true
FAR = 1 << 62  # an open end of an interval
LARGEST = 1 << 59  # of |f| and |g|

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class TooManyPieces(Exception):
    """A set has more pieces than are worth holding."""


@dataclass(frozen=True, eq=False)
class Runs:
    """A function of an index as runs: on [start, end) it is first + slope * (index - start), slope -1, 0 or 1."""

    start: IntArray
    end: IntArray
    first: IntArray
    slope: IntArray

    @cached_property
    def bounds(self) -> tuple[IntArray, IntArray]:
        """The least and the greatest value of each run."""
        last = self.first + self.slope * (self.end - self.start - 1)
        return np.minimum(self.first, last), np.maximum(self.first, last)

    @cached_property
    def monotone(self) -> bool:
        low, high = self.bounds
        return bool((high[:-1] <= low[1:]).all() or (low[:-1] >= high[1:]).all())

    @cached_property
    def constant(self) -> bool:
        return not self.slope.any()


def runs_of(values: IntArray) -> Runs:
    """Return the runs of values int64 [n]. They are long, not always the longest."""
    step = np.diff(values)
    cut = np.abs(step) > 1
    joint = ~cut[1:] & ~cut[:-1] & (step[1:] != step[:-1])  # one token cannot belong to two runs
    cut[1:] |= joint & (step[1:] != 0)
    cut[:-1] |= joint & (step[1:] == 0)
    start = np.concatenate([[0], np.flatnonzero(cut) + 1]).astype(np.int64)
    end = np.append(start[1:], len(values))
    slope = np.where(end - start > 1, step[np.minimum(start, len(step) - 1)] if len(step) else 0, 0)
    return Runs(start, end, values[start], slope)


def true_ranges(values: BoolArray) -> IntArray:
    """Return the ranges [n, 2] in which booleans are true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], values, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).astype(np.int64)


# --- the tree ---


@dataclass(frozen=True, eq=False)
class Rows:
    """The pairs of some queries: bool [sq]."""

    chosen: BoolArray

    def complement(self) -> Rows:
        return Rows(~self.chosen)


@dataclass(frozen=True, eq=False)
class Keys:
    """The pairs of some keys: bool [sk]."""

    chosen: BoolArray

    def complement(self) -> Keys:
        return Keys(~self.chosen)


@dataclass(frozen=True, eq=False)
class Within:
    """The pairs with f(q) + g(k) in one of the intervals, which are int64 [n, 2], sorted and apart.

    f: int64 [sq]. g: int64 [sk]. Neither is larger than LARGEST.
    """

    f: IntArray
    g: IntArray
    intervals: IntArray

    @cached_property
    def rows(self) -> Runs:
        return runs_of(self.f)

    @cached_property
    def keys(self) -> Runs:
        return runs_of(self.g)

    @cached_property
    def is_point(self) -> bool:
        return len(self.intervals) == 1 and self.intervals[0, 1] - self.intervals[0, 0] == 1

    def complement(self) -> Within:
        ends = np.concatenate([[-FAR], self.intervals.ravel(), [FAR]]).reshape(-1, 2)
        return Within(self.f, self.g, ends[ends[:, 0] < ends[:, 1]])


@dataclass(frozen=True, eq=False)
class Intersection:
    """The pairs that are in all parts; every pair if there are none."""

    parts: tuple[PairSet, ...]

    def complement(self) -> Union:
        return Union(tuple(part.complement() for part in self.parts))


@dataclass(frozen=True, eq=False)
class Union:
    """The pairs that are in a part; no pair if there are none."""

    parts: tuple[PairSet, ...]

    def complement(self) -> Intersection:
        return Intersection(tuple(part.complement() for part in self.parts))


PairSet = Rows | Keys | Within | Intersection | Union


def both(*parts: PairSet) -> PairSet:
    """Return the intersection, without nesting."""
    flat = [p for part in parts for p in (part.parts if isinstance(part, Intersection) else (part,))]
    return flat[0] if len(flat) == 1 else Intersection(tuple(flat))


def either(*parts: PairSet) -> PairSet:
    """Return the union, without nesting."""
    flat = [p for part in parts for p in (part.parts if isinstance(part, Union) else (part,))]
    return flat[0] if len(flat) == 1 else Union(tuple(flat))


# --- its bands ---


def bands_of(pairs: PairSet, sq: int, sk: int) -> Bands:
    """Return the bands of a set, in normal form.

    Raises:
        TooManyPieces: if there are too many.
    """
    return _evaluate(pairs, _planner.normalize(_rectangles([0], [sq], [0], [sk])))


def _rectangles(q0: Any, q1: Any, k0: Any, k1: Any, dlo: Any = -INF, dhi: Any = INF) -> Bands:
    columns = np.broadcast_arrays(*(np.asarray(c, np.int64) for c in (q0, q1, k0, k1, dlo, dhi, 1)))
    return np.stack(columns, 1)


def _cost(pairs: PairSet) -> int:
    """Return about how many pieces a set has; what is small goes first, and the rest is looked for only there."""
    if isinstance(pairs, (Rows, Keys)):
        return 1
    if isinstance(pairs, (Intersection, Union)):
        return sum(_cost(part) for part in pairs.parts)
    n, m = len(pairs.rows.start), len(pairs.keys.start)
    return n + m if pairs.rows.monotone and pairs.keys.monotone else n * m


def _evaluate(pairs: PairSet, region: Bands) -> Bands:
    """Return the part of a set that lies in a region."""
    if not len(region):
        return region
    if isinstance(pairs, Intersection):
        for part in sorted(pairs.parts, key=_cost):
            region = _evaluate(part, region)
        return region
    if isinstance(pairs, Union):
        return _joined([_evaluate(part, region) for part in pairs.parts])
    if isinstance(pairs, Rows):
        ranges = true_ranges(pairs.chosen)
        found = _rectangles(ranges[:, 0], ranges[:, 1], 0, region[:, 3].max())
    elif isinstance(pairs, Keys):
        ranges = true_ranges(pairs.chosen)
        found = _rectangles(0, region[:, 1].max(), ranges[:, 0], ranges[:, 1])
    else:
        opposite = pairs.complement()
        if opposite.is_point:
            return _planner.combine(region, _within(opposite, region), "sub")
        found = _within(pairs, region)
    return _planner.combine(found, region, "and")


def _joined(pieces: list[Bands]) -> Bands:
    bands = np.concatenate([np.empty((0, 7), np.int64), *pieces])
    if len(bands) > MOST_PIECES:
        raise TooManyPieces
    return _planner.normalize(bands) if len(pieces) > 1 else bands


def _within(pairs: Within, region: Bands) -> Bands:
    """Return bands of all pairs of a set that lie in the region, and perhaps of others."""
    if pairs.is_point:
        met = _equal_runs(pairs.rows, pairs.keys, int(pairs.intervals[0, 0]))
        if met is not None:
            i, j = met
            one = np.zeros(len(i), np.int64)
            rows, keys = pairs.rows, pairs.keys
            return _meet(pairs, i, j, (rows.start[i], rows.end[i], keys.start[j], keys.end[j]), one, one + 1)
    return _search(pairs, region)


def _equal_runs(rows: Runs, keys: Runs, total: int) -> tuple[IntArray, IntArray] | None:
    """Return which runs hold values with sum `total`; None if there are very many, or runs of both sides move."""
    if not rows.constant:
        if not keys.constant:
            return None
        met = _equal_runs(keys, rows, total)
        return None if met is None else met[::-1]
    low, high = keys.bounds
    order = np.argsort(rows.first, kind="stable")
    begin = np.searchsorted(rows.first[order], total - high, "left")
    count = np.searchsorted(rows.first[order], total - low, "right") - begin
    if count.sum() > MOST_JOINED:
        return None
    return order[_spread(begin, count)], np.repeat(np.arange(len(low)), count)


def _spread(begin: IntArray, count: IntArray) -> IntArray:
    """Return begin[0], begin[0] + 1, ... (count[0] of them), begin[1], ..."""
    before = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(begin - before, count)


class _Tree:
    """Runs in a binary tree: node 1 is the root, 2n and 2n + 1 are below n, the leaves are the runs."""

    def __init__(self, runs: Runs) -> None:
        n = len(runs.start)
        self.runs = runs
        self.leaf = leaf = 1 << (n - 1).bit_length()
        low, high = runs.bounds
        self.low, self.high = np.full(2 * leaf, LARGEST), np.full(2 * leaf, -LARGEST)
        self.low[leaf : leaf + n], self.high[leaf : leaf + n] = low, high
        self.start, self.end = np.full(2 * leaf, runs.end[-1]), np.full(2 * leaf, runs.end[-1])
        self.start[leaf : leaf + n], self.end[leaf : leaf + n] = runs.start, runs.end
        while leaf > 1:
            half, left, right = slice(leaf // 2, leaf), slice(leaf, 2 * leaf, 2), slice(leaf + 1, 2 * leaf, 2)
            self.low[half] = np.minimum(self.low[left], self.low[right])
            self.high[half] = np.maximum(self.high[left], self.high[right])
            self.start[half], self.end[half] = self.start[left], self.end[right]
            leaf //= 2

    def over(self, begin: IntArray, end: IntArray) -> IntArray:
        """Return the lowest node that holds the indices [begin, end)."""
        a, b = (np.searchsorted(self.runs.start, x, "right") - 1 + self.leaf for x in (begin, end - 1))
        _, levels = np.frexp((a ^ b).astype(np.float64))  # the bits in which they differ
        return a >> levels


def _search(pairs: Within, region: Bands) -> Bands:
    """Return the bands of a set in the bounding boxes of a region's bands.

    Pairs of nodes, one of the rows and one of the keys, are halved until their values decide.
    """
    rows, keys = _Tree(pairs.rows), _Tree(pairs.keys)
    begins, ends = pairs.intervals[:, 0], pairs.intervals[:, 1]
    if len(pairs.rows.start) * len(pairs.keys.start) <= len(region):
        region = _rectangles([0], [region[:, 1].max()], [0], [region[:, 3].max()])
    q0, q1, k0, k1, dlo, dhi, step = region.T
    dlo = dlo - step + 1
    k0, k1 = np.maximum(k0, q0 + dlo), np.minimum(k1, q1 - 1 + dhi)
    u, v, box = rows.over(q0, q1), keys.over(k0, k1), np.arange(len(region))
    found: list[Bands] = []
    while len(u):
        a, b = np.maximum(rows.start[u], q0[box]), np.minimum(rows.end[u], q1[box])
        c, d = np.maximum(keys.start[v], k0[box]), np.minimum(keys.end[v], k1[box])
        low, high = rows.low[u] + keys.low[v], rows.high[u] + keys.high[v]
        first, last = np.searchsorted(ends, low, "right"), np.searchsorted(begins, high, "right")
        alive = (a < b) & (c < d) & (d - 1 - a >= dlo[box]) & (c - b + 1 < dhi[box]) & (first < last)
        inside = alive & (last - first == 1)
        nth = np.minimum(first, len(begins) - 1)
        inside &= (begins[nth] <= low) & (high < ends[nth])
        found.append(_rectangles(a[inside], b[inside], c[inside], d[inside]))
        undecided = alive & ~inside
        below = undecided & (u >= rows.leaf) & (v >= keys.leaf)
        if below.any():
            i, j = u[below] - rows.leaf, v[below] - keys.leaf
            where = (a[below], b[below], c[below], d[below])
            found.append(_meet(pairs, i, j, where, first[below], last[below]))
        u, v, box = _halve(u, v, box, undecided & ~below, rows.leaf, keys.leaf)
        if len(u) + sum(map(len, found)) > 2 * MOST_PIECES:
            raise TooManyPieces
    return np.concatenate([np.empty((0, 7), np.int64), *found])


def _halve(
    u: IntArray, v: IntArray, box: IntArray, chosen: BoolArray, u_leaf: int, v_leaf: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the chosen pairs of nodes with each node that is no leaf replaced by the two below it."""
    u, v, box = u[chosen], v[chosen], box[chosen]
    for _ in range(2):  # first the rows, then, the other way round, the keys
        inner = u < u_leaf
        u, v, box = (
            np.concatenate([2 * u[inner], 2 * u[inner] + 1, u[~inner]]),
            np.concatenate([v[inner], v[inner], v[~inner]]),
            np.concatenate([box[inner], box[inner], box[~inner]]),
        )
        u, v, u_leaf, v_leaf = v, u, v_leaf, u_leaf
    return u, v, box


def _meet(
    pairs: Within, i: IntArray, j: IntArray, where: tuple[IntArray, IntArray, IntArray, IntArray],
    first: IntArray, last: IntArray,
) -> Bands:  # fmt: skip
    """Return the bands in which run i[n] of the rows and run j[n] of the keys have sums in intervals first .. last - 1.

    where: first and last rows and keys of each meeting.
    """
    a, b, c, d = where
    rows, keys = pairs.rows, pairs.keys
    s, t = rows.slope[i], keys.slope[j]
    value = rows.first[i] + s * (a - rows.start[i]) + keys.first[j] + t * (c - keys.start[j])  # at (a, c)
    alike = s * t > 0  # the sums are equal along the other diagonal, which no band is: one row at a time
    if alike.any():
        count = np.where(alike, b - a, 1)
        _check(count)
        offset = _spread(np.zeros(len(a), np.int64), count)
        a, b, c, d, s, t, value, first, last, alike = (
            np.repeat(x, count) for x in (a, b, c, d, s, t, value, first, last, alike)
        )
        a, value = a + offset, value + s * offset
        b, s = np.where(alike, a + 1, b), np.where(alike, 0, s)
    _check(last - first)
    nth = _spread(first, last - first)
    a, b, c, d, s, t, value = (np.repeat(x, last - first) for x in (a, b, c, d, s, t, value))
    low, high = pairs.intervals[nth, 0] - value, pairs.intervals[nth, 1] - value
    # Along one direction of slope 1 or -1, the steps in [near, far) are inside.
    turned = (t < 0) | ((t == 0) & (s < 0))
    near, far = np.where(turned, 1 - high, low), np.where(turned, 1 - low, high)
    still_rows, still_keys = s == 0, t == 0
    on_keys, on_rows = still_rows & ~still_keys, ~still_rows & still_keys
    diagonal = ~still_rows & ~still_keys
    gone = still_rows & still_keys & ((low > 0) | (high <= 0))
    q0, q1 = np.where(on_rows, np.maximum(a, a + near), a), np.where(on_rows, np.minimum(b, a + far), b)
    k0, k1 = np.where(on_keys, np.maximum(c, c + near), c), np.where(on_keys, np.minimum(d, c + far), d)
    dlo = np.where(diagonal & (near > -LARGEST), near + c - a, -INF)
    dhi = np.where(diagonal & (far < LARGEST), far + c - a, INF)
    keep = (q0 < q1) & (k0 < k1) & ~gone
    return _rectangles(q0, q1, k0, k1, dlo, dhi)[keep]


def _check(count: IntArray) -> None:
    if count.sum() > MOST_PIECES:
        raise TooManyPieces
