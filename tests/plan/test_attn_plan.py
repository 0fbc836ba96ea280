"""AttnPlan as a value: printed, pickled, unchangeable, remade with another mask; and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import expecttest
import numpy as np
import pytest
import torch

from torch_magi import AttnPlan, PlanConfig, make_attn_plan, masks
from torch_magi.testing import named_masks

MASKS = named_masks()


def plan_of(name: str, world: int = 2, rank: int = 0, **config: Any) -> AttnPlan:
    options = PlanConfig(**{"chunk_size": 2, **config})
    return make_attn_plan(
        MASKS[name], 4, 2, 8, head_dim_v=6, dtype=torch.float32, cp_size=world, cp_rank=rank, config=options
    )


class TestPicture(expecttest.TestCase):
    """A change of planning shows here. EXPECTTEST_ACCEPT=1 accepts it."""

    maxDiff = None

    def test_one_rank(self) -> None:
        self.assertExpectedInline(
            str(plan_of("causal_more_keys", world=1)),
            """\
AttnPlan of rank 0 of 1: mask 5 x 12, area 50, heads 4:2, head_dim 8:6, float32
  dispatch: min_heap, chunk_size 5, tokens per rank [5]
  area per rank [50], imbalance 1.000
  rows received per rank [0], 0 bytes in all
  stage 0: 5 x 12, area 50, local keys""",
        )

    def test_causal_head_tail(self) -> None:
        self.assertExpectedInline(
            str(plan_of("causal", dispatcher="head_tail")),
            """\
AttnPlan of rank 0 of 2: mask 16 x 16, area 136, heads 4:2, head_dim 8:6, float32
  dispatch: head_tail, chunk_size 2, tokens per rank [8, 8]
  area per rank [68, 68], imbalance 1.000
  rows received per rank [8, 4], 1344 bytes in all
  stage 0: 8 x 8, area 36, local keys
  stage 1: 8 x 8, area 32, keys from others: 8""",
        )

    def test_documents(self) -> None:
        self.assertExpectedInline(
            str(plan_of("document", overlap_degree=2)),
            """\
AttnPlan of rank 0 of 2: mask 16 x 16, area 61, heads 4:2, head_dim 8:6, float32
  dispatch: min_heap, chunk_size 2, tokens per rank [8, 8]
  area per rank [31, 30], imbalance 1.016
  rows received per rank [8, 1], 1008 bytes in all
  stage 0: 8 x 8, area 15, local keys
  stage 1: 8 x 4, area 8, keys from others: 4
  stage 2: 8 x 4, area 8, keys from others: 4""",
        )

    def test_shared_prefix_in_one_exchange(self) -> None:
        self.assertExpectedInline(
            str(plan_of("shared_prefix", rank=1, overlap_degree=0)),
            """\
AttnPlan of rank 1 of 2: mask 16 x 16, area 89, heads 4:2, head_dim 8:6, float32
  dispatch: min_heap, chunk_size 2, tokens per rank [8, 8]
  area per rank [43, 46], imbalance 1.034
  rows received per rank [6, 5], 1232 bytes in all
  stage 0: 8 x 13, area 46, keys from others: 5""",
        )

    def test_many_ranks(self) -> None:
        self.assertExpectedInline(
            str(plan_of("block_causal", world=12, rank=3, chunk_size=1)),
            """\
AttnPlan of rank 3 of 12: mask 16 x 16, area 88, heads 4:2, head_dim 8:6, float32
  dispatch: min_heap, chunk_size 1, tokens per rank [1, 1, 1, 1, ... 2] (min 1, max 2)
  area per rank [9, 9, 9, 7, ... 6] (min 6, max 9), imbalance 1.227
  rows received per rank [8, 8, 8, 6, ... 4] (min 1, max 8), 7728 bytes in all
  stage 0: 1 x 1, area 1, local keys
  stage 1: 1 x 6, area 6, keys from others: 6""",
        )

    def test_exchanges(self) -> None:
        shown = [str(stage.comm) for r in range(3) for stage in plan_of("causal", world=3, rank=r).stages[1:]]
        self.assertExpectedInline(
            "\n".join(shown),
            """\
CommPlan(rank 0, 6 rows: sends [0, 4, 4], receives [0, 6, 4])
CommPlan(rank 1, 6 rows: sends [6, 0, 4], receives [4, 0, 4])
CommPlan(rank 2, 4 rows: sends [4, 4, 0], receives [4, 4, 0])""",
        )


@pytest.mark.parametrize("name", ["causal", "shared_prefix", "nothing"])
def test_planning_is_a_pure_function(name: str) -> None:
    plans = [plan_of(name, 4, r) for r in range(4)]
    assert [str(p) for p in plans] == [str(plan_of(name, 4, r)) for r in range(4)]
    for plan in plans:
        assert plan.area_per_rank == plans[0].area_per_rank
        assert plan.comm_rows_per_rank == plans[0].comm_rows_per_rank
        assert plan.dispatch.rank_of_chunk.tolist() == plans[0].dispatch.rank_of_chunk.tolist()


def arrays_of(plan: AttnPlan) -> list[np.ndarray]:
    found = [plan.dispatch.rank_of_chunk, plan.dispatch.segments, plan.mask.bands]
    for stage in plan.stages:
        found.append(stage.mask.bands)
        if stage.comm is not None:
            found.append(stage.comm.send_ranges)
    return found


def test_pickling() -> None:
    plan = plan_of("document", rank=1, overlap_degree=2)
    cpu = torch.device("cpu")
    tiles = plan.stages[1].tiles("q", 4, 4, cpu)
    other = pickle.loads(pickle.dumps(plan))
    assert str(other) == str(plan) and other.mask == plan.mask and other.config == plan.config
    assert all(a.tolist() == b.tolist() for a, b in zip(arrays_of(plan), arrays_of(other), strict=True))
    assert other.position_ids.equal(plan.position_ids)
    assert all(a.equal(b) for a, b in zip(tiles, other.stages[1].tiles("q", 4, 4, cpu), strict=True))


def test_plans_do_not_change() -> None:
    plan = plan_of("document", rank=1, overlap_degree=2)
    comm = plan.stages[1].comm
    for thing, field in (
        (plan, "mask"),
        (plan, "stages"),
        (plan.stages[1], "mask"),
        (plan.dispatch, "chunk_size"),
        (plan.config, "chunk_size"),
        (comm, "num_rows"),
        (comm, "send_ranges"),
    ):
        with pytest.raises(AttributeError):
            setattr(thing, field, getattr(thing, field))
    assert isinstance(plan.stages, tuple) and isinstance(plan.area_per_rank, tuple)
    assert isinstance(comm.input_split_sizes, tuple) and isinstance(comm.output_split_sizes, tuple)


@pytest.mark.parametrize("pickled", [False, True])
def test_arrays_of_plans_are_read_only(pickled: bool) -> None:
    plan = plan_of("document", rank=1, overlap_degree=2)
    plan = pickle.loads(pickle.dumps(plan)) if pickled else plan
    for array in arrays_of(plan):
        assert not array.flags.writeable


def test_c26_later_changes_of_the_arguments_do_not_show() -> None:
    cu = np.array([0, 4, 8])
    mask = masks.document(cu)
    plan = make_attn_plan(mask, 2, 2, 8, cp_size=2)
    before = str(plan)
    cu[1] = 6
    assert str(plan) == before and plan.mask == masks.document([0, 4, 8])
    assert masks.document(cu) == masks.document([0, 6, 8])
    plan.position_ids.add_(100)  # what a caller does with the tensor must not reach the plan
    assert plan.position_ids.max() < 8


def test_tile_plans_are_built_once() -> None:
    cpu = torch.device("cpu")
    stage = plan_of("causal").stages[0]
    assert stage.tiles("q", 4, 4, cpu)[0] is stage.tiles("q", 4, 4, cpu)[0]
    assert stage.tiles("q", 4, 4, cpu)[0] is not stage.tiles("k", 4, 4, cpu)[0]
    assert stage.tiles("q", 4, 4, cpu)[0] is not stage.tiles("q", 8, 4, cpu)[0]


@pytest.mark.parametrize("degree", range(3))
def test_with_mask(degree: int) -> None:
    for rank in range(3):
        plan = plan_of("causal", 3, rank, overlap_degree=degree)
        window = masks.sliding_window(16, 16, (3, 0))
        other = plan.with_mask(window)
        assert other.dispatch is plan.dispatch and other.position_ids.equal(plan.position_ids)
        assert other.mask == window and plan.mask == MASKS["causal"]
        assert sum(other.area_per_rank) == window.area and other.comm_rows < plan.comm_rows
        assert other.num_stages == plan.num_stages and other.config is plan.config
        assert (other.num_heads_q, other.head_dim_v, other.dtype) == (4, 6, torch.float32)
        assert str(other.with_mask(plan.mask)) == str(plan)
    with pytest.raises(ValueError, match=r"shape of the plan's mask, \(16, 16\), got \(8, 8\)"):
        plan.with_mask(masks.causal(8))
    with pytest.raises(TypeError, match=r"mask must be a torch_magi\.masks\.AttnMask, got list"):
        plan.with_mask([])


def test_with_mask_of_one_element_of_a_batch() -> None:
    plan = make_attn_plan(masks.causal(8), 2, 2, 8, batch_size=3, cp_size=2)
    window = masks.sliding_window(8, 8, (2, 0))
    other = plan.with_mask(window)
    assert other.mask.shape == (24, 24) and other.mask.area == 3 * window.area
    assert other.with_mask(other.mask).mask == other.mask


def test_derived_figures() -> None:
    plan = plan_of("causal", dispatcher="sequential")
    assert plan.area_per_rank == (36, 100) and plan.imbalance == pytest.approx(100 / 68)
    assert plan.comm_rows_per_rank == (0, 8) and plan.comm_rows == 8
    assert plan.comm_bytes == 8 * 2 * (8 + 6) * 4  # rows, kv heads, both head dims, float32
    assert plan.position_ids.dtype == torch.int64 and plan.starts_local
    assert not plan_of("causal", overlap_degree=0).starts_local
    assert plan_of("nothing").imbalance == 1.0


MASK = MASKS["causal"]
REFUSALS: list[tuple[str, type[Exception], str, Any]] = [
    (
        "mask",
        TypeError,
        "mask must be a torch_magi.masks.AttnMask, got Tensor",
        lambda: make_attn_plan(MASK.to_dense(), 1, 1, 8),
    ),
    (
        "heads",
        ValueError,
        "num_heads_q must be a multiple of num_heads_kv, got 4 and 3",
        lambda: make_attn_plan(MASK, 4, 3, 8),
    ),
    ("no heads", ValueError, "num_heads_kv must be positive, got 0", lambda: make_attn_plan(MASK, 4, 0, 8)),
    ("heads type", TypeError, "num_heads_q must be an int, got 4.0", lambda: make_attn_plan(MASK, 4.0, 1, 8)),
    (
        "heads bool",
        TypeError,
        "num_heads_q must be an int, got True",
        lambda: make_attn_plan(MASK, True, 1, 8),
    ),
    ("head_dim", ValueError, "head_dim must be positive, got -8", lambda: make_attn_plan(MASK, 4, 2, -8)),
    (
        "head_dim_v",
        ValueError,
        "head_dim_v must be positive, got 0",
        lambda: make_attn_plan(MASK, 4, 2, 8, head_dim_v=0),
    ),
    (
        "dtype",
        TypeError,
        "dtype must be one of torch.bfloat16, .* got torch.int64",
        lambda: make_attn_plan(MASK, 4, 2, 8, dtype=torch.int64),
    ),
    (
        "batch_size",
        ValueError,
        "batch_size must be positive, got 0",
        lambda: make_attn_plan(MASK, 4, 2, 8, batch_size=0),
    ),
    (
        "cp_size",
        ValueError,
        "cp_size must be positive, got 0",
        lambda: make_attn_plan(MASK, 4, 2, 8, cp_size=0),
    ),
    (
        "cp_rank",
        ValueError,
        r"cp_rank must be in \[0, 2\), got 2",
        lambda: make_attn_plan(MASK, 4, 2, 8, cp_size=2, cp_rank=2),
    ),
    (
        "square",
        ValueError,
        r"needs a square mask .* got shape \(5, 9\); use cp_size=1",
        lambda: make_attn_plan(MASKS["full_cross"], 4, 2, 8, cp_size=2),
    ),
    (
        "keyword",
        TypeError,
        "unexpected keyword argument 'world_size'",
        lambda: make_attn_plan(MASK, 4, 2, 8, world_size=2),
    ),
    (
        "dispatcher",
        ValueError,
        r"dispatcher must be one of \['sequential', 'head_tail', 'min_heap'\], got 'zigzag'",
        lambda: PlanConfig(dispatcher="zigzag"),
    ),
    (
        "chunk_size",
        ValueError,
        "chunk_size must be positive, got 0",
        lambda: PlanConfig(chunk_size=0),
    ),
    ("chunk_size type", TypeError, "chunk_size must be an int, got 1.5", lambda: PlanConfig(chunk_size=1.5)),
    ("node type", TypeError, "ranks_per_node must be an int, got '2'", lambda: PlanConfig(ranks_per_node="2")),
    ("cost type", TypeError, "cost must be a CostModel, got dict", lambda: PlanConfig(cost={})),
    (
        "config type",
        TypeError,
        "config must be a PlanConfig or None, got dict",
        lambda: make_attn_plan(MASK, 4, 2, 8, config={"chunk_size": 4}),
    ),
    (
        "overlap_degree",
        ValueError,
        "overlap_degree must be 0 or more, or 'auto', got -1",
        lambda: PlanConfig(overlap_degree=-1),
    ),
    (
        "uneven",
        ValueError,
        "uneven=True needs dispatcher='min_heap', got 'sequential'",
        lambda: PlanConfig(dispatcher="sequential", uneven=True),
    ),
    ("config keyword", TypeError, "unexpected keyword argument 'chunks'", lambda: PlanConfig(chunks=3)),
]


@pytest.mark.parametrize(("error", "text", "call"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=text):
        call()


def test_configurations_are_values() -> None:
    assert PlanConfig() == PlanConfig(dispatcher="min_heap") and hash(PlanConfig()) == hash(PlanConfig())
    assert PlanConfig(chunk_size=4) != PlanConfig()
