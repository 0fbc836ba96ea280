"""torch.compile: one graph, few compilations for many masks and lengths, and exchanges that attention hides."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_magi as magi
from torch_magi import AttnPlan, PlanConfig, masks
from torch_magi.masks import AttnMask
from torch_magi.testing import assert_close_to_truth, run_ranks

WIDTH, HEADS, HEAD_DIM = 32, (4, 2, 2), 8
# Inductor's passes that move the starts of exchanges up and their waits down (docs/compile.md).
OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}


def make_plan(mask: AttnMask, group: dist.ProcessGroup | None, rank: int, **config: Any) -> AttnPlan:
    world = 1 if group is None else group.size()
    chosen = PlanConfig(**config)
    return magi.make_attn_plan(
        mask, HEADS[0], HEADS[1], HEAD_DIM, dtype=torch.float64, cp_size=world, cp_rank=rank, config=chosen
    )


def make_weights(seed: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    made = [torch.randn(WIDTH, h * HEAD_DIM, generator=gen, dtype=torch.float64) / 6 for h in HEADS]
    return [w.requires_grad_() for w in made]


def projections(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [(x @ w).unflatten(1, (-1, HEAD_DIM)) for w in weights]


def make_step(group: dist.ProcessGroup | None) -> Callable[..., Tensor]:
    """Return the whole path of C45: dispatch, projections, attention, undispatch, loss."""

    def step(x: Tensor, weights: Sequence[Tensor], plan: AttnPlan) -> Tensor:
        local = magi.dispatch(x, plan)
        out = magi.context_parallel_attn(*projections(local, weights), plan, group)
        return magi.undispatch(out.flatten(1), plan, group).square().sum()

    return step


def compare(
    compiled: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    length: int,
    plan: AttnPlan,
    seed: int,
    unbacked: bool,
) -> None:
    """Take a step both ways and compare loss and gradients."""
    x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if unbacked:
        torch._dynamo.decorators.mark_unbacked(x, 0)
    results = []
    for fn in (compiled, eager):
        weights = make_weights(seed)
        loss = fn(x, weights, plan)
        results.append((loss, *torch.autograd.grad(loss, weights)))
    for a, b in zip(*results, strict=True):
        assert_close_to_truth(a, b, None)


def counting(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    return torch.compile(fn, fullgraph=True, backend=counter), counter


def many_masks(rank: int, group: dist.ProcessGroup, count: int) -> int:
    """Put random masks of many lengths through one compiled training step; return how often it compiled."""
    torch._inductor.config.compile_threads = 1
    eager = make_step(group)
    compiled, counter = counting(eager)
    rng = random.Random(0)
    for i in range(count):
        length = [1, 2, 3, 2000, 0][i] if i < 5 else rng.randint(1, 2000)
        ends = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 5)))
        mask = masks.document([0, *ends], total=length, causal=rng.random() < 0.5)
        if i == 7:
            mask = mask - mask  # nothing is visible
        config = {
            "chunk_size": rng.choice([None, 1, 64, 2000]),
            "dispatcher": rng.choice(["sequential", "head_tail", "min_heap"]),
            "overlap_degree": 2,
        }
        print(f"mask {i}: length {length}, documents {ends}, {config}")
        compare(compiled, eager, length, make_plan(mask, group, rank, **config), i, unbacked=True)
    return counter.frame_count


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 2.0}])
def test_all_sizes_and_numbers_may_be_symbols(options: dict[str, float]) -> None:
    plan = make_plan(masks.document([0, 3, 8], causal=True), None, 0)
    eager = magi.flex_flash_attn
    compiled = torch.compile(eager, dynamic=True, fullgraph=True, backend="aot_eager")
    gen = torch.Generator().manual_seed(0)
    qkv = [torch.randn(8, h, HEAD_DIM, generator=gen, dtype=torch.float64, requires_grad=True) for h in HEADS]
    outs = [attn(*qkv, plan, **options) for attn in (compiled, eager)]
    for a, b in zip(*[(out, *torch.autograd.grad(out.square().sum(), qkv)) for out in outs], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_new_masks_and_splits_do_not_recompile(world: int) -> None:
    compilations = run_ranks(many_masks, world, "processes", (40,), timeout=400)
    assert max(compilations) <= 2, compilations


def varying_lengths(rank: int, group: dist.ProcessGroup) -> int:
    torch._inductor.config.compile_threads = 1
    eager = make_step(group)
    compiled, counter = counting(eager)
    for i, length in enumerate([320, 256, 192, 128, 1000, 17]):
        compare(compiled, eager, length, make_plan(masks.causal(length), group, rank), i, unbacked=False)
    return counter.frame_count


def test_c45_c46_varying_lengths() -> None:
    """With torch.compile's default way of finding out which sizes change."""
    for compilations in run_ranks(varying_lengths, 2, "processes", timeout=300):
        assert 1 <= compilations <= 2


def test_c46_one_device() -> None:
    def attend(x: Tensor, weights: Sequence[Tensor], plan: AttnPlan) -> tuple[Tensor, Tensor]:
        qkv = projections(x, weights)
        out, aux = magi.flex_flash_attn(*qkv, plan, softcap=20.0, return_aux=magi.AuxRequest(lse=True))
        return out, aux.lse

    def loss_of(fn: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        # Outside the compiled function: Inductor's CPU code for sums depends on the length, and recompiles.
        def loss(*args: Any) -> Tensor:
            out, lse = fn(*args)
            return out.square().sum() + lse.sum()

        return loss

    torch._dynamo.reset()
    compiled, counter = counting(attend)
    for i, length in enumerate([320, 256, 192, 128, 1000, 17]):
        plan = make_plan(masks.causal(length), None, 0)
        compare(loss_of(compiled), loss_of(attend), length, plan, i, unbacked=False)
    assert 1 <= counter.frame_count <= 2


def test_other_overlap_degrees_recompile_and_are_right() -> None:
    """The number of stages is the one thing in a plan that shapes the graph."""
    for compilations in run_ranks(each_overlap_degree, 2, "processes", timeout=300):
        assert compilations == 3


def each_overlap_degree(rank: int, group: dist.ProcessGroup) -> int:
    torch._inductor.config.compile_threads = 1
    eager = make_step(group)
    compiled, counter = counting(eager)
    for degree in (0, 1, 3, 1, 0):
        plan = make_plan(masks.causal(48), group, rank, overlap_degree=degree, chunk_size=4)
        compare(compiled, eager, 48, plan, degree, unbacked=True)
    return counter.frame_count


# --- order of the operators in the generated code -----------------------------------------------------------

SHORT = {
    "group_cast_all_to_all": "cast",
    "group_reduce_all_to_all": "reduce",
    "wait_tensor": "wait",
    "flex_attn_fwd": "attention",
    "flex_attn_bwd": "attention",
    "add_returned": "add",
}


def order_of_operators(code: str) -> str:
    """Return the calls of our operators and the waits, in the order in which generated code makes them."""
    found = []
    for line in code[code.index("def call") :].splitlines():
        match = re.search(
            r"= torch\.ops\.(?:torch_magi|_c10d_functional)\.(\w+)|^\s*torch\.ops\.\w+\.(wait_tensor)", line
        )
        if match:
            name = match.group(1) or match.group(2)
            found.append(SHORT.get(name, name))
    return " ".join(name for name in found if name != "plan_size")


def two_remote_stages(rank: int, group: dist.ProcessGroup) -> list[str]:
    from torch._inductor.utils import run_and_get_code

    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    mask = masks.causal(64)
    plan = make_plan(mask, group, rank, chunk_size=4, overlap_degree=2)

    def attend(x: Tensor, weights: Sequence[Tensor], plan: AttnPlan) -> Tensor:
        return magi.context_parallel_attn(*projections(x, weights), plan, group).flatten(1)

    compiled = torch.compile(attend, fullgraph=True, options=OVERLAP)
    weights = make_weights(0)
    x = torch.randn(plan.num_tokens_local, WIDTH, dtype=torch.float64)

    def forward_and_backward() -> None:
        compiled(x, weights, plan).square().sum().backward()

    _, codes = run_and_get_code(forward_and_backward)
    return [order_of_operators(code) for code in codes]


class OperatorOrder(expecttest.TestCase):
    def test_c48_exchanges_start_before_the_local_attention(self) -> None:
        """Every exchange starts first; each wait stands just before the attention that needs its rows.

        Backward: the cast brings the keys again, the reduction sends their gradients home.
        """
        ranks = run_ranks(two_remote_stages, 2, "processes", timeout=300)
        assert ranks[0] == ranks[1], "ranks must issue collectives in one order"
        forward, backward = ranks[0]
        self.assertExpectedInline(forward, """cast cast attention wait attention wait attention""")
        self.assertExpectedInline(
            backward, """cast cast attention wait attention reduce wait attention reduce wait add wait add"""
        )


MASKS = {
    "document": lambda cu, matrix: masks.document(cu),
    "ids": lambda cu, matrix: masks.from_document_ids([1, 1, 0, 2, 2, 1, 0, 0], padding_id=0),
    "blocks": lambda cu, matrix: masks.block_causal(cu, 2) | masks.sliding_block(cu, 2, 1),
    "block_matrix": lambda cu, matrix: masks.from_block_matrix(matrix[:4, :4], 2, 2, 8, 8),
    "dense": lambda cu, matrix: AttnMask.from_dense(matrix),
    "mask_mod": lambda cu, matrix: AttnMask.from_mask_mod(lambda b, h, q, k: q >= k, 8, 8),
}


@pytest.mark.parametrize("name", MASKS)
def test_without_fullgraph_masks_are_made_and_planned_between_graphs(name: str) -> None:
    """What Dynamo makes of NumPy has no flags and other views, and failed with errors of its own."""

    def attend(x: Tensor, cu_seqlens: Tensor, matrix: Tensor, planned: bool) -> Tensor:
        mask = MASKS[name](cu_seqlens, matrix)
        plan = magi.make_attn_plan(mask, 1, 1, 8, dtype=x.dtype) if planned else mask
        return magi.flex_flash_attn(x * 2, x, x, plan)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager")
    inputs = torch.randn(8, 1, 8), torch.tensor([0, 3, 8]), torch.rand(8, 8) > 0.5
    for planned in (False, True):
        assert torch.equal(compiled(*inputs, planned), attend(*inputs, planned))


def test_with_fullgraph_planning_is_refused() -> None:
    torch._dynamo.reset()
    x, mask = torch.randn(8, 1, 8), masks.causal(8)
    with pytest.raises(Exception, match=r"a mask cannot be planned inside torch.compile; call make_attn_plan outside"):
        torch.compile(magi.flex_flash_attn, fullgraph=True, backend="aot_eager")(x, x, x, mask)
    with pytest.raises(Exception, match=r"make masks and plans outside and pass the plan in"):
        torch.compile(lambda: magi.make_attn_plan(mask, 1, 1, 8), fullgraph=True, backend="aot_eager")()


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return magi.flex_flash_attn(x, x, x, plan)

    plan = magi.make_attn_plan(masks.causal(8), 1, 1, 8, dtype=torch.float32)
    with pytest.raises(Exception, match=r"export and AOTInductor cannot hold a plan yet; use torch.compile"):
        torch.export.export(Model(), (torch.zeros(8, 1, 8),), strict=strict)
