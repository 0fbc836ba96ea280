"""The kernels for GPUs of compute capability 9.0: which tiles they want, and inputs in the form they take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from torch_magi import _planner
from torch_magi.kernels.work_lists import choose_split, count_multiprocessors
from torch_magi.ops._library import PLAN_TAGS, define
from torch_magi.ops.attn_tiles import fake_backward, fake_forward
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

_forward = define(
    "flex_attn_fwd_sm90(Tensor q, Tensor k, Tensor v, Tensor items, Tensor runs, Tensor bands, Tensor splits, "
    "Tensor? sink, Tensor? out_before, Tensor? lse_before, int tile_rows, int tile_cols, int num_slots, float scale, "
    "float softcap, bool out_float32, bool return_max_logits, int sm_margin)"
    " -> (Tensor out, Tensor lse, Tensor max_logits)",
    lambda q, k, v, *rest: fake_forward(q, v, *rest[-3:-1]),
    PLAN_TAGS,
)


_backward = define(
    "flex_attn_bwd_sm90(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? dq_before, Tensor q_items, Tensor q_runs, Tensor q_bands, Tensor k_items, Tensor k_runs, Tensor k_bands, "
    "Tensor k_splits, Tensor? sink, int tile_rows, int tile_cols, int num_slots, float scale, float softcap, "
    "bool grad_float32, int sm_margin) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    lambda dout, dlse, q, k, v, *rest: fake_backward(q, k, v, rest[10], rest[-2]),
    PLAN_TAGS,
)
# What the dK and dV kernel is built with, and where its tiles of queries may begin (flex_attn_bwd_dkdv.h).
BACKWARD_KEYS, BACKWARD_QUERIES, ROW_ALIGNMENT = 128, 64, 4
# What the dQ kernel is built with, in the order of preference; costs in cycles of a block, on an H200.
DQ_INSTANCES = (
    Instance(64, 64, False, 128, (Width(128),)),
    Instance(64, 64, True, 128, (Width(96),)),
    Instance(128, 128, False, 128, (Width(96, 2400, 6000), Width(64, 1730, 2500))),
    Instance(128, 128, True, 128, (Width(80),)),
    Instance(192, 128, False, 128, (Width(80),)),
    Instance(192, 128, True, 128, (Width(64),)),
    Instance(256, 256, False, 128, (Width(48),)),
    Instance(256, 256, True, 128, (Width(48),)),
)


class ForwardTiles(NamedTuple):
    """A tile plan in the form the forward kernel takes; tensors on its device.

    tokens, keys: of a tile.
    items, runs, bands: csrc/include/tile_plan.h.
    splits: int32 [n, 4]; rows whose keys several items share.
    num_slots: parts of these.
    """

    tokens: int
    keys: int
    items: Tensor
    runs: Tensor
    bands: Tensor
    splits: Tensor
    num_slots: int


def find_instance(
    head_dim: int, head_dim_v: int, softcap: bool = False, instances: tuple[Instance, ...] = INSTANCES
) -> Instance | None:
    """Return the smallest instance that holds these head dims, or None."""
    fitting = (i for i in instances if head_dim <= i.head_dim and head_dim_v <= i.head_dim_v and softcap == i.softcap)
    return next(fitting, None)


def choose_tile(
    plan: AttnPlan, part: StagePlan, softcap: bool, instances: tuple[Instance, ...] = INSTANCES
) -> tuple[int, int]:
    """Return the tokens and keys of a tile: query heads packed as far as they go, and the cheaper width.

    On the yardstick masks from 2048 to 32768 tokens the chosen width was within 1 % of the faster one; the other
    one cost up to 17 % (prefix documents, 2048).
    """
    instance = find_instance(plan.head_dim, plan.head_dim_v, softcap, instances)
    assert instance is not None, "choose_backend refuses other head dims"
    ratio = plan.num_heads_q // plan.num_heads_kv
    rows = instance.rows // min(ratio & -ratio, MAX_HEADS_IN_TILE)

    def cost(width: Width) -> float:
        items, runs, _ = part.tile_arrays("q", rows, width.keys)
        partial = runs[runs[:, 3] > 0, 1].sum()
        return float(width.tile * (items[:, 4].sum() + PARTIAL_TILE * partial) + width.item * len(items))

    return rows, min(instance.widths, key=cost).keys


def forward_tiles(plan: AttnPlan, part: StagePlan, softcap: bool, device: torch.device) -> ForwardTiles:
    """Return the tile plan of a stage, made on first use and kept."""

    def make() -> ForwardTiles:
        rows, keys = choose_tile(plan, part, softcap)
        items, runs, bands = part.tile_arrays("q", rows, keys)
        instance = find_instance(plan.head_dim, plan.head_dim_v, softcap)
        assert instance is not None
        groups = plan.num_heads_q * rows // instance.rows
        most = choose_split(items[:, 4], groups, count_multiprocessors(device))
        splits = np.zeros((0, 4), np.int32)
        if most is not None:
            items, runs, splits = _planner.split_items(items, runs, keys, most)
        num_slots = int(splits[:, 3].sum())
        tensors = [torch.from_numpy(a).to(device) for a in (items, runs, bands, splits)]
        return ForwardTiles(rows, keys, tensors[0], tensors[1], tensors[2], tensors[3], num_slots)

    made: ForwardTiles = part.cached(("sm90 forward", softcap, device), make)
    return made


def key_tiles(plan: AttnPlan, part: StagePlan, device: torch.device) -> tuple[Any, ...]:
    """Return items, runs, bands and splits for dK and dV, and the number of parts; made on first use and kept."""

    def make() -> tuple[Any, ...]:
        items, runs, bands = part.tile_arrays("k", BACKWARD_KEYS, BACKWARD_QUERIES, ROW_ALIGNMENT)
        heads, splits = plan.num_heads_q // plan.num_heads_kv, np.zeros((0, 4), np.int32)
        most = choose_split(items[:, 4] * heads, plan.num_heads_kv, count_multiprocessors(device))
        if most is not None:
            items, runs, splits = _planner.split_items(items, runs, BACKWARD_QUERIES, max(most // heads, 1))
        return (*(torch.from_numpy(a).to(device) for a in (items, runs, bands, splits)), int(splits[:, 3].sum()))

    made: tuple[Any, ...] = part.cached(("sm90 keys", device), make)
    return made


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
    dim_v = v.shape[2]
    q, k, v = (_pad_head(x) for x in (q, k, v))
    if out_before is not None:
        out_before = _pad_head(out_before)
    if sink is not None:  # the kernel knows one sink logit a row
        sink = sink.squeeze(-2) if sink.shape[-2] == 1 else torch.logsumexp(sink, -2)
    tiles = forward_tiles(plan, part, softcap > 0, q.device)
    out, lse, max_logits = _forward(
        q, k, v, *tiles[2:6], sink, out_before, lse_before, *tiles[:2], tiles.num_slots, scale, softcap, out_float32,
        return_max_logits, sm_margin,
    )  # fmt: skip
    return out[..., :dim_v], lse, max_logits


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
    dim, dim_v = q.shape[2], v.shape[2]
    q, k, v, dout, out = (_pad_head(x) for x in (q, k, v, dout, out))
    if dq_before is not None:
        dq_before = _pad_head(dq_before)
    rows, keys = part.cached(("sm90 dq", softcap > 0), lambda: choose_tile(plan, part, softcap > 0, DQ_INSTANCES))
    q_tiles = part.tiles("q", rows, keys, q.device)
    *k_tiles, num_slots = key_tiles(plan, part, k.device)
    dq, dk, dv, dsink = _backward(
        dout, dlse, q, k, v, out, lse, dq_before, *q_tiles, *k_tiles, sink, rows, keys, num_slots, scale, softcap,
        grad_float32, sm_margin,
    )  # fmt: skip
    return dq[..., :dim], dk[..., :dim], dv[..., :dim_v], dsink


def _pad_head(x: Tensor) -> Tensor:
    """TMA wants rows of whole 16 bytes."""
    return pad(x, (0, -x.shape[2] % 8)) if x.shape[2] % 8 else x
