# `make test` needs nothing but Python ≥ 3.11 and make: it makes .venv and installs pinned versions of everything.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

.PHONY: help install lint types test slow quick compare format bench clean

help:
	@echo "make test     install, lint, check types and run the tests"
	@echo "make slow     the tests that make test leaves out: more of the same, on more models"
	@echo "make quick    the tests without kernels, compilers, training and whole studies: two minutes"
	@echo "make lint     ruff, and which room may import which"
	@echo "make types    mypy, strict"
	@echo "make compare  compare eight recipes on digits: a table and a page, in about three minutes"
	@echo "make format   let ruff rewrite the sources"
	@echo "make bench    what tempering costs in eval mode and at rate zero"
	@echo "make clean    remove .venv and every cache"

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: install
	$(BIN)/mypy

# One thread for each of the processes that share the cores; set OMP_NUM_THREADS for another number.
test slow quick: export OMP_NUM_THREADS := $(or $(OMP_NUM_THREADS),1)

test: lint
	@echo "mypy and the tests, side by side"
	@$(BIN)/mypy & types=$$!; $(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow"; tests=$$?; wait $$types && exit $$tests

slow: install
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m slow

quick: install
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow and not long"

compare: install
	$(BIN)/attemper compare

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv .import_linter_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
