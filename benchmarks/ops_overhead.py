"""What an eager call costs the host, beyond the kernel: time per call on a problem too small to matter.

    python benchmarks/ops_overhead.py                  # on a GPU where there is one
    python benchmarks/ops_overhead.py --device cpu

On a GPU the calls are launched one after the other without waiting, so that the host's share is what is timed. The
plan is ready; scaled_dot_product_attention does the same work beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import torch_magi as magi
from torch_magi import masks

CALLS, ROUNDS = 200, 9
TARGETS = {"forward": 40.0, "forward and backward": 100.0}  # microseconds


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the host's time per call: the best of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin)
    return 1e6 * best / CALLS


def calls_on(device: torch.device) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return what is timed: direction -> name -> call."""
    rows, heads, dim, dtype = (128, 4, 64, torch.bfloat16) if device.type == "cuda" else (4, 1, 16, torch.float32)
    plan = magi.make_attn_plan(masks.causal(rows), heads, heads, dim, dtype=dtype, device=device)
    q, k, v = (torch.randn(rows, heads, dim, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def ours(*x: torch.Tensor) -> Any:
        return magi.flex_flash_attn(*x, plan)

    def sdpa(*x: torch.Tensor) -> Any:
        a, b, c = (y.transpose(0, 1)[None] for y in x)
        return scaled_dot_product_attention(a, b, c, is_causal=True)[0].transpose(0, 1)

    def both(attention: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attention(*leaves), leaves, q)

    return {
        "forward": {"torch_magi": lambda: ours(q, k, v), "sdpa": lambda: sdpa(q, k, v)},
        "forward and backward": {"torch_magi": both(ours), "sdpa": both(sdpa)},
    }


def main() -> None:
    """Print a line for each direction; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_num_threads(1)
    found = {}
    for direction, calls in calls_on(device).items():
        times = {name: microseconds(call, device) for name, call in calls.items()}
        found[direction] = times
        print(
            f"{direction:<22} {times['torch_magi']:7.1f} us, sdpa {times['sdpa']:7.1f} us, "
            f"{times['torch_magi'] / times['sdpa']:.1f}x (target on a GPU: {TARGETS[direction]:.0f} us)"
        )
    if given.json:
        given.json.write_text(
            json.dumps({"device": given.device, "torch": torch.__version__, **found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
