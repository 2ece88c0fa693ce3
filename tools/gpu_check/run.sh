#!/usr/bin/env bash
# make gpu-check: builds the extension in the source tree with the machine's own Python and torch,
# runs the GPU tests, compute-sanitizer where it works, and the GPU benchmarks, whose rows go to
# benchmarks/results/<gpu>.json. No network, no virtual environment. PYTHON=... chooses the Python.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset VLMKERNELS_ISA
skipped=()
failed=()

has() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
step() { printf '\n==== %s (%ss)\n' "$1" "$SECONDS"; }

command -v "$PYTHON" >/dev/null || { echo "gpu-check: there is no $PYTHON; set PYTHON" >&2; exit 1; }
has torch || { echo "gpu-check: $PYTHON has no torch; set PYTHON to one that has" >&2; exit 1; }
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
  { echo "gpu-check: torch finds no GPU on this machine, so there is nothing to check" >&2; exit 1; }

missing=()
for package in setuptools pybind11 cmake ninja pytest hypothesis; do
  has "$package" || case $package in
    cmake | ninja) command -v "$package" >/dev/null || missing+=("$package") ;;
    *) missing+=("$package") ;;
  esac
done
[ ${#missing[@]} -eq 0 ] ||
  { echo "gpu-check: $PYTHON lacks ${missing[*]}; install them" >&2; exit 1; }

step "build"
VLMKERNELS_CUDA=ON "$PYTHON" setup.py build_ext --inplace ||
  { echo "gpu-check: the build failed, see above" >&2; exit 1; }
"$PYTHON" -m vlmkernels.info || { echo "gpu-check: vlmkernels does not import" >&2; exit 1; }

step "tests/gpu"
"$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu || failed+=("tests/gpu")

step "compute-sanitizer"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -z "$sanitizer" ]; then
  skipped+=("compute-sanitizer: not installed")
elif ! timeout 60 "$sanitizer" "$PYTHON" -c \
  'import torch; torch.ones(4, device="cuda").sum().item()' >/dev/null 2>&1; then
  skipped+=("compute-sanitizer: it does not work on this machine")
else
  for tool in memcheck racecheck initcheck synccheck; do
    echo "-- $tool"
    # Without torch's caching allocator every tensor has bounds of its own.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 45 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      "$PYTHON" -m tools.gpu_check.sanitize
    case $? in
      0) ;;
      124) skipped+=("compute-sanitizer $tool: not done after 45 s") ;;
      *) failed+=("compute-sanitizer $tool") ;;
    esac
  done
fi

step "benchmarks"
"$PYTHON" -m benchmarks.run --device cuda --seconds 20 || failed+=("benchmarks")

"$PYTHON" -m benchmarks.timeline --device cuda || failed+=("timeline of the offloaded step")

step "done"
has megatron || skipped+=("training step: megatron-core is not installed")
skipped+=("CPU benchmarks: make bench runs them")
for what in "${skipped[@]}"; do echo "skipped: $what"; done
for what in "${failed[@]}"; do echo "FAILED: $what"; done
[ ${#failed[@]} -eq 0 ] && echo "gpu-check passed in ${SECONDS}s"
