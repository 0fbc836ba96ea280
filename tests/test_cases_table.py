"""The table of inputs that broke other attention packages: case -> tests here.

C01 to C08 empty rows and parts; C09 to C16 lengths, padding, sharding; C18 to C27 what a mask means;
C28 to C41 gradients and values across ranks; C43 balance; C45 to C54 compilation, DTensor, order.
A test for case NN has cNN in its name.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ATTENTION = "attention/test_flex_flash_attn.py"
FLEX = "attention/test_flex_attention.py"
CONTEXT = "attention/test_context_parallel.py"
COMPILE = "attention/test_compile.py"
OVERLAP = "attention/test_overlap.py"
CAST = "comm/test_group_cast.py"
DISPATCH = "plan/test_dispatch.py"
PLAN = "plan/test_attn_plan.py"
CONSTRUCTORS = "masks/test_constructors.py"
MASK_MOD = "masks/test_mask_mod.py"
ALGEBRA = "masks/test_mask_algebra.py"
OPS = "ops/test_flex_attn_ops.py"
MERGE = "ops/test_merge_state.py"
LOSS = "comm/test_loss.py"
ROLL = "comm/test_roll.py"
RANGES = "ops/test_range_ops.py"
DTENSOR = "tensor/test_dtensor_attention.py"

CASES: dict[str, tuple[str, ...]] = {
    "C01": (
        f"{ATTENTION}::test_c01_fully_masked_rows",
        f"{ALGEBRA}::test_c01_causal_with_more_queries_than_keys",
    ),
    "C02": (
        f"{MERGE}::test_c02_empty_states",
        f"{MERGE}::test_c02_rows_are_empty_one_by_one",
        f"{MERGE}::test_c02_gradients_of_empty_states",
    ),
    "C03": (f"{MERGE}::test_c03_far_apart_lse",),
    "C04": (
        f"{CONTEXT}::test_c04_ranks_where_everything_is_masked",
        f"{ALGEBRA}::test_c04_no_slices_at_all",
        f"{DISPATCH}::test_c04_only_one_rank_has_work",
    ),
    "C06": (f"{ATTENTION}::test_c06_short_queries",),
    "C07": (f"{ATTENTION}::test_c07_rows_behind_the_last_document",),
    "C08": (
        f"{CAST}::test_c08_a_rank_with_nothing_to_send_or_receive",
        f"{CAST}::test_c08_contradicting_plans_raise_in_debug_mode",
        f"{CAST}::test_c08_reductions_without_rows",
    ),
    "C09": (
        f"{CONTEXT}::test_c09_odd_document_lengths",
        f"{DISPATCH}::test_c09_odd_document_lengths_lose_no_token",
    ),
    "C11": (
        f"{CONTEXT}::test_c11_padding_inside_the_pack",
        f"{ALGEBRA}::test_c11_padding_inside_the_pack",
    ),
    "C14": (
        f"{ATTENTION}::test_c14_and_empty_inputs",
        f"{CONSTRUCTORS}::test_c14_repeated_tail_of_cu_seqlens",
    ),
    "C15": (
        f"{ATTENTION}::test_c15_mask_larger_than_the_tensors",
        f"{FLEX}::test_c15_mask_of_other_lengths",
    ),
    "C16": (
        f"{CONTEXT}::test_c16_full_mask_head_tail",
        f"{DISPATCH}::test_c16_full_mask_head_tail",
    ),
    "C18": (f"{CONSTRUCTORS}::test_c18_alignment",),
    "C20": (
        f"{CONSTRUCTORS}::test_c20_window_sentinels_are_unbounded",
        f"{CONSTRUCTORS}::test_c20_window_that_is_causal",
    ),
    "C21": (
        f"{ATTENTION}::test_c21_overlaps_count_once",
        f"{ALGEBRA}::test_c21_overlapping_slices_are_a_union",
    ),
    "C22": (
        f"{ATTENTION}::test_c22_staircase",
        f"{ALGEBRA}::test_c22_staircases_are_one_band",
        f"{MASK_MOD}::test_c22_a_staircase_stays_one_band",
    ),
    "C23": (
        f"{ATTENTION}::test_c23_no_mask_function",
        f"{MASK_MOD}::test_c23_blocks_without_a_function",
    ),
    "C25": (f"{CONTEXT}::test_c25_a_changed_token_changes_only_what_sees_it",),
    "C26": (
        f"{CONSTRUCTORS}::test_c26_later_changes_of_the_arguments_do_not_show",
        f"{CONSTRUCTORS}::test_c26_a_dense_mask_is_copied",
        f"{MASK_MOD}::test_c26_later_changes_of_captured_tensors_do_not_show",
        f"{PLAN}::test_c26_later_changes_of_the_arguments_do_not_show",
    ),
    "C27": (
        f"{ALGEBRA}::test_c27_memory_of_a_mask_of_a_million_tokens",
        f"{ALGEBRA}::test_c27_size_and_time_do_not_depend_on_the_length",
        f"{MASK_MOD}::test_c27_masks_of_a_million_tokens",
    ),
    "C28": (f"{CONTEXT}::test_c28_stale_keys_in_backward",),
    "C29": (f"{CONTEXT}::test_c29_the_error_does_not_grow_with_the_ranks",),
    "C30": (
        f"{CONTEXT}::test_c30_no_stray_factor_of_the_ranks",
        f"{LOSS}::test_c30_mean_over_valid_tokens_of_all_ranks",
        f"{LOSS}::test_c30_logits_gathered_for_the_loss",
    ),
    "C31": (
        f"{CONTEXT}::test_c31_sink_counts_once",
        f"{ATTENTION}::test_c31_sink",
        f"{ATTENTION}::test_c31_sink_by_hand",
    ),
    "C33": (
        f"{CONTEXT}::test_c33_grouped_heads_and_bytes",
        f"{CONTEXT}::test_c33_collectives_and_bytes_are_those_of_the_plan",
    ),
    "C34": (
        f"{ATTENTION}::test_c34_lse_is_natural",
        f"{MERGE}::test_c34_lse_stays_natural_after_merges",
    ),
    "C35": (f"{ATTENTION}::test_c35_gradient_of_lse_alone",),
    "C37": (
        f"{CONTEXT}::test_c37_dtypes",
        f"{ATTENTION}::test_c37_gradients_have_the_inputs_dtype",
    ),
    "C38": (
        f"{CONTEXT}::test_c38_softcap",
        f"{ATTENTION}::test_c38_softcap",
    ),
    "C39": (
        f"{CONTEXT}::test_c39_same_bits",
        f"{ATTENTION}::test_c39_same_bits",
        f"{CAST}::test_c39_sums_of_several_ranks_have_the_same_bits",
    ),
    "C40": (
        f"{ATTENTION}::test_c40_non_contiguous",
        f"{OPS}::test_c40_strided_inputs",
        f"{MERGE}::test_c40_strided_inputs",
        f"{RANGES}::test_c40_strided_inputs",
    ),
    "C41": (
        f"{ATTENTION}::test_c41_offsets_beyond_32_bits",
        f"{ALGEBRA}::test_c41_offsets_past_32_bits",
        f"{MASK_MOD}::test_c41_indices_beyond_32_bits",
    ),
    "C43": (f"{DISPATCH}::test_c43_two_documents",),
    "C45": (f"{COMPILE}::test_c45_c46_varying_lengths",),
    "C46": (
        f"{COMPILE}::test_c45_c46_varying_lengths",
        f"{COMPILE}::test_c46_one_device",
    ),
    "C48": (
        f"{COMPILE}::test_c48_exchanges_start_before_the_local_attention",
        f"{OVERLAP}::test_c48_by_default_the_order_is_that_of_the_program",
        f"{OVERLAP}::test_c48_three_exchanges",
        f"{OVERLAP}::test_c48_with_the_options_exchanges_start_before_the_queries_are_projected",
    ),
    "C50": (f"{DTENSOR}::test_c50_tp_x_cp",),
    "C52": (f"{ROLL}::test_c52_labels_of_packed_documents",),
}
# Cases of features that do not exist yet: there is nothing that could be wrong.
ABSENT = {
    "C54": "no argument has been renamed yet; unknown ones are refused in attention/test_flex_flash_attn.py",
}


def tests_of_cases() -> dict[str, list[str]]:
    """Return the tests that name a case, by case, as they stand in the files."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_c"):
                for number in re.findall(r"(?<=_)c(\d\d)(?=_)", node.name):
                    found.setdefault(f"C{number}", []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.mark.parametrize("case", sorted(CASES | ABSENT))
def test_table(case: str) -> None:
    if case in ABSENT:
        assert case not in tests_of_cases(), f"{case} has tests now: move it to CASES"
        pytest.skip(ABSENT[case])
    assert sorted(tests_of_cases().get(case, [])) == sorted(CASES[case])


def test_no_case_is_missing_from_the_table() -> None:
    assert set(tests_of_cases()) <= set(CASES)
