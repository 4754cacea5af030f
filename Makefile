# Two commands on a fresh machine with Python >= 3.10:
#   make demo    virtual environment, installation, then the main job on the shipped data
#   make test    the same, then the whole suite with linters and type checks

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# One process on a GPU, where tests measure time and memory; elsewhere one for each of two cores,
# each with half of the suite at first, so that what the tests of a file share is made once.
WORKERS ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 0 || echo 2)

# Options of `make engines`; the whole matrix without any (examples/build_engines.py).
ENGINES ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint format engines tables clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	$(BIN)/fastswin demo

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m fastswin.bench.report --check

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

engines: $(VENV)/.installed-test
	$(BIN)/python examples/build_engines.py $(ENGINES)

tables: $(VENV)/.installed-demo
	$(BIN)/python -m fastswin.bench.report --write

clean:
	rm -rf $(VENV) build dist fastswin-demo

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("fastswin needs Python >= 3.10; make PYTHON=... names another one")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Stamps: installation runs again only after pyproject.toml has changed.
$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "torch>=2.9" torchvision -e ".[all]"
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "torch>=2.9" torchvision -e ".[all,dev]"
	@touch $@ $(VENV)/.installed-demo
