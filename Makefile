# Every target sets itself up: `make setup` does nothing where nothing has changed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PY := .venv/bin/python
TORCH_PY := $(abspath .venv-torch/bin/python)
PACKAGES := agent probes proto service collector
# Typed like the packages: what tests share, not the tests themselves.
TYPED_TESTS := $(wildcard tests/*.py tests/rig/*.py tests/bench/*.py tests/vm/*.py)
# Extra arguments for pytest, as in: make test ARGS="-k windows -x"
ARGS ?=
# One architecture for make test-kernel-vm; all machines if empty.
ARCH ?=
FOR ?=
JSON ?=
ONLY ?=
ALL ?=
RANK ?=
FLAGS = $(if $(FOR),--for "$(FOR)") $(if $(JSON),--json "$(JSON)") $(if $(RANK),--rank "$(RANK)")

.PHONY: help setup setup-helm test-helm setup-torch setup-nccl demo demo-torch test test-torch test-nccl test-kernel-vm \
	check bench proto format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## what is missing from apt, and .venv (every other target does this first)
	@bash tests/setup.sh

setup-torch: setup
	@bash tests/setup.sh torch

setup-helm: setup
	@bash tests/setup.sh helm

setup-nccl: setup
	@NCCL_ALL="$(ALL)" bash tests/setup.sh nccl

demo: setup ## an 8-rank expert-parallel job with one slow rank, live (FOR=45 JSON=demo.json: unattended)
	@$(PY) -m tests.demo $(FLAGS)

demo-torch: setup-torch ## the same with real PyTorch processes and Gloo
	@$(PY) -m tests.demo --torch "$(TORCH_PY)" $(FLAGS)

test: setup ## unit, contract, kernel and end-to-end tests (ARGS= goes to pytest)
	@$(if $(ARGS),$(PY) -m pytest -m "not torch and not nccl and not deb and not faults and not helm" $(ARGS),bash tests/suite.sh)

test-torch: setup-torch ## end to end with real PyTorch and Gloo
	@LANTERNE_TORCH_PYTHON="$(TORCH_PY)" $(PY) -m pytest -m torch $(ARGS)

test-nccl: setup-nccl ## probes on the real libnccl wheels (some 300 MB each, kept in build/nccl; ALL=1: ten)
	@LANTERNE_NCCL_DIR="$(abspath build/nccl)" LANTERNE_WHEELS_DIR="$(abspath build/wheels)" \
		$(PY) -m pytest -m nccl $(ARGS)

test-helm: setup-helm ## the chart through Helm's own engine, against Kubernetes' schemas and the programs
	@.venv-helm/bin/python -m pytest -m helm tests/helm $(ARGS)

test-kernel-vm: setup ## kernel tests on Linux 6.1 and on aarch64, emulated; slow (ARCH=x86_64|arm64)
	@bash tests/setup.sh vm
	@$(PY) -m tests.vm.run --arch "$(ARCH)" $(if $(ARGS),-- $(ARGS))

check: setup ## lint, format, types, import contracts, generated code, licences
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@rm -rf build/site build/lib
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation --target build/site .
	@MYPYPATH=build/site $(PY) -m mypy $(PACKAGES:%=-p lanterne.%)
	@MYPYPATH=build/site:. $(PY) -m mypy --explicit-package-bases $(TYPED_TESTS)
	@$(PY) -m pytest -q tests/contract/test_project.py tests/contract/test_imports.py

bench: setup ## costs and rates against the budgets (JSON=bench.json ONLY=probe|ring|plugin|agent|collector|moe)
	@$(PY) -m tests.bench.run $(if $(JSON),--json "$(JSON)") $(if $(ONLY),--only "$(ONLY)")

proto: setup ## the generated code from proto/telemetry.proto
	@$(PY) tests/generate_proto.py

format: setup ## rewrites the sources as ruff wants them
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## what the targets made, except the virtual environments and the NCCL wheels
	@rm -rf build/site build/lib build/bdist.* build/rig *.egg-info .mypy_cache .ruff_cache \
		.pytest_cache .hypothesis .import_linter_cache
	@find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

TYPED_TESTS += $(wildcard tests/gpu/*.py)

.PHONY: gpu-bundle
gpu-bundle: setup ## the check of one NVIDIA host, and all it may lack (docs/gpu-check.md)
	@$(PY) -m tests.gpu.bundle

TYPED_TESTS += $(wildcard tests/bench/detect/*.py helm/dashboards/*.py)

.PHONY: bench-detect
bench-detect: setup ## the detector and the baselines against known faults (JSON=detect.json QUICK=1 DOCS=1 SEEDS=tune)
	@$(PY) -m tests.bench.detect $(if $(QUICK),--quick) $(if $(JSON),--json "$(JSON)") \
		$(if $(DOCS),--docs docs) $(if $(SEEDS),--seeds "$(SEEDS)")

TYPED_TESTS += helm/deb/build.py tests/deb/system.py

.PHONY: deb setup-deb test-deb
deb: setup ## lanterne-agent and lanterne-collector as Debian packages, in build/deb
	@$(PY) helm/deb/build.py

setup-deb: setup
	@bash tests/setup.sh deb

test-deb: setup-deb ## the packages in a Debian and an Ubuntu, booted in containers; some minutes
	@$(PY) -m pytest -m deb tests/deb $(ARGS)

TYPED_TESTS += $(filter-out $(wildcard tests/f*/test_*.py),$(wildcard tests/faults/*.py tests/fuzz/*.py))
# What the full run asks for: FULL=1.
FULL ?=
FUZZ ?= 1000000
SEED ?= 1
SOAK ?= 60
TARGET ?= elf
LIMIT ?= 0

.PHONY: test-faults fuzz fuzz-guided soak
test-faults: setup ## kills, cuts, full disks, wrong clocks, strangers (JSON=faults.json FULL=1: for hours; docs/faults.md)
	@$(if $(FULL),FAULT_KILLS=200 CUT_SECONDS=600 STOP_SECONDS=60 STRANGERS=5000 MALFORMED=100000) \
		RUNS=$(if $(FULL),10,1) LANTERNE_CHURN=1000 FAULTS_JSON="$(abspath $(JSON))" \
		$(PY) -m pytest -m faults tests/faults tests/e2e $(ARGS)

fuzz: setup ## damaged inputs for every reader of foreign bytes (FUZZ=1000000 ONLY=elf,usdt SEED=1 JSON=fuzz.json)
	@$(PY) -m tests.fuzz.run --inputs $(FUZZ) --seed $(SEED) $(if $(ONLY),--only "$(ONLY)") \
		$(if $(JSON),--json "$(JSON)")

fuzz-guided: setup ## one reader under libFuzzer, guided by coverage (TARGET=elf FUZZ=1000000 LIMIT=300 seconds)
	@test -d build/atheris || $(PY) -m pip install -q --no-deps --target build/atheris "atheris==3.0.0"
	@$(PY) -m tests.fuzz.guided "$(TARGET)" --runs $(FUZZ) --seconds $(LIMIT)

soak: setup ## 20,000 events/s and processes that come and go: nothing grows (SOAK=3600 JSON=soak.json)
	@$(PY) -m tests.soak --seconds $(SOAK) $(if $(JSON),--json "$(JSON)")
