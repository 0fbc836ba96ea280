"""The model of a step's time, on figures that can be worked out by hand, and the number of stages chosen from it."""

from __future__ import annotations

import pytest
import torch

from torch_magi import PlanConfig, make_attn_plan, masks
from torch_magi.plan.cost import LARGEST_AUTOMATIC_DEGREE, CostModel, RankWork, choose_overlap_degree, seconds_of
from torch_magi.plan.planner import _works
from torch_magi.testing import YARDSTICK_MASKS

UNIT = CostModel(flops=1.0, bandwidth=1.0, exchange_latency=0.0, call=0.0)


@pytest.mark.parametrize(
    ("overlap_degree", "forward", "backward"),
    [
        # Keys of 4 bytes arrive, then 1 + 4 are computed; 2.5 * 5, then 8 bytes go back.
        (0, 4 + 5, 4 + 12.5 + 8),
        # The local second hides a quarter of the exchange; backward the local 2.5, of 4.
        (1, 4 + 4, 4 + 10 + 8),
        # Halves arrive at 2 and 4, each is computed for 2: done at 4 and 6. Backward they are done at 7.5 and 12.5, and
        # the first half's gradients are back by 11.5.
        (2, 6, 12.5 + 4),
    ],
)
def test_by_hand(overlap_degree: int, forward: float, backward: float) -> None:
    work = RankWork(local_flops=1.0, remote_flops=4.0, bytes=4.0)
    assert seconds_of(work, overlap_degree, UNIT) == forward + backward


def test_two_steps_take_both_links() -> None:
    cost = CostModel(flops=1.0, bandwidth=2.0, exchange_latency=0.5, call=0.0, bandwidth_between_nodes=0.5)
    # Keys: twice the latency, 4 / 2 within the node, 1 / 0.5 between nodes. Gradients of keys are twice as large.
    assert seconds_of(RankWork(0.0, 0.0, 4.0, 1.0), 0, cost) == (1 + 2 + 2) + (1 + 2 + 2) + (1 + 4 + 4)
    assert seconds_of(RankWork(0.0, 0.0, 4.0), 0, cost) == (0.5 + 2) + (0.5 + 2) + (0.5 + 4)


def test_latency_and_calls_are_paid_per_stage() -> None:
    nothing = RankWork(0.0, 0.0, 0.0)
    cost = CostModel(flops=1.0, bandwidth=1.0, exchange_latency=1.0, call=0.25)
    # Forward: 1 + a call. Backward: the same, and 1 for the way back.
    assert seconds_of(nothing, 0, cost) == 1.25 + 2.25
    # Keys at 1 and 2; calls end at 1.25 and 2.25. Backward the link is free at 2: back at 3 and 4.
    assert seconds_of(nothing, 2, cost) == 2.25 + 4.0


def test_choice() -> None:
    work = RankWork(1.0, 4.0, 4.0)
    assert choose_overlap_degree([work], UNIT) == LARGEST_AUTOMATIC_DEGREE  # stages cost nothing
    assert choose_overlap_degree([work], CostModel(1.0, 1e9, 0.0, 1.0)) == 0  # exchanges cost nothing, calls do
    assert choose_overlap_degree([work], CostModel(1.0, 1.0, 100.0, 0.0)) in (0, 1)  # starting one costs all
    assert choose_overlap_degree([RankWork(0.0, 0.0, 0.0)], UNIT) == 0
    # The slowest rank decides: the other one alone would choose 0.
    assert choose_overlap_degree([RankWork(0.1, 0.0, 0.0), work], UNIT) == LARGEST_AUTOMATIC_DEGREE


@pytest.mark.parametrize("name", sorted(YARDSTICK_MASKS))
def test_ranks_choose_alike(name: str) -> None:
    mask = YARDSTICK_MASKS[name](4096)
    found = set()
    for bandwidth in (1e9, 300e9):
        config = PlanConfig(overlap_degree="auto", cost=CostModel(bandwidth=bandwidth))
        plans = [make_attn_plan(mask, 8, 2, 64, cp_size=4, cp_rank=r, config=config) for r in range(4)]
        assert len({plan.num_stages for plan in plans}) == 1
        degree = plans[0].num_stages - 1 if plans[0].starts_local else 0
        fixed = make_attn_plan(mask, 8, 2, 64, cp_size=4, config=PlanConfig(overlap_degree=degree))
        assert [stage.mask for stage in fixed.stages] == [stage.mask for stage in plans[0].stages]
        found.add(degree)
        other = plans[0].with_mask(masks.full(4096, 4096))
        assert other.config is config
    assert found <= set(range(LARGEST_AUTOMATIC_DEGREE + 1))


def test_slow_links_want_more_stages_than_fast_ones() -> None:
    mask = masks.causal(1 << 17)

    def stages(bandwidth: float) -> int:
        config = PlanConfig(overlap_degree="auto", cost=CostModel(bandwidth=bandwidth))
        return make_attn_plan(mask, 64, 8, 128, dtype=torch.bfloat16, cp_size=8, config=config).num_stages

    assert stages(20e9) > stages(2000e9)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("flops", 0.0, "flops must be positive, got 0.0"),
        ("bandwidth", -1.0, "bandwidth must be positive, got -1.0"),
        ("bandwidth_between_nodes", 0.0, "bandwidth_between_nodes must be positive, got 0.0"),
        ("exchange_latency", -1.0, "exchange_latency must be 0 or more, got -1.0"),
        ("call", float("nan"), "call must be 0 or more, got nan"),
    ],
)
def test_impossible_figures_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(**{name: value})


def test_other_degrees_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap_degree must be 0 or more, or 'auto', got 'many'"):
        PlanConfig(overlap_degree="many")


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(YARDSTICK_MASKS))
def test_bytes_of_both_steps(name: str, ranks_per_node: int) -> None:
    """Those of the exchanges that are planned, in one stage."""
    mask = YARDSTICK_MASKS[name](4096)
    config = PlanConfig(overlap_degree=1, ranks_per_node=ranks_per_node)
    plans = [make_attn_plan(mask, 1, 1, 1, cp_size=8, cp_rank=r, config=config) for r in range(8)]
    for plan, work in zip(plans, _works(mask, plans[0].dispatch, 1, 1, ranks_per_node), strict=True):
        comm = plan.stages[-1].comm
        assert comm is not None and comm.intra is not None
        node, place = divmod(plan.cp_rank, ranks_per_node)
        from_nodes, from_places = list(comm.output_split_sizes), list(comm.intra.output_split_sizes)
        del from_nodes[node], from_places[place]
        assert (work.bytes_between_nodes, work.bytes) == (sum(from_nodes), sum(from_places))
        assert (work.local_flops, work.remote_flops) == (plan.stages[0].mask.area, plan.stages[1].mask.area)


def test_slow_links_between_nodes_want_more_stages() -> None:
    mask = masks.causal(1 << 17)

    def stages(bandwidth: float) -> int:
        cost = CostModel(bandwidth=2000e9, bandwidth_between_nodes=bandwidth)
        config = PlanConfig(overlap_degree="auto", cost=cost, ranks_per_node=4)
        return make_attn_plan(mask, 64, 8, 128, dtype=torch.bfloat16, cp_size=8, config=config).num_stages

    assert stages(10e9) > stages(1000e9)
