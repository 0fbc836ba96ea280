"""Attention whose mask is any set of (q, k) pairs, as PyTorch operators, on one device or many.

mask = masks.document(cu_seqlens)                    what is attended
plan = make_attn_plan(mask, heads_q, heads_kv, dim)  who computes what
out = flex_flash_attn(q, k, v, plan)                 on one device
out = context_parallel_attn(q, k, v, plan, group)    on dispatched rows, across ranks
"""

from typing import TYPE_CHECKING, Any

from torch_magi import _extension

_extension.load()

from torch_magi import masks  # noqa: E402
from torch_magi.attention import (  # noqa: E402
    AuxOutput,
    AuxRequest,
    KernelOptions,
    context_parallel_attn,
    flex_attention,
    flex_flash_attn,
)
from torch_magi.comm import (  # noqa: E402
    compile_options,
    cp_mean_loss,
    dispatch,
    group_cast,
    group_reduce,
    roll,
    undispatch,
)
from torch_magi.ops import merge_state  # noqa: E402
from torch_magi.plan import AttnPlan, CommPlan, PlanConfig, make_attn_plan  # noqa: E402

if TYPE_CHECKING:
    from torch_magi import tensor

__all__ = [
    "AttnPlan",
    "AuxOutput",
    "AuxRequest",
    "CommPlan",
    "KernelOptions",
    "PlanConfig",
    "compile_options",
    "context_parallel_attn",
    "cp_mean_loss",
    "dispatch",
    "flex_attention",
    "flex_flash_attn",
    "group_cast",
    "group_reduce",
    "make_attn_plan",
    "masks",
    "merge_state",
    "roll",
    "tensor",
    "undispatch",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "tensor":  # imports torch.distributed.tensor
        import importlib

        return importlib.import_module("torch_magi.tensor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
