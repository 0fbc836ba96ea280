"""Attention of a stage by the Triton kernels: tiles, work lists and launches."""

from __future__ import annotations

import torch
import triton

from torch_magi.kernels import tiles
from torch_magi.kernels.triton_forward import forward_kernel, join_kernel
from torch_magi.kernels.work_lists import WorkList, work_list
from torch_magi.plan import AttnPlan
from torch_magi.plan.types import StagePlan

Tensor = torch.Tensor

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
FARTHEST_ROW = 1 << 23  # elements; the rows of a tile are addressed with 32 bits


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one stage. Arguments as in `flex_attn_fwd`, checked before; `scale` is positive."""
    q, k, v = (_addressable(x) for x in (q, k, v))
    (rows, heads, dim), heads_kv, dim_v = q.shape, k.shape[1], v.shape[2]
    tile = tiles.choose_tile(tiles.FORWARD, (dim, dim_v), q.dtype, tiles.shared_memory(q.device))
    pack = tiles.heads_in_tile(heads, heads_kv, tile.queries)
    groups = heads // pack
    work = work_list(part, "q", tile.queries // pack, tile.keys, 1, groups, q.device)
    out = q.new_empty((rows, heads, dim_v), dtype=torch.float32 if out_float32 else q.dtype)
    lse = q.new_empty((rows, heads), dtype=torch.float32)
    max_logits = q.new_full((heads if return_max_logits else 0,), -torch.inf, dtype=torch.float32)
    parts: tuple[Tensor | None, ...] = (None, None, None)
    if work.num_slots:
        shape = (work.num_slots, groups, tile.queries)
        parts = tuple(q.new_empty(s, dtype=torch.float32) for s in (shape, shape, (*shape, dim_v)))
    sink, sink_row = _one_sink(sink)
    before = (None, None) if out_before is None or lse_before is None else (out_before.contiguous(), lse_before.contiguous())
    if rows:
        blocks = {"DIM": dim, "DIM_V": dim_v, "BLOCK": tiles.block_size(dim), "BLOCK_V": tiles.block_size(dim_v)}
        with torch.cuda.device_of(q):
            forward_kernel[(len(work.items) * groups,)](
                q, k, v, *_lists(work), _mask_of(part.hidden("k", q.device)), sink, *before, out, lse,
                max_logits if return_max_logits else None, *parts, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
                sink_row, len(work.items), len(k), heads, scale, softcap,
                SOFTCAP=softcap > 0, HEADS_PER_KV=heads // heads_kv, PACK=pack, QUERIES=tile.queries, KEYS=tile.keys,
                PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages, **blocks,
            )  # fmt: skip
            if work.num_slots:
                join_kernel[(len(work.splits), groups)](
                    work.splits, *parts, sink, *before, out, lse, sink_row, heads, PACK=pack, QUERIES=tile.queries,
                    DIM_V=dim_v, BLOCK_V=blocks["BLOCK_V"],
                )  # fmt: skip
    return out, lse, max_logits


def _lists(work: WorkList) -> tuple[Tensor, Tensor, Tensor]:
    return work.items, work.runs, work.bands


def _addressable(x: Tensor) -> Tensor:
    """Return a tensor whose rows have adjacent elements, and are not too far from each other."""
    return x if x.stride(2) == 1 and x.stride(0) < FARTHEST_ROW else x.contiguous()


def _mask_of(hidden: Tensor | None) -> Tensor | None:
    return None if hidden is None else hidden.view(torch.uint8)


def _one_sink(sink: Tensor | None) -> tuple[Tensor | None, int]:
    """Return one sink logit for each head, or for each row and head, and the stride of rows."""
    if sink is None:
        return None, 0
    one = sink.squeeze(-2) if sink.shape[-2] == 1 else torch.logsumexp(sink, -2)
    one = one.contiguous()
    return one, one.stride(0) if one.ndim == 2 else 0
