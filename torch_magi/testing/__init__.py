"""References, masks, probes and local ranks for tests of attention. Shipped, so that users can test theirs.

x = random_inputs(mask, dtype=torch.bfloat16, seed=0)
check_attention(flex_flash_runner(), x.query, x.key, x.value, mask, dout=x.dout)      one device
check_attention(context_parallel_runner(4), x.query, x.key, x.value, mask, dout=x.dout)   4 ranks
count_probe(flex_flash_runner(), mask)                                                which pairs are seen
"""

from torch_magi.testing.cases import (
    YARDSTICK_MASKS,
    Inputs,
    document_lengths,
    named_masks,
    random_inputs,
    random_mask,
    random_masks,
)
from torch_magi.testing.local_ranks import RankError, context_parallel_runner, run_ranks
from torch_magi.testing.probes import count_probe, perturb_probe
from torch_magi.testing.reference import (
    Results,
    Runner,
    flex_flash_runner,
    low_attention,
    make_runner,
    reference_attention,
    run_low,
    run_lows,
    run_reference,
)
from torch_magi.testing.tolerance import (
    assert_close_to_truth,
    assert_results_close,
    check_attention,
    rounding_band,
)

__all__ = [
    "YARDSTICK_MASKS",
    "Inputs",
    "RankError",
    "Results",
    "Runner",
    "assert_close_to_truth",
    "assert_results_close",
    "check_attention",
    "context_parallel_runner",
    "count_probe",
    "document_lengths",
    "flex_flash_runner",
    "low_attention",
    "make_runner",
    "named_masks",
    "perturb_probe",
    "random_inputs",
    "random_mask",
    "random_masks",
    "reference_attention",
    "rounding_band",
    "run_low",
    "run_lows",
    "run_ranks",
    "run_reference",
]
