# make demo and make test set up everything they need on a machine with Python 3.10 to 3.14 and
# a C++17 compiler. PYTHON=python3.12 chooses another interpreter for the virtual environment.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
NATIVE := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
FORMATTED = $(shell find csrc tools -type f | grep -E '\.(c|cpp|h|inl|cu|cuh)$$')
EXTRAS := train,demo,test

.PHONY: help setup test test-all test-layouts test-kernels test-flash test-crash test-full test-plan test-outside lint
.PHONY: format demo bench gpu-check gpu-report clean
help:
	@echo "make demo       train a small model on photographs, let transformers ask it (5 min)"
	@echo "make test       lint, types and most tests (6 min on 2 cores)"
	@echo "make test-all   lint, types and all tests (35 min)"
	@echo "make test-layouts   every parallel layout against transformers (9 min)"
	@echo "make test-flash tiled CUDA attention, every instance, interpreted (long)"
	@echo "make test-crash, make test-full   long tests of checkpoints and conversions"
	@echo "make test-plan  runs of several layouts beside what the planner says of them (8 min)"
	@echo "make test-outside   ours in the places of other projects' classes, as far as those are installed"
	@echo "make bench      speed beside the peers, into benchmarks/"
	@echo "make gpu-check  build, smoke, timings, tests on a GPU (10 min); make gpu-report: its tables"
	@echo "make format     rewrite Python and C++ sources in the project's style"

setup: $(STAMP)

# The scripts in a virtual environment name its folder, and its packages this one.
VERSION := -c "import sys; print(*sys.version_info[:2], sep='.')"
.PHONY: venv-fits
venv-fits:
	@made=$$(cat $(STAMP) 2> /dev/null); [ -z "$$made" ] || [ "$$made" = "$(CURDIR)" ] || \
	  { echo "$(VENV) was made in $$made, not here: rm -r $(VENV)" >&2; exit 1; }
	@[ ! -f $(STAMP) ] || [ -x $(RUN) ] || \
	  { echo "$(VENV) is broken, its Python is gone: rm -r $(VENV)" >&2; exit 1; }
	@[ "$(origin PYTHON)" = file ] || [ ! -x $(RUN) ] || \
	  [ "$$($(PYTHON) $(VERSION))" = "$$($(RUN) $(VERSION))" ] || \
	  { echo "$(VENV) has another Python than $(PYTHON): rm -r $(VENV), or VENV=another" >&2; exit 1; }

# torch comes first: with the pinned version present, pip has no reason to look for another.
$(STAMP): $(NATIVE) constraints.txt | venv-fits
	@$(RUN) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(VENV) is broken: rm -r $(VENV)" >&2; exit 1; }
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e ".[$(EXTRAS)]"
	@echo "$(CURDIR)" > $@

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)

# Dealt over the cores; tests of one module stay together, they share what is built for them.
PYTEST := $(RUN) -m pytest -n auto --dist loadscope --no-loadscope-reorder
test: lint
	$(PYTEST) -m "not slow"

test-all: test
	$(PYTEST) -m slow

# The kernels alone: in both simulators, and those of the CPU.
test-kernels: setup
	$(RUN) -m pytest tools tests/cuda tests/kernels

# Every layout against transformers, 240 cases, failing ranks, resumed LoRA (9 min on 2 cores).
test-layouts: setup
	$(RUN) -m pytest tests/parity/matrix.py tests/train/matrix.py tests/optim/matrix.py -rP

# Every instance of tiled attention on both architectures in the PTX interpreter.
test-flash: setup
	$(RUN) -m pytest tests/cuda/ptx_matrix.py -rP

format: setup
	$(RUN) -m ruff check --fix -q .
	$(RUN) -m ruff format -q .
	$(VENV)/bin/clang-format -i $(FORMATTED)

# 50 kills at random moments of saves and conversions (10 min).
test-crash: setup
	$(RUN) -W ignore -m tests.checkpoint.crash 50

# Converts a random-weight model of Qwen2-VL-2B's sizes there and back (15 GB of disk; SIZE=7B: 50
# GB), compares, and records time and memory in benchmarks/.
SIZE ?= 2B
test-full: setup
	$(RUN) -W ignore -m tests.checkpoint.full_size build/full-size $(SIZE)

# Trains on seven layouts of two processes; wants a quiet machine.
test-plan: setup
	$(RUN) -W ignore -m tests.plan.compare build/plan
	$(RUN) -m pytest tests/plan/schedule_measured.py -rP

# torch's table of optimizers, accelerate, peft, trl, DeepSpeed: what is installed (nothing is fetched;
# $(PIP) install -e ".[outside]" brings them). Skipped tests say what is missing, expected failures why
# we differ: tests/outside/differences.py.
test-outside: setup
	$(RUN) -m pytest tests/outside -rsx

demo: setup
	$(RUN) -m vlmtrain.cli demo --output demo_out

bench: setup
	$(RUN) -m benchmarks.run

# Runs offline from the source tree with the machine's own torch: no virtual environment. STEPS: all
# but the sanitizer, as far as ten minutes last.
gpu-check:
	$(PYTHON) -m tools.gpu_check $(STEPS)

# Tables of what gpu-check left in folders: make gpu-report FROM="folder another".
FROM ?= gpu-check
gpu-report: setup
	$(RUN) -m benchmarks.report $(FROM)

clean:
	rm -rf build *.egg-info demo_out vlmkernels/*.so
