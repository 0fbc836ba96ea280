"""flex_attention with sixty mask functions, beside torch's own flex_attention and float64 truth."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

import torch_magi as magi
from torch_magi.masks import AttnMask
from torch_magi.testing import assert_close_to_truth, low_attention, reference_attention

path = Path(__file__).parent.parent / "masks" / "mask_functions.py"
spec = importlib.util.spec_from_file_location("mask_functions", path)
assert spec is not None and spec.loader is not None
mask_functions: Any = importlib.util.module_from_spec(spec)
sys.modules["mask_functions"] = mask_functions  # dataclasses look their module up
spec.loader.exec_module(mask_functions)

FUNCTIONS = mask_functions.FUNCTIONS
B, HEADS, HEADS_KV = 2, 2, 1
LSE = torch_flex.AuxRequest(lse=True)
Attention = Callable[..., tuple[Tensor, Tensor, Tensor]]


def by_head(attention: Attention, dense: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function of q, k and v [B, heads, length, head_dim] that computes every element and head by itself."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        results = []
        for b, h in itertools.product(range(B), range(HEADS)):
            one = (x[b, i][:, None] for x, i in ((q, h), (k, h * HEADS_KV // HEADS), (v, h * HEADS_KV // HEADS)))
            results.append([x[:, 0] for x in attention(*one, dense[b, h])[:2]])
        out, lse = (torch.stack(x).unflatten(0, (B, HEADS)) for x in zip(*results, strict=True))
        return out, lse

    return run


def with_gradients(run: Callable[..., Any], x: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    """Return out, lse and the gradients of q, k and v; dlse is used where a query sees something."""
    leaves = [t.detach().requires_grad_() for t in x]
    out, lse = run(*leaves)
    seen = lse.isfinite()
    loss = (out.to(dout.dtype) * dout).sum() + (torch.where(seen, lse, 0.0) * dlse).sum()
    return out, lse, *torch.autograd.grad(loss, leaves)


def dense_of(mask_mod: Callable[..., Tensor], sq: int, sk: int) -> Tensor:
    """Return the pairs of every element and head, [B, heads, sq, sk]."""
    grid = itertools.product(range(B), range(HEADS))
    return torch.stack([mask_functions.dense(mask_mod, sq, sk, b, h) for b, h in grid]).unflatten(0, (B, HEADS))


def run_flex(attention: Callable[..., Any], block_mask: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=LSE)
        return out, aux.lse

    return run


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_the_cpu(name: str, seed: int) -> None:
    """Everything in float64. Torch's has no gradients here."""
    gen = torch.Generator().manual_seed(seed)
    for sq, sk in FUNCTIONS[name].small[-2:]:
        mask_mod = FUNCTIONS[name].build(sq, sk)
        dense = dense_of(mask_mod, sq, sk)
        block_mask = create_block_mask(mask_mod, B, HEADS, sq, sk, "cpu", 64)
        shapes = ((B, HEADS, sq, 16), (B, HEADS_KV, sk, 16), (B, HEADS_KV, sk, 8), (B, HEADS, sq, 8), (B, HEADS, sq))
        *x, dout, dlse = (torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes)
        found = with_gradients(run_flex(magi.flex_attention, block_mask), tuple(x), dout, dlse)
        truth = with_gradients(by_head(reference_attention, dense), tuple(x), dout, dlse)
        for of, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, truth, strict=True):
            assert_close_to_truth(a, b, None, name=of)
        torchs = run_flex(torch_flex.flex_attention, block_mask)(*x)
        for of, a, b in zip(("out", "lse"), found[:2], torchs, strict=True):
            assert_close_to_truth(a, b, None, name=f"{of} beside torch's")


@pytest.fixture(scope="module")
def compiled() -> Callable[..., Any]:
    """Torch's kernels. They read the pairs from a table, so that one serves all functions of the same lengths."""
    return torch.compile(torch_flex.flex_attention, dynamic=False)


def from_table(pairs: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: pairs[b, h, q_idx, kv_idx]


@pytest.mark.unpoisoned
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_gpu(name: str, seed: int, compiled: Callable[..., Any]) -> None:
    """Both compute bfloat16 within the rule, gradients too."""
    gen = torch.Generator().manual_seed(seed)
    sq, sk = FUNCTIONS[name].small[-1]
    mask_mod = FUNCTIONS[name].build(sq, sk)
    dense = dense_of(mask_mod, sq, sk).cuda()
    shapes = ((B, HEADS, sq, 64), (B, HEADS_KV, sk, 64), (B, HEADS_KV, sk, 64), (B, HEADS, sq, 64))
    *low, dout = (torch.randn(shape, generator=gen).bfloat16().cuda() for shape in shapes)
    dlse = torch.randn(B, HEADS, sq, generator=gen).cuda()
    exact = tuple(x.double() for x in low)
    truth = with_gradients(by_head(reference_attention, dense), exact, dout.double(), dlse.double())
    naive = with_gradients(by_head(low_attention, dense), tuple(low), dout, dlse)
    ours = run_flex(magi.flex_attention, AttnMask.from_mask_mod(mask_mod, sq, sk, B=B, H=HEADS))
    torchs = run_flex(compiled, create_block_mask(from_table(dense), B, HEADS, sq, sk, "cuda"))
    for whose, run, bands in (("ours", ours, 1), ("torch's", torchs, 3)):
        found = with_gradients(run, tuple(low), dout, dlse)
        for of, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), found, truth, naive, strict=True):
            assert_close_to_truth(a, b, c, torch.bfloat16, name=f"{of}, {whose}", bands=bands)
