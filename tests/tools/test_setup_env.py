"""tools/setup_env.sh names what is missing before it begins."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup_env.sh"
COMMANDS = ("bash", "dirname")


def run_with(folder: Path, *commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where only some commands exist. None of these runs gets past the preflight."""
    for command in (*COMMANDS, *commands):
        found = shutil.which(command)
        assert found is not None
        (folder / command).symlink_to(found)
    environment["PATH"] = str(folder)
    return subprocess.run([folder / "bash", SCRIPT], env=environment, capture_output=True, text=True, check=False)


def python_stub(folder: Path, name: str, code: str) -> None:
    """Make a Python whose `-c` runs `code` first."""
    path = folder / name
    path.write_text(f'#!{shutil.which("bash")}\nexec {sys.executable} "$1" "{code}$2"\n')
    path.chmod(0o755)


def test_names_one_line_for_everything(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    assert run.returncode == 1
    assert "apt-get install -y python3 python3-venv python3-dev g++\n" in run.stderr


@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import sys; sys.modules['ensurepip'] = None\n", "python3-venv"),
        ("import sysconfig; sysconfig.get_path = lambda name: '/nowhere'\n", "python3-dev"),
    ],
)
def test_names_the_missing_part_of_python(tmp_path: Path, code: str, package: str) -> None:
    python_stub(tmp_path, "python3", code)
    run = run_with(tmp_path, "g++")
    assert run.returncode == 1
    assert run.stderr.endswith(f"apt-get install -y {package}\n")


def test_names_the_compiler(tmp_path: Path) -> None:
    python_stub(tmp_path, "python3", "")
    run = run_with(tmp_path)
    assert run.returncode == 1
    assert run.stderr.endswith("apt-get install -y g++\n")


def test_names_packages_of_the_chosen_python(tmp_path: Path) -> None:
    run = run_with(tmp_path, "g++", PYTHON="python3.12")
    assert "apt-get install -y python3.12 python3.12-venv python3.12-dev\n" in run.stderr


def test_refuses_an_old_python(tmp_path: Path) -> None:
    python_stub(tmp_path, "python3", "import sys; sys.version_info = (3, 9, 2)\n")
    run = run_with(tmp_path, "g++")
    assert run.returncode == 1
    assert "needs Python 3.10 or newer" in run.stderr and "make PYTHON=" in run.stderr
