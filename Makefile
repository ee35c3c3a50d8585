# Every target does its own set-up: a virtual environment in .venv, made anew when pyproject.toml changes.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin

.PHONY: demo test test-slow lint format clean

demo: .venv/installed
	$(BIN)/car-spec generate --config demo --out outputs/demo

test: .venv/installed-dev
	$(BIN)/python -m pytest

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -m "slow or not slow"

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
