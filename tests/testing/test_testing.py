"""torch_magi.testing itself: references against torch's attention, and that every check can fail."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.testing import (
    RankError,
    Results,
    assert_close_to_truth,
    assert_results_close,
    check_attention,
    count_probe,
    flex_flash_runner,
    named_masks,
    perturb_probe,
    random_inputs,
    random_mask,
    reference_attention,
    rounding_band,
    run_low,
    run_ranks,
    run_reference,
)

MASKS = named_masks()
run = flex_flash_runner()


@pytest.mark.parametrize("name", sorted(MASKS))
def test_reference_is_torchs_attention(name: str) -> None:
    mask = MASKS[name]
    x = random_inputs(mask, dtype=torch.float64, seed=0)
    out, _, _ = reference_attention(x.query, x.key, x.value, mask)
    dense = mask.to_dense()
    rows = dense.any(1)
    heads_first = [t.transpose(0, 1)[None] for t in (x.query[rows], x.key, x.value)]
    expected = scaled_dot_product_attention(*heads_first, attn_mask=dense[rows], enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(out[rows], expected, rtol=1e-12, atol=1e-12)
    assert (out[~rows] == 0).all()


def one_pair_more(mask: AttnMask) -> AttnMask:
    hidden = (~mask.to_dense()).nonzero()[0].tolist()
    pair = [[hidden[0], hidden[0] + 1]], [[hidden[1], hidden[1] + 1]]
    return mask | AttnMask.from_slices(*pair, ["full"], *mask.shape)


def one_pair_less(mask: AttnMask) -> AttnMask:
    q, k = mask.to_dense().nonzero()[-1].tolist()
    return mask - AttnMask.from_slices([[q, q + 1]], [[k, k + 1]], ["full"], *mask.shape)


@pytest.mark.parametrize("change", [one_pair_more, one_pair_less])
def test_a_wrong_pair_is_noticed(change: Any) -> None:
    mask = masks.document([0, 30, 100])

    def wrong(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> Results:
        return run(query, key, value, change(mask), **options)

    with pytest.raises(AssertionError, match=r"row \d+, head 0 sees exp\(lse\)"):
        count_probe(wrong, mask)
    x = random_inputs(mask, dtype=torch.float64, seed=0)
    with pytest.raises(AssertionError, match="out is off by"):
        check_attention(wrong, x.query, x.key, x.value, mask, dout=x.dout)


def test_the_same_number_of_wrong_keys_is_noticed() -> None:
    """Where lse is right: each row sees another key instead."""

    def wrong(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> Results:
        return run(query, key.roll(1, 0), value.roll(1, 0), mask, **options)

    with pytest.raises(AssertionError, match=r"row .* sees the wrong keys"):
        count_probe(wrong, masks.causal(50))


def test_a_gradient_that_reaches_too_far_is_noticed() -> None:
    def wrong(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> Results:
        results = run(query, key, value, mask, **options)
        return results._replace(dv=results.dv.roll(1, 0))

    with pytest.raises(AssertionError, match=r"key .* sees the wrong rows"):
        count_probe(wrong, masks.causal(50))


def test_perturb_probe() -> None:
    mask = masks.document([0, 8, 16])
    x = random_inputs(mask, dtype=torch.float64, seed=0)
    perturb_probe(run, x.query, x.key, x.value, mask, token=0)

    def sees_all(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> Results:
        return run(query, key, value, masks.causal(16), **options)

    with pytest.raises(AssertionError, match=r"rows \[8, 9, .* do not see token 0, but depend on it"):
        perturb_probe(sees_all, x.query, x.key, x.value, mask, token=0)
    with pytest.raises(AssertionError, match=r"rows \[8, 9, .* see token 0, but ignore it"):
        perturb_probe(run_document, x.query, x.key, x.value, masks.causal(16), token=0)


def run_document(query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **options: Any) -> Results:
    return run(query, key, value, masks.document([0, 8, 16]), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rule(dtype: torch.dtype) -> None:
    truth = torch.tensor([[1.0, -2.0], [0.5, float("-inf")]], dtype=torch.float64)
    exact = truth.to(dtype)
    assert_close_to_truth(exact, truth, exact)
    band = 1e-12 * 2 if dtype == torch.float64 else rounding_band(dtype, 2.0)
    off = truth.clone()
    off[1, 0] += 0.9 * band
    assert_close_to_truth(off, truth, exact, dtype)
    off[1, 0] += 0.2 * band
    with pytest.raises(AssertionError, match=r"off by .* at \(1, 0\).* in rows \[1, 2\)"):
        assert_close_to_truth(off, truth, exact, dtype)
    for bad in (float("nan"), float("inf"), float("-inf")):
        wrong = truth.clone()
        wrong[0, 0] = bad
        with pytest.raises(AssertionError, match=r"at \(0, 0\) where truth is 1"):
            assert_close_to_truth(wrong, truth, exact, dtype)
    finite = truth.clone()
    finite[1, 1] = -1e30
    with pytest.raises(AssertionError, match="where truth is -inf"):
        assert_close_to_truth(finite, truth, exact, dtype)
    with pytest.raises(AssertionError, match=r"must have shape \[2, 2\], got \[4\]"):
        assert_close_to_truth(truth.flatten(), truth, exact, dtype)


def test_dtypes_and_missing_results_are_noticed() -> None:
    mask = MASKS["causal"]
    x = random_inputs(mask, dtype=torch.bfloat16, seed=0)
    truth = run_reference(x.query, x.key, x.value, mask, dout=x.dout)
    low = run_low(x.query, x.key, x.value, mask, dout=x.dout)
    assert_results_close(low, truth, [low], torch.bfloat16, 8)
    with pytest.raises(AssertionError, match=r"dq must be torch.bfloat16 .* got torch.float32"):
        assert_results_close(low._replace(dq=low.dq.float()), truth, [low], torch.bfloat16, 8)
    with pytest.raises(AssertionError, match="dk is missing"):
        assert_results_close(low._replace(dk=None), truth, [low], torch.bfloat16, 8)


def test_random_masks_are_made_again_by_their_seed() -> None:
    assert random_mask(3, 20, 30) == random_mask(3, 20, 30)
    assert len({random_mask(i, 20, 30) for i in range(20)}) > 15


# --- ranks ----------------------------------------------------------------------------------------------


def fail_on_rank_1(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 1:
        raise KeyError("no such row")
    dist.barrier(group)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_failing_rank_is_named(backend: Any) -> None:
    """And the others, which wait for it, end as well."""
    begin = time.monotonic()
    with pytest.raises(KeyError, match="no such row") as error:
        run_ranks(fail_on_rank_1, 3, backend, timeout=60.0)
    assert isinstance(error.value.__cause__, RankError) and "rank 1 of 3" in str(error.value.__cause__)
    assert time.monotonic() - begin < 30


def hang_on_rank_0(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        time.sleep(20)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_hanging_rank_is_named(backend: Any) -> None:
    with pytest.raises(TimeoutError, match="0"):
        run_ranks(hang_on_rank_0, 2, backend, timeout=3.0)


def sum_of_ranks(rank: int, group: dist.ProcessGroup, start: int) -> int:
    x = torch.tensor(start + rank)
    dist.all_reduce(x, group=group)
    return int(x)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ranks_communicate(backend: Any) -> None:
    for world in (1, 2, 4):
        assert run_ranks(sum_of_ranks, world, backend, (5,)) == [5 * world + sum(range(world))] * world


def test_wrong_arguments_of_run_ranks() -> None:
    with pytest.raises(ValueError, match="world_size must be positive, got 0"):
        run_ranks(sum_of_ranks, 0)
    with pytest.raises(ValueError, match="backend must be 'threads' or 'processes', got 'mpi'"):
        run_ranks(sum_of_ranks, 1, "mpi")  # type: ignore[arg-type]
