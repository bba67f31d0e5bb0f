# `make demo` and `make test` are the two commands of the README; both set up `.venv` in this checkout first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
JOBS ?= 2
TESTS ?= tests
# `make demo` asks the model that comes with the package if there is one, else one of random weights.
SHIPPED := $(notdir $(patsubst %/config.json,%,$(firstword $(sort $(wildcard spyglass/models/*/config.json)))))
MODEL ?= $(or $(SHIPPED),demo-model)
QUESTION ?= $(if $(SHIPPED),What shape is the red thing?,What do you see in this picture?)
EXAMPLE_PHOTO = $(if $(SHIPPED),examples/shapes.jpg,$(RANDOM_PHOTO))
RANDOM_PHOTO = $$($(BIN)/python -c 'import pathlib, skimage; print(pathlib.Path(skimage.__file__).parent / "data" / "rocket.jpg")')
PHOTO ?=
FAMILY ?= v4

# One thread per test worker: two workers with two threads each only fight over two cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

.PHONY: help setup wheel demo test test-recipe check lint format bench gpu train-tiny train-adapters train-again mutants soak attack clean

help:
	@echo 'make setup           .venv with everything the others need (they set it up themselves)'
	@echo 'make wheel           dist/spyglass-*.whl, to install elsewhere'
	@echo 'make demo            show the small model a picture: PHOTO=mine.png QUESTION="What colour is it?" MODEL=folder'
	@echo 'make test            every test: TESTS=tests/unit/config runs less, JOBS=1 one at a time'
	@echo 'make test-recipe     tests of the recipe of the small models (scripts/tiny)'
	@echo 'make check           format, lint, types, rules, unit and op tests'
	@echo 'make lint, format    the first part of check; mend what can be mended'
	@echo 'make bench           benchmarks, each beside its baseline; spyglass bench --help names others'
	@echo 'make soak            ten minutes of mixed load on a server, attackers among it, every answer checked'
	@echo 'make attack          ten minutes of attackers beside well-behaved clients: SECONDS=600 SEED=0'
	@echo 'make mutants         plant faults that some test must notice: SINCE=main in the lines changed since then'
	@echo 'make gpu             tests marked gpu, with the python that is there'
	@echo 'make train-tiny      train the small model anew on a GPU: FAMILY=v4 or v41'
	@echo 'make train-adapters  train the adapters that come with the small models'
	@echo 'make train-again     teach both small models and their adapters more, from where they are: BUDGET=1750 seconds'
	@echo 'make clean           remove caches and builds'

setup: $(STAMP)

$(STAMP): pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"Spyglass needs Python 3.11 to 3.13, {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=python3.12")'
	@echo "Setting up $(VENV): some minutes once, most of it PyTorch."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/python -m pip install --quiet --constraint requirements-dev.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint requirements-dev.txt --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m spyglass.ops.build || true
	touch $(STAMP)

# A wheel holds the shipped models, the kernels' sources and the page of the playground.
wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# With random weights the path is real and the words are noise.
demo: setup
	test "$(MODEL)" = "$(SHIPPED)" || test -f $(MODEL)/config.json || $(BIN)/spyglass new-checkpoint $(MODEL) --preset tiny --seed 0
	$(BIN)/spyglass run --model $(MODEL) --image "$(or $(PHOTO),$(EXAMPLE_PHOTO))" --max-tokens 64 --temperature 0 "$(QUESTION)"

test: setup
	$(PYTEST) $(TESTS)

# How the small models that come with the package were made; nothing else depends on it.
test-recipe: setup
	$(PYTEST) scripts/tiny/tests

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(PYTEST) -m "not slow and not gpu" tests/rules tests/unit tests/ops

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/spyglass bench image
	$(BIN)/spyglass bench load
	$(BIN)/spyglass bench model

# The machine's own python and torch, no set-up, no network: this is what runs on an accelerator machine.
gpu:
	PYTHONPATH=. python3 -m pytest -q -m gpu $(TESTS)

# A quarter of an hour on one H200 each, with the machine's own python; goes on from the state in the folder, if any.
train-tiny:
	PYTHONPATH=. OMP_NUM_THREADS=1 python3 -m scripts.tiny.train $(FAMILY) --folder runs/tiny-$(FAMILY)

train-adapters:
	PYTHONPATH=. OMP_NUM_THREADS=1 python3 -m scripts.tiny.adapters --output runs/adapters

BUDGET ?= 1750
train-again:
	PYTHONPATH=. OMP_NUM_THREADS=1 python3 -m scripts.tiny.again --folder runs/again --seconds $(BUDGET)

mutants: setup
	$(TEST_ENV) $(BIN)/python -m tests.mutants $(if $(SINCE),--since $(SINCE))

# Ten minutes of mixed load on a live server: every answer is known beforehand, memory is watched.
soak: setup
	$(TEST_ENV) $(BIN)/python -m scripts.soak --seconds 600 --attackers

# Attackers beside three well-behaved clients, whose every answer and pause is held against the law of docs/server.md.
SECONDS ?= 600
SEED ?= 0
attack: setup
	$(TEST_ENV) $(BIN)/python -m scripts.attack --seconds $(SECONDS) --seed $(SEED)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist spyglass.egg-info
