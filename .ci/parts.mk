# What .ci/run runs: three processes at a time, of whichever part has some.
include tools/maintain.mk

OLDEST := VENV=.venv-oldest TORCH=2.11.0
NEWEST := VENV=.venv-newest TORCH=2.15.0
AGAIN := $(filter tests/layer/% tests/compile/%,$(MAIN_TESTS))
BUILT := WHEEL="$$(echo dist/syncbn-*.whl)"
.PHONY: all built torch oldest newest again python
all: oldest newest python

# pip would compile seven million lines of Python, of which the tests import a part: their processes
# compile that once. PIP_NO_COMPILE is the value of pip's option to compile, so 0 turns it off.
export PIP_NO_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
# The reason is in Makefile, which exports it to its own tests only.
export OMP_WAIT_POLICY := PASSIVE
# Else Inductor compiles a program for each set of vector instructions: 23 seconds with each torch.
export TORCHINDUCTOR_VEC_ISA_OK := 1

# The wheel, and the tools' environment with it. The CUDA library is built for one GPU and as PTX: a release
# builds it for all GPUs, and tools/wheels.py looks for spilled registers in each.
built: export TORCH_CUDA_ARCH_LIST := 9.0+PTX
built: export CPPFLAGS := -Werror
built: export NVCC_APPEND_FLAGS := -Werror=all-warnings -Xcompiler=-Werror
built:
	$(MAKE) -f tools/maintain.mk wheel .venv-oldest/tools.stamp $(OLDEST)
	rm -rf build/again
	$(MAKE) .venv-oldest/syncbn.stamp $(OLDEST) $(BUILT)
	.venv-oldest/bin/python -m build --sdist --no-isolation --outdir build/again

# Downloads while the wheel compiles.
torch:
	$(MAKE) .venv-newest/torch-2.15.0.stamp $(NEWEST)

# The longest part, late of the stand-in, first: at the end it would run alone. After its build, or
# make would begin all others during the build.
oldest: built
	$(MAKE) standin-build $(OLDEST) $(BUILT)
	$(MAKE) -o standin-build standin test-all docs $(OLDEST) $(BUILT)
	.venv-oldest/bin/python tools/wheels.py check dist/syncbn-*.whl

# The main tests of layers and graphs do not run twice. The frameworks call the interfaces that
# tests/layer covers, and the CUDA operators are the same binary code with each torch.
newest: built torch again
	$(MAKE) test $(NEWEST) $(BUILT)
	PYTEST_ADDOPTS="-m 'not any_torch' $(addprefix --ignore=,$(AGAIN))" \
	    $(MAKE) test-compile standin-core test-layer $(NEWEST) $(BUILT)
	PYTHONPATH=$(CURDIR)/build/again/site .venv-newest/bin/pytest $(addprefix tests/,layer/test_pass.py \
	    layer/test_functional.py layer/test_saved_tensors.py ranks/test_pass.py ranks/test_multi_rank.py)
	.venv-newest/bin/mypy

# The wheel has the training pass in C++ for the oldest torch, and build/again/site for the newest.
# Python makes the passes where there is none: in all that `newest` runs of the wheel, and here. Tests
# of the ranks themselves, of a restart, and of masks and a device that have no passes in C++ do not
# run twice.
python: built
	SYNCBN_PYTHON_PASS=1 .venv-oldest/bin/pytest $(filter-out $(MAIN_TESTS) \
	    $(patsubst %,tests/ranks/test_%.py,ranks restart masks plain_ranks),$(wildcard tests/ranks/test_*.py))

# The sdist is built with the newest torch, and the oldest loads the result. CPU operators only: the
# stand-in compiles the others with the newest torch. In a folder of its own, because other tests may
# import this one's build.
again: built torch
	SYNCBN_CUDA=0 CXX=$(CURDIR)/.ci/unoptimizing-c++ .venv-newest/bin/pip install --quiet --no-deps \
	    --no-build-isolation --target build/again/site build/again/*.tar.gz
	PYTHONPATH=$(CURDIR)/build/again/site \
	    .venv-oldest/bin/pytest tests/package/test_package.py tests/operators/test_batch_norm_*.py
