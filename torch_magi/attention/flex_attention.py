"""flex_attention: the call of torch's FlexAttention, computed by flex_flash_attn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as torch_flex

from torch_magi import _planner
from torch_magi.attention.functional import flex_flash_attn
from torch_magi.attention.options import AuxRequest, KernelOptions
from torch_magi.masks import AttnMask, full
from torch_magi.plan import AttnPlan

Tensor = torch.Tensor
MaskGrid = tuple[tuple[AttnMask, ...], ...]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: torch_flex.BlockMask | AttnMask | MaskGrid | AttnPlan | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: KernelOptions | None = None,
    *,
    return_aux: torch_flex.AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, torch_flex.AuxOutput]:
    """Compute attention with the arguments of `torch.nn.attention.flex_attention.flex_attention`. Differentiable.

    Args:
        query: [B, Hq, L, E]; float64, float32, bfloat16 or float16.
        key: [B, Hkv, S, E]; [1, Hkv, S, E] is the same for every element.
        value: [B, Hkv, S, Ev].
        score_mod: None, or a softcap: a function that returns c * torch.tanh(score / c) for a number c.
        block_mask: which keys each query sees; None: all. A BlockMask shows what `AttnMask.from_block_mask` says
            and, like a mask, is planned on every call. Convert and plan it once where it is used more than once,
            and always for `torch.compile`: `make_attn_plan(mask, Hq, Hkv, E, dtype=..., batch_size=B)`. Masks that
            differ by element or head, masks[b][h], are computed in one call for each set of heads that are alike.
        scale: factor of the scores; None: E ** -0.5.
        enable_gqa: whether Hq may be a multiple of Hkv.
        return_lse: also return the logsumexp; torch's older way to ask for `return_aux`.
        kernel_options: ours, see `KernelOptions`; those of torch's own kernels are refused.
        return_aux: torch's AuxRequest. There is no max_scores.

    Returns:
        out [B, Hq, L, Ev]; (out, AuxOutput) with `return_aux`, (out, lse) with `return_lse`, where lse is
        [B, Hq, L], float32 (float64 for float64 inputs), natural logarithm. A query that sees nothing has out 0 and
        lse -inf.

    Raises:
        TypeError, ValueError: for arguments that do not fit together, and for anything but a plan inside
            `torch.compile`.
        NotImplementedError: for another score_mod, for max_scores, for a device or dtype without a kernel.

    Example:
        >>> import torch, torch_magi as magi
        >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> magi.flex_attention(q, k, v, block_mask=magi.masks.causal(8)).shape
        torch.Size([1, 2, 8, 16])
    """
    _check_tensors(query, key, value, enable_gqa)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux cannot both be given; ask with return_aux=AuxRequest(lse=True)")
    if return_aux is not None and not isinstance(return_aux, torch_flex.AuxRequest):
        raise TypeError(
            "return_aux must be a torch.nn.attention.flex_attention.AuxRequest or None, got "
            f"{type(return_aux).__name__}"
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(
            "there is no largest score of each row; flex_flash_attn(return_aux=torch_magi.AuxRequest(max_logits=True)) "
            "has that of each head"
        )
    options: dict[str, Any] = {"scale": scale, "softcap": _softcap(score_mod, query), "kernel_options": kernel_options}
    # One tensor for all elements of a batch, as torch takes it.
    key, value = (x.expand(query.shape[0], -1, -1, -1) if x.shape[0] == 1 else x for x in (key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = _attend(q, k, v, block_mask, options)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    if return_aux is not None:
        return out, torch_flex.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [B, heads, length, head_dim], got {list(x.shape)}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query and key must have as many heads, got {query.shape[1]} and {key.shape[1]}; pass enable_gqa=True "
            "for grouped heads"
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return out [B, L, Hq, Ev] and lse [B, L, Hq]; q, k and v are [B, length, heads, head_dim]."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: AttnMask | AttnPlan) -> tuple[Tensor, Tensor]:
        result: Any = flex_flash_attn(q, k, v, mask, return_aux=AuxRequest(lse=True), **options)
        return result[0], result[1].lse

    if isinstance(block_mask, AttnPlan):
        return call(q, k, v, block_mask)
    if torch.compiler.is_compiling():
        raise TypeError(
            "inside torch.compile block_mask must be a plan; outside, make mask = AttnMask.from_block_mask(block_mask) "
            "and plan = make_attn_plan(mask, num_heads_q, num_heads_kv, head_dim, dtype=..., batch_size=B)"
        )
    groups = _masks_of_heads(block_mask, q, k)
    if len(groups) == 1:
        return call(q, k, v, groups[0][0])
    parts = []
    for mask, heads in groups:
        index, kv_index = (
            torch.tensor(x, device=q.device) for x in (heads, _kv_heads(heads, q.shape[2] // k.shape[2]))
        )
        parts.append(call(q.index_select(2, index), k.index_select(2, kv_index), v.index_select(2, kv_index), mask))
    order = torch.tensor([h for _, heads in groups for h in heads], device=q.device).argsort()
    out, lse = (torch.cat(x, 2).index_select(2, order) for x in zip(*parts, strict=True))
    return out, lse


def _kv_heads(heads: list[int], group: int) -> list[int]:
    """Return the kv heads of some query heads: each once, if all of them serve as many in a row."""
    each = [h // group for h in heads]
    once = sorted(set(each))
    return once if each == [h for h in once for _ in range(len(each) // len(once))] else each


def _masks_of_heads(block_mask: Any, q: Tensor, k: Tensor) -> list[tuple[AttnMask, list[int]]]:
    """Return the masks of sets of heads: [L, S] for every element alike, else [B * L, B * S]."""
    B, sq, heads = q.shape[:3]
    sk = k.shape[1]
    if block_mask is None:
        block_mask = full(sq, sk)
    elif isinstance(block_mask, torch_flex.BlockMask):
        _check_shape(tuple(block_mask.seq_lengths), sq, sk)
        if block_mask.kv_num_blocks.device != q.device:
            raise ValueError(
                f"block_mask must be on the query's device {q.device}, got {block_mask.kv_num_blocks.device}"
            )
        block_mask = AttnMask.from_block_mask(block_mask, B=B, H=heads)
    if isinstance(block_mask, AttnMask):
        block_mask = ((block_mask,),)
    if not (isinstance(block_mask, tuple) and all(isinstance(row, tuple) for row in block_mask)):
        raise TypeError(
            "block_mask must be a BlockMask, an AttnMask, a tuple masks[b][h] of them, an AttnPlan or None, got "
            f"{type(block_mask).__name__}"
        )
    if len(block_mask) not in (1, B) or any(len(row) not in (1, heads) for row in block_mask):
        sizes = f"{len(block_mask)} x {sorted({len(row) for row in block_mask})}"
        raise ValueError(f"block_mask[b][h] must be for {B} (or 1) elements and {heads} (or 1) heads, got {sizes}")
    groups: dict[tuple[AttnMask, ...], list[int]] = {}
    for h in range(heads):
        column = tuple(row[h if len(row) > 1 else 0] for row in block_mask)
        for mask in column:
            if not isinstance(mask, AttnMask):
                raise TypeError(f"block_mask[b][h] must be AttnMasks, got {type(mask).__name__}")
            _check_shape(mask.shape, sq, sk)
        groups.setdefault(column, []).append(h)
    return [(_joined(column), members) for column, members in groups.items()]


def _check_shape(shape: tuple[int, ...], sq: int, sk: int) -> None:
    if shape != (sq, sk):
        raise ValueError(
            f"block_mask must have shape {(sq, sk)}, the lengths of query and key, got {shape}; make one for these "
            "lengths, or cut one out with mask.clip(q_range, k_range)"
        )


def _joined(masks: tuple[AttnMask, ...]) -> AttnMask:
    """Return the mask of a batch, one element behind the other; the common one where all are alike."""
    if all(mask == masks[0] for mask in masks):
        return masks[0]
    sq, sk = masks[0].shape
    bands = [_planner.shift(mask.bands, b * sq, b * sk) for b, mask in enumerate(masks)]
    return AttnMask.from_bands(np.concatenate(bands), len(masks) * sq, len(masks) * sk)


def _softcap(score_mod: Callable[..., Tensor] | None, query: Tensor) -> float:
    """Return c of a score_mod c * tanh(score / c), 0.0 for one that returns the score."""
    if score_mod is None:
        return 0.0
    if torch.compiler.is_compiling():
        raise TypeError(
            "score_mod cannot be recognised inside torch.compile; for a softcap call flex_flash_attn(..., softcap=c)"
        )
    if not callable(score_mod):
        raise TypeError(f"score_mod must be a function or None, got {type(score_mod).__name__}")
    score = torch.zeros((), device=query.device)
    index = torch.zeros((), dtype=torch.int64, device=query.device)
    try:
        graph = make_fx(score_mod)(score, *(index.clone() for _ in range(4))).graph
    except Exception as error:
        raise NotImplementedError(_refusal(f"one that cannot be traced ({error})")) from error
    softcap = _match_softcap(graph)
    if softcap is None:
        steps = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        raise NotImplementedError(_refusal(f"one that computes {', '.join(steps) or 'no score'}"))
    return softcap


def _refusal(found: str) -> str:
    return (
        f"score_mod must return the score, or c * torch.tanh(score / c) for a positive number c, got {found}; "
        "what it hides belongs into block_mask"
    )


def _match_softcap(graph: Graph) -> float | None:
    aten = torch.ops.aten
    score, result = next(iter(graph.nodes)), graph.output_node().args[0]
    if result is score:
        return 0.0

    def operands(node: Any, target: Any) -> tuple[Any, ...]:
        return node.args if isinstance(node, Node) and node.target is target and not node.kwargs else (None, None)

    capped, cap = operands(result, aten.mul.Tensor)
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not (math.isfinite(cap) and cap > 0):
        return None
    inner = operands(capped, aten.tanh.default)[0]
    if operands(inner, aten.div.Tensor) == (score, cap) or operands(inner, aten.mul.Tensor) == (score, 1.0 / cap):
        return float(cap)
    return None
