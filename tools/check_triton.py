"""Compile the attention kernels in Triton for GPUs that need not be there, and show what became of them.

    python tools/check_triton.py                                  what torch_magi/kernels/tiles.py says, every target
    python tools/check_triton.py --targets 90 --dims 128,128 --dtypes bfloat16 --softcap

A line for each kernel: warps, registers, bytes of spilled registers, shared memory, tensor core instructions, seconds.
Fails where a kernel does not compile, or wants more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from torch_magi import make_attn_plan, masks
from torch_magi.kernels import tiles, triton_attention

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a block may have
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
DTYPES = ("bfloat16", "float32")
TENSOR_CORE = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b")


class Compiled(NamedTuple):
    """A kernel as Triton has compiled it; `made` is Triton's CompiledKernel."""

    made: Any
    seconds: float

    @property
    def shared(self) -> int:
        return int(self.made.metadata.shared)

    @property
    def tensor_core_instructions(self) -> int:
        return len(TENSOR_CORE.findall(self.made.asm["ptx"]))


class NoGPU:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return self.target  # Triton keeps the kernels of each device apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)


@contextlib.contextmanager
def compiling_for(target: int) -> Iterator[list[Compiled]]:
    """Return a context in which a launch compiles the kernel and no more, and the list of those."""
    compiled: list[Compiled] = []
    run = triton.JITFunction.run

    def warm_up(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        begin = time.perf_counter()
        made = run(kernel, *args, warmup=True, **options)
        compiled.append(Compiled(made, time.perf_counter() - begin))

    with (
        mock.patch.object(driver, "_active", NoGPU(target)),
        mock.patch.object(triton.JITFunction, "run", warm_up),
        mock.patch.object(tiles, "shared_memory", lambda device: SHARED_MEMORY[target]),
    ):
        yield compiled


def compile_attention(
    target: int, head_dims: tuple[int, int], dtype: torch.dtype, softcap: float = 0.0
) -> list[Compiled]:
    """Compile every kernel that attention forward and backward launches."""
    (dim, dim_v), (heads, heads_kv) = head_dims, (8, 1)
    compiled = []
    # Few rows with many keys, and the reverse: what joins parts is launched too.
    for rows, keys in ((16, 8192), (8192, 16)):
        plan = make_attn_plan(masks.full(rows, keys), heads, heads_kv, dim, head_dim_v=dim_v, dtype=dtype)
        q, k, v, dout = (
            torch.zeros(shape, dtype=dtype)
            for shape in ((rows, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (rows, heads, dim_v))
        )
        options = (None, 1.0, softcap, False)
        with compiling_for(target) as found:
            out, lse, _ = triton_attention.forward(
                q, k, v, plan, plan.stages[0], None, None, None, 1.0, softcap, False, True, 0
            )
            triton_attention.backward(dout, lse, q, k, v, out, lse, None, plan, plan.stages[0], *options, 0)
        compiled += [one for one in found if one.made.hash not in {other.made.hash for other in compiled}]
    return compiled


def registers_of(kernel: Compiled) -> tuple[int, int]:
    """Return registers of a thread, and bytes of those that are spilled."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.made.asm["ptx"]
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(kernel.made.metadata.target.arch).path, "-v", f"--gpu-name={target[1]}", source]
        done = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True, check=True)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert registers is not None and spills is not None, done.stderr
    return int(registers[1]), int(spills[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=sorted(SHARED_MEMORY), choices=SHARED_MEMORY)
    parser.add_argument("--dims", type=_pair, nargs="+", default=HEAD_DIMS, metavar="DIM,DIM_V")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--softcap", action="store_true")
    given = parser.parse_args()
    failed = False
    for target in given.targets:
        for dims in given.dims:
            for dtype in given.dtypes:
                print(f"sm_{target}, head dims {dims}, {dtype}")
                for kernel in compile_attention(target, dims, getattr(torch, dtype), 50.0 * given.softcap):
                    registers, spills = registers_of(kernel)
                    too_large = kernel.shared > SHARED_MEMORY[target]
                    failed |= too_large
                    print(
                        f"  {kernel.made.name:16} {kernel.made.metadata.num_warps} warps, {registers:3} registers, "
                        f"{spills:5} B spilled, {kernel.shared / 1024:5.1f} KiB shared"
                        f"{' (TOO MUCH)' if too_large else ''}, {kernel.tensor_core_instructions:4} tensor core, "
                        f"{kernel.seconds:.1f} s",
                        flush=True,
                    )
    return int(failed)


def _pair(text: str) -> tuple[int, int]:
    dim, dim_v = text.split(",")
    return int(dim), int(dim_v)


if __name__ == "__main__":
    sys.exit(main())
