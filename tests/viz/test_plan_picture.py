"""Pictures of plans: who computes what, in characters and with matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_magi import PlanConfig, make_attn_plan, masks
from torch_magi.plan import AttnPlan
from torch_magi.viz.plan_picture import plan_to_string, plot_plan, rank_symbol, sample_rows


def plans_of(mask: masks.AttnMask, cp_size: int, **config: object) -> list[AttnPlan]:
    return [
        make_attn_plan(mask, 2, 1, 8, cp_size=cp_size, cp_rank=rank, config=PlanConfig(**config))
        for rank in range(cp_size)
    ]


def test_characters_show_the_owner() -> None:
    plan = plans_of(masks.document([0, 3, 8], total=9), 2, dispatcher="head_tail", chunk_size=2)[0]
    assert plan.dispatch.rank_of_chunk.tolist() == [0, 1, 1, 0, 0]
    assert plan_to_string(plan).splitlines() == [
        "0........",
        "00.......",
        "111......",
        "...1.....",
        "...11....",
        "...111...",
        "...0000..",
        "...00000.",
        ".........",
    ]


def test_reduced_picture_keeps_rows_and_owners() -> None:
    plan = plans_of(masks.causal(1000), 4)[0]
    visible, owner = sample_rows(plan, 10, 20)
    assert visible.shape == (10, 20)
    for line, row in enumerate(range(50, 1000, 100)):
        assert visible[line].sum() * 50 == pytest.approx(row + 1)
        assert owner[line] == plan.dispatch.rank_of_chunk[row // plan.dispatch.chunk_size]


@pytest.mark.parametrize("mask", [masks.full(0, 0), masks.full(1, 1), masks.document([0], total=5)])
def test_pictures_of_almost_nothing(mask: masks.AttnMask, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plans = plans_of(mask, 3)
    assert plan_to_string(plans[0]).replace("\n", "").strip(".0123") == ""
    plot_plan(plans[1], str(tmp_path / "plan.png"), all_ranks=plans)


def test_many_ranks_have_a_symbol_each() -> None:
    assert len({rank_symbol(r) for r in range(62)}) == 62
    assert rank_symbol(62) == "0"


@pytest.mark.parametrize("overlap_degree", [0, 1, 3])
def test_bars_are_the_stages(overlap_degree: int) -> None:
    pytest.importorskip("matplotlib")
    plans = plans_of(masks.document([0, 30, 100]), 3, overlap_degree=overlap_degree)
    figure = plot_plan(plans[0], all_ranks=plans)
    widths = [bar.get_width() for bar in figure.axes[1].patches]
    assert widths == [stage.mask.area for plan in plans for stage in plan.stages]
    assert sum(widths) == plans[0].mask.area


def test_plan_plots_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = plans_of(masks.causal(100), 12)[3]
    figure = plan.plot()
    assert sum(bar.get_width() for bar in figure.axes[1].patches) == plan.mask.area
    assert plan.plot(str(tmp_path / "plan.png")) is None
    assert (tmp_path / "plan.png").stat().st_size > 0


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="plot needs matplotlib"):
        plans_of(masks.causal(4), 1)[0].plot()
