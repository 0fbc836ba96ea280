"""Which rows a roll within documents sends where."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_magi.plan.dispatch import IntArray
from torch_magi.plan.types import AttnPlan, CommPlan


class RollPlan(NamedTuple):
    """One rank's part of a roll.

    Attributes:
        comm: the exchange that brings the rows.
        target_rows: int64 [comm.num_received]; the local row that each received row becomes.
    """

    comm: CommPlan
    target_rows: IntArray


def roll_plan_of(plan: AttnPlan, shift: int, wrap: bool) -> RollPlan:
    """Return the exchange in which row g takes what row g - shift of the same document holds. Kept in the plan.

    Args:
        plan: who holds which rows, and which rows are documents (`plan.cu_seqlens`).
        shift: as in `torch.roll`.
        wrap: whether what leaves a document at one end enters it at the other. Rows of no document then stay.
    """
    made: RollPlan = plan.cached(("roll", shift, wrap), lambda: _make_roll_plan(plan, shift, wrap))
    return made


def _make_roll_plan(plan: AttnPlan, shift: int, wrap: bool) -> RollPlan:
    dispatch, rank = plan.dispatch, plan.cp_rank
    rows = dispatch.rows(rank)
    sources = _sources(rows, plan.cu_seqlens, shift, wrap)
    targets = _sources(rows, plan.cu_seqlens, -shift, wrap)
    takes, gives = np.flatnonzero(sources >= 0), np.flatnonzero(targets >= 0)
    source_ranks = dispatch.rank_of_chunk[sources[takes] // dispatch.chunk_size]
    target_ranks = dispatch.rank_of_chunk[targets[gives] // dispatch.chunk_size]
    # Between two ranks, rows travel in the order of their targets.
    sent = gives[np.lexsort((targets[gives], target_ranks))]
    comm = CommPlan(
        _ranges(sent),
        tuple(np.bincount(target_ranks, minlength=dispatch.cp_size).tolist()),
        tuple(np.bincount(source_ranks, minlength=dispatch.cp_size).tolist()),
        num_rows=len(rows),
        rank=rank,
    )
    return RollPlan(comm, takes[np.argsort(source_ranks, kind="stable")])


def _sources(rows: IntArray, cu_seqlens: IntArray, shift: int, wrap: bool) -> IntArray:
    """Return the row that each of `rows` takes, -1 where there is none."""
    total = int(cu_seqlens[-1])
    document = np.searchsorted(cu_seqlens, np.minimum(rows, total - 1), side="right") - 1
    inside = rows < total
    if not inside.any():
        return rows if wrap else np.full_like(rows, -1)
    begin = cu_seqlens[document]
    length = cu_seqlens[document + 1] - begin
    if wrap:
        return np.where(inside, begin + (rows - begin - shift % length) % length, rows)
    index = rows - begin - min(max(shift, -total), total)
    return np.where(inside & (index >= 0) & (index < length), begin + index, -1)


def _ranges(rows: IntArray) -> IntArray:
    """Return rows as ranges, int64 [n, 2], in the same order."""
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    last = np.flatnonzero(np.diff(rows, append=-2) != 1)
    return np.stack([rows[first], rows[last] + 1], 1)
