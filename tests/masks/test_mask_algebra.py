"""AttnMask as a set of pairs and as a value: set operations, normal form, equality, hash, pickle, size and time."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torch_magi import make_attn_plan, masks
from torch_magi.masks import AttnMask, MaskType
from torch_magi.testing import document_lengths, named_masks, random_mask, random_masks

NAMED = named_masks()


def empty(sq: int, sk: int) -> AttnMask:
    return AttnMask.from_slices([], [], [], sq, sk)


def dense(mask: AttnMask) -> np.ndarray:
    return mask.to_dense().numpy()


def is_identical(a: AttnMask, b: AttnMask) -> bool:
    """Return whether two masks are the same value in every way that can be told."""
    return (
        a == b
        and not a != b
        and hash(a) == hash(b)
        and a.shape == b.shape
        and a.area == b.area
        and np.array_equal(a.bands, b.bands)
        and pickle.dumps(a) == pickle.dumps(b)
    )


def pairs_of_masks(count: int, seed: int) -> Iterator[tuple[AttnMask, AttnMask]]:
    """Yield random masks of equal shapes: unions of slices, and coin tosses."""
    rng = np.random.default_rng(seed)
    for i, mask in enumerate(random_masks(count, seed, max_size=24)):
        if i % 3:
            yield mask, random_mask(seed + 1000 + i, *mask.shape)
        else:
            share = rng.random()
            print("and a random matrix")
            yield mask, AttnMask.from_dense(rng.random(mask.shape) < share)


def test_set_operations(seed: int) -> None:
    for a, b in pairs_of_masks(150, seed):
        x, y = dense(a), dense(b)
        for mask, expected in ((a | b, x | y), (a & b, x & y), (a - b, x & ~y), (b - a, y & ~x)):
            assert np.array_equal(dense(mask), expected)
            assert mask.area == expected.sum()
            assert is_identical(mask, AttnMask.from_dense(expected))


def test_laws_of_sets(seed: int) -> None:
    for a, b in pairs_of_masks(100, seed):
        everything, nothing = masks.full(*a.shape), empty(*a.shape)
        assert is_identical(a | b, b | a) and is_identical(a & b, b & a)
        assert is_identical(a | a, a) and is_identical(a & a, a) and is_identical(a - a, nothing)
        assert is_identical(a | nothing, a) and is_identical(a & everything, a) and is_identical(a - nothing, a)
        assert is_identical(everything - (everything - a), a)
        assert is_identical(everything - (a | b), (everything - a) & (everything - b))
        assert is_identical((a & b) | (a - b), a)
        assert (a | b).area == a.area + b.area - (a & b).area


def test_transposition(seed: int) -> None:
    for mask in (*random_masks(100, seed), *NAMED.values()):
        assert mask.T.shape == mask.shape[::-1] and mask.T.area == mask.area
        assert is_identical(mask.T, AttnMask.from_dense(mask.to_dense().T))
        assert is_identical(mask.T.T, mask)


def test_staircases(seed: int) -> None:
    """Every kind of staircase, cut at any row and key, transposed and combined."""
    rng = np.random.default_rng(seed)
    for _ in range(150):
        n, size, window = (int(rng.integers(1, high)) for high in (40, 7, 4))
        cu = [0, int(rng.integers(0, n + 1)), n]
        stairs = [
            masks.block_causal(cu, size),
            masks.sliding_block(cu, size, window - 1),
            masks.chunk_causal(n, int(rng.integers(1, 40)), size),
        ][int(rng.integers(0, 3))]
        (q0, q1), (k0, k1) = (np.sort(rng.integers(0, length + 1, 2)).tolist() for length in stairs.shape)
        print(f"cu {cu}, size {size}, window {window}, {stairs!r}, clipped to ({q0}, {q1}), ({k0}, {k1})")
        matrix = stairs.to_dense()
        for mask, expected in ((stairs, matrix), (stairs.clip((q0, q1), (k0, k1)), matrix[q0:q1, k0:k1])):
            assert is_identical(mask, AttnMask.from_dense(expected))
            assert is_identical(mask.T, AttnMask.from_dense(expected.T))
            assert is_identical(mask.T.T, mask)
            noise = AttnMask.from_dense(rng.random(mask.shape) < 0.5)
            assert is_identical((mask & noise) | (mask - noise), mask)
            assert is_identical((mask | noise).T, mask.T | noise.T)


def test_clip(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for mask in (*random_masks(100, seed), *NAMED.values()):
        (q0, q1), (k0, k1) = (np.sort(rng.integers(0, n + 1, 2)).tolist() for n in mask.shape)
        print(f".clip(({q0}, {q1}), ({k0}, {k1}))")
        part = mask.clip((q0, q1), (k0, k1))
        assert part.shape == (q1 - q0, k1 - k0)
        assert is_identical(part, AttnMask.from_dense(mask.to_dense()[q0:q1, k0:k1]))
        assert is_identical(mask.clip((0, mask.shape[0]), (0, mask.shape[1])), mask)
        # A part of a part.
        a, b = int(rng.integers(0, part.shape[0] + 1)), int(rng.integers(0, part.shape[1] + 1))
        assert is_identical(
            part.clip((a, part.shape[0]), (b, part.shape[1])), mask.clip((q0 + a, q1), (k0 + b, k1))
        )  # fmt: skip


def test_clipped_parts_make_the_whole(seed: int) -> None:
    """Moved back to where they were cut out, the parts of a mask are the mask."""
    rng = np.random.default_rng(seed)
    for mask in random_masks(60, seed):
        sq, sk = mask.shape
        q, k = int(rng.integers(0, sq + 1)), int(rng.integers(0, sk + 1))
        print(f"cut at ({q}, {k})")
        whole, area = empty(sq, sk), 0
        for (q0, q1), (k0, k1) in itertools.product(((0, q), (q, sq)), ((0, k), (k, sk))):
            part = mask.clip((q0, q1), (k0, k1))
            q_ranges, k_ranges, types = part.to_slices()
            whole = whole | AttnMask.from_slices(q_ranges + q0, k_ranges + k0, types, sq, sk)
            area += part.area
        assert is_identical(whole, mask) and area == mask.area


def test_equal_sets_are_equal_however_they_were_made(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for mask in (*random_masks(40, seed, max_size=16), *NAMED.values()):
        sq, sk = mask.shape
        matrix = mask.to_dense()
        pairs = rng.permutation(matrix.nonzero().numpy())
        q, k = pairs[:, :1], pairs[:, 1:]
        one_by_one = AttnMask.from_slices(
            np.hstack([q, q + 1]), np.hstack([k, k + 1]), rng.integers(0, 4, len(pairs)), sq, sk
        )
        rows = columns = empty(sq, sk)
        for i in rng.permutation(sq):
            rows = rows | (mask & AttnMask.from_slices([[i, i + 1]], [[0, sk]], ["full"], sq, sk))
        for j in rng.permutation(sk):
            columns = columns | (mask & AttnMask.from_slices([[0, sq]], [[j, j + 1]], ["full"], sq, sk))
        sq_ranges, sk_ranges, types = mask.to_slices()
        order = rng.permutation(np.tile(np.arange(len(types)), 2))  # each slice twice
        shuffled = AttnMask.from_slices(sq_ranges[order], sk_ranges[order], types[order], sq, sk)
        noise = AttnMask.from_dense(rng.random((sq, sk)) < 0.5)
        ways = {
            "dense": AttnMask.from_dense(matrix),
            "pairs": one_by_one,
            "rows": rows,
            "columns": columns,
            "slices": shuffled,
            "noise": (mask - noise) | (mask & noise),
            "transposed": AttnMask.from_dense(matrix.T).T,
            "bands": AttnMask.from_bands(mask.bands[rng.permutation(len(mask.bands))], sq, sk),
        }
        for way, other in ways.items():
            assert is_identical(mask, other), f"{way}: {mask.bands.tolist()} is not {other.bands.tolist()}"


def test_different_sets_are_different(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for mask in random_masks(60, seed, max_size=16):
        sq, sk = mask.shape
        if not sq * sk:
            continue
        changed = mask.to_dense()
        at = int(rng.integers(0, sq)), int(rng.integers(0, sk))
        changed[at] = ~changed[at]
        other = AttnMask.from_dense(changed)
        assert other != mask and not other == mask and len({mask, other}) == 2
        assert abs(other.area - mask.area) == 1


def test_equality_with_other_shapes_and_things() -> None:
    assert masks.full(2, 3) - masks.full(2, 3) != masks.full(3, 2) - masks.full(3, 2)
    assert masks.full(0, 3) != masks.full(0, 4) != masks.full(4, 0)
    assert masks.full(2, 2) != "full" and masks.full(2, 2) != torch.ones(2, 2) and masks.full(2, 2) is not None
    assert masks.causal(1) == masks.full(1, 1) == masks.sliding_window(1, 1, (0, 0))
    assert masks.causal(3, 1) == masks.causal(3, 1) != masks.full(3, 1)


def test_dictionary_keys() -> None:
    found = {masks.causal(4): "causal", masks.full(4, 4): "full"}
    assert found[masks.document([0, 4])] == "causal"
    assert found[masks.chunk_causal(4, 4, 4)] == "full"
    assert masks.causal(5) not in found


@pytest.mark.parametrize("name", NAMED)
def test_copies(name: str) -> None:
    mask = NAMED[name]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert is_identical(pickle.loads(pickle.dumps(mask, protocol)), mask)
    for other in (copy.copy(mask), copy.deepcopy(mask)):
        assert is_identical(other, mask)
    loaded = pickle.loads(pickle.dumps(mask))
    assert not loaded.bands.flags.writeable
    assert np.array_equal(dense(loaded), dense(mask))


def test_immutable() -> None:
    mask = masks.document([0, 3, 8])
    before = hash(mask), mask.area, mask.to_string()
    for name in ("area", "shape", "bands", "T", "_bands", "_shape", "_area", "anything"):
        with pytest.raises(AttributeError):
            setattr(mask, name, 1)
    with pytest.raises(ValueError, match="read-only"):
        mask.bands[0, 0] = 1
    with pytest.raises(TypeError):
        mask.shape[0] = 3  # type: ignore[index]
    # What it returns is the caller's.
    mask.to_dense()[:] = True
    for array in (*mask.to_slices(), *mask.row_intervals()):
        array[:] = 7
    other = mask
    other |= masks.full(8, 8)
    assert other is not mask
    assert (hash(mask), mask.area, mask.to_string()) == before == (hash(masks.document([0, 3, 8])), *before[1:])


def test_attributes_cannot_be_deleted() -> None:
    mask = masks.causal(3)
    for name in ("_area", "_bands", "area", "anything"):
        with pytest.raises(AttributeError, match=f"an AttnMask is immutable; cannot delete '{name}'"):
            delattr(mask, name)
    assert mask.area == 6


@pytest.mark.parametrize("name", NAMED)
def test_area_and_sparsity(name: str) -> None:
    mask = NAMED[name]
    assert isinstance(mask.area, int) and mask.area == dense(mask).sum()
    assert mask.sparsity() == pytest.approx(1 - dense(mask).mean(), abs=1e-15)


def test_sparsity_at_the_ends() -> None:
    assert masks.full(3, 4).sparsity() == 0.0
    assert empty(3, 4).sparsity() == 1.0
    assert masks.full(0, 4).sparsity() == masks.full(0, 0).sparsity() == 0.0
    assert masks.causal(4).sparsity() == 6 / 16


def test_area_is_a_64_bit_integer() -> None:
    n = (1 << 31) - 8
    assert masks.full(n - 1, n).area == (n - 1) * n
    assert masks.causal(n).area == n * (n + 1) // 2
    assert masks.sliding_window(n, n, (9, 0)).area == 10 * n - 45
    assert masks.block_causal([0, n], n // 8).area == 36 * (n // 8) ** 2


@pytest.mark.parametrize("sq", [5, 1 << 31, 1 << 32, 1 << 61])
def test_lengths_that_could_overflow_the_area_are_refused(sq: int) -> None:
    sk = 5 if sq > 5 else 1 << 31
    message = rf"sq and sk must be in \[0, 2\^31\), got {sq} and {sk}"
    for make in (
        masks.full,
        masks.causal,
        lambda sq, sk: masks.sliding_window(sq, sk, None),
        lambda sq, sk: AttnMask.from_slices([], [], [], sq, sk),
        lambda sq, sk: masks.varlen([0, 1], [0, 1], total_q=sq, total_k=sk),
    ):
        with pytest.raises(ValueError, match=message):
            make(sq, sk)
    with pytest.raises(ValueError, match=r"must be in \[0, 2\^31\)"):
        masks.document([0, max(sq, sk)])


# --- cases ---


def test_c01_causal_with_more_queries_than_keys() -> None:
    mask = AttnMask.from_slices([[0, 5]], [[0, 2]], [MaskType.CAUSAL], 5, 2)
    assert mask.to_dense().int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert mask == masks.causal(5, 2) and mask.area == 3
    assert AttnMask.from_slices([[0, 5]], [[0, 2]], [MaskType.BI_CAUSAL], 5, 2) == empty(5, 2)


def test_c04_no_slices_at_all() -> None:
    for sq, sk in ((0, 0), (0, 3), (3, 0), (32, 32)):
        mask = AttnMask.from_slices([], [], [], sq, sk)
        assert mask.area == 0 and len(mask.bands) == 0 and not dense(mask).any() and mask.shape == (sq, sk)
        assert is_identical(mask, masks.full(sq, sk) - masks.full(sq, sk))
        assert is_identical(mask, AttnMask.from_slices([[0, 0]], [[0, 0]], ["full"], sq, sk))


def test_c11_padding_inside_the_pack() -> None:
    mask = masks.from_document_ids([1, 1, 1, 0, 2, 2, 0, 0], padding_id=0)
    real = {0, 1, 2, 4, 5}
    assert set(np.flatnonzero(dense(mask).any(1))) == set(np.flatnonzero(dense(mask).any(0))) == real
    assert mask == masks.document([0, 3, 3, 4, 6], total=8) - AttnMask.from_slices([[3, 4]], [[3, 4]], [0], 8, 8)


def test_c21_overlapping_slices_are_a_union() -> None:
    slices = ([[0, 4], [0, 4]], [[0, 4], [2, 6]], ["full", "full"])
    mask = AttnMask.from_slices(*slices, 4, 6)
    assert is_identical(mask, masks.full(4, 6)) and mask.area == 24
    q, _, _ = mask.to_slices()
    assert len(q) == 1


@pytest.mark.parametrize("n", [200, 2000, 1 << 16])
def test_c22_staircases_are_one_band(n: int) -> None:
    mask = masks.chunk_causal(n, n, 2).clip((n // 2, n), (0, n))
    assert len(mask.bands) == 1, "the number of bands grows with the number of steps"
    expected = sum(2 * (i // 2 + 1) for i in range(100, 200)) if n == 200 else (n // 2) * (n + n // 2 + 2) // 2
    assert mask.area == expected
    if n == 200:
        assert expected == 15100
        assert np.array_equal(dense(mask), np.arange(200) < 2 * (np.arange(100, 200)[:, None] // 2 + 1))


def test_c41_offsets_past_32_bits() -> None:
    """A table of 46341 x 46341 entries has offsets that do not fit in 32 bits; the mask must not need one."""
    n = 46341
    last = torch.tensor(n - 1, dtype=torch.int32)
    assert (n - 1) * n + (n - 1) == 2147488280 > 2**31 - 1
    for mask, visible in ((masks.causal(n), True), (masks.causal(n) - masks.sliding_window(n, n, (0, 0)), False)):
        mask_mod = mask.to_mask_mod()
        assert bool(mask_mod(None, None, last, last)) == visible
        assert bool(mask_mod(None, None, last, last - 1))
        assert mask.clip((n - 1, n), (n - 1, n)).area == int(visible)
        offsets, intervals = mask.row_intervals()
        assert offsets.dtype == intervals.dtype == np.int64 and intervals[-1].tolist() == [0, n - 1 + int(visible)]
    assert masks.full(n, n).area == n * n > 2**31


def ragged_documents(total: int, count: int = 32) -> np.ndarray:
    """Return cu_seqlens of `count` documents with lengths that all differ."""
    weights = np.cumsum(np.arange(16, 16 + count))
    return np.concatenate([[0], weights * total // weights[-1]])


def test_c27_memory_of_a_mask_of_a_million_tokens(address_space_limit) -> None:
    total = 1 << 20
    cu = ragged_documents(total)
    masks.document([0, 2, 5]).to_string()
    with address_space_limit(200 << 20):
        mask = masks.document(cu)
        hash(mask)
        pickle.loads(pickle.dumps(mask))
        everything = masks.full(total, total)
        for other in (mask | masks.causal(total), mask & everything, everything - mask, mask.T, mask.T.T):
            other.to_slices()
            other.to_string()
            other.explain()
        mask.clip((total // 3, total // 2), (0, total // 2))
        mask.row_intervals()
        plan = make_attn_plan(mask, 2, 2, 8, cp_size=8, cp_rank=3)
    lengths = np.diff(cu)
    assert mask.area == int((lengths * (lengths + 1) // 2).sum()) == sum(plan.area_per_rank)
    assert len(mask.bands) == 32
    with pytest.raises(RuntimeError, match="memory"), address_space_limit(200 << 20):  # the limit works
        torch.empty(total, total, dtype=torch.bool)


def test_c27_size_and_time_do_not_depend_on_the_length() -> None:
    def work(total: int) -> tuple[float, list[int]]:
        cu = ragged_documents(total)
        window = (total // 64, 0)
        best, counts = float("inf"), []
        for _ in range(15):
            start = time.perf_counter()
            made = [masks.document(cu), masks.document(cu, window_size=window), masks.block_causal(cu, total // 128)]
            made += [made[0] - made[1], made[1] | made[2], made[0].T, made[2].clip((0, total // 2), (0, total))]
            for mask in made:
                hash(mask)
            best = min(best, time.perf_counter() - start)
            counts = [len(mask.bands) for mask in made]
        return best, counts

    short, long = work(1 << 13), work(1 << 20)
    assert long[1] == short[1], "the number of bands depends on the length"
    # 128 times the length: anything that visits every row would be far slower than this.
    assert long[0] < 8 * short[0] + 1e-3, f"{short[0]:.6f} s for 2^13 tokens, {long[0]:.6f} s for 2^20"


def test_size_is_that_of_the_slices() -> None:
    """A union of n slices has O(n) bands, at any length."""
    counts = []
    for total in (1 << 14, 1 << 22):
        cu = np.cumsum([0, *document_lengths(1 << 14, 1 << 12, seed=3)]) * (total >> 14)
        counts.append(len(masks.document(cu).bands))
        assert counts[-1] == len(cu) - 1
    assert counts[0] == counts[1] > 5


def test_time_of_a_transposition_grows_with_the_steps_only() -> None:
    def transposed(steps: int) -> float:
        best, mask = float("inf"), masks.chunk_causal(2 * steps, 2 * steps, 2)
        for _ in range(2):
            start = time.perf_counter()
            assert mask.T.area == mask.area
            best = min(best, time.perf_counter() - start)
        return best

    assert transposed(4096) < 24 * transposed(512)  # 8 times the steps


# --- negative control ---


def test_the_comparison_notices_a_wrong_operation(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    real = AttnMask.__or__

    def without_last_row(self: AttnMask, other: Any) -> AttnMask:
        made = real(self, other)
        n = made.shape[0]
        return made.clip((0, max(n - 1, 0)), (0, made.shape[1])) if n else made

    monkeypatch.setattr(AttnMask, "__or__", without_last_row)
    with pytest.raises((AssertionError, ValueError)):
        test_set_operations(seed)


def test_many_intervals_a_row_cost_little() -> None:
    """Thousands of intervals in every row of a million: what counts is how many bands there are."""
    n = 1 << 20
    keys = np.arange(0, n, 512)
    columns = AttnMask.from_slices(
        np.tile([0, n], (len(keys), 1)), np.stack([keys, keys + 1], 1), ["full"] * len(keys), n, n
    )
    begin = time.perf_counter()
    rest = masks.causal(n) - columns
    assert len(rest.bands) <= len(keys) + 1 and rest.area == masks.causal(n).area - int((n - keys).sum())
    ends = np.arange(0, n, 127)
    steps = np.stack([np.zeros_like(ends), np.minimum(ends + 1 + ends % 100, n)], 1)
    stairs = AttnMask.from_slices(np.stack([ends, np.minimum(ends + 127, n)], 1), steps, ["full"] * len(ends), n, n)
    assert stairs.T.T == stairs
    assert time.perf_counter() - begin < 10
