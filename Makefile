# Every target sets up what it needs: a fresh machine needs Python 3.10 or later and git, nothing else.
# `make` alone lists the targets. Another interpreter: `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(VENV)/.native
KERNELS := $(wildcard src/dgt/ops/cpu/kernels/*)
CPP := $(KERNELS) $(wildcard src/dgt/inference/*.cpp) $(wildcard tests/native/*.cpp tests/native/*.h)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TELL_NATIVE := ls src/dgt/ops/cpu/*.kernels >/dev/null 2>&1 || \
	echo "note: the native kernels were not built; $(BIN)/pip install --verbose --no-deps --editable . says why"

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-native test-timm test-triton test-kernels docs lint format bench release clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|' 2>/dev/null \
		|| grep -E '^[a-z-]+:.*## ' Makefile

setup: $(NATIVE) ## the virtual environment in .venv, with everything installed and the native kernels built

# The stamp is newer than these files exactly when the environment holds what they ask for.
$(READY): pyproject.toml CMakeLists.txt tools/build_backend.py
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "error: no interpreter '$(PYTHON)'; name one of version 3.10 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 10) else \
		"error: Python 3.10 or later is needed, $(PYTHON) is " + v + "; name another: make PYTHON=/path/to/python3")'
	@echo "setting up $(VENV) (the first time downloads several gigabytes, mostly torch)"
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv --clear $(VENV)
	@$(INSTALL) --editable '.[dev]'
	@$(TELL_NATIVE)
	@touch $(READY) $(NATIVE)

# Installing has built the kernels, too. Where they alone have changed since, nothing else is installed.
$(NATIVE): $(KERNELS) | $(READY)
	@if [ ! -e $@ ] || [ -n "$$(find $(KERNELS) -newer $@)" ]; then \
		echo "building the native kernels"; $(INSTALL) --no-deps --editable . && $(TELL_NATIVE); fi
	@touch $@

demo: $(NATIVE) ## train, evaluate and draw on the built-in data; results in runs/demo
	$(BIN)/dgt demo

# Two processes of one thread each: small tensors gain nothing from more threads, and two cores are all that CI has.
test: $(NATIVE) ## our tests but those of GPU kernels, timm's own on our models, the native kernels under sanitizers
	@$(MAKE) --no-print-directory test-unit
	@$(MAKE) --no-print-directory test-native
	@$(MAKE) --no-print-directory test-timm

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" --numprocesses=2 --dist=loadfile

test-unit: $(NATIVE)
	$(PYTEST) --ignore=tests/ops/triton

test-native: $(NATIVE) ## the native kernels against naive loops in C++, every instruction set and under sanitizers
	$(BIN)/python tests/native/run.py

test-timm: $(NATIVE)
	OMP_NUM_THREADS=1 $(BIN)/python tests/timm_suite/run.py -q --numprocesses=2 --dist=load

test-triton: $(NATIVE) ## the Triton kernels in Triton's interpreter, which needs no GPU
	$(PYTEST) tests/ops/triton

test-kernels: $(NATIVE) ## the Triton kernels compiled for GPUs that need not be there
	$(BIN)/python benchmarks/compile_kernels.py

docs: $(NATIVE) ## check every number of the pages, build the site in build/site; warnings are errors, nothing is fetched
	$(BIN)/python benchmarks/tables.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(NATIVE) ## ruff (rules and format), mypy (strict), and the format of the C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(NATIVE) ## let ruff sort the imports, repair what it can and lay out the code, and format the C++
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

bench: $(NATIVE) ## speed and memory, beside the alternatives
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/models.py

release: $(NATIVE) ## build sdist and wheel, try them in a fresh environment without a network; dist/ gets both
	$(BIN)/python tools/release.py $(RELEASE)

clean: ## remove the environment, caches and builds; runs/ stays
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
