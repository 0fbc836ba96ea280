"""range_gather and range_scatter_add on a GPU: the bits of the CPU, sums against float64, graphs, bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from torch_magi.ops import range_gather, range_scatter_add

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

Tensor = torch.Tensor
Fastest = Callable[[Callable[[], object]], float]
GPU = torch.device("cuda")
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
WIDTHS = [1, 3, 7, 8, 128, 1000]


def as_ranges(ranges: object) -> Tensor:
    return torch.as_tensor(ranges, dtype=torch.long).reshape(-1, 2)


def rows_in(ranges: Tensor) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def rows_of(ranges: Tensor) -> Tensor:
    """Return the row numbers in ranges, one range behind the other."""
    return torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(a, b) for a, b in ranges.tolist())])


def random_ranges(seed: int, n_rows: int, count: int, longest: int) -> Tensor:
    """Return ranges that overlap, some of them repeated, some empty."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, n_rows + 1, count)
    end = np.minimum(begin + rng.integers(0, longest + 1, count), n_rows)
    ranges = np.stack([begin, end], 1)
    ranges[count // 2 :: 7] = ranges[: len(ranges[count // 2 :: 7])]
    return as_ranges(ranges)


def cases(seed: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of rows, ranges)."""
    for n_rows, ranges in (
        (6, []),
        (0, []),
        (6, [[0, 0], [3, 3], [6, 6]]),
        (0, [[0, 0]]),
        (6, [[0, 6]]),
        (100, [[0, 100]]),
        (6, [[5, 6]]),
        (33, [[15, 17], [31, 33], [0, 16], [16, 32]]),  # borders of tiles
        (6, [[1, 3], [1, 3], [1, 3]]),
        (3, [[0, 3]] * 5),
        (600, [[255, 257], [0, 600], [511, 513]]),
    ):
        yield n_rows, as_ranges(ranges)
    for i in range(12):
        n_rows = int(np.random.default_rng(seed + i).integers(1, 700))
        yield n_rows, random_ranges(seed + i, n_rows, 5 * i, 1 + n_rows // (1 + i % 4))


def some_rows(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return (10 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


def check_scatter_add(y: Tensor, ranges: Tensor, n_rows: int) -> Tensor:
    """Compare with the CPU's bits, with float64, and with a second run; return the sum."""
    y_gpu, ranges_gpu = y.to(GPU), ranges.to(GPU)
    added = range_scatter_add(y_gpu, ranges_gpu, n_rows)
    assert added.shape == (n_rows, *y.shape[1:]) and added.dtype == y.dtype
    assert torch.equal(added, range_scatter_add(y_gpu, ranges_gpu, n_rows))
    assert torch.equal(added.cpu(), range_scatter_add(y, ranges, n_rows))
    shape = (n_rows, *y.shape[1:])
    rows = rows_of(ranges)
    truth = torch.zeros(shape, dtype=torch.float64).index_add_(0, rows, y.double())
    sizes = torch.zeros(shape, dtype=torch.float64).index_add_(0, rows, y.double().abs())
    terms = torch.bincount(rows, minlength=n_rows).max().item() if len(rows) else 0
    wide = torch.finfo(torch.float64 if y.dtype == torch.float64 else torch.float32).eps
    bound = torch.finfo(y.dtype).eps * truth.abs() + 2 * terms * wide * sizes + torch.finfo(y.dtype).smallest_normal
    assert ((added.cpu().double() - truth).abs() <= bound).all()
    return added


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values(dtype: torch.dtype, width: int, seed: int) -> None:
    for n_rows, ranges in cases(seed):
        n_out = rows_in(ranges)
        x = some_rows(seed, n_rows, width, dtype)
        gathered = range_gather(x.to(GPU), ranges.to(GPU), n_out)
        assert torch.equal(gathered.cpu(), range_gather(x, ranges, n_out))
        check_scatter_add(some_rows(seed + 1, n_out, width, dtype), ranges, n_rows)


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_gather_moves_bits_of_any_dtype(dtype: torch.dtype, width: int, seed: int) -> None:
    ranges = random_ranges(seed, 50, 20, 30)
    x = some_rows(seed, 50, width, dtype)
    gathered = range_gather(x.to(GPU), ranges.to(GPU), rows_in(ranges)).cpu()
    assert torch.equal(gathered.view(torch.uint8), range_gather(x, ranges, rows_in(ranges)).view(torch.uint8))


@pytest.mark.parametrize("tail", [(), (2, 5), (0,), (2, 0, 3), (2, 1, 3)], ids=str)
def test_shapes(tail: tuple[int, ...], seed: int) -> None:
    for n_rows, ranges in cases(seed):
        n_out = rows_in(ranges)
        x, y = torch.randn(n_rows, *tail), torch.randn(n_out, *tail)
        gathered = range_gather(x.to(GPU), ranges.to(GPU), n_out)
        assert torch.equal(gathered.cpu(), range_gather(x, ranges, n_out))
        check_scatter_add(y, ranges, n_rows)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("n_rows", "used", "count", "longest", "width"),
    [
        (20000, 20000, 20000, 3, 7),
        (20000, 20000, 20000, 20, 16),
        (64, 64, 20000, 8, 40),  # more ranges in each tile than shared memory holds
        (40_000, 500, 10000, 8, 13),  # and many tiles, so that one block goes over its own several times
        (40_000, 500, 10000, 8, 128),
        (5, 5, 40, 5, 100_003),  # few tiles of long rows
        (5, 5, 40, 5, 100_000),
    ],
)
def test_many_ranges(
    n_rows: int, used: int, count: int, longest: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    ranges = random_ranges(seed, used, count, longest)
    n_out = rows_in(ranges)
    x = some_rows(seed, n_rows, width, dtype)
    gathered = range_gather(x.to(GPU), ranges.to(GPU), n_out)
    assert torch.equal(gathered.cpu(), range_gather(x, ranges, n_out))
    check_scatter_add(some_rows(seed + 1, n_out, width, dtype), ranges, n_rows)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 4097])
def test_numbers_of_ranges_around_the_batches(count: int) -> None:
    """All of them reach into every tile, in an order that a swap would change."""
    y = (10 ** torch.linspace(-6, 6, 40 * count)).view(-1, 1)[torch.randperm(40 * count)]
    check_scatter_add(y, as_ranges([[0, 40]] * count), 40)
    check_scatter_add(y[: 20 * count], as_ranges([[0, 40], [3, 3]] * (count // 2) + [[7, 27]] * (count % 2)), 40)


def test_rows_that_no_range_covers_are_zero() -> None:
    y = torch.full((4, 8), torch.nan, device=GPU)
    added = range_scatter_add(y, as_ranges([[2, 4], [40, 42]]).to(GPU), 50)
    covered = torch.zeros(50, dtype=torch.bool, device=GPU)
    covered[[2, 3, 40, 41]] = True
    assert added[covered].isnan().all() and (added[~covered] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_added_in_float32(dtype: torch.dtype) -> None:
    y = torch.full((3000, 8), 1.0, dtype=dtype, device=GPU)  # 1 + 1 + ... stops at 256 in bfloat16
    assert (range_scatter_add(y, as_ranges([[0, 1]] * 3000).to(GPU), 1) == torch.tensor(3000.0).to(dtype)).all()


def test_not_contiguous(seed: int) -> None:
    ranges = random_ranges(seed, 40, 15, 20)
    n_out = rows_in(ranges)
    wide = as_ranges(ranges).repeat_interleave(2, 0).to(GPU)[::2]
    turned = ranges.t().contiguous().to(GPU).t()
    x, y = torch.randn(40, 3, 8, device=GPU), torch.randn(n_out, 3, 8, device=GPU)
    expected = range_gather(x, ranges.to(GPU), n_out), range_scatter_add(y, ranges.to(GPU), 40)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),  # not aligned to 16 bytes
    ]
    for layout in layouts:
        for r in (wide, turned):
            assert torch.equal(range_gather(layout(x), r, n_out), expected[0])
            assert torch.equal(range_scatter_add(layout(y), r, 40), expected[1])


def test_gradients(seed: int) -> None:
    for n_rows, ranges in ((20, random_ranges(seed, 20, 9, 8)), (5, as_ranges([])), (5, as_ranges([[1, 3], [2, 5]]))):
        n_out, on_gpu = rows_in(ranges), ranges.to(GPU)
        x, y = (torch.randn(n, 3, dtype=torch.float64, device=GPU, requires_grad=True) for n in (n_rows, n_out))
        (dx,) = torch.autograd.grad(range_gather(x, on_gpu, n_out), x, y.detach())
        assert torch.equal(dx.cpu(), range_scatter_add(y.detach().cpu(), ranges, n_rows))
        (dy,) = torch.autograd.grad(range_scatter_add(y, on_gpu, n_rows), y, x.detach())
        assert torch.equal(dy.cpu(), range_gather(x.detach().cpu(), ranges, n_out))
    assert torch.autograd.gradcheck(lambda x: range_gather(x, on_gpu, n_out), (x,))
    assert torch.autograd.gradcheck(lambda y: range_scatter_add(y, on_gpu, n_rows), (y,))


def test_graph_replay() -> None:
    """Other values and other ranges of the same number of rows."""
    options = [as_ranges(r) for r in ([[0, 10], [5, 25]], [[20, 40], [0, 10]], [[3, 3], [1, 31]])]
    x, y, ranges = torch.randn(40, 16, device=GPU), torch.randn(30, 16, device=GPU), options[0].to(GPU)
    range_gather(x, ranges, 30), range_scatter_add(y, ranges, 40)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered, added = range_gather(x, ranges, 30), range_scatter_add(y, ranges, 40)
    for new in options:
        x.copy_(torch.randn(40, 16)), y.copy_(torch.randn(30, 16)), ranges.copy_(new)
        graph.replay()
        assert torch.equal(gathered.cpu(), range_gather(x.cpu(), new, 30))
        assert torch.equal(added.cpu(), range_scatter_add(y.cpu(), new, 40))


def test_streams(seed: int) -> None:
    ranges = random_ranges(seed, 5000, 100, 2000).to(GPU)
    n_out = rows_in(ranges)
    x = torch.randn(5000, 64, device=GPU)
    expected = range_scatter_add(range_gather(x, ranges, n_out), ranges, 5000)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = range_scatter_add(range_gather(x, ranges, n_out), ranges, 5000)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_refusals() -> None:
    x, r = torch.zeros(4, 2, device=GPU), as_ranges([[0, 4]]).to(GPU)
    for op in (range_gather, range_scatter_add):
        for message, arguments in (
            (r"ranges must be int64 \[n, 2\]", (x, r.int(), 4)),
            (r"ranges must be int64 \[n, 2\], got shape \[2\]", (x, r[0], 4)),
            ("at least one dimension", (x[0, 0], r, 4)),
            ("ranges must be on cuda:0", (x, r.cpu(), 4)),
        ):
            with pytest.raises(RuntimeError, match=message):
                op(*arguments)
    with pytest.raises(RuntimeError, match="n_rows must be 0 or more, got -1"):
        range_scatter_add(x, r, -1)
    with pytest.raises(RuntimeError, match="takes float64, float32, bfloat16 and float16, got Int"):
        range_scatter_add(x.int(), r, 4)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("width", [1024, 7])
def test_offsets_beyond_32_bits(width: int) -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    rows = 2**31 // width + 1000
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=GPU).normal_()
    assert x.numel() > 2**31
    cut = rows // 3
    ranges = as_ranges([[cut, rows], [0, cut]]).to(GPU)
    gathered = range_gather(x, ranges, rows)
    assert torch.equal(gathered[: rows - cut], x[cut:]) and torch.equal(gathered[rows - cut :], x[:cut])
    assert torch.equal(range_scatter_add(gathered, ranges, rows), x)


def pieces(rows: int, count: int) -> Tensor:
    """Return ranges that together are all rows, shuffled."""
    cuts = np.linspace(0, rows, count + 1).astype(np.int64)
    return as_ranges(np.random.default_rng(0).permutation(np.stack([cuts[:-1], cuts[1:]], 1))).to(GPU)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("op", [range_gather, range_scatter_add])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bandwidth(op: Callable[[Tensor, Tensor, int], Tensor], dtype: torch.dtype, fastest: Fastest) -> None:
    rows = 2**29 // (1024 * dtype.itemsize)  # 512 MiB, more than the cache holds
    x, ranges = torch.randn(rows, 1024, device=GPU).to(dtype), pieces(rows, 200)
    copied = torch.empty_like(x)
    assert fastest(lambda: op(x, ranges, rows)) < 2 * fastest(lambda: copied.copy_(x))
