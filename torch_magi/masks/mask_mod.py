"""A mask as FlexAttention takes it: `mask_mod` and `BlockMask`, exactly and without an S x S table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from torch_magi import _planner
from torch_magi.masks.mask import AttnMask
from torch_magi.masks.ranges import check_positive


def to_mask_mod(mask: AttnMask, device: torch.device | str = "cpu") -> Callable[..., torch.Tensor]:
    """Return `mask_mod(b, h, q_idx, kv_idx)` with the pairs of a mask.

    It looks up the row's intervals of keys in captured int32 tables on `device`: two of [sq] for each interval
    of the row that has most.
    """
    offsets, intervals = mask.row_intervals()
    counts = np.diff(offsets)
    most = int(counts.max()) if len(counts) else 0
    lo = np.zeros((most, mask.shape[0]), np.int32)
    hi = np.zeros((most, mask.shape[0]), np.int32)
    rows = np.repeat(np.arange(mask.shape[0]), counts)
    nth = np.arange(len(rows)) - np.repeat(offsets[:-1], counts)
    lo[nth, rows], hi[nth, rows] = intervals[:, 0], intervals[:, 1]
    tables = [(torch.from_numpy(a).to(device), torch.from_numpy(b).to(device)) for a, b in zip(lo, hi, strict=True)]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        seen = (q_idx < 0) & (kv_idx < 0)
        for first, last in tables:
            seen = seen | ((kv_idx >= first[q_idx]) & (kv_idx < last[q_idx]))
        return seen

    return mask_mod


def to_block_mask(mask: AttnMask, BLOCK_SIZE: int | tuple[int, int], device: torch.device | str) -> BlockMask:
    """Return the `BlockMask` of a mask, with full and partial blocks told apart.

    Args:
        mask: the pairs.
        BLOCK_SIZE: rows and keys of a block, one number or two.
        device: where the tables are put, and the attention is computed.

    Raises:
        TypeError, ValueError: for a BLOCK_SIZE that is no positive number or pair of them.
    """
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(sizes) != 2:
        raise ValueError(f"BLOCK_SIZE must be one number or two, got {BLOCK_SIZE!r}")
    q_block, k_block = (check_positive("BLOCK_SIZE", size) for size in sizes)
    sq, sk = mask.shape
    n_q, n_k = -(-sq // q_block), -(-sk // k_block)
    q_edges = np.append(np.arange(0, sq, q_block), sq).astype(np.int64)
    partial: list[list[int]] = [[] for _ in range(n_q)]
    full: list[list[int]] = [[] for _ in range(n_q)]
    for row in range(n_q):
        rows = np.array([[q_edges[row], q_edges[row + 1]]], np.int64)
        n_rows = int(rows[0, 1] - rows[0, 0])
        bands = _planner.clip(mask.bands, int(rows[0, 0]), int(rows[0, 1]), 0, sk)
        touched = _planner.key_ranges(bands, rows)
        blocks = sorted({b for lo, hi in touched.tolist() for b in range(lo // k_block, -(-hi // k_block))})
        if not blocks:
            continue
        # The area of each block, counted on the transposed rows.
        k_edges = np.minimum(np.arange(n_k + 1, dtype=np.int64) * k_block, sk)
        areas = _planner.row_areas(_planner.transpose(bands), k_edges)
        for b in blocks:
            whole = n_rows * int(k_edges[b + 1] - k_edges[b])
            if areas[b] == whole and n_rows == q_block and k_edges[b + 1] - k_edges[b] == k_block:
                full[row].append(b)
            elif areas[b]:
                partial[row].append(b)

    def table(lists: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor([len(x) for x in lists], dtype=torch.int32)
        indices = torch.zeros(n_q, n_k, dtype=torch.int32)
        for i, found in enumerate(lists):
            rest = sorted(set(range(n_k)) - set(found))
            indices[i] = torch.tensor(found + rest, dtype=torch.int32)
        return counts[None, None].to(device), indices[None, None].to(device)

    return BlockMask.from_kv_blocks(
        *table(partial),
        *table(full),
        BLOCK_SIZE=(q_block, k_block),
        mask_mod=to_mask_mod(mask, device),
        seq_lengths=(sq, sk),
    )
