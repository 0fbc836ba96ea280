"""What the kernels for sm_90a compute with masks, plans and layouts, replayed on the host from their own headers.

Each test also shows that it would notice: the same comparison must fail where something is off by a little.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from torch_magi.masks import AttnMask
from torch_magi.ops.sm90 import INSTANCES, MAX_HEADS_IN_TILE
from torch_magi.plan.types import StagePlan
from torch_magi.testing import YARDSTICK_MASKS, named_masks, random_masks

Array = np.ndarray
ROOT = Path(__file__).parent.parent.parent
WIDTHS = sorted({width.keys for instance in INSTANCES for width in instance.widths})
# Rows of a tile, heads in them, columns.
TILES = sorted(
    {
        (instance.rows, heads, width.keys)
        for instance in INSTANCES
        for width in instance.widths
        for heads in (1, 2, 4, 8)
        if heads <= MAX_HEADS_IN_TILE
    }
)
NO_LIMIT = 1 << 30  # of dlo and dhi, in a plan
SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler named c++")
    library = tmp_path_factory.mktemp("host_replay") / "host_replay.so"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    command += [f"-I{ROOT / 'csrc' / 'include'}", f"-DTILE_WIDTHS={','.join(map(str, WIDTHS))}"]
    command += [str(Path(__file__).with_name("host_replay.cpp")), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    number, unsigned = ctypes.c_int, ctypes.c_uint32
    int32, uint8 = (np.ctypeslib.ndpointer(dtype, flags="C") for dtype in (np.int32, np.uint8))
    for name, result, arguments in (
        ("row_bits", ctypes.c_bool, [number, int32, number, int32, number, number, uint8]),
        ("tile", ctypes.c_bool, [number, int32, number, number, number, number, number, uint8]),
        ("swizzled", unsigned, [unsigned]),
        ("matrix", ctypes.c_uint64, [unsigned, unsigned]),
        ("k_contiguous_step", number, [number, number]),
        ("n_contiguous_step", number, [number]),
        ("first_row", number, [number, number]),
        ("first_column", number, [number]),
        ("accumulator_index", number, [number, number]),
    ):
        function = getattr(loaded, f"host_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


# --- bit masks ---


def visible(bands: Array, rows: Array, columns: Array) -> Array:
    """Return which of the pairs bands show, by the definition in csrc/include/tile_plan.h."""
    r, c = np.broadcast_arrays(rows.astype(np.int64), columns.astype(np.int64))
    shown = np.zeros(r.shape, bool)
    for r0, r1, c0, c1, dlo, dhi, step, _ in bands.tolist():
        distance = c - (r0 + step * ((r - r0) // step))
        shown |= (r0 <= r) & (r < r1) & (c0 <= c) & (c < c1) & (dlo <= distance) & (distance < dhi)
    return shown


def random_tile_bands(rng: np.random.Generator, row0: int, col_start: int, width: int) -> Array:
    """Return one to six bands near a tile, each limit of which is absent, inside, or on either side of the tile."""
    bands = []
    for _ in range(rng.integers(1, 7)):
        r0, r1 = np.sort(rng.integers(max(row0 - 100, 0), row0 + 300, 2)).tolist()
        c0, c1 = np.sort(rng.integers(max(col_start - width, 0), col_start + 2 * width, 2)).tolist()
        low, high = np.sort(rng.integers(-width, 2 * width, 2) + col_start - row0).tolist()
        absent = rng.random(4) < 0.4
        step = int(rng.choice([1, 1, 2, 3, 7, 16, 128, 200]))
        limits = [0 if absent[0] else c0, NO_LIMIT - 1 if absent[1] else c1]
        limits += [-NO_LIMIT if absent[2] else low, NO_LIMIT if absent[3] else high]
        bands.append([r0, r1, *limits, step, 0])
    return np.array(bands, np.int32)


@pytest.mark.parametrize("width", WIDTHS)
def test_row_masks_are_what_bands_say(host: ctypes.CDLL, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    element, lane = np.arange(width // 4), np.arange(32)[:, None]
    column = 8 * (element // 2) + 2 * (lane % 4) + element % 2
    noticed = dict.fromkeys(("col_start", "lane", "step"), 0)
    for i in range(150):
        far_rows, far_columns = (rng.random(2) < 0.2) * (NO_LIMIT - 4096)
        row0 = int(far_rows + rng.integers(0, 500))
        col_start = int(far_columns + rng.integers(0, 500))
        bands = random_tile_bands(rng, row0, col_start, width)
        rows = np.unique(
            np.concatenate([bands[:, :2].ravel(), bands[:, :2].ravel() - 1, rng.integers(0, 300, 8) + row0])
        )
        rows = np.ascontiguousarray(rows[rows >= 0], np.int32)
        bits = np.full((len(rows), 32, width // 4), 255, np.uint8)
        assert host.host_row_bits(width, bands, len(bands), rows, len(rows), col_start, bits)
        expected = visible(bands, rows[:, None, None], col_start + column)
        print(f"seed {seed}, case {i}: bands {bands.tolist()}, col_start {col_start}")
        assert (bits == expected).all()
        # Others differ from it, often enough.
        noticed["col_start"] += (bits != visible(bands, rows[:, None, None], col_start + 1 + column)).any()
        noticed["lane"] += (bits != np.roll(expected, 1, axis=1)).any()
        other = bands.copy()
        other[:, 6] += 1
        noticed["step"] += (bits != visible(other, rows[:, None, None], col_start + column)).any()
    assert min(noticed.values()) >= 20, noticed


# --- plans ---


def tiles_of(
    host: ctypes.CDLL, mask: AttnMask, tile: tuple[int, int, int], shift: int = 0
) -> Iterator[tuple[int, int, int, Array]]:
    """Yield (first token, tokens, first column, times shown [rows, columns]) of all tiles, as the kernel visits them.

    shift: added to the first column that the masks are told.
    """
    rows, heads, width = tile
    items, runs, bands = StagePlan(mask, None).tile_arrays("q", rows // heads, width)
    for row0, n_rows, run_begin, run_end, n_tiles, *_ in items.tolist():
        visited = 0
        for start, n, band_begin, n_band in runs[run_begin:run_end].tolist():
            for col_start in range(start, start + n * width, width):
                shown = np.zeros((rows, width), np.uint8)
                chosen = bands[band_begin : band_begin + n_band]
                assert host.host_tile(
                    width, chosen, n_band, row0, heads.bit_length() - 1, rows, col_start + shift, shown
                )
                visited += 1
                yield row0, n_rows, col_start, shown
        assert visited == n_tiles


def times_visited(host: ctypes.CDLL, mask: AttnMask, tile: tuple[int, int, int], shift: int = 0) -> Array:
    """Return how often the kernel sees each pair, [tokens, heads, keys and some beyond the last]."""
    (sq, sk), (_, heads, width) = mask.shape, tile
    times = np.zeros((sq, heads, sk + width), int)
    for row0, n_rows, col, shown in tiles_of(host, mask, tile, shift):
        times[row0 : row0 + n_rows, :, col : col + width] += shown.reshape(-1, heads, width)[:n_rows]
    return times


def dense_visits(mask: AttnMask, tile: tuple[int, int, int]) -> Array:
    _, heads, width = tile
    padded = np.pad(mask.to_dense().numpy(), ((0, 0), (0, width)))
    return np.repeat(padded[:, None], heads, axis=1)


def online_attention(
    host: ctypes.CDLL, q: Array, k: Array, v: Array, mask: AttnMask, tile: tuple[int, int, int], shift: int = 0
) -> Array:
    """Return float32 attention of q [tokens, heads, dim] and one KV head by an online softmax along the tiles."""
    sq, (rows, heads, width) = mask.shape[0], tile
    dim, dim_v = q.shape[2], v.shape[1]
    # TMA reads what is past the end as zeros.
    q_in = np.pad(q, ((0, rows), (0, 0), (0, 0)))
    k_in, v_in = (np.pad(x, ((0, width), (0, 0))) for x in (k, v))
    out, total = np.zeros((sq, heads, dim_v), np.float32), np.zeros((sq, heads, 1), np.float32)
    largest = np.full((sq, heads, 1), -np.inf, np.float32)
    for row0, n, col, shown in tiles_of(host, mask, tile, shift):
        here = slice(row0, row0 + n)
        packed = q_in[row0 : row0 + rows // heads].reshape(rows, dim)
        scores = np.where(shown > 0, packed @ k_in[col : col + width].T, np.float32(-np.inf))
        scores = scores.reshape(-1, heads, width)[:n]
        most = np.maximum(largest[here], scores.max(2, keepdims=True))
        reference = np.where(np.isinf(most), np.float32(0), most)
        factor, weights = np.exp(largest[here] - reference), np.exp(scores - reference)
        total[here] = total[here] * factor + weights.sum(2, keepdims=True)
        out[here] = out[here] * factor + weights @ v_in[col : col + width]
        largest[here] = most
    return out / np.where(total > 0, total, np.float32(1))


def dense_attention(q: Array, k: Array, v: Array, mask: AttnMask) -> Array:
    """Return float64 attention; 0 for a row that sees nothing."""
    shown = mask.to_dense().numpy()[:, None]
    scores = np.where(shown, np.einsum("qhd,kd->qhk", q.astype(float), k.astype(float)), -np.inf)
    largest = scores.max(2, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(largest), 0.0, largest))
    total = weights.sum(2, keepdims=True)
    found: Array = weights @ v.astype(float) / np.where(total > 0, total, 1.0)
    return found


def cases(random: int, seed: int) -> Iterator[tuple[str, AttnMask, list[tuple[int, int, int]]]]:
    """Yield (name, mask, tiles): named and yardstick masks, and random ones with some of the tiles each."""
    for name, mask in named_masks().items():
        yield name, mask, TILES
    for (name, make), total in itertools.product(YARDSTICK_MASKS.items(), (300, 517, 700)):
        yield f"{name} {total}", make(total), TILES
    for i, mask in enumerate(random_masks(random, seed, max_size=600)):
        yield f"random {i}", mask, [TILES[(2 * i + j) % len(TILES)] for j in range(2)]


def test_plans_show_each_visible_pair_once(host: ctypes.CDLL, seed: int) -> None:
    for name, mask, tiles in cases(100, seed):
        for tile in tiles:
            times = times_visited(host, mask, tile)
            assert (times <= 1).all(), f"{name}, tile {tile}: a pair is visited twice"
            assert (times == dense_visits(mask, tile)).all(), f"{name}, tile {tile}: another set of pairs"


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_attention_along_the_tiles(host: ctypes.CDLL, seed: int, tile: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(seed)
    for name, mask, tiles in cases(len(TILES), seed):
        if tile not in tiles or (" 300" in name or " 700" in name):
            continue
        sq, sk = mask.shape
        q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((sq, tile[1], 8), (sk, 8), (sk, 4)))
        error = np.abs(online_attention(host, q, k, v, mask, tile) - dense_attention(q, k, v, mask))
        assert error.max(initial=0.0) < 1e-5, f"{name}, {error.max()}"


@pytest.mark.parametrize("name", ["causal", "varlen_full", "varlen_block_causal", "prefix_documents"])
def test_shifted_masks_are_noticed(host: ctypes.CDLL, seed: int, name: str) -> None:
    mask = YARDSTICK_MASKS[name](300)
    rng = np.random.default_rng(seed)
    for tile in TILES:
        assert (times_visited(host, mask, tile, shift=1) != dense_visits(mask, tile)).any()
        q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((300, tile[1], 8), (300, 8), (300, 4)))
        error = np.abs(online_attention(host, q, k, v, mask, tile, shift=1) - dense_attention(q, k, v, mask))
        assert error.max() > 1e-3


# --- layouts ---


class SharedMemory:
    """Shared memory of a block in 16-bit words."""

    def __init__(self) -> None:
        self.words = np.full(SHARED_BYTES // 2, 65535, np.uint16)

    def fill(self, address: int, matrix: Array, swizzle: bool = True) -> None:
        """Copy a matrix as TMA does: boxes of 64 columns, in which chunk c of row r lands at chunk c ^ (r % 8)."""
        assert address % 1024 == 0 and matrix.shape[1] % 64 == 0
        rows = len(matrix)
        row, chunk = np.arange(rows)[:, None], np.arange(8)
        to = address + row * 128 + (chunk ^ (row % 8 if swizzle else 0)) * 16
        for panel in range(matrix.shape[1] // 64):
            at = (to[:, :, None] + panel * rows * 128 + 2 * np.arange(8)) // 2
            self.words[at] = matrix[:, panel * 64 : panel * 64 + 64].reshape(rows, 8, 8)

    def read(self, descriptor: int, count: int, k_contiguous: bool) -> Array:
        """Return the operand [count, 16 steps of K] that wgmma reads through a descriptor.

        PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor Format": 16-bit
        elements, 128-byte swizzle. The swizzle exchanges bits 4 to 6 of an address with their exclusive or with
        bits 7 to 9.
        """

        def field(first: int, last: int) -> int:
            return descriptor >> first & ((1 << (last - first + 1)) - 1)

        assert field(62, 63) == 1, "128-byte swizzle"
        assert field(49, 51) == 0, "base offset: patterns start at multiples of 1024 bytes"
        assert field(14, 15) == field(30, 31) == field(46, 48) == field(52, 61) == 0, "must be 0"
        start, leading, stride = (field(first, first + 13) << 4 for first in (0, 16, 32))
        n, k = np.arange(count)[:, None], np.arange(16)
        if k_contiguous:
            at = start + n // 8 * stride + n % 8 * 128 + k * 2
        else:
            at = start + n // 64 * leading + n % 64 * 2 + k // 8 * stride + k % 8 * 128
        at = at ^ ((at >> 7 & 7) << 4)
        words: Array = self.words[np.minimum(at // 2, len(self.words) - 1)]
        return words


def numbered(rows: int, columns: int) -> Array:
    """Return a matrix whose elements all differ."""
    assert rows * columns <= 65535
    return np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)


def addresses(matrix: Array) -> tuple[int, int]:
    """Return where a matrix may lie: near the beginning, and at the end of shared memory."""
    return 1024, (SHARED_BYTES - matrix.size * 2) // 1024 * 1024


def reads_k_contiguous(
    host: ctypes.CDLL, rows: int, dim: int, count: int, step_rows: int | None = None, swizzle: bool = True
) -> bool:
    """Return whether the products read a matrix of `rows` rows of Q or K right, `count` rows at a time.

    step_rows, swizzle: other than what the kernel uses, to see that it matters.
    """
    matrix, good = numbered(rows, dim), True
    for address in addresses(matrix):
        memory = SharedMemory()
        memory.fill(address, matrix, swizzle)
        for first, i in itertools.product(range(0, rows, count), range(dim // 16)):
            descriptor = host.host_matrix(address + first * 128, 16)
            descriptor += host.host_k_contiguous_step(i, step_rows or rows)
            good &= np.array_equal(
                memory.read(descriptor, count, True), matrix[first : first + count, i * 16 :][:, :16]
            )
    return good


def reads_n_contiguous(
    host: ctypes.CDLL, rows: int, dim: int, panel_rows: int | None = None, swizzle: bool = True
) -> bool:
    """Return whether the products read a matrix of `rows` rows of V right; the rest as above."""
    matrix, good = numbered(rows, dim), True
    for address in addresses(matrix):
        memory = SharedMemory()
        memory.fill(address, matrix, swizzle)
        for i in range(rows // 16):
            descriptor = host.host_matrix(address, (panel_rows or rows) * 128) + host.host_n_contiguous_step(i)
            good &= np.array_equal(memory.read(descriptor, dim, False).T, matrix[i * 16 : i * 16 + 16])
    return good


@pytest.mark.parametrize(("rows", "dim"), sorted({(i.rows, i.head_dim) for i in INSTANCES}))
def test_products_read_queries(host: ctypes.CDLL, rows: int, dim: int) -> None:
    assert reads_k_contiguous(host, rows, dim, 64)
    assert not reads_k_contiguous(host, rows, dim, 64, swizzle=False)
    if dim > 64:
        assert not reads_k_contiguous(host, rows, dim, 64, step_rows=rows + 8)


@pytest.mark.parametrize(("width", "dim"), sorted({(w.keys, i.head_dim) for i in INSTANCES for w in i.widths}))
def test_products_read_keys(host: ctypes.CDLL, width: int, dim: int) -> None:
    assert reads_k_contiguous(host, width, dim, width)
    assert not reads_k_contiguous(host, width, dim, width, swizzle=False)
    if dim > 64:
        assert not reads_k_contiguous(host, width, dim, width, step_rows=width - 8)


@pytest.mark.parametrize(("width", "dim"), sorted({(w.keys, i.head_dim_v) for i in INSTANCES for w in i.widths}))
def test_products_read_values(host: ctypes.CDLL, width: int, dim: int) -> None:
    assert reads_n_contiguous(host, width, dim)
    assert not reads_n_contiguous(host, width, dim, swizzle=False)
    if dim > 64:
        assert not reads_n_contiguous(host, width, dim, panel_rows=width + 8)


def test_swizzle_is_that_of_tma(host: ctypes.CDLL) -> None:
    matrix = numbered(192, 64)

    def agrees(swizzle: bool) -> bool:
        memory = SharedMemory()
        memory.fill(0, matrix, swizzle)
        places = [host.host_swizzled(2 * i) for i in range(matrix.size)]
        return np.array_equal(memory.words[np.array(places) // 2], matrix.ravel())

    assert agrees(True) and not agrees(False)


@pytest.mark.parametrize("width", WIDTHS)
def test_accumulators(host: ctypes.CDLL, width: int) -> None:
    def places(first_row: Callable[[int, int], int]) -> Array:
        """Return (row, column) of each accumulator of 128 threads, -1 where the kernel has none."""
        found = np.full((128, width // 2, 2), -1)
        for thread, i, r in itertools.product(range(128), range(width // 4), range(2)):
            column = 8 * (i // 2) + host.host_first_column(thread) + i % 2
            found[thread, host.host_accumulator_index(i, r)] = first_row(thread // 32, thread % 32) + 8 * r, column
        return found

    # PTX ISA, wgmma m64nNk16, "Matrix fragments": the layout of D.
    thread, i = np.indices((128, width // 2))
    rows = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
    expected = np.stack([rows, 8 * (i // 4) + 2 * (thread % 4) + i % 2], axis=2)
    found = places(host.host_first_row)
    assert np.array_equal(found, expected)
    assert not np.array_equal(places(lambda warp, lane: host.host_first_row(warp, lane ^ 4)), expected)
    times = np.zeros((64, width), int)
    np.add.at(times, (found[..., 0], found[..., 1]), 1)
    assert (times == 1).all()


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_threads_share_a_tile(host: ctypes.CDLL, tile: tuple[int, int, int]) -> None:
    rows, heads, width = tile
    shown = np.zeros((rows, width), np.uint8)
    nothing = np.zeros((0, 8), np.int32)
    assert host.host_tile(width, nothing, 0, 0, heads.bit_length() - 1, rows, 0, shown)
    assert (shown == 1).all()
    fewer = np.zeros((rows, width), np.uint8)
    assert host.host_tile(width, nothing, 0, 0, heads.bit_length() - 1, rows - 64, 0, fewer)
    assert not (fewer == 1).all()
    assert not host.host_tile(width + 8, nothing, 0, 0, 0, rows, 0, shown), "a width that is not in use"
