"""The generated header is what its generator writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).parent.parent.parent / "tools" / "generate_wgmma.py"


def test_header_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
