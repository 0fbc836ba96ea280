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
LOTTERY = 1 << 20  # logits; the largest error of fewer depends on luck


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
        attention: takes (query, key, value, mask, *, scale, softcap, sink), returns (out, lse, max_logits).

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


def run_low(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask | Tensor, **options: Any) -> Results:
    """Run `low_attention`, forward and backward. Arguments as for `run_reference`."""
    return make_runner(low_attention)(query, key, value, mask, **options)


def run_lows(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> list[Results]:
    """Run `low_attention` in several orders of summation, because one order of a small tensor is a lottery.

    Float32 inputs also get the backward that every kernel has to use which does not store the probabilities,
    from out and lse. (Of 1250 random masks of up to 40 x 40, a correct float32 kernel was refused for 3 % by
    the error of a single order, at up to 2.7 times the limit, and for none by that of four orders of both
    backwards.)

    Args:
        query, key, value, mask, options: as for `run_reference`.

    Returns:
        One set of results for each order; large inputs have enough elements for a single one.
    """
    dense = mask.to_dense().to(query.device)
    several = query.shape[1] * dense.numel() <= LOTTERY
    generator = torch.Generator().manual_seed(0)
    found = []
    for order in range(4 if several else 1):
        sizes = (*dense.shape, query.shape[2], value.shape[2])
        shuffled = [torch.randperm(n, generator=generator) if order else torch.arange(n) for n in sizes]
        rows, keys, dims, dims_v = (p.to(query.device) for p in shuffled)
        inputs = query[rows][:, :, dims], key[keys][:, :, dims], value[keys][:, :, dims_v]
        visible = dense[rows][:, keys]
        more = dict(options)
        for name in ("sink", "dout", "dlse"):
            x = more.get(name)
            if x is not None and not (name == "sink" and x.ndim == 2):
                more[name] = x[rows][:, :, dims_v] if name == "dout" else x[rows]
        runs = [run_low(*inputs, visible, **more)]
        if query.dtype == torch.float32 and runs[0].dq is not None:
            runs.append(_run_with_saved_lse(*inputs, visible, runs[0], **more))
        rows, keys, dims, dims_v = (p.argsort() for p in (rows, keys, dims, dims_v))
        for r in runs:
            back = r._replace(out=r.out[rows][:, :, dims_v], lse=r.lse[rows])
            if r.dq is not None and r.dk is not None and r.dv is not None:
                back = back._replace(dq=r.dq[rows][:, :, dims], dk=r.dk[keys][:, :, dims], dv=r.dv[keys][:, :, dims_v])
            if r.dsink is not None and r.dsink.ndim == 3:
                back = back._replace(dsink=r.dsink[rows])
            found.append(back)
    return found


def _run_with_saved_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    forward: Results,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Results:
    """Return `forward` with the gradients that follow from its out and lse: dS = P * (dP - delta)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    sees, seen = visible.any(1)[:, None, None], visible.any(0)[:, None, None]
    q = torch.where(sees, query, 0.0)
    k = torch.where(seen, key, 0.0).repeat_interleave(groups, 1)
    v = torch.where(seen, value, 0.0).repeat_interleave(groups, 1)
    do = torch.zeros_like(forward.out) if dout is None else torch.where(sees, dout.to(query.dtype), 0.0)
    logits = scale * torch.einsum("qhd,khd->hqk", q, k)
    slope: Tensor | float = 1.0
    if softcap:
        capped = torch.tanh(logits / softcap)
        logits, slope = softcap * capped, 1 - capped * capped
    lse = torch.where(forward.lse.isfinite(), forward.lse, 0.0)
    p = torch.where(visible, torch.exp(logits - lse.T[:, :, None]), 0.0)
    delta = (forward.out * do).sum(2)
    if dlse is not None:
        delta = delta - torch.where(forward.lse.isfinite(), dlse.to(query.dtype), 0.0)
    ds = p * (torch.einsum("qhd,khd->hqk", do, v) - delta.T[:, :, None]) * slope * scale
    dsink = None
    if sink is not None:
        per_row = -torch.exp((sink if sink.ndim == 3 else sink[None]) - lse[:, None]) * delta[:, None]
        dsink = per_row if sink.ndim == 3 else per_row.sum(0)

    def to_kv_heads(x: Tensor) -> Tensor:
        return x.reshape(len(x), key.shape[1], groups, x.shape[2]).sum(2)

    return forward._replace(
        dq=torch.einsum("hqk,khd->qhd", ds, k),
        dk=to_kv_heads(torch.einsum("hqk,qhd->khd", ds, q)),
        dv=to_kv_heads(torch.einsum("hqk,qhd->khd", p, do)),
        dsink=dsink,
    )


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
        result: Any = flex_flash_attn(query, key, value, mask, return_aux=request, **options, **more)
        out, aux = result
        return out, aux.lse, aux.max_logits

    return make_runner(attention)
