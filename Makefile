# `make` alone lists the targets. Each one that needs the environment creates it first.
PYTHON ?= python3
# A plain torch brings CUDA along on Linux: name a CPU build here where that matters.
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
TPU_VENV := .venv-tpu
# No metadata server is asked, and no lock taken: nothing here opens a TPU.
TPU_ENV := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
	TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_HOSTNAMES=localhost
# The tests' own default is quick compilation: tests/conftest.py.
OPTIMIZED := XLA_FLAGS=--xla_backend_optimization_level=3

.DEFAULT_GOAL := help
.PHONY: help demo study frontier bench bench-sel tpu-check test test-slow soak test-peers docs notebooks lint format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.experiments ## From nothing to a small GPT-2 trained under six optimisers, and a report (minutes)
	$(BIN)/python -m experiments manifolds --preset demo

study: $(VENV)/.experiments ## The same with three times the steps; the paper's algorithm: README
	$(BIN)/python -m experiments manifolds --preset tiny

frontier: $(VENV)/.experiments ## Muon's rate swept for every assignment and both solvers until runs diverge (an hour)
	$(BIN)/python -m experiments manifolds --frontier

bench: $(VENV)/.experiments ## Optimisers side by side: time, operations, memory, quality (an hour)
	$(BIN)/python -m experiments.benchmarks.bench

bench-sel: $(VENV)/.experiments ## What SEL adds to a training step: operations, bytes, memory, time (minutes)
	$(BIN)/python -m experiments.benchmarks.sel_costs

tpu-check: $(TPU_VENV)/.tpu ## Compile GPT-2 small's step for TPU topologies: memory, operations, collectives
	$(TPU_ENV) $(TPU_VENV)/bin/python -m experiments.benchmarks.tpu

# In the order of collection: by their number of tests, a long file of few tests would start last.
test: $(VENV)/.test ## From nothing to green tests
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not peers and not slow and not soak"

test-slow: $(VENV)/.test ## The solver at GPT-2 small's shapes and over a whole run (an hour)
	$(OPTIMIZED) $(BIN)/python -m pytest -m slow

soak: $(VENV)/.test ## Kill runs at random moments for ten minutes: they end as one that nobody killed, bit for bit
	$(BIN)/python -m pytest -s -m soak

test-peers: $(VENV)/.peers ## Compare with torch and transformers (TORCH="torch==..." chooses the build)
	$(OPTIMIZED) $(BIN)/python -m pytest -m peers

docs: $(VENV)/.docs ## Build the documentation: site/index.html, which needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

notebooks: $(VENV)/.notebooks ## Execute the notebooks: each .py gives its .ipynb, or an error (minutes)
	$(BIN)/python -m notebooks.run

lint: $(VENV)/.test ## Check style, and the libraries' types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.test ## Apply style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean: ## Remove the environments and caches; runs/ stays
	rm -rf $(VENV) $(TPU_VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site *.egg-info

# One file a level of the environment, newer than what it was installed from.
$(VENV)/.experiments: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed: name one, as in make PYTHON=python3.13 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --editable ".[experiments]"
	touch $@

$(VENV)/.test: $(VENV)/.experiments
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

$(VENV)/.peers: $(VENV)/.test
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[hf]"
	touch $@

$(VENV)/.docs: $(VENV)/.experiments
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

$(VENV)/.notebooks: $(VENV)/.experiments
	$(BIN)/python -m pip install --quiet --editable ".[notebooks]"
	touch $@

# An environment of its own: libtpu is large, and where it is installed JAX looks for a TPU at every start.
$(TPU_VENV)/.tpu: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet --upgrade pip setuptools
	$(TPU_VENV)/bin/python -m pip install --quiet --editable ".[experiments]" "jax[tpu]"
	touch $@
