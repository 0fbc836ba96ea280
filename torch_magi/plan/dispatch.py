"""Chunks to ranks: which rank computes which query rows, and holds which rows of every dispatched tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from torch_magi import _planner
from torch_magi.plan.config import PlanConfig

IntArray = np.ndarray[Any, np.dtype[np.int64]]

# Chunks a rank gets where the chunk size is chosen: more of them balance better and send more rows.
CHUNKS_PER_RANK = {"sequential": 1, "head_tail": 2, "min_heap": 16}
LARGEST_AUTOMATIC_CHUNK = 2048


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Who holds which rows.

    Attributes:
        total_tokens: rows of the whole sequence.
        cp_size: number of ranks.
        chunk_size: rows in a chunk; the last one may be shorter.
        rank_of_chunk: int32 [num_chunks]; the rank that holds each chunk.
    """

    total_tokens: int
    cp_size: int
    chunk_size: int
    rank_of_chunk: np.ndarray[Any, np.dtype[np.int32]]

    def __post_init__(self) -> None:
        self.rank_of_chunk.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return (DispatchPlan, (self.total_tokens, self.cp_size, self.chunk_size, self.rank_of_chunk))

    @cached_property
    def segments(self) -> IntArray:
        """int64 [n, 4], sorted: first row, last row + 1, rank, index of the first row on that rank."""
        rank = self.rank_of_chunk
        if not len(rank):
            return np.zeros((0, 4), np.int64)
        first = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
        out = np.zeros((len(first), 4), np.int64)
        out[:, 0] = first * self.chunk_size
        out[:-1, 1] = out[1:, 0]
        out[-1, 1] = self.total_tokens
        out[:, 2] = rank[first]
        for r in range(self.cp_size):
            mine = out[:, 2] == r
            length = (out[:, 1] - out[:, 0])[mine]
            out[mine, 3] = np.cumsum(length) - length
        out.setflags(write=False)
        return out

    def ranges(self, rank: int) -> IntArray:
        """int64 [n, 2]: the sorted ranges of rows that `rank` holds, in its local order."""
        segments = self.segments
        return np.ascontiguousarray(segments[segments[:, 2] == rank, :2])

    @cached_property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Number of rows that each rank holds."""
        length = self.segments[:, 1] - self.segments[:, 0]
        counts = np.bincount(self.segments[:, 2], weights=length, minlength=self.cp_size)
        return tuple(int(c) for c in counts)

    def rows(self, rank: int) -> IntArray:
        """int64 [tokens_per_rank[rank]]: the global index of every local row of `rank`."""
        ranges = self.ranges(rank)
        if not len(ranges):
            return np.zeros(0, np.int64)
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in ranges])


def automatic_chunk_size(total_tokens: int, cp_size: int, dispatcher: str) -> int:
    """Return the chunk size for a length: equal shards first, then whole powers of two from 128 tokens on."""
    size = -(-total_tokens // (cp_size * CHUNKS_PER_RANK[dispatcher]))
    if dispatcher != "min_heap" or size < 128:
        return max(size, 1)
    return min(LARGEST_AUTOMATIC_CHUNK, 1 << (size.bit_length() - 1))


def chunk_edges(total_tokens: int, chunk_size: int) -> IntArray:
    """int64 [num_chunks + 1]: where chunks begin and the last one ends."""
    starts = np.arange(0, total_tokens, chunk_size, dtype=np.int64)
    return np.append(starts, np.int64(total_tokens))


def make_dispatch_plan(bands: IntArray, total_tokens: int, cp_size: int, config: PlanConfig) -> DispatchPlan:
    """Assign the chunks of a mask to ranks as `config` says."""
    chunk_size = config.chunk_size or automatic_chunk_size(total_tokens, cp_size, config.dispatcher)
    areas = _planner.row_areas(bands, chunk_edges(total_tokens, chunk_size))
    last_is_short = total_tokens % chunk_size != 0
    rank_of_chunk = _planner.dispatch(config.dispatcher, areas, cp_size, config.uneven, last_is_short)
    return DispatchPlan(total_tokens, cp_size, chunk_size, rank_of_chunk)
