# Every target sets up .venv first, once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format types bench clean distclean

help:
	@echo "make demo       train a small federation and show what fedfq saves"
	@echo "make test       run the tests"
	@echo "make lint       check style, formatting and who imports whom"
	@echo "make format     fix style and formatting"
	@echo "make types      check types"
	@echo "make bench      measure the codec"
	@echo "make setup      only create $(VENV)"
	@echo "make clean      remove caches and build products; distclean removes $(VENV) too"

setup: $(STAMP)

# The build backend is installed first, without isolation, so that constraints.txt pins it as well.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/fedfq demo

# The fixtures first, alone: they compile the kernels once, instead of in every process at the same time. Then three
# files of tests at a time, those of Flower first: they wait more than they compute.
test: $(STAMP)
	$(BIN)/python -m pytest tests/codec/test_fixtures.py
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/flower tests/network tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/fedfq bench codec --out results/codec

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
