"""The forward kernels in Triton: attention of a tile of queries, and the joining of parts of one."""

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
    to_natural,
    visible_columns,
)


@triton.jit
def attend(
    state, q, at_k, at_v, k_offsets, v_offsets, used, shown, factor, inner,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the softmax of the rows of q (online softmax, arXiv:2205.14135).

    Args:
        state: the largest logit, the sum of 2^(logit - largest) and the weighted values of every row, and its
            largest product of q and k, which is kept only where a softcap follows.
        used: which keys may be loaded; None: all.
        shown: which pairs are visible; None: all.
        factor, inner: logit = factor * product, or factor * tanh(inner * product).
    """
    top, total, weighted, product = state
    k = load_tile(at_k, k_offsets, used, DIM, BLOCK)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        if shown is None:
            product = tl.maximum(product, tl.max(scores, 1))
        else:
            product = tl.maximum(product, tl.max(tl.where(shown, scores, float("-inf")), 1))
        scores = tanh(scores * inner)
    if shown is not None:
        scores = tl.where(shown, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    reference = higher
    if shown is not None:
        reference = tl.where(higher == float("-inf"), 0.0, higher)
    weights = power(scores * factor - reference[:, None], TWOS)
    kept = power(top - reference, TWOS)
    total = total * kept + tl.sum(weights, 1)
    v = load_tile(at_v, v_offsets, used, DIM_V, BLOCK_V)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * kept[:, None], input_precision=PRECISION)
    return higher, total, weighted, product


@triton.jit
def close_rows(
    top, total, weighted, tokens, heads, used, sink, sink_row, out_before, lse_before, out, lse, num_heads,
    DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Store the rows of a tile, joined with a sink and an earlier result over other keys."""
    at = tokens.to(tl.int64) * num_heads + heads
    highest = top
    if sink is not None:
        sink_logit = tl.load(sink + tokens.to(tl.int64) * sink_row + heads, mask=used, other=float("-inf"))
        sink_logit = to_logit(sink_logit, TWOS)
        highest = tl.maximum(highest, sink_logit)
    if lse_before is not None:
        before = tl.load(lse_before + at, mask=used, other=float("-inf"))
        # +inf: empty, see merge_state
        logit_before = tl.where(before == float("inf"), float("-inf"), to_logit(before, TWOS))
        highest = tl.maximum(highest, logit_before)
    empty = highest == float("-inf")
    reference = tl.where(empty, 0.0, highest)
    own = power(top - reference, TWOS)
    total = total * own
    if sink is not None:
        total += power(sink_logit - reference, TWOS)
    if lse_before is not None:
        earlier = power(logit_before - reference, TWOS)
        total += earlier
    total = tl.where(empty, 1.0, total)
    inverse = 1.0 / total
    logsum = reference + (tl.log2(total) if TWOS else tl.log(total))
    logsum = tl.where(empty, float("-inf"), to_natural(logsum, TWOS))
    weighted = weighted * (own * inverse)[:, None]
    offsets = tile_offsets(at, DIM_V, BLOCK_V)
    if lse_before is not None:
        alone = (top == float("-inf")) & (total == earlier) & (earlier > 0.0)
        weight = tl.where(alone, 1.0, earlier * inverse)
        logsum = tl.where(alone, before, logsum)
        joined = weight > 0.0
        past = load_tile(out_before, offsets, used & joined, DIM_V, BLOCK_V) * weight[:, None]
        # The sign of a zero stays.
        weighted = tl.where(joined[:, None], tl.where(weighted == 0.0, past, weighted + past), weighted)
    tl.store(lse + at, logsum, mask=used)
    store_tile(out, offsets, weighted, used, DIM_V, BLOCK_V)


@triton.jit(do_not_specialize=["n_items", "n_keys"])
def forward_kernel(
    q, k, v, items, runs, bands, sink, out_before, lse_before, out, lse, max_logits,
    part_top, part_total, part_out, q_row, q_head, k_row, k_head, v_row, v_head, sink_row, n_items, n_keys, num_heads,
    scale, softcap,
    HEADS_PER_KV: tl.constexpr, PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one item for one group of PACK heads.

    q, k, v: [rows, heads, dim] with strides; sink: one logit for
    each head, sink_row: 0, or the stride of rows. out: [rows, heads, dim_v]; lse: [rows, heads]; max_logits: [heads],
    -inf before; part_*: [slots, groups, QUERIES(, dim_v)], the state of rows that several items share.
    """
    group, item = tl.program_id(0) // n_items, tl.program_id(0) % n_items
    at = items + item * 8
    row0, n_rows, slot = tl.load(at), tl.load(at + 1), tl.load(at + 6)
    run_begin, run_end = tl.load(at + 2), tl.load(at + 3)
    first_masked = run_begin + tl.load(at + 5)

    row = tl.arange(0, QUERIES)
    tokens, heads = row0 + row // PACK, group * PACK + row % PACK
    used = row // PACK < n_rows
    at_q = q + row0.to(tl.int64) * q_row + group.to(tl.int64) * PACK * q_head
    q_rows = (row // PACK).to(tl.int64) * q_row + (row % PACK).to(tl.int64) * q_head
    q_tile = load_tile(at_q, tile_offsets(q_rows, 1, BLOCK), used, DIM, BLOCK)

    kv_head = (group * PACK // HEADS_PER_KV).to(tl.int64)
    k += kv_head * k_head
    v += kv_head * v_head
    column = tl.arange(0, KEYS)
    k_offsets, v_offsets = tile_offsets(column, k_row, BLOCK), tile_offsets(column, v_row, BLOCK_V)
    factor, inner = to_logit(scale, TWOS), 0.0
    if SOFTCAP:
        factor, inner = to_logit(softcap, TWOS), scale / softcap
    lowest = tl.full([QUERIES], float("-inf"), tl.float32)
    state = (lowest, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, BLOCK_V], tl.float32), lowest)

    for run in range(run_begin, first_masked):
        first, n_tiles = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
        for tile in range(n_tiles):
            start = (first + tile * KEYS).to(tl.int64)
            state = attend(
                state, q_tile, k + start * k_row, v + start * v_row, k_offsets, v_offsets, None, None, factor, inner,
                SOFTCAP, DIM, DIM_V, BLOCK, BLOCK_V, PRECISION, TWOS,
            )  # fmt: skip
    for run in range(first_masked, run_end):
        first, n_tiles = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
        band, n_bands = tl.load(runs + run * 4 + 2), tl.load(runs + run * 4 + 3)
        lo, hi = visible_columns(bands, band, band + n_bands, tokens)
        for tile in range(n_tiles):
            start = first + tile * KEYS
            state = attend(
                state, q_tile, k + start.to(tl.int64) * k_row, v + start.to(tl.int64) * v_row, k_offsets, v_offsets,
                start + column < n_keys, between(lo, hi, start + column), factor, inner,
                SOFTCAP, DIM, DIM_V, BLOCK, BLOCK_V, PRECISION, TWOS,
            )  # fmt: skip

    top, total, weighted, product = state
    if max_logits is not None:
        most = product * scale if SOFTCAP else to_natural(top, TWOS)
        most = tl.where(used, most, float("-inf"))
        most = tl.max(tl.reshape(most, [QUERIES // PACK, PACK]), 0)
        tl.atomic_max(max_logits + group * PACK + tl.arange(0, PACK), most)
    if slot < 0:
        close_rows(
            top, total, weighted, tokens, heads, used, sink, sink_row, out_before, lse_before, out, lse, num_heads,
            DIM_V, BLOCK_V, TWOS,
        )  # fmt: skip
    else:
        place = (slot.to(tl.int64) * (num_heads // PACK) + group) * QUERIES + row
        tl.store(part_top + place, top)
        tl.store(part_total + place, total)
        store_tile(part_out, tile_offsets(place, DIM_V, BLOCK_V), weighted, used, DIM_V, BLOCK_V)


@triton.jit
def join_kernel(
    splits, part_top, part_total, part_out, sink, out_before, lse_before, out, lse, sink_row, num_heads,
    PACK: tl.constexpr, QUERIES: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Join the parts of the rows of one split for one group of heads. Arguments as for `forward_kernel`."""
    split, group = tl.program_id(0), tl.program_id(1)
    at = splits + split * 4
    row0, n_rows, first_slot, n_slots = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    row = tl.arange(0, QUERIES)
    used = row // PACK < n_rows
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES, BLOCK_V], tl.float32)
    for part in range(n_slots):
        place = ((first_slot + part).to(tl.int64) * (num_heads // PACK) + group) * QUERIES + row
        other = tl.load(part_top + place)
        higher = tl.maximum(top, other)
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = power(top - reference, TWOS), power(other - reference, TWOS)
        total = total * kept + tl.load(part_total + place) * added
        tile = load_tile(part_out, tile_offsets(place, DIM_V, BLOCK_V), used, DIM_V, BLOCK_V)
        weighted = weighted * kept[:, None] + tile * added[:, None]
        top = higher
    close_rows(
        top, total, weighted, row0 + row // PACK, group * PACK + row % PACK, used, sink, sink_row, out_before,
        lse_before, out, lse, num_heads, DIM_V, BLOCK_V, TWOS,
    )  # fmt: skip
