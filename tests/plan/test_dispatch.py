"""Chunks to ranks: the dispatchers, the automatic chunk size, and the cases about balance and sharding."""

from __future__ import annotations

import numpy as np
import pytest

from torch_magi import PlanConfig, _planner, make_attn_plan, masks
from torch_magi.masks import AttnMask
from torch_magi.plan.dispatch import automatic_chunk_size
from torch_magi.testing import YARDSTICK_MASKS


def ranks_of(kind: str, areas: list[int], world: int, uneven: bool = False) -> list[int]:
    return _planner.dispatch(kind, np.array(areas, np.int64), world, uneven).tolist()


def test_who_gets_which_chunk() -> None:
    assert ranks_of("sequential", [1] * 8, 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ranks_of("head_tail", [1] * 8, 2) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert ranks_of("head_tail", [1] * 6, 3) == [0, 1, 2, 2, 1, 0]
    # 8 7 | 6 5 | 4 3 | 2 1, each to the rank with less
    assert ranks_of("min_heap", [1, 2, 3, 4, 5, 6, 7, 8], 2) == [0, 1, 1, 0, 0, 1, 1, 0]
    # Rank 0 has its two chunks, however little they weigh, unless shards may be uneven.
    assert ranks_of("min_heap", [9, 0, 0, 0], 2) == [0, 1, 1, 0]
    assert ranks_of("min_heap", [9, 1, 1, 1], 2, uneven=True) == [0, 1, 1, 1]
    # Two ranks with two chunks of three rows, and one with one chunk and the short one: not 6, 6, 1 rows.
    areas = np.array([9, 8, 7, 0, 0, 0], np.int64)
    assert _planner.dispatch("min_heap", areas, 3, last_is_short=True).tolist() == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("kind", ["sequential", "head_tail", "min_heap"])
def test_every_rank_gets_as_many_chunks(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for world in range(1, 9):
        for chunks in range(25):
            areas = rng.integers(0, 50, chunks).tolist()
            ranks = ranks_of(kind, areas, world)
            counts = np.bincount(np.array(ranks, int), minlength=world)
            assert len(ranks) == chunks and counts.max() - counts.min() <= 1
            assert ranks == ranks_of(kind, areas, world)


def test_wrong_arguments_of_the_planner() -> None:
    with pytest.raises(ValueError, match="dispatcher must be 'sequential', 'head_tail' or 'min_heap', got 'best'"):
        ranks_of("best", [1], 1)
    with pytest.raises(ValueError, match="n_ranks must be positive, got 0"):
        ranks_of("min_heap", [1], 0)


def test_automatic_chunk_size() -> None:
    assert automatic_chunk_size(1 << 20, 8, "min_heap") == 2048
    assert automatic_chunk_size(1 << 17, 64, "min_heap") == 128
    assert automatic_chunk_size(100, 4, "min_heap") == 2
    assert automatic_chunk_size(0, 4, "min_heap") == 1
    assert automatic_chunk_size(1000, 3, "sequential") == 334
    assert automatic_chunk_size(1000, 3, "head_tail") == 167


@pytest.mark.parametrize(
    ("dispatcher", "areas"), [("sequential", (20, 68)), ("head_tail", (52, 36)), ("min_heap", (44, 44))]
)
def test_c43_two_documents(dispatcher: str, areas: tuple[int, int]) -> None:
    plan = make_attn_plan(
        masks.document([0, 4, 16]), 2, 2, 8, cp_size=2, config=PlanConfig(chunk_size=1, dispatcher=dispatcher)
    )
    assert plan.area_per_rank == areas
    assert plan.imbalance == pytest.approx(max(areas) / 44)


def test_c04_only_one_rank_has_work() -> None:
    only = AttnMask.from_slices([[0, 4]], [[0, 4]], ["causal"], 32, 32)
    for mask in (only, only - only):
        for rank in range(4):
            config = PlanConfig(chunk_size=8, dispatcher="sequential", overlap_degree=2)
            plan = make_attn_plan(mask, 2, 2, 8, cp_size=4, cp_rank=rank, config=config)
            assert plan.area_per_rank == (mask.area, 0, 0, 0) and plan.num_tokens_local == 8
            assert [s.mask.area for s in plan.stages] == [mask.area if rank == 0 else 0, 0, 0]
            # Every rank takes part in every exchange, with nothing to send.
            for stage in plan.stages[1:]:
                assert stage.comm.input_split_sizes == stage.comm.output_split_sizes == (0, 0, 0, 0)
    assert plan.imbalance == 1.0 and plan.comm_bytes == 0


def test_c09_odd_document_lengths_lose_no_token() -> None:
    mask = masks.document([0, 4, 7], total=10)
    plans = [make_attn_plan(mask, 2, 2, 8, cp_size=2, cp_rank=r) for r in range(2)]
    assert sum(plans[0].area_per_rank) == mask.area == 10 + 6
    assert sorted(t for p in plans for t in p.position_ids.tolist()) == list(range(10))
    computed = [p.position_ids[p.stages[i].mask.to_dense().any(1)].tolist() for p in plans for i in range(2)]
    assert {row for rows in computed for row in rows} == set(range(7))


def test_c16_full_mask_head_tail() -> None:
    plan = make_attn_plan(masks.full(128, 128), 2, 2, 8, cp_size=2, config=PlanConfig(dispatcher="head_tail"))
    assert plan.area_per_rank == (64 * 128, 64 * 128) and plan.comm_rows_per_rank == (64, 64)
    assert plan.position_ids.tolist() == [*range(32), *range(96, 128)]


def test_sequences_shorter_than_the_ranks() -> None:
    for dispatcher in ("sequential", "head_tail", "min_heap"):
        config = PlanConfig(dispatcher=dispatcher)
        plans = [make_attn_plan(masks.causal(3), 2, 2, 8, cp_size=8, cp_rank=r, config=config) for r in range(8)]
        assert sorted(p.num_tokens_local for p in plans) == [0] * 5 + [1] * 3


@pytest.mark.parametrize(("total", "world", "limit"), [(1 << 20, 8, 1.02), (1 << 20, 64, 1.02), (1 << 17, 64, 1.05)])
def test_automatic_chunks_balance_documents(total: int, world: int, limit: float) -> None:
    plan = make_attn_plan(YARDSTICK_MASKS["varlen_causal"](total), 64, 8, 128, cp_size=world)
    assert plan.imbalance <= limit


def test_rows_that_travel() -> None:
    total = 1 << 20
    for mask, world, dispatcher, share in (
        (masks.causal(total), 8, "head_tail", 0.75),
        (YARDSTICK_MASKS["varlen_causal"](total), 8, "min_heap", 0.35),
        (YARDSTICK_MASKS["varlen_causal"](total), 64, "min_heap", 0.10),
    ):
        plan = make_attn_plan(mask, 64, 8, 128, cp_size=world, config=PlanConfig(dispatcher=dispatcher))
        assert plan.comm_rows <= share * total * (world - 1)
        assert plan.comm_bytes == plan.comm_rows * 8 * (128 + 128) * 2
