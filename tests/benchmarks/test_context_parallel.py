"""The benchmark of several ranks runs, its peers are right; on the CPU, where its times mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--device", "cpu", "--heads", "4,2", "--dim", "16", "--rounds", "1", "--tokens", "64"]


def run_benchmark(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run it under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, str(ROOT / "benchmarks" / "context_parallel.py"), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    masks = "causal,varlen_causal"
    run = run_benchmark("--masks", masks, "--overlap", "0,2", "--modes", "eager", "--json", str(out))
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert found["ranks"] == 2
    for row in found["rows"]:
        assert row["tokens"] == 128
        without = row["ways"].pop("torch_cp")["without"]
        assert without.startswith("NotImplementedError")
        without_gpu = row["ways"].pop("torch_magi eager 2 symmetric_memory")
        assert row["ways"].pop("torch_magi eager 0 symmetric_memory").keys() == without_gpu.keys()
        assert set(row["ways"]) == {"torch_magi eager 0", "torch_magi eager 2", "all_gather", "ring"}
        for way in row["ways"].values():
            assert way["right"] and way["error"] < 1e-5 and way["backward"]["ms"] > 0
        assert without_gpu["without"].startswith("NotImplementedError: transport='symmetric_memory'")


def test_refuses_what_it_does_not_know() -> None:
    run = run_benchmark("--peers", "rings", ranks=1)
    assert run.returncode != 0
    assert "--peers: no such peer: rings; there are all_gather, ring, torch_cp" in run.stderr
