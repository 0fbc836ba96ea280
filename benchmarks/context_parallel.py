"""Attention over a sequence that is shared by several ranks: correctness, time, peers.

    torchrun --nproc-per-node 8 benchmarks/context_parallel.py                        # GPUs, NCCL
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --masks causal --tokens 8192 --peers ring --json FILE
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --device cpu --tokens 256 --heads 4,2 --dim 32
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --backend gloo --peers ''     # a rehearsal on one GPU

--tokens is per rank. Every row is checked before it is timed: the ranks' results and gradients, each against the same
rows of the attention of the whole sequence on its own device. Ranks may share a GPU with --backend gloo (and
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1): results are then as good, times are not.

TFLOP/s: floating point operations of the visible pairs (4 a pair, query head and dimension forward, 10 backward), per
rank, by the slowest rank's median time. Efficiency: that rate divided by the rate of one device that computes the whole
sequence alone. Leave NVLink multicast off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1) where a machine does not have it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from context_parallel_peers import PEERS, Problem, Way
from torch.profiler import ProfilerActivity, profile

import torch_magi as magi
from torch_magi.masks import AttnMask
from torch_magi.plan.config import Transport
from torch_magi.testing import YARDSTICK_MASKS

Tensor = torch.Tensor
MASKS = ("full", "causal", "varlen_full", "varlen_causal", "varlen_block_causal")
MODES = ("eager", "compiled")
TRANSPORTS = get_args(Transport)
SAME = 2e-2  # relative Frobenius error of bfloat16 results that are summed in another order
Call = Callable[[], Any]


def torch_magi_way(
    problem: Problem, overlap_degree: int | Literal["auto"], compiled: bool, transport: Transport
) -> Way:
    """Return the way of this package, with so many stages."""
    config = magi.PlanConfig(overlap_degree=overlap_degree, transport=transport)
    plan = magi.make_attn_plan(
        problem.mask, problem.heads_q, problem.heads_kv, problem.dim, dtype=problem.dtype, device=problem.device,
        cp_size=problem.size, cp_rank=problem.rank, config=config,
    )  # fmt: skip

    def attention(query: Tensor, key: Tensor, value: Tensor, plan: magi.AttnPlan) -> Tensor:
        out: Any = magi.context_parallel_attn(query, key, value, plan, problem.group.group_name)
        return out  # type: ignore[no-any-return]

    called = torch.compile(attention, fullgraph=True, options=magi.compile_options()) if compiled else attention
    return Way(plan.position_ids.cpu(), lambda q, k, v: called(q, k, v, plan))


def whole_inputs(problem: Problem) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value of all rows, and dout; the same on every rank."""
    gen = torch.Generator(problem.device).manual_seed(0)
    total = problem.mask.shape[0]

    def normal(heads: int) -> Tensor:
        return torch.randn(total, heads, problem.dim, generator=gen, device=problem.device).to(problem.dtype)

    return [normal(problem.heads_q), normal(problem.heads_kv), normal(problem.heads_kv)], normal(problem.heads_q)


def alone(problem: Problem) -> Way:
    """Return the attention of the whole sequence on this device."""
    plan = magi.make_attn_plan(
        problem.mask, problem.heads_q, problem.heads_kv, problem.dim, dtype=problem.dtype, device=problem.device
    )

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Any = magi.flex_flash_attn(query, key, value, plan)
        return out  # type: ignore[no-any-return]

    return Way(torch.arange(problem.mask.shape[0]), attention)


class Run:
    """One way over one problem: its inputs on this rank, a forward and a backward call."""

    def __init__(self, way: Way, inputs: list[Tensor], dout: Tensor) -> None:
        rows = way.rows.to(dout.device)
        self.way, self.rows = way, rows
        self.inputs = [x.index_select(0, rows).requires_grad_() for x in inputs]
        self.dout = dout.index_select(0, rows)
        self.out: Tensor | None = None

    def forward(self) -> Tensor:
        self.out = self.way.attention(*self.inputs)
        return self.out

    def backward(self) -> tuple[Tensor, ...]:
        assert self.out is not None
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self) -> list[Tensor]:
        """Return out, dq, dk and dv of this rank's rows."""
        with self.way.context():
            return [self.forward().detach(), *self.backward()]


def slowest(value: float, problem: Problem) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor([value], dtype=torch.float64, device=problem.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=problem.group)
    return float(found)


def median_ms(call: Call, problem: Problem, rounds: int) -> float:
    """Return the slowest rank's median time of a call that all ranks make together."""
    times = []
    for number in range(rounds + 2):
        synchronize(problem.device)
        dist.barrier(problem.group)
        begin = time.perf_counter()
        call()
        synchronize(problem.device)
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - begin))
    return slowest(statistics.median(times), problem)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; the CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def error_of(run: Run, truth: list[Tensor], problem: Problem) -> float:
    """Return the largest relative Frobenius error of out, dq, dk and dv, of any rank."""
    worst = 0.0
    for found, whole in zip(run.results(), truth, strict=True):
        wanted = whole.index_select(0, run.rows).float()
        if wanted.numel():
            worst = max(worst, float((found.float() - wanted).norm() / wanted.norm().clamp_min(1e-30)))
    return slowest(worst, problem)


def ways_of(given: argparse.Namespace) -> dict[str, Callable[[Problem], Way]]:
    """Return what is compared, by name."""
    ways: dict[str, Callable[[Problem], Way]] = {}
    degrees = [n if n == "auto" else int(n) for n in given.overlap.split(",")]
    for degree, mode, how in itertools.product(degrees, given.modes.split(","), given.transports.split(",")):
        name = f"torch_magi {mode} {degree}" + (f" {how}" if how != "all_to_all" else "")
        ways[name] = lambda p, d=degree, m=mode, t=how: torch_magi_way(p, d, m == "compiled", t)
    return ways | {name: PEERS[name] for name in given.peers.split(",") if name}


def measure(problem: Problem, given: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table: what each way took, or why it did not run."""
    inputs, dout = whole_inputs(problem)
    work = problem.mask.area * problem.heads_q * problem.dim / 1e9  # TFLOP/s = factor * work / ms
    reference = Run(alone(problem), inputs, dout)
    truth = reference.results()
    single = {"forward": median_ms(reference.forward, problem, given.rounds),
              "backward": median_ms(reference.backward, problem, given.rounds)}  # fmt: skip
    del reference
    row: dict[str, Any] = {"mask": problem.name, "tokens": problem.mask.shape[0], "alone_ms": single, "ways": {}}
    for name, make in ways_of(given).items():
        try:
            run = Run(make(problem), inputs, dout)
            error = error_of(run, truth, problem)
        except (NotImplementedError, ImportError) as raised:  # on all ranks alike
            row["ways"][name] = {"without": f"{type(raised).__name__}: {raised}"[:200]}
            continue
        found: dict[str, Any] = {"error": error, "right": error < SAME}
        with run.way.context():
            for direction, call, factor in (("forward", run.forward, 4), ("backward", run.backward, 10)):
                ms = median_ms(call, problem, given.rounds)
                found[direction] = {
                    "ms": ms,
                    "tflops_per_rank": factor * work / ms / problem.size,
                    "efficiency": single[direction] / ms / problem.size,
                }
        row["ways"][name] = found
        if given.trace and problem.rank == 0:
            path = Path(given.trace) / f"{problem.name}_{problem.mask.shape[0]}_{name.replace(' ', '_')}.json"
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (problem.device.type == "cuda")
            with profile(activities=activities) as profiler:
                run.results()
                synchronize(problem.device)
            profiler.export_chrome_trace(str(path))
        elif given.trace:
            run.results()
    return row


def lines_of(row: dict[str, Any]) -> list[str]:
    """Return a row of the table as text."""
    lines = []
    for name, found in row["ways"].items():
        head = f"{row['mask']:<20}{row['tokens']:>8}  {name:<40}"
        if "without" in found:
            lines.append(f"{head}without: {found['without']}")
            continue
        parts = [
            f"{direction} {found[direction]['ms']:9.3f} ms {found[direction]['tflops_per_rank']:7.1f} TFLOP/s a rank, "
            f"efficiency {found[direction]['efficiency']:.2f}"
            for direction in ("forward", "backward")
        ]
        lines.append(f"{head}{'; '.join(parts)}; error {found['error']:.1e}{'' if found['right'] else ' WRONG'}")
    return lines


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--masks", default=",".join(MASKS), help="of " + ", ".join(YARDSTICK_MASKS))
    parser.add_argument("--tokens", default="8192,32768", help="tokens per rank")
    parser.add_argument("--heads", default="64,8", help="query heads, kv heads")
    parser.add_argument("--dim", type=int, default=128, help="head_dim")
    parser.add_argument("--overlap", default="0,1,2,4,auto", help="overlap degrees")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="how rows travel")
    parser.add_argument("--peers", default=",".join(PEERS), help="of " + ", ".join(PEERS) + "; none: ''")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: nccl on GPUs, gloo on the CPU")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--trace", help="folder for a profile of rank 0 for each way, as a Chrome trace")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    accepted = {"masks": YARDSTICK_MASKS, "peers": PEERS, "modes": MODES, "transports": TRANSPORTS}
    for name, known in accepted.items():
        if unknown := [n for n in getattr(given, name).split(",") if n and n not in known]:
            parser.error(f"--{name}: no such {name[:-1]}: {', '.join(unknown)}; there are {', '.join(known)}")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N")
    return given


def head_commit() -> str:
    """Return the commit of this tree."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return run.stdout.strip()


def main() -> None:
    """Run every mask and length; print and write on rank 0."""
    given = parse_arguments()
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = given.backend or ("nccl" if given.device == "cuda" else "gloo")
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    functorch_config.donated_buffer = False  # backward is timed again and again over one forward
    group = dist.group.WORLD
    assert group is not None
    heads_q, heads_kv = (int(n) for n in given.heads.split(","))
    about = {
        "gpu": torch.cuda.get_device_name() if given.device == "cuda" else "none", "ranks": group.size(),
        "gpus": torch.cuda.device_count(), "backend": backend, "torch": torch.__version__,
        "commit": head_commit(), "heads": given.heads, "dim": given.dim,
    }  # fmt: skip
    if group.rank() == 0:
        print(", ".join(f"{k} {v}" for k, v in about.items()), flush=True)
        if given.trace:
            Path(given.trace).mkdir(parents=True, exist_ok=True)
    rows = []
    for tokens in (int(n) for n in given.tokens.split(",")):
        for name in given.masks.split(","):
            mask: AttnMask = YARDSTICK_MASKS[name](tokens * group.size())
            dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
            rows.append(measure(Problem(name, mask, heads_q, heads_kv, given.dim, dtype, device, group), given))
            if group.rank() == 0:
                print("\n".join(lines_of(rows[-1])), flush=True)
    if given.json and group.rank() == 0:
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    if any(not found.get("right", True) for row in rows for found in row["ways"].values()):
        raise SystemExit("a result differs from that of one device; see WRONG above")


if __name__ == "__main__":
    main()
