"""The forward kernel on a GPU of compute capability 9.0, against float64, by the rule of torch_magi.testing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_magi as magi
from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.ops import flex_attn_fwd, sm90
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
    """Compare out, lse and max_logits; rows and keys that no pair uses hold NaN."""
    print(f"seed {seed}")
    x = random_inputs(mask, *heads, *dims, dtype=dtype, device=GPU, seed=seed, nan_in_unused=True)
    return check_attention(run, x.query, x.key, x.value, mask, **options)


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_named_masks(name: str, dims: tuple[int, int]) -> None:
    check(NAMED[name], dims=dims)


@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize("name", sorted(YARDSTICK_MASKS))
def test_yardstick_masks(name: str, tokens: int) -> None:
    mask = YARDSTICK_MASKS[name](tokens)
    check(mask, (8, 1), (128, 128))
    count_probe(run, mask, 8, 1, 128, dtype=torch.bfloat16, device=GPU, backward=False)


@pytest.mark.parametrize("part", range(10))
def test_random_masks(part: int, seed: int) -> None:
    rng = random.Random(seed)
    for i in range(30):
        sq, sk = rng.randint(1, 700), rng.randint(1, 700)
        mask = random_mask(seed + i, sq, sk)
        heads, dims = rng.choice([(8, 1), (4, 4), (6, 2), (5, 1)]), rng.choice([(128, 128), (64, 64)])
        print(f"random_mask({seed + i}, {sq}, {sk}), heads {heads}, dims {dims}")
        check(mask, heads, dims, seed=seed + i)
        count_probe(run, mask, *heads, dims[0], dtype=torch.bfloat16, device=GPU, backward=False)


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
def test_softcap(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(masks.document([0, 100, 333, 500]), (8, 2), dims, dtype, softcap=5.0)


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


FEW_ROWS = {
    "one row": masks.full(1, 5000),
    "causal tail": masks.causal(130, 9000),
    "two bands": AttnMask.from_slices([(0, 40), (7, 9)], [(1000, 6000), (0, 7000)], ["full", "full"], 40, 7000),
    "documents and a long row": masks.document([0, 50, 100, 150], total=200) | masks.prefix_lm(200, 200, 3),
}


@pytest.mark.parametrize("name", sorted(FEW_ROWS))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (72, 40)], ids=str)
def test_few_rows_with_many_keys(name: str, dims: tuple[int, int]) -> None:
    """Rows whose keys several items share, with everything that joins at a row's end."""
    mask = FEW_ROWS[name]
    rows = mask.shape[0]
    plan = magi.make_attn_plan(mask, 8, 1, dims[0], head_dim_v=dims[1], device=GPU)
    tiles = sm90.forward_tiles(plan, plan.stages[0], False, GPU)
    assert (tiles.num_slots > 0) == (name != "documents and a long row")
    check(mask, (8, 1), dims)
    check(mask, (8, 1), dims, torch.float16, softcap=3.0, sink=torch.randn(rows, 2, 8).to(GPU))
    count_probe(run, mask, 8, 1, dims[0], dims[1], dtype=torch.bfloat16, device=GPU, backward=False)


@pytest.mark.parametrize("shape", [(300, 900), (9, 6000)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (20, 12)], ids=str)
def test_merging_with_an_earlier_result(shape: tuple[int, int], dims: tuple[int, int]) -> None:
    """Keys in two calls are keys in one; empty sides leave the other bit for bit."""
    rows, keys = shape
    mask = masks.causal(rows, keys) - AttnMask.from_slices([(2, 4)], [(0, keys)], ["full"], rows, keys)
    x = random_inputs(mask, 8, 2, *dims, dtype=torch.bfloat16, device=GPU, seed=0)
    sink = torch.randn(1, 8).to(GPU)

    def attend(first: int, last: int, part: AttnMask, **options: Any) -> tuple[Tensor, Tensor]:
        plan = magi.make_attn_plan(part, 8, 2, dims[0], head_dim_v=dims[1], device=GPU)
        out, lse, _ = flex_attn_fwd(x.query, x.key[first:last], x.value[first:last], plan, scale=0.2, **options)
        return out, lse

    whole = attend(0, keys, mask, sink=sink, out_float32=True)
    before = attend(0, 700, mask.clip((0, rows), (0, 700)), sink=sink, out_float32=True)
    rest = (700, keys, mask.clip((0, rows), (700, keys)))
    after = {"out_before": before[0], "lse_before": before[1]}
    for wide in (True, False):
        out, lse = attend(*rest, **after, out_float32=wide)
        assert out.dtype == (torch.float32 if wide else torch.bfloat16)
        # The weights are rounded to bfloat16 at another reference.
        torch.testing.assert_close(out.float(), whole[0], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse, whole[1], rtol=1e-5, atol=1e-5)
    alone = attend(*rest, out_float32=True)
    for expected, out, lse in (
        (alone, torch.full_like(before[0], torch.nan), torch.full_like(before[1], -torch.inf)),
        (alone, torch.zeros_like(before[0]), torch.full_like(before[1], torch.inf)),
    ):
        found = attend(*rest, out_before=out, lse_before=lse, out_float32=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    nothing = mask.clip((0, rows), (0, 5)) - masks.full(rows, 5)
    found = attend(0, 5, nothing, **after, out_float32=True)
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


def test_opcheck() -> None:
    mask = masks.causal(3, 3000)
    plan = magi.make_attn_plan(mask, 2, 1, 64, device=GPU)
    x = random_inputs(mask, 2, 1, 64, dtype=torch.bfloat16, device=GPU, seed=0)
    tiles = sm90.forward_tiles(plan, plan.stages[0], False, GPU)
    before = torch.randn(3, 2, 64, device=GPU), torch.randn(3, 2, device=GPU)
    arguments = (*tiles[2:6], torch.zeros(2, device=GPU), *before, *tiles[:2], tiles.num_slots, 0.1, 0.0, True, True, 0)
    op = torch.ops.torch_magi.flex_attn_fwd_sm90.default
    torch.library.opcheck(op, (x.query, x.key, x.value, *arguments))


def test_strides() -> None:
    """Views as they come from a fused projection, from [heads, rows, dim], expanded heads, odd strides."""
    mask = masks.document([0, 100, 333, 500])
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(GPU, torch.bfloat16)

    fused = normal(500, 12, 64)
    views = [
        tuple(fused.split((8, 2, 2), 1)),
        tuple(normal(h, 500, 64).transpose(0, 1) for h in (8, 2, 2)),
        (normal(500, 8, 64), normal(500, 1, 64).expand(500, 2, 64), normal(500, 1, 64).expand(500, 2, 64)),
        tuple(normal(500, h, 68)[..., 2:66] for h in (8, 2, 2)),
        tuple(normal(500, 64, h).transpose(1, 2) for h in (8, 2, 2)),
    ]
    for q, k, v in views:
        dense = [x.contiguous() for x in (q, k, v)]
        assert torch.equal(magi.flex_flash_attn(q, k, v, mask), magi.flex_flash_attn(*dense, mask))
    check_attention(run, *views[0], mask)


def test_offsets_beyond_32_bits() -> None:
    rows, stride = 4096, 9728 * 128
    far = torch.empty(rows * stride, dtype=torch.bfloat16, device=GPU).as_strided((rows, 1, 128), (stride, 128, 1))
    assert rows * stride > 2**32
    near = torch.randn(rows, 1, 128, device=GPU, dtype=torch.bfloat16)
    far.copy_(near)
    mask = masks.causal(rows)
    expected = magi.flex_flash_attn(near, near, near, mask)
    for q, k, v in ((far, near, near), (near, far, near), (near, near, far)):
        assert torch.equal(magi.flex_flash_attn(q, k, v, mask), expected)


def test_many_elements() -> None:
    """Results of more than 2^31 elements."""
    rows = 2**31 // (64 * 128) + 300
    q = torch.randn(rows, 64, 128, device=GPU, dtype=torch.bfloat16)
    kv = torch.randn(rows, 1, 128, device=GPU, dtype=torch.bfloat16)
    mask = masks.sliding_window(rows, rows, (63, 0))
    out = magi.flex_flash_attn(q, kv, kv, mask)
    tail = slice(rows - 200, rows)
    expected = magi.flex_flash_attn(q[tail], kv[tail], kv[tail], masks.sliding_window(200, 200, (63, 0)))
    torch.testing.assert_close(out[tail][100:], expected[100:])


@pytest.mark.parametrize("out_float32", [False, True])
def test_same_bits(out_float32: bool) -> None:
    mask = YARDSTICK_MASKS["varlen_block_causal"](4096)
    x = random_inputs(mask, 16, 2, 128, dtype=torch.bfloat16, device=GPU, seed=0)
    plan = magi.make_attn_plan(mask, 16, 2, 128, device=GPU)
    op = torch.ops.torch_magi.flex_attn_fwd
    results = [
        op(x.query, x.key, x.value, plan, 0, *[None] * 3, 0.1, 0.0, out_float32, True, False, "auto", margin)
        for margin in [0] * 17 + [1, 32, 131]
    ]
    assert results[0][0].dtype == (torch.float32 if out_float32 else torch.bfloat16)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_graph_replay() -> None:
    mask = YARDSTICK_MASKS["varlen_causal"](4096)
    plan = magi.make_attn_plan(mask, 8, 1, 128, device=GPU)
    x, y = (random_inputs(mask, 8, 1, 128, dtype=torch.bfloat16, device=GPU, seed=s) for s in (0, 1))
    static = [t.clone() for t in (x.query, x.key, x.value)]
    magi.flex_flash_attn(*static, plan)  # uploads the plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = magi.flex_flash_attn(*static, plan)
    for inputs in (x, y, x):
        for buffer, new in zip(static, (inputs.query, inputs.key, inputs.value), strict=True):
            buffer.copy_(new)
        graph.replay()
        assert torch.equal(out, magi.flex_flash_attn(inputs.query, inputs.key, inputs.value, plan))


def test_streams_and_no_rows() -> None:
    q = torch.randn(256, 2, 64, device=GPU, dtype=torch.bfloat16)
    expected = magi.flex_flash_attn(q, q, q, masks.causal(256))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = []
    for stream in streams:
        with torch.cuda.stream(stream):
            outs.append(magi.flex_flash_attn(q, q, q, masks.causal(256)))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
    assert magi.flex_flash_attn(q[:0], q, q, masks.full(0, 256)).shape == (0, 2, 64)
    assert (magi.flex_flash_attn(q, q[:0], q[:0], masks.full(256, 0)) == 0).all()


def test_compiled() -> None:
    @torch.compile(fullgraph=True)
    def attend(q: Tensor, plan: magi.AttnPlan) -> Tensor:
        return magi.flex_flash_attn(q * 2, q, q, plan) + 1

    torch._dynamo.reset()
    for length in (256, 300, 77):
        plan = magi.make_attn_plan(masks.causal(length), 2, 2, 64, device=GPU)
        q = torch.randn(length, 2, 64, device=GPU, dtype=torch.bfloat16)
        torch.testing.assert_close(attend(q, plan), magi.flex_flash_attn(q * 2, q, q, plan) + 1)


def test_refusals() -> None:
    q = torch.zeros(8, 2, 64, device=GPU, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="got backend 'auto', float64 tensors on cuda:0"):
        magi.flex_flash_attn(q.double(), q.double(), q.double(), masks.causal(8))
    with pytest.raises(NotImplementedError, match="got backend 'cpu'"):
        magi.flex_flash_attn(q, q, q, masks.causal(8), kernel_options={"backend": "cpu"})
    wide = torch.zeros(8, 2, 320, device=GPU, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"head dims \(320, 320\)"):
        magi.flex_flash_attn(wide, wide, wide, masks.causal(8))
    with pytest.raises(RuntimeError, match="sm_margin must leave at least one"):
        magi.flex_flash_attn(q.detach(), q, q, masks.causal(8), kernel_options={"sm_margin": 1000})
