"""How GPU kernels share work, which needs no GPU to decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_magi import make_attn_plan, masks
from torch_magi.kernels import tiles
from torch_magi.kernels.work_lists import choose_split, makespan, work_list
from torch_magi.testing import YARDSTICK_MASKS


@pytest.mark.parametrize(
    ("costs", "workers", "expected"),
    [([5, 4, 3, 3, 3], 2, 10.0), ([5, 1], 4, 5.0), ([], 3, 0.0), ([2, 2, 2, 2], 2, 4.0)],
)
def test_makespan(costs: list[int], workers: int, expected: float) -> None:
    assert makespan(np.array(costs, float), workers) == expected


def test_few_long_items_are_split() -> None:
    most = choose_split(np.array([256]), 8, 132)
    assert most is not None and 128 <= 8 * -(-256 // most) <= 264, "one part for each multiprocessor, or two"
    assert choose_split(np.array([2]), 8, 132) is None, "not worth the joining"
    assert choose_split(np.array([0, 0]), 8, 132) is None
    assert choose_split(np.zeros(0, int), 8, 132) is None
    assert choose_split(np.array([1000] + [1] * 500), 1, 132) is not None, "one long item among short ones"


@pytest.mark.parametrize("name", sorted(YARDSTICK_MASKS))
def test_lists_of_many_items_are_not_split(name: str) -> None:
    part = make_attn_plan(YARDSTICK_MASKS[name](8192), 64, 8, 128).stages[0]
    assert choose_split(part.tile_arrays("q", 16, 128)[0][:, 4], 8, 132) is None
    assert choose_split(part.tile_arrays("k", 128, 64, 4)[0][:, 4] * 8, 8, 132) is None


def test_parts_of_long_items_have_slots() -> None:
    part = make_attn_plan(masks.causal(8, 4096), 8, 1, 64).stages[0]
    device = torch.device("cpu")
    work = work_list(part, "q", 16, 64, device, groups=1)
    assert work.num_slots == len(work.items) > 1
    assert sorted(work.items[:, 6].tolist()) == list(range(work.num_slots))
    assert work.items[:, 4].sum() == 64, "no tile is lost"
    assert work.splits.tolist() == [[0, 8, 0, work.num_slots]]
    assert work_list(part, "q", 16, 64, device).num_slots == 0
    assert work_list(part, "q", 16, 64, device, groups=1) is work


@pytest.mark.parametrize(
    ("heads", "queries", "expected"),
    [((8, 8), 128, 1), ((8, 1), 128, 8), ((32, 2), 128, 8), ((12, 2), 64, 2), ((8, 1), 4, 4)],
)
def test_heads_in_a_tile(heads: tuple[int, int], queries: int, expected: int) -> None:
    assert tiles.heads_in_tile(*heads, queries) == expected


def test_tiles_fit_shared_memory() -> None:
    """The side that stays and one stage of the other, wherever they can."""
    for choice in (tiles.FORWARD, tiles.BACKWARD_QUERIES, tiles.BACKWARD_KEYS):
        for dims in ((64, 64), (128, 128), (192, 128)):
            most = tiles.choose_tile(choice, dims, torch.bfloat16, 227 << 10)
            least = tiles.choose_tile(choice, dims, torch.bfloat16, 0)
            assert least.stages == 1 and least[:3] == most[:3]
            widths = [2 * tiles.block_size(dim) for dim in dims]
            kept = getattr(most, choice.kept) * sum(widths[: choice.kept_tensors])
            assert kept + most.stages * getattr(most, choice.streamed) * sum(widths) <= 227 << 10
    assert [tiles.block_size(dim) for dim in (1, 16, 17, 64, 192)] == [16, 16, 32, 64, 256]
