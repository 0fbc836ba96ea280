"""What `import torch_magi` gives and does, also where parts of the package were not built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_magi

PACKAGE = Path(torch_magi.__file__).parent


# An editable installation would find what a copy lacks.
ONLY_HERE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ONLY_HERE + code], cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def copy_without(tmp_path: Path):
    """Return a function that copies the package without the files of a pattern."""

    def copy(pattern: str) -> Path:
        ignore = shutil.ignore_patterns("__pycache__", pattern)
        shutil.copytree(PACKAGE, tmp_path / "torch_magi", ignore=ignore)
        return tmp_path

    return copy


def test_public_names() -> None:
    """A change here is a change of the public interface."""
    assert sorted(torch_magi.__all__) == [
        "AttnPlan",
        "AuxOutput",
        "AuxRequest",
        "CommPlan",
        "KernelOptions",
        "PlanConfig",
        "compile_options",
        "context_parallel_attn",
        "cp_mean_loss",
        "dispatch",
        "flex_attention",
        "flex_flash_attn",
        "group_cast",
        "group_reduce",
        "make_attn_plan",
        "masks",
        "merge_state",
        "roll",
        "tensor",
        "undispatch",
    ]
    for name in torch_magi.__all__:
        assert getattr(torch_magi, name).__doc__, f"{name} has no docstring"
    assert (PACKAGE / "py.typed").exists()


def test_import_has_no_side_effects() -> None:
    code = """
import os, sys, threading, torch
before = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), threading.active_count()
import torch_magi
assert before == (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), threading.active_count())
# Triton, where it is installed, comes with torch.utils.flop_counter, in which operators register their FLOPs.
names = "matplotlib", "torch._inductor.lowering", "torch.distributed.tensor", "torch_magi.testing"
slow = [m for m in names if m in sys.modules]
assert not slow, slow
assert not torch.cuda.is_initialized()
"""
    done = run_python(code, PACKAGE.parent)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stderr


def test_without_the_operator_library(copy_without) -> None:
    code = """
import torch, torch_magi as magi
mask = magi.masks.causal(4)
plan = magi.make_attn_plan(mask, 1, 1, 8, dtype=torch.float32)
print(mask.area, len(str(plan)) > 0)
q = torch.zeros(4, 1, 8)
try:
    magi.flex_flash_attn(q, q, q, plan)
except NotImplementedError as error:
    print(error)
"""
    done = run_python(code, copy_without("_C*"))
    assert done.returncode == 0, done.stderr
    first, error = done.stdout.splitlines()
    assert first == "10 True"
    assert "the operator library was not built" in error and "reinstall torch_magi" in error


def test_without_the_planner(copy_without) -> None:
    done = run_python("import torch_magi", copy_without("_planner*.so"))
    assert done.returncode != 0
    assert "ImportError: torch_magi was not built" in done.stderr and "pip install" in done.stderr
