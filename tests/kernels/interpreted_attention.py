"""Attention in Triton on the CPU, in Triton's interpreter, against float64, by the rule of torch_magi.testing.

`test_triton_attention.py` runs this file, with TRITON_INTERPRET=1: kernels are interpreted or compiled for good when
they are first imported.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import torch_magi as magi
from torch_magi import _planner, masks
from torch_magi.kernels import tiles, triton_attention, work_lists
from torch_magi.kernels.tiles import Tile
from torch_magi.masks import AttnMask
from torch_magi.ops import flex_attn_fwd
from torch_magi.testing import check_attention, count_probe, flex_flash_runner, named_masks, random_inputs, random_mask

NAMED = named_masks()
DOCUMENTS = masks.document([0, 10, 33, 50], total=54)
KERNELS = ("FORWARD", "BACKWARD_QUERIES", "BACKWARD_KEYS")
run = flex_flash_runner(kernel_options={"backend": "triton"})


@pytest.fixture(autouse=True, scope="module")
def repaired_interpreter() -> Iterator[None]:
    """Bounds of loops are arrays of one element, which NumPy 2.4 makes no int of; bfloat16 is kept as uint16."""
    patch, multiply = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def multiply_wide(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, *wide, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
        patched.setattr(interpreter.InterpreterBuilder, "create_dot", multiply_wide)
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles for small masks, of different shapes."""
    for name, tile in zip(KERNELS, (Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)), strict=True):
        for field in ("narrow", "wide"):
            monkeypatch.setattr(tiles, name, getattr(tiles, name)._replace(**{field: {256: tile}}))


def check(
    mask: AttnMask,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> None:
    """Compare results and gradients; rows and keys that no pair uses hold NaN, in dout too."""
    x = random_inputs(mask, *heads, *dims, dtype=dtype, seed=seed, nan_in_unused=True)
    check_attention(run, x.query, x.key, x.value, mask, dout=x.dout, dlse=x.dlse, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", sorted(NAMED))
class TestFloat32:
    def test_named_masks(self, name: str) -> None:
        check(NAMED[name], dims=(8, 6))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", sorted(NAMED))
class TestFloat16:
    def test_named_masks(self, name: str) -> None:
        check(NAMED[name], (2, 1), (8, 6), torch.float16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", sorted(NAMED))
class TestCounts:
    def test_named_masks(self, name: str) -> None:
        count_probe(run, NAMED[name])


@pytest.mark.usefixtures("small_tiles")
class TestMasks:
    @pytest.mark.parametrize("mask_type", ["full", "causal", "inv_causal", "bi_causal"])
    @pytest.mark.parametrize("shape", [(37, 37), (20, 45), (45, 20)], ids=str)
    def test_slice_types(self, mask_type: str, shape: tuple[int, int]) -> None:
        """One slice of each type, off the grid of tiles, beside another that overlaps it."""
        (rows, keys), other = shape, [(5, 7), (3, 19)]
        mask = AttnMask.from_slices([(2, rows), other[0]], [(1, keys), other[1]], [mask_type, "full"], rows, keys)
        check(mask, (2, 1), (8, 8))

    def test_random_masks(self, seed: int) -> None:
        rng = random.Random(seed)
        for i in range(10):
            sq, sk, heads = rng.randint(1, 90), rng.randint(1, 90), rng.choice([(4, 1), (2, 2), (6, 2)])
            print(f"random_mask({seed + i}, {sq}, {sk}), heads {heads}")
            mask = random_mask(seed + i, sq, sk)
            check(mask, heads, (8, 8), torch.float16, seed + i)
            count_probe(run, mask)

    def test_no_rows(self) -> None:
        q = torch.randn(20, 2, 8, requires_grad=True)
        none = torch.zeros(0, 2, 8, requires_grad=True)
        options: Any = {"kernel_options": {"backend": "triton"}}
        magi.flex_flash_attn(none, q, q, masks.full(0, 20), **options).sum().backward()
        magi.flex_flash_attn(q, none, none, masks.full(20, 0), **options).sum().backward()
        assert q.grad is not None and (q.grad == 0).all()


class TestHeads:
    @pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 1), (16, 1), (12, 2)], ids=str)
    def test_grouped_heads(self, heads: tuple[int, int], small_tiles: None) -> None:
        check(DOCUMENTS, heads)

    @pytest.mark.parametrize("dims", [(1, 1), (20, 12), (40, 24), (80, 128), (192, 128), (64, 256)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_head_dims(self, dims: tuple[int, int], dtype: torch.dtype, small_tiles: None) -> None:
        check(DOCUMENTS, (2, 1), dims, dtype)


class TestTiles:
    @pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_tiles_as_they_are(self, dims: tuple[int, int], dtype: torch.dtype) -> None:
        check(masks.document([0, 10, 69, 80], total=83), (2, 1), dims, dtype)

    def test_bfloat16(self, small_tiles: None) -> None:
        for name in ("causal", "overlapping_slices", "from_document_ids_padding"):
            check(NAMED[name], (2, 1), (16, 16), torch.bfloat16)
        check(DOCUMENTS, (8, 2), (64, 64), torch.bfloat16, softcap=5.0, sink=torch.randn(1, 8))


@pytest.mark.usefixtures("small_tiles")
class TestOptions:
    @pytest.mark.parametrize("softcap", [0.5, 50.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_softcap(self, dtype: torch.dtype, softcap: float) -> None:
        check(DOCUMENTS, dtype=dtype, softcap=softcap)

    @pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 4.0])
    def test_scale(self, scale: float) -> None:
        check(NAMED["overlapping_slices"], scale=scale)

    @pytest.mark.parametrize("tokens", [1, 3])
    @pytest.mark.parametrize("per_row", [False, True])
    def test_sink(self, tokens: int, per_row: bool) -> None:
        rows = (54,) if per_row else ()
        check(DOCUMENTS, sink=torch.randn(*rows, tokens, 4), softcap=float(tokens))

    def test_strides(self) -> None:
        """Views as they come from a fused projection, from [heads, rows, dim], with gaps, expanded."""
        plan = magi.make_attn_plan(DOCUMENTS, 4, 2, 16, dtype=torch.float32)
        fused, padded = torch.randn(54, 8, 16), torch.randn(54, 4, 20)
        turned = torch.randn(16, 4, 54).permute(2, 1, 0)
        views = [
            (*fused.split((4, 2, 2), 1), padded[..., 2:18]),
            (torch.randn(4, 54, 16).transpose(0, 1), *(torch.randn(54, 1, 16).expand(54, 2, 16),) * 2, turned),
            (turned, turned[:, 1:3], padded[:, ::2, 3:19], torch.ones(1, 1, 1).expand(54, 4, 16)),
        ]

        def results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = magi.flex_flash_attn(*leaves, plan, kernel_options={"backend": "triton"})
            return (out, *torch.autograd.grad(out, leaves, dout))

        for tensors in views:
            expected = results(*(x.contiguous() for x in tensors))
            assert all(torch.equal(a, b) for a, b in zip(results(*tensors), expected, strict=True))

    def test_other_order_of_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same bits, whichever program runs first."""
        x = random_inputs(DOCUMENTS, 8, 2, 16, dtype=torch.float32, seed=0)
        options = {"dout": x.dout, "dlse": x.dlse, "sink": torch.randn(1, 8)}
        expected = run(x.query, x.key, x.value, DOCUMENTS, **options)
        make, moved = _planner.layer_runs, []

        def shuffled(*plan: np.ndarray) -> tuple[np.ndarray, ...]:
            items, runs, bands = make(*plan)
            order = np.random.permutation(len(items))
            moved.append((order != np.arange(len(items))).any())
            return items[order], runs, bands

        monkeypatch.setattr(_planner, "layer_runs", shuffled)
        for _ in range(2):
            found = run(x.query, x.key, x.value, DOCUMENTS, **options)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert sum(moved) >= 2

    def test_refusals(self) -> None:
        q = torch.zeros(8, 2, 16)
        options: Any = {"backend": "triton"}
        with pytest.raises(NotImplementedError, match="got backend 'triton', float64 tensors on cpu"):
            magi.flex_flash_attn(q.double(), q.double(), q.double(), masks.causal(8), kernel_options=options)
        wide = torch.zeros(8, 2, 257)
        with pytest.raises(NotImplementedError, match=r"head dims \(257, 257\)"):
            magi.flex_flash_attn(wide, wide, wide, masks.causal(8), kernel_options=options)
        with pytest.raises(NotImplementedError, match="sm_margin must be 0 for the kernels in Triton"):
            magi.flex_flash_attn(q, q, q, masks.causal(8), kernel_options={**options, "sm_margin": 1})
        sinks = ((torch.zeros(1, 2).double(), "torch.float32, got torch.float64"), (torch.zeros(1, 3), r"got \[1, 3\]"))
        for sink, text in (*sinks, (torch.zeros(7, 1, 2), r"\[n, 2\] or \[8, n, 2\], got \[7, 1, 2\]")):
            with pytest.raises((TypeError, ValueError), match=text):
                magi.flex_flash_attn(q, q, q, masks.causal(8), sink=sink, kernel_options=options)


def attend(x: Any, mask: AttnMask, first: int, last: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Attend to some of the keys; return out and lse."""
    part = mask.clip((0, mask.shape[0]), (first, last))
    plan = magi.make_attn_plan(part, *(t.shape[1] for t in (x.query, x.key)), x.query.shape[2], dtype=x.query.dtype)
    keys = slice(first, last)
    out, lse, _ = flex_attn_fwd(
        x.query, x.key[keys], x.value[keys], plan, scale=0.3, out_float32=True, backend="triton", **options
    )
    return out, lse


@pytest.mark.usefixtures("small_tiles")
class TestParts:
    def test_few_rows_with_many_keys(self) -> None:
        """Rows whose keys several items share, with everything that joins at a row's end."""
        for mask in (masks.causal(5, 200), masks.causal(3, 150) | masks.sliding_window(3, 150, (0, 60))):
            part = magi.make_attn_plan(mask, 4, 1, 16, dtype=torch.float32).stages[0]
            assert work_lists.work_list(part, "q", 4, 16, torch.device("cpu"), 1).num_slots > 0
            check(mask, (4, 1))
            check(mask, (4, 1), (20, 12), torch.float16, softcap=3.0, sink=torch.randn(mask.shape[0], 2, 4))
            count_probe(run, mask, 4, 1)

    def test_few_keys_with_many_rows(self) -> None:
        mask = masks.chunk_causal(120, 15, 4)
        part = magi.make_attn_plan(mask, 4, 1, 16, dtype=torch.float32).stages[0]
        assert work_lists.work_list(part, "k", 32, 4, torch.device("cpu"), 1).num_slots > 0
        check(mask, (4, 1), (20, 12))
        check(mask, (4, 1), dtype=torch.float16, softcap=3.0)

    @pytest.mark.parametrize("shape", [(30, 90), (3, 200)], ids=str)
    def test_merging_with_an_earlier_result(self, shape: tuple[int, int]) -> None:
        """Keys in two calls are keys in one; empty sides leave the other bit for bit."""
        rows, keys = shape
        mask = masks.causal(rows, keys) - AttnMask.from_slices([(1, 2)], [(0, keys)], ["full"], rows, keys)
        x = random_inputs(mask, 4, 2, 16, dtype=torch.float32, seed=0)
        sink = torch.randn(1, 4)
        whole, before = attend(x, mask, 0, keys, sink=sink), attend(x, mask, 0, 50, sink=sink)
        found = attend(x, mask, 50, keys, out_before=before[0], lse_before=before[1])
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
        alone = attend(x, mask, 50, keys)
        for out, lse in (
            (torch.full_like(whole[0], torch.nan), torch.full_like(whole[1], -torch.inf)),
            (torch.zeros_like(whole[0]), torch.full_like(whole[1], torch.inf)),
        ):
            found = attend(x, mask, 50, keys, out_before=out, lse_before=lse)
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
        found = attend(x, mask - masks.full(rows, keys), 0, 5, out_before=before[0], lse_before=before[1])
        assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))

    def test_gradients_of_stages_add_up(self) -> None:
        """Keys in two calls, dq of the first handed to the second; some rows see only keys of the second."""
        mask = masks.causal(30, 90) - AttnMask.from_slices([(4, 9)], [(0, 50)], ["full"], 30, 90)
        x = random_inputs(mask, 4, 2, 16, dtype=torch.float32, seed=0)
        sink = torch.randn(1, 4)
        out, lse = attend(x, mask, 0, 90, sink=sink)

        def gradients(first: int, last: int, before: Tensor | None, sink: Tensor | None) -> tuple[Tensor, ...]:
            plan = magi.make_attn_plan(mask.clip((0, 30), (first, last)), 4, 2, 16, dtype=torch.float32)
            k, v = x.key[first:last], x.value[first:last]
            found: tuple[Tensor, ...] = torch.ops.torch_magi.flex_attn_bwd(
                x.dout, x.dlse, x.query, k, v, out, lse, before, plan, 0, sink, 0.3, 0.0, True, True, "triton", 0
            )
            return found

        whole = gradients(0, 90, None, sink)
        one = gradients(0, 50, None, sink)
        two = gradients(50, 90, one[0], None)
        added = (two[0], torch.cat([one[1], two[1]]), torch.cat([one[2], two[2]]), one[3])
        torch.testing.assert_close(added, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
class TestOperators:
    def test_kernels_are_interpreted(self) -> None:
        assert triton_attention.INTERPRETED

    def test_opcheck(self) -> None:
        plan = magi.make_attn_plan(masks.causal(20), 2, 1, 16, dtype=torch.float32)
        x = random_inputs(masks.causal(20), 2, 1, 16, dtype=torch.float32, seed=0)
        q, k, v = (t.detach().requires_grad_() for t in (x.query, x.key, x.value))
        sink = torch.zeros(1, 2, requires_grad=True)
        rest = (plan, 0, sink, None, None, 0.1, 0.0, False, False, False, "triton", 0)
        torch.library.opcheck(torch.ops.torch_magi.flex_attn_fwd.default, (q, k, v, *rest))
