# Every target does its own set-up: a virtual environment in .venv, made anew when pyproject.toml changes.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
# One worker a core, one thread a worker: the tensors of the tests are too small to share
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: demo test test-slow lint format clean

demo: .venv/installed
	$(BIN)/car-spec generate --config demo --out outputs/demo

test: .venv/installed-dev
	$(PYTEST)

test-slow: .venv/installed-dev
	$(PYTEST) -m "slow or not slow"

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(PIP_FLAGS) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install -q $(PIP_FLAGS) -e ".[test,lint]"
	touch $@

clean:
	rm -rf .venv outputs
