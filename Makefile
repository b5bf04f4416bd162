# PYTHON   the interpreter the virtual environment is made from   (python3)
# TORCH    the torch version to install, such as 2.11.0           (the newest)
# VENV     where the virtual environment lies                     (.venv)
# WHEEL    a built wheel to install instead of this source tree
# QUICK    1 for the benchmarks' subset, which goes to build/benchmarks
# DEVICE   what is benchmarked, cpu or cuda                       (cpu)
# OUTPUT   where gpu-check leaves its logs                        (build/gpu-check)
# COMMIT   what gpu-check says it measured, where git cannot tell
# PYTHONS  the versions that wheels are built for  (those of 3.10 to 3.14 that are on PATH)
PYTHON ?= python3
TORCH ?=
VENV ?= .venv
WHEEL ?=
QUICK ?=
DEVICE ?= cpu
OUTPUT ?= build/gpu-check
COMMIT ?=
PYTHONS ?= $(foreach v,3.10 3.11 3.12 3.13 3.14,$(if $(shell python$v -V 2>/dev/null),$v))

BIN := $(VENV)/bin
TORCH_STAMP := $(VENV)/torch-$(or $(TORCH),newest).stamp
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.* syncbn/*.py* syncbn/*/*.py)
CXX_FILES := $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*/*.h csrc/*/*/*.cu \
    tests/emulation/*.cpp tests/emulation/*.h tests/emulation/*/*.cpp tests/emulation/*/*.h \
    tests/sanitizer/*.cpp tests/standin/*.h tests/standin/*/*.cpp tests/standin/*/*.h \
    benchmarks/*.cpp)

.PHONY: help install demo test standin hidden bench gpu-check sanitize works record-works docs lint \
    format wheel sdist wheels manylinux try-wheel clean

help:
	@echo "make install    build and install into the virtual environment"
	@echo "make demo       train on real data in two processes and show the result"
	@echo "make test       run the main tests: at most five minutes on two cores after the build"
	@echo "make test-all   check format, lint and types, and run every test; -j2 runs two folders at once"
	@echo "make standin    run the tests of CUDA without a GPU, on a stand-in for the CUDA runtime"
	@echo "make hidden     run the tests of layers without the CPU operators, as other devices do"
	@echo "make bench      measure this machine, draw the results, write the README's table"
	@echo "make works      run what the table in docs/works shows, with two torches, and write it"
	@echo "make docs       build the documentation site in build/site; a broken link is an error"
	@echo "make gpu-check  build in place, test and measure on a GPU; installs nothing"
	@echo "make sanitize   the operators with g++'s address, undefined and thread sanitizers"
	@echo "make format     format the sources"
	@echo "make wheel      build dist/*.whl for this Python, good for every torch from 2.11 on"
	@echo "make sdist      build dist/*.tar.gz"
	@echo "make wheels     build the sdist, and of it dist/*manylinux*.whl, one for each Python at hand"
	@echo "make manylinux  the same in Docker for each Python and an older glibc, as PyPI gets them"
	@echo "make try-wheel  install WHEEL alone into VENV and run the tests that each wheel passes"
	@echo "make clean      remove what was built and the virtual environments"
	@echo
	@sed -n 's/^# \([A-Z][A-Z]\)/\1/p' Makefile

# On a terminal pip shows its progress.
PIP_INSTALL := $(BIN)/pip install $(if $(MAKE_TERMOUT),,--quiet)

# The README's line; CI and a release try the others, tests/package/test_backend.py.
$(TORCH_STAMP):
	@echo "Installing torch into $(VENV): with CUDA's libraries a download of 3 GB"
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/*.stamp
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) torch$(if $(TORCH),==$(TORCH)) ninja "setuptools>=77.0.3,<82"
	touch $@

# torch is named again so that nothing here moves it to another version.
$(VENV)/tools.stamp: $(TORCH_STAMP) pyproject.toml
	$(PIP_INSTALL) --group demo --group test --group docs --group wheels \
	    torch==$$($(BIN)/python -c "from importlib.metadata import version; print(version('torch'))")
	touch $@

$(VENV)/syncbn.stamp: $(TORCH_STAMP) $(if $(WHEEL),$(WHEEL),$(SOURCES))
	$(if $(WHEEL),,@echo "Building syncbn: about four minutes on two cores with nvcc, one without")
	$(STRICT) $(PIP_INSTALL) --force-reinstall --no-deps --no-build-isolation $(or $(WHEEL),.)
	touch $@

install: $(VENV)/tools.stamp $(VENV)/syncbn.stamp

# In the environment of PYTHON if it has syncbn, else in VENV. Packages that the example lacks go to
# build/demo. The first entry of the path is this folder, whose syncbn the example does not import.
ifneq ($(filter demo,$(MAKECMDGOALS)),)
HAS_SYNCBN := $(shell $(PYTHON) -c "import sys; del sys.path[0]; import syncbn; print(1)" 2>/dev/null)
endif
DEMO := PYTHONPATH="build/demo$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=1 \
    $(if $(HAS_SYNCBN),$(PYTHON),$(BIN)/python)
demo: $(if $(HAS_SYNCBN),,$(VENV)/syncbn.stamp)
	@$(DEMO) examples/digits.py --help >/dev/null 2>&1 || { \
	    echo "Installing matplotlib, scikit-learn and tqdm into build/demo: 80 MB" && \
	    $(DEMO) -m pip install $(if $(MAKE_TERMOUT),,--quiet) --upgrade --target build/demo \
	        matplotlib scikit-learn tqdm; }
	@echo "Training in two processes: a minute"
	$(DEMO) -m torch.distributed.run --standalone --nproc-per-node 2 examples/digits.py

# Operators against float64, the layer against torch's, conversion, compiled layers, several ranks,
# and the errors of all ranks when one of them fails.
MAIN_TESTS := $(addprefix tests/,operators/test_batch_norm_*.py operators/test_ops.py \
    $(patsubst %,layer/test_%.py,accuracy checkpoint checks convert functional modules reference \
        torch_defects) \
    $(patsubst %,ranks/test_%.py,agreement alignment collectives faults multi_rank store) \
    $(patsubst %,compile/test_%.py,failures tracers))
test: $(if $(wildcard $(VENV)/tools.stamp),,$(VENV)/main-tests.stamp) $(VENV)/syncbn.stamp
	@echo "The main tests take at most five minutes on two cores; make test-all runs every test"
	$(BIN)/pytest -m "not cuda" -k "not inductor and not (faults and compiled)" $(MAIN_TESTS)

$(VENV)/main-tests.stamp: $(TORCH_STAMP) pyproject.toml
	$(PIP_INSTALL) --group wheel-test
	touch $@

# Warnings are errors where all is tested, and never in a user's build: a newer compiler has new ones.
test-all: STRICT := CPPFLAGS="$(CPPFLAGS) -Werror" \
    NVCC_APPEND_FLAGS="$(NVCC_APPEND_FLAGS) -Werror=all-warnings -Xcompiler=-Werror"
FOLDERS := compile package emulation ranks frameworks layer operators cuda sanitizer
.PHONY: test-all $(FOLDERS:%=test-%)
test-all: lint $(FOLDERS:%=test-%)
# Threads that spin while they wait take the processors from other processes of a test: three times the
# time on two cores.
test $(FOLDERS:%=test-%) standin-%: export OMP_WAIT_POLICY := PASSIVE
$(FOLDERS:%=test-%): test-%: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/pytest tests/$*

# Late work on two devices shows the mistakes that other modes show, but no access outside of a tensor:
# operators run without torch's cache for that (tests/standin/README.md). The newest torch runs standin-core.
STANDIN := $(BIN)/python tests/standin/run.py $(BIN)/pytest
STANDIN_PARTS := late own operators
.PHONY: $(STANDIN_PARTS:%=standin-%) standin-build standin-core
standin: $(STANDIN_PARTS:%=standin-%)
standin-build: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/python tests/standin/run.py true
$(STANDIN_PARTS:%=standin-%) standin-core: standin-build
standin-late:
	STANDIN_DEVICES=2 STANDIN_STREAMS=late $(STANDIN) -m cuda --ignore=tests/operators tests
standin-own:
	$(STANDIN) tests/standin
standin-operators:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(STANDIN) -m cuda tests/operators
standin-core: standin-operators
	STANDIN_DEVICES=2 STANDIN_STREAMS=late \
	    $(STANDIN) -m "cuda and not any_torch" tests/cuda tests/ranks/test_cuda_ranks.py

# A subset is drawn but leaves the README alone.
bench: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/python -m benchmarks run --device $(DEVICE) $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python -m benchmarks table)

# What is computed on devices without operators, in place of the CPU's.
hidden: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/pytest tests/layer/test_plain.py tests/ranks/test_plain_ranks.py tests/layer/test_hidden.py
	SYNCBN_HIDE_OPERATORS=1 $(BIN)/pytest tests/layer tests/ranks

gpu-check:
	SYNCBN_COMMIT=$(COMMIT) $(PYTHON) -m tools.gpu_check $(OUTPUT)

sanitize: $(VENV)/tools.stamp
	$(BIN)/python -m tools.sanitize
	SYNCBN_SANITIZED=1 ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	    $(BIN)/pytest -k "matches and float16 or offsets11 or small_inner or any_dtype or empty" \
	    tests/emulation/test_kernels.py tests/emulation/test_training.py

# Each torch in its environment of .ci/run. The table is of CPUs.
works:
	$(MAKE) record-works VENV=.venv-oldest TORCH=2.11.0
	$(MAKE) record-works VENV=.venv-newest TORCH=2.15.0
	.venv-newest/bin/python -m tools.documents

record-works: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/pytest -m "works and not cuda" --works=docs/works

# The variable silences an advertisement of MkDocs' successor.
docs: $(VENV)/tools.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/tools.stamp
	@echo "clang-format, clang-tidy, ruff, mypy"
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python -m tools.clang_tidy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/tools.stamp
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(TORCH_STAMP)
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

sdist: $(VENV)/tools.stamp
	rm -rf dist build/wheels
	$(BIN)/python -m build --sdist --no-isolation

# Of the sdist, for that is what others build, and with the oldest torch, which all later ones load.
# Torch's and NVIDIA's libraries come with torch. No GPU is seen, for which alone it would be built.
wheels: sdist $(PYTHONS:%=build/wheels/%)
	@echo "Wheels of Python $(or $(PYTHONS),3.10 to 3.14: none is on PATH; PYTHONS names others)"
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'lib*.so*' --wheel-dir dist \
	    build/wheels/*/*.whl
	$(CHECK_RELEASE)

build/wheels/%: sdist
	python$* -m venv $@/venv
	$@/venv/bin/pip install --quiet --upgrade pip
	$@/venv/bin/pip install --quiet --group wheel-build
	CUDA_VISIBLE_DEVICES= $@/venv/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $@ \
	    dist/*.tar.gz

manylinux: sdist
	$(BIN)/cibuildwheel --platform linux --output-dir dist dist/*.tar.gz
	$(CHECK_RELEASE)

define CHECK_RELEASE
	$(BIN)/python tools/wheels.py check dist/*.whl
	$(BIN)/twine check --strict dist/*.tar.gz
endef

try-wheel: $(TORCH_STAMP)
	$(BIN)/pip install --quiet --group wheel-test
	$(BIN)/pip install --quiet --force-reinstall --no-deps $(WHEEL)
	$(BIN)/python tools/wheels.py try

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist syncbn.egg-info syncbn/*.so
