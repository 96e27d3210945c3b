# Everything a fresh machine needs: python3 (3.11 or later), make, git and g++.
#   make serve                       set up, and serve the packaged model
#   make serve MODEL=path ARGS="--port 9000"
#   make check                       lint, types and the tests that need no worker process
#   make test                        lint, types, pages and the tests that a change can affect; ARGS=--all: all of them
#   make verify                      the full counts, results in tests/results/; goes on where it was
#   make gpu-check                   all kernels and whole models on an NVIDIA GPU, in minutes, without a network
#   make gpu-wheels                  what gpu-check needs there besides PyTorch and Triton, in build/gpu-wheels
#   make wheel                       a wheel with compiled kernels in dist/, for x86-64 Linux without a compiler;
#                                    and the wheel of the client, without the server
#   make docs                        the documentation as a site in build/site
#   make figures                     write tables and numbers in README and docs from the result files
#   make campaign FAMILY=settings MINUTES=60    random trials that accumulate; without FAMILY, which there are

PYTHON ?= python3
VENV ?= .venv
MODEL ?= embedded
ARGS ?=
FAMILY ?=
MINUTES ?= 10
# The clients of other makers that `make verify` runs, and where they live.
CLIENTS := guidellm langchain-openai litellm ollama
COMPAT ?= build/compat
# The CPU build of torch is enough, and much smaller than the CUDA one that a plain "torch" may bring:
#   make serve TORCH_PIP_ARGS="torch==2.13.0 --index-url <the index of the build you want>"
TORCH_PIP_ARGS ?= torch==2.13.0
export TORCH_PIP_ARGS

BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, also where the environment says otherwise: tests start hundreds of processes of Python.
export PYTHONDONTWRITEBYTECODE :=
# Next to the compiled kernels, for all clones: mypy compares the content of files, not where they are.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/streamserve/mypy
# Tests and scripts read the files of this project, which are UTF-8, in any locale.
export PYTHONUTF8 := 1

# Tests of packages that decide without processes, sockets or tensors.
CHECKED := $(addprefix tests/,baselines docs draft_service engine fleet protocol scheduling simulate speculation text)

.PHONY: help install serve check test style types pages pytest lint verify gpu-check gpu-wheels wheel agents campaign \
	docs figures durations clean

help:
	@sed -n '2,13s/^# *//p' Makefile

# One stamp for running, one for developing, so that `make serve` installs no test tools.
install: $(VENV)/.installed

$(VENV)/.torch:
	@echo "installing torch (about 200 MB for CPUs, more with CUDA): $(TORCH_PIP_ARGS)" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH_PIP_ARGS)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(wildcard src/streamserve/execution/backends/native/cpp/*)
	@echo "installing streamserve and its other dependencies" >&2
	$(BIN)/pip install --quiet --editable .
	$(BIN)/python -m streamserve.execution.backends.native
	@touch $@

$(VENV)/.developing: $(VENV)/.installed client/pyproject.toml
	$(BIN)/pip install --quiet --editable client --editable ".[dev]"
	@touch $@

serve: $(VENV)/.installed
	$(BIN)/streamserve serve $(MODEL) $(ARGS)

lint: style types

style: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.developing
	$(BIN)/mypy

# Before minutes of tests: the pages have the numbers of the result files.
pages: $(VENV)/.developing
	@$(BIN)/python -m benchmarks.figures --check || (echo "run: make figures" && exit 1)

check: lint
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(CHECKED) tests/test_import_rules.py $(ARGS)

# Types are checked while tests run: without its cache, as on a new machine, mypy keeps a core busy for a minute.
test: style pages
	@$(MAKE) --no-print-directory --jobs 2 types pytest

pytest: $(VENV)/.developing
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# Clients of other makers pin what others of them cannot live with, so each has a venv of its own.
$(COMPAT)/%/.installed: tests/compat/constraints.txt
	$(PYTHON) -m venv $(COMPAT)/$*
	$(if $(filter guidellm,$*),$(COMPAT)/$*/bin/pip install --quiet $(TORCH_PIP_ARGS))
	$(COMPAT)/$*/bin/pip install --quiet --constraint $< $*
	@touch $@

$(VENV)/.nixl: $(VENV)/.developing
	$(BIN)/pip install --quiet --editable ".[nixl]"
	@touch $@

verify: lint wheel $(VENV)/.nixl $(CLIENTS:%=$(COMPAT)/%/.installed)
	COMPAT=$(abspath $(COMPAT)) $(BIN)/python -m tests.verify $(ARGS)

$(VENV)/.wheel: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[wheel]"
	@touch $@

# Compiled kernels are kept in build/kernels: after the first time it takes seconds.
wheel: $(VENV)/.wheel
	$(BIN)/python scripts/build_wheel.py

# The newest of each, for `make campaign FAMILY=agents`, which records the versions.
AGENTS ?= build/agents
agents:
	npm install --no-audit --no-fund --prefix $(AGENTS) @anthropic-ai/claude-code @openai/codex opencode-ai \
		@qwen-code/qwen-code
	$(PYTHON) -m venv $(AGENTS)/aider
	$(AGENTS)/aider/bin/pip install --quiet --upgrade aider-chat

campaign: $(VENV)/.developing
	$(BIN)/python -m tests.campaigns $(FAMILY) --minutes $(MINUTES) $(ARGS)

# For another machine: its Python and platform. numpy comes with PyTorch; hf_xet serves downloads only.
GPU_PYTHON ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip download --quiet --dest build/gpu-wheels --python-version $(GPU_PYTHON) --only-binary=:all: \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--requirement tests/gpu/requirements.txt
	rm -f build/gpu-wheels/numpy-*.whl build/gpu-wheels/hf_xet-*.whl
	du -sh build/gpu-wheels

gpu-check:
	$(PYTHON) -m tests.gpu.check $(ARGS)

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

figures: $(VENV)/.installed
	$(BIN)/python -m benchmarks.figures

# The order of tests on machines that have not run them yet: seconds by file, of the last runs here.
durations: $(VENV)/.developing
	$(BIN)/python -m tests.selection

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
