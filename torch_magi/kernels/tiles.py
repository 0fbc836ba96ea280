"""Which tiles the Triton kernels work on."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_HEAD_DIM = 256
MAX_HEADS_IN_TILE = 8
UNKNOWN_SHARED_MEMORY = 64 << 10  # bytes; what every GPU has


class Tile(NamedTuple):
    """What one program works on at a time.

    queries: rows of the query side: tokens x query heads that share a KV head.
    keys: rows of the key side.
    warps, stages: of the program, and of its software pipeline.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class Choice(NamedTuple):
    """The tiles of one kernel: head dims up to the key have this tile.

    kept, streamed: the sides ("queries" or "keys") that stay in shared memory and that pass through it.
    kept_tensors: of the side that stays: 1 is q alone.
    """

    narrow: dict[int, Tile]  # 16-bit inputs
    wide: dict[int, Tile]  # float32 inputs
    kept: str
    streamed: str
    kept_tensors: int = 2


FORWARD = Choice(
    {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 4, 2)},
    {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 4, 1)},
    "queries",
    "keys",
    kept_tensors=1,
)
BACKWARD_QUERIES = Choice(
    {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 1)},
    {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 4, 1)},
    "queries",
    "keys",
)
BACKWARD_KEYS = Choice(
    {64: Tile(64, 128, 8, 3), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 1)},
    {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 4, 1)},
    "keys",
    "queries",
)


def block_size(dim: int) -> int:
    """Return how wide a head dim is in a tile: a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def heads_in_tile(num_heads_q: int, num_heads_kv: int, queries: int) -> int:
    """Return how many query heads of a KV head share a tile: a power of two that divides their number."""
    heads = num_heads_q // num_heads_kv
    return min(heads & -heads, MAX_HEADS_IN_TILE, queries)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return UNKNOWN_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) or UNKNOWN_SHARED_MEMORY


def choose_tile(choice: Choice, head_dims: tuple[int, int], dtype: torch.dtype, shared: int) -> Tile:
    """Return the tile for head dims, with as many stages as `shared` bytes of shared memory hold."""
    blocks = [block_size(dim) for dim in head_dims]
    table = choice.wide if dtype == torch.float32 else choice.narrow
    tile = next(tile for widest, tile in table.items() if max(blocks) <= widest)
    kept = getattr(tile, choice.kept) * sum(blocks[: choice.kept_tensors])
    streamed = getattr(tile, choice.streamed) * sum(blocks)
    return tile._replace(stages=max(1, min(tile.stages, (shared // dtype.itemsize - kept) // streamed)))
