"""What each program of a GPU kernel does: the items of a tile plan, shared out where some are too long."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import torch

from torch_magi import _planner
from torch_magi.plan.types import StagePlan

Tensor = torch.Tensor

# What splitting rows costs, in tiles: an item, a part of one on top, and the kernel that joins the parts.
ITEM, PART, JOIN = 1.0, 2.0, 4.0
INTERPRETED_PROGRAMS = 8  # that Triton's interpreter is taken to run at once


class WorkList(NamedTuple):
    """A tile plan in the form the Triton kernels take; int32 tensors on its device.

    items, runs, bands: csrc/include/tile_plan.h, after `layer_runs`: an item's runs without a mask come first, as many
        as its flags say, and a row is in at most one band of a run.
    splits: [n, 4]; rows whose columns several items share.
    num_slots: parts of these.
    """

    items: Tensor
    runs: Tensor
    bands: Tensor
    splits: Tensor
    num_slots: int


def work_list(
    part: StagePlan,
    side: str,
    tile_rows: int,
    tile_cols: int,
    device: torch.device,
    groups: int | None = None,
    repeats: int = 1,
) -> WorkList:
    """Return the work list of a stage, made on first use and kept.

    Args:
        side, tile_rows, tile_cols: as in `StagePlan.tile_arrays`.
        groups: how often the list is gone through, for different heads; None leaves long items whole.
        repeats: how often an item goes through its tiles, for different heads.
    """

    def make() -> WorkList:
        items, runs, bands = part.tile_arrays(side, tile_rows, tile_cols)
        splits = np.zeros((0, 4), np.int32)
        if groups is not None:
            most = choose_split(items[:, 4] * repeats, groups, count_multiprocessors(device))
            if most is not None:
                items, runs, splits = _planner.split_items(items, runs, tile_cols, max(most // repeats, 1))
        items, runs, bands = _planner.layer_runs(items, runs, bands)
        tensors = [torch.from_numpy(a).to(device) for a in (items, runs, bands, splits)]
        return WorkList(tensors[0], tensors[1], tensors[2], tensors[3], int(splits[:, 3].sum()))

    made: WorkList = part.cached(("work list", side, tile_rows, tile_cols, device, groups, repeats), make)
    return made


def count_multiprocessors(device: torch.device) -> int:
    """Return how many programs a device runs at once, at one for each multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def choose_split(n_tiles: np.ndarray, groups: int, multiprocessors: int) -> int | None:
    """Return the most tiles an item should have, or None where splitting does not pay.

    Few items with many tiles leave most multiprocessors idle: their tiles are shared out. A list whose longest item
    is short against a multiprocessor's share of the whole is balanced well enough by its order alone.

    Args:
        n_tiles: int [n_items]; the tiles of each item.
        groups: how often the list is gone through, for different heads.
        multiprocessors: of the device.
    """
    if not len(n_tiles):
        return None
    longest, total = int(n_tiles.max()), groups * int(n_tiles.sum())
    if 2 * longest * multiprocessors <= total:
        return None

    def time(most: int) -> float:
        parts = np.maximum(-(-n_tiles // most), 1)
        cost = np.repeat(n_tiles / parts + ITEM + np.where(parts > 1, PART, 0.0), parts * groups)
        return makespan(np.sort(cost)[::-1], multiprocessors) + (JOIN if parts.max() > 1 else 0.0)

    candidates = sorted(
        {-(-longest // parts) for parts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if longest}
    )
    best = min(candidates, key=time, default=0)
    return best if best and time(best) < 0.95 * time(longest) else None


def makespan(costs: np.ndarray, workers: int) -> float:
    """Return when the last of `workers` is done if each takes the next cost, in order, as it becomes free."""
    busy = costs[:workers].tolist()
    heapq.heapify(busy)
    for cost in costs[workers:].tolist():
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy, default=0.0)
