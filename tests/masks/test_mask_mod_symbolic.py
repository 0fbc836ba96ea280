"""Mask functions run on symbols: their pairs are exact, and what is beyond the rules has no result."""

from __future__ import annotations

import functools
import importlib.util
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import or_masks

from torch_magi import masks
from torch_magi.masks import index_rules, pair_sets
from torch_magi.masks.mask import AttnMask
from torch_magi.masks.mask_mod_symbolic import trace_mask_mod

spec = importlib.util.spec_from_file_location("mask_functions", Path(__file__).with_name("mask_functions.py"))
assert spec is not None and spec.loader is not None
mask_functions: Any = importlib.util.module_from_spec(spec)
sys.modules["mask_functions"] = mask_functions  # dataclasses look their module up
spec.loader.exec_module(mask_functions)

FUNCTIONS = mask_functions.FUNCTIONS
# At the long lengths these need more pieces than are worth holding, or are no function of sums and runs.
BEYOND = {"checkerboard", "disc", "shifted_windows", "products", "scrambled"}
BATCHES_AND_HEADS = ((0, 0), (1, 1))


def seen(mask: AttnMask, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Whether a mask shows the pairs (q[i], k[i])."""
    found = np.zeros(len(q), bool)
    for q0, q1, k0, k1, dlo, dhi, step in mask.bands.tolist():
        rows = np.arange(*np.searchsorted(q, [q0, q1]))  # q is sorted
        at = k[rows] - (q[rows] if step == 1 else q0 + (q[rows] - q0) // step * step)
        found[rows] |= (k[rows] >= k0) & (k[rows] < k1) & (at >= dlo) & (at < dhi)
    return found


def test_there_are_sixty() -> None:
    assert len(FUNCTIONS) == 60
    assert len(FUNCTIONS) - len(BEYOND) >= 45


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pair_by_pair(name: str) -> None:
    function = FUNCTIONS[name]
    taken = 0
    for sq, sk in function.small:
        mask_mod = function.build(sq, sk)
        for b, h in BATCHES_AND_HEADS:
            mask = trace_mask_mod(mask_mod, sq, sk, b, h)
            if mask is not None:
                taken += 1
                assert torch.equal(mask.to_dense(), mask_functions.dense(mask_mod, sq, sk, b, h)), (sq, sk, b, h)
    if name not in BEYOND:
        assert taken == len(function.small) * len(BATCHES_AND_HEADS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_million_tokens(name: str, seed: int) -> None:
    """100,000 random pairs, half of them near the diagonal and a quarter on either side of a band's edge."""
    function = FUNCTIONS[name]
    sq, sk = function.large
    mask_mod = function.build(sq, sk)
    mask = trace_mask_mod(mask_mod, sq, sk, 0, 0)
    assert (mask is None) == (name in BEYOND)
    if mask is None:
        return
    rng = np.random.default_rng(seed)
    q = np.sort(rng.integers(0, sq, 100_000))
    k = rng.integers(0, sk, len(q))
    k[::2] = np.clip(q[::2] * sk // sq + rng.integers(-300, 300, len(q[::2])), 0, sk - 1)
    if len(mask.bands):
        edges = mask.bands[rng.integers(0, len(mask.bands), len(q[1::4]))]
        q[1::4] = rng.integers(edges[:, 0], edges[:, 1])
        k[1::4] = np.clip(edges[:, 2 + rng.integers(0, 2)] + rng.integers(-2, 2, len(edges)), 0, sk - 1)
        order = np.argsort(q, kind="stable")
        q, k = q[order], k[order]
    expected = mask_functions.visible(mask_mod, torch.from_numpy(q), torch.from_numpy(k))
    assert np.array_equal(seen(mask, q, k), expected.numpy())


# --- random functions ---


def column(rng: random.Random, n: int) -> Tensor:
    """A captured tensor: in runs or sorted, of one of several dtypes."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    values = np.repeat(numbers.integers(-3, 6, n), 5)[:n] if rng.random() < 0.5 else np.sort(numbers.integers(0, 40, n))
    return torch.from_numpy(values).to(rng.choice([torch.int64, torch.int32, torch.int8, torch.float32]))


def integer(rng: random.Random, n: int, depth: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A random number, as a function of q and k."""
    if depth == 0 or rng.random() < 0.3:
        table, d = column(rng, n), rng.randrange(1, 9)
        of_q = [lambda q, k: q, lambda q, k: table[q], lambda q, k: q // d]
        return rng.choice([*of_q, lambda q, k: k, lambda q, k: table[k], lambda q, k: k % d])
    a, b, p = integer(rng, n, depth - 1), integer(rng, n, depth - 1), boolean(rng, n, depth - 1)
    c, d = rng.randrange(-6, 7), rng.randrange(1, 7)
    return rng.choice(
        [
            lambda q, k: a(q, k) + b(q, k),
            lambda q, k: a(q, k) - b(q, k),
            lambda q, k: c - a(q, k),
            lambda q, k: a(q, k) * c,
            lambda q, k: (a(q, k) + c).abs(),
            lambda q, k: a(q, k) // d,
            lambda q, k: a(q, k) % d,
            lambda q, k: a(q, k) / d,
            lambda q, k: a(q, k).clamp(min=c, max=c + 5),
            lambda q, k: torch.where(p(q, k), a(q, k), b(q, k)),
            lambda q, k: torch.minimum(a(q, k), b(q, k)),
            lambda q, k: torch.maximum(a(q, k), b(q, k)),
            lambda q, k: p(q, k).int() + a(q, k),
            lambda q, k: p(q, k) * a(q, k),
            lambda q, k: a(q, k).long() ^ c,
            lambda q, k: a(q, k).float(),
        ]
    )


def boolean(rng: random.Random, n: int, depth: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A random condition on q and k."""
    if depth == 0 or rng.random() < 0.5:
        a, b = integer(rng, n, depth), integer(rng, n, depth)
        c = rng.choice([rng.randrange(-8, 20), rng.random() * 9])
        compare = rng.choice([torch.ge, torch.gt, torch.le, torch.lt, torch.eq, torch.ne])
        return rng.choice([lambda q, k: compare(a(q, k), b(q, k)), lambda q, k: compare(a(q, k), c)])
    a, b, p = (boolean(rng, n, depth - 1) for _ in range(3))
    return rng.choice(
        [
            lambda q, k: a(q, k) & b(q, k),
            lambda q, k: a(q, k) | b(q, k),
            lambda q, k: a(q, k) ^ b(q, k),
            lambda q, k: a(q, k) == b(q, k),
            lambda q, k: ~a(q, k),
            lambda q, k: torch.logical_and(a(q, k), b(q, k)),
            lambda q, k: torch.where(p(q, k), a(q, k), b(q, k)),
        ]
    )


@pytest.mark.parametrize("by_search", [False, True])
def test_random_functions(by_search: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_search:  # the rules that only long sequences need
        monkeypatch.setattr(pair_sets, "MOST_JOINED", 0)
        monkeypatch.setattr(index_rules, "FEW_CELLS", 0)
    taken = 0
    for i in range(250):
        rng = random.Random(seed * 1000 + i)
        sq, sk = rng.choice([(1, 1), (1, 30), (37, 41), (64, 64), (90, 33)])
        function = boolean(rng, 90, 3)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, function: Any = function) -> Tensor:
            return function(q, k)

        mask = trace_mask_mod(mask_mod, sq, sk, 0, 0)
        if mask is not None:
            taken += 1
            assert torch.equal(mask.to_dense(), mask_functions.dense(mask_mod, sq, sk)), f"function {i}"
    assert taken > 125


# --- corners ---

SMALL = torch.tensor([250, 3, 255, 0, 7, 250, 9, 1], dtype=torch.uint8)
HALVES = torch.tensor([0.5, 1.5, 1.5, float("nan"), -0.0, 0.0, 9.5, 1e30])
HUGE = torch.tensor([-(2**63), 2**63 - 1, 0, 5, 2**62, -5, 1, 1])
POINTS = torch.tensor([2, 5])
LAYOUT = torch.tensor([[1, 0], [2, 1]])


class Weighted(torch.nn.Module):
    """A condition with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(8.0))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.weight[q] >= self.weight[k] + 1


PAIRS = torch.tensor([[0, 3], [0, 3], [0, 8], [4, 8], [4, 8], [4, 8], [7, 8], [7, 8]])


@pytest.mark.parametrize(
    "condition",
    [
        lambda q, k: SMALL[q] - SMALL[k] > 2,  # wraps at 256
        lambda q, k: SMALL[q] >= SMALL[k],
        lambda q, k: HALVES[q] >= HALVES[k],  # NaN
        lambda q, k: HALVES[q % 3] == HALVES[k % 3],
        lambda q, k: HALVES[4 + q % 2] == HALVES[4 + k % 2],  # 0.0 and -0.0
        lambda q, k: HUGE[q] <= HUGE[k],
        lambda q, k: HUGE[q] - HUGE[k] <= 0,  # overflows
        lambda q, k: HUGE[q].int() == HUGE[k].int(),
        lambda q, k: HALVES.bfloat16()[q] + HALVES[k] > 2,
        lambda q, k: 1 / HALVES[q // 2 * 2] == 1 / HALVES[k],  # inf and -inf
        lambda q, k: POINTS[torch.where((q < 2) & (k < 5), q, 0)] == 2,  # POINTS[q] alone is out of range
        lambda q, k: q - k <= 2.5,
        lambda q, k: (q - k) / 3 < 1.1,
        lambda q, k: q / 3 >= k / 2,
        lambda q, k: q.float() >= k,
        lambda q, k: (q - k).float().round() > 1,
        lambda q, k: (q == POINTS).any() | (k == POINTS).any(),
        lambda q, k: torch.isin(q, POINTS) | (q == k),
        lambda q, k: (k >= PAIRS[q, 0]) & (k < PAIRS[q][1]),
        lambda q, k: (k >= PAIRS[q][0]) & (k < PAIRS[q][..., 1]),
        lambda q, k: q[None, None].squeeze() >= k.clone(),
        lambda q, k: torch.full_like(q, 3) >= k + torch.zeros_like(k),
        lambda q, k: q >= k if q.dtype == k.dtype == torch.int64 and q.ndim == 0 and q.shape == () else q < k,
        lambda q, k: (q >= k) & torch.tensor(True),
        lambda q, k: (q >= k).to(torch.int32).bool(),
        lambda q, k: (q >= k).int() + (q - k < 4) == 2,
        lambda q, k: ((q >= k) * 3 + (k == 0)) > 2,
        lambda q, k: (q - k).long().abs() <= 2,
        lambda q, k: 2**70 > q - k,
        lambda q, k: (q >= k) != (k < 3),
        lambda q, k: (1 << (k - k + 2)) > q - k,
        Weighted(),
        lambda q, k: torch.isin(q, q // 2) | (k < 3),
        lambda q, k: torch.isin(torch.arange(8), q).any() & (k < 3),
        lambda q, k: torch.isin(torch.arange(8), q)[3] & (k < 3),
        lambda q, k: PAIRS.T[torch.tensor([0, 1]), q][1] > k,
        lambda q, k: torch.eye(8)[torch.arange(8), q].sum() > k,
        lambda q, k: torch.bucketize(q, POINTS) >= torch.bucketize(k, POINTS, right=True),
        lambda q, k: q - k < np.int64(3),
        lambda q, k: LAYOUT[q // 4, k // 4].bool() & (LAYOUT[q // 4, k // 4] + q // 2 > 2),
        lambda q, k: torch.where(q >= k, LAYOUT[q // 4, k // 4], 0) == 1,
    ],
)
def test_corners(condition: Callable[[Tensor, Tensor], Tensor]) -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return condition(q, k)

    try:
        expected = mask_functions.dense(mask_mod, 8, 8)
    except (RuntimeError, OverflowError) as error:  # torch refuses it
        with pytest.raises(type(error)):
            trace_mask_mod(mask_mod, 8, 8, 0, 0)
        return
    mask = trace_mask_mod(mask_mod, 8, 8, 0, 0)
    assert mask is None or torch.equal(mask.to_dense(), expected)


def test_changes_in_place_are_those_of_a_tensor() -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        same = distance.long()  # the same tensor, as its dtype is that
        distance += 3
        found = same >= 3
        also = found.bool()
        also &= k > 1
        return found

    mask = trace_mask_mod(mask_mod, 16, 16, 0, 0)
    assert mask is not None and torch.equal(mask.to_dense(), mask_functions.dense(mask_mod, 16, 16))


@pytest.mark.parametrize(
    "condition",
    [
        lambda q, k: bool(q >= k),
        lambda q, k: torch.tensor(q.item() > 3),
        lambda q, k: torch.tensor([q, k]).sum() > 3,
        lambda q, k: torch.tensor(True) if q > k else torch.tensor(False),
        lambda q, k: torch.tensor([True, False])[int(q) % 2],
        lambda q, k: q - k,
        lambda q, k: (torch.rand(()) < 0.5) & (torch.rand_like(q.float()) < 0.5) & (q >= k),
        lambda q, k: (q * k) % 7 == 3,
    ],
)
def test_beyond_the_rules(condition: Callable[[Tensor, Tensor], Any]) -> None:
    assert trace_mask_mod(lambda b, h, q, k: condition(q, k), 100, 100, 0, 0) is None


def test_a_swallowed_refusal_is_one() -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            return torch.tensor(bool(q >= k))
        except Exception:
            return q >= 0

    assert trace_mask_mod(mask_mod, 8, 8, 0, 0) is None


def test_errors_of_the_function_are_raised() -> None:
    def wrong(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        trace_mask_mod(wrong, 8, 8, 0, 0)
    ids = torch.arange(5)
    with pytest.raises(IndexError):
        trace_mask_mod(lambda b, h, q, k: ids[q] == ids[k], 8, 8, 0, 0)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_no_tokens(shape: tuple[int, int]) -> None:
    assert trace_mask_mod(mask_functions.causal_mod, *shape, 0, 0) == masks.full(*shape)


def test_constructors_give_the_same_masks() -> None:
    n = 500
    cu = mask_functions.cu_seqlens(n)
    for name, expected in (
        ("causal", masks.causal(n)),
        ("document_causal", masks.document(cu)),
        ("document", masks.document(cu, causal=False)),
        ("document_window", masks.document(cu, window_size=(19, 0))),
        ("block_causal", masks.block_causal([0, n], 13)),
    ):
        assert trace_mask_mod(FUNCTIONS[name].build(n, n), n, n, 0, 0) == expected


# --- cost ---


def peak_of(fn: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns and by how many MiB the process was larger at its largest during it."""
    Path("/proc/self/clear_refs").write_text("5")  # begins the largest size anew

    def largest() -> int:
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])

    before = largest()
    made = fn()
    return made, (largest() - before) / 1024


def test_documents_of_a_million_tokens_are_cheap() -> None:
    """2 s and 1 GB are promised; the time has room for a busy machine."""
    n = 1 << 20
    mask_mod = FUNCTIONS["document_causal"].build(n, n)
    expected = masks.document(mask_functions.cu_seqlens(n))
    begin = time.perf_counter()
    mask, mib = peak_of(lambda: trace_mask_mod(mask_mod, n, n, 0, 0))
    assert time.perf_counter() - begin < 6
    assert mib < 1024
    assert mask == expected


@pytest.mark.parametrize("name", ["block_sparse", "neighbourhood_2d", "compressed_keys", "images_in_text"])
def test_no_matrix_is_made(name: str) -> None:
    sq, sk = FUNCTIONS[name].large
    mask_mod = FUNCTIONS[name].build(sq, sk)
    _, mib = peak_of(lambda: trace_mask_mod(mask_mod, sq, sk, 0, 0))
    assert mib < 1024


def test_many_spans() -> None:
    """or_masks of hundreds of functions, four conditions each."""
    n = 1 << 20
    edges = torch.arange(0, n, n // 200).tolist()

    def span(first: int, last: int) -> Any:
        return lambda b, h, q, k: (q >= first) & (q < last) & (k >= first) & (k < last)

    begin = time.perf_counter()
    mask_mod = or_masks(mask_functions.causal_mod, *(span(a + 5, a + 900) for a in edges))
    expected = masks.bidirectional_spans(masks.causal(n), [[a + 5, min(a + 900, n)] for a in edges if a + 5 < n])
    assert trace_mask_mod(mask_mod, n, n, 0, 0) == expected
    assert time.perf_counter() - begin < 20


def test_pieces_are_bounded() -> None:
    """Where every pair of runs is a piece of its own the answer is None, and comes soon."""
    n = 1 << 20
    ids = torch.arange(n) % 1000
    begin = time.perf_counter()
    for mask_mod in (
        lambda b, h, q, k: ids[q] == ids[k],
        lambda b, h, q, k: (q - k) % 3 == 0,
        lambda b, h, q, k: (q + k) % 2 == 0,
        lambda b, h, q, k: functools.reduce(torch.bitwise_xor, [q - k < i for i in range(40)]),
        lambda b, h, q, k: q * 7919 % n >= k * 104729 % n,
    ):
        assert trace_mask_mod(mask_mod, n, n, 0, 0) is None
    assert time.perf_counter() - begin < 60
