"""What the attention functions share: checks of their arguments, batches, autocast."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torch_magi._torch_internals import is_exporting
from torch_magi.attention.options import AuxOutput, AuxRequest, KernelOptions, parse_kernel_options

Tensor = torch.Tensor


class Call(NamedTuple):
    """Checked arguments of one attention call; q, k, v are [rows, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    scale: float
    softcap: float
    aux: AuxRequest
    deterministic: bool
    backend: str
    sm_margin: int
    batch: tuple[int, int] | None  # B and S of a query [B, S, heads, head_dim]


def prepare(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float, sink: Tensor | None,
    return_aux: AuxRequest | None, deterministic: bool, kernel_options: KernelOptions | None,
) -> Call:  # fmt: skip
    """Check the arguments of an attention call and bring them into one form.

    Raises:
        TypeError, ValueError: with the argument's name, what was found and what is accepted.
    """
    if is_exporting():
        raise NotImplementedError("torch.export and AOTInductor cannot hold a plan yet; use torch.compile")
    backend, sm_margin = parse_kernel_options(kernel_options)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    query, key, value = (_autocast(x) for x in (query, key, value))
    _check_tensors(query, key, value)
    batch = (query.shape[0], query.shape[1]) if query.ndim == 4 else None
    if batch is not None:
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    if scale is None:
        scale = query.shape[-1] ** -0.5
    for what, number in (("scale", scale), ("softcap", softcap)):
        if number is None or isinstance(number, (str, torch.Tensor)):  # not numbers.Real: symbols are none
            raise TypeError(f"{what} must be a number, got {type(number).__name__}")
    # Comparisons and not math.isfinite: these may be symbols of torch.compile.
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number, got {scale}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (off) or a positive number, got {softcap}")
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be a torch_magi.AuxRequest or None, got {type(return_aux).__name__}")
    if sink is not None:
        _check_sink(sink, query)
    return Call(
        query, key, value, sink, float(scale), float(softcap), return_aux or AuxRequest(),
        bool(deterministic) or torch.are_deterministic_algorithms_enabled(), backend, sm_margin, batch,
    )  # fmt: skip


def finish(
    call: Call, return_aux: AuxRequest | None, out: Tensor, lse: Tensor, max_logits: Tensor
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Return what the caller asked for, in the form of the caller's tensors."""
    if call.batch is not None:
        out, lse = out.unflatten(0, call.batch), lse.unflatten(0, call.batch)
    if return_aux is None:
        return out
    return out, AuxOutput(lse if call.aux.lse else None, max_logits if call.aux.max_logits else None)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    named = (("query", query), ("key", key), ("value", value))
    for name, x in named:
        if x.ndim not in (3, 4) or x.ndim != query.ndim:
            raise ValueError(
                f"{name} must have shape [rows, heads, head_dim] or [B, S, heads, head_dim], like the others, got "
                f"{list(x.shape)} beside a query of shape {list(query.shape)}"
            )
        if x.dtype != query.dtype:
            raise TypeError(
                f"query, key and value must have one dtype, got {', '.join(str(y.dtype) for _, y in named)}"
            )
        if x.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device, got {', '.join(str(y.device) for _, y in named)}"
            )
        if x.ndim == 4 and x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have the query's batch size {query.shape[0]}, got {x.shape[0]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have as many heads, got {key.shape[-2]} and {value.shape[-2]}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"query and key must have one head_dim, got {query.shape[-1]} and {key.shape[-1]}")


def _check_sink(sink: Tensor, query: Tensor) -> None:
    if sink.dtype != torch.float32:
        raise TypeError(f"sink must be torch.float32, got {sink.dtype}; pass sink.float()")
    if sink.device != query.device:
        raise ValueError(f"sink must be on the query's device {query.device}, got {sink.device}")
    heads = query.shape[1]
    per_row = sink.ndim == 3 and sink.shape[2] == heads
    if not per_row and not (sink.ndim == 2 and sink.shape[1] == heads):
        raise ValueError(
            f"sink must have shape [num_sink, {heads}] or [rows, num_sink, {heads}], got {list(sink.shape)}"
        )


def _autocast(x: Tensor) -> Tensor:
    """Cast as autocast casts what scaled_dot_product_attention gets: every tensor by itself, float64 not at all."""
    device = x.device.type
    # meta tensors have no autocast; torch.amp.is_autocast_available would say so, but torch 2.11 cannot trace it
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))
