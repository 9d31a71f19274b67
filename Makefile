# mmgraph: `make run` and `make test` are all that a fresh machine with Python 3.11+ and pip needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# What pip would do with one core: to byte code, a minute's work for PyTorch. Files that aren't Python don't matter.
COMPILE := $(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib || true
# A path rather than an import hook: from the folder above a checkout that is named mmgraph, a hook would lose to that folder.
EDITABLE := --config-settings editable_mode=compat -e
# Arguments for the command, such as: make run ARGS="--json out.json"
ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help run test lint types docs clean

help:
	@echo "make run    install into $(VENV) and run the main job (ARGS=\"...\" for its options)"
	@echo "make test   install the development tools and run the tests"
	@echo "make lint   ruff, rules and format"
	@echo "make types  mypy, strict"
	@echo "make docs   build the manual, strict"
	@echo "make clean  remove $(VENV), caches and build outputs"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mmgraph needs Python 3.11 or newer; $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp says what is installed. The development stamp covers the other, so that neither installs twice.
$(VENV)/.run-installed: pyproject.toml constraints.txt | $(BIN)/python
	@if [ $(VENV)/.dev-installed -nt pyproject.toml ] && [ $(VENV)/.dev-installed -nt constraints.txt ]; then :; \
	  else set -x; $(PIP) $(EDITABLE) '.[hf,photos]' && { $(COMPILE); }; fi
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(EDITABLE) '.[dev]'
	$(COMPILE)
	@touch $@

run: $(VENV)/.run-installed
	@$(BIN)/python -m mmgraph run $(ARGS)

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/python -m ruff check ops capture mmgraph tests bench
	$(BIN)/python -m ruff format --check ops capture mmgraph tests bench

types: $(VENV)/.dev-installed
	$(BIN)/python -m mypy
	MYPYPATH=bench $(BIN)/python -m mypy $(wildcard bench/*.py)

docs: $(VENV)/.dev-installed
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
