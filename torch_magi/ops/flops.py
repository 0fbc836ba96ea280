"""FLOPs of the attention operators, for `torch.utils.flop_counter` and for compilers that weigh operators by them.

A plan knows its visible pairs, so that eager code counts exactly what a mask needs. Traced code has no plan to look
into: there every row is taken to see every key, which also makes ranks with equal lengths agree.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_magi.plan import AttnPlan

Shape = torch.Size | tuple[int, ...]


def _pairs(q_shape: Shape, k_shape: Shape, plan: object, stage: int) -> int:
    if type(plan) is AttnPlan:  # isinstance holds for the fake object that stands for a plan in traced code, too
        return plan.stages[stage].mask.area
    return q_shape[0] * k_shape[0]


def forward_flops(q: Shape, k: Shape, v: Shape, plan: object, stage: int, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of `flex_attn_fwd`: two products per visible pair and head, of head_dim and of head_dim_v.

    Args:
        q, k, v: shapes [rows, num_heads_q, head_dim], [keys, num_heads_kv, head_dim], [keys, num_heads_kv, head_dim_v].
        plan, stage: what is visible.
        args, kwargs: the operator's other arguments and its results; not used.
    """
    return 2 * _pairs(q, k, plan, stage) * q[1] * (q[2] + v[2])


def backward_flops(
    dout: Shape,
    dlse: Shape | None,
    q: Shape,
    k: Shape,
    v: Shape,
    out: Shape,
    lse: Shape,
    dq_before: Shape | None,
    plan: object,
    stage: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Return the FLOPs of `flex_attn_bwd`: three products of head_dim (scores, dq, dk), two of head_dim_v (dp, dv).

    Args:
        q, k, v, plan, stage: as in `forward_flops`.
        dout, dlse, out, lse, dq_before, args, kwargs: not used.
    """
    return 2 * _pairs(q, k, plan, stage) * q[1] * (3 * q[2] + 2 * v[2])
