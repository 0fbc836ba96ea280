"""The backward kernels on a GPU of compute capability 9.0, against float64, by the rule of torch_magi.testing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_magi as magi
from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.ops import sm90
from torch_magi.testing import (
    YARDSTICK_MASKS,
    check_attention,
    count_probe,
    flex_flash_runner,
    named_masks,
    random_inputs,
    random_mask,
)

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

GPU = torch.device("cuda")
NAMED = named_masks()
run = flex_flash_runner(kernel_options={"backend": "sm90"})


def check(
    mask: AttnMask,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Compare results and gradients; rows and keys that no pair uses hold NaN, in dout too."""
    print(f"seed {seed}")
    x = random_inputs(mask, *heads, *dims, dtype=dtype, device=GPU, seed=seed, nan_in_unused=True)
    return check_attention(run, x.query, x.key, x.value, mask, dout=x.dout, dlse=x.dlse, **options)


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_named_masks(name: str, dims: tuple[int, int]) -> None:
    check(NAMED[name], dims=dims)


@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize("name", sorted(YARDSTICK_MASKS))
def test_yardstick_masks(name: str, tokens: int) -> None:
    mask = YARDSTICK_MASKS[name](tokens)
    check(mask, (4, 1), (128, 128))
    count_probe(run, mask, 8, 1, 128, dtype=torch.bfloat16, device=GPU)


@pytest.mark.parametrize("part", range(10))
def test_random_masks(part: int, seed: int) -> None:
    rng = random.Random(1000 * seed + part)
    for i in range(30):
        case = 10000 * seed + 100 * part + i
        sq, sk = rng.randint(1, 700), rng.randint(1, 700)
        mask = random_mask(case, sq, sk)
        heads, dims = rng.choice([(8, 1), (4, 4), (6, 2), (5, 1)]), rng.choice([(128, 128), (64, 64)])
        print(f"random_mask({case}, {sq}, {sk}), heads {heads}, dims {dims}")
        check(mask, heads, dims, seed=case)
        count_probe(run, mask, *heads, dims[0], dtype=torch.bfloat16, device=GPU)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (5, 1), (6, 1), (8, 1), (16, 1), (16, 2), (24, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_grouped_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(masks.document([0, 100, 333, 500]), heads, (128, 128), dtype)


@pytest.mark.parametrize(
    "dims", [(8, 8), (40, 24), (72, 64), (80, 128), (96, 96), (160, 128), (192, 192), (20, 12)], ids=str
)
def test_head_dims_in_between(dims: tuple[int, int]) -> None:
    check(masks.causal(300), dims=dims)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_softcap(dims: tuple[int, int], dtype: torch.dtype, softcap: float) -> None:
    check(masks.document([0, 100, 333, 500]), (8, 2), dims, dtype, softcap=softcap)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 4.0])
def test_scale(scale: float) -> None:
    check(NAMED["overlapping_slices"], scale=scale)
    check(masks.causal(500), (8, 2), (128, 128), scale=scale)


@pytest.mark.parametrize("shape", ["shared", "per row"])
def test_sink(shape: str) -> None:
    mask = masks.document([0, 100, 333], total=400)
    gen = torch.Generator().manual_seed(0)
    for tokens in (1, 3):
        size = (tokens, 8) if shape == "shared" else (400, tokens, 8)
        check(mask, (8, 2), (128, 128), sink=torch.randn(size, generator=gen).to(GPU))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (20, 12)], ids=str)
def test_few_keys_with_many_rows(dims: tuple[int, int]) -> None:
    """Keys whose query rows several items share; few rows with many keys, which the forward shares out."""
    mask = masks.full(4000, 150)
    plan = magi.make_attn_plan(mask, 8, 1, dims[0], head_dim_v=dims[1], device=GPU)
    assert sm90.key_tiles(plan, plan.stages[0], GPU)[-1] > 0
    check(mask, (8, 1), dims)
    check(masks.causal(4000, 77), (8, 1), dims, torch.float16, softcap=3.0)
    check(masks.causal(5, 5000), (8, 1), dims)


def test_strides() -> None:
    """dout from [heads, rows, dim], with large row strides, with gaps, expanded."""
    mask = masks.document([0, 100, 333, 500])
    x = random_inputs(mask, 8, 2, 64, dtype=torch.bfloat16, device=GPU, seed=0)
    plan = magi.make_attn_plan(mask, 8, 2, 64, device=GPU)

    def gradients(dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in (x.query, x.key, x.value))
        return torch.autograd.grad(magi.flex_flash_attn(q, k, v, plan), (q, k, v), dout)

    gen = torch.Generator().manual_seed(0)
    wide = torch.randn(500, 3, 8, 68, generator=gen).to(GPU, torch.bfloat16)
    for dout in (
        wide[:, 0, :, 2:66],
        wide[:, 1, :, :64],
        torch.randn(8, 500, 64, generator=gen).to(GPU, torch.bfloat16).transpose(0, 1),
        torch.ones(1, 1, 1, dtype=torch.bfloat16, device=GPU).expand(500, 8, 64),
    ):
        for found, expected in zip(gradients(dout), gradients(dout.contiguous()), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["varlen_block_causal", "sliding_causal"])
def test_same_bits(name: str) -> None:
    mask = YARDSTICK_MASKS[name](4096)
    x = random_inputs(mask, 16, 2, 128, dtype=torch.bfloat16, device=GPU, seed=0)
    plan = magi.make_attn_plan(mask, 16, 2, 128, device=GPU)
    out, lse, _ = torch.ops.torch_magi.flex_attn_fwd(
        x.query, x.key, x.value, plan, 0, *[None] * 3, 0.1, 0.0, False, False, True, "auto", 0
    )
    results = [
        torch.ops.torch_magi.flex_attn_bwd(
            x.dout,
            x.dlse,
            x.query,
            x.key,
            x.value,
            out,
            lse,
            None,
            plan,
            0,
            None,
            0.1,
            0.0,
            False,
            True,
            "auto",
            margin,
        )
        for margin in [0] * 17 + [1, 32, 131]
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_float32_gradients_add_up() -> None:
    """Stages of context parallelism: keys in two calls, dq of the first handed to the second.

    Some rows see only keys of the second; the sink is in the first.
    """
    mask = masks.causal(300, 900) - AttnMask.from_slices([(4, 90)], [(0, 500)], ["full"], 300, 900)
    sink = torch.randn(1, 8).to(GPU)
    x = random_inputs(mask, 8, 2, 64, dtype=torch.bfloat16, device=GPU, seed=0)
    fwd, bwd = torch.ops.torch_magi.flex_attn_fwd, torch.ops.torch_magi.flex_attn_bwd
    plan = magi.make_attn_plan(mask, 8, 2, 64, device=GPU)
    out, lse, _ = fwd(x.query, x.key, x.value, plan, 0, sink, None, None, 0.1, 0.0, False, False, False, "auto", 0)

    def part(first: int, last: int, before: Tensor | None) -> tuple[Tensor, ...]:
        plan = magi.make_attn_plan(mask.clip((0, 300), (first, last)), 8, 2, 64, device=GPU)
        k, v = x.key[first:last], x.value[first:last]
        found: tuple[Tensor, ...] = bwd(
            x.dout, x.dlse, x.query, k, v, out, lse, before, plan, 0, None if first else sink, 0.1, 0.0, True, False,
            "auto", 0,
        )  # fmt: skip
        return found

    whole, one = part(0, 900, None), part(0, 500, None)
    two = part(500, 900, one[0])
    assert all(t.dtype == torch.float32 for t in (*whole[:3], *two[:3]))
    torch.testing.assert_close(two[0], whole[0], rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(one[3], whole[3], rtol=1e-4, atol=1e-4)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([one[i], two[i]]), whole[i], rtol=1e-3, atol=1e-3)


def test_graph_replay() -> None:
    mask = YARDSTICK_MASKS["varlen_causal"](2048)
    plan = magi.make_attn_plan(mask, 8, 1, 128, device=GPU)
    x, y = (random_inputs(mask, 8, 1, 128, dtype=torch.bfloat16, device=GPU, seed=s) for s in (0, 1))
    static = [t.detach().clone() for t in (x.query, x.key, x.value, x.dout)]

    def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(magi.flex_flash_attn(*leaves, plan), leaves, dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(*static)
    for inputs in (x, y, x):
        new = (inputs.query, inputs.key, inputs.value, inputs.dout)
        for buffer, value in zip(static, new, strict=True):
            buffer.copy_(value)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(*new), strict=True))


def test_opcheck() -> None:
    plan = magi.make_attn_plan(masks.causal(70), 2, 1, 64, device=GPU)
    x = random_inputs(masks.causal(70), 2, 1, 64, dtype=torch.bfloat16, device=GPU, seed=0)
    q, k, v = (t.detach().requires_grad_() for t in (x.query, x.key, x.value))
    sink = torch.zeros(1, 2, device=GPU, requires_grad=True)
    rest = (plan, 0, sink, None, None, 0.1, 0.0, False, False, False, "auto", 0)
    torch.library.opcheck(torch.ops.torch_magi.flex_attn_fwd.default, (q, k, v, *rest))


def test_compiled() -> None:
    @torch.compile(fullgraph=True)
    def attend(q: Tensor, plan: magi.AttnPlan) -> Tensor:
        return magi.flex_flash_attn(q * 2, q, q, plan).sin().sum()

    torch._dynamo.reset()
    for length in (256, 300, 77):
        plan = magi.make_attn_plan(masks.causal(length), 2, 2, 64, device=GPU)
        q = torch.randn(length, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        (found,) = torch.autograd.grad(attend(q, plan), q)
        (expected,) = torch.autograd.grad(magi.flex_flash_attn(q * 2, q, q, plan).sin().sum(), q)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_no_rows() -> None:
    q = torch.randn(256, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    none = torch.zeros(0, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    magi.flex_flash_attn(none, q, q, masks.full(0, 256)).sum().backward()
    magi.flex_flash_attn(q, none, none, masks.full(256, 0)).sum().backward()
    assert (q.grad == 0).all()
