"""A mask as FlexAttention's `BlockMask`, and back: exactly, from tables of blocks, and without an S x S table."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from torch_magi import _planner
from torch_magi.masks.constructors import from_block_matrix
from torch_magi.masks.mask import AttnMask, MaskGrid
from torch_magi.masks.mask_mod import evaluated_bands, logger, mask_grid, to_mask_mod, traced_mask, used_indices
from torch_magi.masks.ranges import check_positive

BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


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
    edges = [np.minimum(np.arange(-(-n // size) + 1) * size, n) for n, size in ((sq, q_block), (sk, k_block))]
    areas = _planner.block_areas(mask.bands, *edges)
    full = areas == q_block * k_block  # so a block that the mask's end cuts is none
    return BlockMask.from_kv_blocks(
        *_tables((areas > 0) & ~full, device),
        *_tables(full, device),
        BLOCK_SIZE=(q_block, k_block),
        mask_mod=to_mask_mod(mask, device),
        seq_lengths=(sq, sk),
    )


def _tables(listed: BoolArray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return kv_num_blocks and kv_indices of blocks bool [rows of blocks, columns], in the order of torch's own."""
    counts = listed.sum(1, dtype=np.int32)
    indices = np.argsort(~listed, 1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)


def from_block_mask(block_mask: BlockMask, *, B: int | None = None, H: int | None = None) -> AttnMask | MaskGrid:
    """Return the pairs that a BlockMask shows; see `AttnMask.from_block_mask`."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a torch BlockMask, got {type(block_mask).__name__}")
    partial = _listed("kv_", block_mask.kv_num_blocks, block_mask.kv_indices, block_mask)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed("full_kv_", block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask)
    n_b, n_h = _number("B", B, partial.shape[0]), _number("H", H, partial.shape[1])
    device = block_mask.kv_indices.device
    asked = used_indices(block_mask.mask_mod, device) if partial.any() else frozenset()
    used = asked | {name for name, own in zip("bh", partial.shape, strict=False) if own > 1}

    made: dict[tuple[int, int, bytes, bytes], AttnMask] = {}

    def make(b: int, h: int) -> AttnMask:
        at = min(b, partial.shape[0] - 1), min(h, partial.shape[1] - 1)
        key = (b * ("b" in asked), h * ("h" in asked), partial[at].tobytes(), full[at].tobytes())
        if key not in made:
            made[key] = _mask_of_blocks(block_mask, b, h, partial[at], full[at], device)
        return made[key]

    grid = mask_grid(make, n_b, n_h, used)
    return grid[0][0] if B is None and H is None and n_b == n_h == 1 else grid


def _number(name: str, given: int | None, own: int) -> int:
    n = own if given is None else check_positive(name, given)
    if own not in (1, n):
        raise ValueError(f"{name} must be {own}, as the BlockMask has it, got {n}")
    return n


def _listed(name: str, counts: torch.Tensor, indices: torch.Tensor, block_mask: BlockMask) -> BoolArray:
    """Return which blocks a pair of tables lists, bool [B, H, rows of blocks, columns of blocks]."""
    if indices.ndim > 4:
        raise ValueError(f"{name}indices must have shape [B, H, rows of blocks, n], got {list(indices.shape)}")
    count, index = counts.cpu().numpy(), indices.cpu().numpy()
    count = count.reshape((1,) * (3 - count.ndim) + count.shape)
    index = index.reshape((1,) * (4 - index.ndim) + index.shape)
    n_q, n_k = (-(-n // size) for n, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True))
    if index.shape[2] != n_q:
        raise ValueError(
            f"the BlockMask has {index.shape[2]} rows of blocks, but {block_mask.seq_lengths[0]} queries are {n_q} of "
            f"{block_mask.BLOCK_SIZE[0]}; a BlockMask of which rows were cut out needs its own seq_lengths and mask_mod"
        )
    b, h, row, nth = np.nonzero(np.arange(index.shape[3]) < count[..., None])
    column = index[b, h, row, nth]
    outside = (column < 0) | (column >= n_k)
    if outside.any():
        raise ValueError(
            f"{name}indices must be in [0, {n_k}) for {block_mask.seq_lengths[1]} keys in blocks of "
            f"{block_mask.BLOCK_SIZE[1]}, got {int(column[outside][0])}"
        )
    listed = np.zeros((*index.shape[:2], n_q, n_k), np.bool_)
    listed[b, h, row, column] = True
    return listed


def _mask_of_blocks(
    block_mask: BlockMask, b: int, h: int, partial: BoolArray, full: BoolArray, device: torch.device
) -> AttnMask:
    """Return the union of the full blocks, and of the partial ones where mask_mod shows a pair."""
    (sq, sk), (q_block, k_block) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    whole = from_block_matrix(full, q_block, k_block, sq, sk)
    asked = from_block_matrix(partial & ~full, q_block, k_block, sq, sk)
    if not asked.area:
        return whole
    traced = traced_mask(block_mask.mask_mod, sq, sk, b, h)
    if traced is not None:
        return whole | (traced & asked)
    logger.info("mask_mod asked for %d pairs of %d x %d, those in partial blocks", asked.area, sq, sk)
    offsets, intervals = AttnMask.from_dense(partial & ~full).row_intervals()
    rows = np.flatnonzero(np.diff(offsets))
    q_ranges = np.stack([rows * q_block, np.minimum((rows + 1) * q_block, sq)], 1)
    k_ranges = [np.minimum(intervals[offsets[i] : offsets[i + 1]] * k_block, sk) for i in rows]
    bands = evaluated_bands(block_mask.mask_mod, b, h, q_ranges, k_ranges, device)
    return AttnMask.from_bands(np.concatenate([whole.bands, bands]), sq, sk)
