"""Exchanges that attention hides: the order of generated code, its cost model, and that nothing can deadlock.

The order is read from the code that Inductor writes for a rank of a fake group, which needs neither the other ranks
nor a C++ compiler.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import async_compile, scheduler
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import torch_magi as magi
from torch_magi import AttnPlan, CommPlan, PlanConfig, masks
from torch_magi.comm import exchange
from torch_magi.comm.exchange import start_cast, wait
from torch_magi.comm.lowerings import ESTIMATED_ROWS, NVLINK, register
from torch_magi.testing import run_ranks

WORLD = 4
WIDTH, HEADS, HEAD_DIM = 32, (4, 2, 2), 8


def make_plan(
    rank: int, world: int = WORLD, degree: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> AttnPlan:
    """Return a plan in which the first rank receives nothing, and each rank more than the one before."""
    config = PlanConfig(chunk_size=16, dispatcher="sequential", overlap_degree=degree, **options)
    mask = masks.causal(64 * world)
    return magi.make_attn_plan(
        mask, HEADS[0], HEADS[1], HEAD_DIM, dtype=dtype, cp_size=world, cp_rank=rank, config=config
    )


class Attention(nn.Module):
    """Projections, the queries' first, and attention over all ranks."""

    def __init__(self, group: dist.ProcessGroup | DeviceMesh) -> None:
        super().__init__()
        self.group = group
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, h * HEAD_DIM, bias=False) for h in HEADS)

    def forward(self, x: Tensor, plan: AttnPlan) -> Tensor:
        q, k, v = (to(x).unflatten(1, (-1, HEAD_DIM)) for to in (self.to_q, self.to_k, self.to_v))
        q, k = rotate(q, plan_angles(x)), rotate(k, plan_angles(x))
        return magi.context_parallel_attn(q, k, v, plan, self.group).flatten(1)


def plan_angles(x: Tensor) -> Tensor:
    return x[:, None, : HEAD_DIM // 2].detach()  # any angles will do


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(group)
        self.to_out = nn.Linear(HEADS[0] * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, plan: AttnPlan) -> Tensor:
        x = x + self.to_out(self.attention(self.norm(x), plan))
        return x + self.down(F.silu(self.up(self.norm_mlp(x))))


# --- order of the operators in the generated code -----------------------------------------------------------

SHORT = {
    "torch_magi.group_cast_all_to_all": "cast",
    "torch_magi.group_reduce_all_to_all": "reduce",
    "_c10d_functional.wait_tensor": "wait",
    "torch_magi.flex_attn_fwd": "ATTENTION",
    "torch_magi.flex_attn_bwd": "ATTENTION",
    "torch_magi.add_returned": "add",
}
CALL = re.compile(r"(?:= |^\s*)torch\.ops\.((?:torch_magi|_c10d_functional)\.\w+)|extern_kernels\.(mm|addmm)\(")


def order_of_operators(code: str) -> str:
    """Return exchanges, waits, attention and matrix products (mm) in the order of generated code."""
    calls = [match for line in code[code.index("def call") :].splitlines() if (match := CALL.search(line))]
    names = ["mm" if match.group(2) else SHORT.get(match.group(1), match.group(1)) for match in calls]
    return textwrap.fill(" ".join(name for name in names if name != "torch_magi.plan_size"), 100)


@contextlib.contextmanager
def fake_group(rank: int) -> Iterator[dist.ProcessGroup]:
    """Be one of `WORLD` ranks of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def generated_orders(
    rank: int, options: dict[str, Any] | None, degree: int = 2, layers: int = 0, nodes: int = 0
) -> tuple[str, str]:
    """Return the order of operators of forward and backward: attention with its projections, or whole blocks.

    With `nodes`, exchanges have two steps.
    """

    def nothing(*args: Any, **kwargs: Any) -> Callable[..., None]:
        return lambda *args: None

    with (
        fake_group(rank) as group,
        mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", nothing),
        # the fake group refuses to send nothing where others send something
        mock.patch.object(exchange, "all_to_all", lambda x, rows, *rest: x.new_zeros((rows, *x.shape[1:]))),
        mock.patch.object(exchange, "two_all_to_alls", lambda x, rows, *rest: x.new_zeros((rows, *x.shape[1:]))),
        inductor_config.patch(force_disable_caches=True, compile_threads=1),
    ):
        ranks_per_node = WORLD // nodes if nodes else None
        plan = make_plan(rank, degree=degree, ranks_per_node=ranks_per_node)
        where = init_device_mesh("cpu", (nodes, WORLD // nodes)) if nodes else group
        blocks = [Block(group) for _ in range(layers)] if layers else [Attention(where)]

        def model(x: Tensor) -> Tensor:
            for block in blocks:
                x = block(x, plan)
            return x

        x = torch.zeros(plan.num_tokens_local, WIDTH, requires_grad=True)
        compiled = torch.compile(model, fullgraph=True, options=options)
        _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
        forward, backward = map(order_of_operators, codes)
        return forward, backward


@pytest.mark.unpoisoned  # Inductor skips the passes where algorithms have to be deterministic
class OperatorOrder(expecttest.TestCase):
    def same_on_all_ranks(self, options: dict[str, Any] | None) -> tuple[str, str]:
        """Also where splits differ, and the first rank receives nothing."""
        orders = {generated_orders(rank, options) for rank in range(WORLD)}
        self.assertEqual(len(orders), 1)
        return orders.pop()

    def test_c48_by_default_the_order_is_that_of_the_program(self) -> None:
        """Every exchange starts before the local attention, and is waited for where its rows are used."""
        forward, backward = self.same_on_all_ranks(None)
        self.assertExpectedInline(forward, """mm mm mm cast cast ATTENTION wait ATTENTION wait ATTENTION""")
        self.assertExpectedInline(
            backward,
            """cast cast ATTENTION wait ATTENTION reduce wait ATTENTION reduce wait add wait add mm mm mm mm mm mm""",
        )

    def test_c48_with_the_options_exchanges_start_before_the_queries_are_projected(self) -> None:
        """And gradients of weights are computed while the last keys' gradients travel."""
        forward, backward = self.same_on_all_ranks(magi.compile_options())
        self.assertExpectedInline(forward, """mm mm cast cast mm ATTENTION wait ATTENTION wait ATTENTION""")
        self.assertExpectedInline(
            backward,
            """cast cast ATTENTION wait ATTENTION reduce wait ATTENTION reduce mm wait add wait add mm mm mm mm mm""",
        )

    def test_c48_three_exchanges(self) -> None:
        forward, backward = generated_orders(1, magi.compile_options(), degree=3)
        self.assertExpectedInline(
            forward, """mm mm cast cast cast mm ATTENTION wait ATTENTION wait ATTENTION wait ATTENTION"""
        )
        self.assertExpectedInline(
            backward,
            """\
cast cast cast ATTENTION wait ATTENTION reduce wait ATTENTION reduce wait ATTENTION reduce mm wait
add wait add wait add mm mm mm mm mm""",
        )

    def test_exchanges_in_two_steps_are_ordered_as_others(self) -> None:
        for options in (None, magi.compile_options()):
            self.assertEqual(generated_orders(1, options, nodes=2), generated_orders(1, options))

    def test_whole_blocks_by_default(self) -> None:
        forward, backward = generated_orders(1, None, layers=2)
        self.assertExpectedInline(
            forward,
            """\
mm mm mm cast cast ATTENTION wait ATTENTION wait ATTENTION mm mm mm mm mm mm cast cast ATTENTION
wait ATTENTION wait ATTENTION mm mm mm""",
        )
        self.assertExpectedInline(
            backward,
            """\
mm mm mm mm mm mm cast cast ATTENTION wait ATTENTION reduce wait ATTENTION reduce wait add wait add
mm mm mm mm mm mm mm mm mm mm mm cast cast ATTENTION wait ATTENTION reduce wait ATTENTION reduce
wait add wait add mm mm mm mm mm mm mm""",
        )

    def test_whole_blocks_with_the_options(self) -> None:
        """Weights' gradients of a layer run in the waits of the next one, not at the end of the backward."""
        forward, backward = generated_orders(1, magi.compile_options(), layers=2)
        self.assertExpectedInline(
            forward,
            """\
mm mm cast cast mm ATTENTION wait ATTENTION wait ATTENTION mm mm mm mm mm cast cast mm ATTENTION
wait ATTENTION wait ATTENTION mm mm mm""",
        )
        self.assertExpectedInline(
            backward,
            """\
mm mm mm cast cast ATTENTION mm mm mm wait ATTENTION reduce wait ATTENTION reduce mm wait add wait
add mm mm mm mm mm mm cast cast ATTENTION mm mm mm mm mm wait ATTENTION reduce wait ATTENTION reduce
mm wait add wait add mm mm mm mm mm""",
        )


# --- cost -------------------------------------------------------------------------------------------------------------


def test_exchanges_are_estimated_alike_on_all_ranks() -> None:
    """Torch's own estimate reads the layout of every input, which a plan has not."""
    register()
    estimate = vars(scheduler)["estimate_nccl_collective_runtime"]
    found = []
    for rows in (0, 5, 100_000):
        node = mock.Mock(op_overload=torch.ops.torch_magi.group_cast_all_to_all.default)
        node.constant_args = ("group",)
        node.inputs = [mock.Mock(layout=mock.Mock(size=[rows, 2, 8], dtype=torch.float32)), mock.Mock(spec=[])]
        with mock.patch("torch._inductor.comm_analysis.get_collective_group_size", return_value=8):
            found.append(estimate(node))
    assert found == [ESTIMATED_ROWS * 64 / NVLINK / 1e6] * 3  # 64 bytes a row


def test_flops_are_those_of_the_visible_pairs() -> None:
    mask = masks.document([0, 10, 64])
    q, k, v = (torch.randn(64, h, d, requires_grad=True) for h, d in ((4, 16), (2, 16), (2, 8)))
    plan = magi.make_attn_plan(mask, 4, 2, 16, head_dim_v=8, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        magi.flex_flash_attn(q, k, v, plan).sum().backward()
    area = 10 * 11 // 2 + 54 * 55 // 2
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {
        "torch_magi.flex_attn_fwd": 2 * area * 4 * (16 + 8),
        "torch_magi.flex_attn_bwd": 2 * area * 4 * (3 * 16 + 2 * 8),
    }


# --- ranks ------------------------------------------------------------------------------------------------------------


def opposite_orders(rank: int, group: dist.ProcessGroup) -> list[float]:
    """Exchange on two groups; even ranks start the first one first, odd ranks the second."""
    other = dist.new_group([0, 1])
    plan = CommPlan.from_splits([[(0, 2)], [(0, 2)]], [2, 2], 2, rank)

    def exchange_both(x: Tensor) -> Tensor:
        names = [group.group_name, other.group_name][:: 1 if rank % 2 == 0 else -1]
        started = {name: start_cast(x * (1 + i), plan, 0, 4, name) for i, name in enumerate(names)}
        return sum(wait(started[name]) for name in sorted(started))

    found = []
    for options in (None, magi.compile_options()):
        compiled = torch.compile(exchange_both, fullgraph=True, options=options)
        found.append(float(compiled(torch.full((2, 3), 1.0 + rank)).sum()))
    return found


def test_two_groups_in_opposite_orders_finish() -> None:
    """On one group each rank keeps its order; between groups there is none to keep."""
    # Each rank receives x of both ranks over both groups, times 1 or 2 as the sender counted them.
    assert run_ranks(opposite_orders, 2, "processes", timeout=60) == [[54.0] * 2] * 2


def checkpointed(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[list[Tensor], int]]:
    """Return gradients and the number of exchanges of a step, for each way of keeping activations."""
    plan = make_plan(rank, world=2)
    torch.manual_seed(0)
    block = Block(group)
    started = 0

    def count(*args: Any) -> Tensor:
        nonlocal started
        started += 1
        return all_to_all(*args)

    def keep_attention() -> Any:
        kept = [torch.ops.torch_magi.context_parallel_attn.default]

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "all kept": lambda x: block(x, plan),
        "nothing kept": lambda x: checkpoint(block, x, plan, use_reentrant=False),
        "attention kept": lambda x: checkpoint(block, x, plan, use_reentrant=False, context_fn=keep_attention),
    }
    all_to_all, found = exchange.all_to_all, {}
    with mock.patch.object(exchange, "all_to_all", count):
        for name, step in ways.items():
            started = 0
            x = torch.randn(plan.num_tokens_local, WIDTH, generator=torch.Generator().manual_seed(rank))
            x.requires_grad_()
            gradients = torch.autograd.grad(step(x).sum(), [x, *block.parameters()])
            found[name] = (list(gradients), started)
    return found


def test_checkpointing() -> None:
    """A policy that keeps attention by its name fetches no keys again for the forward."""
    for found in run_ranks(checkpointed, 2, "processes", timeout=60):
        wanted, exchanges = found["all kept"]
        assert exchanges == 6  # two stages: keys forward, keys backward, gradients
        for name, expected in (("nothing kept", 8), ("attention kept", 6)):
            gradients, exchanges = found[name]
            assert exchanges == expected, name
            assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True)), name
