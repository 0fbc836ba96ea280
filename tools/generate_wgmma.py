"""Write csrc/cuda/ptx/wgmma.cuh: the wgmma instruction as functions. C++ has no lists of registers of a length
that a template chooses, so each shape is spelled out.

    python tools/generate_wgmma.py            # rewrites the header
    python tools/generate_wgmma.py --check    # fails where it would change
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "ptx" / "wgmma.cuh"
WIDTHS = [48, 64, 80, 96, 112, 128, 160, 192, 256]  # columns of the result that a kernel uses
HEAD = """// Made by tools/generate_wgmma.py.
//
// wgmma m64nNk16: a 64 x N float32 result in the registers of four warps, from 16-bit operands. A comes from
// shared memory (`ss`) or registers (`rs`), B from shared memory; kTransposed: B is stored with its N dimension
// contiguous. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once
#include <cstdint>

namespace magi::cuda {

template <int N, bool kBFloat16, int kTransposed>
struct Wgmma;
"""


def joined(items: list[str], per_line: int, indent: str) -> str:
    """Return items separated by commas, in lines."""
    lines = [", ".join(items[i : i + per_line]) for i in range(0, len(items), per_line)]
    return f",\n{indent}".join(lines)


def instruction(width: int, kind: str, a_in_registers: bool) -> str:
    """Return the PTX text as string literals, one a line."""
    n = width // 2
    if a_in_registers:
        a, b, accumulate, rest = "{" + ", ".join(f"%{n + i}" for i in range(4)) + "}", n + 4, n + 5, f"%{n + 6}"
    else:
        a, b, accumulate, rest = f"%{n}", n + 1, n + 2, f"0, %{n + 3}"
    registers = joined([f"%{i}" for i in range(n)], 16, "").split("\n")
    lines = [f'"{{.reg .pred p; setp.ne.b32 p, %{accumulate}, 0; "']
    lines += [f'"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{"']
    lines += [f'"{line}"' for line in registers]
    lines += [f'"}}, {a}, %{b}, p, 1, 1, {rest};}}"']
    return "\n        ".join(lines)


def shape(width: int, bfloat16: bool) -> str:
    """Return the specialisation of a shape and dtype."""
    n, kind = width // 2, "bf16" if bfloat16 else "f16"
    outputs = joined([f'"+f"(d[{i}])' for i in range(n)], 8, " " * 10)
    return f"""
template <int kTransposed>
struct Wgmma<{width}, {str(bfloat16).lower()}, kTransposed> {{
  static __device__ __forceinline__ void ss(float (&d)[{n}], uint64_t a, uint64_t b, int accumulate) {{
    asm volatile(
        {instruction(width, kind, False)}
        : {outputs}
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposed));
  }}
  static __device__ __forceinline__ void rs(float (&d)[{n}], const uint32_t* a, uint64_t b, int accumulate) {{
    asm volatile(
        {instruction(width, kind, True)}
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed));
  }}
}};
"""


def main() -> int:
    """Write the header, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the header is another")
    arguments = parser.parse_args()
    body = "".join(shape(width, bfloat16) for width in WIDTHS for bfloat16 in (True, False))
    text = f"// clang-format off\n{HEAD}{body}\n}}  // namespace magi::cuda\n"
    if not arguments.check:
        HEADER.write_text(text)
        return 0
    if HEADER.read_text() != text:
        print(f"{HEADER.name} is not what tools/generate_wgmma.py writes; run it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
