#!/usr/bin/env bash
# Everything that needs a GPU, in one go: tests, compute-sanitizer, timing. Each step ends within its own limit.
#
#   tools/gpu_check.sh [tests] [triton] [sanitizer] [timing]      # default: all of them
#
# Uses the library that is built in this tree; where Python is another one than it was built with, only the
# planner is built again.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
steps=${*:-tests triton sanitizer timing}

if ! python3 -c 'import torch_magi._planner' 2>/dev/null; then
  suffix=$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  # shellcheck disable=SC2046
  c++ -O2 -std=c++17 -shared -fPIC -fvisibility=hidden -Icsrc/include $(python3 -m pybind11 --includes) \
    csrc/planner/*.cpp -o "torch_magi/_planner$suffix" || exit 1
fi
python3 -m torch_magi info
pytest_options=(-q --no-header --show-capture=no --durations=5 --maxfail=40)

for step in $steps; do
  echo "=== $step ($(date +%T))"
  case $step in
    tests)
      timeout 240 python3 -m pytest tests/gpu --ignore=tests/gpu/test_triton.py "${pytest_options[@]}" 2>&1 | tail -60
      timeout 200 python3 -m pytest tests/attention/test_mask_functions.py -k gpu "${pytest_options[@]}" 2>&1 | tail -60 ;;
    triton) timeout 400 python3 -m pytest tests/gpu/test_triton.py "${pytest_options[@]}" 2>&1 | tail -60 ;; # compiles first
    sanitizer)
      for tool in memcheck synccheck racecheck; do
        echo "--- $tool"
        timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 python3 tests/gpu/sanitizer_case.py 2>&1 | tail -8
      done ;;
    timing) timeout 200 python3 benchmarks/flex_attn.py "${TIMING_ARGS[@]:---peers=cudnn}" 2>&1 | tail -40 ;;
  esac
done
