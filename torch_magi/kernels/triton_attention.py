"""Attention of a stage by the Triton kernels: tiles, work lists and launches."""

from __future__ import annotations

from typing import Any

import torch
import triton

from torch_magi.kernels import tiles
from torch_magi.kernels.triton_backward import add_kernel, keys_kernel, queries_kernel, rows_kernel
from torch_magi.kernels.triton_forward import forward_kernel, join_kernel
from torch_magi.kernels.work_lists import work_list
from torch_magi.plan import AttnPlan
from torch_magi.plan.types import StagePlan

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# With the environment variable TRITON_INTERPRET=1 Triton runs its kernels on the CPU, for tests.
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
FARTHEST_ROW = 1 << 23  # elements; the rows of a tile are addressed with 32 bits
JOIN_WARPS = 8  # of programs that join parts, which hold a whole tile in float32
ROWS_TILE = 64  # pairs (row, head) of a program of `rows_kernel`


def serves(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    """Return whether these kernels can compute an attention."""
    if dtype not in DTYPES or max(head_dims) > tiles.MAX_HEAD_DIM:
        return False
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    part: StagePlan,
    sink: Tensor | None,
    out_before: Tensor | None,
    lse_before: Tensor | None,
    scale: float,
    softcap: float,
    out_float32: bool,
    return_max_logits: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one stage. Arguments as in `flex_attn_fwd`, checked before; `scale` is positive."""
    _check_sm_margin(sm_margin)
    q, k, v = (_addressable(x) for x in (q, k, v))
    (rows, heads, dim), heads_kv, dim_v = q.shape, k.shape[1], v.shape[2]
    tile = tiles.choose_tile(tiles.FORWARD, (dim, dim_v), q.dtype, tiles.shared_memory(q.device))
    pack = tiles.heads_in_tile(heads, heads_kv, tile.queries)
    groups = heads // pack
    work = work_list(part, "q", tile.queries // pack, tile.keys, q.device, groups)
    one_sink, sink_row = (None, 0) if sink is None else _one_sink(sink, rows, heads)
    before = [None if x is None else x.contiguous() for x in (out_before, lse_before)]
    out = q.new_empty((rows, heads, dim_v), dtype=torch.float32 if out_float32 else q.dtype)
    lse = q.new_empty((rows, heads), dtype=torch.float32)
    max_logits = q.new_full((heads if return_max_logits else 0,), -torch.inf, dtype=torch.float32)
    slots = (work.num_slots, groups, tile.queries)
    parts = [q.new_empty(s, dtype=torch.float32) for s in (slots, slots, (*slots, dim_v))]
    shape = _shape_of(q, k, v, softcap)
    if not rows:
        return out, lse, max_logits
    with torch.cuda.device_of(q):
        forward_kernel[(len(work.items) * groups,)](
            q, k, v, *work[:3], one_sink, *before, out, lse, max_logits if return_max_logits else None, *parts,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], sink_row, len(work.items), len(k), heads, scale, softcap,
            **shape, **_tile_of(tile, pack),
        )  # fmt: skip
        if work.num_slots:
            join_kernel[(len(work.splits), groups)](
                work.splits, *parts, one_sink, *before, out, lse, sink_row, heads, PACK=pack, QUERIES=tile.queries,
                **{name: shape[name] for name in ("DIM_V", "BLOCK_V", "TWOS")}, num_warps=JOIN_WARPS,
            )  # fmt: skip
    return out, lse, max_logits


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq_before: Tensor | None,
    plan: AttnPlan,
    part: StagePlan,
    sink: Tensor | None,
    scale: float,
    softcap: float,
    grad_float32: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of one stage. Arguments as in `flex_attn_bwd`, checked before; `scale` is positive."""
    _check_sm_margin(sm_margin)
    dout, q, k, v = (_addressable(x) for x in (dout, q, k, v))
    (rows, heads, dim), heads_kv, dim_v = q.shape, k.shape[1], v.shape[2]
    shared = tiles.shared_memory(q.device)
    q_tile, k_tile = (
        tiles.choose_tile(c, (dim, dim_v), q.dtype, shared) for c in (tiles.BACKWARD_QUERIES, tiles.BACKWARD_KEYS)
    )
    pack = tiles.heads_in_tile(heads, heads_kv, min(q_tile.queries, k_tile.queries))
    groups, repeats = heads // pack, heads // heads_kv // pack
    q_work = work_list(part, "q", q_tile.queries // pack, q_tile.keys, q.device)
    k_work = work_list(part, "k", k_tile.keys, k_tile.queries // pack, q.device, heads_kv, repeats)
    dtype = torch.float32 if grad_float32 else q.dtype
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    row_logit, delta = (q.new_empty((groups, rows, pack), dtype=torch.float32) for _ in range(2))
    slots = (k_work.num_slots, heads_kv, k_tile.keys)
    parts = [q.new_empty((*slots, d), dtype=torch.float32) for d in (dim, dim_v)]
    shape = _shape_of(q, k, v, softcap)
    strides = [stride for x in (dout, q, k, v) for stride in x.stride()[:2]]
    numbers = (rows, len(k), heads, scale, softcap)
    with torch.cuda.device_of(q):
        if rows:
            rows_kernel[(triton.cdiv(rows * pack, ROWS_TILE), groups)](
                dout, out.contiguous(), lse.contiguous(), None if dlse is None else dlse.contiguous(), row_logit, delta,
                *dout.stride()[:2], rows, heads, PACK=pack, QUERIES=ROWS_TILE,
                **{name: shape[name] for name in ("DIM_V", "BLOCK_V", "TWOS")},
            )  # fmt: skip
            queries_kernel[(len(q_work.items) * groups,)](
                dout, q, k, v, row_logit, delta, *q_work[:3], None if dq_before is None else dq_before.contiguous(), dq,
                *strides, len(q_work.items), *numbers, **shape, **_tile_of(q_tile, pack),
            )  # fmt: skip
        if len(k):
            keys_kernel[(len(k_work.items) * heads_kv,)](
                dout, q, k, v, row_logit, delta, *k_work[:3], dk, dv, *parts, *strides, len(k_work.items), *numbers,
                **shape, **_tile_of(k_tile, pack),
            )  # fmt: skip
        if k_work.num_slots:
            add_kernel[(len(k_work.splits), heads_kv)](
                k_work.splits, *parts, dk, dv, heads_kv, KEYS=k_tile.keys,
                **{name: shape[name] for name in ("DIM", "DIM_V", "BLOCK", "BLOCK_V")}, num_warps=JOIN_WARPS,
            )  # fmt: skip
    return dq, dk, dv, _sink_gradient(sink, lse, delta)


def _check_sm_margin(sm_margin: int) -> None:
    if sm_margin:
        raise NotImplementedError(
            f"sm_margin must be 0 for the kernels in Triton, whose blocks the GPU places, got {sm_margin}"
        )


def _shape_of(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> dict[str, Any]:
    """Return what the kernels are compiled for, besides tiles."""
    dim, dim_v = q.shape[2], v.shape[2]
    return {
        "SOFTCAP": softcap > 0,
        "HEADS_PER_KV": q.shape[1] // k.shape[1],
        "DIM": dim,
        "DIM_V": dim_v,
        "BLOCK": tiles.block_size(dim),
        "BLOCK_V": tiles.block_size(dim_v),
        "PRECISION": "ieee",  # of products of float32; TF32 has 10 bits
        "TWOS": q.dtype != torch.float32,
    }


def _tile_of(tile: tiles.Tile, pack: int) -> dict[str, Any]:
    return {
        "PACK": pack,
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,  # exponents are multiply-adds
    }


def _addressable(x: Tensor) -> Tensor:
    """Return a tensor whose rows have adjacent elements, and are not too far from each other."""
    return x if x.stride(2) == 1 and x.stride(0) < FARTHEST_ROW else x.contiguous()


def _one_sink(sink: Tensor, rows: int, heads: int) -> tuple[Tensor, int]:
    """Return one sink logit for each head, or for each row and head, and the stride of rows.

    Raises:
        TypeError, ValueError: if it is no sink of these rows and heads.
    """
    if sink.dtype != torch.float32:
        raise TypeError(f"sink must be torch.float32, got {sink.dtype}")
    if sink.shape not in ((sink.shape[-2], heads), (rows, sink.shape[-2], heads)):
        raise ValueError(f"sink must have shape [n, {heads}] or [{rows}, n, {heads}], got {list(sink.shape)}")
    one = (sink.squeeze(-2) if sink.shape[-2] == 1 else torch.logsumexp(sink, -2)).contiguous()
    return one, heads if one.ndim == 2 else 0


def _sink_gradient(sink: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """Return d loss / d sink = -exp(sink - lse) * delta, summed over the rows that share a sink.

    Args:
        lse: [rows, heads].
        delta: [groups, rows, heads / groups].
    """
    if sink is None:
        return lse.new_empty(0)
    delta = delta.transpose(0, 1).reshape(lse.shape)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    per_row = -torch.exp(sink - lse[:, None]) * delta[:, None]
    return per_row if sink.ndim == 3 else per_row.sum(0)
