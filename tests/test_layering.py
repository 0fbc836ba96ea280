"""Each package imports only from those before it in the list of README.md, 'Where things are'."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torch_magi"
LAYERS = [
    ("_planner", "_extension", "_torch_internals", "viz"),
    ("masks",),
    ("plan",),
    ("kernels",),
    ("ops",),
    ("comm",),
    ("attention", "tensor"),
    ("__init__",),
    ("testing", "__main__"),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(source: str) -> set[str]:
    """Return the first-level names below torch_magi that a module imports, wherever in the module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "torch_magi":
                inner = rest.split(".")[0]
                found.add(inner if inner in LEVEL else "__init__")
    return found


def layer_of(module: Path) -> str:
    return module.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_imports_go_one_way(module: Path) -> None:
    own = layer_of(module)
    assert own in LEVEL, f"{own} has no place in LAYERS"
    for name in imports_of(module.read_text()) - {own}:
        assert LEVEL[name] < LEVEL[own], f"{own} imports {name}, which comes after it"
        assert own != "viz", "pictures get plain data"


def test_the_check_sees_every_kind_of_import() -> None:
    source = """
import torch_magi.masks.mask
from torch_magi.plan import types
def f():
    from torch_magi import comm, flex_flash_attn
"""
    assert imports_of(source) == {"masks", "plan", "comm", "__init__"}


def test_private_torch_is_imported_in_one_place() -> None:
    """Attributes below torch._C are used where an operator is registered; opaque types only in one module."""
    for module in MODULES:
        if module.name != "_torch_internals.py":
            assert "_opaque_base" not in module.read_text() and "opaque_object" not in module.read_text(), module


@pytest.mark.parametrize("folder", ["torch_magi", "csrc", "tests", "examples", "tools", "docs", "benchmarks"])
def test_no_large_files(folder: str) -> None:
    for path in (PACKAGE.parent / folder).rglob("*"):
        if path.is_file() and path.suffix not in (".so", ".pyc"):
            assert path.stat().st_size <= 100_000, f"{path} is larger than 100 KB"
