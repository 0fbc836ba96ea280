"""Dense attention as the oracle: `truth` in float64, and `low`, the same done naively in the tested dtype.

A runner is any function with the signature of `run_reference`: it computes attention, runs it backward, and
returns everything as `Results`. The checks in `tolerance` and `probes` take runners, so that one check serves
a kernel, a backend and a whole group of ranks (`local_ranks.context_parallel_runner`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_magi.masks import AttnMask

Tensor = torch.Tensor
Runner = Callable[..., "Results"]


class Results(NamedTuple):
    """What an attention call computes, forward and backward; None where it was not computed."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttnMask | Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention from a dense mask, every step in `dtype`. Differentiable.

    Rows that see nothing and keys that nobody sees may hold any bits: they influence nothing.

    Args:
        query: [total_q, num_heads_q, head_dim].
        key: [total_k, num_heads_kv, head_dim].
        value: [total_k, num_heads_kv, head_dim_v].
        mask: an AttnMask, or boolean [total_q, total_k].
        scale: factor of the logits; None: head_dim ** -0.5.
        softcap: c in c * tanh(logit / c); 0.0 is off.
        sink: [num_sink, num_heads_q] or [total_q, num_sink, num_heads_q]; logits added to the denominator.
        dtype: of every step and of the results.

    Returns:
        out [total_q, num_heads_q, head_dim_v]; lse [total_q, num_heads_q]; max_logits [num_heads_q].

    Example:
        >>> from torch_magi import masks
        >>> q = torch.zeros(3, 1, 4)
        >>> out, lse, max_logits = reference_attention(q, q, q, masks.causal(3))
        >>> lse.exp().flatten().tolist()
        [1.0, 2.0, 3.0]
    """
    visible = (mask.to_dense() if isinstance(mask, AttnMask) else mask).to(query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    sees, seen = visible.any(1)[:, None, None], visible.any(0)[:, None, None]
    q = torch.where(sees, query.to(dtype), 0.0)
    k = torch.where(seen, key.to(dtype), 0.0).repeat_interleave(groups, 1)
    v = torch.where(seen, value.to(dtype), 0.0).repeat_interleave(groups, 1)

    logits = scale * torch.einsum("qhd,khd->hqk", q, k)
    hidden = ~visible
    max_logits = _maximum(_maximum(logits.detach().masked_fill(hidden, -torch.inf)))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    # A row's maximum over what it sees, and over its sink; 0 for a row with neither, so that nothing is NaN.
    top = _maximum(logits.detach().masked_fill(hidden, -torch.inf))
    sinks = None if sink is None else _sink_logits(sink.to(dtype), len(query))
    if sinks is not None:
        top = torch.maximum(top, _maximum(sinks.detach()))
    top = torch.where(top == -torch.inf, 0.0, top)[:, :, None]
    weights = torch.where(visible, torch.exp(torch.where(visible, logits, top) - top), 0.0)
    denominator = weights.sum(2)
    if sinks is not None:
        denominator = denominator + torch.exp(sinks - top).sum(2)
    empty = denominator == 0
    lse = torch.where(empty, -torch.inf, top[:, :, 0] + torch.log(torch.where(empty, 1.0, denominator)))
    probabilities = weights / torch.where(empty, 1.0, denominator)[:, :, None]
    out = torch.where(sees, torch.einsum("hqk,khd->qhd", probabilities, v), 0.0)
    if sinks is None:
        return out, torch.where(sees[:, :, 0], lse.T, -torch.inf), max_logits
    return out, lse.T, max_logits


def _maximum(logits: Tensor) -> Tensor:
    """Return the maximum over the last dimension, -inf where it is empty."""
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], -torch.inf)
    return logits.amax(-1)


def _sink_logits(sink: Tensor, rows: int) -> Tensor:
    """Return the sink as [heads, rows, num_sink]."""
    return sink.permute(2, 0, 1) if sink.ndim == 3 else sink.T[:, None].expand(-1, rows, -1)


def low_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttnMask | Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference_attention` naively in the query's dtype; lse and max_logits in float32.

    Arguments and results are those of `reference_attention`. For float64 inputs everything is float64.
    """
    dtype = query.dtype
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink": sink}
    out, lse, max_logits = reference_attention(query, key, value, mask, dtype=dtype, **options)
    if dtype in (torch.float16, torch.bfloat16):
        _, lse, max_logits = reference_attention(query, key, value, mask, dtype=torch.float32, **options)
    return out, lse, max_logits


def make_runner(attention: Callable[..., tuple[Tensor, Tensor, Tensor | None]]) -> Runner:
    """Return the runner of a differentiable function.

    Args:
        attention: takes (query, key, value, mask, *, scale, softcap, sink) and returns (out, lse, max_logits).

    Returns:
        A function of (query, key, value, mask, *, scale, softcap, sink, dout, dlse). It detaches its inputs,
        and runs backward where `dout` or `dlse` is given.
    """

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttnMask,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sink: Tensor | None = None,
        dout: Tensor | None = None,
        dlse: Tensor | None = None,
    ) -> Results:
        inputs = [x.detach().requires_grad_() for x in (query, key, value, sink) if x is not None]
        q, k, v = inputs[:3]
        s = inputs[3] if sink is not None else None
        out, lse, max_logits = attention(q, k, v, mask, scale=scale, softcap=softcap, sink=s)
        given = [(y, dy) for y, dy in ((out, dout), (lse, dlse)) if dy is not None]
        if not given:
            return Results(out.detach(), lse.detach(), max_logits)
        outputs, gradients = zip(*((y, dy.to(y.dtype)) for y, dy in given), strict=True)
        grads = torch.autograd.grad(outputs, inputs, gradients, materialize_grads=True)
        return Results(out.detach(), lse.detach(), max_logits, *grads)

    return run


def run_reference(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> Results:
    """Run `reference_attention` in float64, forward and backward; all results are float64.

    Args:
        query, key, value, mask: as in `reference_attention`.
        options: scale, softcap, sink, dout [total_q, num_heads_q, head_dim_v], dlse [total_q, num_heads_q].
    """
    double = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    return make_runner(reference_attention)(query.double(), key.double(), value.double(), mask, **double)


def run_low(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> Results:
    """Run `low_attention`, forward and backward. Arguments as for `run_reference`."""
    return make_runner(low_attention)(query, key, value, mask, **options)


def flex_flash_runner(**options: Any) -> Runner:
    """Return a runner of `torch_magi.flex_flash_attn`.

    Args:
        options: keyword arguments of every call, such as deterministic and kernel_options.
    """
    from torch_magi.attention import AuxRequest, flex_flash_attn

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **more: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        request = AuxRequest(lse=True, max_logits=True)
        out, aux = flex_flash_attn(query, key, value, mask, return_aux=request, **options, **more)
        return out, aux.lse, aux.max_logits

    return make_runner(attention)
