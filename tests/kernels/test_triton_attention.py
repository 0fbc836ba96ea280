"""Runs `interpreted_attention.py` in Triton's interpreter, a process for each of its classes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILE = Path(__file__).with_name("interpreted_attention.py")
CLASSES = [node.name for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("name", CLASSES)
def test_in_the_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    options = ["-q", "--no-header", "-p", "no:cacheprovider", f"--seed={request.config.getoption('--seed')}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"{FILE}::{name}"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
