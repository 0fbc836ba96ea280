"""flex_attention beside torch's own, and against float64 truth: masks of every form, one for all or one per head."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import torch_magi as magi
from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.testing import assert_close_to_truth, check_attention, named_masks, random_inputs, reference_attention
from torch_magi.testing.reference import make_runner

Tensor = torch.Tensor
NAMED = named_masks()
LSE = torch_flex.AuxRequest(lse=True)
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def tanh_softcap(c: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: c * torch.tanh(score / c)


def inputs(
    B: int, heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int] = (16, 8),
    dtype: torch.dtype = torch.float64, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gen = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], lengths[0], dims[0]), (heads[1], lengths[1], dims[0]), (heads[1], lengths[1], dims[1]))
    q, k, v = (torch.randn(B, *shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def truth_of(q: Tensor, k: Tensor, v: Tensor, mask_of: Callable[[int, int], AttnMask]) -> tuple[Tensor, Tensor]:
    """Return out and lse of every element and head by itself, in float64."""
    B, heads, group = q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    outs, lses = [], []
    for b, h in itertools.product(range(B), range(heads)):
        one = (x[b % len(x), i][:, None] for x, i in ((q, h), (k, h // group), (v, h // group)))
        out, lse, _ = reference_attention(*one, mask_of(b, h))
        outs.append(out[:, 0])
        lses.append(lse[:, 0])
    return torch.stack(outs).unflatten(0, (B, heads)), torch.stack(lses).unflatten(0, (B, heads))


def gradients(outputs: tuple[Tensor, Tensor], tensors: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    out, lse = outputs
    dout, dlse = (torch.randn(x.shape, generator=gen, dtype=torch.float64) for x in (out, lse))
    loss = (out * dout).sum() + (torch.where(lse.isinf(), 0.0, lse) * dlse).sum()
    return torch.autograd.grad(loss, tensors)


def check(block_mask: Any, mask_of: Callable[[int, int], AttnMask], x: tuple[Tensor, ...], seed: int = 0) -> None:
    """Compare out, lse and all gradients with the truth, in float64."""
    print("seed", seed)
    q, k, v = (t.requires_grad_() for t in x)
    out, aux = magi.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=LSE)
    truth = truth_of(q, k, v, mask_of)
    names = ("out", "lse", "dq", "dk", "dv")
    found = (out, aux.lse, *gradients((out, aux.lse), x, seed))
    for name, a, b in zip(names, found, (*truth, *gradients(truth, x, seed)), strict=True):
        assert_close_to_truth(a, b, None, name=name)


# --- one mask for all ---


def run_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: AttnMask, *, scale: float | None, softcap: float, sink: None
) -> tuple[Tensor, Tensor, None]:
    assert sink is None
    score_mod = tanh_softcap(softcap) if softcap else None
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, aux = magi.flex_attention(
        q, k, v, score_mod, mask.to_block_mask(16), scale=scale, enable_gqa=True, return_aux=LSE
    )
    return out[0].transpose(0, 1), aux.lse[0].T, None


@pytest.mark.parametrize("name", NAMED)
def test_forward_and_gradients(name: str, seed: int) -> None:
    mask = NAMED[name]
    x = random_inputs(mask, 4, 2, dtype=torch.float64, seed=seed)
    dlse = torch.randn(x.query.shape[:2], dtype=torch.float64)
    check_attention(make_runner(run_flex), *x[:3], mask, dout=x.dout, dlse=dlse, softcap=3.0 * (name == "causal"))


DOCUMENT = torch.tensor([0] * 30 + [1] * 5 + [2] * 65)
MODS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "window": lambda b, h, q, k: (q - k).abs() <= 9,
    "stride": lambda b, h, q, k: (q - k) % 5 == 0,
    "rows that see nothing": lambda b, h, q, k: (q >= 20) & (k < 50),
    "heads": lambda b, h, q, k: (q >= k) & (q - k <= 4 << h),
    "elements": lambda b, h, q, k: (q >= k) & (k >= 7 * b),
    "both": lambda b, h, q, k: (q - k).abs() <= 3 * h + 20 * b,
}


@pytest.mark.parametrize("name", MODS)
def test_as_torch_computes_it(name: str, seed: int) -> None:
    mod, (B, H) = MODS[name], ((2, 4) if name in ("heads", "elements", "both") else (None, None))
    score_mod = tanh_softcap(2.0) if name in ("documents", "both") else None
    block_mask = create_block_mask(mod, B, H, 100, 90, "cpu", 32)
    exact = inputs(2, (4, 2), (100, 90), seed=seed)
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True, "scale": 0.3, "return_aux": LSE}
    truth, truth_aux = torch_flex.flex_attention(*exact, **options)
    low, low_aux = torch_flex.flex_attention(*(t.float() for t in exact), **options)
    for x in (exact, tuple(t.float() for t in exact)):
        out, aux = magi.flex_attention(*x, **options)
        assert out.dtype == x[0].dtype and aux.max_scores is None
        assert_close_to_truth(out, truth, low, name="out")
        assert_close_to_truth(aux.lse, truth_aux.lse, low_aux.lse, name="lse")


def test_the_arguments_are_torchs() -> None:
    ours, torchs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (magi.flex_attention, torch_flex.flex_attention)
    )
    assert ours == torchs


def test_forms_of_the_mask_and_of_the_result() -> None:
    q, k, v = inputs(2, (4, 4), (40, 40))
    mask = masks.causal(40)
    plan = magi.make_attn_plan(mask, 4, 4, 16, head_dim_v=8, dtype=q.dtype, batch_size=2)
    expected, lse = magi.flex_attention(q, k, v, block_mask=mask, return_lse=True)
    for form in (plan, mask.to_block_mask(8), ((mask,),), ((mask,) * 4,) * 2):
        assert torch.equal(magi.flex_attention(q, k, v, block_mask=form), expected)
        out, aux = magi.flex_attention(q, k, v, None, form, return_aux=LSE)
        assert torch.equal(out, expected) and torch.equal(aux.lse, lse) and lse.shape == (2, 4, 40)
        _, aux = magi.flex_attention(q, k, v, None, form, return_aux=torch_flex.AuxRequest())
        assert aux == torch_flex.AuxOutput(None, None)
    everything = magi.flex_attention(q, k, v)
    assert torch.equal(everything, magi.flex_attention(q, k, v, block_mask=masks.full(40, 40)))


def test_one_key_for_all_elements() -> None:
    q, k, v = inputs(3, (2, 1), (20, 30))
    check(None, lambda b, h: masks.full(20, 30), (q, k[:1].clone(), v[:1].clone()))


# --- one mask for each ---


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_masks_that_differ_by_head(heads: tuple[int, int], seed: int) -> None:
    windows = [3, 30, 3, 9, 30, 30][: heads[0]]
    table = torch.tensor(windows)

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= table[h])

    grid = AttnMask.from_mask_mod(mod, 50, 50, H=heads[0])
    for form in (grid, create_block_mask(mod, None, heads[0], 50, 50, "cpu", 16)):
        check(
            form,
            lambda b, h: masks.sliding_window(50, 50, (windows[h], 0)),
            inputs(2, heads, (50, 50), seed=seed),
            seed,
        )


def test_masks_that_differ_by_element(seed: int) -> None:
    lengths = [[0, 11, 50], [0, 50, 50], [0, 20, 30]]
    of_element = [masks.document(cu, total=50) for cu in lengths]
    check(tuple((m,) for m in of_element), lambda b, h: of_element[b], inputs(3, (4, 2), (50, 50), seed=seed), seed)


def test_masks_that_differ_by_element_and_head(seed: int) -> None:
    grid = tuple(tuple(masks.sliding_window(30, 40, ((7 * b + 3 * h) % 11, h)) for h in range(4)) for b in range(2))
    check(grid, lambda b, h: grid[b][h], inputs(2, (4, 2), (30, 40), seed=seed), seed)


def test_a_function_that_differs_beside_tables_that_do_not(seed: int) -> None:
    """BlockMask.kv_indices has one head, mask_mod is asked for each."""
    every = torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4).contiguous()
    block_mask = BlockMask.from_kv_blocks(
        torch.full((1, 1, 4), 4, dtype=torch.int32), every, BLOCK_SIZE=16, seq_lengths=(50, 50),
        mask_mod=lambda b, h, q, k: (q >= k) & (q - k <= h + 10 * b),
    )  # fmt: skip
    x = inputs(2, (3, 3), (50, 50), seed=seed)
    check(block_mask, lambda b, h: masks.sliding_window(50, 50, (h + 10 * b, 0)), x, seed)


def test_the_check_notices_exchanged_heads() -> None:
    """Negative control."""
    grid = ((masks.causal(20), masks.full(20, 20)),)
    with pytest.raises(AssertionError, match="is off by"):
        check(grid, lambda b, h: grid[0][1 - h], inputs(1, (2, 2), (20, 20)))


# --- compiled ---


def test_compiled_with_a_plan() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(magi.flex_attention, fullgraph=True, backend="aot_eager")
    mask = masks.document([0, 13, 40])
    plan = magi.make_attn_plan(mask, 4, 2, 16, head_dim_v=8, dtype=torch.float32, batch_size=2)
    x = tuple(t.requires_grad_() for t in inputs(2, (4, 2), (40, 40), dtype=torch.float32))
    results = []
    for function in (compiled, magi.flex_attention):
        out, aux = function(*x, block_mask=plan, enable_gqa=True, return_aux=LSE)
        results.append((out, aux.lse, *torch.autograd.grad(out.square().sum() + aux.lse.sum(), x)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    for form in (mask, mask.to_block_mask(16), None):
        with pytest.raises(Exception, match=r"inside torch.compile block_mask must be a plan; outside, make mask"):
            compiled(*x, block_mask=form, enable_gqa=True)
    with pytest.raises(Exception, match=r"score_mod cannot be recognised inside torch.compile; .* softcap=c"):
        compiled(*x, tanh_softcap(3.0), plan, enable_gqa=True)


# --- score_mod ---


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q, k: torch.tanh(score / 7) * 7,
        lambda score, b, h, q, k: 7.0 * torch.tanh(score * (1 / 7.0)),
        lambda score, b, h, q, k: score.div(7.0).tanh().mul(7),
    ],
)
def test_softcaps_are_recognised(score_mod: Callable[..., Tensor]) -> None:
    x = inputs(1, (2, 2), (20, 20))
    expected = magi.flex_flash_attn(*(t.transpose(1, 2) for t in x), masks.causal(20), softcap=7.0).transpose(1, 2)
    assert torch.equal(magi.flex_attention(*x, score_mod, masks.causal(20)), expected)


def test_a_score_mod_that_does_nothing() -> None:
    x = inputs(1, (2, 2), (20, 20))
    assert torch.equal(magi.flex_attention(*x, lambda score, b, h, q, k: score), magi.flex_attention(*x))


BIAS = torch.arange(4.0)
SCORE_MODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "bias": ("aten.add.Tensor", lambda score, b, h, q, k: score + (q - k)),
    "table": ("cannot be traced", lambda score, b, h, q, k: score + BIAS[h]),
    "mask": ("aten.where.self", lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf"))),
    "two caps": ("aten.tanh.default", lambda score, b, h, q, k: 20 * torch.tanh(score / 30)),
    "negative": ("aten.tanh.default", lambda score, b, h, q, k: -20 * torch.tanh(score / -20)),
    "of an index": ("aten.tanh.default", lambda score, b, h, q, k: 20 * torch.tanh(q / 20)),
    "twice": ("aten.tanh.default", lambda score, b, h, q, k: 20 * torch.tanh(torch.tanh(score / 20) * 20 / 20)),
    "rounded": ("aten._to_copy.default", lambda score, b, h, q, k: 5 * torch.tanh(score.bfloat16() / 5)),
    "learned": ("aten.mul.Tensor", lambda score, b, h, q, k: BIAS[3] * torch.tanh(score / BIAS[3])),
    "no score": ("aten.zeros_like.default", lambda score, b, h, q, k: torch.zeros_like(score)),
    "a mask_mod": ("cannot be traced", lambda b, h, q, k: q >= k),
}


@pytest.mark.parametrize(("found", "score_mod"), SCORE_MODS.values(), ids=SCORE_MODS)
def test_other_score_mods_are_refused(found: str, score_mod: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"score_mod must return the score, or c \* .*" + found):
        magi.flex_attention(*inputs(1, (2, 2), (8, 8)), score_mod)


# --- refusals ---


@pytest.mark.parametrize(
    "form", [masks.causal(4096), masks.causal(4096).to_block_mask(128)], ids=["mask", "block mask"]
)
def test_c15_mask_of_other_lengths(form: AttnMask | BlockMask) -> None:
    q = torch.randn(1, 2, 1000, 8)
    with pytest.raises(ValueError, match=r"block_mask must have shape \(1000, 1000\).* got \(4096, 4096\)"):
        magi.flex_attention(q, q, q, block_mask=form, return_aux=LSE)
    cropped = masks.causal(4096).clip((0, 1000), (0, 1000))
    assert torch.equal(
        magi.flex_attention(q, q, q, block_mask=cropped), magi.flex_attention(q, q, q, block_mask=masks.causal(1000))
    )


Q = torch.zeros(2, 4, 8, 16)
MASK = masks.causal(8)
REFUSALS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("no tensor", TypeError, "key must be a tensor, got NoneType", {"key": None}),
    ("shape", ValueError, r"query must have shape \[B, heads, length, head_dim\], got \[4, 8, 16\]", {"query": Q[0]}),
    ("heads", ValueError, "as many heads, got 4 and 2; pass enable_gqa=True", {"key": Q[:, :2], "value": Q[:, :2]}),
    ("batch", ValueError, "batch size 3", {"query": Q[:1].expand(3, -1, -1, -1)}),
    ("no mask", TypeError, r"block_mask must be a BlockMask, .* got function", {"block_mask": MODS["causal"]}),
    ("dense mask", TypeError, r"block_mask must be a BlockMask, .* got Tensor", {"block_mask": MASK.to_dense()}),
    ("no masks", TypeError, r"block_mask\[b\]\[h\] must be AttnMasks, got int", {"block_mask": ((1,),)}),
    ("elements", ValueError, r"2 \(or 1\) elements and 4 \(or 1\) heads, got 3 x \[1\]",
     {"block_mask": ((MASK,),) * 3}),
    ("heads of masks", ValueError, r"got 1 x \[2\]", {"block_mask": ((MASK,) * 2,)}),
    ("heads of blocks", ValueError, "H must be 3, as the BlockMask has it, got 4",
     {"block_mask": create_block_mask(MODS["causal"], 1, 3, 8, 8, "cpu", 8)}),
    ("plan", ValueError, r"query must have shape \[8, 4, 16\]",
     {"block_mask": magi.make_attn_plan(MASK, 4, 4, 16, dtype=torch.float32)}),
    ("max_scores", NotImplementedError, "no largest score of each row; flex_flash_attn",
     {"return_aux": torch_flex.AuxRequest(max_scores=True)}),
    ("our request", TypeError, "return_aux must be a torch.nn.attention.flex_attention.AuxRequest or None, got Aux",
     {"return_aux": magi.AuxRequest(lse=True)}),
    ("both requests", ValueError, "cannot both be given", {"return_aux": LSE, "return_lse": True}),
    ("torch's options", TypeError, r"kernel_options must have keys among .* got 'BLOCK_M'",
     {"kernel_options": {"BLOCK_M": 64}}),
    ("no function", TypeError, "score_mod must be a function or None, got float", {"score_mod": 30.0}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "change"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(error: type[Exception], text: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        magi.flex_attention(**(dict.fromkeys(("query", "key", "value"), Q) | {"block_mask": MASK} | change))
