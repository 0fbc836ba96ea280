"""Sixty mask functions of the kinds that people write for FlexAttention, with lengths to try each at.

A builder gets the lengths and returns `mask_mod(b, h, q_idx, kv_idx)` with its captured tensors. `large` holds the
lengths of long sequences at which the function makes sense, a million tokens where it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Builder = Callable[[int, int], MaskMod]
MILLION = 1 << 20
SQUARE = ((1, 1), (61, 61), (200, 200), (512, 512))
CROSS = ((1, 77), (61, 40), (129, 333))


@dataclass(frozen=True)
class MaskFunction:
    """A named builder; `small` and `large` are pairs (queries, keys)."""

    name: str
    build: Builder
    small: tuple[tuple[int, int], ...]
    large: tuple[int, int] | None


FUNCTIONS: dict[str, MaskFunction] = {}


def mask_function(
    small: tuple[tuple[int, int], ...] = SQUARE, large: tuple[int, int] | None = (MILLION, MILLION)
) -> Callable[[Builder], Builder]:
    def register(build: Builder) -> Builder:
        FUNCTIONS[build.__name__] = MaskFunction(build.__name__, build, small, large)
        return build

    return register


# --- captured tensors ---


@cache
def cu_seqlens(total: int, seed: int = 0) -> Tensor:
    """Ragged documents, 829 of them in a million tokens, a few of them without tokens."""
    documents = min(829, 3 + total // 40)
    cuts = np.sort(np.random.default_rng([total, seed]).integers(0, total + 1, documents - 1))
    return torch.tensor([0, *cuts.tolist(), total])


@cache
def document_ids(total: int, seed: int = 0) -> Tensor:
    cu = cu_seqlens(total, seed)
    return torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())


@cache
def random_ids(total: int, kinds: int, run: int, seed: int = 0) -> Tensor:
    """Stretches of `run` tokens, each of a random kind."""
    ids = np.random.default_rng([total, kinds, run, seed]).integers(0, kinds, -(-total // run))
    return torch.from_numpy(np.repeat(ids, run)[:total].astype(np.int32))


def some_tokens(total: int, count: int, seed: int = 0) -> Tensor:
    """True at `count` random tokens."""
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.from_numpy(np.random.default_rng([total, count, seed]).integers(0, total, count))] = True
    return chosen


def side(total: int) -> int:
    """The width of an image of `total` tokens, whose last row may be cut."""
    return max(2, int(total**0.5) - 3 if total < MILLION else 1024)


# --- causal and windows ---


def causal_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def window_mod(left: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= left


@mask_function(SQUARE + CROSS)
def full(sq: int, sk: int) -> MaskMod:
    return noop_mask


@mask_function(SQUARE + CROSS)
def causal(sq: int, sk: int) -> MaskMod:
    return causal_mod


@mask_function(CROSS, (MILLION // 4, MILLION))
def causal_bottom_right(sq: int, sk: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + (sk - sq)


@mask_function(SQUARE + CROSS)
def sliding_window(sq: int, sk: int) -> MaskMod:
    return and_masks(causal_mod, window_mod(sq // 5))


@mask_function()
def chained_comparisons(sq: int, sk: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        seen = distance >= 0
        seen &= distance < 33
        seen |= kv_idx == 0
        return seen

    return mask_mod


@mask_function()
def sinks_and_window(sq: int, sk: int) -> MaskMod:
    return and_masks(causal_mod, or_masks(window_mod(sq // 8), lambda b, h, q_idx, kv_idx: kv_idx < 4))


@mask_function()
def window_of_each_head(sq: int, sk: int) -> MaskMod:
    windows = torch.tensor([sq, 64, 16, 4])

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < windows[h])

    return mask_mod


@mask_function()
def local_and_global_heads(sq: int, sk: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        local = q_idx // 16 == kv_idx // 16
        return torch.where(h % 2 == 0, torch.ones_like(local), local) & (q_idx >= kv_idx)

    return mask_mod


@mask_function(((1, 77), (5, 200), (16, 512)), (64, MILLION))
def decoding_with_a_cache(sq: int, sk: int) -> MaskMod:
    cached = torch.tensor([sk - sq, (sk - sq) // 2], dtype=torch.int32)
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + cached[b]


# --- prefixes and padding ---


@mask_function()
def prefix_lm(sq: int, sk: int) -> MaskMod:
    return or_masks(causal_mod, lambda b, h, q_idx, kv_idx: kv_idx < sk // 3)


@mask_function()
def prefix_of_each_batch(sq: int, sk: int) -> MaskMod:
    prefix = torch.tensor([sk // 2, 0, sk])
    return lambda b, h, q_idx, kv_idx: torch.logical_or(kv_idx < prefix[b], q_idx.ge(kv_idx))


@mask_function(SQUARE + CROSS)
def padding(sq: int, sk: int) -> MaskMod:
    queries, keys = torch.tensor([sq - sq // 7, sq]), torch.tensor([sk - sk // 3, 1])
    return lambda b, h, q_idx, kv_idx: (q_idx < queries[b]) & (kv_idx < keys[b])


@mask_function()
def left_padding(sq: int, sk: int) -> MaskMod:
    begins = torch.tensor([sk // 4, 0])
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) * (kv_idx >= begins[b])


@mask_function()
def dropped_keys(sq: int, sk: int) -> MaskMod:
    dropped = some_tokens(sk, 1 + sk // 16384)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & torch.logical_not(dropped[kv_idx])


# --- documents ---


@mask_function()
def document(sq: int, sk: int) -> MaskMod:
    ids = document_ids(sq)
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


@mask_function()
def document_causal(sq: int, sk: int) -> MaskMod:
    return and_masks(causal_mod, document(sq, sk))


@mask_function()
def document_window(sq: int, sk: int) -> MaskMod:
    return and_masks(document(sq, sk), causal_mod, window_mod(19))


@mask_function()
def document_batches(sq: int, sk: int) -> MaskMod:
    ids = torch.stack([document_ids(sq, seed) for seed in (1, 2)]).int()
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx <= q_idx)


@mask_function()
def document_padding(sq: int, sk: int) -> MaskMod:
    ids = document_ids(sq).clone()
    ids[sq - sq // 6 :] = -1
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (ids[q_idx] >= 0) & ~(q_idx < kv_idx)


@mask_function((*CROSS, (200, 512)), (MILLION // 2, MILLION))
def document_cross(sq: int, sk: int) -> MaskMod:
    q_ids, k_ids = document_ids(sq, 3), document_ids(sk, 4)
    return lambda b, h, q_idx, kv_idx: q_ids[q_idx].eq(k_ids[kv_idx])


@mask_function()
def documents_with_inner_window(sq: int, sk: int) -> MaskMod:
    """A mask_mod of positions inside the document, carried over to packed documents."""
    ids, begins = document_ids(sq), cu_seqlens(sq)
    inner = and_masks(causal_mod, window_mod(25))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, k = q_idx - begins[ids[q_idx]], kv_idx - begins[ids[kv_idx]]
        return (ids[q_idx] == ids[kv_idx]) & inner(b, h, q, k)

    return mask_mod


@mask_function()
def documents_with_prefixes(sq: int, sk: int) -> MaskMod:
    ids, begins = document_ids(sq), cu_seqlens(sq)
    prefixes = begins.diff() // 3

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        in_prefix = kv_idx - begins[ids[kv_idx]] < prefixes[ids[kv_idx]]
        return (ids[q_idx] == ids[kv_idx]) & (in_prefix | (q_idx >= kv_idx))

    return mask_mod


@mask_function()
def documents_by_search(sq: int, sk: int) -> MaskMod:
    ends = cu_seqlens(sq)[1:]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.searchsorted(ends, q_idx, right=True) == torch.searchsorted(ends, kv_idx, right=True)

    return and_masks(mask_mod, causal_mod)


@mask_function()
def documents_in_pieces(sq: int, sk: int) -> MaskMod:
    """Documents that lie scattered over the sequence."""
    ids = random_ids(sq, 4 + sq // 2048, max(1, sq // 2048))
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


# --- several answers, trees, turns ---


@mask_function()
def shared_prefix(sq: int, sk: int) -> MaskMod:
    prefix = sq // 4
    ids = document_ids(sq)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | ((ids[q_idx] == ids[kv_idx]) & (kv_idx >= prefix)))

    return mask_mod


@mask_function()
def share_question(sq: int, sk: int) -> MaskMod:
    """Groups of one question and its answers, which do not see each other: rollouts of reinforcement learning."""
    ids = document_ids(sq)
    group, answer = ids // 5, ids % 5

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = group[q_idx] == group[kv_idx]
        return same & ((answer[kv_idx] == 0) | (answer[q_idx] == answer[kv_idx])) & (q_idx >= kv_idx)

    return mask_mod


@cache
def subtree_ends(total: int) -> Tensor:
    """Where the subtree of every node ends, in depth-first order, for a random tree of stretches of nodes."""
    rng = np.random.default_rng(total)
    run = max(1, total // 600)
    ends: list[int] = [0] * -(-total // run)
    stack: list[int] = []
    for node in range(len(ends)):
        while stack and rng.random() < 0.45:
            ends[stack.pop()] = node
        stack.append(node)
    for node in stack:
        ends[node] = len(ends)
    return torch.from_numpy(np.repeat(np.array(ends) * run, run)[:total])


@mask_function()
def tree(sq: int, sk: int) -> MaskMod:
    ends = subtree_ends(sq)
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx < ends[kv_idx])


@mask_function(((7, 77), (40, 200), (64, 512)), (64, MILLION))
def tree_of_drafts_behind_a_cache(sq: int, sk: int) -> MaskMod:
    """Speculative decoding: all drafts see the cache, and their ancestors."""
    parents = [int(np.random.default_rng(sq).integers(0, max(i, 1))) for i in range(sq)]
    ancestors = torch.eye(sq, dtype=torch.bool)
    for i, parent in enumerate(parents[1:], 1):
        ancestors[i] |= ancestors[parent]
    cached = sk - sq

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < cached) | ancestors[q_idx, (kv_idx - cached).clamp(min=0)]

    return mask_mod


@mask_function()
def hidden_thoughts(sq: int, sk: int) -> MaskMod:
    """Turns of a dialogue; the thoughts of earlier turns are not seen."""
    turn = document_ids(sq)
    thought = random_ids(sq, 2, 1 + sq // 300).bool()
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ~(thought[kv_idx] & (turn[q_idx] > turn[kv_idx]))


# --- blocks and chunks ---


@mask_function(SQUARE + CROSS)
def block_causal(sq: int, sk: int) -> MaskMod:
    size = 128 if sq == MILLION else 13
    return lambda b, h, q_idx, kv_idx: q_idx // size >= kv_idx // size


@mask_function()
def chunks_with_context(sq: int, sk: int) -> MaskMod:
    """Streaming speech: a chunk, the two before it and a little of the next."""
    size = 40

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        begin = torch.div(q_idx, size, rounding_mode="floor") * size
        return (kv_idx >= torch.clamp(begin - 2 * size, min=0)) & (kv_idx < torch.minimum(begin + size + 3, begin + sk))

    return mask_mod


@mask_function()
def chunk_summaries(sq: int, sk: int) -> MaskMod:
    """Landmarks: the last token of a chunk is seen by all later tokens, the others by their chunk."""
    size = 4096 if sq == MILLION else 16
    return lambda b, h, q_idx, kv_idx: (
        (q_idx >= kv_idx) & ((q_idx // size == kv_idx // size) | (kv_idx % size == size - 1))
    )


@mask_function(((64, 16), (200, 50), (512, 32)), (MILLION, MILLION // 16))
def compressed_keys(sq: int, sk: int) -> MaskMod:
    """A key stands for a block of tokens and is seen once the block is complete."""
    size = -(-sq // sk)
    return lambda b, h, q_idx, kv_idx: (kv_idx + 1) * size <= q_idx + 1


@mask_function(((61, 30), (512, 256)), (8192, 4096))
def convolution_of_stride_two(sq: int, sk: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx - 2 * kv_idx).abs() <= 3


@mask_function(((61, 61), (200, 333), (512, 512)))
def block_sparse(sq: int, sk: int) -> MaskMod:
    size = 8192 if sq == MILLION else 16
    rng = np.random.default_rng(sq)
    layout = torch.from_numpy(rng.random((-(-sq // size), -(-sk // size))) < 0.3)
    return lambda b, h, q_idx, kv_idx: layout[q_idx // size, kv_idx // size]


@mask_function()
def big_bird(sq: int, sk: int) -> MaskMod:
    """Global blocks, neighbouring blocks and random blocks."""
    size = 8192 if sq == MILLION else 16
    random_blocks = block_sparse(sq, sk)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        i, j = q_idx // size, kv_idx // size
        return (i == 0) | (j == 0) | ((i - j).abs() <= 1) | random_blocks(b, h, q_idx, kv_idx)

    return mask_mod


# --- regular steps ---


@mask_function()
def dilated_window(sq: int, sk: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ((q_idx - kv_idx) % 4 == 0) & (q_idx >= kv_idx) & (q_idx - kv_idx < 64)

    return mask_mod


@mask_function()
def strided(sq: int, sk: int) -> MaskMod:
    """The strided pattern of sparse transformers."""
    stride = 8192 if sq == MILLION else 16
    return lambda b, h, q_idx, kv_idx: (
        (q_idx >= kv_idx) & ((q_idx - kv_idx < stride) | ((q_idx - kv_idx) % stride == 0))
    )


@mask_function()
def powers_of_two(sq: int, sk: int) -> MaskMod:
    """Distances 0, 1, 2, 4, 8, ..."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance & (distance - 1)) == 0)

    return mask_mod


@mask_function(large=(16384, 16384))
def dilated_segments(sq: int, sk: int) -> MaskMod:
    """Segments in which every fourth token sees every fourth."""
    size, rate = 64, 4
    return lambda b, h, q_idx, kv_idx: (
        (q_idx // size == kv_idx // size) & (q_idx % rate == kv_idx % rate) & (q_idx >= kv_idx)
    )


@mask_function(large=(2048, 2048))
def checkerboard(sq: int, sk: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0


# --- images and video ---


@mask_function(SQUARE[1:])
def neighbourhood_1d(sq: int, sk: int) -> MaskMod:
    """Every query has as many neighbours, at the edges too."""
    radius = 5
    return lambda b, h, q_idx, kv_idx: (q_idx.clamp(radius, sq - 1 - radius) - kv_idx).abs() <= radius


@mask_function()
def neighbourhood_2d(sq: int, sk: int) -> MaskMod:
    width, radius = side(sq), 3

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        across = (q_idx % width - kv_idx % width).abs() <= radius
        return across & ((q_idx // width - kv_idx // width).abs() <= radius)

    return mask_mod


@mask_function(large=(65536, 65536))
def neighbourhood_3d(sq: int, sk: int) -> MaskMod:
    n = 5 if sq < 4096 else 32

    def position(i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return i // (n * n), i // n % n, i % n

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        (t0, y0, x0), (t1, y1, x1) = position(q_idx), position(kv_idx)
        near = ((x0 - x1).abs() <= 2) & ((y0 - y1).abs() <= 2)
        return near & (t0 >= t1) & (t0 - t1 <= 1)

    return mask_mod


@mask_function(large=(65536, 65536))
def disc(sq: int, sk: int) -> MaskMod:
    width = side(sq)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        across, down = q_idx % width - kv_idx % width, q_idx // width - kv_idx // width
        return across * across + down * down <= 10

    return mask_mod


@mask_function()
def shifted_windows(sq: int, sk: int) -> MaskMod:
    """Square windows of an image, shifted by half a window."""
    width, size = side(sq), 6 if sq < MILLION else 64

    def window(i: Tensor) -> Tensor:
        return (i // width + size // 2) // size * 1000 + (i % width + size // 2) // size

    return lambda b, h, q_idx, kv_idx: window(q_idx) == window(kv_idx)


@mask_function(large=(65536, 65536))
def axial(sq: int, sk: int) -> MaskMod:
    """The row and the column of an image."""
    width = side(sq)
    return lambda b, h, q_idx, kv_idx: (q_idx // width == kv_idx // width) | ((q_idx - kv_idx) % width == 0)


@mask_function()
def packed_video(sq: int, sk: int) -> MaskMod:
    """Patch and pack: videos of different frame sizes in one sequence, block-causal by frame."""
    video, begins = document_ids(sq), cu_seqlens(sq)
    frame_sizes = 3 + torch.arange(len(begins)) % 4 if sq < MILLION else 64 + torch.arange(len(begins)) % 50

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        v, w = video[q_idx], video[kv_idx]
        return (v == w) & ((q_idx - begins[v]) // frame_sizes[v] >= (kv_idx - begins[w]) // frame_sizes[w])

    return mask_mod


@mask_function()
def video_with_limited_memory(sq: int, sk: int) -> MaskMod:
    """A frame sees the first frame, itself and the three before."""
    size = 20 if sq < MILLION else 1560

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        back = q_idx // size - kv_idx // size
        return ((back >= 0) & (back <= 3)) | (kv_idx < size)

    return mask_mod


@mask_function(((60, 60), (200, 200), (512, 512)))
def block_diffusion(sq: int, sk: int) -> MaskMod:
    """Noised tokens, then the same tokens clean: blocks of noise see themselves and earlier clean blocks."""
    half, size = sq // 2, 8 if sq < MILLION else 256

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_clean, k_clean = q_idx >= half, kv_idx >= half
        i = torch.where(q_clean, q_idx - half, q_idx) // size
        j = torch.where(k_clean, kv_idx - half, kv_idx) // size
        own = (i == j) & (q_clean == k_clean)
        earlier = (i > j) & k_clean & ~q_clean
        return own | earlier | ((i >= j) & k_clean & q_clean)

    return mask_mod


@mask_function(((61, 40), (200, 96), (512, 512)), (MILLION, 65536))
def images_of_the_text_before(sq: int, sk: int) -> MaskMod:
    """Cross-attention from text to the last image before it; text before the first image sees none."""
    size = 8 if sk < 4096 else 256
    media = document_ids(sq) % (sk // size + 1)
    return lambda b, h, q_idx, kv_idx: (media[q_idx] == kv_idx // size + 1) & (media[q_idx] > 0)


@mask_function()
def images_in_text(sq: int, sk: int) -> MaskMod:
    """Text is causal; the tokens of an image all see each other."""
    image = document_ids(sq) * (document_ids(sq) % 3 == 0)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = (image[q_idx] == image[kv_idx]) & (image[q_idx] != 0)
        return torch.where(same, True, kv_idx <= q_idx)

    return mask_mod


@mask_function()
def spans_of_other_modality(sq: int, sk: int) -> MaskMod:
    """Causal, and bidirectional in listed spans."""
    spans = [(sq // 8, sq // 6), (sq // 3, sq // 2), (sq - sq // 9, sq)]

    def span(first: int, last: int) -> MaskMod:
        return lambda b, h, q_idx, kv_idx: (q_idx >= first) & (q_idx < last) & (kv_idx >= first) & (kv_idx < last)

    return or_masks(causal_mod, *(span(*s) for s in spans))


@mask_function()
def modalities_apart(sq: int, sk: int) -> MaskMod:
    """Text sees all that came before, sound and images only their own kind."""
    kind = random_ids(sq, 3, 1 + sq // 200)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((kind[q_idx] == 0) | ~(kind[q_idx] != kind[kv_idx]))

    return mask_mod


# --- global tokens, other orders ---


@mask_function()
def global_and_local(sq: int, sk: int) -> MaskMod:
    seen_by_all = some_tokens(sq, 1 + sq // 16384)
    return lambda b, h, q_idx, kv_idx: (
        (torch.abs(q_idx - kv_idx) <= sq // 10) | seen_by_all[q_idx] | seen_by_all[kv_idx]
    )


@mask_function()
def balanced_chunks(sq: int, sk: int) -> MaskMod:
    """Causal for tokens in another order: the first chunk, the last, the second, the last but one, ..."""
    chunk = max(1, sq // 16)
    order = torch.arange(sq).split(chunk)
    pairs = [piece for i in range(-(-len(order) // 2)) for piece in (order[i], order[-1 - i])]
    position = torch.cat(pairs[: len(order)])
    return lambda b, h, q_idx, kv_idx: position[q_idx] >= position[kv_idx]


@mask_function(((5, 77), (40, 200), (64, 512)), (64, MILLION))
def paged_cache(sq: int, sk: int) -> MaskMod:
    """Keys lie in pages in any order; a page of another sequence is -1."""
    size = 16 if sk < MILLION else 4096
    pages = torch.from_numpy(np.random.default_rng(sk).permutation(-(-sk // size)))
    pages[pages % 5 == 4] = -1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        page = pages[kv_idx // size]
        return (page >= 0) & (page * size + kv_idx % size <= q_idx + (sk - sq))

    return mask_mod


@mask_function()
def events_in_time(sq: int, sk: int) -> MaskMod:
    """Events see those before them; times are floating point numbers, many of them equal."""
    times = document_ids(sq).double() * 0.1
    return lambda b, h, q_idx, kv_idx: times[q_idx] >= times[kv_idx]


@mask_function()
def products(sq: int, sk: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: (q_idx + 1) * (kv_idx + 1) <= sq


@mask_function()
def scrambled(sq: int, sk: int) -> MaskMod:
    """Pseudo-random pairs."""
    return lambda b, h, q_idx, kv_idx: (q_idx * 2654435761 ^ kv_idx * 40503) % 7 == 0


def dense(mask_mod: MaskMod, sq: int, sk: int, b: int = 0, h: int = 0) -> Tensor:
    """The pairs, evaluated one row at a time."""
    return visible(mask_mod, torch.arange(sq).repeat_interleave(sk), torch.arange(sk).repeat(sq), b, h).view(sq, sk)


def visible(mask_mod: MaskMod, q: Tensor, k: Tensor, b: int = 0, h: int = 0) -> Tensor:
    """Whether the pairs (q[i], k[i]) are visible, computed by FlexAttention's rules for one pair."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        mapped: Any = torch.vmap(mask_mod, in_dims=(None, None, 0, 0))
        return mapped(torch.tensor(b), torch.tensor(h), q, k)
