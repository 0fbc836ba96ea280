"""What the Triton kernels share.

A tile of queries has rows for pairs (token, head), heads innermost: those of `PACK` query heads that share a KV
head. Offsets within a tile are 32-bit, those of a tile 64-bit.

Where TWOS, logits are those of powers of two: one multiply-add takes a product of q and k to its exponent. Of float32
inputs they are natural, since another factor in lse would cost a rounding of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def power(logit, TWOS: tl.constexpr):
    return tl.exp2(logit) if TWOS else tl.exp(logit)


@triton.jit
def to_logit(natural, TWOS: tl.constexpr):
    return natural * LOG2E if TWOS else natural


@triton.jit
def to_natural(logit, TWOS: tl.constexpr):
    return logit * LN2 if TWOS else logit


@triton.jit
def visible_columns(bands, begin, end, rows):
    """Return the columns [lo, hi) that some bands show of each row, which is in one of them at most.

    A band is explained in csrc/include/tile_plan.h (TileBand).
    """
    lo, hi = tl.zeros_like(rows), tl.zeros_like(rows)
    for band in range(begin, end):
        at = bands + band * 8
        first, last = tl.load(at), tl.load(at + 1)
        step = tl.load(at + 6)
        anchor = first + (rows - first) // step * step
        inside = (rows >= first) & (rows < last)
        lo = tl.where(inside, tl.maximum(tl.load(at + 2), anchor + tl.load(at + 4)), lo)
        hi = tl.where(inside, tl.minimum(tl.load(at + 3), anchor + tl.load(at + 5)), hi)
    return lo, hi


@triton.jit
def between(lo, hi, columns):
    """Return [rows, columns]: lo <= column < hi."""
    return (columns[None, :] >= lo[:, None]) & (columns[None, :] < hi[:, None])


@triton.jit
def tile_offsets(rows, stride, BLOCK: tl.constexpr):
    """Return the offsets [rows, BLOCK] of rows of adjacent elements."""
    return rows[:, None] * stride + tl.arange(0, BLOCK)[None, :]


@triton.jit
def load_tile(at, offsets, used, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tile [rows, BLOCK] at some offsets; zeros in rows not used (None: all are) and from DIM on."""
    if DIM == BLOCK:
        if used is None:
            tile = tl.load(at + offsets)
        else:
            tile = tl.load(at + offsets, mask=used[:, None], other=0.0)
    else:
        inside = tl.arange(0, BLOCK)[None, :] < DIM
        if used is not None:
            inside = inside & used[:, None]
        tile = tl.load(at + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(at, offsets, tile, used, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Store the rows of a tile that are used."""
    inside = used[:, None] & (tl.arange(0, BLOCK)[None, :] < DIM)
    tl.store(at + offsets, tile.to(at.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x):
    """Return tanh, with a relative error of a few units of float32's precision."""
    square = x * x
    small = x * (0.9999999764 + square * (-0.3333265014 + square * (0.1330226640 + square * -0.0494000076)))
    return tl.where(square < 1.0 / 9.0, small, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))
