"""Mask functions of FlexAttention as bands, found by running the function once on symbols.

The symbols stand for all queries and all keys at once, and their operations make expressions (index_expressions.py).
A function with an operation beyond the rules of index_rules.py has no result, rather than one that is nearly right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torch_magi.masks.index_expressions import Beyond, Column, Expression, substitute
from torch_magi.masks.index_rules import Rules
from torch_magi.masks.mask import AttnMask
from torch_magi.masks.pair_sets import PairSet, TooManyPieces, bands_of

METADATA = {"dtype", "shape", "ndim", "requires_grad", "dim", "size", "numel", "is_floating_point", "is_complex"}
CONVERSIONS = {"bool", "int", "float", "complex", "index", "len"}  # to numbers of Python
IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "__iand__": torch.bitwise_and,
    "__ior__": torch.bitwise_or, "__ixor__": torch.bitwise_xor,
}  # fmt: skip


def trace_mask_mod(mask_mod: Callable[..., Any], q_len: int, kv_len: int, b: int, h: int) -> AttnMask | None:
    """Return the pairs of `mask_mod(b, h, q_idx, kv_idx)` exactly, or None where its operations are beyond the rules.

    Args:
        mask_mod: a mask function of FlexAttention.
        q_len, kv_len: number of queries and of keys.
        b, h: the batch and the head, which the function gets as tensors without dimensions.

    Raises:
        Exception: what the function raises.

    >>> print(trace_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 2), 4, 4, 0, 0).to_string())
    #...
    ##..
    .##.
    ..##
    """
    if not q_len or not kv_len:
        return AttnMask.from_bands(np.empty((0, 7), np.int64), q_len, kv_len)
    with torch.device("cpu"):  # whatever the default is
        try:
            pairs = _traced(mask_mod, q_len, kv_len, b, h)
            return AttnMask.from_canonical_bands(bands_of(pairs, q_len, kv_len), q_len, kv_len)
        except (Beyond, TooManyPieces):
            return None


def _traced(mask_mod: Callable[..., Any], q_len: int, kv_len: int, b: int, h: int) -> PairSet:
    """Return the set of pairs of a mask function.

    Raises:
        Beyond: if the function does something that the rules do not cover.
        Exception: what the function raises.
    """
    recorder = _Recorder(q_len, kv_len)
    batch, head = torch.tensor(b), torch.tensor(h)
    q, k = (recorder.symbol(Column(index, torch.arange(n))) for index, n in (("q", q_len), ("k", kv_len)))
    try:
        found = mask_mod(batch, head, q, k)
    except IndexError:
        raise
    except Exception as error:
        if not recorder.beyond:
            # Either the function raises, and does so again, or it is the symbols that it cannot take.
            zero = torch.zeros((), dtype=torch.int64)
            mask_mod(batch, head, zero, zero.clone())
        raise Beyond from error
    if recorder.beyond:  # and the function caught the exception
        raise Beyond
    return recorder.rules.truth(found.expression if isinstance(found, _Symbol) else found)


class _Symbol(torch.Tensor):
    """What the mask function gets for an index: a tensor without storage whose operations are recorded."""

    expression: Expression
    recorder: _Recorder

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = next(_symbols((args, kwargs))).recorder
        try:
            return recorder.call(func, args, kwargs or {})
        except (Beyond, TooManyPieces):
            recorder.beyond = True
            raise


def _symbols(value: Any) -> Iterator[_Symbol]:
    """Yield the symbols in arguments, in order."""
    if isinstance(value, _Symbol):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _symbols(x)
    elif isinstance(value, dict):
        yield from _symbols(list(value.values()))


class _Recorder:
    """One run of a mask function."""

    def __init__(self, sq: int, sk: int) -> None:
        self.rules = Rules(sq, sk)
        self.beyond = False

    def symbol(self, expression: Expression) -> _Symbol:
        shape = expression.values.shape[1:] if isinstance(expression, Column) else ()
        symbol = torch.Tensor._make_subclass(_Symbol, torch.empty(shape, dtype=expression.dtype, device="meta"))
        symbol.expression, symbol.recorder = expression, self
        return symbol

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation of the function makes."""
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            if name in ("device", "is_cuda"):
                return torch.device("cpu") if name == "device" else False
        elif name in IN_PLACE and len(args) == 2 and not kwargs:
            return self.in_place(IN_PLACE[name], *args)
        elif name.startswith("__"):
            name = name[2:-2]
            if name in CONVERSIONS:
                raise Beyond
        elif name.endswith("_"):  # another change in place
            raise Beyond
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        inner_args, inner_kwargs = (substitute(x, _without_symbols) for x in (args, kwargs))
        made = self.rules.apply(name, func, inner_args, inner_kwargs)
        for symbol in _symbols(args):  # x.long() is x itself where x is of that dtype
            if symbol.expression is made:
                return symbol
        return self.symbol(made) if isinstance(made, Expression) else made

    def in_place(self, func: Callable[..., Any], target: Any, other: Any) -> Any:
        """Return a &= b and the like. A column stays as it is: other expressions may hold its values."""
        if not isinstance(target, _Symbol) or isinstance(target.expression, Column):
            raise Beyond
        made = self.call(func, (target, other), {}).expression
        if made.dtype != target.expression.dtype:
            raise Beyond
        target.expression = made
        return target


def _without_symbols(value: Any) -> Any:
    """Return the expression of a symbol; any other tensor on the CPU."""
    if isinstance(value, _Symbol):
        return value.expression
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        raise Beyond
    return value.detach().cpu()
