PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
INSTALL_APART := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --target
# In runs of neighbours, so that a model which the tests of a file share is captured by one worker alone.
PYTEST_ARGS ?= -n 2 --dist worksteal
# It calls every model of transformers, and is run by itself.
BENCHMARKS := $(filter-out benchmarks/zoo.py, $(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help demo test install-test lint types bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s:

demo: $(VENV)/.installed  ## train a small model on the bundled rollouts, packed and unpacked
	$(BIN)/treecompile demo

test: $(VENV)/.installed-test $(VENV)/.installed-kernels  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

install-test: $(VENV)/.installed-test $(VENV)/.installed-kernels  ## install with the test extras

lint: $(VENV)/.installed-dev  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## check types
	$(BIN)/mypy

bench: $(VENV)/.installed-test  ## run the benchmarks
	failed=0; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file || failed=1; done; exit $$failed

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[test]'
	@touch $@ $(VENV)/.installed

# In folders of their own: transformers would call kernels that it finds, and they need a GPU; so would fla tilelang.
$(VENV)/.installed-kernels: constraints.txt | $(BIN)/python
	rm -rf $(VENV)/kernels $(VENV)/tilelang
	$(INSTALL_APART) $(VENV)/kernels fla-core triton einops
	$(INSTALL_APART) $(VENV)/tilelang tilelang apache-tvm-ffi cloudpickle ml-dtypes psutil z3-solver
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed
