"""flex_flash_attn against float64 truth: every mask and option, and the inputs that broke other packages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import torch_magi as magi
from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.testing.reference import Results, flex_flash_runner, run_reference
from torch_magi.testing.tolerance import check_attention

Tensor = torch.Tensor
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
run = flex_flash_runner()


def check(
    mask: AttnMask, dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (2, 2), dims: tuple[int, int] = (8, 8),
    seed: int = 0, runner: Any = run, **options: Any,
) -> Results:  # fmt: skip
    """Run attention on fresh random numbers, NaN in rows that nobody sees, and compare with the references."""
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    sq, sk = mask.shape
    (hq, hkv), (d, dv) = heads, dims
    shapes = ((sq, hq, d), (sk, hkv, d), (sk, hkv, dv), (sq, hq, dv))
    q, k, v, dout = (torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes)
    dense = mask.to_dense()
    q[~dense.any(1)] = math.nan
    k[~dense.any(0)] = math.nan
    v[~dense.any(0)] = math.nan
    dlse = torch.randn((sq, hq), generator=gen, dtype=torch.float64).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    return check_attention(runner, q, k, v, mask, dout=dout, dlse=dlse, **options)


MASKS = {
    "full": masks.full(70, 130),
    "causal": masks.causal(129),
    "causal_wide": masks.causal(5, 200),
    "causal_tall": masks.causal(100, 20),
    "window": masks.sliding_window(150, 150, (20, 3)),
    "documents": masks.document([0, 1, 1, 65, 100, 131], total=140),
    "staircase": masks.chunk_causal(130, 140, 7),
    "block_causal": masks.block_causal([0, 50, 133], 16),
    "prefix": masks.shared_prefix(30, [0, 40, 90]),
    "overlaps": AttnMask.from_slices([[0, 90], [10, 70], [3, 99]], [[0, 50], [30, 100], [60, 100]],
                                     ["causal", "inv_causal", "bi_causal"], 100, 100),
    "nothing": masks.full(3, 3) - masks.full(3, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(name: str, dtype: torch.dtype) -> None:
    check(MASKS[name], dtype)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (5, 1), (8, 2)])
@pytest.mark.parametrize("dims", [(8, 8), (40, 24), (1, 3), (64, 64)])
def test_heads_and_head_dims(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(MASKS["documents"], torch.float32, heads, dims)


@pytest.mark.parametrize("scale", [0.0, -0.7, 2.5])
def test_any_scale(scale: float) -> None:
    check(MASKS["overlaps"], scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c38_softcap(dtype: torch.dtype) -> None:
    check(MASKS["documents"], dtype, softcap=5.0)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c31_sink(dtype: torch.dtype, per_row: bool) -> None:
    mask = masks.document([0, 3, 8], total=10)
    sink = torch.randn((10, 3, 4) if per_row else (3, 4), generator=torch.Generator().manual_seed(1))
    result = check(mask, dtype, (4, 2), sink=sink)
    # Rows without keys: out 0, lse of the sink alone.
    assert (result.out[8:] == 0).all()
    alone = (sink[8:] if per_row else sink[None]).double().logsumexp(1)
    torch.testing.assert_close(result.lse[8:].double(), alone.expand(2, 4), rtol=1e-6, atol=1e-6)


def test_c31_sink_by_hand() -> None:
    q = torch.zeros(1, 1, 1, dtype=torch.float64, requires_grad=True)
    v = torch.ones(1, 1, 1, dtype=torch.float64)
    sink = torch.zeros(1, 1, requires_grad=True)
    out, aux = magi.flex_flash_attn(q, q.detach(), v, masks.full(1, 1), scale=1.0, sink=sink,
                                    return_aux=magi.AuxRequest(lse=True))  # fmt: skip
    out.sum().backward()
    assert out.item() == pytest.approx(0.5) and aux.lse.item() == pytest.approx(math.log(2))
    assert sink.grad is not None and sink.grad.item() == pytest.approx(-0.25)


def test_c01_fully_masked_rows() -> None:
    mask = AttnMask.from_slices([[0, 5]], [[0, 2]], ["causal"], 5, 2)
    result = check(mask)
    assert (result.out[:3] == 0).all() and (result.lse[:3] == -math.inf).all()
    assert result.dq is not None and (result.dq[:3] == 0).all()


def test_c06_short_queries() -> None:
    mask = masks.varlen([0, 0, 1, 1, 2], [0, 0, 3, 3, 8], causal=True)
    assert mask.area == 3 + 5
    check(mask, torch.float32, (9, 3), scale=1.0)


def test_c07_rows_behind_the_last_document() -> None:
    mask = masks.document([0, 144, 432, 944], total=946)
    result = check(mask, torch.float32, dims=(16, 16))
    for x in (result.out, result.dq, result.dk, result.dv):
        assert x is not None and (x[944:] == 0).all()


@pytest.mark.parametrize("n", [0, 1])
def test_c14_and_empty_inputs(n: int) -> None:
    check(masks.document([0, 5 * n, 9 * n, 9 * n, 9 * n]))


def test_c15_mask_larger_than_the_tensors() -> None:
    plan = magi.make_attn_plan(masks.causal(4096), 2, 2, 8, dtype=torch.float32)
    q = torch.randn(1000, 2, 8)
    with pytest.raises(ValueError, match=r"query must have shape \[4096, 2, 8\] .* got \[1000, 2, 8\]"):
        magi.flex_flash_attn(q, q, q, plan)
    with pytest.raises(ValueError, match=r"the mask must have shape \(1000, 1000\), .* got \(4096, 4096\)"):
        magi.flex_flash_attn(q, q, q, masks.causal(4096))
    batch = q.unflatten(0, (2, 500))
    with pytest.raises(ValueError, match=r"shape \(1000, 1000\), .*, or that of one of 2 elements, got \(250, 500\)"):
        magi.flex_flash_attn(batch, batch, batch, masks.full(250, 500))


def test_c21_overlaps_count_once() -> None:
    mask = AttnMask.from_slices([[0, 4], [0, 4]], [[0, 4], [2, 6]], ["full", "full"], 4, 6)
    q, k = torch.zeros(4, 1, 1, dtype=torch.float64), torch.zeros(6, 1, 1, dtype=torch.float64)
    v = (torch.arange(6.0, dtype=torch.float64) ** 2)[:, None, None]
    out, aux = magi.flex_flash_attn(q, k, v, mask, return_aux=magi.AuxRequest(lse=True))
    torch.testing.assert_close(out, torch.full_like(out, 55 / 6))
    torch.testing.assert_close(aux.lse, torch.full_like(aux.lse, math.log(6)))


def test_c22_staircase() -> None:
    mask = masks.chunk_causal(200, 200, 2).clip((100, 200), (0, 200))
    assert mask.area == 15100
    check(mask)


def test_c23_no_mask_function() -> None:
    check(
        AttnMask.from_slices([[0, 128], [128, 256]], [[128, 256], [0, 128]], ["full", "full"], 256, 256), torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_c34_lse_is_natural(dtype: torch.dtype) -> None:
    q = torch.zeros(8, 1, 4, dtype=dtype)
    for sink, extra in ((None, 0), (torch.zeros(1, 1), 1)):
        _, aux = magi.flex_flash_attn(q, q, q, masks.causal(8), sink=sink, return_aux=magi.AuxRequest(lse=True))
        expected = torch.log(torch.arange(1.0, 9.0, dtype=aux.lse.dtype) + extra)
        torch.testing.assert_close(aux.lse[:, 0], expected)


def test_c35_gradient_of_lse_alone() -> None:
    mask = masks.causal(9)
    q, k, v = (torch.randn(9, 2, 4, dtype=torch.float64) for _ in range(3))
    ones = torch.ones(9, 2, dtype=torch.float64)
    result = check_attention(run, q, k, v, mask, dlse=ones)
    assert (result.dv == 0).all() and (result.dq != 0).any()


def test_c37_gradients_have_the_inputs_dtype() -> None:
    result = check(MASKS["documents"], torch.float16)
    assert result.dq is not None and result.dq.dtype == torch.float16


@pytest.mark.parametrize("threads", [1, 2])
def test_c39_same_bits(threads: int) -> None:
    q, k, v = (torch.randn(300, h, 16, generator=torch.Generator().manual_seed(h)) for h in (16, 2, 2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = [run(q, k, v, masks.causal(300), dout=torch.ones(300, 16, 16)) for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c40_non_contiguous(dtype: torch.dtype) -> None:
    mask = masks.causal(70)
    q, k, v = (torch.randn(1, 2, 70, 8).to(dtype).transpose(1, 2)[0] for _ in range(3))
    dout = torch.randn(70, 3, 16).to(dtype)[:, :2, ::2]
    strided = run(q, k, v, mask, dout=dout)
    dense = run(q.contiguous(), k.contiguous(), v.contiguous(), mask, dout=dout.contiguous())
    for a, b in zip(strided, dense, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0)])
def test_an_empty_batch_keeps_its_shape(sizes: tuple[int, int]) -> None:
    rows = sizes[0] * sizes[1]
    q = torch.randn(*sizes, 4, 8)
    out, aux = magi.flex_flash_attn(q, q, q, masks.full(rows, rows), return_aux=magi.AuxRequest(lse=True))
    assert out.shape == q.shape and aux.lse.shape == q.shape[:3]


def test_a_batch_is_documents() -> None:
    mask = masks.causal(20)
    q, k, v = (torch.randn(3, 20, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    out, aux = magi.flex_flash_attn(q, k, v, mask, return_aux=magi.AuxRequest(lse=True, max_logits=True))
    planned = magi.make_attn_plan(mask, 4, 2, 8, dtype=torch.float64, batch_size=3)
    whole = masks.document([0, 20, 40, 60])
    assert torch.equal(out, magi.flex_flash_attn(q, k, v, planned))
    assert torch.equal(out, magi.flex_flash_attn(q, k, v, whole))
    for b in range(3):
        truth = run_reference(q[b], k[b], v[b], mask)
        torch.testing.assert_close(out[b], truth.out)
        torch.testing.assert_close(aux.lse[b], truth.lse)


def test_autocast_casts_as_sdpa_does() -> None:
    q = torch.randn(8, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert magi.flex_flash_attn(q, q, q, masks.causal(8)).dtype == torch.bfloat16
        d = q.double()
        assert magi.flex_flash_attn(d, d, d, masks.causal(8)).dtype == torch.float64
        with pytest.raises(TypeError, match=r"got torch\.float64, torch\.bfloat16"):
            magi.flex_flash_attn(d, q, q, masks.causal(8))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_makes_one_dtype_of_several(compiled: bool) -> None:
    """Rotary embeddings in float32 leave query and key in float32 beside a value in bfloat16."""
    plan = magi.make_attn_plan(masks.causal(8), 2, 2, 16)
    function = torch.compile(magi.flex_flash_attn, fullgraph=True) if compiled else magi.flex_flash_attn
    wide = torch.randn(8, 2, 16, requires_grad=True)
    narrow = torch.randn(8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(wide, wide, narrow, plan)
    assert torch.equal(out, magi.flex_flash_attn(wide.bfloat16(), wide.bfloat16(), narrow, plan))
    out.sum().backward()
    assert wide.grad.dtype == torch.float32 and narrow.grad.dtype == torch.bfloat16


@pytest.mark.unpoisoned  # would fill the 4 GiB in between
def test_c41_offsets_beyond_32_bits() -> None:
    """The second row lies 46340 * 46341 + 46340 = 2147488280 elements behind the first, and further."""
    stride = 46340 * 46341 + 46340
    assert stride > 2**31 - 1
    gen = torch.Generator().manual_seed(0)
    memory = torch.empty(stride + 3 * 8, dtype=torch.float16)  # pages that nobody touches take no memory
    far = memory.as_strided((2, 1, 8), (stride, 8, 1))
    near = torch.randn(2, 1, 8, generator=gen).half()
    far.copy_(near)
    mask = masks.causal(2)
    for q, k, v in ((far, near, near), (near, far, near), (near, near, far)):
        assert torch.equal(magi.flex_flash_attn(q, k, v, mask), magi.flex_flash_attn(near, near, near, mask))
    assert masks.full(46341, 46341).area == 46341**2 > 2**31


def test_gradcheck() -> None:
    mask = MASKS["overlaps"].clip((0, 20), (0, 40))
    q, k, v = (torch.randn(n, h, 4, dtype=torch.float64, requires_grad=True) for n, h in ((20, 4), (40, 2), (40, 2)))
    request = magi.AuxRequest(lse=True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = magi.flex_flash_attn(q, k, v, mask, softcap=3.0, return_aux=request)
        return out, torch.where(aux.lse.isinf(), 0.0, aux.lse)

    assert torch.autograd.gradcheck(function, (q, k, v))


Q = torch.zeros(8, 2, 16)
MASK = masks.causal(8)
QKV = ("query", "key", "value")
REFUSALS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("shape", ValueError, r"query must have shape \[rows, heads, head_dim\]", {"query": Q[0]}),
    ("dtype", TypeError, "must have one dtype", {"key": Q.double()}),
    ("integers", TypeError, "dtype must be one of", dict.fromkeys(QKV, Q.int())),
    ("heads", ValueError, "num_heads_q must be a multiple", dict.fromkeys(("key", "value"), torch.zeros(8, 3, 16))),
    ("kv heads", ValueError, "key and value must have as many heads", {"value": Q[:, :1]}),
    ("head_dim", ValueError, "one head_dim", {"key": Q[..., :8]}),
    ("batch", ValueError, "batch size 2", dict.fromkeys(QKV, Q.expand(2, 8, 2, 16)) | {"key": Q.expand(3, 8, 2, 16)}),
    ("not a mask", TypeError, "mask_or_plan must be an AttnMask or an AttnPlan, got NoneType", {"mask_or_plan": None}),
    ("scale", ValueError, "scale must be a finite number", {"scale": math.nan}),
    ("scale type", TypeError, "scale must be a number, got Tensor", {"scale": torch.tensor(1.0)}),
    ("softcap type", TypeError, "softcap must be a number, got NoneType", {"softcap": None}),
    ("softcap", ValueError, "softcap must be 0", {"softcap": -1.0}),
    ("sink dtype", TypeError, "sink must be torch.float32", {"sink": torch.zeros(1, 2).double()}),
    ("sink shape", ValueError, r"sink must have shape \[num_sink, 2\]", {"sink": torch.zeros(1, 3)}),
    ("aux", TypeError, "return_aux must be", {"return_aux": True}),
    (
        "option",
        TypeError,
        r"kernel_options must have keys among \['backend', 'sm_margin'\], got 'tile'",
        {"kernel_options": {"tile": 1}},
    ),
    ("backend", ValueError, "backend.* must be one of", {"kernel_options": {"backend": "gpu"}}),
    ("sm_margin", ValueError, "sm_margin.* must be 0 or more", {"kernel_options": {"sm_margin": -1}}),
    ("keyword", TypeError, "unexpected keyword argument 'softmax_scale'", {"softmax_scale": 1.0}),
    (
        "plan dtype",
        TypeError,
        "query must be torch.bfloat16 as the plan says",
        {"mask_or_plan": magi.make_attn_plan(MASK, 2, 2, 16)},
    ),
    (
        "plan heads",
        ValueError,
        r"query must have shape \[8, 4, 16\]",
        {"mask_or_plan": magi.make_attn_plan(MASK, 4, 2, 16, dtype=torch.float32)},
    ),
    (
        "plan of ranks",
        ValueError,
        "call context_parallel_attn",
        {"mask_or_plan": magi.make_attn_plan(MASK, 2, 2, 16, cp_size=2)},
    ),
]


@pytest.mark.parametrize(("error", "text", "change"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(error: type[Exception], text: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        magi.flex_flash_attn(**(dict.fromkeys(QKV, Q) | {"mask_or_plan": MASK} | change))


def test_transforms_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="cannot be vmapped"):
        torch.vmap(lambda q: magi.flex_flash_attn(q, Q, Q, MASK))(Q[None])
    with pytest.raises(NotImplementedError, match="no forward-mode"):
        torch.func.jvp(lambda q: magi.flex_flash_attn(q, Q, Q, MASK), (Q,), (Q,))
    with pytest.raises(NotImplementedError, match=r"no torch.func.grad or vjp"):
        torch.func.grad(lambda q: magi.flex_flash_attn(q, Q, Q, MASK).sum())(Q)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(8, 2, 16, generator=gen, requires_grad=True)
    (expected,) = torch.autograd.grad(magi.flex_flash_attn(x, x, x, MASK).square().sum(), x)
    out = torch.utils.checkpoint.checkpoint(lambda t: magi.flex_flash_attn(t, t, t, MASK), x, use_reentrant=reentrant)
    out.square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, expected)


def test_double_backward_is_refused() -> None:
    q = torch.randn(8, 2, 16, requires_grad=True)
    out = magi.flex_flash_attn(q, Q, Q, MASK)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
