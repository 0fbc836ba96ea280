"""What the kernels for compute capability 9.0 are asked to do, which needs no GPU to decide."""

from __future__ import annotations

from torch_magi import make_attn_plan, masks
from torch_magi.ops import sm90


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
