"""The public attention functions and their options."""

from torch_magi.attention.context_parallel import context_parallel_attn
from torch_magi.attention.flex_attention import flex_attention
from torch_magi.attention.functional import flex_flash_attn
from torch_magi.attention.options import AuxOutput, AuxRequest, KernelOptions

__all__ = ["AuxOutput", "AuxRequest", "KernelOptions", "context_parallel_attn", "flex_attention", "flex_flash_attn"]
