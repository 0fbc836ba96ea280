"""The forward kernel for GPUs of compute capability 9.0: which tiles it wants, and inputs in the form it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from torch_magi.ops.attn_tiles import flex_attn_fwd_tiles
from torch_magi.plan import AttnPlan
from torch_magi.plan.types import StagePlan

Tensor = torch.Tensor

TILE_ROWS = 128  # tokens x query heads that share a KV head
MAX_HEADS_IN_TILE = 8


class Width(NamedTuple):
    """The keys in a tile, and what a tile and an item cost on an H200, in cycles (times of one block)."""

    keys: int
    tile: int
    item: int


# Largest head_dim and head_dim_v -> widths that the kernel was built for (csrc/cuda/sm90).
INSTANCES = {
    (64, 64): (Width(128, 1, 1),),
    (128, 128): (Width(128, 2351, 2540), Width(160, 2851, 2740)),
    (192, 128): (Width(96, 1, 1),),
    (256, 256): (Width(80, 1, 1),),
}
PARTIAL_TILE = 0.2  # what masking adds to a tile, in tiles


def find_instance(head_dim: int, head_dim_v: int) -> tuple[Width, ...] | None:
    """Return the widths of the smallest instance that holds these head dims, or None."""
    for (d, dv), widths in INSTANCES.items():
        if head_dim <= d and head_dim_v <= dv:
            return widths
    return None


def heads_in_tile(plan: AttnPlan) -> int:
    """Return how many query heads share a tile: the power of two that divides their number per KV head."""
    ratio = plan.num_heads_q // plan.num_heads_kv
    return min(ratio & -ratio, MAX_HEADS_IN_TILE)


def choose_width(plan: AttnPlan, part: StagePlan) -> int:
    """Return the width of key tiles that the plan's lists are cheapest with."""
    widths = find_instance(plan.head_dim, plan.head_dim_v)
    assert widths is not None, "choose_backend refuses other head dims"
    if len(widths) == 1:
        return widths[0].keys
    rows = TILE_ROWS // heads_in_tile(plan)

    def cost(width: Width) -> float:
        items, runs, _ = part.tile_arrays("q", rows, width.keys)
        partial = runs[runs[:, 3] > 0, 1].sum()
        return float(width.tile * (items[:, 4].sum() + PARTIAL_TILE * partial) + width.item * len(items))

    return min(widths, key=cost).keys


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    part: StagePlan,
    sink: Tensor | None,
    scale: float,
    softcap: float,
    out_float32: bool,
    return_max_logits: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one stage. Arguments as in `flex_attn_fwd`, checked before."""
    if scale < 0:
        q, scale = -q, -scale
    elif scale == 0:  # every logit is 0
        q, scale = torch.zeros_like(q), 1.0
    hidden = part.hidden_keys(v.device)
    if hidden is not None:  # their weight is 0, but 0 * NaN is NaN
        v = v.masked_fill(hidden[:, None, None], 0.0)
    dim_v = v.shape[2]
    q, k, v = (pad(x, (0, -x.shape[2] % 8)) if x.shape[2] % 8 else x for x in (q, k, v))
    rows = TILE_ROWS // heads_in_tile(plan)
    width: int = part.cached(("sm90", rows), lambda: choose_width(plan, part))
    tiles = part.tiles("q", rows, width, q.device)
    out, lse, max_logits = flex_attn_fwd_tiles(
        q, k, v, *tiles, sink, rows, width, scale, softcap, out_float32, return_max_logits, sm_margin
    )
    return out[..., :dim_v], lse, max_logits
