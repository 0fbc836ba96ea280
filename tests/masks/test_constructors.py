"""Every constructor against its formula, written out pair by pair; and every input that one refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from torch_magi import masks
from torch_magi.masks import AttnMask, MaskType

Dense = np.ndarray[Any, np.dtype[np.bool_]]

SIZES = [0, 1, 2, 3, 5, 8]
# Documents: none, an empty one, one token, several, empty ones at the head, in the middle and at the tail.
CU_SEQLENS = [[0], [0, 0], [0, 1], [0, 5], [0, 1, 2, 3], [0, 4, 7, 16], [0, 0, 3, 3, 8], [0, 5, 9, 9, 9, 9]]
TAILS = [None, 0, 1, 4]
WINDOWS = [None, (None, None), (-1, -1), (-1, 0), (None, 2), (0, 0), (2, None), (2, 1), (0, 3), (3, -1), (100, 100)]


def where(sq: int, sk: int, visible: Callable[[int, int], bool]) -> Dense:
    """Return the matrix of a predicate, one pair at a time."""
    return np.array([[bool(visible(q, k)) for k in range(sk)] for q in range(sq)], bool).reshape(sq, sk)


def in_window(distance: int, window: Any) -> bool:
    """Return whether a key is in the window, for `distance` = k - (the key on the row's diagonal)."""
    left, right = (None, None) if window is None else window
    below = left in (None, -1) or distance >= -left
    return below and (right in (None, -1) or distance <= right)


def document_of(cu: list[int], token: int) -> int | None:
    found = [i for i, (a, b) in enumerate(itertools.pairwise(cu)) if a <= token < b]
    assert len(found) <= 1
    return found[0] if found else None


def same_document(cu: list[int], q: int, k: int) -> bool:
    return document_of(cu, q) is not None and document_of(cu, q) == document_of(cu, k)


def start_of(cu: list[int], token: int) -> int:
    document = document_of(cu, token)
    assert document is not None
    return cu[document]


def check(mask: AttnMask, expected: Dense) -> None:
    assert mask.shape == expected.shape
    dense = mask.to_dense()
    assert dense.dtype == torch.bool
    assert np.array_equal(dense.numpy(), expected), f"\n{mask.to_string()}\nshould be\n{expected.astype(int)}"
    assert mask.area == expected.sum()
    assert mask == AttnMask.from_dense(expected), "not in normal form"


@pytest.mark.parametrize("sq", SIZES)
@pytest.mark.parametrize("sk", SIZES)
def test_full_and_causal(sq: int, sk: int) -> None:
    check(masks.full(sq, sk), where(sq, sk, lambda q, k: True))
    check(masks.causal(sq, sk), where(sq, sk, lambda q, k: k <= q + sk - sq))
    if sq == sk:
        assert masks.causal(sq) == masks.causal(sq, sk)


@pytest.mark.parametrize("sq", SIZES)
@pytest.mark.parametrize("sk", SIZES)
def test_sliding_window(sq: int, sk: int) -> None:
    for window in WINDOWS:
        check(
            masks.sliding_window(sq, sk, window),
            where(sq, sk, lambda q, k, w=window: in_window(k - (q + sk - sq), w)),
        )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("cu", CU_SEQLENS, ids=str)
def test_document(cu: list[int], tail: int | None) -> None:
    total = None if tail is None else cu[-1] + tail
    n = cu[-1] + (tail or 0)
    for causal, window in itertools.product((True, False), WINDOWS):

        def visible(q: int, k: int, causal: bool = causal, window: Any = window) -> bool:
            return same_document(cu, q, k) and (k <= q or not causal) and in_window(k - q, window)

        check(masks.document(cu, causal, window, total), where(n, n, visible))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0], [0]),
        ([0, 0], [0, 3]),
        ([0, 3], [0, 0]),
        ([0, 3], [0, 5]),
        ([0, 5], [0, 3]),
        ([0, 0, 1, 1, 2], [0, 0, 3, 3, 8]),
        ([0, 4, 6, 6, 11], [0, 2, 9, 10, 10]),
    ],
    ids=str,
)
def test_varlen(cu_q: list[int], cu_k: list[int], tail: int | None) -> None:
    total_q = None if tail is None else cu_q[-1] + tail
    total_k = None if tail is None else cu_k[-1] + 2 * tail
    sq, sk = total_q or cu_q[-1], total_k or cu_k[-1]
    for causal, window in itertools.product((True, False), WINDOWS):

        def visible(q: int, k: int, causal: bool = causal, window: Any = window) -> bool:
            i = document_of(cu_q, q)
            if i is None or i != document_of(cu_k, k):
                return False
            distance = (k - cu_k[i + 1]) - (q - cu_q[i + 1])
            return (distance <= 0 or not causal) and in_window(distance, window)

        check(masks.varlen(cu_q, cu_k, causal, window, total_q, total_k), where(sq, sk, visible))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding_id", [None, 0, 7, -1])
def test_from_document_ids(padding_id: int | None, causal: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lists = [[], [0], [7], [0, 0], [1, 1, 0, 2, 1], [1, 2, 2, 1, 1, 3, 2, 3], [1, 1, 1, 0, 2, 2, 0, 0]]
    lists += [rng.integers(-1, high, rng.integers(0, 24)).tolist() for high in (1, 2, 4, 9) for _ in range(5)]
    for ids in lists:
        print("ids", ids)
        check(
            masks.from_document_ids(ids, causal, padding_id),
            where(
                len(ids),
                len(ids),
                lambda q, k, ids=ids: ids[q] == ids[k] and ids[q] != padding_id and (k <= q or not causal),
            ),
        )


@pytest.mark.parametrize("causal", [True, False])
def test_from_position_ids(causal: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lists = [[], [0], [5], [0, 0, 0], [0, 1, 2], [3, 4, 0, 1, 5, 6], [0, 1, 0, 1, 2]]
    for _ in range(20):
        starts = rng.integers(0, 3, rng.integers(0, 5))
        lists.append([int(s + i) for s in starts for i in range(rng.integers(1, 6))])
    for ids in lists:
        print("position_ids", ids)
        document = np.cumsum([0, *(b != a + 1 for a, b in itertools.pairwise(ids))])
        check(
            masks.from_position_ids(ids, causal),
            where(len(ids), len(ids), lambda q, k, d=document: d[q] == d[k] and (k <= q or not causal)),
        )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("cu", CU_SEQLENS, ids=str)
def test_block_causal_and_sliding_block(cu: list[int], tail: int | None) -> None:
    total = None if tail is None else cu[-1] + tail
    n = cu[-1] + (tail or 0)
    for size, window in itertools.product((1, 2, 3, 5, 100), (None, 0, 1, 2, 50)):

        def visible(q: int, k: int, size: int = size, window: int | None = window) -> bool:
            if not same_document(cu, q, k):
                return False
            start = start_of(cu, q)
            behind = (q - start) // size - (k - start) // size
            return behind >= 0 and (window is None or behind <= window)

        if window is None:
            mask = masks.block_causal(cu, size, total)
        else:
            mask = masks.sliding_block(cu, size, window, total)
        check(mask, where(n, n, visible))


@pytest.mark.parametrize("sq", SIZES)
@pytest.mark.parametrize("sk", SIZES)
def test_chunk_causal(sq: int, sk: int) -> None:
    for size in (1, 2, 3, 4, 9):
        check(masks.chunk_causal(sq, sk, size), where(sq, sk, lambda q, k, n=size: k < n * (q // n + 1)))


@pytest.mark.parametrize("sq", SIZES)
@pytest.mark.parametrize("sk", SIZES)
def test_prefix_lm(sq: int, sk: int) -> None:
    for prefix in range(sk + 1):
        check(masks.prefix_lm(sq, sk, prefix), where(sq, sk, lambda q, k, p=prefix: k < p or k <= q + sk - sq))


@pytest.mark.parametrize("prefix_causal", [True, False])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("cu", CU_SEQLENS, ids=str)
def test_shared_prefix(cu: list[int], tail: int | None, prefix_causal: bool) -> None:
    total = None if tail is None else cu[-1] + tail
    for prefix in (0, 1, 4):
        n = prefix + cu[-1] + (tail or 0)

        def visible(q: int, k: int, prefix: int = prefix) -> bool:
            if q < prefix:
                return k < prefix and (k <= q or not prefix_causal)
            if document_of(cu, q - prefix) is None:
                return False
            return k < prefix or (same_document(cu, q - prefix, k - prefix) and k <= q)

        check(masks.shared_prefix(prefix, cu, prefix_causal, total), where(n, n, visible))


@pytest.mark.parametrize(
    "spans", [[], [[0, 0]], [[0, 12]], [[3, 4]], [[2, 5], [8, 11]], [[1, 6], [4, 9], [4, 4]]], ids=str
)
def test_bidirectional_spans(spans: list[list[int]]) -> None:
    for base in (masks.causal(12), masks.document([0, 5, 10], total=12), masks.full(12, 12)):
        dense = base.to_dense().numpy()
        check(
            masks.bidirectional_spans(base, spans),
            where(
                12,
                12,
                lambda q, k, dense=dense: dense[q, k] or any(a <= q < b and a <= k < b for a, b in spans),
            ),
        )
    assert masks.bidirectional_spans(masks.full(0, 0), []) == masks.full(0, 0)


@pytest.mark.parametrize(
    ("sq", "sk", "q_block", "k_block"),
    [(0, 0, 1, 1), (1, 1, 1, 1), (1, 1, 5, 5), (6, 6, 2, 3), (7, 5, 2, 3), (5, 11, 3, 4), (9, 0, 2, 2), (0, 9, 2, 2)],
)
def test_from_block_matrix(sq: int, sk: int, q_block: int, k_block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for share in (0.0, 0.3, 0.7, 1.0):
        blocks = rng.random((math.ceil(sq / q_block), math.ceil(sk / k_block))) < share
        expected = where(sq, sk, lambda q, k, blocks=blocks: blocks[q // q_block, k // k_block])
        for given in (blocks, torch.from_numpy(blocks)):
            check(masks.from_block_matrix(given, q_block, k_block, sq, sk), expected)


@pytest.mark.parametrize("kind", list(MaskType))
def test_from_slices_is_the_definition_of_the_types(kind: MaskType) -> None:
    """Contract, section 1: local row i and column j of one slice, anywhere in a larger mask."""
    rule = {
        MaskType.FULL: lambda i, j, sq, sk: True,
        MaskType.CAUSAL: lambda i, j, sq, sk: j <= i + (sk - sq),
        MaskType.INV_CAUSAL: lambda i, j, sq, sk: j >= i,
        MaskType.BI_CAUSAL: lambda i, j, sq, sk: i <= j <= i + (sk - sq),
    }[kind]
    for sq, sk, q0, k0 in itertools.product((0, 1, 2, 5), (0, 1, 3, 5, 7), (0, 2), (0, 3)):
        mask = AttnMask.from_slices([[q0, q0 + sq]], [[k0, k0 + sk]], [kind], q0 + sq + 1, k0 + sk + 2)
        check(
            mask,
            where(
                *mask.shape,
                lambda q, k, sq=sq, sk=sk, q0=q0, k0=k0: (
                    q0 <= q < q0 + sq and k0 <= k < k0 + sk and rule(q - q0, k - k0, sq, sk)
                ),
            ),
        )
        assert mask.area == kind.area(sq, sk)


def test_from_slices_is_a_union(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        sq, sk, n = rng.integers(0, 20), rng.integers(0, 20), rng.integers(0, 6)
        q = np.sort(rng.integers(0, sq + 1, (n, 2)), 1)
        k = np.sort(rng.integers(0, sk + 1, (n, 2)), 1)
        kinds = [MaskType(int(t)) for t in rng.integers(0, 4, n)]
        print(f"from_slices({q.tolist()}, {k.tolist()}, {[t.name for t in kinds]}, {sq}, {sk})")

        def visible(row: int, key: int, q: Any = q, k: Any = k, kinds: Any = kinds) -> bool:
            return any(
                q0 <= row < q1 and k0 <= key < k1 and kind.visible(row - q0, key - k0, q1 - q0, k1 - k0)
                for (q0, q1), (k0, k1), kind in zip(q, k, kinds, strict=True)
            )

        check(AttnMask.from_slices(q, k, kinds, int(sq), int(sk)), where(sq, sk, visible))


def test_integers_of_any_kind_make_the_same_mask() -> None:
    cu, ids = [0, 3, 3, 8], [1, 1, 0, 2, 1]
    for convert in (
        list,
        tuple,
        np.array,
        lambda x: np.array(x, np.int32),
        lambda x: np.array(x, np.uint8),
        lambda x: [np.int64(i) for i in x],
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: torch.tensor([[i, -1] for i in x])[:, 0],  # not contiguous
    ):
        assert masks.document(convert(cu)) == masks.document(cu)
        assert masks.varlen(convert(cu), convert(cu)) == masks.varlen(cu, cu)
        assert masks.from_document_ids(convert(ids), padding_id=0) == masks.from_document_ids(ids, padding_id=0)
        assert masks.from_position_ids(convert(ids)) == masks.from_position_ids(ids)
    assert masks.causal(np.int64(3), np.int32(5)) == masks.causal(3, 5)
    assert masks.full(torch.tensor(3), 5) == masks.full(3, 5)
    q, k = [[0, 2], [1, 4]], [[0, 3], [2, 5]]
    expected = AttnMask.from_slices(q, k, ["causal", "full"], 4, 5)
    for types in (
        ["CAUSAL", "Full"],
        [1, 0],
        [MaskType.CAUSAL, MaskType.FULL],
        np.array([1, 0], np.int8),
        torch.tensor([1, 0], dtype=torch.int32),
    ):
        assert AttnMask.from_slices(torch.tensor(q), np.array(k), types, 4, 5) == expected


# --- cases ---


def test_c14_repeated_tail_of_cu_seqlens() -> None:
    for causal, window in itertools.product((True, False), WINDOWS):
        short = masks.document([0, 5, 9], causal, window)
        assert masks.document([0, 5, 9, 9, 9, 9], causal, window) == short
        assert masks.document(torch.tensor([0, 5, 9, 9, 9, 9], dtype=torch.int32), causal, window) == short
        assert masks.varlen([0, 5, 9, 9], [0, 5, 9, 9], causal, window) == short
    assert masks.block_causal([0, 5, 9, 9], 2) == masks.block_causal([0, 5, 9], 2)
    assert masks.sliding_block([0, 5, 9, 9], 2, 1) == masks.sliding_block([0, 5, 9], 2, 1)
    assert masks.shared_prefix(3, [0, 5, 9, 9]) == masks.shared_prefix(3, [0, 5, 9])


def test_c18_alignment() -> None:
    lower_right = [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    upper_left = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert masks.causal(2, 5).to_dense().int().tolist() == lower_right
    assert masks.chunk_causal(2, 5, 1).to_dense().int().tolist() == upper_left
    for sq, sk in ((2, 5), (4, 4), (1, 3)):  # torch's own two helpers
        assert torch.equal(masks.causal(sq, sk).to_dense(), causal_lower_right(sq, sk)._materialize())
        assert torch.equal(masks.chunk_causal(sq, sk, 1).to_dense(), causal_upper_left(sq, sk)._materialize())
    assert "bottom right" in str(masks.causal.__doc__) and "top left" in str(masks.causal.__doc__)


@pytest.mark.parametrize("window", [None, (None, None), (-1, -1), (None, -1), (-1, None)])
def test_c20_window_sentinels_are_unbounded(window: Any) -> None:
    for sq, sk in ((5, 5), (3, 8), (8, 3)):
        assert masks.sliding_window(sq, sk, window) == masks.full(sq, sk)
    cu, cu_k = [0, 3, 3, 8], [0, 1, 4, 9]
    for causal in (True, False):
        assert masks.document(cu, causal, window) == masks.document(cu, causal)
        assert masks.varlen(cu, cu_k, causal, window) == masks.varlen(cu, cu_k, causal)


@pytest.mark.parametrize("window", [(-1, 0), (None, 0)])
def test_c20_window_that_is_causal(window: Any) -> None:
    for sq, sk in ((5, 5), (3, 8), (8, 3)):
        assert masks.sliding_window(sq, sk, window) == masks.causal(sq, sk)
    cu, cu_k = [0, 3, 3, 8], [0, 1, 4, 9]
    assert masks.document(cu, False, window) == masks.document(cu, True) == masks.document(cu, True, window)
    assert masks.varlen(cu, cu_k, False, window) == masks.varlen(cu, cu_k, True)


@pytest.mark.parametrize("convert", [np.array, torch.tensor, list])
@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (masks.document, [0, 4, 8], [0, 6, 8]),
        (lambda cu: masks.varlen(cu, cu), [0, 4, 8], [0, 6, 8]),
        (lambda cu: masks.block_causal(cu, 2), [0, 5, 8], [0, 6, 8]),
        (lambda cu: masks.sliding_block(cu, 2, 1), [0, 5, 8], [0, 6, 8]),
        (lambda cu: masks.shared_prefix(2, cu), [0, 4, 8], [0, 6, 8]),
        (masks.from_document_ids, [0, 0, 1], [0, 1, 1]),
        (masks.from_position_ids, [0, 1, 0], [0, 0, 0]),
        (lambda q: AttnMask.from_slices([q], [[0, 3]], ["full"], 8, 8), [1, 4], [1, 6]),
        (lambda types: AttnMask.from_slices([[0, 3]] * 2, [[0, 3]] * 2, types, 8, 8), [1, 1], [1, 0]),
    ],
)
def test_c26_later_changes_of_the_arguments_do_not_show(
    make: Callable[[Any], AttnMask], first: list[int], second: list[int], convert: Any
) -> None:
    given = convert(first)
    old = make(given)
    for i, value in enumerate(second):
        given[i] = value
    new = make(given)
    assert old == make(first) and new == make(second) and old != new


@pytest.mark.parametrize("convert", [lambda x: x, torch.from_numpy])
def test_c26_a_dense_mask_is_copied(convert: Any) -> None:
    dense = np.eye(4, dtype=bool)
    mask = AttnMask.from_dense(convert(dense))
    dense[:] = True
    assert np.array_equal(mask.to_dense().numpy(), np.eye(4, dtype=bool))


# --- refusals ---

CU = [0, 4, 8]
Refusal = tuple[str, type[Exception], str, Callable[[], Any]]


def cu_refusals(name: str, argument: str, make: Callable[[Any], Any]) -> list[Refusal]:
    """Return what every constructor refuses of its cu_seqlens."""
    return [
        (f"{name} floats", TypeError, rf"{argument} must hold integers, got float64", lambda: make([0, 4.0])),
        (f"{name} float tensor", TypeError, f"{argument} must hold integers, got float32",
         lambda: make(torch.tensor([0.0, 1.0]))),
        (f"{name} booleans", TypeError, f"{argument} must hold integers, got bool", lambda: make([False, True])),
        (f"{name} none", ValueError, rf"{argument} must have shape \[num_documents \+ 1\].*got shape \(0,\)",
         lambda: make([])),
        (f"{name} matrix", ValueError, rf"{argument} must have shape \[num_documents \+ 1\].*got shape \(1, 2\)",
         lambda: make([[0, 4]])),
        (f"{name} start", ValueError, f"{argument} must begin with 0, got 1", lambda: make([1, 4])),
        (f"{name} fall", ValueError, f"{argument} must not fall, got 4 before 3 at index 1", lambda: make([0, 4, 3])),
    ]  # fmt: skip


REFUSALS: list[Refusal] = [
    *cu_refusals("document", "cu_seqlens", masks.document),
    *cu_refusals("varlen q", "cu_seqlens_q", lambda cu: masks.varlen(cu, CU)),
    *cu_refusals("varlen k", "cu_seqlens_k", lambda cu: masks.varlen(CU, cu)),
    *cu_refusals("block_causal", "cu_seqlens", lambda cu: masks.block_causal(cu, 2)),
    *cu_refusals("sliding_block", "cu_seqlens", lambda cu: masks.sliding_block(cu, 2, 1)),
    *cu_refusals("shared_prefix", "cu_seqlens", lambda cu: masks.shared_prefix(2, cu)),
    *[
        (f"{name} total", ValueError, f"total must be at least the last value of {argument}, 8, got 7", make)
        for name, argument, make in (
            ("document", "cu_seqlens", lambda: masks.document(CU, total=7)),
            ("varlen q", "cu_seqlens_q", lambda: masks.varlen(CU, CU, total_q=7)),
            ("varlen k", "cu_seqlens_k", lambda: masks.varlen(CU, CU, total_k=7)),
            ("block_causal", "cu_seqlens", lambda: masks.block_causal(CU, 2, total=7)),
            ("sliding_block", "cu_seqlens", lambda: masks.sliding_block(CU, 2, 1, total=7)),
            ("shared_prefix", "cu_seqlens", lambda: masks.shared_prefix(3, CU, total=7)),
        )
    ],
    ("varlen documents", ValueError, "as many documents, got 2 and 1", lambda: masks.varlen(CU, [0, 4])),
    *[
        (f"{name} {value!r}", error, text, lambda make=make, value=value: make(value))
        for name, argument, make in (
            ("full sq", "sq", lambda n: masks.full(n, 3)),
            ("full sk", "sk", lambda n: masks.full(3, n)),
            ("causal sq", "sq", lambda n: masks.causal(n)),
            ("causal sk", "sk", lambda n: masks.causal(3, n)),
            ("sliding_window sq", "sq", lambda n: masks.sliding_window(n, 3, None)),
            ("sliding_window sk", "sk", lambda n: masks.sliding_window(3, n, None)),
            ("chunk_causal sq", "sq", lambda n: masks.chunk_causal(n, 3, 1)),
            ("chunk_causal sk", "sk", lambda n: masks.chunk_causal(3, n, 1)),
            ("prefix_lm sq", "sq", lambda n: masks.prefix_lm(n, 3, 1)),
            ("prefix_lm sk", "sk", lambda n: masks.prefix_lm(3, n, 1)),
            ("prefix_lm prefix", "prefix", lambda n: masks.prefix_lm(3, 3, n)),
            ("shared_prefix prefix", "prefix", lambda n: masks.shared_prefix(n, CU)),
            ("sliding_block window", "window", lambda n: masks.sliding_block(CU, 2, n)),
            ("from_block_matrix sq", "sq", lambda n: masks.from_block_matrix([[True]], 1, 1, n, 1)),
            ("from_block_matrix sk", "sk", lambda n: masks.from_block_matrix([[True]], 1, 1, 1, n)),
            ("from_slices sq", "sq", lambda n: AttnMask.from_slices([], [], [], n, 1)),
            ("from_slices sk", "sk", lambda n: AttnMask.from_slices([], [], [], 1, n)),
        )
        for value, error, text in (
            (-1, ValueError, f"{argument} must be 0 or more, got -1"),
            (2.0, TypeError, rf"{argument} must be an int, got 2\.0"),
            (True, TypeError, f"{argument} must be an int, got True"),
            ("3", TypeError, f"{argument} must be an int, got '3'"),
        )
    ],
    *[
        (f"{name} {value!r}", error, text, lambda make=make, value=value: make(value))
        for name, argument, make in (
            ("block_causal", "block_size", lambda n: masks.block_causal(CU, n)),
            ("sliding_block", "block_size", lambda n: masks.sliding_block(CU, n, 1)),
            ("chunk_causal", "chunk_size", lambda n: masks.chunk_causal(3, 3, n)),
            ("q_block", "q_block", lambda n: masks.from_block_matrix([[True]], n, 1, 1, 1)),
            ("k_block", "k_block", lambda n: masks.from_block_matrix([[True]], 1, n, 1, 1)),
        )
        for value, error, text in (
            (0, ValueError, f"{argument} must be positive, got 0"),
            (-1, ValueError, f"{argument} must be positive, got -1"),
            (1.0, TypeError, f"{argument} must be an int, got 1.0"),
        )
    ],
    *[
        (f"{name} window {window!r}", error, text, lambda make=make, window=window: make(window))
        for name, make in (
            ("sliding_window", lambda w: masks.sliding_window(3, 3, w)),
            ("document", lambda w: masks.document(CU, window_size=w)),
            ("varlen", lambda w: masks.varlen(CU, CU, window_size=w)),
        )
        for window, error, text in (
            (3, TypeError, r"window_size must be a pair \(left, right\) or None, got 3"),
            ((1, 2, 3), TypeError, r"window_size must be a pair \(left, right\) or None, got \(1, 2, 3\)"),
            ("ab", TypeError, r"window_size must be a pair \(left, right\) or None, got 'ab'"),
            ((1.5, 0), TypeError, r"window_size must hold integers or None, got \(1\.5, 0\)"),
            ((0, True), TypeError, r"window_size must hold integers or None, got \(0, True\)"),
            ((-2, 0), ValueError, r"window_size must hold numbers >= 0, or -1 or None for unbounded, got \(-2, 0\)"),
            ((0, -3), ValueError, r"window_size must hold numbers >= 0, or -1 or None for unbounded, got \(0, -3\)"),
        )
    ],
    ("ids matrix", ValueError, r"ids must have shape \[total\], got \(1, 2\)",
     lambda: masks.from_document_ids([[1, 2]])),
    ("ids floats", TypeError, "ids must hold integers, got float64", lambda: masks.from_document_ids([1.0])),
    ("positions matrix", ValueError, r"position_ids must have shape \[total\], got \(1, 2\)",
     lambda: masks.from_position_ids([[0, 1]])),
    ("positions floats", TypeError, "position_ids must hold integers, got float64",
     lambda: masks.from_position_ids([0.0])),
    ("prefix too long", ValueError, "prefix must be at most sk = 3, got 4", lambda: masks.prefix_lm(5, 3, 4)),
    ("spans not square", ValueError, r"needs a square mask, got shape \(3, 4\)",
     lambda: masks.bidirectional_spans(masks.full(3, 4), [])),
    ("spans floats", TypeError, "spans must hold integers, got float64",
     lambda: masks.bidirectional_spans(masks.full(3, 3), [[0.0, 1.0]])),
    ("blocks shape", ValueError, r"blocks must have shape \(2, 3\) for 4 x 5 tokens, got \(1, 1\)",
     lambda: masks.from_block_matrix([[True]], 2, 2, 4, 5)),
    ("blocks not boolean", TypeError, "must be boolean, got int64",
     lambda: masks.from_block_matrix([[1]], 2, 2, 2, 2)),
    # AttnMask
    ("no initialiser", TypeError, "AttnMask has no public initialiser; use a constructor", lambda: AttnMask()),
    ("slices shape", ValueError, r"q_ranges must have shape \[n, 2\], got \(2,\)",
     lambda: AttnMask.from_slices([0, 1], [[0, 1]], [0], 4, 4)),
    ("slices triples", ValueError, r"k_ranges must have shape \[n, 2\], got \(1, 3\)",
     lambda: AttnMask.from_slices([[0, 1]], [[0, 1, 2]], [0], 4, 4)),
    ("slices reversed", ValueError, r"q_ranges must not be reversed, got \[3, 1\] at index 1",
     lambda: AttnMask.from_slices([[0, 1], [3, 1]], [[0, 1], [0, 1]], [0, 0], 4, 4)),
    ("slices behind the end", ValueError, r"k_ranges must lie in \[0, 4\], got \[2, 5\] at index 0",
     lambda: AttnMask.from_slices([[0, 1]], [[2, 5]], [0], 4, 4)),
    ("slices negative", ValueError, r"q_ranges must lie in \[0, 4\], got \[-1, 2\] at index 0",
     lambda: AttnMask.from_slices([[-1, 2]], [[2, 4]], [0], 4, 4)),
    ("slices floats", TypeError, "q_ranges must hold integers, got float64",
     lambda: AttnMask.from_slices([[0.0, 1.0]], [[0, 1]], [0], 4, 4)),
    ("slices lengths", ValueError, "must have the same length, got 1, 2, 1",
     lambda: AttnMask.from_slices([[0, 1]], [[0, 1], [1, 2]], [0], 4, 4)),
    ("slices types", ValueError, "must have the same length, got 1, 1, 0",
     lambda: AttnMask.from_slices([[0, 1]], [[0, 1]], [], 4, 4)),
    ("type name", ValueError, "mask type must be one of .* got 'diagonal'",
     lambda: AttnMask.from_slices([[0, 1]], [[0, 1]], ["diagonal"], 4, 4)),
    ("type number", ValueError, "mask type must be one of .* got 4",
     lambda: AttnMask.from_slices([[0, 1]], [[0, 1]], [4], 4, 4)),
    ("type float", TypeError, "mask type must be a name or an integer, got 1.0",
     lambda: AttnMask.from_slices([[0, 1]], [[0, 1]], np.array([1.0]), 4, 4)),
    ("type boolean", TypeError, "mask type must be a name or an integer, got True",
     lambda: AttnMask.from_slices([[0, 1]], [[0, 1]], [True], 4, 4)),
    ("dense vector", ValueError, r"a dense mask must be a matrix \[sq, sk\], got shape \(3,\)",
     lambda: AttnMask.from_dense([True] * 3)),
    ("dense batch", ValueError, r"a dense mask must be a matrix \[sq, sk\], got shape \(1, 2, 2\)",
     lambda: AttnMask.from_dense(torch.ones(1, 2, 2, dtype=torch.bool))),
    ("dense floats", TypeError, r"a dense mask must be boolean, got float32; compare it \(mask != 0\) first",
     lambda: AttnMask.from_dense(torch.zeros(2, 2))),
    ("bands of another width", ValueError, r"bands must have shape \[n, 7\]",
     lambda: AttnMask.from_bands(np.zeros((1, 6), np.int64), 3, 3)),
    ("bands without steps", ValueError, "the step of a band must be positive, got 0",
     lambda: AttnMask.from_bands(np.zeros((1, 7), np.int64), 3, 3)),
    ("bands of a negative length", ValueError, r"sq and sk must be in \[0, 2\^31\), got 3 and -1",
     lambda: AttnMask.from_bands(np.zeros((0, 7), np.int64), 3, -1)),
    ("or of shapes", ValueError, r"the same shape to combine, got \(3, 3\) and \(3, 4\)",
     lambda: masks.full(3, 3) | masks.full(3, 4)),
    ("and of shapes", ValueError, r"the same shape to combine, got \(3, 3\) and \(4, 3\)",
     lambda: masks.full(3, 3) & masks.full(4, 3)),
    ("difference of shapes", ValueError, r"the same shape to combine, got \(3, 3\) and \(0, 0\)",
     lambda: masks.full(3, 3) - masks.full(0, 0)),
    ("or of a matrix", TypeError, "unsupported operand", lambda: masks.full(3, 3) | "mask"),
    ("and of a number", TypeError, "unsupported operand", lambda: masks.full(3, 3) & 1),
    ("difference of a list", TypeError, "unsupported operand", lambda: masks.full(3, 3) - []),
    ("clip outside", ValueError, r"q_range must lie in \[0, 3\], got \[1, 4\]",
     lambda: masks.full(3, 5).clip((1, 4), (0, 5))),
    ("clip negative", ValueError, r"k_range must lie in \[0, 5\], got \[-1, 2\]",
     lambda: masks.full(3, 5).clip((1, 3), (-1, 2))),
    ("clip reversed", ValueError, r"k_range must not be reversed, got \[3, 2\]",
     lambda: masks.full(3, 5).clip((1, 3), (3, 2))),
    ("clip floats", TypeError, "q_range must hold integers, got float64",
     lambda: masks.full(3, 5).clip((0.0, 1.0), (0, 2))),
    ("picture size", ValueError, "max_size must be positive, got 0", lambda: masks.full(3, 3).to_string(0)),
    ("block size", ValueError, "BLOCK_SIZE must be positive, got 0", lambda: masks.full(3, 3).to_block_mask(0)),
    ("block sizes", ValueError, "BLOCK_SIZE must be positive, got -1",
     lambda: masks.full(3, 3).to_block_mask((4, -1))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "call"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("total", [8.7, 9.0, "8"])
def test_totals_that_are_no_lengths(total: Any) -> None:
    for make in (
        lambda: masks.document(CU, total=total),
        lambda: masks.varlen(CU, CU, total_q=total),
        lambda: masks.varlen(CU, CU, total_k=total),
        lambda: masks.block_causal(CU, 2, total=total),
        lambda: masks.sliding_block(CU, 2, 1, total=total),
        lambda: masks.shared_prefix(2, CU, total=total),
    ):
        with pytest.raises(TypeError, match=r"total.* must be an int, got"):
            make()


def test_clip_of_no_range() -> None:
    with pytest.raises(ValueError, match="q_range"):
        masks.full(3, 3).clip((), (0, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("spans", [[[1, 4]], [[2, 1]], [[-1, 2]], [1, 2], [[0, 1, 2]]], ids=str)
def test_wrong_spans_are_called_spans(spans: Any) -> None:
    with pytest.raises(ValueError, match=r"^spans must"):
        masks.bidirectional_spans(masks.full(3, 3), spans)


@pytest.mark.parametrize("size", [2.0, "ab", (1, 2, 3), (2.0, 2), True], ids=str)
def test_block_sizes_that_are_none(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="BLOCK_SIZE must"):
        masks.full(4, 4).to_block_mask(size)
