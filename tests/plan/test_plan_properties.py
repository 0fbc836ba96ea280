"""What holds for the plans of all ranks together: every pair computed once, rows sent where needed.

Nothing here uses the planner's own bookkeeping: rows are followed through the exchanges by their global ids.
"""

from __future__ import annotations

import random
from typing import Any, get_args

import numpy as np
import pytest

from torch_magi import AttnPlan, PlanConfig, make_attn_plan
from torch_magi.masks import AttnMask
from torch_magi.plan.config import Dispatcher
from torch_magi.testing import named_masks, random_mask

WORLDS = [1, 2, 3, 4, 8]
SQUARE = {name: mask for name, mask in named_masks().items() if mask.shape[0] == mask.shape[1]}


def make_plans(mask: AttnMask, world: int, config: PlanConfig, **options: Any) -> list[AttnPlan]:
    return [make_attn_plan(mask, 4, 2, 8, cp_size=world, cp_rank=r, config=config, **options) for r in range(world)]


def global_rows(plan: AttnPlan) -> np.ndarray:
    return plan.position_ids.numpy()


def received_rows(plans: list[AttnPlan], stage: int) -> list[np.ndarray]:
    """Return the global ids of the rows that each rank receives, by carrying out the exchange on the ids."""
    mailboxes: list[list[np.ndarray]] = [[] for _ in plans]
    for plan in plans:
        comm = plan.stages[stage].comm
        assert comm is not None and comm.num_rows == plan.num_tokens_local
        ranges = comm.send_ranges
        assert ((ranges[:, 0] >= 0) & (ranges[:, 0] <= ranges[:, 1]) & (ranges[:, 1] <= comm.num_rows)).all()
        local = np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for a, b in ranges)])
        assert len(local) == sum(comm.input_split_sizes)
        borders = np.cumsum((0, *comm.input_split_sizes))
        for destination, mailbox in enumerate(mailboxes):
            mailbox.append(global_rows(plan)[local[borders[destination] : borders[destination + 1]]])
    for plan, mailbox in zip(plans, mailboxes, strict=True):
        assert plan.stages[stage].comm.output_split_sizes == tuple(len(rows) for rows in mailbox)
    return [np.concatenate(mailbox) for mailbox in mailboxes]


def check_plans(mask: AttnMask, world: int, config: PlanConfig) -> None:
    plans = make_plans(mask, world, config)
    dense = mask.to_dense().numpy()
    held = [global_rows(plan) for plan in plans]
    check_dispatch(plans, held, len(dense), config)
    num_stages = 1 if world == 1 else max(config.overlap_degree + 1, 1)
    seen = np.zeros(dense.shape, int)
    got: list[list[int]] = [[] for _ in plans]  # rows from others, over all stages
    for stage in range(num_stages):
        local = all(plan.stages[stage].comm is None for plan in plans)
        assert local == (stage == 0 and (world == 1 or config.overlap_degree > 0))
        keys = held if local else received_rows(plans, stage)
        for r, plan in enumerate(plans):
            assert plan.num_stages == len(plan.stages) == num_stages
            part = plan.stages[stage].mask
            assert part.shape == (len(held[r]), len(keys[r]))
            seen[np.ix_(held[r], keys[r])] += part.to_dense().numpy()
            if not local:
                needed = dense[held[r]].any(0)
                assert needed[keys[r]].all(), "a row that nobody needs is sent"
                own = np.isin(keys[r], held[r])
                assert not own.any() or config.overlap_degree == 0
                got[r] += keys[r][~own].tolist()
    assert (seen == dense).all(), "the ranks together do not compute each visible pair exactly once"
    for r, plan in enumerate(plans):
        missing = dense[held[r]].any(0)
        missing[held[r]] = False
        assert sorted(got[r]) == np.flatnonzero(missing).tolist(), "a row is missing or sent twice"
        assert plan.comm_rows_per_rank == tuple(len(rows) for rows in got)
        assert plan.comm_rows == sum(map(len, got))
        assert plan.area_per_rank == tuple(int(dense[rows].sum()) for rows in held)
    if config.overlap_degree > 0 and world > 1:
        for plan in plans:
            sizes = [part.mask.shape[1] for part in plan.stages[1:]]
            assert max(sizes) - min(sizes) <= 1, f"stages should be of equal size, got {sizes}"


def check_dispatch(plans: list[AttnPlan], held: list[np.ndarray], total: int, config: PlanConfig) -> None:
    assert sorted(np.concatenate(held).tolist()) == list(range(total)), "not every row is held exactly once"
    chunk = plans[0].dispatch.chunk_size
    counts = []
    for r, plan in enumerate(plans):
        assert plan.num_tokens_local == len(held[r]) == plan.dispatch.tokens_per_rank[r]
        assert (np.diff(held[r]) > 0).all(), "local rows should be in the order of the sequence"
        borders = np.flatnonzero(np.diff(held[r]) != 1) + 1
        assert (held[r][borders] % chunk == 0).all(), "a chunk is torn"
        counts.append(len(held[r]))
    if not config.uneven:
        assert max(counts) - min(counts) <= chunk


def random_config(rng: random.Random) -> PlanConfig:
    dispatcher = rng.choice(get_args(Dispatcher))
    return PlanConfig(
        chunk_size=rng.choice([None, 1, 2, 3, 5, 100]),
        dispatcher=dispatcher,
        overlap_degree=rng.randint(0, 3),
        uneven=dispatcher == "min_heap" and rng.random() < 0.3,
    )


@pytest.mark.parametrize("world", WORLDS)
def test_random_masks(world: int, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(200):
        size, config = rng.choice([0, 1, 2, rng.randint(3, 40), rng.randint(3, 40)]), random_config(rng)
        print(f"random_mask({seed + i}, {size}, {size}), world {world}, {config}")
        check_plans(random_mask(seed + i, size, size), world, config)


@pytest.mark.parametrize("dispatcher", get_args(Dispatcher))
@pytest.mark.parametrize("overlap_degree", range(4))
@pytest.mark.parametrize("name", SQUARE)
def test_named_masks(name: str, overlap_degree: int, dispatcher: Any) -> None:
    config = PlanConfig(chunk_size=2, dispatcher=dispatcher, overlap_degree=overlap_degree)
    for world in WORLDS:
        check_plans(SQUARE[name], world, config)


def test_batches() -> None:
    mask = SQUARE["document"]
    plans = make_plans(mask, 3, PlanConfig(chunk_size=4), batch_size=2)
    whole = plans[0].mask
    assert whole.shape == (32, 32) and whole.area == 2 * mask.area
    for b in range(2):
        assert whole.clip((16 * b, 16 * b + 16), (16 * b, 16 * b + 16)) == mask
    check_plans(whole, 3, PlanConfig(chunk_size=4))
    assert [str(p) for p in plans] == [str(p) for p in make_plans(whole, 3, PlanConfig(chunk_size=4))]


def test_cross_attention_on_one_rank() -> None:
    for mask in (m for m in named_masks().values() if m.shape[0] != m.shape[1]):
        plan = make_attn_plan(mask, 4, 2, 8)
        assert plan.num_stages == 1 and plan.stages[0].mask == mask and plan.stages[0].comm is None
        assert plan.area_per_rank == (mask.area,) and plan.comm_rows == 0
        assert plan.num_tokens_local == mask.shape[0]


def test_the_checks_notice_a_lost_pair_and_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    from torch_magi.plan import planner

    local_mask, make_comm_plan = planner.local_mask, planner.make_comm_plan
    config = PlanConfig(chunk_size=2)

    def without_last_row(mask: AttnMask, rows: Any, keys: Any) -> AttnMask:
        made = local_mask(mask, rows, keys)
        n = made.shape[0]
        return made - AttnMask.from_slices([[n - 1, n]], [[0, made.shape[1]]], ["full"], *made.shape)

    monkeypatch.setattr(planner, "local_mask", without_last_row)
    with pytest.raises(AssertionError, match="exactly once"):
        check_plans(SQUARE["causal"], 2, config)
    monkeypatch.setattr(planner, "local_mask", local_mask)

    def reversed_ranges(*args: Any) -> Any:
        made = make_comm_plan(*args)
        made.__dict__["send_ranges"] = made.send_ranges[::-1]
        return made

    monkeypatch.setattr(planner, "make_comm_plan", reversed_ranges)
    with pytest.raises(AssertionError):
        check_plans(SQUARE["causal"], 4, config)
