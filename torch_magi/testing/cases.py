"""Masks and inputs for tests and benchmarks: small named ones, random ones, and those of the yardstick."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from torch_magi import masks
from torch_magi.masks import AttnMask, MaskType

Tensor = torch.Tensor


def named_masks() -> dict[str, AttnMask]:
    """Return small masks, at least one of every constructor and of every kind that has broken a kernel."""
    slices = AttnMask.from_slices
    return {
        "full": masks.full(12, 12),
        "full_cross": masks.full(5, 9),
        "causal": masks.causal(16),
        "causal_more_keys": masks.causal(5, 12),
        "causal_more_queries": masks.causal(5, 2),
        "sliding_window": masks.sliding_window(16, 16, (3, 0)),
        "sliding_window_both_sides": masks.sliding_window(16, 16, (2, 1)),
        "document": masks.document([0, 4, 7, 16]),
        "document_full": masks.document([0, 4, 7, 16], causal=False),
        "document_window": masks.document([0, 9, 16], window_size=(3, 0)),
        "document_empty_ones_and_tail": masks.document([0, 0, 5, 9, 9, 9], total=14),
        "from_document_ids_padding": masks.from_document_ids([1, 1, 1, 0, 2, 2, 0, 0], padding_id=0),
        "from_document_ids_interleaved": masks.from_document_ids([1, 2, 2, 1, 1, 3, 2, 3]),
        "from_position_ids": masks.from_position_ids([0, 1, 2, 0, 1, 0, 1, 2, 3]),
        "varlen": masks.varlen([0, 0, 1, 1, 2], [0, 0, 3, 3, 8], causal=True),
        "varlen_full": masks.varlen([0, 4, 6], [0, 2, 9]),
        "block_causal": masks.block_causal([0, 7, 16], 3),
        "chunk_causal": masks.chunk_causal(13, 13, 4),
        "sliding_block": masks.sliding_block([0, 10, 16], 3, 1),
        "prefix_lm": masks.prefix_lm(14, 14, 5),
        "shared_prefix": masks.shared_prefix(4, [0, 3, 8, 12]),
        "bidirectional_spans": masks.bidirectional_spans(masks.causal(12), [[2, 5], [8, 11]]),
        "from_block_matrix": masks.from_block_matrix([[True, False], [True, True]], 6, 6, 12, 12),
        "staircase": masks.block_causal([0, 16], 2).clip((4, 16), (0, 16)),
        "overlapping_slices": slices([[0, 4], [0, 4]], [[0, 4], [2, 6]], ["full", "full"], 6, 6),
        "swapped_halves": slices([[0, 8], [8, 16]], [[8, 16], [0, 8]], ["full", "full"], 16, 16),
        "bi_causal": slices([[1, 6]], [[2, 10]], ["bi_causal"], 8, 12),
        "inv_causal": slices([[2, 12]], [[0, 7]], ["inv_causal"], 12, 12),
        "one_document_of_many": slices([[0, 4]], [[0, 4]], ["causal"], 32, 32),
        "nothing": slices([], [], [], 8, 8),
        "one_pair": slices([[3, 4]], [[5, 6]], ["full"], 7, 7),
    }


def random_mask(seed: int, sq: int, sk: int, max_slices: int = 6) -> AttnMask:
    """Return the union of random slices and staircases: overlaps, empty rows, odd starts, all types.

    The same arguments give the same mask.
    """
    rng = random.Random(f"{seed} {sq} {sk}")

    def some_range(length: int) -> tuple[int, int]:
        a, b = rng.randint(0, length), rng.randint(0, length)
        return min(a, b), max(a, b)

    mask = AttnMask.from_slices([], [], [], sq, sk)
    for _ in range(rng.randint(0, max_slices)):
        q, k = some_range(sq), some_range(sk)
        if rng.random() < 0.25:
            rows, cols = q[1] - q[0], k[1] - k[0]
            stairs = masks.chunk_causal(rows, cols, rng.randint(1, 5))
            mask = mask | _placed(stairs, q[0], k[0], sq, sk)
        else:
            kind = rng.choice(list(MaskType))
            mask = mask | AttnMask.from_slices([q], [k], [kind], sq, sk)
    if rng.random() < 0.2:
        hole = AttnMask.from_slices([some_range(sq)], [some_range(sk)], [rng.choice(list(MaskType))], sq, sk)
        mask = mask - hole
    return mask


def _placed(mask: AttnMask, q0: int, k0: int, sq: int, sk: int) -> AttnMask:
    """Return `mask` at row q0 and column k0 of an sq x sk mask."""
    q, k, types = mask.to_slices()
    return AttnMask.from_slices(q + q0, k + k0, types, sq, sk)


def random_masks(count: int, seed: int = 0, max_size: int = 40, *, square: bool = False) -> Iterator[AttnMask]:
    """Yield `count` random masks, and print how to make each again: the last line printed is the culprit.

    Args:
        count: how many.
        seed: of the first; mask i of seed s is mask 0 of seed s + i.
        max_size: largest number of queries and of keys; 0 and 1 occur.
        square: as many keys as queries.
    """
    for i in range(seed, seed + count):
        rng = random.Random(i)
        sq = rng.choice([0, 1, 2]) if rng.random() < 0.1 else rng.randint(3, max_size)
        sk = sq if square else rng.randint(1, max_size)
        print(f"random_mask(seed={i}, sq={sq}, sk={sk})")
        yield random_mask(i, sq, sk)


class Inputs(NamedTuple):
    """Inputs of an attention call, and gradients of what it returns."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    dlse: Tensor


def random_inputs(
    mask: AttnMask,
    num_heads_q: int = 2,
    num_heads_kv: int = 1,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int,
    nan_in_unused: bool = False,
) -> Inputs:
    """Return normally distributed inputs that fit a mask.

    Args:
        nan_in_unused: fill with NaN the queries that see nothing, their gradients of out, and the keys and
            values that nobody sees. (dlse stays: with a sink such a row has an lse.)
    """
    generator = torch.Generator().manual_seed(seed)
    sq, sk = mask.shape
    dim_v = head_dim if head_dim_v is None else head_dim_v

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = [
        normal(sq, num_heads_q, head_dim),
        normal(sk, num_heads_kv, head_dim),
        normal(sk, num_heads_kv, dim_v),
        normal(sq, num_heads_q, dim_v),
        normal(sq, num_heads_q),
    ]
    if nan_in_unused:
        dense = mask.to_dense()
        for i, used in enumerate((dense.any(1), dense.any(0), dense.any(0), dense.any(1))):
            made[i][~used] = torch.nan
    gradient_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = [dtype] * 4 + [gradient_dtype]
    return Inputs(*(x.to(d).to(device) for x, d in zip(made, dtypes, strict=True)))


# --- the yardstick: masks of the performance targets ---


def document_lengths(total: int, cap: int, seed: int = 0, sigma: float = 1.2) -> list[int]:
    """Return log-normal document lengths, at most `cap` and mostly at least 16, that add up to `total`."""
    rng = random.Random(seed)
    median = min(700, total // 12)
    lengths: list[int] = []
    left = total
    while left:
        drawn = int(median * rng.lognormvariate(0.0, sigma))
        lengths.append(min(max(drawn, 16), cap, left))
        left -= lengths[-1]
    return lengths


def yardstick_documents(total: int, seed: int = 0) -> np.ndarray:
    """Return cu_seqlens of documents no longer than a quarter of `total`."""
    return np.cumsum([0, *document_lengths(total, total // 4, seed)])


def _varlen_block_causal(total: int) -> AttnMask:
    return masks.block_causal(yardstick_documents(total), min(1024, max(total // 16, 1)))


def _prefix_documents(total: int) -> AttnMask:
    prefix = min(2048, total // 4)
    lengths = document_lengths(total - prefix, total // 4)
    return masks.shared_prefix(prefix, np.cumsum([0, *lengths]), prefix_causal=False)


YARDSTICK_MASKS: dict[str, Callable[[int], AttnMask]] = {
    "full": lambda total: masks.full(total, total),
    "causal": lambda total: masks.causal(total),
    "varlen_full": lambda total: masks.document(yardstick_documents(total), causal=False),
    "varlen_causal": lambda total: masks.document(yardstick_documents(total)),
    "sliding_causal": lambda total: masks.sliding_window(total, total, (min(1024, total) - 1, 0)),
    "varlen_block_causal": _varlen_block_causal,
    "prefix_documents": _prefix_documents,
}
"""The masks of the performance targets, as functions of the number of tokens."""
