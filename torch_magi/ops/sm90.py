"""The forward kernel for GPUs of compute capability 9.0: which tiles it wants, and inputs in the form it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from torch_magi.ops.attn_tiles import flex_attn_fwd_tiles
from torch_magi.plan import AttnPlan
from torch_magi.plan.types import StagePlan

Tensor = torch.Tensor

MAX_HEADS_IN_TILE = 8


class Width(NamedTuple):
    """The keys in a tile, and what a tile and an item cost on an H200, in cycles of a block; 0: nothing to choose."""

    keys: int
    tile: int = 0
    item: int = 0


class Instance(NamedTuple):
    """What the kernel was built for (csrc/cuda/sm90).

    head_dim, head_dim_v: the largest that fit.
    softcap: with or without.
    rows: of a query tile: tokens x query heads that share a KV head.
    widths: of key tiles.
    """

    head_dim: int
    head_dim_v: int
    softcap: bool
    rows: int
    widths: tuple[Width, ...]


INSTANCES = (
    Instance(64, 64, False, 192, (Width(128),)),
    Instance(64, 64, True, 192, (Width(112),)),
    Instance(128, 128, False, 128, (Width(128, 2351, 2540), Width(160, 2851, 2740))),
    Instance(128, 128, True, 192, (Width(80),)),
    Instance(192, 128, False, 128, (Width(96),)),
    Instance(192, 128, True, 128, (Width(96),)),
    Instance(256, 256, False, 128, (Width(80),)),
    Instance(256, 256, True, 128, (Width(80),)),
)
PARTIAL_TILE = 0.2  # what masking adds to a tile, in tiles


def find_instance(head_dim: int, head_dim_v: int, softcap: bool = False) -> Instance | None:
    """Return the smallest instance that holds these head dims, or None."""
    fitting = (i for i in INSTANCES if head_dim <= i.head_dim and head_dim_v <= i.head_dim_v and softcap == i.softcap)
    return next(fitting, None)


def choose_tile(plan: AttnPlan, part: StagePlan, softcap: bool) -> tuple[int, int]:
    """Return the tokens and keys of a tile: query heads packed as far as they go, and the cheaper width.

    On the yardstick masks from 2048 to 32768 tokens the chosen width was within 1 % of the faster one; the other
    one cost up to 17 % (prefix documents, 2048).
    """
    instance = find_instance(plan.head_dim, plan.head_dim_v, softcap)
    assert instance is not None, "choose_backend refuses other head dims"
    ratio = plan.num_heads_q // plan.num_heads_kv
    rows = instance.rows // min(ratio & -ratio, MAX_HEADS_IN_TILE)

    def cost(width: Width) -> float:
        items, runs, _ = part.tile_arrays("q", rows, width.keys)
        partial = runs[runs[:, 3] > 0, 1].sum()
        return float(width.tile * (items[:, 4].sum() + PARTIAL_TILE * partial) + width.item * len(items))

    return rows, min(instance.widths, key=cost).keys


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
    rows, keys = part.cached(("sm90 tile", softcap > 0), lambda: choose_tile(plan, part, softcap > 0))
    tiles = part.tiles("q", rows, keys, q.device)
    out, lse, max_logits = flex_attn_fwd_tiles(
        q, k, v, *tiles, sink, rows, keys, scale, softcap, out_float32, return_max_logits, sm_margin
    )
    return out[..., :dim_v], lse, max_logits
