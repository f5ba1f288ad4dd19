# Two commands do everything on a fresh machine: `make serve` and `make test`. The rest is for people who work on Rootlet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
ARGS ?=
# Folder with the data files of the benchmarks: make bench-chat DATA=folder
DATA ?= data
# The driver of make bench-http, and an interpreter that has llama.cpp's server: make bench-http LOAD=program RIVAL=python
LOAD ?= load.py
RIVAL ?=
# The pinned torch is a CPU build where one is at hand; an unpinned one can pull gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
NATIVE := $(shell find csrc -type f 2>/dev/null) CMakeLists.txt pyproject.toml

.PHONY: help setup build model serve chat test test-all test-arm check format layers loc bench bench-chat bench-check bench-control bench-fairness bench-http bench-neighbour bench-policies bench-python bench-quality bench-replay bench-step bench-trace torture trace-demo rows clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.runtime: pyproject.toml
	@echo "setting up $(VENV), once; some minutes, most of them for downloading torch"
	@echo "[1/5] virtual environment and pip"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check install -q -U pip
	@echo "[2/5] $(TORCH) and numpy (the largest download)"
	@$(PIP) install $(TORCH) numpy
	@echo "[3/5] build tools: scikit-build-core, nanobind, cmake, ninja"
	@$(PIP) install "scikit-build-core>=0.11" "nanobind>=2.7" cmake ninja
	@echo "[4/5] what pyproject.toml names (HTTP, tokenizers, gguf...)"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' | $(PIP) install -r /dev/stdin
	@touch $@

$(VENV)/.built: $(VENV)/.runtime $(NATIVE)
	@echo "[5/5] compiling the native kernels (1 to 3 minutes; again only when csrc/ changes)"
	@$(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.built
	@echo "installing the tools of the tests, once (pytest, mypy, ruff, transformers...)"
	@$(PIP) install --no-build-isolation -e ".[dev]"
	@touch $@

setup: $(VENV)/.dev ## virtual environment with everything for development
build: $(VENV)/.built ## compile the native kernels (incremental)

model: $(VENV)/.built ## fetch the default model into the user's cache folder
	@$(BIN)/python -m rootlet.engine.model_source

serve: $(VENV)/.built ## serve the default model, or ARGS="MODEL --flag value"
	@$(BIN)/rootlet serve $(ARGS)

chat: $(VENV)/.built ## talk to a model in the terminal
	@$(BIN)/rootlet chat $(ARGS)

test: $(VENV)/.dev model ## all tests that need no GPU and no patience
	@$(BIN)/pytest tests -m "not slow" $(ARGS)

test-all: $(VENV)/.dev model ## the long property profiles and slow suites too
	@ROOTLET_HYPOTHESIS_PROFILE=long $(BIN)/pytest tests --timeout 7200 $(ARGS)

test-arm: $(VENV)/.dev ## the kernels cross-compiled for AArch64, under an emulator (needs g++-aarch64-linux-gnu and qemu-user)
	@command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null || { echo "missing: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	@$(BIN)/pytest tests/equality/test_kernel_bits.py $(ARGS)

check: $(VENV)/.dev ## format, lint, types, layers, house rules
	@$(BIN)/ruff format --check src tests
	@$(BIN)/ruff check src tests
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/pytest tests/architecture

format: $(VENV)/.dev ## rewrite the sources as `make check` wants them
	@$(BIN)/ruff format src tests && $(BIN)/ruff check --fix src tests

layers: $(VENV)/.dev ## the import contracts
	@$(BIN)/lint-imports

loc: $(VENV)/.dev ## numbers of the house
	@$(BIN)/python -m rootlet.bench.house

$(VENV)/.peer: $(VENV)/.dev
	@$(BIN)/python -c "import llama_cpp" 2>/dev/null || $(PIP) install "llama-cpp-python>=0.3"
	@touch $@

bench: $(VENV)/.peer model ## speed beside llama.cpp, in one run; rewrites docs/benchmarks.md (installs the peer: a long build)
	@$(BIN)/python -m rootlet.bench.compare $(ARGS)

bench-check: $(VENV)/.peer model ## the same against the recorded ratios: fails on a loss
	@$(BIN)/python -m rootlet.bench.compare --check $(ARGS)

bench-step: $(VENV)/.dev model ## time of single steps, and the share of each op
	@$(BIN)/python -m rootlet.bench.step --profile $(ARGS)

bench-python: $(VENV)/.dev model ## the share of Python in a decode step of the whole runtime
	@$(BIN)/python -m rootlet.bench.python_share $(ARGS)

bench-neighbour: $(VENV)/.dev model ## what a busy process on one core costs, and what an idle server does
	@$(BIN)/python -m rootlet.bench.neighbour $(ARGS)

bench-http: $(VENV)/.dev model ## workloads of a driver over HTTP: LOAD=program DATA=folder [RIVAL=python with llama-cpp-python[server]]
	@$(BIN)/python -m rootlet.bench.http_load --load $(LOAD) --data $(DATA) $(if $(RIVAL),--rival $(RIVAL)) $(ARGS)

bench-chat: $(VENV)/.dev model ## 80 two-turn chats at 16 concurrent over HTTP, cache on and off, against a trie oracle
	@$(BIN)/python -m rootlet.bench.chat --data $(DATA) $(ARGS)

bench-fairness: $(VENV)/.built ## two tenants, one flooding; a cold request beside a hot stream (virtual clock)
	@$(BIN)/python -m rootlet.bench.fairness

bench-control: $(VENV)/.built ## microseconds of the prefix cache and of a tick, beside targets and a baseline; ARGS="--write docs" records
	@$(BIN)/python -m rootlet.bench.control $(ARGS)

bench-policies: $(VENV)/.built model ## 72 runs: workloads x policies x prefix cache on and off x page sizes; ARGS="--write docs" records
	@$(BIN)/python -m rootlet.bench.policies $(if $(wildcard $(DATA)),--data $(DATA)) $(ARGS)

bench-trace: $(VENV)/.built ## the Mooncake conversation trace through scheduler and cache, beside offline bounds; ARGS="--write docs" records
	@$(BIN)/python -m rootlet.bench.trace --data $(DATA) $(ARGS)

bench-replay: $(VENV)/.dev model ## a minute of load on a server that records, then the record replayed: no plan may differ
	@$(BIN)/python -m rootlet.bench.replay_run $(ARGS)

bench-quality: $(VENV)/.dev model ## quantised path against the dequantised fp32 reference on GSM8K questions
	@$(BIN)/python -m rootlet.bench.quality --data $(DATA) $(ARGS)

torture: $(VENV)/.dev model ## 64 requests in a pool for four, 200 leaving clients, SIGKILL of each child: what a real server does
	@$(BIN)/python -m rootlet.bench.torture $(ARGS)

trace-demo: $(VENV)/.dev model ## what rootlet trace says of a request that waited, was chunked, was retracted and finished
	@$(BIN)/python -m rootlet.bench.trace_demo $(ARGS)

rows: $(VENV)/.dev model ## the public fault table: a verdict for each row that has tests
	@$(BIN)/python -m rootlet.bench.rows $(ARGS)

clean: ## remove the virtual environment and build outputs
	rm -rf $(VENV) build .mypy_cache .ruff_cache .hypothesis .import_linter_cache
