# Two commands for a fresh machine with Python >= 3.11 and make: `make demo` and `make test`.
# A stamp file says what .venv holds, so that a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU: the release that CI tests. TORCH_ARGS picks where pip looks for its CPU
# build, if the package index of this machine offers the CUDA build first.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.11,torch==2.13.0)
TORCH_ARGS ?=
# What megatron.core needs beside torch's CPU build, which brings no triton: the one of torch 2.13.
MEGATRON ?= megatron-core==0.19.2
TRITON ?= $(if $(shell command -v nvidia-smi 2>/dev/null),triton,triton==3.7.1)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
TESTS ?=
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint docs clean

demo: $(VENV)/.demo
	$(BIN)/python recipes/demo/run.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 25 $(TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python tools/check_layout.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist

# torch first and by itself: a package that needs "torch" would otherwise bring the newest one.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dynaflow_train needs Python >= 3.11, found " + sys.version.split()[0] + "; try: make PYTHON=python3.12 $(MAKECMDGOALS)" or 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) "$(TORCH)"
	@touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[$*]"
	$(if $(filter-out demo,$*),$(PIP) --no-deps --ignore-requires-python "$(MEGATRON)" "$(TRITON)")
	@touch $@
