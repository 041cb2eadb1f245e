# Two commands set everything up: `make demo` and `make test`.
#
# TORCH chooses the build of torch (this one is the CPU's on an index that has it); PYTHON the interpreter.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/ready
	@echo "== the built-in model, fetched once and kept in your cache folder =="
	$(BIN)/paceline pull smollm2-135m
	@echo "== SmolLM2-135M answers; tokens that were drafted and kept are marked =="
	$(BIN)/paceline generate --model smollm2-135m --show-draft --compare --temperature 0 --max-tokens 120 \
	  "Write a Python function that merges two sorted lists into one sorted list, with a docstring."

test: $(VENV)/ready lint
	$(BIN)/pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch comes first and by itself: otherwise pip may choose a build for other hardware.
$(VENV)/ready: pyproject.toml
	@echo "== making the environment in $(VENV) =="
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
