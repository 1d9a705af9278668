# demo and test need python3 (3.11 to 3.13) only; the -vllm ones install real vLLM (CPU build) into .venv-vllm.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin

.PHONY: help demo test check demo-vllm test-vllm prove-vllm bench-route bench-cache bench-refit bench-path bench-loop bench-relay format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(VENV)/.installed: pyproject.toml hooks/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]' -e hooks
	touch $@

demo: $(VENV)/.installed  ## jsq against eldr on an emulated fleet: table, PNG and report in out/demo
	$(BIN)/python -m loadgen demo

check: $(VENV)/.installed  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## unit tests and end-to-end tests on the emulated fleet
	$(BIN)/python -m pytest --ignore tests/vllm

demo-vllm:  ## the same on real vLLM: outputs, signatures, domains; report in out/demo-vllm
	PYTHON=$(PYTHON) loadgen/vllm/install.sh $(VLLM)
	$(VLLM)/bin/python -m loadgen demo-vllm

test-vllm:  ## tests on real vLLM with NIXL and the hook
	PYTHON=$(PYTHON) loadgen/vllm/install.sh $(VLLM)
	$(VLLM)/bin/python -m pytest tests/vllm

prove-vllm:  ## TPOT of the policies on real vLLM, interleaved rounds; 20 minutes; report in out/prove
	PYTHON=$(PYTHON) loadgen/vllm/install.sh $(VLLM)
	$(VLLM)/bin/python -m loadgen prove-vllm

bench-route: $(VENV)/.installed  ## decision, signature and cache against numpy
	$(BIN)/python -m loadgen.bench.route

bench-cache: $(VENV)/.installed  ## the signature cache as it fills and evicts
	$(BIN)/python -m loadgen.bench.cache

bench-refit: $(VENV)/.installed  ## fit and refit: time, and what the event loop feels of it
	$(BIN)/python -m loadgen.bench.refit

bench-path: $(VENV)/.installed  ## the signature path in a running eldrd: frame to decision
	$(BIN)/python -m loadgen.bench.path

bench-loop: $(VENV)/.installed  ## what reloads, hook frames and long sums hold the event loop for
	$(BIN)/python -m loadgen.bench.loop

bench-relay: $(VENV)/.installed  ## CPU and latency of the relay against other routers
	$(BIN)/python -m loadgen.bench.relay

format: $(VENV)/.installed  ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environments and all output
	rm -rf $(VENV) $(VLLM) .bench out
