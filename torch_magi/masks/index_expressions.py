"""Expressions of a query's index q and a key's index k, and what operations make of them.

    f(q) or f(k)                   `Column`: its values, computed by torch as FlexAttention computes them, under vmap
    f(q) + g(k)                    `Sum`: its two columns of integers
    a function of one such sum     `Along`: computed for every value that the sum can have
    a choice between the above     `Choice`: one for each of several sets of pairs
    a boolean of both              `Truth`: a set of pairs (pair_sets.py)

What is none of these raises `Beyond`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from torch_magi.masks.pair_sets import (
    FAR,
    LARGEST,
    Intersection,
    Keys,
    PairSet,
    Rows,
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
MOST_VALUES = 1 << 27  # of one operation on a column

Operation = Callable[..., Any]


class Beyond(Exception):
    """An operation that these rules do not cover."""


@dataclass(frozen=True, eq=False)
class Column:
    """A function of one index, "q" or "k": its values [n, ...], of any dtype."""

    index: str
    values: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


@dataclass(frozen=True, eq=False)
class Sum:
    """f(q) + g(k), an integer of dtype `dtype`. f: int64 [sq] or [1]. g: int64 [sk] or [1]."""

    f: IntArray
    g: IntArray
    dtype: torch.dtype

    @property
    def range(self) -> tuple[int, int]:
        return int(self.f.min()) + int(self.g.min()), int(self.f.max()) + int(self.g.max())


@dataclass(frozen=True, eq=False)
class Along:
    """A function of f(q) + g(k): its values at low, low + 1, ..."""

    base: Sum
    low: int
    values: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


@dataclass(frozen=True, eq=False)
class Choice:
    """Other expressions, or tensors without dimensions, for sets that are disjoint and together hold every pair."""

    cases: tuple[tuple[PairSet, Any], ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Truth:
    """A boolean."""

    pairs: PairSet
    dtype: torch.dtype = torch.bool


Expression = Column | Sum | Along | Choice | Truth

COMPARISONS: dict[str, Operation] = {
    "ge": operator.ge, "greater_equal": operator.ge, "gt": operator.gt, "greater": operator.gt,
    "le": operator.le, "less_equal": operator.le, "lt": operator.lt, "less": operator.lt,
    "eq": operator.eq, "ne": operator.ne, "not_equal": operator.ne,
}  # fmt: skip
INTERVALS: dict[Operation, list[list[int]]] = {  # of a - b
    operator.ge: [[0, FAR]], operator.gt: [[1, FAR]], operator.le: [[-FAR, 1]], operator.lt: [[-FAR, 0]],
    operator.eq: [[0, 1]], operator.ne: [[-FAR, 0], [1, FAR]],
}  # fmt: skip
LOGIC = {
    "and": "and", "rand": "and", "bitwise_and": "and", "logical_and": "and", "mul": "and", "rmul": "and",
    "multiply": "and", "or": "or", "ror": "or", "bitwise_or": "or", "logical_or": "or", "add": "or", "radd": "or",
    "xor": "xor", "rxor": "xor", "bitwise_xor": "xor", "logical_xor": "xor", "ne": "xor", "not_equal": "xor",
    "eq": "same", "invert": "not", "bitwise_not": "not", "logical_not": "not",
}  # fmt: skip
LINEAR = {  # factors of the operands
    "neg": (-1,), "negative": (-1,), "pos": (1,), "positive": (1,), "add": (1, 1), "radd": (1, 1), "sub": (1, -1),
    "subtract": (1, -1), "rsub": (-1, 1),
}  # fmt: skip
CASTS = {
    "bool": torch.bool, "int": torch.int32, "long": torch.int64, "short": torch.int16, "float": torch.float32,
    "double": torch.float64,
}  # fmt: skip
PRODUCTS = {"mul", "multiply", "rmul"}
LEAST, GREATEST = {"minimum", "min"}, {"maximum", "max"}
FILLED = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
SEARCHES = {"searchsorted", "bucketize", "isin"}
ELEMENTWISE = {
    *COMPARISONS, *LOGIC, *LINEAR, *CASTS, *LEAST, *GREATEST, *FILLED, "to", "abs", "absolute", "sign", "div",
    "divide", "true_divide", "truediv", "rtruediv", "rdiv", "floordiv", "rfloordiv", "floor_divide", "mod", "rmod",
    "remainder", "fmod", "pow", "rpow", "lshift", "rshift", "bitwise_left_shift", "bitwise_right_shift", "where",
    "clamp", "clip", "clamp_min", "clamp_max", "floor", "ceil", "round", "trunc", "sqrt", "exp", "exp2", "log", "log2",
    "square", "clone", "detach", "any", "all", "sum", "unsqueeze", "squeeze", "getitem",
}  # fmt: skip


def expressions(value: Any) -> Iterator[Expression]:
    """Yield the expressions in arguments, in order."""
    if isinstance(value, Expression):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from expressions(x)
    elif isinstance(value, dict):
        yield from expressions(list(value.values()))


def substitute(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with every tensor and expression in them changed."""
    if isinstance(value, (torch.Tensor, Expression)):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(substitute(x, change) for x in value)
    if type(value) is dict:
        return {key: substitute(x, change) for key, x in value.items()}
    return value


def dtype_of(operand: Any) -> torch.dtype | None:
    """Return the dtype of an expression, a tensor or a number; None for anything else."""
    if isinstance(operand, (torch.Tensor, Expression)):
        return operand.dtype
    if isinstance(operand, bool):
        return torch.bool
    if isinstance(operand, int):
        return torch.int64
    return torch.get_default_dtype() if isinstance(operand, float) else None


def promoted(operands: list[Any]) -> torch.dtype:
    """Return the dtype that torch computes with: all operands are numbers or have no dimensions."""
    kinds = [torch.empty((), dtype=x.dtype) if isinstance(x, (torch.Tensor, Expression)) else x for x in operands]
    if not any(isinstance(x, torch.Tensor) for x in kinds):
        return torch.result_type(kinds[0], kinds[-1])
    kinds.sort(key=lambda x: not isinstance(x, torch.Tensor))  # numbers last
    return reduce(lambda a, b: torch.empty((), dtype=torch.result_type(a, b)), kinds).dtype


def elementwise(name: str, func: Operation, args: Any, kwargs: Any, n: int) -> torch.Tensor:
    """Return an operation's values [n, ...] where every tensor `Column` among its arguments stands for n calls.

    Raises:
        Beyond: if it is not an operation that is known to work value by value.
        IndexError: if it reads outside a tensor.
    """
    columns = [x.values for x in expressions((args, kwargs)) if isinstance(x, Column)]
    plain = lambda x: x.values if isinstance(x, Column) else x  # noqa: E731
    try:
        if name == "getitem" and isinstance(args[0], torch.Tensor):
            return _gather(args[0], substitute(args[1], plain))
        if name in SEARCHES and all(x.dim() == 1 for x in columns):
            return _tensor(func(*substitute(args, plain), **substitute(kwargs, plain)), n)
        if name not in ELEMENTWISE:
            raise Beyond
        shapes: list[torch.Size] = []
        substitute((args, kwargs), lambda x: shapes.append(x.values.shape[1:] if isinstance(x, Column) else x.shape))
        if n * prod(torch.broadcast_shapes(*shapes)) > MOST_VALUES:
            raise Beyond

        def call(*values: torch.Tensor) -> Any:
            rest = iter(values)
            replace = lambda x: next(rest) if isinstance(x, Column) else x  # noqa: E731
            return func(*substitute(args, replace), **substitute(kwargs, replace))

        return _tensor(torch.vmap(call)(*columns), n)
    except RuntimeError as error:
        raise Beyond from error


def _tensor(found: Any, n: int) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.dim() == 0 or len(found) != n:
        raise Beyond
    return found.cpu()


def _gather(table: torch.Tensor, index: Any) -> torch.Tensor:
    """Return table[index] where tensors of one dimension in the index stand for many calls."""
    indices = index if isinstance(index, tuple) else (index,)
    for i in indices:
        integer = isinstance(i, torch.Tensor) and i.dim() <= 1 and i.dtype in (torch.int32, torch.int64)
        if not integer and (isinstance(i, bool) or not isinstance(i, int)):
            raise Beyond
    return table[indices]


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
            chosen = found.values.numpy()
            return Rows(chosen) if found.index == "q" else Keys(chosen)
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
            return self._along(name, func, operands, kwargs) or self._by_cases(name, func, operands, kwargs)
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
            return self._by_cases(name, func, operands, kwargs)
        if name in COMPARISONS and not kwargs:
            pairs = self._compare(COMPARISONS[name], *operands)
            if pairs is not None:
                return Truth(pairs)
        linear = None if kwargs else self._linear(name, operands)
        found = linear or self._along(name, func, operands, kwargs)
        if found is not None:
            return found
        if name in LEAST | GREATEST and len(operands) == 2 and not kwargs:
            pairs = self._compare(operator.le if name in LEAST else operator.ge, *operands)
            if pairs is not None:
                return self._choose([(pairs, operands[0]), (pairs.complement(), operands[1])], promoted(operands))
        return self._by_cases(name, func, operands, kwargs)

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
            if len(numbers) != 1 or len(operands) != 2 or dtype_of(numbers[0]) == torch.float32:
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

    # --- choices and booleans ---

    def cast(self, operand: Any, dtype: torch.dtype) -> Any:
        """Return an operand in another dtype."""
        if operand.dtype == dtype:
            return operand
        if isinstance(operand, Column):
            return Column(operand.index, operand.values.to(dtype))
        if isinstance(operand, torch.Tensor):
            return operand.to(dtype)
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
        found = self._along("where", func, [condition, a, b], {})
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
            raise Beyond
        single: PairSet = Intersection(())
        found = []
        for combination in product(*(x or [(single, o)] for x, o in zip(cases, operands, strict=True))):
            pairs = both(*(p for p, _ in combination))
            found.append((pairs, self.apply(name, func, [x for _, x in combination], kwargs)))
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
