"""AttnMask.from_mask_mod and from_block_mask: the pairs of functions and of tables of blocks, exactly."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, noop_mask

from torch_magi import masks
from torch_magi.masks import AttnMask, mask_mod
from torch_magi.testing import random_masks

Tensor = torch.Tensor
N = 60
DOCUMENT = torch.tensor([0] * 7 + [1] * 20 + [2] + [3] * 32)
ALLOWED = torch.tensor([[0, 1], [5, 2], [30, 31], [59, 0]])  # of each of the documents
MATRIX = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.3
LIMIT = torch.tensor(17)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


MODS: dict[str, Callable[..., Tensor]] = {
    "causal": causal,
    "documents": flex.and_masks(causal, same_document),
    "window": lambda b, h, q, k: (q - k).abs() <= 5,
    "prefix": flex.or_masks(causal, lambda b, h, q, k: k < LIMIT),
    "staircase": lambda b, h, q, k: k < 4 * (q // 4 + 1),
    "stride": lambda b, h, q, k: (q - k) % 7 == 0,
    "where": lambda b, h, q, k: torch.where(q < 30, k < 10, k >= q),
    "matrix": lambda b, h, q, k: MATRIX[q, k],
    # Right only if q_idx is a number inside: `any` is over the two keys of a document.
    "reduced": lambda b, h, q, k: (ALLOWED[DOCUMENT[q]] == k).any(),
    "all": noop_mask,
    "none": lambda b, h, q, k: (q < 0) & (k < 0),
    "float": lambda b, h, q, k: torch.sin(q * 0.37) > k / 60.0,
    "product": lambda b, h, q, k: (q * k) % 3 == 1,
}
SHAPES = [(N, N), (7, N), (N, 33), (1, 1)]


def dense(mod: Callable[..., Tensor], sq: int, sk: int, b: int = 0, h: int = 0) -> Tensor:
    return create_mask(mod, b + 1, h + 1, sq, sk, device="cpu")[b, h].expand(sq, sk)


def ask_for_every_pair(patch: pytest.MonkeyPatch, pairs: int = mask_mod.PAIRS) -> None:
    """Leave out the run on symbols, and ask for `pairs` at once."""
    patch.setattr(mask_mod, "trace_mask_mod", lambda *_: None)
    patch.setattr(mask_mod, "PAIRS", pairs)


# --- from_mask_mod ---


@pytest.mark.parametrize("pairs", [None, 1, 150, mask_mod.PAIRS])
@pytest.mark.parametrize("name", MODS)
def test_masks_of_functions(name: str, pairs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if pairs:
        ask_for_every_pair(monkeypatch, pairs)
    for shape in SHAPES[1:2] if pairs == 1 else SHAPES:
        made = AttnMask.from_mask_mod(MODS[name], *shape)
        assert made == AttnMask.from_dense(dense(MODS[name], *shape)), shape


def test_functions_of_masks_give_them_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, mask in enumerate(random_masks(40, seed)):
        if i == 20:
            ask_for_every_pair(monkeypatch)
        assert AttnMask.from_mask_mod(mask.to_mask_mod(), *mask.shape) == mask


@pytest.mark.parametrize("symbols", [True, False])
def test_c22_a_staircase_stays_one_band(symbols: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not symbols:
        ask_for_every_pair(monkeypatch)
    made = AttnMask.from_mask_mod(lambda b, h, q, k: k < 2 * (q // 2 + 1), 200, 200)
    assert made == masks.chunk_causal(200, 200, 2) and len(made.bands) == 1
    assert made.clip((100, 200), (0, 200)).area == 15100


def test_c26_later_changes_of_captured_tensors_do_not_show() -> None:
    document = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document[q_idx] == document[kv_idx]

    made, block_mask = AttnMask.from_mask_mod(mod, 8, 8), create_block_mask(mod, None, None, 8, 8, "cpu", 2)
    document[4:6] = 0
    assert made == masks.document([0, 4, 8], causal=False)
    assert AttnMask.from_mask_mod(mod, 8, 8) == masks.document([0, 6, 8], causal=False)
    # Its tables are older than the function: as in FlexAttention, they say which blocks are asked for.
    assert AttnMask.from_block_mask(block_mask) == made


def test_memory_is_bounded_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = mask_mod.create_mask

    def counted(mod: Callable[..., Tensor], B: int, H: int, q_len: int, kv_len: int, device: torch.device) -> Tensor:
        asked.append(q_len * kv_len)
        return real(mod, B, H, q_len, kv_len, device)

    monkeypatch.setattr(mask_mod, "create_mask", counted)
    ask_for_every_pair(monkeypatch, 1 << 12)
    assert AttnMask.from_mask_mod(MODS["stride"], 300, 301).area == int(dense(MODS["stride"], 300, 301).sum())
    assert max(asked) <= 1 << 12 and sum(asked) == 300 * 301 + 1


def test_the_way_taken_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def sines(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.sin(q_idx * kv_idx) > 0

    block_mask = create_block_mask(sines, None, None, 20, 30, "cpu", 16)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="torch_magi.masks.mask_mod"):
        AttnMask.from_mask_mod(causal, 20, 30)
        AttnMask.from_mask_mod(sines, 20, 30)
        AttnMask.from_block_mask(block_mask)
    assert caplog.messages == [
        "mask_mod read from a run on symbols, 20 x 30 pairs",
        "mask_mod asked for all 20 x 30 pairs",
        "mask_mod asked for 600 pairs of 20 x 30, those in partial blocks",
    ]
    caplog.clear()
    monkeypatch.setattr(mask_mod, "MANY_PAIRS", 599)
    AttnMask.from_mask_mod(sines, 20, 30)
    assert caplog.record_tuples == [
        ("torch_magi.masks.mask_mod", logging.WARNING, "mask_mod asked for all 20 x 30 pairs")
    ]


WINDOWS = torch.tensor([[1, 4, 4], [9, 1, 2]])


def window_of(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOWS[b, h])


def window_of_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOWS[1][h])


def window(left: int, n: int = 20) -> AttnMask:
    return masks.sliding_window(n, n, (left - 1, 0))


def test_masks_of_every_element_and_head() -> None:
    made = AttnMask.from_mask_mod(window_of, 20, 20, B=2, H=3)
    assert made == tuple(tuple(window(n) for n in row) for row in WINDOWS.tolist())
    assert made[0][1] is made[0][2] and made[0][0] is made[1][1], "equal masks are one object"
    of_head = AttnMask.from_mask_mod(window_of_head, 20, 20, H=3)
    assert of_head == (made[1],)
    assert AttnMask.from_mask_mod(window_of_head, 20, 20, B=4, H=3) == of_head * 4
    alike = AttnMask.from_mask_mod(causal, 20, 20, B=2)
    assert alike == ((masks.causal(20),),) * 2 and alike[0][0] is alike[1][0]


USES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "table": ("b", lambda b, h, q, k: WINDOWS[:, 0][b] > k),
    "row of a table": ("h", lambda b, h, q, k: (WINDOWS.T[h] > k).any()),
    "with a row": ("h", lambda b, h, q, k: WINDOWS[q // 30, h] > k),
    "comparison": ("b", lambda b, h, q, k: (b == 0) | (q > k)),
    "where": ("h", lambda b, h, q, k: torch.where(h > 0, q > k, q < k)),
    "stack": ("h", lambda b, h, q, k: torch.stack([h, q]).sum() > k),
    "index_select": ("b", lambda b, h, q, k: LIMIT.expand(3).index_select(0, b.reshape(1))[0] > k),
    "combined": ("h", flex.and_masks(causal, flex.or_masks(noop_mask, lambda b, h, q, k: q > h))),
}


@pytest.mark.parametrize(("index", "mod"), USES.values(), ids=USES)
def test_a_dependence_that_was_not_announced_is_refused(index: str, mod: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=f"mask_mod depends on {index}, .* pass {index.upper()}="):
        AttnMask.from_mask_mod(mod, N, N)
    other = "H" if index == "b" else "B"
    with pytest.raises(ValueError, match=f"pass {index.upper()}="):
        AttnMask.from_mask_mod(mod, N, N, **{other: 2})
    made = AttnMask.from_mask_mod(mod, N, N, **{index.upper(): 2})
    expected = [dense(mod, N, N, **{index: i}) for i in range(2)]
    assert [m for row in made for m in row] == [AttnMask.from_dense(x) for x in expected]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_pairs(shape: tuple[int, int]) -> None:
    assert AttnMask.from_mask_mod(causal, *shape) == masks.full(*shape)


def test_c41_indices_beyond_32_bits() -> None:
    """The last row of a table of width 46341 begins below 2^31 and ends above."""

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx * 46341 + kv_idx > 2**31 - 1

    n = 46341
    assert 46340 * n + 46340 == 2147488280
    counts, last = torch.zeros(1, 1, 363, dtype=torch.int32), torch.full((1, 1, 363, 1), 362, dtype=torch.int32)
    counts[..., -1] = 1
    made = AttnMask.from_block_mask(BlockMask.from_kv_blocks(
        counts, last, mask_mod=mod, seq_lengths=(n, n), BLOCK_SIZE=128, compute_q_blocks=False,
    ))  # fmt: skip
    assert made == AttnMask.from_slices([[46340, n]], [[362 * 128, n]], ["full"], n, n)


# --- from_block_mask ---


def without_full_blocks(made: BlockMask) -> BlockMask:
    """Return the same pairs with every block listed as a partial one, about which the function is asked."""
    listed = made.to_dense() > 0
    tables = listed.sum(-1, dtype=torch.int32), listed.int().argsort(stable=True, descending=True).int()
    how = {"BLOCK_SIZE": made.BLOCK_SIZE, "mask_mod": made.mask_mod, "seq_lengths": made.seq_lengths}
    return BlockMask.from_kv_blocks(*tables, **how, compute_q_blocks=False)


@pytest.mark.parametrize("size", [16, (8, 32), 128])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("symbols", [True, False])
def test_block_masks_of_functions(
    size: int | tuple[int, int], separate: bool, symbols: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not symbols:
        ask_for_every_pair(monkeypatch)
    for mod, (sq, sk) in itertools.product(MODS.values(), SHAPES):
        made = create_block_mask(mod, None, None, sq, sk, "cpu", size)
        if not separate:
            made = without_full_blocks(made)
        assert AttnMask.from_block_mask(made) == AttnMask.from_dense(dense(mod, sq, sk))


def test_masks_to_block_masks_and_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, mask in enumerate(random_masks(40, seed)):
        if i == 20:
            ask_for_every_pair(monkeypatch)
        for size in (1, 8, (5, 16)):
            assert AttnMask.from_block_mask(mask.to_block_mask(size)) == mask


def blocks(lists: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    """Return the tables of blocks; behind the listed ones stands what is no block."""
    counts = torch.tensor([[[len(row) for row in lists]]], dtype=torch.int32)
    indices = torch.tensor([[[row + [99] * (width - len(row)) for row in lists]]], dtype=torch.int32)
    return counts, indices


def test_c23_blocks_without_a_function() -> None:
    made = BlockMask.from_kv_blocks(*blocks([[1], [0]], 2), BLOCK_SIZE=128, compute_q_blocks=False)
    expected = AttnMask.from_slices([[0, 128], [128, 256]], [[128, 256], [0, 128]], ["full", "full"], 256, 256)
    assert AttnMask.from_block_mask(made) == expected
    full = BlockMask.from_kv_blocks(
        *blocks([[], []], 2), *blocks([[1], [0]], 2), BLOCK_SIZE=128, compute_q_blocks=False
    )
    assert AttnMask.from_block_mask(full) == expected


def test_full_blocks_do_not_ask_and_hidden_ones_are_not_shown() -> None:
    """10 queries and 11 keys in blocks of 4 x 4, of which the last are cut."""
    asked: list[int] = []

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        asked.append(1)
        return q_idx < kv_idx

    made = AttnMask.from_block_mask(BlockMask.from_kv_blocks(
        *blocks([[0, 2], [], [1, 2]], 3), *blocks([[], [0, 2], [0]], 3),
        BLOCK_SIZE=4, mask_mod=mod, seq_lengths=(10, 11), compute_q_blocks=False,
    ))  # fmt: skip
    assert made.to_string().splitlines() == [
        ".###....###",
        "..##....###",
        "...#....###",
        "........###",
        "####....###",
        "####....###",
        "####....###",
        "####....###",
        "####.....##",
        "####......#",
    ]
    asked.clear()
    only_full = BlockMask.from_kv_blocks(
        *blocks([[]], 1), *blocks([[0]], 1), BLOCK_SIZE=4, mask_mod=mod, compute_q_blocks=False
    )
    assert AttnMask.from_block_mask(only_full) == masks.full(4, 4) and not asked


def test_block_masks_of_several_heads() -> None:
    expected = AttnMask.from_mask_mod(window_of, 20, 20, B=2, H=3)
    made = create_block_mask(window_of, 2, 3, 20, 20, "cpu", 4)
    assert AttnMask.from_block_mask(made) == expected
    # Tables of all blocks, the same for all, and a function that differs.
    table = blocks([[0]], 1)
    common = BlockMask.from_kv_blocks(
        *table, BLOCK_SIZE=32, mask_mod=window_of, seq_lengths=(20, 20), compute_q_blocks=False
    )
    assert AttnMask.from_block_mask(common, B=2, H=3) == expected
    assert AttnMask.from_block_mask(common) == expected[0][0]
    plain = BlockMask.from_kv_blocks(*(x[0, 0] for x in table), BLOCK_SIZE=4, compute_q_blocks=False)
    assert AttnMask.from_block_mask(plain) == masks.full(4, 4), "tables of no batch"
    with pytest.raises(ValueError, match="B must be 2, as the BlockMask has it, got 3"):
        AttnMask.from_block_mask(made, B=3)


def test_block_masks_that_were_cut_out() -> None:
    whole = create_block_mask(window_of_head, 2, 3, 20, 20, "cpu", 4)
    part = whole[0:1, 1:2]
    with pytest.raises(RuntimeError, match="mask_mod"):
        AttnMask.from_block_mask(part)
    part.mask_mod = lambda b, h, q, k: window_of_head(b, h + 1, q, k)
    assert AttnMask.from_block_mask(part) == window(1)
    rows = whole[:1, :1, torch.tensor([3, 1])]
    with pytest.raises(ValueError, match="has 2 rows of blocks, but 20 queries are 5 of 4; a BlockMask of which rows"):
        AttnMask.from_block_mask(rows)
    first_row = torch.tensor([12, 4])
    rows.mask_mod = lambda b, h, q, k: window_of_head(b, h, first_row[q // 4] + q % 4, k)
    rows.seq_lengths = (8, 20)
    dense_rows = window(9).to_dense()
    assert torch.equal(AttnMask.from_block_mask(rows).to_dense(), torch.cat([dense_rows[12:16], dense_rows[4:8]]))


def test_c27_masks_of_a_million_tokens(address_space_limit) -> None:
    total, block = 1 << 20, 4096
    weights = torch.arange(16, 48).cumsum(0)
    ends = weights * total // weights[-1]
    document = torch.searchsorted(ends, torch.arange(total), right=True)

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    AttnMask.from_mask_mod(causal, 8, 8).to_block_mask(4)
    with address_space_limit(200 << 20):
        made = AttnMask.from_mask_mod(mod, total, total)
        block_mask = made.to_block_mask(block)
        back = AttnMask.from_block_mask(block_mask)
    assert made == back == masks.document([0, *ends.tolist()]) and len(made.bands) == 32
    assert int(block_mask.kv_num_blocks.sum()) < 4 * total // block


# --- sets ---


def test_masks_combine() -> None:
    a, b, c = masks.causal(16), masks.document([0, 4, 7, 16], causal=False), masks.sliding_window(16, 16, (3, 1))
    assert masks.or_masks(a) == masks.and_masks(a) == a
    assert masks.or_masks(a, b, c) == a | b | c and masks.and_masks(a, b, c) == a & b & c
    assert ~a == masks.full(16, 16) - a and ~~c == c and not (~c & c).area
    assert (~masks.full(3, 0)).shape == (3, 0)
    both = AttnMask.from_mask_mod(
        flex.and_masks(a.to_mask_mod(), flex.or_masks(b.to_mask_mod(), c.to_mask_mod())), 16, 16
    )
    assert both == masks.and_masks(a, masks.or_masks(b, c))


REFUSALS: list[tuple[str, type[Exception], str, Callable[[], object]]] = [
    ("no function", TypeError, "mask_mod must be a function .* got Tensor",
     lambda: AttnMask.from_mask_mod(MATRIX, N, N)),
    ("length", ValueError, "q_len must be 0 or more, got -1", lambda: AttnMask.from_mask_mod(causal, -1, 4)),
    ("number", ValueError, "H must be positive, got 0", lambda: AttnMask.from_mask_mod(causal, 4, 4, H=0)),
    ("not boolean", TypeError, "mask_mod must return a boolean tensor, got torch.int64",
     lambda: AttnMask.from_mask_mod(lambda b, h, q, k: q - k, 4, 4)),
    ("index beside a slice", Exception, "pass B=|vmap over calling .item",  # torch 2.11 does not take it
     lambda: AttnMask.from_mask_mod(lambda b, h, q, k: WINDOWS[b, :].sum() > k, 4, 4)),
    ("no block mask", TypeError, "block_mask must be a torch BlockMask, got AttnMask",
     lambda: AttnMask.from_block_mask(masks.causal(4))),
    ("no such block", ValueError, r"kv_indices must be in \[0, 2\) for 7 keys in blocks of 4, got 2",
     lambda: AttnMask.from_block_mask(BlockMask.from_kv_blocks(
         *blocks([[0, 2]], 3), BLOCK_SIZE=4, seq_lengths=(4, 7), compute_q_blocks=False))),
    ("no masks", ValueError, "need one mask or more", masks.or_masks),
    ("shapes", ValueError, r"same shape to combine, got \(3, 3\) and \(4, 4\)",
     lambda: masks.and_masks(masks.causal(3), masks.causal(4))),
    ("functions", TypeError, "become masks with AttnMask.from_mask_mod", lambda: masks.or_masks(causal)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "call"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=text):
        call()
