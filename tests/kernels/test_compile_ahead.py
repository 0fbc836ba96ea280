"""The kernels in Triton compile for GPUs of each kind, which shows what the interpreter cannot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def check_triton() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "check_triton.py"
    spec = importlib.util.spec_from_file_location("check_triton", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", [80, 90, 100])
def test_attention_compiles(
    target: int, check_triton: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = check_triton.compile_attention(target, (128, 128), torch.bfloat16)
    names = {kernel.made.name for kernel in kernels}
    attention = {"forward_kernel", "queries_kernel", "keys_kernel"}
    assert names == attention | {"join_kernel", "rows_kernel", "add_kernel"}
    for kernel in kernels:
        assert kernel.shared <= check_triton.SHARED_MEMORY[target]
        assert (kernel.tensor_core_instructions > 0) == (kernel.made.name in attention)
