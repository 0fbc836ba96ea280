"""The backward kernels in Triton: terms of rows, dQ of a tile of queries, dK and dV of a tile of keys.

With P = softmax(S) and delta = sum(dout * out) - dlse of a row: dS = P * (dout V^T - delta), dQ = scale * dS K,
dK = scale * dS^T Q, dV = P^T dout (arXiv:2307.08691, algorithm 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_magi.kernels.triton_common import (
    between,
    load_tile,
    power,
    store_tile,
    tanh,
    tile_offsets,
    to_logit,
    visible_columns,
)


@triton.jit(do_not_specialize=["n_rows"])
def rows_kernel(
    dout, out, lse, dlse, row_logit, delta, dout_row, dout_head, n_rows, num_heads,
    PACK: tl.constexpr, QUERIES: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Compute lse as a logit and delta of QUERIES pairs (row, head) of one group of heads.

    dout, out: [rows, heads, dim_v], out dense; lse, dlse: [rows, heads]. row_logit, delta: [groups, rows, PACK]; inf
    and 0 where lse is -inf.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, QUERIES)
    tokens, heads = tile * (QUERIES // PACK) + row // PACK, group * PACK + row % PACK
    inside = tokens < n_rows
    at = tokens.to(tl.int64) * num_heads + heads
    result = load_tile(out, tile_offsets(at, DIM_V, BLOCK_V), inside, DIM_V, BLOCK_V).to(tl.float32)
    at_dout = tokens.to(tl.int64) * dout_row + heads.to(tl.int64) * dout_head
    gradient = load_tile(dout, tile_offsets(at_dout, 1, BLOCK_V), inside, DIM_V, BLOCK_V).to(tl.float32)
    term = tl.sum(result * gradient, 1)
    logsum = tl.load(lse + at, mask=inside, other=float("-inf"))
    sees = logsum != float("-inf")
    if dlse is not None:
        term -= tl.load(dlse + at, mask=sees, other=0.0)
    place = (group.to(tl.int64) * n_rows + tokens) * PACK + row % PACK
    tl.store(row_logit + place, tl.where(sees, to_logit(logsum, TWOS), float("inf")), mask=inside)
    tl.store(delta + place, tl.where(sees, term, 0.0), mask=inside)


@triton.jit
def query_gradient(
    dq, q, dout, row_logit, delta, at_k, at_v, k_offsets, v_offsets, used, shown, factor, inner,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Return dq / scale of a tile of queries with what a tile of keys adds; arguments as of `attend`."""
    k = load_tile(at_k, k_offsets, used, DIM, BLOCK)
    v = load_tile(at_v, v_offsets, used, DIM_V, BLOCK_V)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = tanh(scores * inner)
    weights = power(scores * factor - row_logit[:, None], TWOS)
    ds = weights * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    if SOFTCAP:
        ds *= 1.0 - scores * scores
    if shown is not None:
        ds = tl.where(shown, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["n_items", "n_rows", "n_keys"])
def queries_kernel(
    dout, q, k, v, row_logit, delta, items, runs, bands, dq_before, dq,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head, n_items, n_rows, n_keys, num_heads, scale,
    softcap, HEADS_PER_KV: tl.constexpr, PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Compute dq of one item for one group of PACK heads. Arguments as of `forward_kernel` and `rows_kernel`."""
    group, item = tl.program_id(0) // n_items, tl.program_id(0) % n_items
    at = items + item * 8
    row0, item_rows = tl.load(at), tl.load(at + 1)
    run_begin, run_end = tl.load(at + 2), tl.load(at + 3)
    first_masked = run_begin + tl.load(at + 5)

    row = tl.arange(0, QUERIES)
    tokens, heads = row0 + row // PACK, group * PACK + row % PACK
    inside = row // PACK < item_rows
    at_q = q + row0.to(tl.int64) * q_row + group.to(tl.int64) * PACK * q_head
    q_rows = (row // PACK).to(tl.int64) * q_row + (row % PACK).to(tl.int64) * q_head
    q_tile = load_tile(at_q, tile_offsets(q_rows, 1, BLOCK), inside, DIM, BLOCK)
    at_dout = dout + row0.to(tl.int64) * dout_row + group.to(tl.int64) * PACK * dout_head
    dout_rows = (row // PACK).to(tl.int64) * dout_row + (row % PACK).to(tl.int64) * dout_head
    dout_tile = load_tile(at_dout, tile_offsets(dout_rows, 1, BLOCK_V), inside, DIM_V, BLOCK_V)
    place = (group.to(tl.int64) * n_rows + tokens) * PACK + row % PACK
    row_logits = tl.load(row_logit + place, mask=inside, other=float("inf"))
    row_delta = tl.load(delta + place, mask=inside, other=0.0)

    kv_head = (group * PACK // HEADS_PER_KV).to(tl.int64)
    k += kv_head * k_head
    v += kv_head * v_head
    column = tl.arange(0, KEYS)
    k_offsets, v_offsets = tile_offsets(column, k_row, BLOCK), tile_offsets(column, v_row, BLOCK_V)
    factor, inner = to_logit(scale, TWOS), 0.0
    if SOFTCAP:
        factor, inner = to_logit(softcap, TWOS), scale / softcap
    total = tl.zeros([QUERIES, BLOCK], tl.float32)

    for run in range(run_begin, first_masked):
        first, n_tiles = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
        for tile in range(n_tiles):
            start = (first + tile * KEYS).to(tl.int64)
            total = query_gradient(
                total, q_tile, dout_tile, row_logits, row_delta, k + start * k_row, v + start * v_row,
                k_offsets, v_offsets, None, None, factor, inner, SOFTCAP, DIM, DIM_V, BLOCK, BLOCK_V, PRECISION, TWOS,
            )  # fmt: skip
    for run in range(first_masked, run_end):
        first, n_tiles = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
        band, n_bands = tl.load(runs + run * 4 + 2), tl.load(runs + run * 4 + 3)
        lo, hi = visible_columns(bands, band, band + n_bands, tokens)
        for tile in range(n_tiles):
            start = first + tile * KEYS
            total = query_gradient(
                total, q_tile, dout_tile, row_logits, row_delta, k + start.to(tl.int64) * k_row,
                v + start.to(tl.int64) * v_row, k_offsets, v_offsets, start + column < n_keys,
                between(lo, hi, start + column), factor, inner, SOFTCAP, DIM, DIM_V, BLOCK, BLOCK_V, PRECISION, TWOS,
            )  # fmt: skip

    total *= scale
    offsets = tile_offsets(tokens.to(tl.int64) * num_heads + heads, DIM, BLOCK)
    if dq_before is not None:
        total += load_tile(dq_before, offsets, inside, DIM, BLOCK)
    store_tile(dq, offsets, total, inside, DIM, BLOCK)


@triton.jit
def key_gradients(
    state, k, v, at_q, at_dout, at_lse, at_delta, q_offsets, dout_offsets, used, shown, factor, inner,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    QUERIES: tl.constexpr, PRECISION: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Return dk / scale and dv of a tile of keys with what a tile of queries adds; tiles [keys, queries]."""
    dk, dv = state
    q = load_tile(at_q, q_offsets, used, DIM, BLOCK)
    dout = load_tile(at_dout, dout_offsets, used, DIM_V, BLOCK_V)
    row = tl.arange(0, QUERIES)
    if used is None:
        row_logit, delta = tl.load(at_lse + row), tl.load(at_delta + row)
    else:
        row_logit = tl.load(at_lse + row, mask=used, other=float("inf"))
        delta = tl.load(at_delta + row, mask=used, other=0.0)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if SOFTCAP:
        scores = tanh(scores * inner)
    weights = power(scores * factor - row_logit[None, :], TWOS)
    if shown is not None:
        weights = tl.where(shown, weights, 0.0)
    dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
    ds = weights * (tl.dot(v, tl.trans(dout), input_precision=PRECISION) - delta[None, :])
    if SOFTCAP:
        ds *= 1.0 - scores * scores
    if shown is not None:
        ds = tl.where(shown, ds, 0.0)
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit(do_not_specialize=["n_items", "n_rows", "n_keys"])
def keys_kernel(
    dout, q, k, v, row_logit, delta, items, runs, bands, dk, dv, part_dk, part_dv,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head, n_items, n_rows, n_keys, num_heads, scale,
    softcap, HEADS_PER_KV: tl.constexpr, PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one item, a tile of keys, for one KV head.

    part_*: float32 [slots, KV heads, KEYS, dim], dk and dv of keys that several items share. The others as of
    `forward_kernel` and `rows_kernel`.
    """
    kv_head, item = (tl.program_id(0) // n_items).to(tl.int64), tl.program_id(0) % n_items
    at = items + item * 8
    key0, item_keys, slot = tl.load(at), tl.load(at + 1), tl.load(at + 6)
    run_begin, run_end = tl.load(at + 2), tl.load(at + 3)
    first_masked = run_begin + tl.load(at + 5)

    key = tl.arange(0, KEYS)
    inside = key < item_keys
    at_k = k + kv_head * k_head + key0.to(tl.int64) * k_row
    at_v = v + kv_head * v_head + key0.to(tl.int64) * v_row
    k_tile = load_tile(at_k, tile_offsets(key, k_row, BLOCK), inside, DIM, BLOCK)
    v_tile = load_tile(at_v, tile_offsets(key, v_row, BLOCK_V), inside, DIM_V, BLOCK_V)

    TOKENS: tl.constexpr = QUERIES // PACK
    row = tl.arange(0, QUERIES)
    token = row // PACK
    q_rows = token.to(tl.int64) * q_row + (row % PACK).to(tl.int64) * q_head
    dout_rows = token.to(tl.int64) * dout_row + (row % PACK).to(tl.int64) * dout_head
    q_offsets, dout_offsets = tile_offsets(q_rows, 1, BLOCK), tile_offsets(dout_rows, 1, BLOCK_V)
    factor, inner = to_logit(scale, TWOS), 0.0
    if SOFTCAP:
        factor, inner = to_logit(softcap, TWOS), scale / softcap
    state = (tl.zeros([KEYS, BLOCK], tl.float32), tl.zeros([KEYS, BLOCK_V], tl.float32))

    for part in range(HEADS_PER_KV // PACK):
        group = kv_head * (HEADS_PER_KV // PACK) + part
        at_q, at_dout = q + group * PACK * q_head, dout + group * PACK * dout_head
        at_lse, at_delta = row_logit + group * n_rows * PACK, delta + group * n_rows * PACK
        for run in range(run_begin, first_masked):
            first, n_tiles = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
            for tile in range(n_tiles):
                start = (first + tile * TOKENS).to(tl.int64)
                state = key_gradients(
                    state, k_tile, v_tile, at_q + start * q_row, at_dout + start * dout_row,
                    at_lse + start * PACK, at_delta + start * PACK, q_offsets, dout_offsets, None, None,
                    factor, inner, SOFTCAP, DIM, DIM_V, BLOCK, BLOCK_V, QUERIES, PRECISION, TWOS,
                )  # fmt: skip
        for run in range(first_masked, run_end):
            first, n_tiles = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
            band, n_bands = tl.load(runs + run * 4 + 2), tl.load(runs + run * 4 + 3)
            lo, hi = visible_columns(bands, band, band + n_bands, key0 + key)
            for tile in range(n_tiles):
                begin = first + tile * TOKENS
                start = begin.to(tl.int64)
                state = key_gradients(
                    state, k_tile, v_tile, at_q + start * q_row, at_dout + start * dout_row,
                    at_lse + start * PACK, at_delta + start * PACK, q_offsets, dout_offsets, begin + token < n_rows,
                    between(lo, hi, begin + token), factor, inner,
                    SOFTCAP, DIM, DIM_V, BLOCK, BLOCK_V, QUERIES, PRECISION, TWOS,
                )  # fmt: skip

    total_k, total_v = state
    total_k *= scale
    kv_heads = num_heads // HEADS_PER_KV
    if slot < 0:
        store_keys(dk, dv, total_k, total_v, key0, inside, kv_head, kv_heads, DIM, DIM_V, BLOCK, BLOCK_V)
    else:
        place = (slot.to(tl.int64) * kv_heads + kv_head) * KEYS + key
        store_tile(part_dk, tile_offsets(place, DIM, BLOCK), total_k, inside, DIM, BLOCK)
        store_tile(part_dv, tile_offsets(place, DIM_V, BLOCK_V), total_v, inside, DIM_V, BLOCK_V)


@triton.jit
def store_keys(
    dk, dv, total_k, total_v, key0, inside, kv_head, kv_heads,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a tile of keys into dk and dv, [keys, KV heads, dim]."""
    at = (key0 + tl.arange(0, total_k.shape[0])).to(tl.int64) * kv_heads + kv_head
    store_tile(dk, tile_offsets(at, DIM, BLOCK), total_k, inside, DIM, BLOCK)
    store_tile(dv, tile_offsets(at, DIM_V, BLOCK_V), total_v, inside, DIM_V, BLOCK_V)


@triton.jit
def add_kernel(
    splits, part_dk, part_dv, dk, dv, kv_heads,
    KEYS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add up the parts of dk and dv of the keys of one split for one KV head. Arguments as of `keys_kernel`."""
    split, kv_head = tl.program_id(0), tl.program_id(1)
    at = splits + split * 4
    key0, n_keys, first_slot, n_slots = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    key = tl.arange(0, KEYS)
    inside = key < n_keys
    total_k, total_v = tl.zeros([KEYS, BLOCK], tl.float32), tl.zeros([KEYS, BLOCK_V], tl.float32)
    for part in range(n_slots):
        place = ((first_slot + part).to(tl.int64) * kv_heads + kv_head) * KEYS + key
        total_k += load_tile(part_dk, tile_offsets(place, DIM, BLOCK), inside, DIM, BLOCK)
        total_v += load_tile(part_dv, tile_offsets(place, DIM_V, BLOCK_V), inside, DIM_V, BLOCK_V)
    store_keys(dk, dv, total_k, total_v, key0, inside, kv_head, kv_heads, DIM, DIM_V, BLOCK, BLOCK_V)
