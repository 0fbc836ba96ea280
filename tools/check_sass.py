"""Static gate on the built kernels: what nvcc made of them, without a GPU.

    python tools/check_sass.py [LIBRARY]      # default: torch_magi/_C*.so; needs cuobjdump and nvdisasm (extra 'lint')

Prints a line per kernel. Fails
- where a kernel uses local memory (registers spilled, or an array is indexed at run time); in a kernel with tensor
  core products, between the first and the last of them: a number kept there from one item to the next costs nothing;
- where the loop of a kernel with tensor core products waits for all of them before the softmax, or moves descriptors
  between register files among the products: ptxas does either without an error;
- where a kernel that starts three products together waits for the second of them before the exponentials of the first;
- where a kernel that was to copy in whole 16-byte units does not;
- where the library has no kernels for sm_90a.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*[^;]*);")
LOCAL_MEMORY = ("LDL", "STL")
MAX_MOVES = 2  # R2UR among the products of a loop
# Kernels with more of them: at head_dim 256 the 21 descriptors of a loop do not all stay in uniform registers.
MOVES = {"13flex_attn_fwdINS1_5ShapeILi256ELi256E": 10}
# Products that the loop of a kernel starts together, where not two.
PRODUCTS = {"flex_attn_bwd_dq": 3}
# Kernel name -> instructions of which it must have one: the copy of whole 16-byte units.
REQUIRED = {"gather_rowsI5uint4": ("LDG.E.128", "STG.E.128")}


def find_cuobjdump() -> str:
    """Return the path of cuobjdump: on PATH, or installed by pip beside this Python.

    Raises:
        SystemExit: saying how to get it.
    """
    found = shutil.which("cuobjdump")
    if found is None:
        for folder in sys.path:
            for candidate in Path(folder).glob("nvidia/*/bin/cuobjdump"):
                return str(candidate)
        raise SystemExit("cuobjdump was not found; `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm` brings it")
    return found


def kernels_of(library: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (architecture, kernel, instructions) of every kernel in a library."""
    run = subprocess.run([find_cuobjdump(), "-sass", str(library)], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"cuobjdump failed:\n{run.stderr}")
    arch = "?"
    for block in re.split(r"(?=\n\s*Function : |\n\s*code for )", run.stdout):
        header = re.search(r"code for (sm_\w+)", block)
        if header:
            arch = header.group(1)
        name = re.search(r"Function : (\S+)", block)
        if name:
            yield arch, name.group(1), INSTRUCTION.findall(block)


def problems_of(name: str, instructions: list[str]) -> list[str]:
    """Return what is wrong with a kernel."""
    names = [re.split(r"[.\s]", op)[0] for op in instructions]
    products = [i for i, op in enumerate(names) if op == "HGMMA"]
    counts = Counter(names[products[0] : products[-1]] if products else names)
    found = [f"{counts[op]} {op}: local memory is used" for op in LOCAL_MEMORY if counts[op]]
    for part, wanted in REQUIRED.items():
        if part in name:
            found += [f"no {op}" for op in wanted if not any(i.startswith(op) for i in instructions)]
    if counts["HGMMA"]:
        most_moves = next((n for part, n in MOVES.items() if part in name), MAX_MOVES)
        together = next((n for part, n in PRODUCTS.items() if part in name), 2)
        found += problems_of_products(instructions, together, most_moves)
    return found


def problems_of_products(instructions: list[str], together: int, most_moves: int) -> list[str]:
    """Return what is wrong with the loop that starts some products together and waits for the first alone."""
    waits = [(i, op.rstrip()[-1]) for i, op in enumerate(instructions) if op.startswith("WARPGROUP.DEPBAR")]
    firsts = [n for n, (_, pending) in enumerate(waits) if pending == str(together - 1)]
    if len(firsts) != 1:
        count = {2: "two", 3: "three"}[together]
        return [f"{len(firsts)} waits for the first of {count} products, expected 1"]
    first, end = firsts[0], waits[firsts[0]][0]
    begin = max((i for i, pending in waits[:first] if pending == "0"), default=0)
    products = [i for i in range(begin, end) if instructions[i].startswith("HGMMA")]
    moves = sum(instructions[i].startswith("R2UR") for i in range(products[0], end))
    found = [f"{moves} R2UR among the products of the loop"] if moves > most_moves else []
    return found if together == 2 else found + problems_of_exponentials(instructions, waits[first : first + 3])


def problems_of_exponentials(instructions: list[str], waits: list[tuple[int, str]]) -> list[str]:
    """Return what is wrong with the waits for three products: all exponentials belong between the first two."""
    if [pending for _, pending in waits] != ["2", "1", "0"]:
        return ["the loop does not wait for its three products one after the other"]
    (first, _), (second, _), (third, _) = waits

    def exponentials(begin: int, end: int) -> int:
        return sum(op.startswith("MUFU.EX2") for op in instructions[begin:end])

    late, all_of_them = exponentials(second, third), exponentials(first, third)
    return [f"{late} of {all_of_them} exponentials after the second wait"] if late or not all_of_them else []


def main() -> int:
    """Check the library; return 1 where a kernel is not as it must be."""
    libraries = [Path(sys.argv[1])] if len(sys.argv) > 1 else sorted((ROOT / "torch_magi").glob("_C*.so"))
    if not libraries:
        raise SystemExit("torch_magi/_C*.so is not there; build it first: python setup.py build_ext --inplace")
    failed, seen = False, Counter[str]()
    for arch, name, instructions in kernels_of(libraries[0]):
        seen[arch] += 1
        problems = problems_of(name, instructions)
        failed |= bool(problems)
        print(f"{arch} {name[-60:]:<60} {len(instructions):>5} instructions  {'; '.join(problems) or 'ok'}")
    if not seen["sm_90a"]:
        print("the library has no kernels for sm_90a: build with nvcc on PATH, and without TORCH_MAGI_CUDA_ARCHS")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
