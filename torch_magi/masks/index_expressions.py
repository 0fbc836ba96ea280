"""Expressions of a query's index q and a key's index k. What operations make of them is in index_rules.py.

    f(q) or f(k)                   `Column`: its values, computed by torch as FlexAttention computes them, under vmap
    f(q) + g(k)                    `Sum`: its two columns of integers
    a function of one such sum     `Along`: computed for every value that the sum can have
    a choice between the above     `Choice`: one for each of several sets of pairs
    anything of few values         `Grid`: computed for every pair of a run of queries and a run of keys
    a boolean of both              `Truth`: a set of pairs (pair_sets.py)

What is none of these raises `Beyond`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import torch

from torch_magi.masks.pair_sets import (
    FAR,
    PairSet,
)
from torch_magi.masks.ranges import IntArray

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


@dataclass(frozen=True, eq=False)
class Grid:
    """Its value [n, m] for the queries [q_edges[i], q_edges[i + 1]) and the keys [k_edges[j], k_edges[j + 1])."""

    q_edges: IntArray
    k_edges: IntArray
    values: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


Expression = Column | Sum | Along | Choice | Truth | Grid

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
SEARCHES = {"searchsorted": 1, "bucketize": 0, "isin": 0}  # which argument is looked for
ELEMENTWISE = {
    *COMPARISONS, *LOGIC, *LINEAR, *CASTS, *LEAST, *GREATEST, *FILLED, "to", "abs", "absolute", "sign", "div",
    "divide", "true_divide", "truediv", "rtruediv", "rdiv", "floordiv", "rfloordiv", "floor_divide", "mod", "rmod",
    "remainder", "fmod", "pow", "rpow", "lshift", "rshift", "rlshift", "rrshift", "bitwise_left_shift",
    "bitwise_right_shift", "where",
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
    """Return arguments with every tensor and expression in them changed, and numpy's numbers as Python's."""
    if isinstance(value, (torch.Tensor, Expression)):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(substitute(x, change) for x in value)
    if type(value) is dict:
        return {key: substitute(x, change) for key, x in value.items()}
    return value.item() if isinstance(value, np.generic) else value


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
    try:
        if name == "getitem" and isinstance(args[0], torch.Tensor):
            return _gather(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if name in SEARCHES and len(columns) == 1 and len(args) == 2 and columns[0].dim() == 1:
            searched = args[SEARCHES[name]]
            if not isinstance(searched, Column):
                raise Beyond
            return _tensor(func(*substitute(args, lambda x: x.values if x is searched else x), **kwargs), n)
        if name not in ELEMENTWISE:
            raise Beyond
        shapes: list[torch.Size] = []
        substitute((args, kwargs), lambda x: shapes.append(x.values.shape[1:] if isinstance(x, Column) else x.shape))
        if n * prod(torch.broadcast_shapes(*shapes)) > MOST_VALUES:
            raise Beyond

        def call(*values: torch.Tensor) -> Any:
            rest = iter(values)

            def value(x: Any) -> Any:
                return next(rest) if isinstance(x, Column) else x

            return func(*substitute(args, value), **substitute(kwargs, value))

        return _tensor(torch.vmap(call)(*columns), n)
    except RuntimeError as error:
        raise Beyond from error


def _tensor(found: Any, n: int) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.dim() == 0 or len(found) != n:
        raise Beyond
    return found.cpu()


def _gather(table: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    """Return table[index] [n, ...], where a column in the index stands for n calls."""
    indices = []
    for i in index:
        if isinstance(i, Column) and i.values.dim() == 1:
            i = i.values
        elif not ((isinstance(i, torch.Tensor) and i.dim() == 0) or type(i) is int):
            raise Beyond
        if isinstance(i, torch.Tensor) and i.dtype not in (torch.int32, torch.int64):
            raise Beyond
        indices.append(i)
    return table[tuple(indices)]
