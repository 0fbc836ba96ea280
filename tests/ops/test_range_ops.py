"""range_gather and range_scatter_add against index_select and index_add, and against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_magi.ops import range_gather, range_scatter_add

Tensor = torch.Tensor
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows_of(ranges: Tensor) -> Tensor:
    """Return the row numbers in ranges, one range behind the other."""
    rows = [torch.arange(a, b) for a, b in ranges.tolist()]
    return torch.cat([torch.zeros(0, dtype=torch.long), *rows])


def as_ranges(ranges: Any) -> Tensor:
    return torch.tensor(ranges, dtype=torch.long).reshape(-1, 2)


RANGES = {
    "none": (6, []),
    "none of nothing": (0, []),
    "empty ones": (6, [[0, 0], [3, 3], [6, 6]]),
    "empty one of nothing": (0, [[0, 0]]),
    "all": (6, [[0, 6]]),
    "one row": (6, [[5, 6]]),
    "in order": (6, [[0, 2], [3, 4], [5, 6]]),
    "backwards": (6, [[4, 6], [2, 4], [0, 2]]),
    "overlaps": (6, [[0, 4], [2, 6], [3, 5]]),
    "repeats": (6, [[1, 3], [1, 3], [1, 3]]),
    "more rows than there are": (3, [[0, 3]] * 5),
    "empty ones between": (6, [[0, 0], [1, 3], [3, 3], [2, 5], [0, 0]]),
}


def random_ranges(count: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of rows, ranges) with overlaps, repeats and empty ranges."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        n_rows = int(torch.randint(0, 30, (), generator=generator))
        n = int(torch.randint(0, 12, (), generator=generator))
        ranges = torch.randint(0, n_rows + 1, (n, 2), generator=generator).sort(1).values
        print(f"{n_rows} rows, ranges {ranges.tolist()}")
        yield n_rows, ranges


def all_ranges(seed: int) -> Iterator[tuple[int, Tensor]]:
    yield from ((n_rows, as_ranges(ranges)) for n_rows, ranges in RANGES.values())
    yield from random_ranges(40, seed)


@pytest.mark.parametrize("tail", [(), (3,), (2, 5), (0,), (70,), (2, 1, 3)])
@pytest.mark.parametrize("name", RANGES)
def test_values(name: str, tail: tuple[int, ...]) -> None:
    n_rows, given = RANGES[name]
    ranges = as_ranges(given)
    rows = rows_of(ranges)
    x = torch.randn(n_rows, *tail, dtype=torch.float64)
    gathered = range_gather(x, ranges, len(rows))
    assert gathered.shape == (len(rows), *tail) and torch.equal(gathered, x.index_select(0, rows))
    y = torch.randn(len(rows), *tail, dtype=torch.float64)
    added = range_scatter_add(y, ranges, n_rows)
    assert added.shape == (n_rows, *tail)
    # The documented order of the sums is that of the ranges, which index_add on the CPU has too.
    assert torch.equal(added, torch.zeros_like(x).index_add_(0, rows, y))


def test_random_ranges(seed: int) -> None:
    for n_rows, ranges in all_ranges(seed):
        rows = rows_of(ranges)
        x, y = torch.randn(n_rows, 3, dtype=torch.float64), torch.randn(len(rows), 3, dtype=torch.float64)
        assert torch.equal(range_gather(x, ranges, len(rows)), x[rows])
        assert torch.equal(range_scatter_add(y, ranges, n_rows), torch.zeros_like(x).index_add_(0, rows, y))


def test_adjoint(seed: int) -> None:
    """<gather(x), y> = <x, scatter_add(y)>: exact in integers."""
    generator = torch.Generator().manual_seed(seed)
    for n_rows, ranges in all_ranges(seed):
        n_out = len(rows_of(ranges))
        x, y = (torch.randint(-99, 100, (n, 4), generator=generator).double() for n in (n_rows, n_out))
        assert (range_gather(x, ranges, n_out) * y).sum() == (x * range_scatter_add(y, ranges, n_rows)).sum()


def test_scattering_what_was_gathered_counts(seed: int) -> None:
    for n_rows, ranges in all_ranges(seed):
        rows = rows_of(ranges)
        x = torch.arange(1.0, n_rows + 1, dtype=torch.float64)[:, None]
        back = range_scatter_add(range_gather(x, ranges, len(rows)), ranges, n_rows)
        assert torch.equal(back, x * torch.bincount(rows, minlength=n_rows)[:, None])


@pytest.mark.parametrize(
    "dtype",
    [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_gather_moves_bits_of_any_dtype(dtype: torch.dtype, seed: int) -> None:
    ranges = as_ranges([[3, 5], [0, 4]])
    generator = torch.Generator().manual_seed(seed)
    x = (10 * torch.randn(6, 3, generator=generator)).to(dtype)
    gathered = range_gather(x, ranges, 6)
    assert gathered.dtype == dtype
    assert torch.equal(gathered.view(torch.uint8), x[rows_of(ranges)].view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_16_bit_rows_are_added_in_float32(dtype: torch.dtype, seed: int) -> None:
    """One rounding at the end, not one for every row."""
    ranges = as_ranges([[0, 2]] * 600)
    torch.manual_seed(seed)
    y = torch.rand(1200, 5).to(dtype)
    added = range_scatter_add(y, ranges, 2)
    assert added.dtype == dtype
    wide = range_scatter_add(y.double() if dtype == torch.float64 else y.float(), ranges, 2)
    assert torch.equal(added, wide.to(dtype))
    if dtype in (torch.bfloat16, torch.float16):
        slow = torch.zeros(2, 5, dtype=dtype)
        for row in y.unflatten(0, (600, 2)):
            slow += row
        assert not torch.equal(added, slow), "this input cannot tell float32 sums from 16-bit ones"


def test_a_sum_beyond_float16_that_comes_back() -> None:
    y = torch.tensor([[60000.0], [60000.0], [-60000.0], [1.0]], dtype=torch.float16)
    added = range_scatter_add(y, as_ranges([[0, 1]] * 4), 1)
    assert added.item() == 60000.0


def test_rows_that_are_not_named_may_hold_anything(seed: int) -> None:
    ranges = as_ranges([[1, 3], [2, 4], [0, 0]])
    x = torch.randn(6, 2, 3)
    x[0], x[4:] = math.nan, math.inf
    assert range_gather(x, ranges, 4).isfinite().all()
    # In the result of the sum they are 0, whatever the memory held before, and NaN stays in its row and column.
    y = torch.ones(4, 6)
    y[1, 2] = math.nan
    added = range_scatter_add(y, ranges, 6)
    expected = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0, 0.0])[:, None].repeat(1, 6)
    expected[2, 2] = math.nan
    assert torch.equal(added.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_infinities_and_zeros_keep_their_bits() -> None:
    x = torch.tensor([[-0.0, math.inf], [math.nan, -math.inf]])
    gathered = range_gather(x, as_ranges([[1, 2], [0, 1]]), 2)
    assert torch.equal(gathered.view(torch.int32), x.flip(0).view(torch.int32))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_every_time(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    ranges = torch.randint(0, 50, (300, 2)).sort(1).values
    n = len(rows_of(ranges))
    x, y = torch.randn(50, 200).to(dtype), torch.randn(n, 200).to(dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 2):
            torch.set_num_threads(threads)
            results.append((range_gather(x, ranges, n), range_scatter_add(y, ranges, 50)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_order_of_the_sums_is_that_of_the_ranges() -> None:
    y = torch.tensor([[2.0**60], [1.0], [-(2.0**60)]])
    ranges = as_ranges([[0, 1]] * 3)
    assert range_scatter_add(y, ranges, 1).item() == 0.0
    assert range_scatter_add(y[[0, 2, 1]], ranges, 1).item() == 1.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_c40_strided_inputs(dtype: torch.dtype) -> None:
    ranges = as_ranges([[3, 5], [0, 4]])
    strided_ranges = torch.stack([ranges, ranges + 100], 2)[..., 0]
    wide_x, wide_y = torch.randn(2, 7, 5, 6).to(dtype), torch.randn(12, 5, 4).to(dtype)
    for x, y in (
        (wide_x.permute(2, 0, 3, 1), wide_y[::2, :, 1:3]),
        (wide_x[0, :5, :, ::2], wide_y[:6].transpose(1, 2)),
        (wide_x[0, 0, :, :1].expand(5, 4), wide_y[:1].expand(6, 5, 4)),
    ):
        for r in (ranges, strided_ranges):
            assert torch.equal(range_gather(x, r, 6), range_gather(x.contiguous(), ranges, 6))
            assert torch.equal(range_scatter_add(y, r, 6), range_scatter_add(y.contiguous(), ranges, 6))


def test_inputs_stay_as_they_are() -> None:
    ranges, x, y = as_ranges([[0, 3]]), torch.randn(3, 2), torch.randn(3, 2)
    kept = ranges.clone(), x.clone(), y.clone()
    range_gather(x, ranges, 3).fill_(7)  # a copy, also where everything is taken
    range_scatter_add(y, ranges, 3).fill_(7)
    assert all(torch.equal(a, b) for a, b in zip((ranges, x, y), kept, strict=True))


# --- gradients ---


@pytest.mark.parametrize("name", RANGES)
def test_gradcheck(name: str) -> None:
    n_rows, given = RANGES[name]
    ranges = as_ranges(given)
    n_out = len(rows_of(ranges))
    x = torch.randn(n_rows, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(n_out, 2, dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: range_gather(x, ranges, n_out), (x,))
        assert check(lambda y: range_scatter_add(y, ranges, n_rows), (y,))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_is_the_gradient_of_the_other(dtype: torch.dtype, seed: int) -> None:
    for n_rows, ranges in random_ranges(10, seed):
        n_out = len(rows_of(ranges))
        x, y = (torch.randn(n, 3).to(dtype).requires_grad_() for n in (n_rows, n_out))
        (dx,) = torch.autograd.grad(range_gather(x, ranges, n_out), x, y.detach())
        assert dx.dtype == dtype and torch.equal(dx, range_scatter_add(y.detach(), ranges, n_rows))
        (dy,) = torch.autograd.grad(range_scatter_add(y, ranges, n_rows), y, x.detach())
        assert dy.dtype == dtype and torch.equal(dy, range_gather(x.detach(), ranges, n_out))


def test_strided_gradients() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    out = range_gather(x, as_ranges([[1, 3], [2, 4]]), 4)
    out.sum().backward()  # the gradient is one number, expanded
    assert x.grad is not None and torch.equal(x.grad, torch.tensor([0.0, 1, 2, 1])[:, None].expand(4, 3))


# --- refusals ---

X = torch.zeros(4, 3)
R = as_ranges([[0, 2], [1, 4]])
REFUSALS: list[tuple[str, Any, str, tuple[Any, ...]]] = [
    ("behind the end", range_gather, r"ranges must lie in \[0, 4\], got \[3, 5\)", (X, as_ranges([[0, 1], [3, 5]]), 3)),
    ("negative", range_gather, r"ranges must lie in \[0, 4\], got \[-1, 1\)", (X, as_ranges([[-1, 1]]), 2)),
    ("reversed", range_gather, r"ranges must lie in \[0, 4\], got \[2, 1\)", (X, as_ranges([[2, 1]]), 0)),
    ("huge", range_gather, r"ranges must lie in \[0, 4\]", (X, as_ranges([[0, 2**62], [0, 2**62]]), 0)),
    ("n_out too large", range_gather, "n_out must be the number of rows in the ranges, 5, got 6", (X, R, 6)),
    ("n_out too small", range_gather, "n_out must be the number of rows in the ranges, 5, got 4", (X, R, 4)),
    ("n_out negative", range_gather, "n_out must be the number of rows in the ranges, 5, got -1", (X, R, -1)),
    ("int32", range_gather, r"ranges must be int64 \[n, 2\]", (X, R.int(), 5)),
    ("floats", range_gather, r"ranges must be int64 \[n, 2\]", (X, R.float(), 5)),
    ("one range", range_gather, r"ranges must be int64 \[n, 2\], got shape \[2\]", (X, R[0], 2)),
    ("triples", range_gather, r"ranges must be int64 \[n, 2\], got shape \[1, 3\]", (X, torch.tensor([[0, 1, 2]]), 1)),
    ("result too short", range_scatter_add, r"ranges must lie in \[0, 3\], got \[1, 4\)", (torch.zeros(5, 3), R, 3)),
    ("negative", range_scatter_add, r"ranges must lie in \[0, 4\], got \[-1, 1\)", (X[:2], as_ranges([[-1, 1]]), 4)),
    ("reversed", range_scatter_add, r"ranges must lie in \[0, 4\], got \[2, 1\)", (X[:0], as_ranges([[2, 1]]), 4)),
    ("too few rows", range_scatter_add, "y must have as many rows as the ranges, 5, got 4", (X, R, 4)),
    ("too many rows", range_scatter_add, "as many rows as the ranges, 5, got 6", (torch.zeros(6, 3), R, 4)),
    ("int32", range_scatter_add, r"ranges must be int64 \[n, 2\]", (torch.zeros(5, 3), R.int(), 4)),
    ("integers", range_scatter_add, "takes float64, float32, bfloat16 and float16, got Int",
     (torch.zeros(5, 3, dtype=torch.int32), R, 4)),
    ("complex", range_scatter_add, "takes float64, float32, bfloat16 and float16, got ComplexFloat",
     (torch.zeros(5, 3, dtype=torch.complex64), R, 4)),
]  # fmt: skip
IDS = [f"{op.__name__} {name}" for name, op, *_ in REFUSALS]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("op", "text", "arguments"), [r[1:] for r in REFUSALS], ids=IDS)
def test_refusals(op: Any, text: str, arguments: tuple[Any, ...], grad: bool) -> None:
    x, ranges, size = arguments
    if grad:
        x = x.clone().requires_grad_(x.is_floating_point())
    with pytest.raises(RuntimeError, match=text):
        op(x, ranges, size)


@pytest.mark.parametrize("op", [range_gather, range_scatter_add])
def test_a_number_is_refused_clearly(op: Any) -> None:
    with pytest.raises(RuntimeError, match="must have at least one dimension"):
        op(torch.tensor(1.0), as_ranges([]), 0)


def test_a_negative_number_of_rows_is_refused_clearly() -> None:
    with pytest.raises(RuntimeError, match="n_rows must"):
        range_scatter_add(X[:0], as_ranges([]), -1)


@pytest.mark.parametrize("op", [range_gather, range_scatter_add])
def test_forward_mode_is_refused(op: Any) -> None:
    x = torch.randn(5, 3)
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivatives \(jvp\); use backward"):
        torch.func.jvp(lambda x: op(x, R, 5), (x,), (x,))
