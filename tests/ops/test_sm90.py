"""What the kernels for compute capability 9.0 are asked to do, which needs no GPU to decide."""

from __future__ import annotations

import numpy as np
import pytest

from torch_magi import make_attn_plan, masks
from torch_magi.kernels.work_lists import choose_split, makespan
from torch_magi.ops import sm90
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


def test_instances_are_the_smallest_that_fit() -> None:
    found = sm90.find_instance(96, 64)
    assert found is not None and (found.head_dim, found.head_dim_v) == (128, 128)
    assert sm90.find_instance(192, 192) == sm90.find_instance(256, 256)
    assert sm90.find_instance(264, 64) is None


def test_wide_tiles_for_long_rows_of_keys() -> None:
    long = make_attn_plan(masks.full(8192, 8192), 64, 8, 128)
    assert sm90.choose_tile(long, long.stages[0], False) == (16, 160)
    short = make_attn_plan(masks.document(list(range(0, 4097, 128))), 64, 8, 128)
    assert sm90.choose_tile(short, short.stages[0], False) == (16, 128)
