# What a person types. Every target sets up what it needs; `make setup` alone is enough to look around.
#
#   make run         gateway + worker with the bundled model, tokens and a curl to paste
#   make test        the whole suite
#   make check       ruff, ruff format, mypy --strict, import-linter
#   make setup       virtual environment, dependencies, model (a second call takes a second)
#   make test-gpu    what needs a CUDA device          make test-long   what takes minutes
#   make clean       remove what the above made (not the model cache)
#
# PYTHON=python3.12 picks the interpreter (3.11 or newer); VENV=… puts the environment elsewhere. The suite runs in three
# processes: PYTEST_WORKERS=6 makes it six, 0 none; PYTEST_ARGS=… goes to pytest.

SHELL := /bin/sh
PYTHON ?=
VENV ?= .venv
CONFIG ?= config/demo.yaml
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 3

BIN := $(VENV)/bin
export VENV PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup venv run test test-gpu test-long check format clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,10p'

# Dependencies only: what checks and unit tests need before the model is there.
venv:
	@scripts/setup

setup: venv
	@$(BIN)/forebay model pull

run: setup
	@exec $(BIN)/forebay serve --dev $(CONFIG)

test: setup
	@$(BIN)/python -m pytest -m "not gpu and not long" -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-gpu: setup
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

test-long: setup
	@$(BIN)/python -m pytest -m long --timeout 3600 $(PYTEST_ARGS)

check: venv
	@scripts/check

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
