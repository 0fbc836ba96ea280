"""What planning costs, how well its plans balance and what they send, and how fast attention runs on the CPU.

    python benchmarks/planner.py                     # prints a table; a line with a target says whether it is met
    python benchmarks/planner.py --json FILE         # writes the figures as well

Planning is measured on one core, attention with all of torch's threads; SDPA is timed in turns with it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import torch_magi as magi
from torch_magi import PlanConfig, _planner, masks
from torch_magi.masks import AttnMask
from torch_magi.testing import YARDSTICK_MASKS

MILLION = 1 << 20
HEADS = (64, 8, 128)  # query heads, kv heads, head_dim of the plans


@dataclass
class Figure:
    """A measured figure and its target: value <= target, or >= where `at_least`."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def __str__(self) -> str:
        bound = ""
        if self.target is not None:
            bound = f"  (target {'>=' if self.at_least else '<='} {self.target:g}: {'met' if self.met else 'MISSED'})"
        return f"{self.name:<72}{self.value:>10.3f} {self.unit}{bound}"


def seconds(fn: Callable[[], Any], repeats: int = 5) -> float:
    """Return the shortest time of a call, after one that is not counted: what else runs only adds to it."""
    fn()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return min(times)


def tile_plans() -> list[Figure]:
    """Tile plans of one device, as the kernels for GPUs will ask for them: 128 rows of 8 packed heads."""
    figures = []
    for name in ("causal", "varlen_causal"):
        mask = YARDSTICK_MASKS[name](MILLION)
        columns = _planner.transpose(mask.bands)
        for side, bands, rows, cols in (("forward", mask.bands, 16, 128), ("backward", columns, 128, 64)):

            def make(bands: Any = bands, rows: int = rows, cols: int = cols) -> Any:
                return _planner.tile_plan(bands, MILLION, rows, cols)

            size = sum(part.nbytes for part in make()) / 1e6
            label = f"tile plan, {side} {rows} x {cols}, 1M tokens, {name}"
            figures.append(Figure(label, 1e3 * seconds(make), "ms", 10.0))
            figures.append(Figure(f"{label}: size", size, "MB", 12.0))
    return figures


def plan_of(mask: AttnMask, world: int, **config: Any) -> magi.AttnPlan:
    """Return rank 0's plan."""
    return magi.make_attn_plan(mask, *HEADS, cp_size=world, config=PlanConfig(**config))


def many_intervals() -> list[Figure]:
    """Set operations on masks of a million tokens whose rows have thousands of intervals, or whose steps all differ."""
    rng = np.random.default_rng(0)
    blocks = rng.random((4096, 4096)) < 0.05
    keys = np.arange(0, MILLION, 256)
    whole = np.tile([0, MILLION], (len(keys), 1))
    columns = AttnMask.from_slices(whole, np.stack([keys, keys + 1], 1), np.zeros_like(keys), MILLION, MILLION)
    ends = np.unique(np.append(rng.integers(1, MILLION, 10000), [0, MILLION]))
    rows, seen = np.stack([ends[:-1], ends[1:]], 1), np.stack([0 * ends[1:], ends[1:]], 1)
    stairs = AttnMask.from_slices(rows, seen, np.zeros(len(rows), np.int64), MILLION, MILLION)
    causal = masks.causal(MILLION)
    size = MILLION // len(blocks)
    cases: dict[str, Callable[[], AttnMask]] = {
        "4096 x 4096 blocks, 5 % of them": lambda: masks.from_block_matrix(blocks, size, size, MILLION, MILLION),
        "causal - 4096 columns": lambda: causal - columns,
        "transposed staircase of 10000 different steps": lambda: stairs.T,
        "staircase of 8192 equal steps": lambda: masks.chunk_causal(MILLION, MILLION, 128),
    }
    return [
        Figure(f"{label}, {len(make().bands)} bands, 1M tokens", 1e3 * seconds(make, 1), "ms")
        for label, make in cases.items()
    ]


def functions() -> list[Figure]:
    """Masks made of functions for FlexAttention, beside its own tables of blocks, each in a process of its own."""
    made = """
import re, time
from pathlib import Path
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch_magi.masks.mask_mod_symbolic import trace_mask_mod
lengths = torch.full((829,), TOKENS // 829)
lengths[-1] += TOKENS - int(lengths.sum())
ids = torch.repeat_interleave(torch.arange(829), lengths)
def mask_mod(b, h, q, k):
    return (ids[q] == ids[k]) & (q >= k)
def make(n):
    return FUNCTION
make(256)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
before, begin = peak(), time.perf_counter()
make(TOKENS)
print(time.perf_counter() - begin, peak() - before)
"""
    figures = []
    for name, tokens, function, targets in (
        ("bands of a mask_mod", MILLION, "trace_mask_mod(mask_mod, n, n, 0, 0)", (2.0, 1024.0)),
        ("create_block_mask", 1 << 15, "create_block_mask(mask_mod, None, None, n, n, device='cpu')", (None, None)),
    ):
        code = made.replace("TOKENS", str(tokens)).replace("FUNCTION", function)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        label = f"{name}, {tokens >> 10}k tokens, 829 causal documents"
        for value, unit, target in zip(map(float, run.stdout.split()), ("s", "MiB"), targets, strict=True):
            figures.append(Figure(label, value, unit, target))
    return figures


def distributed_plans() -> list[Figure]:
    """Time, balance and traffic of plans for many ranks."""
    varlen = YARDSTICK_MASKS["varlen_causal"](MILLION)
    took = seconds(lambda: plan_of(varlen, 64, overlap_degree=2))
    figures = [Figure("plan of one rank of 64, 1M tokens, varlen_causal", 1e3 * took, "ms", 100.0)]
    for tokens, worlds, target in ((MILLION, (8, 16, 32, 64), 1.02), (MILLION // 8, (64,), 1.05)):
        for name in ("causal", "varlen_causal", "sliding_causal", "varlen_block_causal", "prefix_documents"):
            for world in worlds:
                label = f"largest / mean area, {tokens >> 10}k tokens, {world} ranks, {name}"
                imbalance = plan_of(YARDSTICK_MASKS[name](tokens), world).imbalance
                figures.append(Figure(label, imbalance, "", target if name == "varlen_causal" else None))
    for name, world, dispatcher, target in (
        ("causal", 8, "head_tail", 0.75),
        ("varlen_causal", 8, "min_heap", 0.35),
        ("varlen_causal", 64, "min_heap", 0.10),
    ):
        plan = plan_of(YARDSTICK_MASKS[name](MILLION), world, dispatcher=dispatcher)
        label = f"rows received / rows of an all-gather, 1M tokens, {world} ranks, {name}, {dispatcher}"
        figures.append(Figure(label, plan.comm_rows / (MILLION * (world - 1)), "", target))
    return figures


def cpu_attention() -> list[Figure]:
    """Time of SDPA divided by that of flex_flash_attn, on the same threads, in turns."""
    figures = []
    documents = masks.document(list(range(0, 8193, 512)), causal=False)
    for label, mask, dtype, target, options in (
        ("causal 4096, float32", masks.causal(4096), torch.float32, 0.4, {"is_causal": True}),
        ("causal 4096, bfloat16", masks.causal(4096), torch.bfloat16, None, {"is_causal": True}),
        (
            "16 documents in 8192, float32, dense mask",
            documents,
            torch.float32,
            5.0,
            {"attn_mask": documents.to_dense()},
        ),
    ):
        shape = (mask.shape[0], 8, 64)
        q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
        plan = magi.make_attn_plan(mask, 8, 8, 64, dtype=dtype)
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        ours = seconds(lambda q=q, k=k, v=v, plan=plan: magi.flex_flash_attn(q, k, v, plan))
        sdpa = seconds(lambda x=heads_first, o=options: scaled_dot_product_attention(*x, **o))
        figures.append(Figure(f"CPU forward, SDPA's time / ours, {label}", sdpa / ours, "x", target, at_least=True))
    q = torch.randn(16, 1, 16)
    plan = magi.make_attn_plan(masks.causal(16), 1, 1, 16, dtype=torch.float32)

    def many(fn: Callable[[], Any]) -> float:
        return 1e6 / 200 * seconds(lambda: [fn() for _ in range(200)])

    figures.append(
        Figure("eager call of flex_flash_attn, 16 tokens", many(lambda: magi.flex_flash_attn(q, q, q, plan)), "us")
    )
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures = []
    for group in (tile_plans, many_intervals, functions, distributed_plans, cpu_attention):
        if group is cpu_attention:
            torch.set_num_threads(threads)
        for figure in group():
            print(figure, flush=True)
            figures.append(figure)
    if arguments.json:
        here = Path(__file__).parent
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()
        about = {"commit": commit, "torch": torch.__version__, "threads": threads, "machine": platform.machine()}
        arguments.json.write_text(json.dumps({**about, "figures": [asdict(f) for f in figures]}, indent=1) + "\n")
    missed = sum(f.met is False for f in figures)
    print(f"{missed} of {sum(f.met is not None for f in figures)} targets missed")


if __name__ == "__main__":
    main()
