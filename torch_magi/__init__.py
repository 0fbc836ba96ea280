"""Attention whose mask is any set of (q, k) pairs, as PyTorch operators."""

from torch_magi import masks

__all__ = ["masks"]
__version__ = "0.1.0"
