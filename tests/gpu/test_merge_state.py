"""merge_state on a GPU: against the CPU and float64, identities bit for bit, gradients, graphs, bandwidth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from torch_magi.ops import merge_state

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

Tensor = torch.Tensor
State = tuple[Tensor, Tensor]
Fastest = Callable[[Callable[[], object]], float]
GPU = torch.device("cuda")
WIDE = [torch.float32, torch.float64]
SHAPES = [
    (7, 3, 5),
    (1, 1, 1),
    (600, 2, 3),
    (33, 5, 128),
    (9, 2, 64),
    (300, 7, 1),
    (5, 3, 7),
    (4, 2, 1000),
    (2, 1, 4096),
]
NO_SHAPES = [(0, 2, 4), (4, 0, 4), (4, 2, 0), (0, 0, 0)]


def some_state(seed: int, rows: int = 33, heads: int = 3, dim: int = 20, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64)
    lse = 3 * torch.randn(rows, heads, generator=generator, dtype=torch.float64)
    return out.to(GPU, dtype), lse.to(GPU, dtype)


def same_bits(a: State, b: State) -> bool:
    """Return whether all bits are equal, the sign of a zero included."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return all(torch.equal(x.view(kinds[x.dtype]), y.view(kinds[y.dtype])) for x, y in zip(a, b, strict=True))


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    return [x.cpu() for x in tensors]


def check(a: State, b: State) -> State:
    """Compare with the CPU's merge in float64; a second run and the other order must give the same bits."""
    merged = merge_state(*a, *b)
    assert merged[0].shape == a[0].shape and merged[1].shape == a[1].shape
    assert same_bits(merged, merge_state(*a, *b))
    assert same_bits(merged, merge_state(*b, *a))
    truth = merge_state(*(x.double() for x in on_cpu(*a, *b)))
    tolerance = 2e-6 if a[0].dtype == torch.float32 else 1e-14
    for x, y in zip(on_cpu(*merged), truth, strict=True):
        assert x.dtype == a[0].dtype
        # Of the largest value, not of each: a sum of two may cancel.
        scale = y[y.isfinite()].abs().max().item() if y.isfinite().any() else 0.0
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * scale)
    return merged


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("shape", SHAPES + NO_SHAPES, ids=str)
def test_values(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    _, lse = check(some_state(seed, *shape, dtype), some_state(seed + 1, *shape, dtype))
    assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 128, 1000])
def test_rows_are_empty_one_by_one(dim: int, dtype: torch.dtype, seed: int) -> None:
    """Rows with an empty side are the other side's bits, also where the empty side holds NaN or infinity."""
    a, b = (some_state(seed + i, 50, 3, dim, dtype) for i in range(2))
    whole = merge_state(*a, *b)
    marks = torch.tensor([0.0, -math.inf, math.inf], dtype=dtype, device=GPU)
    kind_a, kind_b = (torch.randint(0, 3, a[1].shape, device=GPU) for _ in range(2))
    for garbage in (math.nan, math.inf, 0.0):
        for state, kind in ((a, kind_a), (b, kind_b)):
            state[0][kind > 0] = garbage
            state[1][kind > 0] = marks[kind[kind > 0]]
        merged = merge_state(*a, *b)
        nothing = torch.zeros_like(a[0]), torch.full_like(a[1], -math.inf)
        for expected, rows in (
            (whole, (kind_a == 0) & (kind_b == 0)),
            (a, (kind_a == 0) & (kind_b > 0)),
            (b, (kind_a > 0) & (kind_b == 0)),
            (nothing, (kind_a > 0) & (kind_b > 0)),
        ):
            assert rows.any()
            assert same_bits((merged[0][rows], merged[1][rows]), (expected[0][rows], expected[1][rows]))
        # The CPU moves the same bits.
        cpu = merge_state(*on_cpu(*a, *b))
        some_empty = ((kind_a > 0) | (kind_b > 0)).cpu()
        found = on_cpu(*merged)
        assert same_bits((found[0][some_empty], found[1][some_empty]), (cpu[0][some_empty], cpu[1][some_empty]))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_signed_zeros_and_payloads(dtype: torch.dtype) -> None:
    state = some_state(0, dtype=dtype)
    state[0][0, 0, :3] = torch.tensor([-0.0, 0.0, math.nan], device=GPU)
    state[1][0, 0] = -0.0
    empty = torch.full_like(state[0], math.nan), torch.full_like(state[1], math.inf)
    assert same_bits(merge_state(*state, *empty), state)
    assert same_bits(merge_state(*empty, *state), state)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_far_apart_lse(dtype: torch.dtype) -> None:
    for low, high in ((-200.0, 200.0), (-1e4, 1e4), (0.0, 1e30), (-1e30, 0.0), (-3e38, 3e38)):
        low_side, high_side = (
            (torch.full((2, 1, 5), value, dtype=dtype, device=GPU), torch.full((2, 1), lse, dtype=dtype, device=GPU))
            for value, lse in ((1.0, low), (2.0, high))
        )
        assert same_bits(merge_state(*low_side, *high_side), high_side)  # weights 0 and 1
        assert same_bits(merge_state(*high_side, *low_side), high_side)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_nan_lse_is_not_hidden(dtype: torch.dtype) -> None:
    a, b = some_state(0, dtype=dtype), some_state(1, dtype=dtype)
    a[1][0] = math.nan
    for merged in (merge_state(*a, *b), merge_state(*b, *a)):
        assert merged[0][0].isnan().all() and merged[1][0].isnan().all()
        assert merged[0][1:].isfinite().all() and merged[1][1:].isfinite().all()


def test_not_contiguous(seed: int) -> None:
    a, b = some_state(seed, 33, 3, 16), some_state(seed + 1, 33, 3, 16)
    expected = merge_state(*a, *b)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),  # not aligned to 16 bytes
    ]
    for layout_a, layout_b in itertools.product(layouts, repeat=2):
        assert same_bits(merge_state(*map(layout_a, a), *map(layout_b, b)), expected)


@pytest.mark.parametrize("marks", list(itertools.product([None, -math.inf, math.inf], repeat=2)), ids=str)
def test_gradients(marks: tuple[float | None, float | None], seed: int) -> None:
    """Those of the CPU; those of an empty side are 0, not NaN."""
    inputs = []
    for i, mark in enumerate(marks):
        out, lse = some_state(seed + i, 5, 2, 3, torch.float64)
        inputs += [out, lse] if mark is None else [torch.full_like(out, math.nan), torch.full_like(lse, mark)]
    inputs = [x.requires_grad_() for x in inputs]
    cotangents = [torch.randn_like(x) for x in inputs[:2]]
    grads = torch.autograd.grad(merge_state(*inputs), inputs, cotangents)
    cpu = [x.detach().requires_grad_() for x in on_cpu(*inputs)]
    expected = torch.autograd.grad(merge_state(*cpu), cpu, on_cpu(*cotangents))
    for x, y in zip(grads, expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-12, atol=1e-12)


def test_gradcheck(seed: int) -> None:
    inputs = [x.requires_grad_() for i in range(2) for x in some_state(seed + i, 3, 2, 2, torch.float64)]
    assert torch.autograd.gradcheck(merge_state, inputs)


def test_graph_replay(seed: int) -> None:
    static = [*some_state(seed), *some_state(seed + 1)]
    merge_state(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merged = merge_state(*static)
    for i in range(3):
        new = [*some_state(seed + 2 * i), *some_state(seed + 2 * i + 1)]
        for buffer, x in zip(static, new, strict=True):
            buffer.copy_(x)
        graph.replay()
        assert same_bits(merged, merge_state(*new))


def test_streams(seed: int) -> None:
    a, b = some_state(seed, 5000), some_state(seed + 1, 5000)
    expected = merge_state(*a, *b)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        merged = merge_state(*a, *b)
    torch.cuda.synchronize()
    assert same_bits(merged, expected)


def test_refusals() -> None:
    out, lse = some_state(0)
    for message, arguments in (
        (r"out_a must be \[rows, heads, head_dim\], got \[33, 3\]", (lse, lse, out, lse)),
        (r"out_b must have shape \[33, 3, 20\], got \[33, 3, 19\]", (out, lse, out[..., 1:], lse)),
        (r"lse_b must have shape \[33, 3\], got \[32, 3\]", (out, lse, out, lse[1:])),
        ("needs float32 or float64 partial results, got BFloat16", (out.bfloat16(), lse, out.bfloat16(), lse)),
        ("must have one dtype", (out, lse.double(), out, lse)),
        ("lse_b must be on cuda:0", (out, lse, out, lse.cpu())),
    ):
        with pytest.raises(RuntimeError, match=message):
            merge_state(*arguments)


@pytest.mark.unpoisoned
def test_offsets_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    dim = 128
    rows = 2**31 // (8 * dim) + 100
    out, lse = torch.empty(rows, 8, dim, device=GPU).normal_(), torch.randn(rows, 8, device=GPU)
    other = lse.flip(0)
    assert out.numel() > 2**31
    merged = merge_state(out, lse, out, other)
    for part in (slice(0, 50), slice(rows // 2, rows // 2 + 50), slice(rows - 50, rows)):
        expected = merge_state(out[part], lse[part], out[part], other[part])
        assert same_bits((merged[0][part], merged[1][part]), expected)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_bandwidth(dtype: torch.dtype, fastest: Fastest) -> None:
    rows = 2**27 // (8 * 128 * dtype.itemsize)  # 128 MiB each, more than the cache holds
    a, b = (some_state(i, rows, 8, 128, dtype) for i in range(2))
    source, copied = (torch.zeros(3 * 2**26, dtype=torch.uint8, device=GPU) for _ in range(2))
    assert source.nbytes + copied.nbytes == 3 * a[0].nbytes  # a and b are read, their merge written
    assert fastest(lambda: merge_state(*a, *b)) < 2 * fastest(lambda: copied.copy_(source))
