# make demo | test | test-all | triton | coverage | lint | format | bench | peers | docs | wheels | native | clean
# Needs python3 (>= 3.10) and make. A C++ compiler is used where there is one; without it the package is pure Python.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2

BIN   := $(VENV)/bin
STAMP := $(VENV)/.subquad-installed
BUILT := build/.native-built
PEERS := .venv-peers
TRITON := build/triton
CSRC  := $(wildcard CMakeLists.txt) $(wildcard csrc/*) $(wildcard csrc/*/*)

# pip must neither read a user's own packages nor ask the network whether it is the newest.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export PYTHONNOUSERSITE := 1

.DEFAULT_GOAL := demo
.PHONY: demo browser prepared test test-all triton coverage lint format bench peers docs wheels setup native clean

# The stamp makes the second run immediate; it is written last, so an interrupted installation starts again.
$(STAMP): pyproject.toml constraints.txt src/subquad/_version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "subquad needs Python >= 3.10, $(PYTHON) is " + sys.version.split()[0] + "; say make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group build --group test --group lint --group docs torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[all]'
	@touch $@

# The native kernels, straight into the package that the editable install points at. Where they cannot be built, the
# package works without them, unless SUBQUAD_REQUIRE_NATIVE is set. Old libraries go first: none is better than a stale one.
# They do not depend on Python packages: another pyproject.toml compiles nothing again.
$(BUILT): $(CSRC) | $(STAMP)
	@mkdir -p build
	@rm -f src/subquad/kernels/native/*.so src/subquad/kernels/native/*.dylib
	@export PATH="$(abspath $(BIN)):$$PATH"; \
	if cmake --fresh -S . -B build/native -G Ninja -DCMAKE_BUILD_TYPE=Release >build/native.log 2>&1 \
	  && cmake --build build/native >>build/native.log 2>&1 \
	  && cmake --install build/native --prefix src >>build/native.log 2>&1; then \
	  echo "native kernels: built"; \
	elif [ -n "$$SUBQUAD_REQUIRE_NATIVE" ]; then \
	  cat build/native.log; echo "native kernels: failed, and SUBQUAD_REQUIRE_NATIVE is set"; exit 1; \
	else \
	  tail -n 15 build/native.log; echo "native kernels: not built (see build/native.log); torch computes everything"; \
	fi
	@touch $@

setup: $(STAMP) $(BUILT)

native: $(BUILT)

# At most three minutes on two quiet cores; RESUME=1 keeps what an earlier run has measured.
demo: setup
	$(BIN)/subquad report --out results/report $(if $(RESUME),--resume)
	@echo "open results/report/index.html in a browser"

bench: setup
	@mkdir -p results
	$(BIN)/subquad bench --lengths 512,1024,2048,4096,8192,16384 --json results/bench.json

# Scripts are checked for calls and names that are not there: nobody runs all of them after a change.
LOOSE := arg-type assignment list-item misc no-any-return operator return-value union-attr unused-ignore var-annotated

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy $(LOOSE:%=--disable-error-code %) benchmarks/*.py examples/*.py
	$(BIN)/mypy benchmarks/experiments/*.py
	$(BIN)/mypy docs/site/*.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The report's page is tested in a real browser. Debian's is installed where it is missing and we may; elsewhere those
# tests are skipped and say why, unless SUBQUAD_REQUIRE_BROWSER=1 makes them fail.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "browser: none, and no apt-get to install one with"; exit 0; }; \
	  if [ "$$(id -u)" = 0 ]; then as=; elif sudo -n true 2>/dev/null; then as="sudo -n"; \
	  else echo "browser: none, and installing Debian's chromium needs root or sudo without a password"; exit 0; fi; \
	  echo "browser: installing Debian's chromium"; \
	  { $$as apt-get update && $$as env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
	    chromium fonts-liberation; } >/tmp/subquad-browser.$$$$.log 2>&1 \
	    || { tail -n 5 /tmp/subquad-browser.$$$$.log; echo "browser: it could not be installed"; }; \
	}

# Downloads, the compiler and the type checker do not wait for each other.
prepared: setup lint browser

test:
	@$(MAKE) --no-print-directory -j $(JOBS) prepared
	$(BIN)/python -m pytest -n $(JOBS)

# The GPU kernels under Triton's interpreter, and compiled for a GPU without having one. Triton is a download of 290 MB, in
# a folder of its own: with it in reach torch itself would behave differently.
$(TRITON)/.installed: $(STAMP) constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(TRITON) triton
	@touch $@

triton: setup $(TRITON)/.installed
	PYTHONPATH=$(abspath $(TRITON)) $(BIN)/python -m pytest -n $(JOBS) tests/kernels/triton_interpreted.py

# A second -m replaces the one of pyproject.toml, so this runs both kinds.
test-all: setup lint browser $(if $(filter Linux,$(shell uname -s)),triton)
	$(BIN)/python -m pytest -n $(JOBS) -m "deep or not deep"

# Lines and branches together; slower than `test`, so it is not part of it. build/coverage/index.html shows what is missing.
coverage: setup browser
	@rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n $(JOBS) --cov --cov-report=term:skip-covered --cov-report=html:build/coverage --cov-fail-under=92

# The other libraries, in an environment of their own: they are old and must not shape ours. fast-transformers
# compiles against the installed torch, and tries CUDA as soon as it sees nvcc, hence the bare PATH.
$(PEERS)/.installed: pyproject.toml constraints.txt $(CSRC) $(shell find src -name '*.py')
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --group build torch numpy setuptools wheel
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --group peers
	-env -u CUDA_HOME PATH="$(abspath $(PEERS))/bin:/usr/bin:/bin" MAX_JOBS=1 \
	  $(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation pytorch-fast-transformers
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --no-deps --force-reinstall .
	@touch $@

peers: $(PEERS)/.installed
	@mkdir -p results
	$(PEERS)/bin/python benchmarks/peers.py --json results/peers.json
	$(PEERS)/bin/python benchmarks/peers_choices.py --json results/peers_choices.json
	$(PEERS)/bin/python benchmarks/migration.py

# The pages, into site/. The message that it silences advertises another tool.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# The source package and the wheel built from it, into dist/; then the tests of the native kernels with the wheel as it is
# installed. Its environment borrows torch and the rest from this one, but not the editable package.
wheels: setup
	rm -rf dist build/wheel
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m venv --without-pip build/wheel
	$(BIN)/python -m pip --python build/wheel/bin/python install --quiet --no-deps --no-index dist/*.whl
	$(BIN)/python -c 'import pathlib, sysconfig; pathlib.Path(*pathlib.Path("build/wheel/lib").glob("python*/site-packages"), "borrowed.pth").write_text(sysconfig.get_path("purelib"))'
	build/wheel/bin/python -c 'import subquad; assert "build/wheel" in subquad.__file__, subquad.__file__'
	build/wheel/bin/python -m pytest -q -p no:cacheprovider tests/kernels tests/test_import.py -k "native or import"
	@ls dist

clean:
	rm -rf $(VENV) $(PEERS) build dist results site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
