"""flex_attn_fwd and flex_attn_bwd: attention of one stage of a plan, differentiable.

The plan is an opaque argument, so a new mask never recompiles. The Python kernels unpack its tile plans and
call `flex_attn_fwd_tiles` and `flex_attn_bwd_tiles` on the CPU, those of `sm90` on GPUs it was built for, and those in
Triton on others.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from torch_magi._extension import has_kernel
from torch_magi.ops import sm90
from torch_magi.ops._library import PLAN_TAGS, lib
from torch_magi.ops.attn_tiles import (
    accumulation_dtype,
    fake_backward,
    fake_forward,
    flex_attn_bwd_tiles,
    flex_attn_fwd_tiles,
)
from torch_magi.ops.autograd import refuse_second_derivative, refuse_vmap, wants_grad
from torch_magi.ops.dtensors import note_dtensors
from torch_magi.ops.flops import backward_flops, forward_flops
from torch_magi.ops.merge_state import merge_state, merged_side_grad
from torch_magi.ops.plan_types import ATTN_PLAN
from torch_magi.plan import AttnPlan

Tensor = torch.Tensor


class TileShapes(NamedTuple):
    """Rows and columns of a tile, in tokens, of the two sides of a tile plan."""

    q_rows: int
    q_cols: int
    k_rows: int
    k_cols: int


# What the CPU kernels were measured fastest with.
CPU_TILES = TileShapes(64, 64, 64, 64)

_OPTIONS = (
    "float scale, float softcap, bool out_float32, bool return_max_logits, bool deterministic, "
    "str backend, int sm_margin"
)
lib.define(
    f"flex_attn_fwd(Tensor q, Tensor k, Tensor v, {ATTN_PLAN} plan, int stage, Tensor? sink, "
    f"Tensor? out_before, Tensor? lse_before, {_OPTIONS}) -> (Tensor out, Tensor lse, Tensor max_logits)",
    tags=PLAN_TAGS,
)
lib.define(
    "flex_attn_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? dq_before, {ATTN_PLAN} plan, int stage, Tensor? sink, float scale, float softcap, bool grad_float32, "
    "bool deterministic, str backend, int sm_margin) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    tags=PLAN_TAGS,
)


@functools.cache  # asked on every call, and nothing that it asks for changes in a process
def choose_backend(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], asked: str = "auto") -> str:
    """Return the kernels that serve an attention call: "cpu", "sm90" or "triton".

    Raises:
        NotImplementedError: if none do, or not those that were asked for.
    """
    for name, serves in (("cpu", _cpu_serves), ("sm90", _sm90_serves), ("triton", _triton_serves)):
        if asked in ("auto", name) and serves(device, dtype, head_dims):
            return name
    name = str(dtype).removeprefix("torch.")
    missing = "" if _triton_kernels() else "; Triton is not installed"
    raise NotImplementedError(
        "flex_attn has kernels for the CPU (cpu), for GPUs of compute capability 9.0 (sm90: bfloat16, float16, "
        "head_dim up to 256), and for GPUs from 8.0 on in Triton (triton: also float32), got backend "
        f"{asked!r}, {name} tensors on {device} and head dims {head_dims}; `python -m torch_magi info` lists what "
        f"serves what here{missing}"
    )


def _cpu_serves(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    return device.type == "cpu"


def _sm90_serves(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or not sm90.find_instance(*head_dims):
        return False
    built = torch.cuda.is_available() and has_kernel("flex_attn_fwd_sm90", "cuda")
    return built and torch.cuda.get_device_capability(device) == (9, 0)


def _triton_serves(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    kernels = _triton_kernels()
    return kernels is not None and bool(kernels.serves(device, dtype, head_dims))


@functools.cache
def _triton_kernels() -> Any:
    """Return the module of the Triton kernels, imported on first use; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from torch_magi.kernels import triton_attention

    return triton_attention


def check_against_plan(q: Tensor, k: Tensor, v: Tensor, plan: AttnPlan, stage: int | None) -> None:
    """Raise ValueError or TypeError if tensors are not those that a stage of the plan was made for.

    Without a stage they are the rows that the rank holds. Where heads are sharded, a rank has an equal share of the
    plan's: num_heads_q / n with num_heads_kv / n.
    """
    rows, keys = (plan.num_tokens_local,) * 2 if stage is None else plan.stages[stage].mask.shape
    heads_q, heads_kv = plan.num_heads_q, plan.num_heads_kv
    if q.ndim == k.ndim == 3 and q.shape[1]:
        n = heads_q // q.shape[1]
        if n and (n * q.shape[1], n * k.shape[1]) == (heads_q, heads_kv):
            heads_q, heads_kv = q.shape[1], k.shape[1]
    for name, x, n, heads, dim in (
        ("query", q, rows, heads_q, plan.head_dim),
        ("key", k, keys, heads_kv, plan.head_dim),
        ("value", v, keys, heads_kv, plan.head_dim_v),
    ):
        if x.shape != (n, heads, dim):
            raise ValueError(
                f"{name} must have shape {[n, heads, dim]} (rows, heads, head_dim) for this plan, got "
                f"{list(x.shape)}; make a plan for these tensors"
                + (
                    f" (rank {plan.cp_rank} of {plan.cp_size} holds {plan.num_tokens_local} rows)"
                    if plan.cp_size > 1
                    else ""
                )
            )
        if x.dtype != plan.dtype:
            raise TypeError(
                f"{name} must be {plan.dtype} as the plan says, got {x.dtype}; pass dtype={x.dtype} to make_attn_plan"
            )


def check_before(q: Tensor, v: Tensor, out_before: Tensor | None, lse_before: Tensor | None) -> None:
    """Raise ValueError or TypeError if an earlier result is not one of these queries."""
    if (out_before is None) != (lse_before is None):
        raise ValueError("out_before and lse_before are parts of one result: give both or neither")
    if out_before is None or lse_before is None:
        return
    for name, x, shape in (
        ("out_before", out_before, (*q.shape[:2], v.shape[2])),
        ("lse_before", lse_before, q.shape[:2]),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
        if x.dtype != accumulation_dtype(q.dtype):
            raise TypeError(f"{name} must be {accumulation_dtype(q.dtype)}, got {x.dtype}; use out_float32=True")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    stage: int,
    sink: Tensor | None,
    out_before: Tensor | None,
    lse_before: Tensor | None,
    scale: float,
    softcap: float,
    out_float32: bool,
    return_max_logits: bool,
    deterministic: bool,
    backend: str,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check_against_plan(q, k, v, plan, stage)
    check_before(q, v, out_before, lse_before)
    part = plan.stages[stage]
    chosen = choose_backend(q.device, q.dtype, (plan.head_dim, plan.head_dim_v), backend)
    if chosen != "cpu":
        if scale < 0:
            q, scale = -q, -scale
        elif scale == 0:  # every logit is 0
            q, scale = torch.zeros_like(q), 1.0
        v = _without(v, part.hidden("k", v.device))
        kernels = sm90 if chosen == "sm90" else _triton_kernels()
        found: tuple[Tensor, Tensor, Tensor] = kernels.forward(
            q, k, v, plan, part, sink, out_before, lse_before, scale, softcap, out_float32, return_max_logits,
            sm_margin,
        )  # fmt: skip
        return found
    rows, cols = CPU_TILES.q_rows, CPU_TILES.q_cols
    tiles = part.tiles("q", rows, cols, q.device)
    wide = out_float32 or out_before is not None
    out, lse, max_logits = flex_attn_fwd_tiles(
        q, k, v, *tiles, sink, rows, cols, scale, softcap, wide, return_max_logits
    )
    if out_before is not None and lse_before is not None:
        out, lse = merge_state(out_before, lse_before, out, lse)
        out = out if out_float32 else out.to(q.dtype)
    return out, lse, max_logits


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq_before: Tensor | None,
    plan: AttnPlan,
    stage: int,
    sink: Tensor | None,
    scale: float,
    softcap: float,
    grad_float32: bool,
    deterministic: bool,
    backend: str,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_against_plan(q, k, v, plan, stage)
    shapes, part = CPU_TILES, plan.stages[stage]
    chosen = choose_backend(q.device, q.dtype, (plan.head_dim, plan.head_dim_v), backend)
    if chosen != "cpu":
        kernels = sm90 if chosen == "sm90" else _triton_kernels()
        factor = 1.0 if scale > 0 else -1.0 if scale < 0 else 0.0  # a scale of 0 is one of 0 * q
        hidden_rows, hidden_keys = part.hidden("q", q.device), part.hidden("k", k.device)
        q, k, v = _without(q, hidden_rows), _without(k, hidden_keys), _without(v, hidden_keys)
        dout = dout.to(q.dtype)
        if hidden_rows is not None:  # rows that see keys in other stages need theirs for the sink's gradient
            dout = dout.masked_fill(hidden_rows[:, None, None] & (out == 0), 0.0)
        found: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.backward(
            dout, dlse, q if factor == 1 else q * factor, k, v, out, lse, dq_before if factor == 1 else None, plan,
            part, sink, abs(scale) or 1.0, softcap, grad_float32, sm_margin,
        )  # fmt: skip
        if factor == 1:
            return found
        dq = found[0] * factor
        return (dq if dq_before is None else dq + dq_before), *found[1:]
    q_tiles = part.tiles("q", shapes.q_rows, shapes.q_cols, q.device)
    k_tiles = part.tiles("k", shapes.k_rows, shapes.k_cols, q.device)
    dq, dk, dv, dsink = flex_attn_bwd_tiles(
        dout, dlse, q, k, v, out, lse, *q_tiles, *k_tiles, sink, list(shapes), scale, softcap, grad_float32
    )
    return dq if dq_before is None else dq.add_(dq_before), dk, dv, dsink


def _without(x: Tensor, hidden: Tensor | None) -> Tensor:
    """Rows that take part in nothing may hold NaN, and 0 * NaN is NaN."""
    return x if hidden is None else x.masked_fill(hidden[:, None, None], 0.0)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: object,
    stage: int,
    sink: Tensor | None,
    out_before: Tensor | None,
    lse_before: Tensor | None,
    scale: float,
    softcap: float,
    out_float32: bool,
    return_max_logits: bool,
    *rest: Any,
) -> Any:
    return fake_forward(q, v, out_float32, return_max_logits)


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq_before: Tensor | None,
    plan: object,
    stage: int,
    sink: Tensor | None,
    scale: float,
    softcap: float,
    grad_float32: bool,
    *rest: Any,
) -> Any:
    return fake_backward(q, k, v, sink, grad_float32)


lib.impl("flex_attn_fwd", _forward, "CompositeExplicitAutograd")
lib.impl("flex_attn_bwd", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("torch_magi::flex_attn_fwd", _fake_forward, lib=lib)
torch.library.register_fake("torch_magi::flex_attn_bwd", _fake_backward, lib=lib)

_fwd = torch.ops.torch_magi.flex_attn_fwd.default
_bwd = torch.ops.torch_magi.flex_attn_bwd.default


class _FlexAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttnPlan,
        stage: int,
        sink: Tensor | None,
        out_before: Tensor | None,
        lse_before: Tensor | None,
        scale: float,
        softcap: float,
        out_float32: bool,
        return_max_logits: bool,
        deterministic: bool,
        backend: str,
        sm_margin: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, max_logits = _fwd(
                q,
                k,
                v,
                plan,
                stage,
                sink,
                out_before,
                lse_before,
                scale,
                softcap,
                out_float32,
                return_max_logits,
                deterministic,
                backend,
                sm_margin,
            )
        ctx.save_for_backward(q, k, v, sink, out_before, lse_before, out, lse)
        ctx.plan, ctx.stage = plan, stage
        ctx.numbers = (scale, softcap)
        ctx.options = (deterministic, backend, sm_margin)
        ctx.mark_non_differentiable(max_logits)
        ctx.set_materialize_grads(False)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out_before, lse_before, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        before: tuple[Tensor | None, Tensor | None] = (None, None)
        if out_before is not None:
            before = merged_side_grad(out_before, lse_before, out, lse, dout, dlse)
        dq, dk, dv, dsink = _bwd(
            dout, dlse, q, k, v, out, lse, None, ctx.plan, ctx.stage, sink, *ctx.numbers, False, *ctx.options
        )
        return dq, dk, dv, None, None, dsink if sink is not None else None, *before, *(None,) * 7


def _autograd_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    stage: int,
    sink: Tensor | None,
    out_before: Tensor | None,
    lse_before: Tensor | None,
    *options: Any,
) -> Any:
    arguments = (q, k, v, plan, stage, sink, out_before, lse_before, *options)
    if wants_grad(q, k, v, sink, out_before, lse_before):
        return _FlexAttn.apply(*arguments)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _fwd(*arguments)


def _autograd_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    refuse_second_derivative(dout, dlse, q, k, v)
    with torch._C._AutoDispatchBelowAutograd():
        return _bwd(dout, dlse, q, k, v, *rest)


lib.impl("flex_attn_fwd", _autograd_forward, "Autograd")
lib.impl("flex_attn_bwd", _autograd_backward, "Autograd")
refuse_vmap("flex_attn_fwd")
refuse_vmap("flex_attn_bwd")
register_flop_formula(torch.ops.torch_magi.flex_attn_fwd)(forward_flops)
register_flop_formula(torch.ops.torch_magi.flex_attn_bwd)(backward_flops)


def flex_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    stage: int = 0,
    *,
    sink: Tensor | None = None,
    out_before: Tensor | None = None,
    lse_before: Tensor | None = None,
    scale: float,
    softcap: float = 0.0,
    out_float32: bool = False,
    return_max_logits: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention of one stage of a plan. Differentiable in all tensors, through out and lse.

    out = softmax(mask(softcap(scale * q k^T))) v. A row that sees nothing has out 0 and lse -inf.

    Args:
        q: [rows, num_heads_q, head_dim], the plan's dtype; this rank's query rows.
        k: [keys, num_heads_kv, head_dim]; the stage's keys.
        v: [keys, num_heads_kv, head_dim_v].
        plan: made for these tensors, or for n times as many query and kv heads.
        stage: which attention call of the plan.
        sink: float32 [num_sink, num_heads_q] or [rows, num_sink, num_heads_q]; logits added to the denominator.
        out_before, lse_before: [rows, num_heads_q, head_dim_v] and [rows, num_heads_q], float32 (float64); the
            result of the same queries over other keys, with which this one is merged as `merge_state` does.
        scale: factor of the logits; any real number.
        softcap: c in c * tanh(s / c), applied after the scale; 0.0 is off.
        out_float32: return out unrounded (float32; float64 for float64 inputs).
        return_max_logits: also return the largest scaled logit of each head.
        deterministic: gradients with the same bits every run.
        backend: "auto", or the kernels to use.
        sm_margin: multiprocessors left free by GPU kernels.

    Returns:
        out [rows, num_heads_q, head_dim_v]; lse [rows, num_heads_q], natural logarithm, float32 (float64);
        max_logits [num_heads_q], float32, empty where not asked for, -inf for a head that sees nothing.

    Raises:
        ValueError, TypeError: if the tensors are not those the plan was made for.
        NotImplementedError: if no kernel serves them.
    """
    note_dtensors(q)
    result: tuple[Tensor, Tensor, Tensor] = _fwd(
        q, k, v, plan, stage, sink, out_before, lse_before, scale, softcap, out_float32, return_max_logits,
        deterministic, backend, sm_margin,
    )  # fmt: skip
    return result
