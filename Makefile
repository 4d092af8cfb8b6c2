# make demo    sets everything up and shows both doors: which pixels a mask keeps, and losses compared on wrong labels
# make test    sets everything up, checks lint, format and types, and runs the tests
# make test-full make test, then the tests that take long, the torture and release-check
# make native  builds the native library, src/anyk/kernels/_native.so, if a C file changed; the targets that use it do so too
# make wheel   builds a wheel with the native library for any Linux that is not too old, into dist/
# make dist    builds sdist, wheel with the native library and pure wheel into dist/
# make release-check make dist, then twine, schemas, README as an index shows it, and installations with and without a compiler
# make check   lint, format and types alone
# make floor   runs the tests with the oldest torch that pyproject.toml allows, in an environment of its own (several gigabytes)
# make bench   measures speed and memory beside cross-entropy, writes benchmarks/results.md and the pages that quote it
# make docs    builds the guide into site/; a broken link or an undocumented name is an error
# make pictures draws the guide's pictures again
# make evidence writes evidence/tables/pays.md from the run summaries in evidence/summaries, and what other pages quote of it
# make torture runs hundreds of thousands of hard cases, by each backend
# make fuzz    reads damaged and hostile files of every kind, a minute each
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOOR := .venv-floor
LIBRARY := src/anyk/kernels/_native.so
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-full check native wheel dist release-check floor bench docs pictures evidence torture fuzz format clean

demo: $(VENV)/demo $(LIBRARY)
	@echo "1. An operator: soft_topk learns which pixels to keep."
	@$(BIN)/python examples/keep_pixels.py
	@echo
	@echo "2. A loss: the next token of Python's own library, by a tiny model. Of the labels that it learns from and is tuned by,"
	@echo "40 % are wrong; those of the test are right. Softmax with label smoothing, a bounded loss without k (gce), and with k (error)."
	@echo "A demonstration with a tiny model and any wrong label; with larger ones, docs/evidence.md, the gains are smaller."
	@$(BIN)/anyk compare completion --losses softmax gce error --label-noise 0.4 --effort quick --train-fraction 0.1 --epochs 1 \
		--learning-rate 0.05 --context 4 --embedding 16 --hidden 24 --dropout 0 --out demo || [ $$? -eq 3 ]  # 3: not decided

test: $(VENV)/test $(LIBRARY) check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not full"

test-full: test $(VENV)/loggers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m full
	$(MAKE) torture
	$(MAKE) release-check

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

native: $(LIBRARY)

# Not for the system of this machine alone: an error, if the library asks for what glibc has only since 2.29 or later.
wheel: $(VENV)/wheel
	rm -rf build/wheel
	ANYK_NATIVE=require $(BIN)/python -m hatchling build --target wheel --directory build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --plat manylinux_2_28_$$(uname -m) \
		--wheel-dir dist build/wheel/*.whl

dist: $(VENV)/release
	rm -rf dist
	$(MAKE) wheel
	ANYK_NATIVE=off $(BIN)/python -m hatchling build --directory dist

release-check: dist
	$(BIN)/python release/check.py dist

floor: $(FLOOR)/test $(LIBRARY)
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest -n 2

bench: $(VENV)/bench $(LIBRARY)
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/quote.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/costs.py
	$(BIN)/python benchmarks/tools.py --out benchmarks/tools.md
	$(BIN)/python benchmarks/verdict_error_rates.py

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs site
	@echo site/index.html

pictures: $(VENV)/demo
	$(BIN)/python docs/pictures.py

evidence: $(VENV)/demo
	$(BIN)/python evidence/pays/page.py

torture: $(VENV)/bench $(LIBRARY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/torture.py

fuzz: $(VENV)/demo
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py

format: $(VENV)/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The folder too: a file may be gone. Without a compiler it says so and there is no library; a compiler that fails is an error.
$(LIBRARY): src/anyk/kernels/build.py src/anyk/kernels/abi.py src/anyk/kernels/csrc $(wildcard src/anyk/kernels/csrc/*)
	$(PYTHON) $<

# torch comes first and from the constraints: a range would let pip take a newer build with a few gigabytes of CUDA
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $$(grep '^torch==' constraints.txt)
	touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[lab,sklearn]
	touch $@

$(VENV)/test: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[test,check]
	touch $@ $(VENV)/demo $(VENV)/docs $(VENV)/wheel

$(VENV)/docs: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[docs]
	touch $@ $(VENV)/demo

$(VENV)/bench: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[bench]
	touch $@

$(VENV)/loggers: $(VENV)/test pyproject.toml
	$(INSTALL) --editable .[loggers]
	touch $@

$(VENV)/wheel: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[wheel]
	touch $@

$(VENV)/release: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[release]
	touch $@ $(VENV)/wheel

# All but torch is as pinned; torch 2.6 wants one version of sympy, not the pinned one.
$(FLOOR)/test: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(FLOOR)
	grep -vE '^(torch|sympy)==' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(FLOOR)/constraints.txt \
		torch==$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml) --editable .[test]
	touch $@

clean:
	rm -rf $(VENV) $(FLOOR) src/anyk/kernels/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build demo anyk-runs site
