"""The planner's band algebra and tile plans, on random bands against dense matrices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torch_magi import _planner, masks
from torch_magi.masks import AttnMask
from torch_magi.plan.types import StagePlan

INF = _planner.INF
Array = np.ndarray


def dense(bands: Array, rows: int, columns: int) -> Array:
    """Return the matrix of bands, by the definition in csrc/planner/planner.h. int: how often each pair occurs."""
    out = np.zeros((rows, columns), int)
    for q0, q1, k0, k1, dlo, dhi, step in bands.tolist():
        for q in range(q0, q1):
            start = q0 + step * ((q - q0) // step)
            out[q, max(k0, start + dlo, 0) : max(min(k1, start + dhi), 0)] += 1
    return out


def random_bands(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Return up to six overlapping bands: slices of all types, and staircases."""
    bands = []
    for _ in range(rng.integers(0, 7)):
        q0, q1 = np.sort(rng.integers(0, rows + 1, 2)).tolist()
        k0, k1 = np.sort(rng.integers(0, columns + 1, 2)).tolist()
        low = k0 - q0 if rng.random() < 0.5 else -INF
        high = k1 - q1 + 1 if rng.random() < 0.5 else INF
        bands.append([q0, q1, k0, k1, low, high, int(rng.integers(1, 6)) if rng.random() < 0.3 else 1])
    return np.array(bands, np.int64).reshape(-1, 7)


def replay(plan: tuple[Array, Array, Array], rows: int, columns: int, tile_columns: int) -> Array:
    """Return how often each pair is computed where a kernel follows the plan tile by tile."""
    items, runs, bands = plan
    out, owned = np.zeros((rows, columns), int), np.zeros(rows, int)
    for row0, n_rows, run_begin, run_end, n_tiles, *_ in items.tolist():
        owned[row0 : row0 + n_rows] += 1
        tiles = 0
        for start, n, band_begin, n_bands in runs[run_begin:run_end].tolist():
            tiles += n
            for c0 in range(start, start + n * tile_columns, tile_columns):
                tile = np.zeros((rows, columns), bool)
                tile[row0 : row0 + n_rows, c0 : c0 + tile_columns] = True
                if n_bands == 0:
                    assert c0 + tile_columns <= columns, "a tile without bands must not reach past the last column"
                else:
                    chosen = bands[band_begin : band_begin + n_bands, :7].astype(np.int64)
                    tile &= dense(chosen, rows, columns) > 0
                out += tile
        assert tiles == n_tiles
    assert (owned == 1).all(), "every row belongs to one item"
    return out


def check_split(plan: tuple[Array, Array, Array], rows: int, columns: int, tile_columns: int, max_tiles: int) -> None:
    """The parts of a split item cover its tiles once, evenly, each in a slot of its own."""
    items, runs, splits = _planner.split_items(*plan[:2], tile_columns, max_tiles)
    assert items[:, 4].max() <= max_tiles
    whole, parts = items[items[:, 6] < 0], items[items[:, 6] >= 0]
    assert sorted(parts[:, 6].tolist()) == list(range(splits[:, 3].sum()))
    for row0, n_rows, first, n in splits.tolist():
        mine = parts[(parts[:, 6] >= first) & (parts[:, 6] < first + n)]
        assert (mine[:, :2] == [row0, n_rows]).all() and np.ptp(mine[:, 4]) <= 1
    expected = replay(plan, rows, columns, tile_columns)
    found = np.zeros_like(expected)
    for item in items:
        one = item.copy()
        one[0], one[1] = 0, rows  # replay wants every row in one item; count the item's own rows
        found[item[0] : item[0] + item[1]] += replay((one[None], runs, plan[2]), rows, columns, tile_columns)[
            item[0] : item[0] + item[1]
        ]
    assert (found == expected).all()
    assert set(whole[:, 0].tolist()).isdisjoint(splits[:, 0].tolist())


def check_layers(plan: tuple[Array, Array, Array]) -> int:
    """Runs without bands come first, and a row is in at most one band of any run; return how many runs were added."""
    items, runs, bands = _planner.layer_runs(*plan)
    for row0, n_rows, begin, end, _, n_full, *_ in items.tolist():
        assert (runs[begin : begin + n_full, 3] == 0).all() and (runs[begin + n_full : end, 3] > 0).all()
        for _, _, band_begin, n_bands in runs[begin:end].tolist():
            r0, r1 = bands[band_begin : band_begin + n_bands, :2].T
            rows = np.arange(row0, row0 + n_rows)[:, None]
            assert ((rows >= r0) & (rows < r1)).sum(1).max(initial=0) <= 1
    return len(runs) - len(plan[1])


def test_algebra_and_tile_plans(seed: int) -> None:
    rng, added = np.random.default_rng(seed), 0
    for i in range(150):
        rows, columns = rng.integers(1, 24, 2).tolist()
        a, b = random_bands(rng, rows, columns), random_bands(rng, rows, columns)
        print(f"seed {seed}, case {i}: {rows} x {columns}, a = {a.tolist()}, b = {b.tolist()}")
        seen_a, seen_b = dense(a, rows, columns) > 0, dense(b, rows, columns) > 0
        for op, expected in (("or", seen_a | seen_b), ("and", seen_a & seen_b), ("sub", seen_a & ~seen_b)):
            found = _planner.combine(a, b, op)
            assert (dense(found, rows, columns) == expected).all(), "wrong set, or a pair in two bands"
            assert np.array_equal(found, _planner.from_dense(expected)), "equal sets must give equal bands"
            assert np.array_equal(found, _planner.normalize(found))
            assert _planner.area(found) == expected.sum()
        bands = _planner.normalize(a)
        flipped = _planner.transpose(bands)
        assert np.array_equal(flipped, _planner.from_dense(np.ascontiguousarray(seen_a.T)))
        assert np.array_equal(_planner.transpose(flipped), bands)
        edges = np.unique(np.concatenate([[0, rows], rng.integers(0, rows + 1, 3)]))
        areas = [seen_a[x:y].sum() for x, y in itertools.pairwise(edges)]
        assert _planner.row_areas(bands, edges).tolist() == areas
        tile_rows, tile_columns = rng.integers(1, 9, 2).tolist()
        plan = _planner.tile_plan(bands, rows, tile_rows, tile_columns)
        assert (replay(plan, rows, columns, tile_columns) == seen_a).all()
        check_split(plan, rows, columns, tile_columns, int(rng.integers(1, 4)))
        assert (replay(_planner.layer_runs(*plan), rows, columns, tile_columns) == seen_a).all()
        added += check_layers(plan)
    assert added > 0


def test_aligned_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for i, side in itertools.product(range(120), "qk"):
        shape = rng.integers(1, 40, 2).tolist()
        mask = AttnMask.from_canonical_bands(_planner.normalize(random_bands(rng, *shape)), *shape)
        seen = mask.to_dense().numpy() if side == "q" else mask.to_dense().numpy().T
        rows, columns = seen.shape
        align = (1, 4, 8)[i % 3]
        tile_rows, tile_columns = int(rng.integers(1, 9)), align * int(rng.integers(1, 9 if align == 1 else 4))
        print(f"seed {seed}, case {i}{side}: {mask!r}, tiles {tile_rows} x {tile_columns}, col_align {align}")
        stage = StagePlan(mask, None)
        plan = stage.tile_arrays(side, tile_rows, tile_columns, align)
        if align == 1:
            same = zip(plan, stage.tile_arrays(side, tile_rows, tile_columns), strict=True)
            assert all(np.array_equal(a, b) for a, b in same)
        assert (replay(plan, rows, columns, tile_columns) == seen).all()
        items, runs, _ = plan
        assert (runs[:, 0] % align == 0).all()
        for _, _, begin, end, *_ in items.tolist():
            starts = [c + t * tile_columns for c, n, *_ in runs[begin:end].tolist() for t in range(n)]
            assert all(b - a >= tile_columns for a, b in itertools.pairwise(starts)), "tiles must not overlap"


def test_tile_plan_of_a_staircase_does_not_grow_with_its_steps() -> None:
    sizes = []
    for length in (1 << 12, 1 << 14):
        mask = masks.block_causal([0, length], 2)
        items, runs, bands = _planner.tile_plan(mask.bands, length, 128, 128)
        assert len(items) == length // 128
        sizes.append((len(runs) / len(items), len(bands) / len(items)))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02) and max(sizes[0]) <= 2


def test_longest_first() -> None:
    items, _, _ = _planner.tile_plan(masks.causal(4096).bands, 4096, 64, 64)
    tiles = items[:, 4]
    assert sorted(items[:, 0].tolist()) == list(range(0, 4096, 64))
    assert (tiles[1:] <= tiles[:-1] * 2 ** (1 / 8) + 1).all(), "longest first, up to an eighth of an octave"
    assert tiles[0] == tiles.max() and tiles[-1] == tiles.min()


def test_refusals() -> None:
    bands = masks.causal(8).bands
    with pytest.raises(ValueError, match="tile_rows and tile_cols must be positive"):
        _planner.tile_plan(bands, 8, 0, 8)
    for align, width in ((0, 8), (3, 6), (16, 8), (8, 12)):
        with pytest.raises(ValueError, match="col_align must be a power of two that divides tile_cols"):
            _planner.tile_plan(bands, 8, 8, width, align)
    with pytest.raises(ValueError, match=r"a tile plan holds fewer than 2\^30 rows"):
        _planner.tile_plan(bands, 1 << 30, 64, 64)
    with pytest.raises(ValueError, match="max_tiles must be positive, got 0"):
        _planner.split_items(*_planner.tile_plan(bands, 8, 8, 8)[:2], 8, 0)
    with pytest.raises(ValueError, match=r"a tile plan holds fewer than 2\^30 columns"):
        _planner.tile_plan(masks.full(1, 1 << 30).bands, 1, 64, 64)
