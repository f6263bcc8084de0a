# make demo and make test do all the set-up each: a virtual environment in .venv, then the work.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
DEMO ?= runs/demo
SANDBOX ?= auto
export HF_HUB_OFFLINE = 1
export TRANSFORMERS_VERBOSITY = error
export HF_HUB_DISABLE_PROGRESS_BARS = 1

.PHONY: demo test lint check setup policy clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[train,docker,postgres,dev]" --config-settings editable_mode=compat
	touch $@

# The whole loop through a real agent: collect with the scripted teacher, two training steps, evaluation.
demo: setup
	SANDBOX=$(SANDBOX) DEMO=$(DEMO) PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Proves that every example task grades as it should.
check: setup
	$(BIN)/polar tasks check examples/tasks/train --sandbox $(SANDBOX)
	$(BIN)/polar tasks check examples/tasks/heldout --sandbox $(SANDBOX)

clean:
	rm -rf $(VENV) runs
