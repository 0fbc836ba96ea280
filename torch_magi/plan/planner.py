"""make_attn_plan: the only place where the steps of planning meet.

mask -> dispatch (chunks to ranks) -> stages (which keys arrive when) -> exchanges (rows and splits)
"""

from __future__ import annotations

import numpy as np
import torch

from torch_magi import _planner
from torch_magi._torch_internals import untraced
from torch_magi.masks import AttnMask
from torch_magi.masks.ranges import check_positive
from torch_magi.plan.comm import make_comm_plan
from torch_magi.plan.config import PlanConfig
from torch_magi.plan.cost import RankWork, choose_overlap_degree
from torch_magi.plan.dispatch import DispatchPlan, IntArray, chunk_edges, make_dispatch_plan
from torch_magi.plan.overlap import merge_ranges, needed_keys, split_into_stages
from torch_magi.plan.types import AttnPlan, CommPlan, StagePlan

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@untraced
def make_attn_plan(
    mask: AttnMask,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    config: PlanConfig | None = None,
) -> AttnPlan:
    """Decide who computes what for a mask.

    A pure function: every rank may compute every rank's part, and planning communicates nothing.

    Args:
        mask: what is attended. With `batch_size` it applies to every element of the batch.
        num_heads_q, num_heads_kv: heads; `num_heads_q` must be a multiple of `num_heads_kv`.
        head_dim, head_dim_v: size of a query or key head, and of a value head (None: the same).
        dtype: of query, key and value.
        device: where `position_ids` lie; None: the CPU.
        batch_size: B; the plan then covers B * mask.shape[0] rows, one element after the other.
        cp_size, cp_rank: number of ranks that share the sequence, and whose part is wanted.
        config: dispatcher, chunk size and stages; see `PlanConfig`.

    Returns:
        The plan of rank `cp_rank`.

    Raises:
        TypeError, ValueError: for values that do not fit together.

    Example:
        >>> from torch_magi import masks
        >>> plan = make_attn_plan(masks.causal(8), 2, 1, 16, dtype=torch.float32, cp_size=2)
        >>> plan.area_per_rank
        (18, 18)
    """
    if not isinstance(mask, AttnMask):
        raise TypeError(f"mask must be a torch_magi.masks.AttnMask, got {type(mask).__name__}")
    config = PlanConfig() if config is None else config
    if not isinstance(config, PlanConfig):
        raise TypeError(f"config must be a PlanConfig or None, got {type(config).__name__}")
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    _check_sizes(num_heads_q, num_heads_kv, head_dim, head_dim_v, dtype, batch_size, cp_size, cp_rank)
    if config.ranks_per_node is not None and cp_size % config.ranks_per_node:
        raise ValueError(f"ranks_per_node must divide cp_size, {cp_size}, got {config.ranks_per_node}")
    if batch_size is not None:
        mask = repeat_mask(mask, batch_size)
    if cp_size > 1 and mask.shape[0] != mask.shape[1]:
        raise ValueError(
            f"context parallelism needs a square mask (self-attention), got shape {mask.shape}; use cp_size=1"
        )
    dispatch = (
        DispatchPlan(mask.shape[0], 1, max(mask.shape[0], 1), np.zeros(min(mask.shape[0], 1), np.int32))
        if cp_size == 1
        else make_dispatch_plan(mask.bands, mask.shape[0], cp_size, config)
    )
    heads, head_dims = (num_heads_q, num_heads_kv), (head_dim, head_dim_v)
    stages, rows, between = _make_stages(mask, dispatch, cp_rank, config, heads, head_dims, dtype)
    return AttnPlan(
        mask, heads, head_dims, dtype, torch.device(device or "cpu"), batch_size,
        cp_rank, config, dispatch, stages, _areas(mask, dispatch), rows,
        comm_rows_between_nodes=between,
    )  # fmt: skip


def plan_on_dispatch(mask: AttnMask, plan: AttnPlan) -> AttnPlan:
    """Plan another mask on the dispatch of `plan`; see `AttnPlan.with_mask`."""
    if not isinstance(mask, AttnMask):
        raise TypeError(f"mask must be a torch_magi.masks.AttnMask, got {type(mask).__name__}")
    if plan.batch_size is not None and mask.shape != plan.mask.shape:
        mask = repeat_mask(mask, plan.batch_size)
    if mask.shape != plan.mask.shape:
        raise ValueError(f"the mask must have the shape of the plan's mask, {plan.mask.shape}, got {mask.shape}")
    heads, head_dims = (plan.num_heads_q, plan.num_heads_kv), (plan.head_dim, plan.head_dim_v)
    stages, rows, between = _make_stages(mask, plan.dispatch, plan.cp_rank, plan.config, heads, head_dims, plan.dtype)
    return AttnPlan(
        mask, heads, head_dims, plan.dtype, plan.device, plan.batch_size, plan.cp_rank, plan.config, plan.dispatch,
        stages, _areas(mask, plan.dispatch), rows, plan.cu_seqlens, between,
    )  # fmt: skip


def repeat_mask(mask: AttnMask, batch_size: int) -> AttnMask:
    """Return the block-diagonal mask of `batch_size` elements with this mask each."""
    sq, sk = mask.shape
    shifted = [_planner.shift(mask.bands, b * sq, b * sk) for b in range(batch_size)]
    bands = np.concatenate(shifted) if shifted else mask.bands[:0]
    return AttnMask.from_bands(bands, batch_size * sq, batch_size * sk)


def _check_sizes(
    num_heads_q: int, num_heads_kv: int, head_dim: int, head_dim_v: int, dtype: torch.dtype,
    batch_size: int | None, cp_size: int, cp_rank: int,
) -> None:  # fmt: skip
    sizes = {"num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "head_dim": head_dim,
             "head_dim_v": head_dim_v, "cp_size": cp_size}  # fmt: skip
    if batch_size is not None:
        sizes["batch_size"] = batch_size
    for name, size in sizes.items():
        check_positive(name, size)
    if num_heads_q % num_heads_kv:
        raise ValueError(f"num_heads_q must be a multiple of num_heads_kv, got {num_heads_q} and {num_heads_kv}")
    if cp_rank not in range(cp_size):
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")


def _areas(mask: AttnMask, dispatch: DispatchPlan) -> tuple[int, ...]:
    per_chunk = _planner.row_areas(mask.bands, chunk_edges(dispatch.total_tokens, dispatch.chunk_size))
    areas = np.zeros(dispatch.cp_size, np.int64)
    np.add.at(areas, dispatch.rank_of_chunk, per_chunk)
    return tuple(int(a) for a in areas)


def _make_stages(
    mask: AttnMask, dispatch: DispatchPlan, rank: int, config: PlanConfig, heads: tuple[int, int],
    head_dims: tuple[int, int], dtype: torch.dtype,
) -> tuple[tuple[StagePlan, ...], tuple[int, ...], int | None]:  # fmt: skip
    """Return the stages of `rank`, the key rows that every rank receives from others, and those between nodes."""
    rows = dispatch.ranges(rank)
    if dispatch.cp_size == 1:
        return (StagePlan(mask, None),), (0,), None if config.ranks_per_node is None else 0
    degree = config.overlap_degree
    if degree == "auto":
        flops_of_pair, bytes_of_row = 2 * heads[0] * sum(head_dims), heads[1] * sum(head_dims) * dtype.itemsize
        works = _works(mask, dispatch, flops_of_pair, bytes_of_row, config.ranks_per_node)
        degree = choose_overlap_degree(works, config.cost)
    received = split_into_stages(mask.bands, dispatch, degree, config.ranks_per_node or 1)
    stages = [StagePlan(local_mask(mask, rows, rows), None)] if degree else []
    for exchange in range(max(degree, 1)):
        arriving = [per_rank[exchange] for per_rank in received]
        comm: CommPlan = make_comm_plan(arriving, dispatch, rank, config.ranks_per_node, config.transport)
        stages.append(StagePlan(local_mask(mask, rows, arriving[rank][0]), comm))
    owner = dispatch.segments[:, 2]
    from_others = tuple(
        sum(int((p[owner[i] != r, 1] - p[owner[i] != r, 0]).sum()) for p, i in received[r])
        for r in range(dispatch.cp_size)
    )
    return tuple(stages), from_others, _rows_between_nodes(received, dispatch, config.ranks_per_node)


def _rows_between_nodes(
    received: list[list[tuple[IntArray, IntArray]]], dispatch: DispatchPlan, ranks_per_node: int | None
) -> int | None:
    """Return the rows that come to every node from others, each once in an exchange; None if there are no nodes."""
    if ranks_per_node is None:
        return None
    rows = 0
    for first in range(0, dispatch.cp_size, ranks_per_node):
        for exchange in zip(*received[first : first + ranks_per_node], strict=True):
            owners = [dispatch.segments[index, 2] // ranks_per_node for _, index in exchange]
            foreign = [p[owner != first // ranks_per_node] for (p, _), owner in zip(exchange, owners, strict=True)]
            once = merge_ranges(np.concatenate(foreign))
            rows += int((once[:, 1] - once[:, 0]).sum())
    return rows


def _works(
    mask: AttnMask, dispatch: DispatchPlan, flops_of_pair: int, bytes_of_row: int, ranks_per_node: int | None
) -> list[RankWork]:
    """Return what every rank computes and receives in a forward pass."""

    def num_bytes(ranges: IntArray) -> float:
        return float(bytes_of_row * int((ranges[:, 1] - ranges[:, 0]).sum()))

    needed = []  # of every rank: ranges and their owners
    for rank in range(dispatch.cp_size):
        pieces, index = needed_keys(mask.bands, dispatch, rank)
        needed.append((pieces, dispatch.segments[index, 2]))
    works = []
    for rank, area in enumerate(_areas(mask, dispatch)):
        rows = dispatch.ranges(rank)
        local = local_mask(mask, rows, rows).area
        (pieces, owner), between = needed[rank], None
        remote = pieces[owner != rank]
        if ranks_per_node is not None:
            node, place = divmod(rank, ranks_per_node)
            remote = pieces[owner % ranks_per_node != place]
            of_node = needed[node * ranks_per_node : (node + 1) * ranks_per_node]
            first_step = [p[(o % ranks_per_node == place) & (o // ranks_per_node != node)] for p, o in of_node]
            between = num_bytes(merge_ranges(np.concatenate(first_step)))
        computed = flops_of_pair * local, flops_of_pair * (area - local)
        works.append(RankWork(*computed, num_bytes(remote), between))
    return works


def local_mask(mask: AttnMask, rows: IntArray, keys: IntArray) -> AttnMask:
    """Return the part of a mask in the coordinates of a rank's rows and of keys in order of arrival."""
    lengths = keys[:, 1] - keys[:, 0]
    offsets = np.cumsum(lengths) - lengths
    order = np.argsort(keys[:, 0], kind="stable")
    bands = _planner.remap(mask.bands, rows, keys[order], offsets[order])
    return AttnMask.from_canonical_bands(bands, int((rows[:, 1] - rows[:, 0]).sum()), int(lengths.sum()))
