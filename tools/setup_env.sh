#!/usr/bin/env bash
# Make .venv: the right torch, this package (built from source), and what the tests and pictures need.
#
#   tools/setup_env.sh            does nothing where everything is up to date
#   tools/setup_env.sh lint       the same, and installs the tools of `make lint`, as pyproject.toml pins them
#   PYTHON=python3.12 tools/setup_env.sh
#   TORCH='...' tools/setup_env.sh   arguments of `pip install` that choose torch, instead of the default
#
# Up to date means: setup.py, pyproject.toml, csrc/, this script and the choices above are as they were.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
torch=${TORCH:-}
default_torch="torch==2.13.0" # the newest release that the tests ran with; others from 2.11 on work
has_gpu=no
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then has_gpu=yes; fi

# Stop with the one line that installs everything that is missing.
preflight() {
  local missing=() package=python3
  [[ ${python##*/} =~ ^python3\.[0-9]+$ ]] && package=${python##*/}
  if ! command -v "$python" >/dev/null; then
    missing+=("$package" "$package-venv" "$package-dev")
  else
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "torch_magi needs Python 3.10 or newer; $python is $("$python" -V 2>&1)." >&2
      echo "Name a newer one: make PYTHON=python3.12 ..." >&2
      exit 1
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=("$package-venv")
    "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h")).close()' \
      2>/dev/null || missing+=("$package-dev")
  fi
  command -v c++ >/dev/null || command -v g++ >/dev/null || missing+=(g++)
  if [ ${#missing[@]} -gt 0 ]; then
    echo "Some system packages are missing. On Debian or Ubuntu this installs them:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
    exit 1
  fi
}

# What was installed is described by two digests, kept in .venv: of the packages, and of the compiled sources.
digest() { sha256sum | cut -d' ' -f1; }
packages_digest() {
  {
    sed '/^\[tool\.[prmc]/,$d' pyproject.toml # without the settings of pytest, ruff, mypy and codespell
    cat tools/setup_env.sh
    echo "$python $("$python" -V) $torch $has_gpu"
  } | digest
}
sources_digest() {
  {
    find csrc setup.py -type f | LC_ALL=C sort | xargs sha256sum
    echo "$(command -v nvcc || true) ${CUDA_HOME:-} ${TORCH_MAGI_CUDA_ARCHS-default}"
  } | digest
}
same() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

install_torch() {
  if [ -n "$torch" ]; then
    # shellcheck disable=SC2086  # several arguments in one variable are meant
    pip install -q $torch
  elif [ $has_gpu = yes ]; then
    pip install -q "$default_torch"
  elif ! pip install -q "$default_torch+cpu" 2>/dev/null; then
    echo "pip finds no CPU build of torch here, so this takes the CUDA build: it works, and is several GB."
    echo "README.md, 'Install', says how to take the small CPU build instead."
    pip install -q "$default_torch"
  fi
}

install_packages() {
  rm -rf .venv
  "$python" -m venv .venv
  echo "Installing torch in .venv ..."
  pip install -q "setuptools>=77" wheel "pybind11>=2.12" ninja
  install_torch
  echo "Building torch_magi and installing what the tests and pictures need ..."
  pip install -q --no-build-isolation -e '.[plot,test]'
}

install_lint_tools() {
  local wanted
  wanted=$(.venv/bin/python - <<'END'
from importlib.metadata import requires
for requirement in requires("torch_magi"):
    name, _, condition = requirement.partition(";")
    if 'extra == "lint"' in condition:
        print(name.strip())
END
  )
  # shellcheck disable=SC2086
  pip install -q $wanted
}

built() { compgen -G 'torch_magi/_C*.so' >/dev/null && compgen -G 'torch_magi/_planner*.so' >/dev/null; }

preflight
packages=$(packages_digest)
sources=$(sources_digest)
if ! same .venv/packages.stamp "$packages"; then
  install_packages
  changed=yes
elif ! same .venv/sources.stamp "$sources" || ! built; then
  echo "Building torch_magi ..."
  mkdir -p build
  .venv/bin/python setup.py -q build_ext --inplace >build/log.txt 2>&1 || { cat build/log.txt >&2; exit 1; }
  changed=yes
fi
if [ "${changed:-no}" = yes ]; then
  echo "$packages" >.venv/packages.stamp
  echo "$sources" >.venv/sources.stamp
  .venv/bin/python -m torch_magi info
fi
if [ "${1:-}" = lint ] && ! same .venv/lint.stamp "$packages"; then
  install_lint_tools
  echo "$packages" >.venv/lint.stamp
fi
