"""group_cast and group_reduce: which rows arrive, how they are combined, and that one is the other's adjoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_magi as magi
from torch_magi import CommPlan
from torch_magi.comm import exchange as exchange_module
from torch_magi.comm.lse_columns import attach, detach
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
        broken = CommPlan.from_splits([[(0, 2)], [(0, 1)]], [expected[0] + (rank == 1), expected[1]], 2, rank)
        with pytest.raises(RuntimeError) as error:
            magi.group_cast(x, broken, group)
        return str(error.value)
    finally:
        dist.set_debug_level(level)


def test_c08_contradicting_plans_raise_in_debug_mode() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, every rank raises instead of waiting for rows that never come."""
    texts = run_ranks(contradicting_plans, 2, "processes")
    assert texts[0] == texts[1]
    assert texts[0].startswith("the ranks' plans contradict each other: rank 0 sends 1 rows to rank 1, which expects 2")


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


# --- mean, merge, dtypes, buffers, several tensors --------------------------------------------------------------------


class Step(NamedTuple):
    """A call of group_reduce, by rank: copies of rows, what is there before, and the gradients of the results."""

    op: str
    copies: list[list[Tensor]]  # [x], or [out, lse]
    before: list[list[Tensor]]  # as the results; empty: nothing
    gradients: list[list[Tensor]]
    options: dict[str, Any]


def random_step(exchange: Exchange, op: str, into: bool, seed: int, dtype: torch.dtype, **options: Any) -> Step:
    """Return random numbers in which every fifth row of a head saw no key: its lse is infinite, its values are NaN."""
    gen = torch.Generator().manual_seed(seed)

    def some(rows: int, with_empty: bool = True) -> list[Tensor]:
        x = torch.randn(rows, 2, 3, generator=gen, dtype=torch.float64)
        lse = 5 * torch.randn(rows, 2, generator=gen, dtype=torch.float64)
        if op != "lse":
            return [x.to(dtype)]
        empty = (torch.rand(lse.shape, generator=gen) < 0.2) & with_empty
        x, lse = x.masked_fill(empty[..., None], torch.nan), lse.masked_fill(empty, (-1) ** seed * torch.inf)
        return [x.to(dtype), lse.to(torch.promote_types(dtype, torch.float32))]

    received = [plan_for(exchange, rank).num_received for rank in range(len(exchange[0]))]
    before = [some(n) if into else [] for n in exchange[0]]
    return Step(op, [some(n) for n in received], before, [some(n, False) for n in exchange[0]], options)


def reduce_on_rank(rank: int, group: dist.ProcessGroup, exchange: Exchange, step: Step) -> tuple[list[Tensor], ...]:
    """Return the results, and the gradients of the copies and of what was there before."""
    x, before = ([t.clone().requires_grad_() for t in parts[rank]] for parts in (step.copies, step.before))
    into = [t.clone() for t in before]
    args: Any = (x, into or None) if step.op == "lse" else (x[0], into[0] if into else None)
    found = magi.group_reduce(args[0], plan_for(exchange, rank), group, step.op, into=args[1], **step.options)
    results = list(found) if step.op == "lse" else [found]
    assert not into or all(a is b for a, b in zip(results, into, strict=True))
    grads = torch.autograd.grad(results, x + before, step.gradients[rank])
    return [r.detach() for r in results], list(grads)


def reduce_in_one_process(exchange: Exchange, step: Step, dtype: torch.dtype) -> list[tuple[list[Tensor], ...]]:
    """Return the same from the definitions, in one process and one dtype."""
    num_rows, sends = exchange
    world, begins = range(len(num_rows)), [sum(num_rows[:r]) for r in range(len(num_rows))]
    owners = [torch.arange(a, b) + begins[s] for t in world for s in world for a, b in sends[s][t]]
    owners += [torch.arange(n) + begins[r] for r, n in enumerate(num_rows) if step.before[r]]
    owner = torch.cat([torch.zeros(0, dtype=torch.long), *owners])
    pieces = [[t.to(dtype).requires_grad_() for t in parts] for parts in step.copies + step.before]
    x, *lse = (torch.cat(part) for part in zip(*[p for p in pieces if p], strict=True))
    total = sum(num_rows)

    def added(values: Tensor) -> Tensor:
        return values.new_zeros(total, *values.shape[1:]).index_add(0, owner, values)

    if step.op == "lse":
        empty = lse[0].isinf()
        sums = added(lse[0].masked_fill(empty, -torch.inf).exp())
        total_lse = sums.masked_fill(sums == 0, 1).log()
        share = (lse[0].masked_fill(empty, 0) - total_lse[owner]).exp().masked_fill(empty, 0)
        out = added(x.masked_fill(empty[..., None], 0) * share[..., None])
        results = [out, total_lse.masked_fill(sums == 0, -torch.inf)]
    else:
        copies = added(torch.ones(len(owner), 1, 1, dtype=dtype)).clamp(min=1)
        results = [added(x) / copies if step.op == "avg" else added(x)]
    wanted = [torch.cat([g[i] for g in step.gradients]).to(dtype) for i in range(len(results))]
    flat = [t for parts in pieces for t in parts]
    grads = iter(torch.autograd.grad(results, flat, wanted))
    by_piece = [[next(grads) for _ in parts] for parts in pieces]
    by_rank = [[r.detach()[b : b + n] for r in results] for b, n in zip(begins, num_rows, strict=True)]
    return [(by_rank[r], by_piece[r] + by_piece[len(num_rows) + r]) for r in world]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", ["sum", "avg", "lse"])
def test_random_reductions(op: str, world: int, seed: int) -> None:
    """Every op, with and without something to add to, against its definition in float64; gradients, too."""
    rng = random.Random(seed)
    for i in range(8):
        exchange = random_exchange(rng, world)
        print(f"exchange {i} of seed {seed}: {exchange}")
        step = random_step(exchange, op, i % 4 >= 2, i, torch.float64)
        truth = reduce_in_one_process(exchange, step, torch.float64)
        for found, wanted in zip(run_ranks(reduce_on_rank, world, args=(exchange, step)), truth, strict=True):
            for a, b in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
                assert_close_to_truth(a, b, None)


@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "lse"])
def test_dtypes(op: str, dtype: torch.dtype, comm_dtype: torch.dtype | None, seed: int) -> None:
    """Copies are combined in float32, whatever they travel in; results and gradients have the dtype of the inputs.

    Gradients are compared in float64, above.
    """
    rng, wire = random.Random(seed), comm_dtype or dtype
    for i, into in enumerate((False, True)):
        exchange = random_exchange(rng, 4)
        step = random_step(exchange, op, into, i, wire, comm_dtype=comm_dtype)  # numbers that travel unchanged
        step = step._replace(
            copies=[[x.to(dtype), *lse] for x, *lse in step.copies],
            gradients=[[x.to(dtype), *lse] for x, *lse in step.gradients],
            before=[[p[0].to(dtype), *p[1:]] if p else [] for p in step.before],
        )
        truth = reduce_in_one_process(exchange, step, torch.float64)
        low = reduce_in_one_process(exchange, step, torch.float32)
        for rank, found in enumerate(run_ranks(reduce_on_rank, 4, args=(exchange, step))):
            dtypes = [t.dtype for t in step.copies[rank]]
            assert [t.dtype for t in found[0]] == dtypes and [t.dtype for t in found[1]] == dtypes * (1 + into)
            for a, b, c in zip(found[0], truth[rank][0], low[rank][0], strict=True):
                assert_close_to_truth(a, b, c.to(a.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_numbers_beside_rows_keep_their_bits(dtype: torch.dtype) -> None:
    x = torch.randn(50, 4, 6).to(dtype)
    numbers = [torch.randn(50, 4) * 10.0 ** torch.randint(-6, 7, (50, 4)) for _ in range(2)]
    numbers[0][:9] = -torch.inf
    rows = attach(x, numbers, dtype)
    assert rows.dtype == dtype and rows.shape[:2] == (50, 4)
    back = detach(rows, 2, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(back, (x.float(), *numbers), strict=True))


def test_rows_travel_in_comm_dtype_and_are_added_in_float32() -> None:
    x, y = random_rows(ALL_TO_ONE, torch.float32, 3)
    sent: list[torch.dtype] = []

    def note(rows: Tensor, *rest: Any) -> Tensor:
        sent.append(rows.dtype)
        return all_to_all(rows, *rest)

    def both_ways(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        plan, options = plan_for(ALL_TO_ONE, rank), {"comm_dtype": torch.bfloat16}
        mine, back = x[rank].clone().requires_grad_(), y[rank].clone().requires_grad_()
        cast, reduced = magi.group_cast(mine, plan, group, **options), magi.group_reduce(back, plan, group, **options)
        return cast, reduced, *torch.autograd.grad([cast, reduced], [mine, back], [y[rank], x[rank]])

    all_to_all = exchange_module.all_to_all
    with mock.patch.object(exchange_module, "all_to_all", note):
        results = run_ranks(both_ways, 4)
    assert sent == [torch.bfloat16] * 16
    x_sent, y_sent = ([t.bfloat16().float() for t in rows] for rows in (x, y))
    sums = sums_that_return(ALL_TO_ONE, [t.double() for t in y_sent], [t.double() for t in x])
    for rank, (cast, reduced, dx, dy) in enumerate(results):
        assert cast.dtype == reduced.dtype == dx.dtype == dy.dtype == torch.float32
        assert torch.equal(cast, rows_that_arrive(ALL_TO_ONE, x_sent, rank)) and torch.equal(dy, cast)
        assert_close_to_truth(reduced, sums[rank], sums[rank].float())
        assert torch.equal(dx, reduced)


def test_reduce_dtype_float64_loses_nothing() -> None:
    """1e8 + 1 - 1e8, from three ranks."""

    def on_rank(rank: int, group: dist.ProcessGroup, dtype: torch.dtype | None) -> float:
        plan = CommPlan.from_splits([[(0, 1)] if rank == 0 else []] * 3, [1, 0, 0], 1, rank)
        row = torch.tensor([[1e8, 1.0, -1e8][rank]])
        return float(magi.group_reduce(row, plan, group, reduce_dtype=dtype).sum())

    assert run_ranks(on_rank, 3, args=(torch.float64,)) == [1.0, 0.0, 0.0]
    assert run_ranks(on_rank, 3, args=(None,)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_copy_keeps_its_bits(dtype: torch.dtype) -> None:
    """Its lse, too, which travels beside rows of bfloat16; and far-apart lse do not overflow."""
    lse = torch.tensor([[1e4, -1e4], [torch.pi, -torch.inf], [1e-3, 88.123456]])
    out = torch.randn(3, 2, 4).masked_fill(lse.isinf()[..., None], 0).to(dtype)

    def on_rank(rank: int, group: dist.ProcessGroup, copies: int) -> tuple[Tensor, Tensor]:
        plan = CommPlan.from_splits([[(0, 3)] if rank == 0 else []] * copies, [3] + [0] * (copies - 1), 3, rank)
        theirs = (out, lse) if rank == 0 else (torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf))
        return magi.group_reduce(theirs, plan, group, "lse")

    for copies in (1, 2):
        merged = run_ranks(on_rank, copies, args=(copies,))[0]
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)


def test_key_and_value_travel_in_one_exchange() -> None:
    rng = random.Random(5)
    exchange = random_exchange(rng, 3)
    x, y = random_rows(exchange, torch.float64, 5)
    sizes: list[list[int]] = []

    def note(rows: Tensor, *rest: Any) -> Tensor:
        sizes.append(list(rows.shape[1:]))
        return all_to_all(rows, *rest)

    def on_rank(rank: int, group: dist.ProcessGroup) -> None:
        plan = plan_for(exchange, rank)
        k, v = x[rank].clone().requires_grad_(), x[rank][:, 0, 0].clone().requires_grad_()
        dk, dv = y[rank], y[rank][:, 1, 1]
        cast = magi.group_cast((k, v), plan, group)
        grads = torch.autograd.grad(cast, (k, v), (dk, dv))
        for op in ("sum", "avg"):
            into = (torch.ones_like(k), torch.ones_like(v))
            reduced = magi.group_reduce((dk, dv), plan, group, op, into=[t.detach() for t in into])
            for a, rows, before in zip(reduced, (dk, dv), into, strict=True):
                assert torch.equal(a, magi.group_reduce(rows, plan, group, op, into=before.detach()))
        assert all(torch.equal(a, magi.group_cast(b.detach(), plan, group)) for a, b in zip(cast, (k, v), strict=True))
        assert all(torch.equal(a, magi.group_reduce(b, plan, group)) for a, b in zip(grads, (dk, dv), strict=True))

    all_to_all = exchange_module.all_to_all
    with mock.patch.object(exchange_module, "all_to_all", note):
        run_ranks(on_rank, 3)
    # Packed: 6 numbers of k and one of v, forward and backward; two reductions. Then each again, alone.
    together, alone = sizes.count([7]), sizes.count([2, 3]) + sizes.count([])
    assert (together, alone) == (3 * 4, 3 * 8) and len(sizes) == together + alone


@pytest.mark.parametrize("op", ["sum", "avg", "lse"])
def test_c08_reductions_without_rows(op: str) -> None:
    """Rank 1 holds no rows, rank 2 has no copies, and nobody has either: with processes."""
    for exchange in (
        ([3, 0, 3], [[[(0, 3)], [(1, 2)], []], [[], [], []], [[(0, 1)], [], []]]),
        ([0, 0, 0], [[[]] * 3] * 3),
    ):
        step = random_step(exchange, op, op == "avg", 1, torch.float64)
        truth = reduce_in_one_process(exchange, step, torch.float64)
        for found, wanted in zip(run_ranks(reduce_on_rank, 3, "processes", (exchange, step)), truth, strict=True):
            for a, b in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
                assert_close_to_truth(a, b, None)


def compiled_exchanges(rank: int, group: dist.ProcessGroup, exchanges: list[Exchange]) -> int:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._inductor.config.compile_threads = 1
    counter = CompileCounterWithBackend("inductor")

    def fn(x: Tensor, plan: CommPlan) -> Tensor:
        arrived, again = magi.group_cast((x.sin(), x), plan, group, comm_dtype=torch.bfloat16)
        mean = magi.group_reduce(arrived * 2, plan, group, "avg", into=x.cos())
        out = magi.group_reduce((again[:, None], again.sum(1, keepdim=True)), plan, group, "lse")
        return mean + out[0][:, 0] + out[1].exp()

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
X, OUT, LSE = torch.zeros(2, 3), torch.zeros(2, 1, 3), torch.zeros(2, 1)


def reduce(group: dist.ProcessGroup, x: Any, **options: Any) -> Any:
    return magi.group_reduce(x, PLAN, group, **options)


REFUSALS: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "comm_plan must be a CommPlan, got NoneType", lambda group: magi.group_cast(X, None, group)),
    (TypeError, "group must be a ProcessGroup", lambda group: magi.group_cast(X, PLAN, 3)),
    (ValueError, "x must have 2 rows as the plan says, got 1", lambda group: magi.group_cast(X[:1], PLAN, group)),
    (ValueError, "x must have 2 rows as the plan says, got 1", lambda group: magi.group_reduce(X[:1], PLAN, group)),
    (ValueError, "op must be 'sum', 'avg' or 'lse', got 'mean'", lambda group: reduce(group, X, op="mean")),
    (ValueError, r"x must be the pair \(out, lse\) for op='lse', got one tensor", lambda g: reduce(g, X, op="lse")),
    (ValueError, r"the pair \(out, lse\) .* got 3 tensors", lambda group: reduce(group, [X] * 3, op="lse")),
    (ValueError, r"out and lse must have shapes .* got \[2, 3\] and \[2, 3\]", lambda g: reduce(g, [X, X], op="lse")),
    (
        TypeError,
        "lse float32 or float64, got .*float32 and .*float16",
        lambda g: reduce(g, [OUT, LSE.half()], op="lse"),
    ),
    (
        TypeError,
        "comm_dtype must be torch.bfloat16 or wider for op='lse'",
        lambda group: reduce(group, [OUT, LSE], op="lse", comm_dtype=torch.float16),
    ),
    (TypeError, "x must be a tensor or several, got ndarray", lambda group: magi.group_cast(X.numpy(), PLAN, group)),
    (ValueError, "x must have rows, got a tensor without", lambda group: magi.group_cast(X.sum(), PLAN, group)),
    (ValueError, "x must be a tensor or several, got none", lambda group: magi.group_cast([], PLAN, group)),
    (TypeError, "must have one dtype, got .*float32 and .*float64", lambda group: reduce(group, [X, X.double()])),
    (ValueError, "must have as many rows, got 2 and 1", lambda group: magi.group_cast([X, X[:1]], PLAN, group)),
    (TypeError, "x must be floating point, got torch.int64", lambda group: reduce(group, X.long())),
    (
        TypeError,
        "comm_dtype must be a floating point dtype, .* got torch.bfloat16 for torch.int64",
        lambda group: magi.group_cast(X.long(), PLAN, group, comm_dtype=torch.bfloat16),
    ),
    (TypeError, "comm_dtype must be .* got torch.int8", lambda group: reduce(group, X, comm_dtype=torch.int8)),
    (
        TypeError,
        "reduce_dtype must be torch.float32 or torch.float64, got torch.bfloat16",
        lambda group: reduce(group, X, reduce_dtype=torch.bfloat16),
    ),
    (ValueError, "into must be one tensor as x is, got 1 tensors", lambda group: reduce(group, X, into=[X])),
    (ValueError, "into must be 2 tensors as x is, got one tensor", lambda group: reduce(group, [X, X], into=X)),
    (ValueError, "into must have 2 rows as the plan says, got 3", lambda g: reduce(g, X, into=torch.zeros(3, 3))),
    (ValueError, r"into must have shape \[2, 3\], got \[2\]", lambda group: reduce(group, X, into=torch.zeros(2))),
    (TypeError, "into must be floating point, got torch.int64", lambda group: reduce(group, X, into=X.long())),
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


def test_second_derivatives_are_refused() -> None:
    """They were None or wrong, with a warning of torch's."""

    def on_rank(rank: int, group: dist.ProcessGroup) -> None:
        plan = magi.make_attn_plan(magi.masks.causal(2), 1, 1, 8, cp_size=1)
        functions: list[Callable[[Tensor], Tensor]] = [
            lambda x: magi.group_cast(x, PLAN, group),
            lambda x: magi.group_reduce(x, PLAN, group),
            lambda x: magi.group_reduce((x[..., None], x), PLAN, group, "lse")[0],
            lambda x: magi.dispatch(x, plan),
        ]
        for function in functions:
            x = X.clone().requires_grad_()
            (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            assert first.shape == x.shape  # of a gradient that depends on nothing
            with pytest.raises(NotImplementedError, match="no second derivatives; call backward with create_graph=F"):
                torch.autograd.grad(function(x).square().sum(), x, create_graph=True)

    run_ranks(on_rank, 1)
