"""The operators: schema, fake, autograd and a thin function each. No kernels, no distributed code."""

from torch_magi.ops.flex_attn import flex_attn_fwd
from torch_magi.ops.merge_state import merge_state
from torch_magi.ops.range_ops import range_gather, range_scatter_add

__all__ = ["flex_attn_fwd", "merge_state", "range_gather", "range_scatter_add"]
