"""The kernels in Triton on a GPU, against float64 by the rule of torch_magi.testing, and against those of sm90."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_magi as magi
from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.ops import flex_attn_fwd
from torch_magi.ops.flex_attn import choose_backend
from torch_magi.testing import (
    YARDSTICK_MASKS,
    Results,
    assert_results_close,
    check_attention,
    count_probe,
    flex_flash_runner,
    named_masks,
    random_inputs,
    random_mask,
    run_lows,
    run_reference,
)

triton = pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs a GPU of compute capability 8.0 or later", allow_module_level=True)

GPU = torch.device("cuda")
NAMED = named_masks()
TRITON: Any = {"backend": "triton"}
run = flex_flash_runner(kernel_options=TRITON)


def check(
    mask: AttnMask,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> None:
    """Compare results and gradients; rows and keys that no pair uses hold NaN, in dout too."""
    print(f"seed {seed}")
    x = random_inputs(mask, *heads, *dims, dtype=dtype, device=GPU, seed=seed, nan_in_unused=True)
    check_attention(run, x.query, x.key, x.value, mask, dout=x.dout, dlse=x.dlse, **options)


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_named_masks(name: str, dims: tuple[int, int]) -> None:
    check(NAMED[name], dims=dims)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_float32(name: str) -> None:
    check(NAMED[name], dims=(64, 32), dtype=torch.float32)


@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize("name", sorted(YARDSTICK_MASKS))
def test_yardstick_masks(name: str, tokens: int) -> None:
    mask = YARDSTICK_MASKS[name](tokens)
    check(mask, (4, 1), (128, 128))
    count_probe(run, mask, 8, 1, 128, dtype=torch.bfloat16, device=GPU)


@pytest.mark.parametrize("part", range(10))
def test_random_masks(part: int, seed: int) -> None:
    """Of 300 masks: against float64, and where they are there, the kernels of sm90 by the same truth."""
    rng = random.Random(1000 * seed + part)
    other = choose_backend(GPU, torch.bfloat16, (128, 128))
    for i in range(30):
        case = 10000 * seed + 100 * part + i
        sq, sk = rng.randint(1, 700), rng.randint(1, 700)
        mask = random_mask(case, sq, sk)
        heads, dims = rng.choice([(8, 1), (4, 4), (6, 2), (5, 1)]), rng.choice([(128, 128), (64, 64)])
        print(f"random_mask({case}, {sq}, {sk}), heads {heads}, dims {dims}")
        x = random_inputs(mask, *heads, *dims, dtype=torch.bfloat16, device=GPU, seed=case, nan_in_unused=True)
        arguments, options = (x.query, x.key, x.value, mask), {"dout": x.dout, "dlse": x.dlse}
        low = run_lows(*arguments, **options)
        found = run(*arguments, **options)
        assert_results_close(found, run_reference(*arguments, **options), low, torch.bfloat16, dims[0])
        expected = flex_flash_runner(kernel_options={"backend": other})(*arguments, **options)
        wide = Results(*(None if t is None else t.double() for t in expected))
        assert_results_close(found, wide, low, torch.bfloat16, dims[0])
        count_probe(run, mask, *heads, dims[0], dtype=torch.bfloat16, device=GPU)


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (6, 1), (16, 1), (24, 2)], ids=str)
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(masks.document([0, 100, 333, 500]), heads, (128, 128))


@pytest.mark.parametrize("dims", [(1, 3), (20, 12), (40, 24), (80, 128), (96, 96), (192, 192)], ids=str)
def test_head_dims_in_between(dims: tuple[int, int]) -> None:
    check(masks.causal(300), dims=dims)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_softcap(dims: tuple[int, int]) -> None:
    for softcap in (2.0, 50.0):
        check(masks.document([0, 100, 333, 500]), (8, 2), dims, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    for softcap in (0.0, 2.0):
        check(
            masks.document([0, 100, 333, 500]), (8, 2), (64, 64), dtype, softcap=softcap, sink=torch.randn(2, 8).to(GPU)
        )


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


@pytest.mark.parametrize("dims", [(64, 64), (20, 12)], ids=str)
def test_parts(dims: tuple[int, int]) -> None:
    """Few rows with many keys, and few keys with many rows, which several items share."""
    for mask in (masks.causal(130, 9000), masks.full(4000, 150), masks.full(1, 5000)):
        check(mask, (8, 1), dims)
        check(mask, (8, 1), dims, torch.float16, softcap=3.0, sink=torch.randn(mask.shape[0], 2, 8).to(GPU))
        count_probe(run, mask, 8, 1, *dims, dtype=torch.bfloat16, device=GPU)


@pytest.mark.parametrize("dims", [(64, 64), (20, 12)], ids=str)
@pytest.mark.parametrize("shape", [(300, 900), (9, 6000)], ids=str)
def test_merging_with_an_earlier_result(shape: tuple[int, int], dims: tuple[int, int]) -> None:
    """Keys in two calls are keys in one; empty sides leave the other bit for bit."""
    rows, keys = shape
    mask = masks.causal(rows, keys) - AttnMask.from_slices([(2, 4)], [(0, keys)], ["full"], rows, keys)
    x = random_inputs(mask, 8, 2, *dims, dtype=torch.bfloat16, device=GPU, seed=0)
    sink = torch.randn(1, 8).to(GPU)

    def attend(first: int, last: int, part: AttnMask, **options: Any) -> tuple[Tensor, Tensor]:
        plan = magi.make_attn_plan(part, 8, 2, dims[0], head_dim_v=dims[1], device=GPU)
        k, v = x.key[first:last], x.value[first:last]
        out, lse, _ = flex_attn_fwd(x.query, k, v, plan, scale=0.2, out_float32=True, backend="triton", **options)
        return out, lse

    whole = attend(0, keys, mask, sink=sink)
    before = attend(0, 700, mask.clip((0, rows), (0, 700)), sink=sink)
    rest = (700, keys, mask.clip((0, rows), (700, keys)))
    found = attend(*rest, out_before=before[0], lse_before=before[1])
    # The weights are rounded to bfloat16 at another reference.
    torch.testing.assert_close(found[0], whole[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(found[1], whole[1], rtol=1e-5, atol=1e-5)
    alone = attend(*rest)
    for out, lse in (
        (torch.full_like(before[0], torch.nan), torch.full_like(before[1], -torch.inf)),
        (torch.zeros_like(before[0]), torch.full_like(before[1], torch.inf)),
    ):
        found = attend(*rest, out_before=out, lse_before=lse)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    nothing = mask.clip((0, rows), (0, 5)) - masks.full(rows, 5)
    found = attend(0, 5, nothing, out_before=before[0], lse_before=before[1])
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


def gradients(plan: magi.AttnPlan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Return out and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = magi.flex_flash_attn(*leaves, plan, kernel_options=TRITON)
    return (out, *torch.autograd.grad(out, leaves, dout))


def test_strides() -> None:
    """Views as they come from a fused projection, from [heads, rows, dim], with gaps, expanded."""
    plan = magi.make_attn_plan(masks.document([0, 100, 333, 500]), 8, 2, 64, device=GPU)
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(GPU, torch.bfloat16)

    fused, gaps = normal(500, 12, 64), normal(500, 3, 8, 68)
    for tensors in (
        (*fused.split((8, 2, 2), 1), gaps[:, 0, :, 2:66]),
        (*(normal(h, 500, 64).transpose(0, 1) for h in (8, 2, 2)), gaps[:, 1, :, :64]),
        (gaps[:, 2, :, 1:65], *(normal(500, 1, 64).expand(500, 2, 64),) * 2, normal(8, 500, 64).transpose(0, 1)),
        (*(normal(500, 64, h).transpose(1, 2) for h in (8, 2, 2)), normal(1, 1, 1).expand(500, 8, 64)),
    ):
        expected = gradients(plan, *(t.contiguous() for t in tensors))
        assert all(torch.equal(a, b) for a, b in zip(gradients(plan, *tensors), expected, strict=True))


def test_offsets_beyond_32_bits() -> None:
    rows, stride = 4096, 9728 * 128
    far = torch.empty(rows * stride, dtype=torch.bfloat16, device=GPU).as_strided((rows, 1, 128), (stride, 128, 1))
    assert rows * stride > 2**32
    near = torch.randn(rows, 1, 128, device=GPU, dtype=torch.bfloat16)
    far.copy_(near)
    plan = magi.make_attn_plan(masks.causal(rows), 1, 1, 128, device=GPU)
    expected = gradients(plan, near, near, near, near)
    for i in range(4):
        found = gradients(plan, *(far if i == j else near for j in range(4)))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_many_elements() -> None:
    """Results of more than 2^31 elements."""
    rows = 2**31 // (64 * 128) + 300
    q = torch.randn(rows, 64, 128, device=GPU, dtype=torch.bfloat16)
    kv = torch.randn(rows, 1, 128, device=GPU, dtype=torch.bfloat16)
    long, short = (masks.sliding_window(n, n, (63, 0)) for n in (rows, 400))
    found = gradients(magi.make_attn_plan(long, 64, 1, 128, device=GPU), q, kv, kv, q)
    tail = slice(rows - 400, rows)
    expected = gradients(magi.make_attn_plan(short, 64, 1, 128, device=GPU), q[tail], kv[tail], kv[tail], q[tail])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[tail][100:], b[100:], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["varlen_block_causal", "sliding_causal"])
def test_same_bits(name: str) -> None:
    mask = YARDSTICK_MASKS[name](4096)
    x = random_inputs(mask, 16, 2, 128, dtype=torch.bfloat16, device=GPU, seed=0)
    plan = magi.make_attn_plan(mask, 16, 2, 128, device=GPU)
    first = gradients(plan, x.query, x.key, x.value, x.dout)
    for _ in range(12):
        again = gradients(plan, x.query, x.key, x.value, x.dout)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_graph_replay() -> None:
    mask = YARDSTICK_MASKS["varlen_causal"](2048)
    plan = magi.make_attn_plan(mask, 8, 1, 128, device=GPU)
    x, y = (random_inputs(mask, 8, 1, 128, dtype=torch.bfloat16, device=GPU, seed=s) for s in (0, 1))
    static = [t.detach().clone() for t in (x.query, x.key, x.value, x.dout)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients(plan, *static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(plan, *static)
    for inputs in (x, y, x):
        new = (inputs.query, inputs.key, inputs.value, inputs.dout)
        for buffer, value in zip(static, new, strict=True):
            buffer.copy_(value)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(plan, *new), strict=True))


def test_compiled_once_for_all_masks_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: compiled.append(fn.name))
    first = 0
    for i, (sq, sk) in enumerate([(512, 512), (16, 8192), (8192, 16), (1, 1), (333, 500), (17, 1), (400, 400)]):
        mask = masks.full(sq, sk) if i < 3 else random_mask(i, sq, sk)
        x = random_inputs(mask, 8, 1, 64, dtype=torch.float16, device=GPU, seed=i)
        plan = magi.make_attn_plan(mask, 8, 1, 64, dtype=torch.float16, device=GPU)
        gradients(plan, x.query, x.key, x.value, x.dout)
        first = len(compiled) if i < 3 else first
    assert len(compiled) == first, compiled


def test_compiled_function() -> None:
    @torch.compile(fullgraph=True)
    def attend(q: Tensor, plan: magi.AttnPlan) -> Tensor:
        return magi.flex_flash_attn(q * 2, q, q, plan, kernel_options=TRITON).sin().sum()

    torch._dynamo.reset()
    for length in (256, 300, 77):
        plan = magi.make_attn_plan(masks.causal(length), 2, 2, 64, device=GPU)
        q = torch.randn(length, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        (found,) = torch.autograd.grad(attend(q, plan), q)
        expected = magi.flex_flash_attn(q * 2, q, q, plan, kernel_options=TRITON).sin().sum()
        torch.testing.assert_close(found, torch.autograd.grad(expected, q)[0], rtol=2e-2, atol=2e-2)


def test_streams_and_no_rows() -> None:
    q = torch.randn(256, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    expected = magi.flex_flash_attn(q, q, q, masks.causal(256), kernel_options=TRITON)
    torch.cuda.synchronize()
    outs = []
    for _ in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs.append(magi.flex_flash_attn(q, q, q, masks.causal(256), kernel_options=TRITON))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
    none = torch.zeros(0, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    magi.flex_flash_attn(none, q, q, masks.full(0, 256), kernel_options=TRITON).sum().backward()
    magi.flex_flash_attn(q, none, none, masks.full(256, 0), kernel_options=TRITON).sum().backward()
    assert q.grad is not None and (q.grad == 0).all()


def test_opcheck() -> None:
    plan = magi.make_attn_plan(masks.causal(70), 2, 1, 64, device=GPU)
    x = random_inputs(masks.causal(70), 2, 1, 64, dtype=torch.bfloat16, device=GPU, seed=0)
    q, k, v = (t.detach().requires_grad_() for t in (x.query, x.key, x.value))
    sink = torch.zeros(1, 2, device=GPU, requires_grad=True)
    rest = (plan, 0, sink, None, None, 0.1, 0.0, False, False, False, "triton", 0)
    torch.library.opcheck(torch.ops.torch_magi.flex_attn_fwd.default, (q, k, v, *rest))


def test_what_it_serves() -> None:
    assert choose_backend(GPU, torch.float32, (128, 128)) == "triton"
    assert choose_backend(GPU, torch.bfloat16, (128, 128), "triton") == "triton"
    q = torch.zeros(8, 2, 64, device=GPU, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="sm_margin must be 0 for the kernels in Triton"):
        magi.flex_flash_attn(q, q, q, masks.causal(8), kernel_options={**TRITON, "sm_margin": 1})
