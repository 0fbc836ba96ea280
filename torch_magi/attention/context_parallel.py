"""context_parallel_attn: attention over a sequence that is sharded across ranks.

    forward     start all exchanges; attention over the local keys; then, stage by stage, wait for the keys
                that have arrived and merge their attention in float32
    backward    the same again for the keys, which are not kept; dk and dv of a stage travel back to the
                keys' owners while the next stage is computed, and are summed there in float32

Nothing waits inside an operator: every exchange is started early and waited for where its rows are used, in
eager code as in the compiled graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_magi.attention.inputs import finish, prepare
from torch_magi.attention.options import AuxOutput, AuxRequest, KernelOptions
from torch_magi.comm.exchange import add_returned, start_cast, start_reduce, wait
from torch_magi.comm.groups import LEVELS, Group, group_name_of
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.attn_tiles import fake_forward
from torch_magi.ops.autograd import refuse_second_derivative, refuse_vmap, wants_grad
from torch_magi.ops.dtensors import note_dtensors
from torch_magi.ops.flex_attn import check_against_plan, flex_attn_fwd
from torch_magi.ops.plan_types import ATTN_PLAN, Size, plan_size
from torch_magi.plan import AttnPlan

Tensor = torch.Tensor


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.flatten(1), v.flatten(1)], 1)


def _unpack(kv: Tensor, like_k: Tensor, like_v: Tensor) -> tuple[Tensor, Tensor]:
    heads, dim, dim_v = like_k.shape[1], like_k.shape[2], like_v.shape[2]
    k, v = kv.split([heads * dim, heads * dim_v], 1)
    return k.unflatten(1, (heads, dim)), v.unflatten(1, (heads, dim_v))


def _start_all(
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    first: int,
    received: Sequence[int],
    group_name: str,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Start the exchanges of the stages from `first` on, which bring `received` rows each."""
    if not received:
        return []
    kv = _pack(k, v)
    return [start_cast(kv, plan, first + i, n, group_name, after) for i, n in enumerate(received)]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    sink: Tensor | None,
    num_stages: int,
    received: Sequence[int],
    sent: Sequence[int],
    group_name: str,
    scale: float,
    softcap: float,
    return_max_logits: bool,
    deterministic: bool,
    backend: str,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    first = num_stages - len(received)
    arriving = _start_all(k, v, plan, first, received, group_name)
    out, lse, max_logits = None, None, None
    for stage in range(num_stages):
        k_stage, v_stage = k, v
        if stage >= first:
            k_stage, v_stage = _unpack(wait(arriving[stage - first]), k, v)
        out, lse, stage_max_logits = flex_attn_fwd(
            q,
            k_stage,
            v_stage,
            plan,
            stage,
            sink=sink if stage == 0 else None,
            out_before=out,
            lse_before=lse,
            scale=scale,
            softcap=softcap,
            out_float32=stage < num_stages - 1,
            return_max_logits=return_max_logits,
            deterministic=deterministic,
            backend=backend,
            sm_margin=sm_margin,
        )
        max_logits = stage_max_logits if max_logits is None else torch.maximum(max_logits, stage_max_logits)
    assert out is not None and lse is not None and max_logits is not None
    if return_max_logits and group_name:
        for level in group_name.split(LEVELS):
            max_logits = wait(torch.ops._c10d_functional.all_reduce(max_logits, "max", level))
    return out, lse, max_logits


class _ContextParallelAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttnPlan,
        sink: Tensor | None,
        num_stages: int,
        received: Sequence[int],
        sent: Sequence[int],
        group_name: str,
        scale: float,
        softcap: float,
        return_max_logits: bool,
        *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        numbers = (scale, softcap, return_max_logits)
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, max_logits = torch.ops.torch_magi.context_parallel_attn(
                q, k, v, plan, sink, num_stages, received, sent, group_name, *numbers, *options
            )
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.plan, ctx.num_stages, ctx.group_name = plan, num_stages, group_name
        ctx.received, ctx.sent = received, sent
        ctx.numbers, ctx.options = (scale, softcap), options[:-1]
        ctx.mark_non_differentiable(max_logits)
        ctx.set_materialize_grads(False)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        refuse_second_derivative(dout, dlse, q, k, v)  # before an exchange starts that nobody would wait for
        plan, group_name = ctx.plan, ctx.group_name
        dout = torch.zeros_like(out) if dout is None else dout
        first = ctx.num_stages - len(ctx.received)
        arriving = _start_all(k, v, plan, first, ctx.received, group_name, after=dout)
        dq: Tensor | None = None
        dkv: Tensor | None = None
        dsink: Tensor | None = None
        returning = []
        for stage in range(ctx.num_stages):
            k_stage, v_stage = k, v
            if stage >= first:
                k_stage, v_stage = _unpack(wait(arriving[stage - first]), k, v)
            # dq goes through the stages one after the other, which also keeps a compiler from moving the local
            # stage behind the exchanges that it is to hide.
            dq, dk_stage, dv_stage, dsink_stage = torch.ops.torch_magi.flex_attn_bwd(
                dout,
                dlse,
                q,
                k_stage,
                v_stage,
                out,
                lse,
                dq,
                plan,
                stage,
                sink if stage == 0 else None,
                *ctx.numbers,
                True,
                *ctx.options,
            )
            packed = _pack(dk_stage, dv_stage)
            if stage == 0 and sink is not None:
                dsink = dsink_stage
            if stage < first:
                dkv = packed
                continue
            returning.append((stage, start_reduce(packed, plan, stage, ctx.sent[stage - first], group_name)))
        for stage, rows in returning:
            back = add_returned(wait(rows), plan, stage, k.shape[0])
            dkv = back if dkv is None else dkv + back
        assert dq is not None and dkv is not None
        dk, dv = _unpack(dkv, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, dsink, *(None,) * 11


def _autograd(q: Tensor, k: Tensor, v: Tensor, plan: AttnPlan, sink: Tensor | None, *arguments: Any) -> Any:
    if wants_grad(q, k, v, sink):
        return _ContextParallelAttn.apply(q, k, v, plan, sink, *arguments)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.torch_magi.context_parallel_attn(q, k, v, plan, sink, *arguments)


def _stages(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *rest, _ = arguments
    return _forward(q, *rest)


def _fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_forward(q, v, False, arguments[8])


# Compilers keep what they made of this operator on disk, under its name and arguments. Raise this number with every
# change of what it decomposes into, so that nobody runs code that was made for another version.
DECOMPOSITION = 4

lib.define(
    f"context_parallel_attn(Tensor q, Tensor k, Tensor v, {ATTN_PLAN} plan, Tensor? sink, int num_stages, "
    "SymInt[] received, SymInt[] sent, str group_name, float scale, float softcap, bool return_max_logits, "
    "bool deterministic, str backend, int sm_margin, int decomposition)"
    " -> (Tensor out, Tensor lse, Tensor max_logits)",
    tags=PLAN_TAGS,
)
# Eager code runs it as one operator, whose results selective activation checkpointing can keep by its name. Where it
# is traced it decomposes, so that a compiler sees every start, wait and stage; so does the backward.
lib.impl("context_parallel_attn", _autograd, "Autograd")
lib.impl("context_parallel_attn", _stages, "CompositeExplicitAutograd")
torch.ops.torch_magi.context_parallel_attn.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_stages)
torch.library.register_fake("torch_magi::context_parallel_attn", _fake, lib=lib)
refuse_vmap("context_parallel_attn")


def context_parallel_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttnPlan,
    group: Group | None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    return_aux: AuxRequest | None = None,
    deterministic: bool = False,
    kernel_options: KernelOptions | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Compute this rank's rows of the attention of a sequence that is sharded across ranks. Differentiable.

    All ranks of the group call it, each with its own part of the same plan. All tensors may be DTensors on one mesh
    whose dispatched rows are sharded, Shard(0), over one dimension and whose heads may be sharded over others; results
    are then placed as the query is. A sink that is none is taken to be that of the rank's heads.

    Args:
        query: [plan.num_tokens_local, num_heads_q, head_dim]; this rank's dispatched rows.
        key: [plan.num_tokens_local, num_heads_kv, head_dim].
        value: [plan.num_tokens_local, num_heads_kv, head_dim_v].
        plan: from `make_attn_plan(..., cp_size, cp_rank)`.
        group: ProcessGroup, one-dimensional DeviceMesh or group name; may be None for one rank, and for DTensors. For
            a plan with `ranks_per_node`, a DeviceMesh of shape (nodes, ranks_per_node), ranks in the order of rows.
        scale, softcap, deterministic, kernel_options: as in `flex_flash_attn`.
        sink: float32 [num_sink, num_heads_q], the same on every rank, or [num_tokens_local, num_sink,
            num_heads_q]. Its gradient on each rank is that of the rank's rows: sum it over ranks. (That of a DTensor is
            placed so: Partial.)
        return_aux: lse is that of this rank's rows; max_logits is the maximum over all ranks.

    Returns:
        out [plan.num_tokens_local, num_heads_q, head_dim_v]; (out, AuxOutput) with `return_aux`. The gradients
        of query, key and value are those of the whole attention; no factor of the number of ranks.

    Raises:
        TypeError, ValueError: for arguments that do not fit together, to the plan, or to the group.
        NotImplementedError: for a device or dtype without a kernel.
    """
    if not isinstance(plan, AttnPlan):
        raise TypeError(f"plan must be an AttnPlan, got {type(plan).__name__}; make one with make_attn_plan")
    if note_dtensors(query, key, value):
        from torch_magi.attention.dtensors import row_sharding_of

        sharding = row_sharding_of(query, key, value, group)
        q, k, v = (sharding.to_local(x) for x in (query, key, value))
        result = context_parallel_attn(
            q, k, v, plan, sharding.group_name, scale=scale, softcap=softcap, sink=sharding.sink_to_local(sink),
            return_aux=return_aux, deterministic=deterministic, kernel_options=kernel_options,
        )  # fmt: skip
        return sharding.wrap_all(result, query)
    group_name = group_name_of(group, plan, nodes=True)
    call = prepare(query, key, value, scale, softcap, sink, return_aux, deterministic, kernel_options)
    if call.batch is not None:
        raise ValueError(
            f"query, key and value must be dispatched rows [rows, heads, head_dim], got {list(query.shape)}"
        )
    if plan.cp_size > 1 and not torch.compiler.is_compiling():
        check_against_plan(call.q, call.k, call.v, plan, None)  # before an exchange starts that nobody would wait for
    exchanges = range(1 if plan.starts_local else 0, plan.num_stages)
    # The keys are the anchor: an exchange needs them, so that it can start while the queries are still projected.
    received = [plan_size(call.k, plan, Size.RECEIVED, stage) for stage in exchanges]
    sent = [plan_size(call.k, plan, Size.SENT, stage) for stage in exchanges]
    out, lse, max_logits = torch.ops.torch_magi.context_parallel_attn(
        call.q,
        call.k,
        call.v,
        plan,
        call.sink,
        plan.num_stages,
        received,
        sent,
        group_name,
        call.scale,
        call.softcap,
        call.aux.max_logits,
        call.deterministic,
        call.backend,
        call.sm_margin,
        DECOMPOSITION,
    )
    return finish(call, return_aux, out, lse, max_logits)
