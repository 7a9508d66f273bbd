# Each target sets up what it needs in .venv, from the versions pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-versions lint clean
.DELETE_ON_ERROR:

demo: $(READY)  ## train a small network with four optimizers, print a table and draw a picture
	$(BIN)/python examples/demo.py

test: $(READY)  ## everything that must hold, in a few minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

test-versions:  ## the tests under the oldest and the newest torch and Python of pyproject (downloads 6 GB)
	PYTHON_OLDEST="$(PYTHON_OLDEST)" PYTHON_NEWEST="$(PYTHON_NEWEST)" tests/versions.sh

lint: $(READY)  ## put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard src/adabayes/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
