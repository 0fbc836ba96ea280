"""The compiled parts. The operator library is loaded once, when torch_magi is imported, and is no reason to fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

_problem: str | None = None


def load() -> None:
    """Load the operator library if it was built. Problems are reported by `explain_missing`.

    Raises:
        ImportError: if the planner was not built, without which there are no masks.
    """
    global _problem
    if importlib.util.find_spec("torch_magi._planner") is None:
        raise ImportError(
            f"torch_magi was not built for Python {sys.version_info.major}.{sys.version_info.minor}: {__file__} has no "
            "compiled planner beside it. Build it with `pip install --no-build-isolation .` (README.md, 'Install')"
        )
    found = sorted(Path(__file__).parent.glob("_C*.so"))
    if not found:
        _problem = "the operator library was not built"
        return
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        _problem = f"the operator library could not be loaded: {error}"


def explain_missing() -> str | None:
    """Return why there are no compiled operators, or None if there are."""
    return None if _problem is None else f"{_problem}; reinstall torch_magi where a C++ compiler is found"


def has_kernel(op: str, device_type: str) -> bool:
    """Return whether the library has a kernel of operator `op` for a device type ("cpu", "cuda")."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"torch_magi::{op}", device_type.upper())


def has_cuda_kernels() -> bool:
    """Return whether the library was built with CUDA kernels."""
    return has_kernel("range_gather", "cuda")
