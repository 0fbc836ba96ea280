"""Exchanges in two steps over a mesh of nodes: the same rows as in one step, with each row once between two nodes."""

from __future__ import annotations

import pickle
import random
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_magi as magi
from torch_magi import AttnPlan, CommPlan, PlanConfig, masks
from torch_magi.comm import exchange as exchange_module
from torch_magi.plan import hierarchical_comm_plan
from torch_magi.testing import (
    assert_close_to_truth,
    check_attention,
    context_parallel_runner,
    named_masks,
    random_inputs,
    random_masks,
    run_ranks,
)

MESHES = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 4), (4, 2)]  # nodes, ranks per node
SQUARE = {name: mask for name, mask in named_masks().items() if mask.shape[0] == mask.shape[1]}
# What every rank sends to every rank: ranges of its own rows, by [source][target].
Sends = list[list[list[tuple[int, int]]]]


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("node", "place"))


def random_sends(rng: random.Random, world: int) -> tuple[list[int], Sends]:
    """Return rows of every rank, and ranges with overlaps, repeats and gaps; ranks without rows."""
    num_rows = [rng.choice([0, 1, rng.randint(2, 9)]) for _ in range(world)]

    def ranges(n: int) -> list[tuple[int, int]]:
        pairs = [sorted((rng.randint(0, n), rng.randint(0, n))) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        return [(a, b) for a, b in pairs]

    return num_rows, [[ranges(n) for _ in range(world)] for n in num_rows]


def flat_plan(num_rows: list[int], sends: Sends, rank: int) -> CommPlan:
    received = [sum(b - a for a, b in to[rank]) for to in sends]
    return CommPlan.from_splits(sends[rank], received, num_rows[rank], rank)


def order_of_arrival(flat: CommPlan, per_node: int) -> Tensor:
    """Return the rows of a flat exchange in the order in which two steps bring them: by place, then by node."""
    begins = [sum(flat.output_split_sizes[:r]) for r in range(flat.size)]
    ranks = sorted(range(flat.size), key=lambda r: (r % per_node, r // per_node))
    rows = [torch.arange(n) + begins[r] for r in ranks if (n := flat.output_split_sizes[r])]
    return torch.cat([torch.zeros(0, dtype=torch.long), *rows])


def rows_between_nodes(sends: Sends, per_node: int) -> tuple[int, int]:
    """Return how many rows travel between nodes in two steps and in one; from the definition, as sets."""
    once: set[tuple[int, int, int]] = set()
    each = 0
    for source, to in enumerate(sends):
        for target, ranges in enumerate(to):
            if source // per_node != target // per_node:
                rows = [row for a, b in ranges for row in range(a, b)]
                once |= {(source, row, target // per_node) for row in rows}
                each += len(rows)
    return len(once), each


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_plans_of_random_exchanges(shape: tuple[int, int], seed: int) -> None:
    """Splits fit together, and each row comes to a node once."""
    rng, (nodes, per_node) = random.Random(seed), shape
    world = nodes * per_node
    for _ in range(20):
        num_rows, sends = random_sends(rng, world)
        print(f"{num_rows}, {sends}")
        plans = [hierarchical_comm_plan(sends, num_rows, r, per_node) for r in range(world)]
        flat = [flat_plan(num_rows, sends, r) for r in range(world)]
        for r, plan in enumerate(plans):
            assert plan.intra is not None and plan.size == world and plan.num_rows == num_rows[r]
            assert plan.num_received == flat[r].num_received
            assert torch.equal(plan.num_copies_on(torch.device("cpu")), flat[r].num_copies_on(torch.device("cpu")))
            node, place = divmod(r, per_node)
            for n in range(nodes):
                assert plan.input_split_sizes[n] == plans[n * per_node + place].output_split_sizes[node]
            for p in range(per_node):
                assert plan.intra.input_split_sizes[p] == plans[node * per_node + p].intra.output_split_sizes[place]
        assert sum(plan.rows_from_others for plan in plans) == rows_between_nodes(sends, per_node)[0]


def test_a_plan_in_words() -> None:
    """Rank 0 of two nodes of two ranks sends its row 0 to all ranks: two rows travel instead of three."""
    sends: Sends = [[[(0, 1)], [(0, 1)], [(0, 1)], [(0, 1)]], *[[[], [], [], []]] * 3]
    plans = [hierarchical_comm_plan(sends, [2, 0, 0, 0], r, 2) for r in range(4)]
    assert str(plans[0]) == (
        "CommPlan(rank 0, 2 rows: sends [1, 1], receives [1, 0]; "
        "within its node: CommPlan(rank 0, 1 rows: sends [1, 1], receives [1, 0]))"
    )
    assert str(plans[2]) == (
        "CommPlan(rank 2, 0 rows: sends [0, 0], receives [1, 0]; "
        "within its node: CommPlan(rank 0, 1 rows: sends [1, 1], receives [1, 0]))"
    )
    again = pickle.loads(pickle.dumps(plans[0]))
    assert str(again) == str(plans[0]) and again.num_copies_on(torch.device("cpu")).tolist() == [4, 0]


@pytest.mark.parametrize("degree", range(4))
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (3, 1)], ids=str)
def test_rows_between_nodes_of_attention(shape: tuple[int, int], degree: int, seed: int) -> None:
    """Each key comes once to every other node whose rows see it, whatever the stages; counted on dense masks."""
    nodes, per_node = shape
    world, fewer = nodes * per_node, 0
    for mask in random_masks(20, seed, square=True):
        config = PlanConfig(chunk_size=3, overlap_degree=degree, ranks_per_node=per_node)
        plans = [magi.make_attn_plan(mask, 2, 1, 8, cp_size=world, cp_rank=r, config=config) for r in range(world)]
        held, dense = [p.position_ids for p in plans], mask.to_dense()
        expected = in_one_step = 0
        for r in range(world):
            others = torch.cat([held[s] for s in range(world) if s // per_node != r // per_node])
            in_one_step += int(dense[held[r]][:, others].any(0).sum())
            if r % per_node == 0:
                expected += int(dense[torch.cat(held[r : r + per_node])][:, others].any(0).sum())
        exchanges = [s.comm for p in plans for s in p.stages if s.comm is not None]
        assert sum(c.rows_from_others for c in exchanges) == expected == plans[0].comm_rows_between_nodes
        fewer += expected < in_one_step
    assert fewer > 0 or per_node == 1


def test_str_of_an_attention_plan() -> None:
    config = PlanConfig(dispatcher="sequential", ranks_per_node=3)
    plan = magi.make_attn_plan(masks.causal(36), 2, 1, 8, cp_size=6, cp_rank=5, config=config)
    assert str(plan).splitlines()[3:] == [
        "  rows received per rank [0, 6, 12, 18, 24, 30], 2880 bytes in all",
        "  nodes of 3 ranks, 18 rows between nodes",  # instead of 54
        "  stage 0: 6 x 6, area 21, local keys",
        "  stage 1: 6 x 30, area 180, rows from other nodes: 6, then from ranks of the node: 24",
    ]
    other = plan.with_mask(masks.full(36, 36))
    assert other.comm_rows_between_nodes == 36 and other.stages[1].comm is not None
    assert pickle.loads(pickle.dumps(other)).comm_rows_between_nodes == 36


# --- exchanges --------------------------------------------------------------------------------------------------------


def flat_and_in_two_steps(
    rank: int, group: dist.ProcessGroup, shape: tuple[int, int], exchange: tuple[list[int], Sends], seed: int
) -> None:
    """Compare group_cast, and each group_reduce, with the same in one step; gradients, too."""
    per_node, mesh, (num_rows, sends) = shape[1], mesh_of(shape), exchange
    flat, plan = flat_plan(num_rows, sends, rank), hierarchical_comm_plan(sends, num_rows, rank, per_node)
    order = order_of_arrival(flat, per_node)
    gen = torch.Generator().manual_seed(seed + rank)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    x, dy = some(flat.num_rows, 2, 3).requires_grad_(), some(flat.num_received, 2, 3)
    wanted = magi.group_cast(x, flat, group)
    found = magi.group_cast(x, plan, mesh)
    assert torch.equal(found, wanted[order])
    (dx,) = torch.autograd.grad(wanted, x, dy)
    assert_close_to_truth(torch.autograd.grad(found, x, dy[order])[0], dx, None)

    out, lse = some(flat.num_received, 2, 3), 5 * some(flat.num_received, 2)
    lse[::5, 0], out[::5, 0] = -torch.inf, torch.nan
    gradients = some(flat.num_rows, 2, 3), some(flat.num_rows, 2)
    for op in ("sum", "avg", "lse"):
        results = []
        for reordered, its_plan, where in ((torch.arange(len(order)), flat, group), (order, plan, mesh)):
            copies = [(out if op == "lse" else dy)[reordered].requires_grad_(), lse[reordered].requires_grad_()]
            args: Any = copies if op == "lse" else copies[0]
            got = magi.group_reduce(args, its_plan, where, op)
            got = list(got) if op == "lse" else [got]
            grads = torch.autograd.grad(got, copies[: len(got)], gradients[: len(got)])
            back = torch.argsort(reordered)
            results.append([t.detach() for t in got] + [g[back] for g in grads])
        for a, b in zip(results[1], results[0], strict=True):
            assert_close_to_truth(a, b, None)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_random_exchanges(shape: tuple[int, int], seed: int) -> None:
    rng = random.Random(seed)
    for i in range(6):
        exchange = random_sends(rng, shape[0] * shape[1])
        print(f"exchange {i} of seed {seed}: {exchange}")
        run_ranks(flat_and_in_two_steps, shape[0] * shape[1], args=(shape, exchange, i))


@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
def test_processes(shape: tuple[int, int], seed: int) -> None:
    exchange = random_sends(random.Random(seed), shape[0] * shape[1])
    print(exchange)
    run_ranks(flat_and_in_two_steps, shape[0] * shape[1], "processes", (shape, exchange, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_were_counted_are_those_that_travel(dtype: torch.dtype, seed: int) -> None:
    """Of casts and reductions, by level: bytes between nodes are those of each row once."""
    per_node, world = 4, 8
    num_rows, sends = random_sends(random.Random(seed), world)
    num_rows = [max(n, 4) for n in num_rows]
    sends[0] = [[(0, 4)]] * world  # four rows for every rank: of one step 16 copies reach the other node, here 4
    plans = [hierarchical_comm_plan(sends, num_rows, r, per_node) for r in range(world)]
    sent: list[tuple[int, int]] = []  # ranks of the group of an exchange, bytes to others of it

    def note(send: Tensor, out: Tensor, step: exchange_module.Step) -> Any:
        group = exchange_module.resolve_group(step.group_name)
        rows = sum(step.sends) - step.sends[group.rank()]
        sent.append((group.size(), rows * send[:1].numel() * send.element_size()))
        return issue(send, out, step)

    def on_rank(rank: int, group: dist.ProcessGroup) -> None:
        mesh = mesh_of((2, per_node))
        x = torch.randn(num_rows[rank], 5, dtype=torch.float32)
        arrived = magi.group_cast(x, plans[rank], mesh, comm_dtype=dtype)
        magi.group_reduce(arrived, plans[rank], mesh, comm_dtype=dtype)

    issue = exchange_module._issue
    with mock.patch.object(exchange_module, "_issue", note):
        run_ranks(on_rank, world)
    once, each = rows_between_nodes(sends, per_node)
    row, within = 5 * dtype.itemsize, sum(plan.intra.rows_from_others for plan in plans if plan.intra)
    assert once < each
    assert sum(b for size, b in sent if size == 2) == 2 * once * row
    assert sum(b for size, b in sent if size == 4) == 2 * within * row
    assert len(sent) == 4 * world  # exchanges: two each for a cast and a reduction


def test_nodes_add_in_float32_and_round_once() -> None:
    """256 + 1 + 1 + 1 from the ranks of a node: added one after the other in bfloat16, it would stay 256."""
    sends: Sends = [[[] for _ in range(8)] for _ in range(8)]
    sends[0] = [[]] * 4 + [[(0, 1)]] * 4

    def on_rank(rank: int, group: dist.ProcessGroup) -> list[float]:
        plan = hierarchical_comm_plan(sends, [1] * 8, rank, 4)
        row = torch.full((plan.num_received, 1), 256.0 if rank == 4 else 1.0, dtype=torch.bfloat16)
        return magi.group_reduce(row, plan, mesh_of((2, 4))).flatten().tolist()

    assert run_ranks(on_rank, 8)[0] == [260.0]  # 259, rounded to bfloat16


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("name", SQUARE)
def test_attention(name: str, shape: tuple[int, int]) -> None:
    x = random_inputs(SQUARE[name], dtype=torch.float64, seed=1, num_heads_q=4, num_heads_kv=2)
    for degree in (0, 1, 3):
        config = PlanConfig(chunk_size=5, overlap_degree=degree, ranks_per_node=shape[1])
        runner = context_parallel_runner(shape[0] * shape[1], config)
        check_attention(runner, x.query, x.key, x.value, SQUARE[name], dout=x.dout, dlse=x.dlse)


def test_attention_of_processes(seed: int) -> None:
    mask = SQUARE["document"]
    x = random_inputs(mask, dtype=torch.float64, seed=seed, num_heads_q=4, num_heads_kv=2)
    runner = context_parallel_runner(4, PlanConfig(chunk_size=2, overlap_degree=2, ranks_per_node=2), "processes")
    check_attention(runner, x.query, x.key, x.value, mask, dout=x.dout, dlse=x.dlse)


def compiled_attention(rank: int, group: dist.ProcessGroup, cu_seqlens: list[list[int]]) -> int:
    """Return how often a function compiles that is called with several plans."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    mesh = mesh_of((2, 2))

    def fn(x: Tensor, plan: AttnPlan) -> Tensor:
        q, k, v = x.sin().unflatten(1, (3, 2, 8)).unbind(1)
        return magi.context_parallel_attn(q, k, v, plan, mesh)

    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for i, cu in enumerate(cu_seqlens):
        plan = magi.make_attn_plan(
            masks.document(cu), 2, 2, 8, dtype=torch.float32, cp_size=4, cp_rank=rank,
            config=PlanConfig(chunk_size=4, overlap_degree=2, ranks_per_node=2),
        )  # fmt: skip
        x = torch.randn(plan.num_tokens_local, 48, generator=torch.Generator().manual_seed(i)).requires_grad_()
        results = []
        for f in (compiled, fn):
            out = f(x, plan)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    return counter.frame_count


def test_compiled_attention() -> None:
    cu_seqlens = [[0, 64], [0, 3, 30, 64], [0, 32, 64]]
    assert run_ranks(compiled_attention, 4, "processes", (cu_seqlens,), timeout=120) == [1] * 4


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals_across_ranks() -> None:
    sends: Sends = [[[(0, 1)]] * 4] * 4

    def on_rank(rank: int, group: dist.ProcessGroup) -> None:
        x, mesh = torch.ones(1, 2), mesh_of((2, 2))
        flat, plan = flat_plan([1] * 4, sends, rank), hierarchical_comm_plan(sends, [1] * 4, rank, 2)
        for its_plan, where, text in (
            (
                plan,
                group,
                "needs a DeviceMesh of shape (nodes, ranks_per_node), got the group",
            ),
            (flat, mesh, "one-dimensional for a plan without ranks_per_node, got a two-dimensional one"),
            (plan, mesh_of((4, 1)), f"the plan is for rank {rank} of a mesh of shape (2, 2)"),
            (hierarchical_comm_plan(sends, [1] * 4, 3 - rank, 2), mesh, f"got rank {rank} of one of shape (2, 2)"),
            (plan, init_device_mesh("cpu", (1, 2, 2)), "a DeviceMesh must be one-dimensional"),
        ):
            with pytest.raises(ValueError, match=re.escape(text)):
                magi.group_cast(x, its_plan, where)
            with pytest.raises(ValueError, match=re.escape(text)):
                magi.group_reduce(torch.ones(4, 2), its_plan, where)
        with pytest.raises(ValueError, match="a DeviceMesh must be one-dimensional"):
            config = PlanConfig(ranks_per_node=2)
            attn = magi.make_attn_plan(masks.causal(8), 1, 1, 8, cp_size=4, cp_rank=rank, config=config)
            magi.undispatch(torch.ones(2), attn, mesh)

    run_ranks(on_rank, 4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: hierarchical_comm_plan([[[]]], [1, 1], 0, 1),
            "send_rows must have 2 x 2 entries as num_rows, got [1]",
        ),
        (lambda: hierarchical_comm_plan([[[]] * 2] * 2, [1, 1], 2, 1), "rank must be in [0, 2), got 2"),
        (
            lambda: hierarchical_comm_plan([[[]] * 2] * 2, [1, 1], 0, 3),
            "ranks_per_node must divide the number of ranks, 2, got 3",
        ),
        (
            lambda: hierarchical_comm_plan([[[], []], [[(0, 2)], []]], [2, 1], 0, 1),
            "send_rows of rank 1 must lie in [0, 1] and not be reversed, got (0, 2)",
        ),
        (lambda: PlanConfig(ranks_per_node=0), "ranks_per_node must be positive, got 0"),
        (
            lambda: magi.make_attn_plan(masks.causal(8), 1, 1, 8, cp_size=4, config=PlanConfig(ranks_per_node=3)),
            "ranks_per_node must divide cp_size, 4, got 3",
        ),
    ],
)
def test_refusals(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()
