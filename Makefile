# What a person runs: `make demo` and `make test` set up all they need in .venv.

VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# What pip installs as torch where the venv has none: the CPU build by default. Options may follow the requirement:
# TORCH="torch --index-url https://download.pytorch.org/whl/xpu"
TORCH ?=
CPU_TORCH := 2.13.0
PYTEST_ARGS ?=

.PHONY: help demo test lint typecheck docs notebooks wheel xpu-check xpu-test clean

help:
	@echo "make demo       set up .venv, then text from tiny Zamba2 and a picture from tiny FLUX.2, demo.png"
	@echo "make test       set up .venv, then lint, types and the whole test suite"
	@echo "make xpu-check  compile every kernel for Intel GPUs and run it on this CPU (Linux, apt)"
	@echo "make xpu-test   on a machine with an Intel GPU: the op tests on the GPU, with a report to send"
	@echo "make docs       the documentation as a site, build/site; fails for a link that leads nowhere"
	@echo "make notebooks  run the notebooks where they are and keep what they show"
	@echo "make wheel      build the wheel into dist/"
	@echo "make clean      remove the venvs and what was built"

$(VENV)/.core: pyproject.toml setup.py
	@test -x $(PY) || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed, $(PYTHON) is older: make demo PYTHON=python3.11"; exit 2; }
	@$(PY) -c 'import torch' 2>/dev/null || { echo "installing torch"; \
	    if [ -n "$(TORCH)" ]; then $(PIP) install $(TORCH); else \
	    $(PIP) install "torch==$(CPU_TORCH)+cpu" 2>/dev/null \
	    || $(PIP) install "torch==$(CPU_TORCH)" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
	    || $(PIP) install "torch==$(CPU_TORCH)"; fi; }
	@echo "installing xpu-ports"
	@$(PIP) install -e '.[flux2]'
	@touch $@

# PyTorch for XPU and CUDA bring a Triton; the development one is installed only where there is none.
$(VENV)/.dev: $(VENV)/.core
	@echo "installing the development tools"
	@if $(PY) -c 'import triton' 2>/dev/null; then $(PIP) install -e '.[test]'; else $(PIP) install -e '.[dev]'; fi
	@mkdir -p .typing/xpu_ports
	@for folder in common models quant cli; do ln -sfn ../../$$folder .typing/xpu_ports/$$folder; done
	@touch $@

demo: $(VENV)/.core
	@$(VENV)/bin/xpu-ports generate checkpoints/tiny-zamba2 "And God said unto Moses," \
	    --max-new-tokens 120 --explain
	@$(VENV)/bin/xpu-ports image checkpoints/tiny-flux2 "a red three" --out demo.png \
	    --height 64 --width 64 --text-tokens 32 --steps 20 --guidance 2 --explain

# A thread a process: the tests' tensors are small. Each process begins with tests that follow each other, so that what
# a file of them shares is made once.
test: $(VENV)/.dev lint typecheck
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal $(PYTEST_ARGS)
	@test -x .venv-xpu/bin/python || echo "The XPU check was not run: make xpu-check sets it up and runs it."

lint: $(VENV)/.dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

typecheck: $(VENV)/.dev
	@$(PY) -m mypy

$(VENV)/.docs: $(VENV)/.dev
	@$(PIP) install -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build --strict --clean
	@echo "build/site/index.html"

notebooks: $(VENV)/.dev
	@$(PY) notebooks/run.py

xpu-check:
	@PYTHON=$(PYTHON) bash xpu_offline/check.sh

xpu-test: $(VENV)/.dev
	@PY=$(PY) bash xpu_offline/card.sh

wheel: $(VENV)/.core
	@$(PIP) wheel --no-deps -w dist .

clean:
	rm -rf .venv .venv-xpu .typing build dist demo.png *.egg-info .pytest_cache .ruff_cache .mypy_cache
