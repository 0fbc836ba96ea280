"""What is attended: a mask is a set of visible (q, k) pairs. Integers only."""

from torch_magi.masks.mask_type import MaskType

__all__ = ["MaskType"]
