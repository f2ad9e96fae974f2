# SPDX-License-Identifier: Apache-2.0
#
#   make demo       everything from nothing to the demo        make gpu-test   the tests that need a GPU
#   make test       all tests that need no GPU                 make build      compile; then tests can be run by hand
#   make lint       ruff, mypy, clang-format                   make clean      remove build/
#
# PYTHON=python3.12    the interpreter that .venv is made with         ARCHS=90a-real   GPU architectures to compile for
# DEMO="--tp 4"        options of `trtllm-mhc demo`                     TESTS=path       tests to run instead of all
SHELL := /bin/bash
.DEFAULT_GOAL := build
.PHONY: build test gpu-test demo lint clean venv tensorrt triton cpp-test python-test python-test-further

PYTHON ?= python3
# More threads than idle processors make OpenBLAS spin.
export OPENBLAS_NUM_THREADS ?= 1
# A virtual environment that is active and has TensorRT is used as it is; otherwise one is made here.
ACTIVE := $(if $(VIRTUAL_ENV),$(shell "$(VIRTUAL_ENV)/bin/python" -c "import tensorrt" 2>/dev/null && echo "$(VIRTUAL_ENV)"))
VENV ?= $(or $(ACTIVE),.venv)
PY := $(VENV)/bin/python

# The TensorRTs of the tests, the first for all of them; the one of the demo and the GPU tests. "installed": the environment's.
INSTALLED := $(shell [ -x $(PY) ] && $(PY) -c "import tensorrt" 2>/dev/null && echo installed)
TENSORRTS ?= $(or $(INSTALLED),11.2 10.15 10.6)
HAS_GPU := $(wildcard /dev/nvidiactl)
TENSORRT ?= $(or $(INSTALLED),$(if $(HAS_GPU),10.6,11.2))

BUILD := build/dev
ARCHS ?=
TESTS ?= tests/unit

venv: $(VENV)/.requirements

$(VENV)/.requirements: pyproject.toml scripts/setup_venv.sh
	scripts/setup_venv.sh "$(PYTHON)" "$(VENV)"
	touch $@

# One build folder for everything: the library, the C++ tests and the wheel that tests/unit/test_packaging.py looks into.
build: venv
	mkdir -p build
	flock build/.lock $(PY) -m pip install --quiet --no-deps --no-build-isolation --editable . \
	    --config-settings=build-dir=$(BUILD) --config-settings=cmake.define.TRTLLM_MHC_INPLACE=ON \
	    --config-settings=cmake.define.TRTLLM_MHC_BUILD_TESTS=ON \
	    $(if $(ARCHS),"--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=$(ARCHS)")

tensorrt: venv
	@set -e; for version in $(filter-out installed,$(VERSIONS)); do scripts/fetch_tensorrt.sh $$version .trt/$$version $(PY); done

# A tritonserver for tests/unit/integrations/triton.
triton: venv
	scripts/fetch_triton.sh .triton $(PY)

# Downloads wait for the network and the compiler for the processor, so they run beside each other.
test: venv
	$(MAKE) --no-print-directory -j2 build tensorrt triton VERSIONS="$(TENSORRTS)"
	$(MAKE) --no-print-directory cpp-test
	$(MAKE) --no-print-directory model-test
	$(MAKE) --no-print-directory host-test
	$(MAKE) --no-print-directory python-test

cpp-test:
	$(VENV)/bin/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error

# The further TensorRTs are tested beside the first; what they say is printed after it.
python-test:
	@mkdir -p build; status=0; \
	$(MAKE) --no-print-directory python-test-further > build/further.log 2>&1 & further=$$!; \
	scripts/with_tensorrt.sh $(firstword $(TENSORRTS)) $(PY) -m pytest $(TESTS) \
	    $(patsubst %,--tensorrt %,$(filter-out installed,$(firstword $(TENSORRTS)))) || status=$$?; \
	wait $$further || status=$$?; \
	cat build/further.log; exit $$status

# The mailbox protocol, by spin: cpp/tests/model/README.md.
model-test:
	scripts/check_model.sh

# The library's host side under sanitizers; FUZZ_SECONDS for each of the fuzzers.
FUZZ_SECONDS ?= 15
host-test:
	scripts/check_host.sh threads
	scripts/check_host.sh fuzz $(FUZZ_SECONDS)

# Part of the tests may hold none that use TensorRT: pytest's status 5. All of them do.
python-test-further:
	@set -e; for version in $(wordlist 2,9,$(TENSORRTS)); do \
	    echo "== TensorRT $$version"; \
	    scripts/with_tensorrt.sh $$version $(PY) -m pytest $(TESTS) -m tensorrt --tensorrt $$version \
	        || [ $$? = 5 -a "$(TESTS)" != tests/unit ]; \
	done

gpu-test: venv
	$(MAKE) --no-print-directory -j2 build tensorrt VERSIONS="$(TENSORRT)"
	TRTLLM_MHC_RESULTS=$${TRTLLM_MHC_RESULTS:-tests/gpu/results} CUDA_DEVICE_MAX_CONNECTIONS=32 \
	    scripts/with_tensorrt.sh $(TENSORRT) $(PY) -m pytest tests/gpu tests/multi_gpu tests/stress

demo: venv
	$(MAKE) --no-print-directory -j2 build tensorrt VERSIONS="$(TENSORRT)"
	scripts/with_tensorrt.sh $(TENSORRT) $(VENV)/bin/trtllm-mhc demo $(DEMO)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m mypy
	git ls-files '*.h' '*.cuh' '*.cpp' '*.cu' | xargs $(VENV)/bin/clang-format --dry-run --Werror

clean:
	rm -rf build trtllm_mhc/libtrtllm_mhc.so
