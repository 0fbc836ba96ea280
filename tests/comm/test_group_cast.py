"""group_cast and group_reduce: which rows arrive, what the sums are, and that one is the other's adjoint."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_magi as magi
from torch_magi import CommPlan
from torch_magi.testing import assert_close_to_truth, run_ranks

WORLDS = [1, 2, 3, 4, 8]
# What every rank sends to every rank: ranges of its own rows, by [source][target].
Exchange = tuple[list[int], list[list[list[tuple[int, int]]]]]


def plan_for(exchange: Exchange, rank: int) -> CommPlan:
    num_rows, sends = exchange
    received = [sum(b - a for a, b in sends[source][rank]) for source in range(len(num_rows))]
    return CommPlan.from_splits(sends[rank], received, num_rows[rank], rank)


def random_exchange(rng: random.Random, world: int) -> Exchange:
    """Return an exchange with overlapping, repeated and empty ranges, and ranks without rows."""
    num_rows = [rng.choice([0, 1, rng.randint(2, 9)]) for _ in range(world)]

    def ranges(n: int) -> list[tuple[int, int]]:
        found = []
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            a, b = sorted((rng.randint(0, n), rng.randint(0, n)))
            found.append((a, b))
        return found

    return num_rows, [[ranges(num_rows[source]) for _ in range(world)] for source in range(world)]


def rows_that_arrive(exchange: Exchange, x: list[Tensor], rank: int) -> Tensor:
    pieces = [x[source][a:b] for source in range(len(x)) for a, b in exchange[1][source][rank]]
    return torch.cat([x[0][:0], *pieces])


def sums_that_return(exchange: Exchange, y: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    sums = [torch.zeros_like(x) for x in like]
    for target, rows in enumerate(y):
        begin = 0
        for source in range(len(like)):
            for a, b in exchange[1][source][target]:
                sums[source][a:b] += rows[begin : begin + b - a]
                begin += b - a
        assert begin == len(rows)
    return sums


def random_rows(exchange: Exchange, dtype: torch.dtype, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return every rank's local rows, and rows to return."""
    gen = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, 2, 3, generator=gen, dtype=torch.float64).to(dtype) for n in exchange[0]]
    y = []
    for rank in range(len(x)):
        n = plan_for(exchange, rank).num_received
        y.append(torch.randn(n, 2, 3, generator=gen, dtype=torch.float64).to(dtype))
    return x, y


def cast_and_reduce(rank: int, group: dist.ProcessGroup, exchange: Exchange, x: Any, y: Any) -> tuple[Tensor, ...]:
    """Return cast(x), reduce(y), and the gradients of both under y and x."""
    plan = plan_for(exchange, rank)
    mine, back = x[rank].clone().requires_grad_(), y[rank].clone().requires_grad_()
    cast = magi.group_cast(mine, plan, group)
    (dx,) = torch.autograd.grad(cast, mine, back.detach())
    reduced = magi.group_reduce(back, plan, group)
    (dy,) = torch.autograd.grad(reduced, back, mine.detach())
    return cast.detach(), reduced.detach(), dx, dy


@pytest.mark.parametrize("world", WORLDS)
def test_random_exchanges(world: int, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(12):
        exchange = random_exchange(rng, world)
        print(f"exchange {i} of seed {seed}: {exchange}")
        x, y = random_rows(exchange, torch.float64, i)
        results = run_ranks(cast_and_reduce, world, args=(exchange, x, y))
        sums = sums_that_return(exchange, y, x)
        for rank, (cast, reduced, dx, dy) in enumerate(results):
            assert torch.equal(cast, rows_that_arrive(exchange, x, rank))
            assert_close_to_truth(reduced, sums[rank], None)
            assert torch.equal(dx, reduced) and torch.equal(dy, cast)
        inner = sum((cast * y[rank]).sum().item() for rank, (cast, *_) in enumerate(results))
        outer = sum((reduced * x[rank]).sum().item() for rank, (_, reduced, *_) in enumerate(results))
        assert inner == pytest.approx(outer, rel=1e-12, abs=1e-12), "reduce is not the adjoint of cast"


def test_c08_a_rank_with_nothing_to_send_or_receive() -> None:
    whole, nothing = [(0, 5)], []
    to_all = [whole, whole, whole, nothing]
    for sends in (
        [to_all, to_all, to_all, [nothing] * 4],  # rank 3 takes no part
        [[whole] * 4, [nothing] * 4, to_all, [nothing] * 4],  # rank 0 sends to all, rank 1 to none
    ):
        exchange: Exchange = ([5, 5, 5, 0 if sends[0] is to_all else 5], sends)
        x, y = random_rows(exchange, torch.float32, 0)
        for results in (
            run_ranks(cast_and_reduce, 4, backend, (exchange, x, y)) for backend in ("threads", "processes")
        ):
            for rank, (cast, reduced, _, _) in enumerate(results):
                assert torch.equal(cast, rows_that_arrive(exchange, x, rank))
                torch.testing.assert_close(reduced, sums_that_return(exchange, y, x)[rank])
            assert results[3][0].shape == ((0 if sends[0] is to_all else 5), 2, 3)
            assert (results[3][1] == 0).all()


def contradicting_plans(rank: int, group: dist.ProcessGroup) -> str:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        expected = [2, 2] if rank == 0 else [1, 1]
        agreed = CommPlan.from_splits([[(0, 2)], [(0, 1)]], expected, 2, rank)
        x = torch.ones(2, 3)
        assert magi.group_cast(x, agreed, group).shape == (sum(expected), 3)
        broken = CommPlan.from_splits([[(0, 2)], [(0, 1)]], [expected[0], expected[1] + (rank == 1)], 2, rank)
        with pytest.raises(RuntimeError) as error:
            magi.group_cast(x, broken, group)
        return str(error.value)
    finally:
        dist.set_debug_level(level)


def test_c08_contradicting_plans_raise_in_debug_mode() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, every rank raises instead of waiting for rows that never come."""
    texts = run_ranks(contradicting_plans, 2, "processes")
    assert texts[0] == texts[1]
    assert texts[0].startswith("the ranks' plans contradict each other: rank 1 sends 1 rows to rank 1, which expects 2")


ALL_TO_ONE: Exchange = ([3, 3, 3, 3], [[[(0, 3)] * 2 for _ in range(4)] for _ in range(4)])


def test_c39_sums_of_several_ranks_have_the_same_bits() -> None:
    x, y = random_rows(ALL_TO_ONE, torch.float32, 1)
    first, *others = [run_ranks(cast_and_reduce, 4, args=(ALL_TO_ONE, x, y)) for _ in range(20)]
    for other in others:
        assert all(torch.equal(a, b) for r in range(4) for a, b in zip(first[r], other[r], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_rows_are_added_in_float32(dtype: torch.dtype) -> None:
    x, y = random_rows(ALL_TO_ONE, dtype, 2)
    exact = sums_that_return(ALL_TO_ONE, [t.double() for t in y], [t.double() for t in x])
    for rank, (_, reduced, _, _) in enumerate(run_ranks(cast_and_reduce, 4, args=(ALL_TO_ONE, x, y))):
        assert reduced.dtype == dtype
        assert torch.equal(reduced, exact[rank].float().to(dtype))


def compiled_exchanges(rank: int, group: dist.ProcessGroup, exchanges: list[Exchange]) -> int:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._inductor.config.compile_threads = 1
    counter = CompileCounterWithBackend("inductor")

    def fn(x: Tensor, plan: CommPlan) -> Tensor:
        arrived = magi.group_cast(x.sin(), plan, group)
        return magi.group_reduce(arrived * 2, plan, group)

    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for i, exchange in enumerate(exchanges):
        plan, gen = plan_for(exchange, rank), torch.Generator().manual_seed(i)
        results = []
        x = torch.randn(plan.num_rows, 3, generator=gen).requires_grad_()
        torch._dynamo.decorators.mark_unbacked(x, 0)
        for f in (compiled, fn):
            out = f(x, plan)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    return counter.frame_count


def test_compiled_exchanges_do_not_recompile() -> None:
    rng = random.Random(3)
    exchanges = [random_exchange(rng, 2) for _ in range(12)]
    assert run_ranks(compiled_exchanges, 2, "processes", (exchanges,), timeout=300) == [1, 1]


PLAN = CommPlan.from_splits([[(0, 2)]], [2], 2, 0)
X = torch.zeros(2, 3)
REFUSALS: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "comm_plan must be a CommPlan, got NoneType", lambda group: magi.group_cast(X, None, group)),
    (TypeError, "group must be a ProcessGroup", lambda group: magi.group_cast(X, PLAN, 3)),
    (ValueError, "x must have 2 rows as the plan says, got 1", lambda group: magi.group_cast(X[:1], PLAN, group)),
    (ValueError, "x must have 2 rows as the plan says, got 1", lambda group: magi.group_reduce(X[:1], PLAN, group)),
    (ValueError, "op must be 'sum', got 'mean'", lambda group: magi.group_reduce(X, PLAN, group, op="mean")),
    (
        ValueError,
        "the plan is for cp_size=2 ranks, but group .* has 1",
        lambda group: magi.group_cast(X, CommPlan.from_splits([[], []], [0, 0], 2, 0), group),
    ),
]


@pytest.mark.parametrize(("error", "text", "call"), REFUSALS)
def test_refusals(error: type[Exception], text: str, call: Any) -> None:
    def on_rank(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(error, match=text):
            call(group)

    run_ranks(on_rank, 1)
