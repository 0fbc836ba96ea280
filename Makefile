# Everything here runs in .venv, which the first target makes. Options: PYTHON, TORCH (tools/setup_env.sh).
#
#   make demo DEMO_ARGS="--data ~/notes --steps 200"
#   make test TEST_ARGS="tests/plan -x"

.PHONY: help setup demo test lint format clean
.DEFAULT_GOAL := help

export PYTHON TORCH

BIN := .venv/bin
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

help:           ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

setup:          ## make .venv with torch and this package; nothing where it is up to date
	@bash tools/setup_env.sh

demo: setup     ## train on real text over several ranks, compare with one rank, draw pictures in demo_output/
	$(BIN)/python examples/train_packed_text.py --out demo_output $(DEMO_ARGS)

test: setup     ## run the tests
	$(BIN)/python -m pytest $(TEST_ARGS)

lint:           ## run what CI checks beside the tests
	@bash tools/setup_env.sh lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/codespell

format:         ## rewrite the sources as `make lint` wants them
	@bash tools/setup_env.sh lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

clean:          ## remove .venv and everything that was built
	rm -rf .venv build dist demo_output *.egg-info torch_magi/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
