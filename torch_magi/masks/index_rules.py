"""What operations make of expressions of a query's index and a key's index."""

from __future__ import annotations

import operator
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from torch_magi.masks.index_expressions import (
    CASTS,
    COMPARISONS,
    FILLED,
    GREATEST,
    INTERVALS,
    LEAST,
    LINEAR,
    LOGIC,
    PRODUCTS,
    Along,
    Beyond,
    Choice,
    Column,
    Expression,
    Grid,
    Operation,
    Sum,
    Truth,
    dtype_of,
    elementwise,
    expressions,
    promoted,
    substitute,
)
from torch_magi.masks.pair_sets import (
    LARGEST,
    Intersection,
    Keys,
    PairSet,
    Rows,
    Table,
    Union,
    Within,
    both,
    either,
    runs_of,
    true_ranges,
)
from torch_magi.masks.ranges import IntArray

MOST_SUMS = 1 << 24  # values that a sum can have, where a function of it is tabulated
MOST_CHOICES = 64
FEW_CELLS, MOST_CELLS = 1 << 12, 1 << 22  # of a grid; of more than a few, each stands for at least CELL pairs
CELL = 16
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rules:
    """What operations make of expressions, for `sq` queries and `sk` keys."""

    def __init__(self, sq: int, sk: int) -> None:
        self.lengths = {"q": sq, "k": sk}
        self.bases: list[Sum] = []

    def truth(self, found: Any) -> PairSet:
        """Return where a boolean without dimensions is true."""
        if isinstance(found, Truth):
            return found.pairs
        if isinstance(found, Column) and found.dtype == torch.bool and found.values.dim() == 1:
            ranges = true_ranges(found.values.numpy())
            return Rows(ranges) if found.index == "q" else Keys(ranges)
        if dtype_of(found) == torch.bool and not isinstance(found, Expression):
            if not isinstance(found, torch.Tensor) or found.dim() == 0:
                return Intersection(()) if found else Union(())
        raise Beyond

    def apply(self, name: str, func: Operation, args: Any, kwargs: Any) -> Any:
        """Return an operation's result: an expression, or a tensor if it depends on no index.

        Raises:
            Beyond: if the rules do not cover it.
        """
        found = list(expressions((args, kwargs)))
        if not found:
            return func(*args, **kwargs)
        if all(isinstance(x, Column) and x.index == found[0].index for x in found):  # type: ignore[union-attr]
            index = found[0].index  # type: ignore[union-attr]
            return Column(index, elementwise(name, func, args, kwargs, self.lengths[index]))
        if any(isinstance(x, Column) and x.values.dim() != 1 for x in found) or any(expressions(kwargs)):
            raise Beyond
        operands = list(args)
        if name == "getitem" and isinstance(operands[1], tuple) and len(operands[1]) == 1:
            operands[1] = operands[1][0]
        if name == "getitem":
            return self._otherwise(name, func, operands, kwargs)
        if any(isinstance(x, torch.Tensor) and x.dim() for x in operands):
            raise Beyond
        return self._meet(name, func, operands, kwargs)

    def _meet(self, name: str, func: Operation, operands: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply an operation to numbers and to expressions without dimensions, not all of them of one index."""
        first = operands[0]
        if name in FILLED and isinstance(first, Expression):
            return func(torch.empty((), dtype=first.dtype), *operands[1:], **kwargs)
        if name in CASTS and len(operands) == 1 and not kwargs:
            return self.cast(first, CASTS[name])
        if name == "to" and len(operands) == 2 and isinstance(operands[1], torch.dtype) and not kwargs:
            return self.cast(first, operands[1])
        if name == "where" and len(operands) == 3 and not kwargs:
            return self._where(func, *operands)
        booleans = all(dtype_of(x) == torch.bool for x in operands)
        if name in LOGIC and not kwargs and (booleans or name.startswith("logical")):
            return Truth(self._logic(LOGIC[name], [self._nonzero(x) for x in operands]))
        if any(isinstance(x, (Choice, Truth)) for x in operands):
            return self._otherwise(name, func, operands, kwargs)
        if name in COMPARISONS and not kwargs:
            pairs = self._compare(COMPARISONS[name], *operands)
            if pairs is not None:
                return Truth(pairs)
        linear = None if kwargs else self._linear(name, operands)
        if linear is not None:
            return linear
        if name in LEAST | GREATEST and len(operands) == 2 and not kwargs:
            pairs = self._compare(operator.le if name in LEAST else operator.ge, *operands)
            if pairs is not None:
                return self._choose([(pairs, operands[0]), (pairs.complement(), operands[1])], promoted(operands))
        return self._otherwise(name, func, operands, kwargs)

    def _otherwise(self, name: str, func: Operation, operands: list[Any], kwargs: dict[str, Any]) -> Any:
        for rule in (self._along, self._by_cases, self._on_grid):
            found = rule(name, func, operands, kwargs)
            if found is not None:
                return found
        raise Beyond

    # --- sums ---

    def sum_of(self, operand: Any) -> Sum | None:
        """Return an integer as a sum; None if it is none, or too large."""
        nothing = np.zeros(1, np.int64)
        dtype = dtype_of(operand)
        if isinstance(operand, Sum):
            return operand
        if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.uint64:
            return None
        if isinstance(operand, Column):
            values = operand.values.to(torch.int64, copy=True).numpy()
            if int(values.min()) < -LARGEST or int(values.max()) > LARGEST:
                return None
            return Sum(values, nothing, dtype) if operand.index == "q" else Sum(nothing, values, dtype)
        if isinstance(operand, Expression) or abs(int(operand)) > LARGEST:
            return None
        return Sum(np.array([int(operand)], np.int64), nothing, dtype)

    def _linear(self, name: str, operands: list[Any]) -> Sum | None:
        """Return a sum or a multiple of sums."""
        factors = LINEAR.get(name)
        if name in PRODUCTS:
            numbers = [x for x in operands if not isinstance(x, Expression)]
            if len(numbers) != 1 or len(operands) != 2:
                return None
            if self.sum_of(numbers[0]) is None:
                return None
            factors = tuple(0 if x is numbers[0] else int(numbers[0]) for x in operands)
        terms = [self.sum_of(x) for x in operands]
        if factors is None or len(factors) != len(terms) or any(x is None for x in terms):
            return None
        dtype = promoted(operands)
        if dtype == torch.bool:
            return None
        return _checked(_combined([x for x in terms if x is not None], factors, dtype))

    def _compare(self, op: Operation, *operands: Any) -> PairSet | None:
        """Return where a comparison holds; None unless it is one of two sums, or of two columns."""
        if len(operands) != 2:
            return None
        numbers = [x for x in operands if isinstance(x, int) and not isinstance(x, bool)]
        dtype = promoted(list(operands))
        if numbers and dtype != torch.bool and not dtype.is_floating_point and not _fits(numbers[0], dtype):
            return None
        terms = [self.sum_of(x) for x in operands]
        if any(x is None for x in terms):
            terms = [self.sum_of(x) for x in _ranks(*operands, dtype)]
        if any(x is None for x in terms):
            return None
        difference = _combined([x for x in terms if x is not None], (1, -1), torch.int64)
        return self._within(difference, np.array(INTERVALS[op], np.int64))

    def _within(self, total: Sum, intervals: IntArray) -> Within:
        f, g = (np.broadcast_to(x, n) for x, n in ((total.f, self.lengths["q"]), (total.g, self.lengths["k"])))
        return Within(np.ascontiguousarray(f), np.ascontiguousarray(g), intervals)

    # --- functions of one sum ---

    def _along(self, name: str, func: Operation, operands: list[Any], kwargs: dict[str, Any]) -> Expression | None:
        """Apply an operation to functions of one sum, for every value of the sum; None if there are several sums."""
        base, low, n, replaced = None, 0, 0, list(operands)
        for i, operand in enumerate(operands):
            if not isinstance(operand, Expression):
                continue
            if isinstance(operand, Truth) and isinstance(operand.pairs, Within):
                total = Sum(operand.pairs.f, operand.pairs.g, torch.int64)
            elif isinstance(operand, Along):
                total = operand.base
            elif isinstance(operand, Sum):
                total = operand
            else:
                return None
            own, sign, offset = self._base(total)
            if base is not None and own is not base:
                return None
            base = own
            low, high = base.range
            n = high - low + 1
            if n > MOST_SUMS:
                return None
            if isinstance(operand, Along):
                replaced[i] = Column("sum", operand.values)
                continue
            x = torch.arange(low, high + 1) * sign + offset
            if isinstance(operand, Truth) and isinstance(operand.pairs, Within):
                begins, ends = (torch.from_numpy(e.copy()) for e in operand.pairs.intervals.T)
                x = torch.searchsorted(begins, x, right=True) > torch.searchsorted(ends, x, right=True)
            replaced[i] = Column("sum", x if isinstance(operand, Truth) else x.to(operand.dtype))
        if base is None:
            return None
        try:
            values = elementwise(name, func, replaced, kwargs, n)
        except IndexError as error:  # perhaps of a value that the sum does not have
            raise Beyond from error
        if values.dim() != 1:
            raise Beyond
        if values.dtype == torch.bool:
            return Truth(self._within(base, true_ranges(values.numpy()) + low))
        return Along(base, low, values)

    def _base(self, total: Sum) -> tuple[Sum, int, int]:
        """Return (base, sign, offset) with total = sign * base + offset, and one base for all that have the same."""
        f, g = total.f - total.f[0], total.g - total.g[0]
        moves = [x[np.argmax(x != 0)] for x in (f, g)]
        sign = -1 if (moves[0] or moves[1]) < 0 else 1
        f, g = sign * f, sign * g
        offset = int(total.f[0]) + int(total.g[0])
        for base in self.bases:
            if _same(base.f, f) and _same(base.g, g):
                return base, sign, offset
        self.bases.append(Sum(f, g, torch.int64))
        return self.bases[-1], sign, offset

    def _pieces(self, operand: Along) -> list[tuple[PairSet, Any]] | None:
        """Return a function of a sum as multiples of the sum, where it has few pieces; None where it has many."""
        if operand.dtype.is_floating_point:
            return None
        runs = runs_of(operand.values.to(torch.int64).numpy())
        if len(runs.start) > MOST_CHOICES:
            return None
        cases: list[tuple[PairSet, Any]] = []
        for start, end, first, slope in zip(
            *(x.tolist() for x in (runs.start, runs.end, runs.first, runs.slope)), strict=True
        ):
            at = start + operand.low
            pairs = self._within(operand.base, np.array([[at, end + operand.low]], np.int64))
            constant = Sum(np.array([first - slope * at], np.int64), np.zeros(1, np.int64), operand.dtype)
            cases.append((pairs, _combined([operand.base, constant], (slope, 1), operand.dtype)))
        return cases

    # --- values on a grid ---

    def _on_grid(self, name: str, func: Operation, operands: list[Any], kwargs: dict[str, Any]) -> Expression | None:
        """Apply an operation to every pair of a run of queries and a run of keys; None if there are many."""
        parts = list(expressions(operands))
        if any(isinstance(x, (Choice, Truth)) for x in parts):
            return None
        q_edges, k_edges = (self._edges(parts, index) for index in ("q", "k"))
        q, k = q_edges[:-1], k_edges[:-1]
        enough = max(FEW_CELLS, self.lengths["q"] * self.lengths["k"] // CELL)
        if len(q) * len(k) > min(enough, MOST_CELLS):
            return None

        def cells(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return x
            if isinstance(x, Column):
                values = x.values[q, None] if x.index == "q" else x.values[None, k]
            elif isinstance(x, Grid):
                i, j = (np.searchsorted(e, p, "right") - 1 for e, p in ((x.q_edges, q), (x.k_edges, k)))
                values = x.values[i][:, j]
            else:
                total = x.base if isinstance(x, Along) else x
                f, g = (np.broadcast_to(c, self.lengths[n]) for c, n in ((total.f, "q"), (total.g, "k")))
                sums = torch.from_numpy(f[q, None] + g[None, k])
                values = x.values[sums - x.low] if isinstance(x, Along) else sums.to(x.dtype)
            return Column("grid", values.expand(len(q), len(k)).reshape(-1))

        values = elementwise(name, func, substitute(operands, cells), kwargs, len(q) * len(k))
        if values.dim() != 1:
            raise Beyond
        return self._table(q_edges, k_edges, values.reshape(len(q), len(k)))

    def _table(self, q_edges: IntArray, k_edges: IntArray, values: torch.Tensor) -> Expression:
        if values.dtype == torch.bool:
            return Truth(Table(q_edges, k_edges, values.contiguous().numpy()))
        return Grid(q_edges, k_edges, values)

    def _edges(self, parts: list[Expression], index: str) -> IntArray:
        """Return where queries, or keys, begin on which expressions have other values, and the length."""
        n = self.lengths[index]
        edge = np.zeros(n + 1, bool)
        edge[[0, n]] = True
        for x in parts:
            if isinstance(x, Grid):
                edge[x.q_edges if index == "q" else x.k_edges] = True
                continue
            total = x.base if isinstance(x, Along) else x
            if isinstance(total, Sum):
                values = total.f if index == "q" else total.g
            elif isinstance(total, Column) and total.index == index:
                values = total.values.contiguous().view(BITS[total.dtype.itemsize]).numpy()  # NaN, -0.0, bfloat16
            else:
                continue
            if len(values) == n:
                edge[1:n] |= values[1:] != values[:-1]
        return np.flatnonzero(edge)

    # --- choices and booleans ---

    def cast(self, operand: Any, dtype: torch.dtype) -> Any:
        """Return an operand in another dtype."""
        if operand.dtype == dtype:
            return operand
        if isinstance(operand, Column):
            return Column(operand.index, operand.values.to(dtype))
        if isinstance(operand, torch.Tensor):
            return operand.to(dtype)
        if isinstance(operand, Grid):
            return self._table(operand.q_edges, operand.k_edges, operand.values.to(dtype))
        if isinstance(operand, Truth):
            cases = self._cases(operand) or []
            return self._choose(cases, dtype)
        if isinstance(operand, Choice):
            return self._choose(list(operand.cases), dtype)
        if dtype == torch.bool:
            return Truth(self._nonzero(operand))
        if isinstance(operand, Sum) and not dtype.is_floating_point:
            return _checked(Sum(operand.f, operand.g, dtype))
        found = self._along("to", torch.Tensor.to, [operand, dtype], {})
        if found is None:
            raise Beyond
        return found

    def _nonzero(self, operand: Any) -> PairSet:
        """Return where an operand is true."""
        if dtype_of(operand) == torch.bool:
            return self.truth(operand)
        found = self.apply("ne", torch.ne, (operand, 0), {}) if isinstance(operand, Expression) else operand != 0
        return self.truth(found)

    def _logic(self, op: str, sets: list[PairSet]) -> PairSet:
        if op == "not":
            return sets[0].complement()
        a, b = sets
        if op == "and":
            return both(a, b)
        if op == "or":
            return either(a, b)
        if op == "same":
            b = b.complement()
        return either(both(a, b.complement()), both(a.complement(), b))

    def _where(self, func: Operation, condition: Any, a: Any, b: Any) -> Any:
        dtype = promoted([a, b])
        pairs = self.truth(condition)
        if dtype == torch.bool:
            return Truth(either(both(pairs, self.truth(a)), both(pairs.complement(), self.truth(b))))
        found = self._along("where", func, [condition, a, b], {}) if isinstance(condition, Truth) else None
        return found or self._choose([(pairs, a), (pairs.complement(), b)], dtype)

    def _choose(self, cases: list[tuple[PairSet, Any]], dtype: torch.dtype) -> Any:
        """Return a choice of operands, all in one dtype."""
        flat: list[tuple[PairSet, Any]] = []
        for pairs, operand in cases:
            if not isinstance(operand, (torch.Tensor, Expression)):
                operand = torch.tensor(operand, dtype=dtype)
            if isinstance(operand, (Choice, Truth)):
                inner = self._cases(operand) or []
                flat += [(both(pairs, p), self.cast(x, dtype)) for p, x in inner]
            else:
                flat.append((pairs, self.cast(operand, dtype)))
        if dtype == torch.bool:
            return Truth(either(*(both(pairs, self._nonzero(x)) for pairs, x in flat)))
        if len(flat) > MOST_CHOICES:
            raise Beyond
        return Choice(tuple(flat), dtype)

    def _cases(self, operand: Any) -> list[tuple[PairSet, Any]] | None:
        """Return an operand as cases; None if it is a single one."""
        if isinstance(operand, Choice):
            return list(operand.cases)
        if isinstance(operand, Truth):
            return [(operand.pairs, torch.tensor(True)), (operand.pairs.complement(), torch.tensor(False))]
        return self._pieces(operand) if isinstance(operand, Along) else None

    def _by_cases(self, name: str, func: Operation, operands: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply an operation to each case of its operands."""
        cases = [self._cases(x) for x in operands]
        if not any(cases) or prod(len(x) for x in cases if x) > MOST_CHOICES:
            return None
        single: PairSet = Intersection(())
        found = []
        for combination in product(*(x or [(single, o)] for x, o in zip(cases, operands, strict=True))):
            pairs = both(*(p for p, _ in combination))
            try:
                found.append((pairs, self.apply(name, func, [x for _, x in combination], kwargs)))
            except IndexError as error:  # perhaps of an index that this case does not have
                raise Beyond from error
        dtypes = {x.dtype for _, x in found}
        if len(dtypes) != 1:
            raise Beyond
        return self._choose(found, dtypes.pop())


def _fits(number: int, dtype: torch.dtype) -> bool:
    info = torch.iinfo(dtype)
    return info.min <= number <= info.max


def _checked(total: Sum) -> Sum:
    """Return a sum all of whose values fit its dtype."""
    if not all(_fits(x, total.dtype) for x in total.range):
        raise Beyond
    return total


def _combined(terms: list[Sum], factors: tuple[int, ...], dtype: torch.dtype) -> Sum:
    """Return the sum of terms times factors."""
    for term, factor in zip(terms, factors, strict=True):
        for x in (term.f, term.g):
            if max(abs(int(x.min())), abs(int(x.max()))) * abs(factor) > LARGEST // 2:
                raise Beyond
    f, g = (
        sum(x * factor for x, factor in zip(side, factors, strict=True))
        for side in zip(*((t.f, t.g) for t in terms), strict=True)
    )
    return Sum(f, g, dtype)


def _same(a: IntArray, b: IntArray) -> bool:
    """Return whether two columns are equal; one value stands for a constant column."""
    return np.array_equal(a, b) if len(a) == len(b) else not (a.any() or b.any())


def _ranks(a: Any, b: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return two columns as the ranks of their values among all of them, which compare as the values do."""
    if not (isinstance(a, Column) and isinstance(b, Column)) or dtype.is_complex:
        return None, None
    x, y = (c.values.to(dtype) for c in (a, b))
    values = torch.cat([x, y])
    if (values != values).any():  # NaN
        return None, None
    ranks = torch.unique(values, return_inverse=True)[1]
    return Column(a.index, ranks[: len(x)]), Column(b.index, ranks[len(x) :])
