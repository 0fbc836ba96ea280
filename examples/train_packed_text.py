"""Train a small language model on a folder of text, every sequence shared by several ranks, and prove it.

    python examples/train_packed_text.py                         # 4 ranks, then 1 rank, and the comparison
    python examples/train_packed_text.py --data ~/notes --steps 200 --no-compare
    torchrun --nproc-per-node 4 examples/train_packed_text.py    # only this rank's part, started by you

Documents of many lengths are packed into long sequences; each sees only itself, causally. For every batch
each rank makes the same plan, takes its rows, and attends to the whole sequence with `context_parallel_attn`.
The losses of several ranks must be those of one rank; the run prints the largest difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import torch_magi as magi
from packed_text.train import History, Settings, history_path, train

CPU_RANKS = 4
LARGEST_DIFFERENCE = 1e-4  # of a step's loss between several ranks and one: float32 rounding, with room
MIB = 1 << 20


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    standard_library = Path(sysconfig.get_path("stdlib"))
    add("--data", type=Path, default=standard_library, help="folder of text files, searched recursively")
    add("--out", type=Path, default=None, help="folder for the results (default: a new temporary one)")
    add("--ranks", type=int, default=None,
        help="ranks that share a sequence (default: the number of GPUs, or 4 on the CPU)")  # fmt: skip
    add("--steps", type=int, default=Settings.steps, help="steps to train")
    add("--length", type=int, default=Settings.length, help="tokens (bytes) in a sequence")
    add("--learning-rate", type=float, default=Settings.learning_rate, help="peak learning rate of AdamW")
    add("--seed", type=int, default=Settings.seed, help="seed of the weights and of the batches")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    add("--dispatcher", default=Settings.dispatcher,
        help="how a sequence is divided among ranks: sequential, head_tail or min_heap")  # fmt: skip
    add("--overlap-degree", type=int, default=Settings.overlap_degree,
        help="stages in which other ranks' keys arrive; 0: one exchange before the attention")  # fmt: skip
    add("--no-compile", action="store_true", help="do not use torch.compile")
    add("--no-compare", action="store_true", help="do not repeat the training on one rank")
    add("--checkpoint", type=Path, default=None, help="folder to save checkpoints in")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: only one at the end")
    add("--resume", type=Path, default=None, help="checkpoint to go on from, such as FOLDER/step_60")
    arguments = parser.parse_args()
    for name, least in (("steps", 1), ("length", 32), ("ranks", 1), ("overlap_degree", 0), ("save_every", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if arguments.save_every and arguments.checkpoint is None:
        parser.error("--save-every needs --checkpoint FOLDER")
    for name in ("out", "checkpoint"):
        folder = getattr(arguments, name)
        if folder is not None and folder.resolve() == arguments.data.resolve():
            parser.error(f"--{name} must be another folder than --data, which is read again in each run")
    try:
        magi.PlanConfig(dispatcher=arguments.dispatcher)
    except ValueError as error:
        parser.error(f"--dispatcher: {error}")
    return arguments


def choose_device(wanted: str) -> str:
    """Return the device to train on: a GPU if there is one and torch_magi has kernels for it."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    x = torch.zeros(1, 1, 32, device="cuda", dtype=torch.bfloat16)
    try:
        magi.flex_flash_attn(x, x, x, magi.masks.causal(1))
    except NotImplementedError as error:
        if wanted == "cuda":
            raise SystemExit(f"--device cuda: {error}") from None
        print(f"training on the CPU: {error}")
        return "cpu"
    return "cuda"


def threads_of(ranks: int) -> int:
    """Return the CPU threads of a rank: one rank alone gets as many as one of four, so that runs compare."""
    return max(1, (os.cpu_count() or 1) // max(ranks, CPU_RANKS))


def run_ranks(ranks: int, settings: Settings) -> History:
    """Train with so many ranks through torchrun; return the history.

    Raises:
        SystemExit: if a rank failed; torchrun has printed why.
    """
    name = "1 rank" if ranks == 1 else f"{ranks} ranks"
    print(f"\n--- {name} on {settings.device}", flush=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}", __file__, *settings.to_arguments(),
    ]  # fmt: skip
    begin = time.perf_counter()
    failed = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads_of(ranks))}).returncode
    if failed:
        raise SystemExit(f"training with {name} failed")
    history = History.read(history_path(settings.out, ranks))
    print(
        f"{time.perf_counter() - begin:.0f} s, {history.tokens_per_second:,.0f} tokens/s after compilation, "
        f"{history.compilations} graphs compiled"
    )
    return history


def report(history: History, single: History | None) -> None:
    """Print what the run shows.

    Raises:
        SystemExit: if several ranks do not train as one does.
    """
    ranks, losses = history.ranks, history.losses
    print(f"\nloss: {losses[0]:.4f} -> {losses[-1]:.4f} nats per byte in {len(losses)} steps")
    if ranks == 1:
        return
    total = sum(history.area_per_rank)
    mean = sum(history.imbalance) / len(history.imbalance)
    print("balance: share of the visible (q, k) pairs that each rank computed, all steps together")
    for rank, area in enumerate(history.area_per_rank):
        print(f"  rank {rank}: {100 * area / total:6.2f} %  {area:,} pairs")
    print(f"  largest / mean rank of a step: {mean:.4f} on average, {max(history.imbalance):.4f} at most")
    sent, everything = sum(history.bytes_sent), sum(history.bytes_all_gather)
    print("keys and values sent in one layer's forward passes, counted from the splits that were used:")
    print(f"  torch_magi          {sent / MIB:10.2f} MiB, {100 * sent / everything:.1f} % of the next line")
    print(f"  ring or all-gather  {everything / MIB:10.2f} MiB")
    if single is not None:
        difference = max(abs(a - b) for a, b in zip(losses, single.losses, strict=True))
        print(f"max loss difference, {ranks} ranks vs 1: {difference:.2e}")
        if not difference <= LARGEST_DIFFERENCE:
            raise SystemExit(
                f"that is more than {LARGEST_DIFFERENCE}. If the loss jumps up and down, the learning rate "
                "is so large that rounding grows from step to step; with a smaller one this must not be."
            )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the command line asks for. Makes the folder for the results."""
    out = arguments.out or Path(tempfile.mkdtemp(prefix="torch_magi_"))
    out.mkdir(parents=True, exist_ok=True)
    return Settings(
        data=arguments.data, out=out.resolve(), steps=arguments.steps, length=arguments.length,
        learning_rate=arguments.learning_rate, seed=arguments.seed, device=choose_device(arguments.device),
        dispatcher=arguments.dispatcher, overlap_degree=arguments.overlap_degree,
        compile=not arguments.no_compile, checkpoint=arguments.checkpoint, save_every=arguments.save_every,
        resume=arguments.resume,
    )  # fmt: skip


def main() -> None:
    """Run the whole proof, or one rank's part where torchrun started this process."""
    arguments = parse_arguments()
    settings = settings_of(arguments)
    if dist.is_torchelastic_launched():
        run_as_rank(settings)
    else:
        prove(settings, arguments)


def run_as_rank(settings: Settings) -> None:
    """Train as one of torchrun's processes."""
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(threads_of(int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    try:
        train(settings)
    finally:
        dist.destroy_process_group()


def prove(settings: Settings, arguments: argparse.Namespace) -> None:
    """Train with several ranks and with one, compare them, and draw the pictures."""
    gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    ranks = arguments.ranks or gpus or CPU_RANKS
    print(f"text: {settings.data}\nsequences of {settings.length} bytes, {settings.steps} steps")
    history = run_ranks(ranks, settings)
    single = None
    if ranks > 1 and not arguments.no_compare:
        single = run_ranks(1, replace(settings, checkpoint=None, save_every=0))
    try:
        from packed_text import pictures

        histories = [history] if single is None else [history, single]
        paths = pictures.draw(settings, ranks, histories)
    except ImportError as error:
        print(f"\nno pictures: {error}")
    else:
        print("\npictures: " + ", ".join(str(path) for path in paths))
    report(history, single)


if __name__ == "__main__":
    main()
