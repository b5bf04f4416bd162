# PYTHON   the interpreter the virtual environment is made from   (python3)
# TORCH    the torch version to install, such as 2.11.0           (the newest)
# VENV     where the virtual environment lies                     (.venv)
# WHEEL    a built wheel to install instead of this source tree
# QUICK    1 for the benchmarks' subset, which goes to build/benchmarks
# DEVICE   what is benchmarked, cpu or cuda                       (cpu)
PYTHON ?= python3
TORCH ?=
VENV ?= .venv
WHEEL ?=
QUICK ?=
DEVICE ?= cpu

BIN := $(VENV)/bin
TORCH_STAMP := $(VENV)/torch-$(or $(TORCH),newest).stamp
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.* syncbn/*.py* syncbn/*/*.py)
CXX_FILES := $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*/*.h csrc/*/*/*.cu \
    tests/emulation/*.cpp tests/emulation/*.h tests/emulation/*/*.cpp tests/emulation/*/*.h \
    tests/sanitizer/*.cpp tests/standin/*.h tests/standin/*/*.cpp tests/standin/*/*.h \
    benchmarks/*.cpp benchmarks/experiment/*.cpp benchmarks/experiment/*.cu)

.PHONY: help install demo test standin docs bench lint format clean

help:
	@echo "make install   build and install into the virtual environment"
	@echo "make demo      train on real data in two processes and show the result"
	@echo "make test      run the main tests: at most five minutes on two cores after the build"
	@echo "make test-all  check format, lint and types, and run every test; -j2 runs two folders at once"
	@echo "make standin   run the tests of CUDA without a GPU, on a stand-in for the CUDA runtime"
	@echo "make docs      build the documentation site in build/site; a broken link is an error"
	@echo "make bench     measure this machine, draw the results, write the README's table"
	@echo "make format    format the sources"
	@echo "make -f tools/maintain.mk lists what maintainers and releases need"
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
    $(patsubst %,layer/test_%.py,accuracy checkpoint checks convert convert_failures functional modules \
        reference torch_defects) \
    $(patsubst %,ranks/test_%.py,agreement alignment collectives faults multi_rank store) \
    $(patsubst %,compile/test_%.py,failures tracers))
test: $(if $(wildcard $(VENV)/tools.stamp),,$(VENV)/main-tests.stamp) $(VENV)/syncbn.stamp
	@echo "The main tests take at most five minutes on two cores; make test-all runs every test"
	$(BIN)/pytest -m "not cuda" -k "not inductor and not (faults and compiled)" $(MAIN_TESTS)

$(VENV)/main-tests.stamp: $(TORCH_STAMP) pyproject.toml
	$(PIP_INSTALL) --group wheel-test
	touch $@

# Warnings are errors here, but not in a user's build: a newer compiler may have new ones.
test-all: STRICT := CPPFLAGS="$(CPPFLAGS) -Werror" \
    NVCC_APPEND_FLAGS="$(NVCC_APPEND_FLAGS) -Werror=all-warnings -Xcompiler=-Werror"
FOLDERS := compile package emulation ranks frameworks layer operators cuda sanitizer
.PHONY: test-all $(FOLDERS:%=test-%)
test-all: lint $(FOLDERS:%=test-%)
# OpenMP threads that spin while they wait take the processors from a test's other processes: three
# times the time on two cores.
test $(FOLDERS:%=test-%) standin-%: export OMP_WAIT_POLICY := PASSIVE
$(FOLDERS:%=test-%): test-%: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/pytest tests/$*

# Late work on two devices shows the mistakes that the other modes show. Accesses outside of a
# tensor show without torch's cache: the operators' tests run so (tests/standin/README.md).
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
	$(BIN)/python tests/standin/check.py
standin-operators:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(STANDIN) -m cuda tests/operators
standin-core:
	STANDIN_DEVICES=2 STANDIN_STREAMS=late \
	    $(STANDIN) -m "cuda and not any_torch" tests/cuda tests/ranks/test_cuda_ranks.py

# The README's table needs the whole measurement.
bench: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/python -m benchmarks run --device $(DEVICE) $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python -m benchmarks table)

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

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist syncbn.egg-info syncbn/*.so
