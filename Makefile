# make demo    sets everything up and compares softmax with a top-k loss on characters in many fonts
# make test    sets everything up, checks lint, format and types, and runs the tests
# make check   lint, format and types alone
# make floor   runs the tests with the oldest torch that pyproject.toml allows, in an environment of its own (several gigabytes)
# make bench   measures speed and memory beside cross-entropy, and writes benchmarks/results.md
# make docs    builds the guide into site/; a broken link or an undocumented name is an error
# make pictures draws the guide's pictures again
# make evidence writes docs/results.md from the run summaries in evidence/summaries
# make torture runs hundreds of thousands of hard cases
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOOR := .venv-floor
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check floor bench docs pictures evidence torture format clean

demo: $(VENV)/demo
	$(BIN)/anyk compare glyphs:100 --losses softmax splitter --epochs 8 --budget 5 --seeds 5 --out demo

test: $(VENV)/test check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

floor: $(FLOOR)/test
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest -n 2

bench: $(VENV)/bench
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/costs.py
	$(BIN)/python benchmarks/lab.py

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs site
	@echo site/index.html

pictures: $(VENV)/demo
	$(BIN)/python docs/pictures.py

evidence: $(VENV)/demo
	$(BIN)/python evidence/write.py

torture: $(VENV)/bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/torture.py

format: $(VENV)/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and from the constraints: a range would let pip take a newer build with a few gigabytes of CUDA
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $$(grep '^torch==' constraints.txt)
	touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[lab]
	touch $@

$(VENV)/test: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[test,check]
	touch $@ $(VENV)/demo $(VENV)/docs

$(VENV)/docs: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[docs]
	touch $@ $(VENV)/demo

$(VENV)/bench: $(VENV)/torch pyproject.toml
	$(INSTALL) --editable .[bench]
	touch $@

# All but torch is as pinned; torch 2.6 wants one version of sympy, not the pinned one.
$(FLOOR)/test: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(FLOOR)
	grep -vE '^(torch|sympy)==' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(FLOOR)/constraints.txt \
		torch==$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml) --editable .[test]
	touch $@

clean:
	rm -rf $(VENV) $(FLOOR) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build demo anyk-runs site
