"""Static gate on the built kernels: what nvcc made of them, without a GPU.

    python tools/check_sass.py [LIBRARY]      # default: torch_magi/_C*.so; needs cuobjdump (pip extra 'lint')

Prints a line per kernel. Fails where a kernel uses local memory, which means that registers spilled or that an
array is indexed at run time; where the library has no kernels for sm_90a; and where a kernel that was to
vectorise its copies does not.
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
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
LOCAL_MEMORY = ("LDL", "STL")
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
        raise SystemExit("cuobjdump was not found; `pip install nvidia-cuda-cuobjdump` brings it")
    return found


def kernels_of(library: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (architecture, kernel, instructions) of every kernel in a library."""
    run = subprocess.run([find_cuobjdump(), "-sass", str(library)], capture_output=True, text=True, check=True)
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
    counts = Counter(op.split(".")[0] for op in instructions)
    found = [f"{counts[op]} {op}: local memory is used" for op in LOCAL_MEMORY if counts[op]]
    for part, wanted in REQUIRED.items():
        if part in name:
            found += [f"no {op}" for op in wanted if not any(i.startswith(op) for i in instructions)]
    return found


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
