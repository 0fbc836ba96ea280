"""Masks in other forms, and back: matrices, slices, rows of intervals, FlexAttention's mask_mod and BlockMask."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

from torch_magi import masks
from torch_magi.masks import AttnMask, MaskType
from torch_magi.testing import (
    assert_close_to_truth,
    named_masks,
    random_inputs,
    random_masks,
    reference_attention,
)

NAMED = named_masks()
EMPTY_SHAPES = [(0, 0), (0, 5), (5, 0), (1, 0), (0, 1)]


def random_matrices(count: int, seed: int, max_size: int = 24) -> Iterator[torch.Tensor]:
    """Yield boolean matrices of all densities, and of sizes 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        low = 0 if i % 4 == 0 else 1
        sq, sk = torch.randint(low, max_size, (2,), generator=generator).tolist()
        share = [0.05, 0.5, 0.95, 1.0, 0.0][i % 5]
        print(f"matrix {i}: {sq} x {sk}, {share} of the pairs")
        yield torch.rand(sq, sk, generator=generator) < share


def some_masks(seed: int, count: int = 60) -> Iterator[AttnMask]:
    yield from NAMED.values()
    yield from random_masks(count, seed)
    yield from (AttnMask.from_dense(matrix) for matrix in random_matrices(count // 2, seed))
    yield from (masks.full(*shape) for shape in EMPTY_SHAPES)


# --- matrices ---


def test_matrix_and_back(seed: int) -> None:
    for matrix in random_matrices(300, seed):
        mask = AttnMask.from_dense(matrix)
        assert mask.shape == tuple(matrix.shape) and mask.area == int(matrix.sum())
        assert torch.equal(mask.to_dense(), matrix)
        assert AttnMask.from_dense(mask.to_dense()) == mask


def test_mask_to_matrix_and_back(seed: int) -> None:
    for mask in some_masks(seed):
        matrix = mask.to_dense()
        assert matrix.dtype == torch.bool and matrix.device.type == "cpu" and tuple(matrix.shape) == mask.shape
        assert AttnMask.from_dense(matrix) == mask


def test_matrices_of_any_kind() -> None:
    expected = masks.prefix_lm(5, 7, 3)
    matrix = expected.to_dense()
    wide = torch.zeros(10, 14, dtype=torch.bool)
    wide[::2, ::2] = matrix
    for given in (
        matrix,
        matrix.tolist(),
        matrix.numpy(),
        np.asfortranarray(matrix.numpy()),
        matrix.T.contiguous().T,
        wide[::2, ::2],
        wide.numpy()[::2, ::2],
        torch.nn.Parameter(matrix, requires_grad=False),
    ):
        assert AttnMask.from_dense(given) == expected


# --- rows and slices ---


def test_row_intervals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for mask in some_masks(seed):
        dense = mask.to_dense().numpy()
        a, b = np.sort(rng.integers(0, mask.shape[0] + 1, 2)).tolist()
        for (q0, q1), given in (((0, mask.shape[0]), ()), ((a, b), (a, b)), ((a, mask.shape[0]), (a,))):
            offsets, intervals = mask.row_intervals(*given)
            assert offsets.dtype == intervals.dtype == np.int64
            assert len(offsets) == q1 - q0 + 1 and offsets[0] == 0 and offsets[-1] == len(intervals)
            for row, (i, j) in enumerate(itertools.pairwise(offsets)):
                # Sorted, not empty and maximal: a gap between each and the next.
                flat = intervals[i:j].flatten()
                assert (np.diff(flat) > 0).all()
                seen = np.zeros(mask.shape[1], bool)
                for lo, hi in intervals[i:j]:
                    assert 0 <= lo < hi <= mask.shape[1]
                    seen[lo:hi] = True
                assert np.array_equal(seen, dense[q0 + row])


def test_slices_and_back(seed: int) -> None:
    for mask in some_masks(seed):
        q, k, types = mask.to_slices()
        assert q.dtype == k.dtype == types.dtype == np.int64
        assert q.shape == k.shape == (len(types), 2)
        assert AttnMask.from_slices(q, k, types, *mask.shape) == mask
        assert AttnMask.from_slices(q.tolist(), k.tolist(), [MaskType(t).name for t in types], *mask.shape) == mask


def test_slices_are_disjoint(seed: int) -> None:
    for mask in some_masks(seed):
        q, k, types = mask.to_slices()
        seen = np.zeros(mask.shape, int)
        for (q0, q1), (k0, k1), kind in zip(q, k, types, strict=True):
            assert 0 <= q0 < q1 <= mask.shape[0] and 0 <= k0 < k1 <= mask.shape[1], "an empty slice"
            for i, j in itertools.product(range(q1 - q0), range(k1 - k0)):
                seen[q0 + i, k0 + j] += MaskType(kind).visible(i, j, q1 - q0, k1 - k0)
        assert np.array_equal(seen, mask.to_dense().int().numpy())
        assert sum(MaskType(t).area(b - a, d - c) for (a, b), (c, d), t in zip(q, k, types, strict=True)) == mask.area


def test_the_four_types_stay_what_they_are() -> None:
    for kind in MaskType:
        mask = AttnMask.from_slices([[2, 6]], [[3, 10]], [kind], 8, 12)
        q, k, types = mask.to_slices()
        assert len(types) == 1 and MaskType(types[0]) is kind
        assert q.tolist() == [[2, 6]] and k.tolist() == [[3, 10]]


# --- mask_mod ---


def test_mask_mod(seed: int) -> None:
    for mask in some_masks(seed):
        mask_mod = mask.to_mask_mod()
        q, k = (torch.arange(n) for n in mask.shape)
        zero = torch.zeros((), dtype=torch.long)
        seen = mask_mod(zero, zero, q[:, None], k[None, :])
        assert seen.dtype == torch.bool
        assert torch.equal(seen.expand(mask.shape), mask.to_dense())
        # As FlexAttention's own code calls it, under vmap, with batches and heads.
        if mask.area:
            made = create_mask(mask_mod, 2, 3, *mask.shape, device="cpu")
            assert torch.equal(made, mask.to_dense().expand(2, 3, *mask.shape))


def test_mask_mods_combine() -> None:
    a, b = masks.causal(16), masks.document([0, 4, 7, 16], causal=False)
    for made, expected in (
        (and_masks(a.to_mask_mod(), b.to_mask_mod()), a & b),
        (or_masks(a.to_mask_mod(), b.to_mask_mod()), a | b),
    ):
        assert torch.equal(create_mask(made, 1, 1, 16, 16, device="cpu")[0, 0], expected.to_dense())


def test_a_mask_mod_keeps_no_matrix() -> None:
    """Its tables hold one interval a row here, whatever the number of keys."""
    total = 1 << 20
    mask_mod = masks.document([0, 1000, total]).to_mask_mod()
    rows = torch.tensor([0, 999, 1000, total - 1])
    keys = torch.tensor([0, 999, 1000, total - 1])
    seen = mask_mod(None, None, rows[:, None], keys[None, :])
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


# --- BlockMask ---


def blocks_of(count: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    """Return the listed blocks of every row of blocks, sorted."""
    assert count.dtype == indices.dtype == torch.int32 and count.shape[:2] == indices.shape[:2] == (1, 1)
    return [sorted(row[:n].tolist()) for n, row in zip(count[0, 0].tolist(), indices[0, 0], strict=True)]


def check_block_mask(mask: AttnMask, q_block: int, k_block: int) -> BlockMask:
    """Compare the block tables with the dense matrix, and the pairs that mask_mod adds to them."""
    made = mask.to_block_mask(q_block if q_block == k_block else (q_block, k_block))
    sq, sk = mask.shape
    assert isinstance(made, BlockMask)
    assert made.BLOCK_SIZE == (q_block, k_block) and made.seq_lengths == (sq, sk)
    n_q, n_k = -(-sq // q_block), -(-sk // k_block)
    partial = blocks_of(made.kv_num_blocks, made.kv_indices)
    full = blocks_of(made.full_kv_num_blocks, made.full_kv_indices)
    assert len(partial) == len(full) == n_q
    dense = mask.to_dense()
    for i, j in itertools.product(range(n_q), range(n_k)):
        block = dense[i * q_block : (i + 1) * q_block, j * k_block : (j + 1) * k_block]
        whole = bool(block.all()) and block.shape == (q_block, k_block)  # a cut block is never full
        assert (j in full[i]) == whole and (j in partial[i]) == (bool(block.any()) and not whole), (i, j)
    # The same tables by key, for the backward.
    by_key = [[[i for i in range(n_q) if j in blocks[i]] for j in range(n_k)] for blocks in (partial, full)]
    assert blocks_of(made.q_num_blocks, made.q_indices) == by_key[0]
    assert blocks_of(made.full_q_num_blocks, made.full_q_indices) == by_key[1]
    return made


def test_block_masks_against_the_matrix(seed: int) -> None:
    for mask in some_masks(seed, 40):
        for q_block, k_block in ((1, 1), (4, 4), (3, 5), (16, 2), (128, 128)):
            check_block_mask(mask, q_block, k_block)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (16, 16)])
def test_block_masks_are_those_of_create_block_mask(sizes: tuple[int, int], seed: int) -> None:
    for mask in (*NAMED.values(), *random_masks(20, seed)):
        if not all(mask.shape):
            continue
        dense = mask.to_dense()
        made = mask.to_block_mask(sizes)
        theirs = create_block_mask(
            lambda b, h, q, k, dense=dense: dense[q, k], None, None, *mask.shape, device="cpu", BLOCK_SIZE=sizes
        )
        assert torch.equal(made.to_dense(), theirs.to_dense())
        assert made.shape == theirs.shape and made.sparsity() == pytest.approx(theirs.sparsity())
        for side in ("kv", "q"):
            for full in ("", "full_"):
                for name in (f"{full}{side}_num_blocks", f"{full}{side}_indices"):
                    a, b = getattr(made, name), getattr(theirs, name)
                    assert a.dtype == b.dtype and torch.equal(a, b), name  # also in the order
        # From our mask_mod their code makes the same blocks.
        again = create_block_mask(mask.to_mask_mod(), None, None, *mask.shape, device="cpu", BLOCK_SIZE=sizes)
        assert torch.equal(again.to_dense(), theirs.to_dense())
        assert torch.equal(again.full_kv_num_blocks, theirs.full_kv_num_blocks)


def test_default_block_size() -> None:
    made = masks.causal(384).to_block_mask()
    assert made.BLOCK_SIZE == (128, 128) and made.to_dense()[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert made.full_kv_num_blocks is not None and made.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["causal", "document_window", "prefix_lm", "sliding_block", "varlen_full"])
def test_flex_attention_with_our_block_mask(name: str, seed: int) -> None:
    mask = NAMED[name]
    x = random_inputs(mask, 2, 2, dtype=torch.float64, seed=seed)
    q, k, v = (t.transpose(0, 1)[None] for t in x[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        out = flex_attention(q, k, v, block_mask=mask.to_block_mask(4))
    truth, _, _ = reference_attention(*x[:3], mask)
    assert isinstance(out, torch.Tensor)
    assert_close_to_truth(out[0].transpose(0, 1), truth, None)


def test_a_block_mask_of_many_tokens_makes_no_matrix() -> None:
    made = masks.document(np.arange(0, (1 << 17) + 1, 1 << 12)).to_block_mask(1024)
    assert made.kv_num_blocks[0, 0].tolist() == [1] * 128
    assert made.full_kv_num_blocks is not None and made.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 3] * 32


def test_the_check_of_blocks_notices_a_lost_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    real = AttnMask.to_block_mask
    monkeypatch.setattr(
        AttnMask, "to_block_mask", lambda self, size: real(self - masks.causal(16).clip((0, 16), (0, 16)), size)
    )
    with pytest.raises(AssertionError):
        check_block_mask(masks.full(16, 16), 4, 4)


def test_compiled_flex_attention_takes_block_masks() -> None:
    mask = masks.document([0, 100, 256]) | masks.prefix_lm(256, 256, 10)
    q, k, v = torch.randn(3, 1, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    out = compiled(q, k, v, block_mask=mask.to_block_mask())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense())
    torch.testing.assert_close(out, expected)
