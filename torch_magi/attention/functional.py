"""flex_flash_attn: attention under any mask on one device."""

from __future__ import annotations

import torch

from torch_magi.attention.context_parallel import context_parallel_attn
from torch_magi.attention.inputs import Call, finish, prepare
from torch_magi.attention.options import AuxOutput, AuxRequest, KernelOptions
from torch_magi.masks import AttnMask
from torch_magi.ops.dtensors import note_dtensors
from torch_magi.ops.flex_attn import flex_attn_fwd
from torch_magi.plan import AttnPlan, make_attn_plan

Tensor = torch.Tensor


def flex_flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_or_plan: AttnMask | AttnPlan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    return_aux: AuxRequest | None = None,
    deterministic: bool = False,
    kernel_options: KernelOptions | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Compute softmax(mask(softcap(scale * query key^T))) value, for any mask. Differentiable.

    All tensors may be DTensors on one mesh: replicated, with heads sharded, or, with a plan for the ranks of that
    dimension of the mesh, with dispatched rows sharded, as `context_parallel_attn` computes them. Results are then
    placed as the query is.

    Args:
        query: [total_q, num_heads_q, head_dim] or [B, S_q, num_heads_q, head_dim]; float64, float32, bfloat16
            or float16.
        key: [total_k, num_heads_kv, head_dim] or [B, S_k, ...]; num_heads_q is a multiple of num_heads_kv.
        value: [total_k, num_heads_kv, head_dim_v] or [B, S_k, ...].
        mask_or_plan: which keys each query sees. A mask is planned on every call, so make a plan
            (`make_attn_plan`) where it is used more than once, and always for `torch.compile`. With a batch, a
            mask of shape (S_q, S_k) applies to every element and one of shape (B * S_q, B * S_k) to all of it.
        scale: factor of the logits; None: head_dim ** -0.5.
        softcap: c in c * tanh(logit / c), applied after the scale; 0.0 is off.
        sink: float32 [num_sink, num_heads_q] or [total_q, num_sink, num_heads_q]; learnable logits that are
            added to the denominator only.
        return_aux: which other results to return.
        deterministic: gradients with the same bits every run; also on under
            `torch.use_deterministic_algorithms(True)`.
        kernel_options: see `KernelOptions`.

    Returns:
        out [total_q, num_heads_q, head_dim_v] (or [B, S_q, ...]) in the inputs' dtype; (out, AuxOutput) with
        `return_aux`. A query that sees nothing has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: for arguments that do not fit together, or not to the plan.
        NotImplementedError: for a device or dtype without a kernel.

    Example:
        >>> import torch, torch_magi as magi
        >>> q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
        >>> magi.flex_flash_attn(q, k, v, magi.masks.document([0, 3, 8], causal=True)).shape
        torch.Size([8, 2, 16])
    """
    if note_dtensors(query, key, value, sink):
        from torch_magi.attention.dtensors import check_dtensors, check_whole, rows_are_sharded

        check_dtensors(query, key, value)
        if isinstance(mask_or_plan, AttnPlan) and mask_or_plan.cp_size > 1 and rows_are_sharded(query):
            return context_parallel_attn(
                query, key, value, mask_or_plan, None, scale=scale, softcap=softcap, sink=sink, return_aux=return_aux,
                deterministic=deterministic, kernel_options=kernel_options,
            )  # fmt: skip
        check_whole(query, key, value, sink)
    call = prepare(query, key, value, scale, softcap, sink, return_aux, deterministic, kernel_options)
    plan = _plan_of(mask_or_plan, call, query)
    out, lse, max_logits = flex_attn_fwd(
        call.q, call.k, call.v, plan, 0, sink=call.sink, scale=call.scale, softcap=call.softcap,
        return_max_logits=call.aux.max_logits, deterministic=call.deterministic, backend=call.backend,
        sm_margin=call.sm_margin,
    )  # fmt: skip
    return finish(call, return_aux, out, lse, max_logits)


def _plan_of(mask_or_plan: AttnMask | AttnPlan, call: Call, query: Tensor) -> AttnPlan:
    if isinstance(mask_or_plan, AttnPlan):
        if mask_or_plan.cp_size != 1:
            raise ValueError(
                f"the plan is for cp_size={mask_or_plan.cp_size} ranks; call context_parallel_attn with its group"
            )
        return mask_or_plan
    if not isinstance(mask_or_plan, AttnMask):
        raise TypeError(f"mask_or_plan must be an AttnMask or an AttnPlan, got {type(mask_or_plan).__name__}")
    if torch.compiler.is_compiling():
        raise TypeError("a mask cannot be planned inside torch.compile; call make_attn_plan outside and pass the plan")
    rows = (call.q.shape[0], call.k.shape[0])
    batch = None if call.batch is None else call.batch[0]
    if mask_or_plan.shape == rows:
        batch = None
    elif batch is None or tuple(n * batch for n in mask_or_plan.shape) != rows:
        found = "" if batch is None else f", or that of one of {batch} elements"
        raise ValueError(f"the mask must have shape {rows}, the rows of query and key{found}, got {mask_or_plan.shape}")
    heads, head_dim = call.q.shape[1:]
    return make_attn_plan(
        mask_or_plan, heads, call.k.shape[1], head_dim, head_dim_v=call.v.shape[2], dtype=call.q.dtype,
        batch_size=batch,
    )  # fmt: skip
