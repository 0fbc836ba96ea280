"""The masks that models use, one function each.

All of them return an `AttnMask`. Lengths are in tokens. `cu_seqlens` [num_documents + 1] begins with 0; equal
neighbours are documents without tokens, and tokens behind its last value (up to `total`) see nothing and are
seen by nothing. In the pictures a row is a query, a column a key, '#' is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from torch_magi._torch_internals import untraced
from torch_magi.masks.mask import INF, AttnMask, Bands
from torch_magi.masks.ranges import Integers, check_length, check_positive, cumulative_lengths, int_array, range_array

Window = tuple[int | None, int | None] | None


def _bands(q0: Any, q1: Any, k0: Any, k1: Any, dlo: Any = -INF, dhi: Any = INF, step: Any = 1) -> Bands:
    """Return bands of columns given as scalars or arrays."""
    columns = np.broadcast_arrays(*(np.asarray(c, np.int64) for c in (q0, q1, k0, k1, dlo, dhi, step)))
    return np.stack([np.atleast_1d(c) for c in columns], 1)


def _window_bounds(window_size: Window, causal: bool) -> tuple[int | None, int | None]:
    """Return (left, right) with None for unbounded; `causal` bounds the right by 0."""
    if window_size is None:
        left = right = None
    else:
        if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
            raise TypeError(f"window_size must be a pair (left, right) or None, got {window_size!r}")
        sides = []
        for side in window_size:
            if side is not None and (isinstance(side, bool) or not hasattr(side, "__index__")):
                raise TypeError(f"window_size must hold integers or None, got {window_size!r}")
            if side is not None and side < -1:
                raise ValueError(f"window_size must hold numbers >= 0, or -1 or None for unbounded, got {window_size}")
            sides.append(None if side is None or side == -1 else int(side))
        left, right = sides
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _documents(q: np.ndarray, k: np.ndarray, total_q: int, total_k: int, causal: bool, window_size: Window) -> AttnMask:
    """Return documents whose queries are [q[i], q[i + 1]) and keys [k[i], k[i + 1]), aligned at the bottom right."""
    left, right = _window_bounds(window_size, causal)
    last = k[1:] - q[1:]  # k - q on the diagonal that ends at the bottom right
    dlo = -INF if left is None else last - left
    dhi = INF if right is None else last + right + 1
    return AttnMask.from_bands(_bands(q[:-1], q[1:], k[:-1], k[1:], dlo, dhi), total_q, total_k)


@untraced
def full(sq: int, sk: int) -> AttnMask:
    """Every query sees every key.

    >>> print(full(2, 5).to_string())
    #####
    #####
    """
    sq, sk = check_length("sq", sq), check_length("sk", sk)
    return AttnMask.from_bands(_bands(0, sq, 0, sk), sq, sk)


@untraced
def causal(sq: int, sk: int | None = None) -> AttnMask:
    """Query q sees keys k <= q + (sk - sq): aligned at the bottom right, as in flash-attention.

    (SDPA's `is_causal` is aligned at the top left; the two agree for sq == sk.)

    >>> print(causal(2, 5).to_string())
    ####.
    #####
    """
    return sliding_window(sq, sq if sk is None else sk, (None, 0))


@untraced
def sliding_window(sq: int, sk: int, window_size: Window) -> AttnMask:
    """Query q sees keys k with -left <= k - (q + sk - sq) <= right.

    Args:
        sq, sk: queries and keys; aligned at the bottom right where they differ.
        window_size: (left, right); None or -1 is unbounded, and (-1, 0) is causal.

    >>> print(sliding_window(4, 4, (1, 0)).to_string())
    #...
    ##..
    .##.
    ..##
    """
    sq, sk = check_length("sq", sq), check_length("sk", sk)
    return _documents(np.array([0, sq]), np.array([0, sk]), sq, sk, False, window_size)


@untraced
def document(
    cu_seqlens: Integers, causal: bool = True, window_size: Window = None, total: int | None = None
) -> AttnMask:
    """Packed self-attention: a query sees the keys of its own document, the earlier ones where `causal`.

    >>> print(document([0, 2, 5]).to_string())
    #....
    ##...
    ..#..
    ..##.
    ..###
    """
    cu, total = cumulative_lengths("cu_seqlens", cu_seqlens, total)
    return _documents(cu, cu, total, total, causal, window_size)


@untraced
def varlen(
    cu_seqlens_q: Integers, cu_seqlens_k: Integers, causal: bool = False, window_size: Window = None,
    total_q: int | None = None, total_k: int | None = None,
) -> AttnMask:  # fmt: skip
    """Packed cross-attention: document i's queries see document i's keys.

    Where a document has other numbers of queries and keys, `causal` and `window_size` are aligned at the
    bottom right.

    >>> print(varlen([0, 1, 3], [0, 2, 5], causal=True).to_string())
    ##...
    ..##.
    ..###
    """
    q, total_q = cumulative_lengths("cu_seqlens_q", cu_seqlens_q, total_q)
    k, total_k = cumulative_lengths("cu_seqlens_k", cu_seqlens_k, total_k)
    if len(q) != len(k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have as many documents, got {len(q) - 1} and {len(k) - 1}"
        )
    return _documents(q, k, total_q, total_k, causal, window_size)


@untraced
def from_document_ids(ids: Integers, causal: bool = True, padding_id: int | None = None) -> AttnMask:
    """Query q sees key k if ids[q] == ids[k], and k <= q where `causal`. Ids need not be sorted.

    Args:
        ids: [total]; the document of every token.
        causal: whether only earlier keys are seen.
        padding_id: the id of tokens that see nothing and are seen by nothing.

    >>> print(from_document_ids([1, 1, 0, 2, 1], padding_id=0).to_string())
    #....
    ##...
    .....
    ...#.
    ##..#
    """
    array = int_array("ids", ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have shape [total], got {array.shape}")
    n = len(array)
    if not n:
        return full(0, 0)
    start = np.flatnonzero(np.concatenate([[True], array[1:] != array[:-1]]))
    end = np.append(start[1:], n)
    kind = array[start]
    if padding_id is not None:
        keep = kind != padding_id
        start, end, kind = start[keep], end[keep], kind[keep]
    # Stretches of one id see each other; with distinct ids that is each stretch itself.
    order = np.argsort(kind, kind="stable")
    q0, q1, k0, k1 = [], [], [], []
    for group in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1) if len(order) else []:
        for i in group.tolist():
            for j in group.tolist():
                if j <= i or not causal:
                    q0.append(start[i])
                    q1.append(end[i])
                    k0.append(start[j])
                    k1.append(end[j])
    return AttnMask.from_bands(_bands(q0, q1, k0, k1, -INF, 1 if causal else INF), n, n)


@untraced
def from_position_ids(position_ids: Integers, causal: bool = True) -> AttnMask:
    """Packed self-attention where a document begins wherever the position does not go on from the one before.

    Args:
        position_ids: [total]; 0, 1, 2, ... in every document.

    >>> from_position_ids([0, 1, 0, 1, 2]) == document([0, 2, 5])
    True
    """
    array = int_array("position_ids", position_ids)
    if array.ndim != 1:
        raise ValueError(f"position_ids must have shape [total], got {array.shape}")
    begins = np.flatnonzero(np.diff(array) != 1) + 1
    return document(np.concatenate([[0], begins, [len(array)]]), causal=causal)


@untraced
def block_causal(cu_seqlens: Integers, block_size: int, total: int | None = None) -> AttnMask:
    """A query sees key k of its document if k // block_size <= q // block_size, counted within the document.

    Video frames that see themselves and earlier frames: block_size is the tokens of a frame.

    >>> print(block_causal([0, 4, 7], 2).to_string())
    ##.....
    ##.....
    ####...
    ####...
    ....##.
    ....##.
    ....###
    """
    cu, total = cumulative_lengths("cu_seqlens", cu_seqlens, total)
    size = check_positive("block_size", block_size)
    a, b = cu[:-1], cu[1:]
    return AttnMask.from_bands(_bands(a, b, a, b, -INF, size, size), total, total)


@untraced
def chunk_causal(sq: int, sk: int, chunk_size: int) -> AttnMask:
    """Query q sees keys k < chunk_size * (q // chunk_size + 1).

    >>> print(chunk_causal(5, 5, 2).to_string())
    ##...
    ##...
    ####.
    ####.
    #####
    """
    sq, sk, size = check_length("sq", sq), check_length("sk", sk), check_positive("chunk_size", chunk_size)
    return AttnMask.from_bands(_bands(0, sq, 0, sk, -INF, size, size), sq, sk)


@untraced
def sliding_block(cu_seqlens: Integers, block_size: int, window: int, total: int | None = None) -> AttnMask:
    """Block-causal with a window: a query sees its own block of its document and the `window` blocks before it.

    Video frames with a limited memory of earlier frames.

    >>> print(sliding_block([0, 6], 2, 1).to_string())
    ##....
    ##....
    ####..
    ####..
    ..####
    ..####
    """
    cu, total = cumulative_lengths("cu_seqlens", cu_seqlens, total)
    size, window = check_positive("block_size", block_size), check_length("window", window)
    a, b = cu[:-1], cu[1:]
    return AttnMask.from_bands(_bands(a, b, a, b, -window * size, size, size), total, total)


@untraced
def prefix_lm(sq: int, sk: int, prefix: int) -> AttnMask:
    """Causal (bottom right), and every query sees keys [0, prefix).

    >>> print(prefix_lm(4, 4, 2).to_string())
    ##..
    ##..
    ###.
    ####
    """
    mask = causal(sq, sk)
    prefix = check_length("prefix", prefix)
    if prefix > mask.shape[1]:
        raise ValueError(f"prefix must be at most sk = {mask.shape[1]}, got {prefix}")
    return mask | AttnMask.from_bands(_bands(0, mask.shape[0], 0, prefix), *mask.shape)


@untraced
def shared_prefix(prefix: int, cu_seqlens: Integers, prefix_causal: bool = True, total: int | None = None) -> AttnMask:
    """A prefix of `prefix` tokens, then causal documents that all see it: many answers to one prompt.

    Args:
        prefix: length of the prefix, which comes first.
        cu_seqlens: the documents, counted from the end of the prefix.
        prefix_causal: whether the prefix is causal in itself; otherwise all of it sees all of it.
        total: length of the documents with padding behind them, without the prefix.

    >>> print(shared_prefix(2, [0, 2, 3]).to_string())
    #....
    ##...
    ###..
    ####.
    ##..#
    """
    prefix = check_length("prefix", prefix)
    cu, rest = cumulative_lengths("cu_seqlens", cu_seqlens, total)
    a, b = prefix + cu[:-1], prefix + cu[1:]
    bands = [
        _bands(0, prefix, 0, prefix, -INF, 1 if prefix_causal else INF),
        _bands(prefix, prefix + cu[-1], 0, prefix),
        _bands(a, b, a, b, -INF, 1),
    ]
    n = prefix + rest
    return AttnMask.from_bands(np.concatenate(bands), n, n)


@untraced
def bidirectional_spans(mask: AttnMask, spans: Integers) -> AttnMask:
    """Add spans whose tokens all see each other, such as images inside causal text.

    Args:
        mask: a square mask.
        spans: [n, 2] half-open ranges of tokens.

    >>> print(bidirectional_spans(causal(4), [[1, 3]]).to_string())
    #...
    ###.
    ###.
    ####
    """
    sq, sk = mask.shape
    if sq != sk:
        raise ValueError(f"bidirectional_spans needs a square mask, got shape {mask.shape}")
    ranges = range_array("spans", spans, sq)
    return mask | AttnMask.from_slices(ranges, ranges, ["full"] * len(ranges), sq, sk)


@untraced
def from_block_matrix(blocks: Any, q_block: int, k_block: int, sq: int, sk: int) -> AttnMask:
    """Query q sees key k if blocks[q // q_block, k // k_block].

    Args:
        blocks: boolean [ceil(sq / q_block), ceil(sk / k_block)]; tensor, numpy array or nested lists.

    >>> print(from_block_matrix([[True, False], [False, True]], 2, 2, 4, 3).to_string())
    ##.
    ##.
    ..#
    ..#
    """
    sq, sk = check_length("sq", sq), check_length("sk", sk)
    q_block, k_block = check_positive("q_block", q_block), check_positive("k_block", k_block)
    coarse = AttnMask.from_dense(blocks)
    expected = (-(-sq // q_block), -(-sk // k_block))
    if coarse.shape != expected:
        raise ValueError(f"blocks must have shape {expected} for {sq} x {sk} tokens, got {coarse.shape}")
    offsets, intervals = coarse.row_intervals()
    rows = np.repeat(np.arange(coarse.shape[0]), np.diff(offsets))
    return AttnMask.from_bands(
        _bands(
            rows * q_block, np.minimum((rows + 1) * q_block, sq),
            intervals[:, 0] * k_block, np.minimum(intervals[:, 1] * k_block, sk),
        ),
        sq, sk,
    )  # fmt: skip


@untraced
def or_masks(*masks: AttnMask) -> AttnMask:
    """Query q sees key k if it does in any of the masks, as in FlexAttention's function; faster than many `|`.

    >>> print(or_masks(causal(3), full(3, 3) - causal(3)).to_string())
    ###
    ###
    ###
    """
    sq, sk = _common_shape(masks)
    return AttnMask.from_bands(np.concatenate([m.bands for m in masks]), sq, sk)


@untraced
def and_masks(*masks: AttnMask) -> AttnMask:
    """Query q sees key k if it does in all of the masks, as in FlexAttention's function.

    >>> print(and_masks(causal(3), sliding_window(3, 3, (1, 1))).to_string())
    #..
    ##.
    .##
    """
    _common_shape(masks)
    return reduce(and_, masks)


def _common_shape(masks: Sequence[AttnMask]) -> tuple[int, int]:
    if not masks:
        raise ValueError("or_masks and and_masks need one mask or more, which have the shape of the result")
    for mask in masks:
        if not isinstance(mask, AttnMask):
            raise TypeError(
                f"masks must be AttnMasks, got {type(mask).__name__}; functions combine with torch's own or_masks and "
                "and_masks, or become masks with AttnMask.from_mask_mod"
            )
        if mask.shape != masks[0].shape:
            raise ValueError(f"masks must have the same shape to combine, got {masks[0].shape} and {mask.shape}")
    return masks[0].shape
