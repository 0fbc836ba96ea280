"""Other ways to share a sequence across ranks, for benchmarks/context_parallel.py to compare with.

Each takes the global mask and gives this rank an attention over the rows that it holds there, differentiable:

    all_gather    every rank gathers all keys and values, then attends once; dk and dv are reduce-scattered
    ring          keys and values go around the ranks, each hop beside the attention over those that are there; in
                  the backward dk and dv go around with them
    torch_cp      torch.distributed.tensor.experimental.context_parallel (a ring of scaled_dot_product_attention)

all_gather and ring use the attention kernels of torch_magi: what differs is the communication. Rows are dealt
head_tail, chunk r and its mirror image to rank r, which balances full and causal masks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import torch_magi as magi
from torch_magi.masks import AttnMask
from torch_magi.ops.flex_attn import flex_attn_fwd
from torch_magi.plan.planner import local_mask

Tensor = torch.Tensor


@dataclass
class Problem:
    """What is computed: a mask over all rows, tensors for all rows, and who takes part."""

    name: str
    mask: AttnMask
    heads_q: int
    heads_kv: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def scale(self) -> float:
        return float(self.dim) ** -0.5


@dataclass
class Way:
    """One way to compute it: which rows this rank holds, and its attention over them.

    Attributes:
        rows: int64 [local rows]; their indices in the whole sequence.
        attention: (query, key, value) of these rows -> out.
        context: what forward and backward run in.
    """

    rows: Tensor
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def head_tail_ranges(total: int, size: int) -> list[np.ndarray]:
    """Return the row ranges of each rank, int64 [2, 2]; `total` must be a multiple of 2 * size."""
    if total % (2 * size):
        raise NotImplementedError(f"needs a multiple of {2 * size} tokens, got {total}")
    chunk = total // (2 * size)
    first = [[r, 2 * size - 1 - r] for r in range(size)]
    return [np.array([[c * chunk, (c + 1) * chunk] for c in pair], np.int64) for pair in first]


def rows_of(ranges: np.ndarray) -> Tensor:
    """Return the rows of some ranges, one after the other."""
    return torch.cat([torch.arange(a, b) for a, b in ranges.tolist()])


def plan_for(problem: Problem, mask: AttnMask) -> magi.AttnPlan:
    """Return the plan of a local call."""
    return magi.make_attn_plan(
        mask, problem.heads_q, problem.heads_kv, problem.dim, dtype=problem.dtype, device=problem.device
    )


# --- all-gather ---


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


def all_gather(problem: Problem) -> Way:
    """Gather all keys and values, attend once."""
    ranges = head_tail_ranges(problem.mask.shape[0], problem.size)
    plan = plan_for(problem, local_mask(problem.mask, ranges[problem.rank], np.concatenate(ranges)))

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kv: Tensor = _AllGather.apply(torch.cat([key, value], -1), problem.group)  # type: ignore[no-untyped-call]
        k, v = kv.split(problem.dim, -1)
        out: Any = magi.flex_flash_attn(query, k, v, plan)
        return out  # type: ignore[no-any-return]

    return Way(rows_of(ranges[problem.rank]), attention)


# --- ring ---


def pass_on(group: dist.ProcessGroup, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """Start sending `x` to the next rank; return what the one before sends, to be read after the wait."""
    ranks = dist.get_process_group_ranks(group)
    me, received = group.rank(), torch.empty_like(x)
    to, source = ranks[(me + 1) % len(ranks)], ranks[(me - 1) % len(ranks)]
    return received, dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, received, source, group)]
    )


def wait_all(works: list[dist.Work]) -> None:
    """Make what follows wait for these transfers."""
    for work in works:
        work.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plans: list[magi.AttnPlan], problem: Problem) -> Tensor:
        kv, works = torch.stack([k, v]), []
        out = lse = None
        for step, plan in enumerate(plans):
            last = step == len(plans) - 1
            if not last:
                arriving, works = pass_on(problem.group, kv)
            out, lse, _ = flex_attn_fwd(
                q, kv[0], kv[1], plan, scale=problem.scale, out_before=out, lse_before=lse, out_float32=not last
            )
            if not last:
                wait_all(works)
                kv = arriving
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plans, ctx.problem = plans, problem
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        problem: Problem = ctx.problem
        kv = torch.stack([k, v])
        dkv: Tensor | None = None  # of the keys that are here, gathered on their way
        dq: Tensor | None = None
        works: list[dist.Work] = []
        returning: list[dist.Work] = []
        for step, plan in enumerate(ctx.plans):
            last = step == len(ctx.plans) - 1
            if not last:
                arriving, works = pass_on(problem.group, kv)
            dq, dk, dv, _ = torch.ops.torch_magi.flex_attn_bwd(
                dout, None, q, kv[0], kv[1], out, lse, dq, plan, 0, None, problem.scale, 0.0, True, False, "auto", 0
            )
            mine = torch.stack([dk, dv])
            if dkv is not None:
                wait_all(returning)
                mine += dkv
            dkv, returning = pass_on(problem.group, mine)  # also after the last step: home to their owner
            if not last:
                wait_all(works)
                kv = arriving
        wait_all(returning)
        assert dq is not None and dkv is not None
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None, None


def ring(problem: Problem) -> Way:
    """Pass keys and values around."""
    ranges = head_tail_ranges(problem.mask.shape[0], problem.size)
    mine, size = problem.rank, problem.size
    plans = [plan_for(problem, local_mask(problem.mask, ranges[mine], ranges[(mine - s) % size])) for s in range(size)]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = _Ring.apply(query, key, value, plans, problem)  # type: ignore[no-untyped-call]
        return out

    return Way(rows_of(ranges[mine]), attention)


# --- torch ---


def torch_cp(problem: Problem) -> Way:
    """Use torch's own context parallelism; it takes the masks full and causal."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if problem.name not in ("full", "causal"):
        raise NotImplementedError("takes the masks full and causal only")
    if problem.device.type != "cuda":
        raise NotImplementedError("its ring is for GPUs")
    mesh = DeviceMesh.from_group(problem.group, problem.device.type)

    def context(buffer: Tensor) -> AbstractContextManager[None]:
        return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])

    whole = torch.arange(problem.mask.shape[0], device=problem.device)
    with context(whole):
        rows = whole.clone()  # in its own order

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeat = problem.heads_q // problem.heads_kv  # its ring wants a kv head for every query head
        key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            # looked up here: the context puts its own in its place
            out: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=problem.name == "causal")
        return out[0].transpose(0, 1)

    return Way(rows, attention, lambda: context(whole))


PEERS: dict[str, Callable[[Problem], Way]] = {"all_gather": all_gather, "ring": ring, "torch_cp": torch_cp}
