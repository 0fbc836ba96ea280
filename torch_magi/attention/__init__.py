"""The two public attention functions and their options."""

from torch_magi.attention.context_parallel import context_parallel_attn
from torch_magi.attention.functional import flex_flash_attn
from torch_magi.attention.options import AuxOutput, AuxRequest, KernelOptions

__all__ = ["AuxOutput", "AuxRequest", "KernelOptions", "context_parallel_attn", "flex_flash_attn"]
