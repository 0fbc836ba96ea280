"""What is attended: a mask is a set of visible (q, k) pairs. Integers only."""

from torch_magi.masks.constructors import (
    and_masks,
    bidirectional_spans,
    block_causal,
    causal,
    chunk_causal,
    document,
    from_block_matrix,
    from_document_ids,
    from_position_ids,
    full,
    or_masks,
    prefix_lm,
    shared_prefix,
    sliding_block,
    sliding_window,
    varlen,
)
from torch_magi.masks.mask import AttnMask
from torch_magi.masks.mask_type import MaskType

__all__ = [
    "AttnMask",
    "MaskType",
    "and_masks",
    "bidirectional_spans",
    "block_causal",
    "causal",
    "chunk_causal",
    "document",
    "from_block_matrix",
    "from_document_ids",
    "from_position_ids",
    "full",
    "or_masks",
    "prefix_lm",
    "shared_prefix",
    "sliding_block",
    "sliding_window",
    "varlen",
]
