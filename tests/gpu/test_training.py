"""Training through the kernels of a GPU, beside float32 on the CPU and torch's own attention; memory."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torch_magi as magi

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
from packed_text import model as packed_model
from packed_text.data import make_batch, read_corpus

STEPS, LENGTH, LEARNING_RATE = 200, 1024, 1e-3
Attention = Callable[..., Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, plan: magi.AttnPlan, group: None) -> Tensor:
    """Compute the same attention with torch, in the dtype that autocast chooses."""
    dense = plan.mask.to_dense().to(q.device)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, attn_mask=dense, enable_gqa=True)
    return out[0].transpose(0, 1)


def losses(device: str, corpus: list[Any], attention: Attention, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Train the example's model on one device, compiled where torch_magi does the attention."""
    monkeypatch.setattr(packed_model.magi, "context_parallel_attn", attention)
    config = packed_model.ModelConfig()
    model = packed_model.Decoder(config, 0).to(device)
    step = model if attention is sdpa else torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6)
    on_gpu, found = device == "cuda", []
    for number in range(STEPS):
        batch = make_batch(corpus, LENGTH, 0, number)
        plan = magi.make_attn_plan(
            magi.masks.document(batch.cu_seqlens, causal=True), config.heads_q, config.heads_kv, config.head_dim,
            dtype=torch.bfloat16 if on_gpu else torch.float32, device=device,
        )  # fmt: skip
        rows = [x.to(device) for x in (batch.tokens, batch.targets, batch.positions)]
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            loss = step(*rows, plan, None) / batch.num_targets
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / 10)
        optimizer.step()
        found.append(loss.item())
    return found


def test_training_follows_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss differs from a float32 run on the CPU at most twice as far as with torch's own attention."""
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]), 4 << 20)
    ours = magi.context_parallel_attn
    truth = losses("cpu", corpus, sdpa, monkeypatch)
    found = losses("cuda", corpus, ours, monkeypatch)
    peer = losses("cuda", corpus, sdpa, monkeypatch)
    distance, allowed = (max(abs(a - b) for a, b in zip(x, truth, strict=True)) for x in (found, peer))
    print(f"loss {truth[0]:.4f} -> {truth[-1]:.4f}; largest difference {distance:.4f}, with torch's {allowed:.4f}")
    assert truth[-1] < truth[0] - 2
    assert distance <= 2 * allowed


def test_memory_grows_with_the_length_alone() -> None:
    def peak(tokens: int) -> int:
        plan = magi.make_attn_plan(magi.masks.causal(tokens), 16, 2, 128, device="cuda")
        q, k, v = (
            torch.randn(tokens, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (16, 2, 2)
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        magi.flex_flash_attn(q, k, v, plan).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    peak(4096)
    assert peak(32768) <= 2.1 * peak(16384)
