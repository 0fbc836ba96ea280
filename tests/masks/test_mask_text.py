"""Masks as text: pictures, explanations and repr. A change shows here; EXPECTTEST_ACCEPT=1 accepts it."""

from __future__ import annotations

import re

import expecttest
import numpy as np
import pytest

from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.testing import named_masks, random_masks

NAMED = named_masks()


def everything_about(mask: AttnMask) -> str:
    return f"{mask!r}\n{mask.explain()}\n{mask.to_string()}"


class TestText(expecttest.TestCase):
    maxDiff = None

    def test_full(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.full(2, 3)),
            """\
AttnMask(2 x 3, area 6, 1 bands)
2 queries x 3 keys: 6 of 6 pairs are visible (100.0 %)
  queries [0, 2): query q sees keys [0, 3)
###
###""",
        )

    def test_causal(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.causal(5)),
            """\
AttnMask(5 x 5, area 15, 1 bands)
5 queries x 5 keys: 15 of 25 pairs are visible (60.0 %)
  queries [0, 5): query q sees keys [0, min(5, q + 1))
#....
##...
###..
####.
#####""",
        )

    def test_causal_with_more_queries_than_keys(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.causal(5, 2)),
            """\
AttnMask(5 x 2, area 3, 1 bands)
5 queries x 2 keys: 3 of 10 pairs are visible (30.0 %)
  queries [3, 5): query q sees keys [0, min(2, q - 2))
..
..
..
#.
##""",
        )

    def test_sliding_window(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.sliding_window(6, 6, (2, 1))),
            """\
AttnMask(6 x 6, area 20, 1 bands)
6 queries x 6 keys: 20 of 36 pairs are visible (55.6 %)
  queries [0, 6): query q sees keys [max(0, q - 2), min(6, q + 2))
##....
###...
####..
.####.
..####
...###""",
        )

    def test_documents_with_a_tail(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.document([0, 3, 3, 5], total=7)),
            """\
AttnMask(7 x 7, area 9, 2 bands)
7 queries x 7 keys: 9 of 49 pairs are visible (18.4 %)
  queries [0, 3): query q sees keys [0, min(3, q + 1))
  queries [3, 5): query q sees keys [3, min(5, q + 1))
#......
##.....
###....
...#...
...##..
.......
.......""",
        )

    def test_block_causal(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.block_causal([0, 5, 9], 2)),
            """\
AttnMask(9 x 9, area 29, 3 bands)
9 queries x 9 keys: 29 of 81 pairs are visible (35.8 %)
  queries [0, 5): query q sees keys [0, min(5, 2 * ((q - 0) // 2) + 0 + 2))
  queries [5, 7): query q sees keys [5, 7)
  queries [7, 9): query q sees keys [5, 9)
##.......
##.......
####.....
####.....
#####....
.....##..
.....##..
.....####
.....####""",
        )

    def test_sliding_block(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.sliding_block([0, 8], 2, 1)),
            """\
AttnMask(8 x 8, area 28, 1 bands)
8 queries x 8 keys: 28 of 64 pairs are visible (43.8 %)
  queries [0, 8): query q sees keys [max(0, 2 * ((q - 0) // 2) + 0 - 2), min(8, 2 * ((q - 0) // 2) + 0 + 2))
##......
##......
####....
####....
..####..
..####..
....####
....####""",
        )

    def test_prefix_lm(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.prefix_lm(5, 5, 2)),
            """\
AttnMask(5 x 5, area 16, 2 bands)
5 queries x 5 keys: 16 of 25 pairs are visible (64.0 %)
  queries [0, 2): query q sees keys [0, 2)
  queries [2, 5): query q sees keys [0, min(5, q + 1))
##...
##...
###..
####.
#####""",
        )

    def test_shared_prefix(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.shared_prefix(2, [0, 2, 4])),
            """\
AttnMask(6 x 6, area 17, 3 bands)
6 queries x 6 keys: 17 of 36 pairs are visible (47.2 %)
  queries [0, 4): query q sees keys [0, min(4, q + 1))
  queries [4, 6): query q sees keys [0, 2)
  queries [4, 6): query q sees keys [4, min(6, q + 1))
#.....
##....
###...
####..
##..#.
##..##""",
        )

    def test_image_in_text(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.bidirectional_spans(masks.causal(6), [[1, 4]])),
            """\
AttnMask(6 x 6, area 24, 3 bands)
6 queries x 6 keys: 24 of 36 pairs are visible (66.7 %)
  queries [0, 1): query q sees keys [0, 1)
  queries [1, 4): query q sees keys [0, 4)
  queries [4, 6): query q sees keys [0, min(6, q + 1))
#.....
####..
####..
####..
#####.
######""",
        )

    def test_slices_of_all_types(self) -> None:
        mask = AttnMask.from_slices(
            [[0, 3], [3, 6], [6, 9]], [[0, 5], [1, 5], [2, 7]], ["causal", "inv_causal", "bi_causal"], 9, 8
        )
        self.assertExpectedInline(
            everything_about(mask),
            """\
AttnMask(9 x 8, area 30, 2 bands)
9 queries x 8 keys: 30 of 72 pairs are visible (41.7 %)
  queries [0, 6): query q sees keys [max(0, q - 2), min(5, q + 3))
  queries [6, 9): query q sees keys [max(2, q - 4), min(7, q - 1))
###.....
####....
#####...
.####...
..###...
...##...
..###...
...###..
....###.""",
        )

    def test_scattered_pairs(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.from_document_ids([1, 2, 1, 0, 2], causal=False, padding_id=0)),
            """\
AttnMask(5 x 5, area 8, 6 bands)
5 queries x 5 keys: 8 of 25 pairs are visible (32.0 %)
  queries [0, 3): query q sees keys [max(0, q), min(3, q + 1))
  queries [0, 1): query q sees keys [2, 3)
  queries [1, 2): query q sees keys [4, 5)
  queries [2, 3): query q sees keys [0, 1)
  queries [4, 5): query q sees keys [1, 2)
  queries [4, 5): query q sees keys [4, 5)
#.#..
.#..#
#.#..
.....
.#..#""",
        )

    def test_nothing_visible(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.full(2, 2) - masks.full(2, 2)),
            """\
AttnMask(2 x 2, area 0, 0 bands)
2 queries x 2 keys: 0 of 4 pairs are visible (0.0 %)
..
..""",
        )

    def test_no_queries(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.full(0, 3)),
            """\
AttnMask(0 x 3, area 0, 0 bands)
0 queries x 3 keys: no pairs
""",
        )

    def test_no_keys(self) -> None:
        self.assertExpectedInline(
            everything_about(masks.full(3, 0)),
            """\
AttnMask(3 x 0, area 0, 0 bands)
3 queries x 0 keys: no pairs


""",
        )

    def test_reduced_picture(self) -> None:
        self.assertExpectedInline(
            masks.document([0, 300, 1000], total=1100).to_string(11),
            """\
+..........
#+.........
##+........
...+.......
...#+......
...##+.....
...###+....
...####+...
...#####+..
...######+.
...........
(one character is about 100 queries x 100 keys)""",
        )

    def test_reduced_picture_that_is_not_square(self) -> None:
        self.assertExpectedInline(
            masks.causal(7, 100).to_string(10),
            """\
#########+
#########+
#########+
#########+
#########+
#########+
##########
(one character is about 1 queries x 10 keys)""",
        )


@pytest.mark.parametrize("name", NAMED)
def test_a_picture_shows_every_pair(name: str) -> None:
    mask = NAMED[name]
    lines = mask.to_string().split("\n")
    expected = ["".join("#" if visible else "." for visible in row) for row in mask.to_dense().tolist()]
    assert lines == expected


def test_cells_of_a_reduced_picture(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for mask in random_masks(60, seed):
        sq, sk = mask.shape
        size = int(rng.integers(1, 12))
        print("max_size", size)
        if not sq:
            assert mask.to_string(size) == ""
            continue
        lines = mask.to_string(size).split("\n")
        if max(sq, sk) > size:
            assert re.fullmatch(r"\(one character is about \d+ queries x \d+ keys\)", lines.pop())
        n_q, n_k = min(sq, size), min(sk, size)
        assert [len(line) for line in lines] == [n_k] * n_q
        q_edges, k_edges = ([n * i // cells for i in range(cells + 1)] for n, cells in ((sq, n_q), (sk, n_k)))
        dense = mask.to_dense().numpy()
        for i, line in enumerate(lines):
            for j, character in enumerate(line):
                cell = dense[q_edges[i] : q_edges[i + 1], k_edges[j] : k_edges[j + 1]]
                assert character == ("#" if cell.all() else "+" if cell.any() else "."), (i, j)


@pytest.mark.parametrize(("sq", "sk"), [(100, 0), (0, 100)])
def test_a_picture_of_a_large_empty_mask(sq: int, sk: int) -> None:
    lines = masks.full(sq, sk).to_string().split("\n")
    assert set(lines) == {""} and len(lines) == max(min(sq, 64), 1)


def test_one_cell_is_not_full_by_rounding() -> None:
    """One hidden pair of 2^40 is seen."""
    n = 1 << 20
    hole = AttnMask.from_slices([[5, 6]], [[7, 8]], ["full"], n, n)
    first = (masks.full(n, n) - hole).to_string(2).split("\n")
    assert first[:2] == ["+#", "##"]
    assert hole.to_string(2).split("\n")[:2] == ["+.", ".."]


@pytest.mark.parametrize("name", NAMED)
def test_an_explanation_is_the_mask(name: str) -> None:
    """Read back, the lines of an explanation give the pairs of the mask."""
    mask = NAMED[name]
    first, *lines = mask.explain().split("\n")
    sq, sk = mask.shape
    assert first.startswith(f"{sq} queries x {sk} keys: {mask.area} of {sq * sk} pairs are visible (")
    assert len(lines) == len(mask.bands)
    seen = np.zeros((sq, sk), int)
    for line in lines:
        found = re.fullmatch(r"  queries \[(\d+), (\d+)\): query q sees keys \[(.+), (.+)\)", line)
        assert found is not None, line
        for q in range(int(found[1]), int(found[2])):
            lo, hi = eval(f"({found[3]}, {found[4]})", {"__builtins__": {}}, {"q": q, "max": max, "min": min})
            seen[q, lo:hi] += 1
    assert np.array_equal(seen, mask.to_dense().int().numpy())


@pytest.mark.parametrize("name", NAMED)
def test_repr(name: str) -> None:
    mask = NAMED[name]
    (sq, sk), bands = mask.shape, len(mask.bands)
    assert repr(mask) == str(mask) == f"AttnMask({sq} x {sk}, area {mask.area}, {bands} bands)"
