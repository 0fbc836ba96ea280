"""flex_attn_fwd_tiles and flex_attn_bwd_tiles: what the compiled library implements, on plain tensors.

`flex_attn` calls them with the tile plans of a stage; autograd is there.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_magi.ops._library import PLAN_TAGS, define

Tensor = torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, partial results and merges for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fake_forward(q: Tensor, v: Tensor, out_float32: bool, return_max_logits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results of a forward pass."""
    wide = accumulation_dtype(q.dtype)
    rows, heads = q.shape[0], q.shape[1]
    return (
        q.new_empty((rows, heads, v.shape[2]), dtype=wide if out_float32 else q.dtype),
        q.new_empty((rows, heads), dtype=wide),
        q.new_empty((heads if return_max_logits else 0,), dtype=torch.float32),
    )


def fake_backward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, grad_float32: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty results of a backward pass."""
    dtype = accumulation_dtype(q.dtype) if grad_float32 else q.dtype
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    return dq, dk, dv, q.new_empty((0,), dtype=torch.float32) if sink is None else sink.new_empty(sink.shape)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    items: Tensor,
    runs: Tensor,
    bands: Tensor,
    sink: Tensor | None,
    tile_rows: int,
    tile_cols: int,
    scale: float,
    softcap: float,
    out_float32: bool,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_forward(q, v, out_float32, return_max_logits)


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_items: Tensor,
    q_runs: Tensor,
    q_bands: Tensor,
    k_items: Tensor,
    k_runs: Tensor,
    k_bands: Tensor,
    sink: Tensor | None,
    tile_shape: list[int],
    scale: float,
    softcap: float,
    grad_float32: bool,
) -> Any:
    return fake_backward(q, k, v, sink, grad_float32)


flex_attn_fwd_tiles = define(
    "flex_attn_fwd_tiles(Tensor q, Tensor k, Tensor v, Tensor items, Tensor runs, Tensor bands, Tensor? sink, "
    "int tile_rows, int tile_cols, float scale, float softcap, bool out_float32, bool return_max_logits)"
    " -> (Tensor out, Tensor lse, Tensor max_logits)",
    _fake_forward,
    PLAN_TAGS,
)
flex_attn_bwd_tiles = define(
    "flex_attn_bwd_tiles(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor q_items, Tensor q_runs, Tensor q_bands, Tensor k_items, Tensor k_runs, Tensor k_bands, Tensor? sink, "
    "int[] tile_shape, float scale, float softcap, bool grad_float32)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    _fake_backward,
    PLAN_TAGS,
)
