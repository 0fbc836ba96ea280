"""Time of attention on a GPU, with peers and ceilings of the same run.

    python benchmarks/flex_attn.py                                  # all masks at 8192 and 32768 tokens
    python benchmarks/flex_attn.py --masks causal --tokens 8192 --peers cudnn --json FILE

TFLOP/s: 4 * visible pairs * query heads * head_dim floating point operations, divided by the median time.
Candidates run in shuffled turns, each call after 1 ms of other work with L2 overwritten. The card is power
limited: compare within a row, by ratio to the matrix product of that row.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import torch_magi as magi
from torch_magi.masks import AttnMask
from torch_magi.testing import YARDSTICK_MASKS

GPU = torch.device("cuda")
MATMUL = 8192
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


def candidates(
    mask: AttnMask, name: str, heads: tuple[int, int], dim: int, peers: list[str], options: dict[str, Any]
) -> dict[str, Call]:
    """Return what is timed for a mask, by name."""
    gen = torch.Generator(GPU).manual_seed(0)
    tokens = mask.shape[0]
    q, k, v = (
        torch.randn(tokens, h, dim, generator=gen, device=GPU).bfloat16() for h in (heads[0], heads[1], heads[1])
    )
    plan = magi.make_attn_plan(mask, *heads, dim, device=GPU)
    calls: dict[str, Call] = {"torch_magi": lambda: magi.flex_flash_attn(q, k, v, plan, **options)}
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    if "cudnn" in peers and name in ("full", "causal"):

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(*heads_first, is_causal=name == "causal", enable_gqa=True)

        calls["cudnn"] = cudnn
    if "flex" in peers:
        compiled = torch.compile(flex_attention, dynamic=False)
        block_mask = mask.to_block_mask(device=GPU)
        calls["flex"] = lambda: compiled(*heads_first, block_mask=block_mask, enable_gqa=True)
    return calls


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--masks", default=",".join(YARDSTICK_MASKS))
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--peers", default="cudnn,flex", help="of cudnn, flex; none: ''")
    parser.add_argument("--heads", default="64,8", help="query heads, kv heads")
    parser.add_argument("--dim", type=int, default=128, help="head_dim")
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--max-logits", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    heads_q, heads_kv = (int(n) for n in given.heads.split(","))
    options: dict[str, Any] = {"softcap": given.softcap}
    if given.max_logits:
        options["return_aux"] = magi.AuxRequest(max_logits=True)
    timer, rows = Timer(), []
    square = torch.randn(MATMUL, MATMUL, device=GPU, dtype=torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, heads {given.heads}, head_dim {given.dim}")
    for tokens in (int(n) for n in given.tokens.split(",")):
        for name in given.masks.split(","):
            mask = YARDSTICK_MASKS[name](tokens)
            calls = candidates(mask, name, (heads_q, heads_kv), given.dim, given.peers.split(","), options)
            calls["matmul"] = lambda: square @ square
            times = timer.medians(calls, given.rounds)
            work = dict.fromkeys(calls, 4 * mask.area * heads_q * given.dim) | {"matmul": 2 * MATMUL**3}
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
        here = Path(__file__).parent
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
        given.json.write_text(
            json.dumps({**about, "heads": given.heads, "dim": given.dim, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
