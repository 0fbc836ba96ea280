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
MOST_WORK = 1 << 26  # of one combination of bands, see _combine; about 3 s
MOST_CONDITIONS = 1 << 12
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
    padded = np.zeros(len(values) + 2, bool)
    padded[1:-1] = values
    return np.flatnonzero(padded[1:] != padded[:-1]).astype(np.int64).reshape(-1, 2)


def gaps(ranges: IntArray) -> IntArray:
    """Return what lies between ranges [n, 2], which are sorted and apart, and before and behind them."""
    ends = np.concatenate([[-FAR], ranges.ravel(), [FAR]]).reshape(-1, 2)
    found: IntArray = ends[ends[:, 0] < ends[:, 1]]
    return found


# --- the tree ---


@dataclass(frozen=True, eq=False)
class Rows:
    """The pairs of some queries: int64 [n, 2], ranges of them, sorted and apart."""

    ranges: IntArray

    def complement(self) -> Rows:
        return Rows(gaps(self.ranges))


@dataclass(frozen=True, eq=False)
class Keys:
    """The pairs of some keys: int64 [n, 2], ranges of them, sorted and apart."""

    ranges: IntArray

    def complement(self) -> Keys:
        return Keys(gaps(self.ranges))


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
        return len(self.intervals) == 1 and self.intervals[0, 1] == self.intervals[0, 0] + 1

    def complement(self) -> Within:
        return Within(self.f, self.g, gaps(self.intervals))


@dataclass(frozen=True, eq=False)
class Table:
    """The pairs of rows [q_edges[i], q_edges[i + 1]) and keys [k_edges[j], k_edges[j + 1]) where visible[i, j]."""

    q_edges: IntArray
    k_edges: IntArray
    visible: BoolArray

    def complement(self) -> Table:
        return Table(self.q_edges, self.k_edges, ~self.visible)


@dataclass(frozen=True, eq=False)
class Intersection:
    """The pairs that are in all parts; every pair if there are none."""

    parts: tuple[PairSet, ...]

    @cached_property
    def size(self) -> int:
        return _size(self.parts)

    def complement(self) -> Union:
        return Union(tuple(part.complement() for part in self.parts))


@dataclass(frozen=True, eq=False)
class Union:
    """The pairs that are in a part; no pair if there are none."""

    parts: tuple[PairSet, ...]

    @cached_property
    def size(self) -> int:
        return _size(self.parts)

    def complement(self) -> Intersection:
        return Intersection(tuple(part.complement() for part in self.parts))


PairSet = Rows | Keys | Within | Table | Intersection | Union


def both(*parts: PairSet) -> PairSet:
    """Return the intersection, without nesting."""
    flat = tuple(p for part in parts for p in (part.parts if isinstance(part, Intersection) else (part,)))
    return flat[0] if len(flat) == 1 else _checked(Intersection(flat))


def either(*parts: PairSet) -> PairSet:
    """Return the union, without nesting."""
    flat = tuple(p for part in parts for p in (part.parts if isinstance(part, Union) else (part,)))
    return flat[0] if len(flat) == 1 else _checked(Union(flat))


def _size(parts: tuple[PairSet, ...]) -> int:
    """Return the number of conditions in sets; one that is used twice counts twice."""
    return sum(part.size if isinstance(part, (Intersection, Union)) else 1 for part in parts)


def _checked(pairs: Intersection | Union) -> PairSet:
    if pairs.size > MOST_CONDITIONS:
        raise TooManyPieces
    return pairs


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
    if isinstance(pairs, Table):
        return pairs.visible.size
    n, m = len(pairs.rows.start), len(pairs.keys.start)
    meetings = n + m if pairs.rows.monotone and pairs.keys.monotone else n * m
    return meetings * len(pairs.intervals)


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
    if isinstance(pairs, (Rows, Keys)):
        rows, keys = int(region[:, 1].max()), int(region[:, 3].max())
        begin, end = np.clip(pairs.ranges, 0, rows if isinstance(pairs, Rows) else keys).T
        found = _rectangles(begin, end, 0, keys) if isinstance(pairs, Rows) else _rectangles(0, rows, begin, end)
        found = found[begin < end]
    elif isinstance(pairs, Table):
        offsets, seen = _planner.row_intervals(_planner.from_dense(pairs.visible), 0, len(pairs.visible))
        row = np.repeat(np.arange(len(pairs.visible)), np.diff(offsets))
        q, k = pairs.q_edges, pairs.k_edges
        found = _rectangles(q[row], q[row + 1], k[seen[:, 0]], k[seen[:, 1]])
    else:
        opposite = pairs.complement()
        if opposite.is_point:
            return _combine(region, _within(opposite, region), "sub")
        found = _within(pairs, region)
    return _combine(found, region, "and")


def _joined(pieces: list[Bands]) -> Bands:
    bands = np.concatenate([np.empty((0, 7), np.int64), *pieces])
    return _combine(bands, bands[:0], "or") if len(pieces) > 1 else bands


def _combine(a: Bands, b: Bands, op: str) -> Bands:
    """Combine bands, unless that takes very long: as long as, for every band, the number of bands that begin in it."""
    q0, q1, k0, k1, dlo, dhi, step = np.concatenate([a, b]).T
    if len(q0) > MOST_PIECES:
        raise TooManyPieces
    turns = (np.clip(k0 - dlo, q0, q1), np.clip(k1 - dhi, q0, q1))
    steps = (q1 - q0) // step * (step > 1)
    stairs = np.repeat(q0, steps) + _spread(np.zeros(len(q0), np.int64), steps) * np.repeat(step, steps)
    events = np.unique(np.concatenate([q0, q1, *turns, stairs]))
    work = np.searchsorted(events, q1) - np.searchsorted(events, q0)
    if work.sum() > MOST_WORK:
        raise TooManyPieces
    return _planner.combine(a, b, op)


def _within(pairs: Within, region: Bands) -> Bands:
    """Return bands of all pairs of a set that lie in the region, and perhaps of others."""
    rows, keys = pairs.rows, pairs.keys
    if pairs.is_point:
        met = _equal_runs(rows, keys, int(pairs.intervals[0, 0]))
        if met is not None:
            i, j = met
            where = np.stack([rows.start[i], rows.end[i], keys.start[j], keys.end[j]])
            return _meet(rows, keys, pairs.intervals, i, j, where, np.array([[-INF], [INF]]))
    # Where one side has many runs and the other a few slopes, these are cut, so that most pairs are decided in large
    # squares and not in one long rectangle for every run.
    n, m = len(rows.start), len(keys.start)
    if n * m * len(pairs.intervals) <= len(region):
        region = _rectangles([0], [region[:, 1].max()], [0], [region[:, 3].max()])
    return _search(_cut(rows, m), _cut(keys, n), pairs.intervals, region)


def _equal_runs(rows: Runs, keys: Runs, total: int) -> tuple[IntArray, IntArray] | None:
    """Return which runs hold values with sum `total`; None if there are very many, or runs of both sides move."""
    if not rows.constant:
        if not keys.constant:
            return None
        met = _equal_runs(keys, rows, total)
        return None if met is None else (met[1], met[0])
    low, high = keys.bounds
    order = np.argsort(rows.first, kind="stable")
    begin = np.searchsorted(rows.first[order], total - high, "left")
    count = np.searchsorted(rows.first[order], total - low, "right") - begin
    if count.sum() > MOST_JOINED:
        return None
    return order[_spread(begin, count)], np.repeat(np.arange(len(low)), count)


def _spread(begin: IntArray, count: IntArray) -> IntArray:
    """Return begin[0], begin[0] + 1, ... (count[0] of them), begin[1], ..."""
    if count.sum() > MOST_PIECES:
        raise TooManyPieces
    before = np.cumsum(count) - count
    found: IntArray = np.arange(int(count.sum())) + np.repeat(begin - before, count)
    return found


def _cut(runs: Runs, pieces: int) -> Runs:
    """Return the runs with those that move cut, to about `pieces` in all."""
    if pieces <= 8 * len(runs.start):
        return runs
    length = -(-int(runs.end[-1]) // pieces)
    count = np.where(runs.slope == 0, 1, -(-(runs.end - runs.start) // length))
    offset = length * _spread(np.zeros(len(count), np.int64), count)
    start, slope = np.repeat(runs.start, count) + offset, np.repeat(runs.slope, count)
    return Runs(start, np.append(start[1:], runs.end[-1]), np.repeat(runs.first, count) + slope * offset, slope)


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


def _search(row_runs: Runs, key_runs: Runs, intervals: IntArray, region: Bands) -> Bands:
    """Return the bands of sums in intervals, in the bounding boxes of a region's bands.

    Pairs of nodes, one of the rows and one of the keys, are halved until their values decide.
    """
    rows, keys = _Tree(row_runs), _Tree(key_runs)
    begins, ends = intervals.T
    q0, q1, k0, k1, dlo, dhi, step = region.T
    diagonals = np.stack([np.maximum(dlo - step + 1, -INF), dhi])
    boxes = np.stack([q0, q1, np.maximum(k0, q0 + diagonals[0]), np.minimum(k1, q1 - 1 + dhi)])
    u, v, box = rows.over(*boxes[:2]), keys.over(*boxes[2:]), np.arange(len(region))
    found = [np.empty((0, 7), np.int64)]
    while len(u) and len(intervals):
        nodes = np.stack([rows.start[u], rows.end[u], keys.start[v], keys.end[v]])
        where = _inner(nodes, boxes[:, box], diagonals[:, box])
        low, high = rows.low[u] + keys.low[v], rows.high[u] + keys.high[v]
        first, last = np.searchsorted(ends, low, "right"), np.searchsorted(begins, high, "right")
        alive = (where[0] < where[1]) & (where[2] < where[3]) & (first < last)
        nth = np.minimum(first, len(begins) - 1)
        inside = alive & (begins[nth] <= low) & (high < ends[nth])
        found.append(_rectangles(*where[:, inside]))
        undecided = alive & ~inside
        below = undecided & (u >= rows.leaf) & (v >= keys.leaf)
        if below.any():
            i, j = u[below] - rows.leaf, v[below] - keys.leaf
            found.append(_meet(row_runs, key_runs, intervals, i, j, where[:, below], diagonals[:, box[below]]))
        u, v, box = _halve(u, v, box, undecided & ~below, rows.leaf, keys.leaf)
        if len(u) + sum(map(len, found)) > 2 * MOST_PIECES:
            raise TooManyPieces
    return np.concatenate(found)


def _inner(nodes: IntArray, boxes: IntArray, diagonals: IntArray) -> IntArray:
    """Return the smallest rectangles [4, n] of the pairs that are in both of two and between two diagonals."""
    a, b = np.maximum(nodes[0], boxes[0]), np.minimum(nodes[1], boxes[1])
    c, d = np.maximum(nodes[2], boxes[2]), np.minimum(nodes[3], boxes[3])
    dlo, dhi = diagonals
    return np.stack(
        [np.maximum(a, c - dhi + 1), np.minimum(b, d - dlo), np.maximum(c, a + dlo), np.minimum(d, b - 1 + dhi)]
    )


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
    rows: Runs, keys: Runs, intervals: IntArray, i: IntArray, j: IntArray, where: IntArray, diagonals: IntArray
) -> Bands:
    """Return the bands in which run i[n] of the rows and run j[n] of the keys have sums in intervals.

    Args:
        where: [4, n]; first and last rows and keys of each meeting.
        diagonals: [2, n] or [2, 1]; only pairs with k - q in this range are needed.
    """
    s, t = rows.slope[i], keys.slope[j]
    alike = s * t > 0  # the sums are equal along the other diagonal, which no band is: one row at a time
    if alike.any():
        diagonals = np.broadcast_to(diagonals, (2, len(i)))
        count = np.where(alike, where[1] - where[0], 1)
        row = np.repeat(where[0], count) + _spread(np.zeros(len(i), np.int64), count)
        i, j, s, t = (np.repeat(x, count) for x in (i, j, s, t))
        alike = np.repeat(alike, count)
        where, diagonals = np.repeat(where, count, 1), np.repeat(diagonals, count, 1)
        where[:2] = np.where(alike, [row, row + 1], where[:2])
        s = np.where(alike, 0, s)
        where = _inner(where, where, diagonals)
    a, b, c, d = where
    value = rows.first[i] + rows.slope[i] * (a - rows.start[i]) + keys.first[j] + t * (c - keys.start[j])  # at (a, c)
    # From (a, c) on, along the keys, the rows or the diagonal, the sum rises or falls by one a step.
    on_keys, on_rows, diagonal = (s == 0) & (t != 0), (s != 0) & (t == 0), (s != 0) & (t != 0)
    low = np.where(diagonal, np.maximum(diagonals[0] - c + a, a - b + 1), 0)  # steps
    high = np.where(
        diagonal, np.minimum(diagonals[1] - c + a, d - c), np.where(on_keys, d - c, np.where(on_rows, b - a, 1))
    )
    falls = (t < 0) | ((t == 0) & (s < 0))
    least, most = np.where(falls, value - high + 1, value + low), np.where(falls, value - low, value + high - 1)
    first, last = np.searchsorted(intervals[:, 1], least, "right"), np.searchsorted(intervals[:, 0], most, "right")
    count = np.where((low < high) & (a < b) & (c < d), np.maximum(last - first, 0), 0)
    nth = _spread(first, count)
    a, b, c, d, value, falls, on_keys, on_rows, diagonal = (
        np.repeat(x, count) for x in (a, b, c, d, value, falls, on_keys, on_rows, diagonal)
    )
    begin, end = intervals[nth, 0] - value, intervals[nth, 1] - value
    near, far = np.where(falls, 1 - end, begin), np.where(falls, 1 - begin, end)  # the steps that are inside
    q0, q1 = np.where(on_rows, np.maximum(a, a + near), a), np.where(on_rows, np.minimum(b, a + far), b)
    k0, k1 = np.where(on_keys, np.maximum(c, c + near), c), np.where(on_keys, np.minimum(d, c + far), d)
    dlo = np.where(diagonal & (near > -LARGEST), near + c - a, -INF)
    dhi = np.where(diagonal & (far < LARGEST), far + c - a, INF)
    return _rectangles(q0, q1, k0, k1, dlo, dhi)[(q0 < q1) & (k0 < k1)]
