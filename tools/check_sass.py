"""Static gate on the built kernels: what nvcc made of them, without a GPU.

    python tools/check_sass.py [LIBRARY]      # default: torch_magi/_C*.so; needs cuobjdump and nvdisasm (extra 'lint')

Prints a line per kernel. Fails
- where the tile loop of a kernel with tensor core products, its innermost loop with any, does not start products, wait
  for them and take exponentials in the order of LOOPS: ptxas moves waits, or waits for each product, without an error;
- where that loop moves descriptors between register files (MOVES), or uses local memory;
- where a kernel uses local memory elsewhere (registers spilled, or an array is indexed at run time), SPILLS aside;
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
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*[^;]*);")
BRANCH = re.compile(r"BRA\b.*\b0x([0-9a-f]+)\s*$")
LOCAL_MEMORY = ("LDL", "STL")
Value = TypeVar("Value", int, str)

# All tables but REQUIRED: regular expression that a kernel's name contains -> value; the first that fits counts. Names
# end in ELb<bfloat16>ELb<softcap>EEEv; those of dK and dV go on after the head dims with ELb<dK>ELb<dV>E.
#
# Kernel -> the order of its tile loop. H: products are started; E: exponentials; a digit: a wait, after which so many
# groups of products may still be under way.
LOOPS = {
    # S of the next tile and O of this one are started together. O is not waited for before the maximum of S is known
    # (the first E: the factor by which it has changed), but before the exponentials: they need registers.
    r"flex_attn_fwdI.*ELb0EEEv": "H1E0E",
    r"flex_attn_fwdI.*ELb1EEEv": "H10E",  # the softcap needs them before the maximum
    # S, dP and the dQ of the tile before together. All exponentials while dP and dQ go on.
    r"flex_attn_bwd_dqI": "H2E10",
    # One gradient at head dim 256: registers for it or for S and dP. dK: the exponentials while dP goes on.
    r"DkDvShapeILi256E\w*ELb1ELb0ELi": "H0H1E0",
    r"DkDvShapeILi256E\w*ELb0ELb1ELi": "H0H0E",
    # One gradient: S (for dK also dP) of the next tile and the gradient of this one together, as for dQ.
    r"DkDvShapeI\w*ELb1ELb0ELi": "H2E10",
    r"DkDvShapeI\w*ELb0ELb1ELi\w*ELb0EEEv": "H1E0",
    r"DkDvShapeI\w*ELb0ELb1ELi\w*ELb1EEEv": "H1E0E0",  # dV is done before P is packed; the 0 waits for nothing
    # Both: dV and dK; when dV is done S and dP; when dK and S are done the exponentials while dP goes on.
    r"DkDvShapeI\w*ELb1ELb1ELi": "H1H1E0",
}
# Kernel -> the most R2UR in its tile loop, where not MAX_MOVES.
MAX_MOVES = 2
MOVES = {
    # The number of bands, and the softcap's arithmetic: no descriptors.
    r"flex_attn_bwd_dqINS2_5ShapeILi64E\w*ELb1EEEv": 3,
}
# Kernel -> the most instructions on local memory outside the tile loop, where any may be.
SPILLS = {
    # With 240 registers for the consumers the producers have 24, and spill: the counter of items, and addresses.
    r"DkDvShapeILi128E\w*ELb1ELb1ELi": 20,
}
# Part of a kernel's name -> instructions of which it must have one: the copy of whole 16-byte units.
REQUIRED = {
    "gather_rowsI5uint4": ("LDG.E.128", "STG.E.128"),
    **{f"merge_rowsI{unit}E": ("LDG.E.128", "STG.E.128") for unit in ("fLi4", "dLi2")},
    **{
        f"add_rowsI{unit}E": ("LDG.E.128", "STG.E.128")
        for unit in ("ddLi2", "ffLi4", "13__nv_bfloat16fLi8", "6__halffLi8")
    },
}


class Instruction(NamedTuple):
    """An instruction without its predicate, as it is written in a listing."""

    address: int
    text: str

    @property
    def name(self) -> str:
        return re.split(r"[.\s]", self.text)[0]


def instructions_of(listing: str) -> list[Instruction]:
    """Return the instructions of a kernel's listing."""
    return [Instruction(int(address, 16), text) for address, text in INSTRUCTION.findall(listing)]


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


def kernels_of(library: Path) -> Iterator[tuple[str, str, list[Instruction]]]:
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
            yield arch, name.group(1), instructions_of(block)


def value_for(table: dict[str, Value], name: str, default: Value) -> Value:
    """Return the value of the first pattern that a kernel's name contains."""
    return next((value for pattern, value in table.items() if re.search(pattern, name)), default)


def tile_loop_of(instructions: list[Instruction]) -> list[Instruction]:
    """Return the innermost loop with products: of all branches back past one, up to the first."""
    for branch in instructions:  # later ones are of outer loops, and of waits that ptxas puts behind everything
        target = BRANCH.match(branch.text)
        if target and int(target[1], 16) <= branch.address:
            loop = [i for i in instructions if int(target[1], 16) <= i.address <= branch.address]
            if any(i.name == "HGMMA" for i in loop):
                return loop
    return []


def order_of(loop: list[Instruction]) -> str:
    """Return products, exponentials and waits of a loop as they are written in LOOPS."""
    order = ""
    for i in loop:
        if i.text.startswith("WARPGROUP.DEPBAR"):
            order += i.text.rstrip()[-1]
        elif i.name == "HGMMA":
            order += "H"
        elif i.text.startswith("MUFU.EX2"):
            order += "E"
    return re.sub(r"([HE])\1+", r"\1", order)


def problems_of(name: str, instructions: list[Instruction]) -> list[str]:
    """Return what is wrong with a kernel."""
    found = []
    for part, wanted in REQUIRED.items():
        if part in name:
            found += [f"no {op}" for op in wanted if not any(i.text.startswith(op) for i in instructions)]
    loop: list[Instruction] = []
    if any(i.name == "HGMMA" for i in instructions):
        loop = tile_loop_of(instructions)
        found += problems_of_loop(name, loop)
    spills = Counter(i.name for i in instructions if i.name in LOCAL_MEMORY)
    spills.subtract(i.name for i in loop if i.name in LOCAL_MEMORY)
    if spills.total() > value_for(SPILLS, name, 0):
        found += [f"{n} {op}: local memory is used" for op, n in sorted(spills.items()) if n]
    return found


def problems_of_loop(name: str, loop: list[Instruction]) -> list[str]:
    """Return what is wrong with a tile loop."""
    counts = Counter(i.name for i in loop)
    order, expected = order_of(loop), value_for(LOOPS, name, "")
    found = []
    if not expected:
        found.append("a kernel with products that LOOPS does not know")
    elif order != expected:
        found.append(f"the loop's order is {order}, not {expected}" if loop else "no loop with products")
    if counts["R2UR"] > value_for(MOVES, name, MAX_MOVES):
        found.append(f"{counts['R2UR']} R2UR in the loop")
    return found + [f"{counts[op]} {op} in the loop" for op in LOCAL_MEMORY if counts[op]]


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
