"""dispatch and undispatch: each the other's inverse, and both conventions of gradients."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_magi as magi
from torch_magi import AttnPlan, PlanConfig
from torch_magi.plan.config import Dispatcher
from torch_magi.testing import assert_close_to_truth, random_mask, run_ranks

WORLDS = [1, 2, 3, 4, 8]


def make_plans(world: int, rng: random.Random) -> list[AttnPlan]:
    size = rng.choice([0, 1, 2, rng.randint(3, 40)])
    config = PlanConfig(chunk_size=rng.choice([None, 1, 3, 100]), dispatcher=rng.choice(get_args(Dispatcher)))
    mask = random_mask(rng.randint(0, 10**6), size, size)
    return [magi.make_attn_plan(mask, 1, 1, 8, cp_size=world, cp_rank=r, config=config) for r in range(world)]


def there_and_back(rank: int, group: dist.ProcessGroup, plans: list[AttnPlan], x: Tensor, dy: list[Tensor]) -> Any:
    """Return the local rows, the whole again, and gradients of all under the ranks' `dy`."""
    plan = plans[rank]
    whole = x.clone().requires_grad_()
    mine = magi.dispatch(whole, plan)
    grads = []
    for grad in ("replicated", "partial"):
        local = mine.detach().requires_grad_()
        again = magi.undispatch(local, plan, group, grad=grad)
        grads.append(torch.autograd.grad(again, local, dy[rank])[0])
    (dx,) = torch.autograd.grad(mine, whole, mine.detach())
    return mine.detach(), again.detach(), dx, *grads


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_inverse_and_gradients(world: int, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        plans = make_plans(world, rng)
        total = plans[0].dispatch.total_tokens
        print(f"seed {seed}: {plans[0]}")
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(total, 2, 3, generator=gen).to(dtype)
        dy = [torch.randn(total, 2, 3, generator=gen).to(dtype) for _ in range(world)]
        summed = torch.stack([d.double() for d in dy]).sum(0)
        for rank, (mine, again, dx, replicated, partial) in enumerate(
            run_ranks(there_and_back, world, args=(plans, x, dy))
        ):
            rows = plans[rank].position_ids
            assert torch.equal(mine, x[rows])
            assert torch.equal(again, x), "undispatch(dispatch(x)) is not x"
            expected = torch.zeros_like(x)
            expected[rows] = mine
            assert torch.equal(dx, expected)
            assert torch.equal(replicated, dy[rank][rows])
            low = None if dtype == torch.float64 else torch.stack(dy).float().sum(0).to(dtype)[rows]
            assert_close_to_truth(partial, summed[rows], low)


def test_integers_and_vectors_are_dispatched() -> None:
    plan = magi.make_attn_plan(magi.masks.causal(12), 1, 1, 8, cp_size=3, cp_rank=1)
    ids = torch.arange(12)
    assert torch.equal(magi.dispatch(ids, plan), plan.position_ids)
    assert torch.equal(magi.dispatch(ids > 3, plan), plan.position_ids > 3)


def test_one_rank_without_group() -> None:
    plan = magi.make_attn_plan(magi.masks.causal(5), 1, 1, 8)
    x = torch.randn(5, 3)
    assert torch.equal(magi.undispatch(magi.dispatch(x, plan), plan, None), x)
