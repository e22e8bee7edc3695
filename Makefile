# The two commands of the README. Each sets up a virtual environment of its own; nothing outside .venv is touched.
#
#   make train                 train a small MoE GPT through the dispatcher, and again through Megatron's alltoall
#   make test                  lint, then all tests against every supported megatron-core
#
# Variables: PYTHON (3.10 or newer), TORCH (what pip installs), ARGS (for train), MEGATRON (version for train).

PYTHON ?= python3
VENV := .venv
# Without a GPU: the version with a CPU build. With one: whatever suits the driver.
TORCH ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo torch; else echo torch==2.13.0; fi)
MEGATRON_VERSIONS := 0.16.1 0.19.2
MEGATRON ?= 0.19.2
ARGS ?= --compare alltoall

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MEGATRON_DIRS := $(MEGATRON_VERSIONS:%=$(VENV)/megatron-core-%)

.PHONY: train test lint format clean
.DELETE_ON_ERROR:

train: $(VENV)/.ready $(VENV)/megatron-core-$(MEGATRON)
	PYTHONPATH=$(VENV)/megatron-core-$(MEGATRON) $(BIN)/moe-ncclep train $(ARGS)

test: lint $(MEGATRON_DIRS)
	$(BIN)/python tools/run_tests.py $(MEGATRON_DIRS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]"
	touch $@

# Several versions side by side. 0.19 asks for Python 3.12 but its core runs on 3.10; only megatron.training needs 3.12.
$(VENV)/megatron-core-%: $(VENV)/.ready
	$(PIP) --no-deps --ignore-requires-python --target $@ megatron-core==$*

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis runs
