"""Time of attention on a GPU, with peers and ceilings of the same run.

    python benchmarks/flex_attn.py                                  # all masks at 8192 and 32768 tokens
    python benchmarks/flex_attn.py --masks causal --tokens 8192 --peers cudnn --json FILE
    python benchmarks/flex_attn.py --backward

TFLOP/s: 4 * visible pairs * query heads * head_dim floating point operations, 2.5 times that backward, divided by
the median time.
Candidates run in shuffled turns, each call after 1 ms of other work with L2 overwritten. The card is power
limited: compare within a row, by ratio to the matrix product of that row.

fa4 and flex_flash need flash-attn-4. A peer that is not there, does not take a mask, or whose output is not
torch_magi's is left out, with a line that says why.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import torch_magi as magi
from torch_magi.masks import AttnMask
from torch_magi.testing import YARDSTICK_MASKS
from torch_magi.testing.cases import yardstick_documents

GPU = torch.device("cuda")
MATMUL = 8192
FA4_BLOCK = (128, 128)
SAME = 2e-2  # relative Frobenius error
Call = Callable[[], Any]


class Timer:
    """Times calls with events; every call finds L2 overwritten and the device busy."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=GPU)
        self.busy = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16)

    def once(self, call: Call) -> float:
        """Return the milliseconds of one call."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        for _ in range(4):
            self.busy @ self.busy
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def medians(self, calls: dict[str, Call], rounds: int) -> dict[str, float]:
        """Return the median milliseconds of each call, over rounds in shuffled order."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
            self.once(call)
        order = list(calls)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                times[name].append(self.once(calls[name]))
        return {name: statistics.median(found) for name, found in times.items()}


def packed(out: torch.Tensor) -> torch.Tensor:
    """Return [1, heads, tokens, dim] as [tokens, heads, dim], without a copy."""
    return out[0].transpose(0, 1)


def cudnn(mask: AttnMask, name: str, qkv: list[torch.Tensor]) -> Call:
    """Return a call of cuDNN through scaled_dot_product_attention."""
    if name not in ("full", "causal"):
        raise NotImplementedError("takes the masks full and causal only")
    q, k, v = (x.transpose(0, 1)[None] for x in qkv)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return packed(scaled_dot_product_attention(q, k, v, is_causal=name == "causal", enable_gqa=True))

    return call


def flex(mask: AttnMask, name: str, qkv: list[torch.Tensor], kernel_options: dict[str, Any] | None = None) -> Call:
    """Return a call of compiled flex_attention, with Triton kernels unless the options say otherwise."""
    q, k, v = (x.transpose(0, 1)[None] for x in qkv)
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = mask.to_block_mask(device=GPU)
    return lambda: packed(compiled(q, k, v, block_mask=block_mask, enable_gqa=True, kernel_options=kernel_options))


def triton(mask: AttnMask, name: str, qkv: list[torch.Tensor]) -> Call:
    """Return a call of torch_magi's kernels in Triton."""
    heads_q, heads_kv, dim = qkv[0].shape[1], qkv[1].shape[1], qkv[0].shape[2]
    plan = magi.make_attn_plan(mask, heads_q, heads_kv, dim, device=GPU)
    return lambda: magi.flex_flash_attn(*qkv, plan, kernel_options={"backend": "triton"})


def flex_flash(mask: AttnMask, name: str, qkv: list[torch.Tensor]) -> Call:
    """Return a call of compiled flex_attention with the kernels of FlashAttention 4."""
    import flash_attn.cute  # noqa: F401

    return flex(mask, name, qkv, {"BACKEND": "FLASH"})


def fa4(mask: AttnMask, name: str, qkv: list[torch.Tensor]) -> Call:
    """Return a call of FlashAttention 4: its dense or variable-length form, else its block-sparse one."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    tokens = mask.shape[0]
    batched = [x[None] for x in qkv]
    if name in ("full", "causal"):
        return lambda: flash_attn_func(*batched, causal=name == "causal")[0][0]
    if name == "sliding_causal":
        # Its window reaches as many keys back as the first row that sees key 0 no more.
        offsets, intervals = mask.row_intervals()
        window = (int((intervals[offsets[:-1], 0] == 0).sum()) - 1, 0)
        return lambda: flash_attn_func(*batched, window_size=window)[0][0]
    if name in ("varlen_full", "varlen_causal"):
        edges = yardstick_documents(tokens)
        cu, longest = torch.tensor(edges, dtype=torch.int32, device=GPU), int((edges[1:] - edges[:-1]).max())
        kwargs = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        causal = name == "varlen_causal"
        return lambda: flash_attn_varlen_func(*qkv, **kwargs, causal=causal)[0]

    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    if tokens % FA4_BLOCK[0]:
        raise NotImplementedError(f"its tables end with the last row: tokens must be a multiple of {FA4_BLOCK[0]}")
    found = mask.to_block_mask(FA4_BLOCK, GPU)
    sparse = BlockSparseTensorsTorch(
        found.kv_num_blocks,
        found.kv_indices,
        found.full_kv_num_blocks,
        found.full_kv_indices,
        block_size=FA4_BLOCK,
    )
    tables = row_tables(mask)
    how = {"mask_mod": fa4_mask_mod(len(tables) // 2), "aux_tensors": tables, "block_sparse_tensors": sparse}
    return lambda: flash_attn_func(*batched, **how)[0][0]


def row_tables(mask: AttnMask) -> list[torch.Tensor]:
    """Return the begins and the ends of each row's first interval of keys, then of its second, and so on."""
    offsets, intervals = mask.row_intervals()
    counts = np.diff(offsets)
    rows = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(rows)) - np.repeat(offsets[:-1], counts)
    tables = np.zeros((int(counts.max()), 2, len(counts)), np.int32)
    tables[nth, :, rows] = intervals
    return [torch.tensor(x, device=GPU) for table in tables for x in table]


@functools.cache
def fa4_mask_mod(intervals: int) -> Any:
    """Return a mask_mod in FlashAttention 4's language, for rows of one or two intervals of keys."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    if intervals == 1:

        @cute.jit
        def mask_mod(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
            lo = scalar_to_ssa(aux_tensors[0][m_idx[0]], cutlass.Int32)
            hi = scalar_to_ssa(aux_tensors[1][m_idx[0]], cutlass.Int32)
            return (n_idx >= lo) & (n_idx < hi)

    elif intervals == 2:

        @cute.jit
        def mask_mod(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
            lo = scalar_to_ssa(aux_tensors[0][m_idx[0]], cutlass.Int32)
            hi = scalar_to_ssa(aux_tensors[1][m_idx[0]], cutlass.Int32)
            lo2 = scalar_to_ssa(aux_tensors[2][m_idx[0]], cutlass.Int32)
            hi2 = scalar_to_ssa(aux_tensors[3][m_idx[0]], cutlass.Int32)
            return ((n_idx >= lo) & (n_idx < hi)) | ((n_idx >= lo2) & (n_idx < hi2))

    else:
        raise NotImplementedError("is timed here for rows of one or two intervals of keys")
    return mask_mod


PEERS = {"cudnn": cudnn, "flex": flex, "triton": triton, "flex_flash": flex_flash, "fa4": fa4}
# Name -> options of torch_magi for so many query heads.
FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "sink": lambda heads: {"sink": torch.zeros(1, heads, device=GPU)},
    "max_logits": lambda heads: {"return_aux": magi.AuxRequest(max_logits=True)},
    "softcap": lambda heads: {"softcap": 50.0},
    "small softcap": lambda heads: {"softcap": 2.0},
}


def backward_of(call: Call, qkv: list[torch.Tensor], dout: torch.Tensor) -> Call:
    """Return a call of the backward pass alone."""
    out = call()
    out = out[0] if isinstance(out, tuple) else out
    return lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)


def difference(found: Any, expected: Any) -> float:
    """Return the largest relative difference of two results, or of two lists of them."""
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def candidates(
    mask: AttnMask,
    name: str,
    heads: tuple[int, int],
    dim: int,
    peers: list[str],
    features: list[str],
    backward: bool,
) -> tuple[dict[str, Call], dict[str, str]]:
    """Return what is timed for a mask, by name, and why each other peer is not."""
    gen = torch.Generator(GPU).manual_seed(0)
    tokens = mask.shape[0]
    qkv = [torch.randn(tokens, h, dim, generator=gen, device=GPU).bfloat16() for h in (heads[0], heads[1], heads[1])]
    dout = torch.randn(tokens, heads[0], dim, generator=gen, device=GPU).bfloat16()
    for x in qkv:
        x.requires_grad_(backward)

    def timed(call: Call) -> Call:
        return backward_of(call, qkv, dout) if backward else call

    plan = magi.make_attn_plan(mask, *heads, dim, device=GPU)
    calls: dict[str, Call] = {"torch_magi": timed(lambda: magi.flex_flash_attn(*qkv, plan))}
    for feature in features:
        options = FEATURES[feature](heads[0])
        calls[f"with {feature}"] = timed(functools.partial(magi.flex_flash_attn, *qkv, plan, **options))
    ours = calls["torch_magi"]()
    without: dict[str, str] = {}
    for peer in peers:
        try:
            call = timed(PEERS[peer](mask, name, qkv))
            error = difference(call(), ours)
        except Exception as raised:
            lines = str(raised).strip().splitlines()
            without[peer] = f"{type(raised).__name__}: {lines[0] if lines else ''}"[:160]
            continue
        if error < SAME:
            calls[peer] = call
        else:
            without[peer] = f"its output is not torch_magi's: relative error {error:.1e}"
    return calls, without


def head_commit() -> str:
    """Return the commit of this tree."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return run.stdout.strip()


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--masks", default=",".join(YARDSTICK_MASKS))
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--peers", default="cudnn,flex", help="of " + ", ".join(PEERS) + "; none: ''")
    parser.add_argument("--heads", default="64,8", help="query heads, kv heads")
    parser.add_argument("--dim", type=int, default=128, help="head_dim")
    parser.add_argument("--features", default="", help="time torch_magi also with: " + ", ".join(FEATURES))
    parser.add_argument("--backward", action="store_true", help="time the backward pass")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what to write as the commit; default: HEAD of this tree")
    given = parser.parse_args()
    peers = [peer for peer in given.peers.split(",") if peer]
    features = [feature for feature in given.features.split(",") if feature]
    if unknown := sorted(set(peers) - set(PEERS)) + sorted(set(features) - set(FEATURES)):
        parser.error(f"no such peer or feature: {', '.join(unknown)}")
    heads_q, heads_kv = (int(n) for n in given.heads.split(","))
    timer, rows = Timer(), []
    square = torch.randn(MATMUL, MATMUL, device=GPU, dtype=torch.bfloat16)
    direction = "backward" if given.backward else "forward"
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, heads {given.heads}, head_dim {given.dim}, {direction}")
    for tokens in (int(n) for n in given.tokens.split(",")):
        for name in given.masks.split(","):
            mask = YARDSTICK_MASKS[name](tokens)
            calls, without = candidates(mask, name, (heads_q, heads_kv), given.dim, peers, features, given.backward)
            for peer, why in without.items():
                print(f"{name:<20}{tokens:>7}  without {peer}: {why}", flush=True)
            calls["matmul"] = lambda: square @ square
            times = timer.medians(calls, given.rounds)
            pair = 10 if given.backward else 4  # operations for each dimension of a head
            work = dict.fromkeys(calls, pair * mask.area * heads_q * given.dim) | {"matmul": 2 * MATMUL**3}
            rates = {n: work[n] / ms / 1e9 for n, ms in times.items()}
            rows.append({"mask": name, "tokens": tokens, "tflops": rates, "ms": times})
            ours = rates["torch_magi"]
            print(
                f"{name:<20}{tokens:>7}  {ours:6.0f} TFLOP/s = {ours / rates['matmul']:.2f} x matmul  "
                + "  ".join(f"{n} {r:.0f} ({ours / r:.2f}x)" for n, r in rates.items() if n != "torch_magi"),
                flush=True,
            )
            torch._dynamo.reset()
    if given.json:
        about = {"gpu": gpu, "torch": torch.__version__, "commit": given.commit or head_commit()}
        given.json.write_text(
            json.dumps({**about, "pass": direction, "heads": given.heads, "dim": given.dim, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
