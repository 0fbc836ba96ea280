"""A small decoder whose attention runs over a sequence that is sharded across ranks.

Everything but the attention works on single rows, so the model never needs to know which rows it holds: it
takes the positions of its rows as a tensor, and a plan that knows the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_magi as magi
from packed_text.data import NO_TARGET, VOCABULARY


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder."""

    layers: int = 4
    dim: int = 128
    heads_q: int = 4
    heads_kv: int = 2
    hidden: int = 384

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.dim // self.heads_q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding. x: [rows, heads, head_dim]; cos, sin: [rows, 1, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """Grouped-query self-attention over the whole sequence, of which this rank holds some rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.to_q = nn.Linear(config.dim, config.heads_q * self.head_dim, bias=False)
        self.to_k = nn.Linear(config.dim, config.heads_kv * self.head_dim, bias=False)
        self.to_v = nn.Linear(config.dim, config.heads_kv * self.head_dim, bias=False)
        self.to_out = nn.Linear(config.heads_q * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plan: magi.AttnPlan, group: str | None) -> Tensor:
        q, k, v = (to(x).unflatten(-1, (-1, self.head_dim)) for to in (self.to_q, self.to_k, self.to_v))
        out = magi.context_parallel_attn(rotate(q, cos, sin), rotate(k, cos, sin), v, plan, group)
        return self.to_out(out.flatten(-2))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.gate_and_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plan: magi.AttnPlan, group: str | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, plan, group)
        gate, up = self.gate_and_up(self.feed_forward_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A byte-level language model with tied embeddings."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("frequencies", 10000.0**-exponents, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
        for block in self.blocks:  # keep the residual stream's size independent of the depth
            for last in (block.attention.to_out, block.down):
                last.weight.data.div_((2 * config.layers) ** 0.5)

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor, plan: magi.AttnPlan, group: str | None
    ) -> Tensor:
        """Return the summed cross-entropy of this rank's rows.

        Args:
            tokens, targets, positions: int64 [rows]; this rank's dispatched rows.
            plan: of the whole batch, for this rank.
            group: name of the process group that shares the sequence; None for one rank.
        """
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, plan, group)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float(), targets, ignore_index=NO_TARGET, reduction="sum")
