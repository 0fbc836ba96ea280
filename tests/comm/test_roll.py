"""roll within documents, and positions in them: against loops over the whole sequence."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_magi as magi
from torch_magi import AttnPlan, PlanConfig, masks
from torch_magi.plan.config import Dispatcher
from torch_magi.plan.roll import roll_plan_of
from torch_magi.testing import run_ranks

WORLDS = [1, 2, 3, 4, 8]
DISPATCHERS = get_args(Dispatcher)
Case = tuple[list[int], int, int, bool]  # cu_seqlens, total, shift, wrap


def sources(cu: list[int], total: int, shift: int, wrap: bool) -> list[int | None]:
    """Return the row that each row takes: a loop over documents and their tokens."""
    found: list[int | None] = [row if wrap else None for row in range(total)]
    for begin, end in itertools.pairwise(cu):
        for row in range(begin, end):
            index = row - begin - shift
            if wrap:
                index %= end - begin
            found[row] = begin + index if 0 <= index < end - begin else None
    return found


def random_case(rng: random.Random) -> Case:
    """Return documents, empty ones among them, that may end before the last row, and a shift that may pass them."""
    total = rng.choice([0, 1, 2, rng.randint(3, 40)])
    last = rng.choice([total, rng.randint(0, total)])
    cu = [0, *sorted(rng.choice([0, last, rng.randint(0, last)]) for _ in range(rng.randint(0, 5))), last]
    shift = rng.choice([0, -1, 1, -2, rng.randint(-5, 5), rng.randint(-100, 100), 2**62, -(2**63) + 1])
    return cu, total, shift, rng.random() < 0.5


def plans_for(total: int, world: int, cu: list[int], rng: random.Random) -> list[AttnPlan]:
    config = PlanConfig(chunk_size=rng.choice([None, 1, 3, 100]), dispatcher=rng.choice(DISPATCHERS))
    mask = masks.causal(total)
    plans = [magi.make_attn_plan(mask, 1, 1, 8, cp_size=world, cp_rank=r, config=config) for r in range(world)]
    return [plan.with_documents(cu) for plan in plans]


def rolled_with_gradient(
    rank: int, group: dist.ProcessGroup, plans: list[AttnPlan], shift: int, fill: float | None, x: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    plan = plans[rank]
    mine = magi.dispatch(x, plan).requires_grad_()
    rolled = magi.roll(mine, shift, plan, group, fill=fill)
    (dx,) = torch.autograd.grad(rolled, mine, magi.dispatch(dy, plan))
    return rolled.detach(), dx


@pytest.mark.parametrize("world", WORLDS)
def test_random_documents(world: int, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(25):
        cu, total, shift, wrap = random_case(rng)
        plans = plans_for(total, world, cu, rng)
        print(f"case {i} of seed {seed}: {cu}, total {total}, shift {shift}, wrap {wrap}, {plans[0]}")
        gen = torch.Generator().manual_seed(i)
        x, dy = torch.randn(2, total, 2, 3, generator=gen, dtype=torch.float64)
        expected, gradient = torch.full_like(x, -7.0), torch.zeros_like(x)
        for row, source in enumerate(sources(cu, total, shift, wrap)):
            if source is not None:
                expected[row] = x[source]
                gradient[source] += dy[row]
        fill = None if wrap else -7.0
        for plan, (rolled, dx) in zip(
            plans, run_ranks(rolled_with_gradient, world, args=(plans, shift, fill, x, dy)), strict=True
        ):
            assert torch.equal(rolled, magi.dispatch(expected, plan))
            assert torch.equal(dx, magi.dispatch(gradient, plan)), "the gradient is not the reverse roll"


def test_rows_travel_only_to_who_takes_them(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        cu, total, shift, wrap = random_case(rng)
        world = rng.choice(WORLDS)
        plans = plans_for(total, world, cu, rng)
        owner = {int(row): plan.cp_rank for plan in plans for row in plan.position_ids}
        counts = np.zeros((world, world), int)  # [receiver, sender]
        for row, source in enumerate(sources(cu, total, shift, wrap)):
            if source is not None:
                counts[owner[row], owner[source]] += 1
        for rank, plan in enumerate(plans):
            comm = roll_plan_of(plan, shift, wrap).comm
            assert comm.output_split_sizes == tuple(counts[rank]) and comm.input_split_sizes == tuple(counts[:, rank])


def labels_of(rank: int, group: dist.ProcessGroup, plans: list[AttnPlan], cu: list[int]) -> list[Any]:
    plan = plans[rank]
    mine = magi.dispatch(torch.arange(8), plan)
    rolled = magi.roll(mine, -1, plan, group, cu_seqlens=cu, fill=-100)
    again = magi.roll(mine, -1, plan.with_documents(cu), group, fill=-100)
    assert torch.equal(rolled, again) and rolled.dtype == torch.int64
    hidden = mine.double()[:, None].requires_grad_()
    (dx,) = torch.autograd.grad(magi.roll(hidden, -1, plan, group, torch.tensor(cu), 0.0), hidden, hidden + 1)
    whole = [magi.undispatch(t, plan, group).flatten().tolist() for t in (rolled, dx)]
    return whole


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_c52_labels_of_packed_documents(world: int, dispatcher: Any) -> None:
    config = PlanConfig(chunk_size=1, dispatcher=dispatcher)
    mask = masks.document([0, 3, 8])
    plans = [magi.make_attn_plan(mask, 1, 1, 8, cp_size=world, cp_rank=r, config=config) for r in range(world)]
    for labels, gradient in run_ranks(labels_of, world, args=(plans, [0, 3, 8])):
        assert labels == [1, 2, -100, 4, 5, 6, 7, -100]
        assert gradient == [0, 1, 2, 0, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    plan = magi.make_attn_plan(masks.causal(6), 1, 1, 8)
    x = torch.tensor([1, 0, 1, 1, 0, 1]).to(dtype)
    assert torch.equal(magi.roll(x, 2, plan, None), x.roll(2))
    assert magi.roll(x, 2, plan, None, fill=1).tolist() == [1, 1, 1, 0, 1, 1]


def test_second_derivative() -> None:
    plan = magi.make_attn_plan(masks.causal(5), 1, 1, 8).with_documents([0, 2, 5])
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: magi.roll(t.sin(), -1, plan, None, fill=0.0) ** 2, x)


def compiled_predictions(rank: int, group: dist.ProcessGroup) -> int:
    """Put documents of many lengths through one compiled step; return how often it compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._inductor.config.compile_threads = 1
    counter = CompileCounterWithBackend("inductor")

    def fn(x: Tensor, labels: Tensor, plan: AttnPlan) -> tuple[Tensor, Tensor]:
        x = magi.roll(x.sin(), -1, plan, group, fill=0.5) + magi.roll(x, 2, plan, group)
        return x, magi.roll(labels, -2, plan, group, fill=-100)

    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    rng = random.Random(0)
    for i in range(12):
        cu, total, _, _ = random_case(rng)
        plan = plans_for(total, group.size(), cu, rng)[rank]
        x = torch.randn(plan.num_tokens_local, 3, generator=torch.Generator().manual_seed(i)).requires_grad_()
        labels = torch.arange(plan.num_tokens_local)
        for t in (x, labels):
            torch._dynamo.decorators.mark_unbacked(t, 0)
        results = []
        for f in (compiled, fn):
            y, rolled = f(x, labels, plan)
            results.append((y.detach(), rolled, *torch.autograd.grad(y.square().sum(), x)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    return counter.frame_count


@pytest.mark.parametrize("world", [1, 2])
def test_new_documents_do_not_recompile(world: int) -> None:
    assert run_ranks(compiled_predictions, world, "processes", timeout=300) == [1] * world


def test_documents_in_compiled_code_come_with_the_plan() -> None:
    plan = magi.make_attn_plan(masks.causal(5), 1, 1, 8)
    compiled = torch.compile(lambda x: magi.roll(x, -1, plan, None, [0, 2, 5]), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"set the documents outside, with plan.with_documents\(cu_seqlens\)"):
        compiled(torch.zeros(5))


@pytest.mark.parametrize("world", WORLDS)
def test_position_ids_in_documents(world: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        cu, total, _, _ = random_case(rng)
        expected = torch.zeros(total, dtype=torch.int64)
        for begin, end in itertools.pairwise(cu):
            expected[begin:end] = torch.arange(end - begin)
        for plan in plans_for(total, world, cu, rng):
            assert plan.document_position_ids.dtype == torch.int64
            assert torch.equal(plan.document_position_ids, magi.dispatch(expected, plan)), f"{cu} of {total}, {plan}"


def test_documents_of_a_plan() -> None:
    plan = magi.make_attn_plan(masks.causal(6), 1, 1, 8, batch_size=2, cp_size=2, cp_rank=1)
    assert plan.cu_seqlens.tolist() == [0, 6, 12], "an element of the batch is a document"
    packed = plan.with_documents([0, 5, 11])
    assert plan.cu_seqlens.tolist() == [0, 6, 12] and packed.cu_seqlens.tolist() == [0, 5, 11]
    assert packed.stages is plan.stages and packed.mask == plan.mask
    for other in (packed.with_mask(masks.full(6, 6)), pickle.loads(pickle.dumps(packed))):
        assert other.cu_seqlens.tolist() == [0, 5, 11]
        assert torch.equal(other.document_position_ids, packed.document_position_ids)
    assert magi.make_attn_plan(masks.causal(0), 1, 1, 8).document_position_ids.tolist() == []
    with pytest.raises(ValueError, match="total must be at least the last value of cu_seqlens, 13, got 12"):
        plan.with_documents([0, 13])


PLAN = magi.make_attn_plan(masks.causal(4), 1, 1, 8)
REFUSALS: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "plan must be an AttnPlan, got NoneType", lambda: magi.roll(torch.zeros(4), 1, None, None)),
    (ValueError, "x must have 4 rows as the plan says, got 3", lambda: magi.roll(torch.zeros(3), 1, PLAN, None)),
    (
        TypeError,
        r"fill must be an int for x_local of torch.int64, got 0.5",
        lambda: magi.roll(torch.arange(4), 1, PLAN, None, fill=0.5),
    ),
    (
        ValueError,
        r"fill must be in \[0, 255\] for x_local of torch.uint8, got -100",
        lambda: magi.roll(torch.arange(4, dtype=torch.uint8), 1, PLAN, None, fill=-100),
    ),
    (
        ValueError,
        "cu_seqlens must begin with 0, got 1",
        lambda: magi.roll(torch.zeros(4), 1, PLAN, None, cu_seqlens=[1, 4]),
    ),
]


@pytest.mark.parametrize(("error", "text", "call"), REFUSALS)
def test_refusals(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=text):
        call()
