# What maintainers and releases need: make -f tools/maintain.mk TARGET
# PYTHONS  the versions that wheels are built for  (those of 3.10 to 3.14 that are on PATH)
PYTHONS ?= $(foreach v,3.10 3.11 3.12 3.13 3.14,$(if $(shell python$v -V 2>/dev/null),$v))

.PHONY: targets hidden sanitize works record-works wheel sdist wheels manylinux try-wheel requirements
targets:
	@echo "hidden     run the tests of layers without the CPU operators, as other devices do"
	@echo "sanitize   the operators with g++'s address, undefined and thread sanitizers"
	@echo "works      run what the table in docs/works shows, with two torches, and write it"
	@echo "wheel      build dist/*.whl for this Python, good for every torch from 2.11 on"
	@echo "sdist      build dist/*.tar.gz"
	@echo "wheels     build the sdist, and of it dist/*manylinux*.whl, one for each Python at hand"
	@echo "manylinux  the same in Docker for each Python and an older glibc, as PyPI gets them"
	@echo "try-wheel  install WHEEL and torch into VENV and run the tests that each wheel passes"
	@echo "requirements  write what a release installs, with hashes, by uv"

include Makefile

# Torch's expressions, as on devices without operators, in place of the CPU operators.
hidden: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/pytest tests/layer/test_plain.py tests/ranks/test_plain_ranks.py tests/layer/test_hidden.py
	SYNCBN_HIDE_OPERATORS=1 $(BIN)/pytest tests/layer tests/ranks

sanitize: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/python -m tools.sanitize
	SYNCBN_SANITIZED=1 ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	    $(BIN)/pytest -k "matches and float16 or offsets11 or small_inner or any_dtype or empty" \
	    tests/emulation/test_kernels.py tests/emulation/test_training.py

# In the environments of .ci/run, on CPUs.
works:
	$(MAKE) -f tools/maintain.mk record-works VENV=.venv-oldest TORCH=2.11.0
	$(MAKE) -f tools/maintain.mk record-works VENV=.venv-newest TORCH=2.15.0
	.venv-newest/bin/python -m tools.documents

record-works: $(VENV)/tools.stamp $(VENV)/syncbn.stamp
	$(BIN)/pytest -m "works and not cuda" --works=docs/works

wheel: $(TORCH_STAMP)
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# A release installs the versions and hashes of tools/requirements, and nothing else.
RELEASE := build/release/bin
HASHED := pip install --quiet --require-hashes -r tools/requirements
build/release/tools.stamp: $(wildcard tools/requirements/*.txt)
	$(PYTHON) -m venv build/release
	$(RELEASE)/$(HASHED)/wheel-build.txt
	$(RELEASE)/$(HASHED)/release.txt
	touch $@

sdist: build/release/tools.stamp
	rm -rf dist build/wheels
	$(RELEASE)/python -m build --sdist --no-isolation

# Built of the sdist, as others build it, with the oldest torch: all later ones load the result. The
# libraries that come with torch stay out of it. setup.py must see no GPU, or builds for that alone.
wheels: sdist $(PYTHONS:%=build/wheels/%)
	@echo "Wheels of Python $(or $(PYTHONS),3.10 to 3.14: none is on PATH; PYTHONS names others)"
	PATH="$(abspath $(RELEASE)):$$PATH" auditwheel repair --exclude 'lib*.so*' --wheel-dir dist \
	    build/wheels/*/*.whl
	$(CHECK_RELEASE)

build/wheels/%: sdist
	python$* -m venv $@/venv
	$@/venv/bin/$(HASHED)/wheel-build.txt
	CUDA_VISIBLE_DEVICES= $@/venv/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $@ \
	    dist/*.tar.gz

manylinux: sdist
	$(RELEASE)/cibuildwheel --platform linux --output-dir dist dist/*.tar.gz
	$(CHECK_RELEASE)

define CHECK_RELEASE
	$(RELEASE)/python tools/wheels.py check dist/*.whl
	$(RELEASE)/twine check --strict dist/*.tar.gz
endef

try-wheel:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(HASHED)/wheel-test.txt
	$(BIN)/pip install --quiet --force-reinstall --no-deps $(WHEEL)
	$(BIN)/python tools/wheels.py try

COMPILE := uv pip compile --quiet --universal --generate-hashes --no-annotate \
    --custom-compile-command "make -f tools/maintain.mk requirements"
requirements:
	$(COMPILE) --python-version 3.11 --group wheels -o tools/requirements/release.txt
	$(COMPILE) --python-version 3.10 --group wheel-build -o tools/requirements/wheel-build.txt
	$(COMPILE) --python-version 3.10 pyproject.toml --group wheel-test -o tools/requirements/wheel-test.txt
