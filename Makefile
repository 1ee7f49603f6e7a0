# Needs make, Python 3.10 or newer with its venv module, and a package index. Each command makes .venv
# when it is missing, and brings it up to date when pyproject.toml changed.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test check bench soak matrix

help: ## show this list
	@echo "make <command> [ARGS=\"..\"] [PYTHON=python3.12]"
	@echo
	@sed -n 's/^\([a-z]*\): .*## /  \1 - /p' Makefile

demo: $(READY) ## sign people up at a web application whose worker sends the e-mails
	@$(BIN)/python examples/signup/demo.py $(ARGS)

test: $(READY) ## run the tests; ARGS="-k enqueue" goes to pytest; in one process with ARGS=-s or --pdb
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

check: $(READY) ## lint, formatting, types, import rules
	@echo "ruff check" && $(BIN)/ruff check
	@echo "ruff format --check" && $(BIN)/ruff format --check
	@echo "mypy" && $(BIN)/mypy
	@echo "lint-imports" && $(BIN)/lint-imports

bench: $(READY) ## every figure of docs/benchmarks.md anew, about 35 minutes; ARGS="--quick" for two
	@$(BIN)/python -c "import matplotlib" 2>/dev/null || $(BIN)/python -m pip install -qq --editable ".[dev,bench]"
	@$(BIN)/python tests/benchmarks/bench.py $(ARGS)

soak: $(READY) ## the model of the queue for ten minutes, then ten minutes of steady load under a snapshot
	@PGTASK_MODEL_SECONDS=600 PGTASK_MODEL_SEED=random PGTASK_MODEL_SHRINK=1 $(BIN)/python -m pytest -s tests/test_model.py
	@$(BIN)/python tests/benchmarks/soak.py $(ARGS)

matrix: $(READY) ## run the tests on each SQLAlchemy and PostgreSQL that this machine offers
	@$(BIN)/python tests/matrix.py $(ARGS)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "pgtask_sa needs Python 3.10 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	    echo "Name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	    exit 1; }
	@echo "Preparing $(VENV), once: a minute or so .."
	@$(PYTHON) -m venv $(VENV) || { \
	    rm -rf $(VENV); echo "$(PYTHON) -m venv failed; Debian has it in python3-venv" >&2; exit 1; }
	@# pip itself first: the one that came with an early 3.10 cannot install in place.
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq --editable ".[dev]"
	@touch $@
