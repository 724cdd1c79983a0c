# One door for people and for CI. Every target does its own set-up, once; `make run` and `make test` are all one needs.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Packages come uncompiled: where the shell keeps bytecode from being written, each process compiles all it imports
# again, which takes a worker's first process three times as long.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
  $(name) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))
BIN := .venv/bin
# Not compiled here: of the thousands of modules (transformers alone has 3,000) a run imports a few hundred.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
MATERIAL := .cache/material/complete

# What the packages' versions can change: tokenizer, template, storage, cluster, and whole runs.
LOWEST := .cache/lowest
LOWEST_TESTS := $(addprefix tests/test_,$(addsuffix .py,builtin cluster encoding jobs rendering render_families \
  render_tokenizers storage tables template tokenizer))
# It reads a part with datasets and polars, which are no packages of etl's; the first wants a newer pyarrow than etl.
OTHER_READERS := tests/test_jobs.py::test_readers_of_parquet_see_the_promised_columns

.PHONY: help run test test-long test-lowest check bench clean setup
help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: $(BIN)/installed ## make the environment, then run the whole job on an embedded S3 server with the bundled sample
	$(BIN)/python -m etl demo

test: setup ## make the environment, then run the tests, two files at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-long: setup ## the tests marked long, two files at a time
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile -o timeout=900

test-lowest: $(LOWEST)/installed $(MATERIAL) ## the tests of what the packages do, on the lower bounds of pyproject.toml
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS) --deselect $(OTHER_READERS)
	$(LOWEST)/bin/python -m pytest -m long tests/test_render_tokenizers.py tests/test_template.py tests/test_tokenizer.py

check: $(BIN)/installed-dev ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict etl tests

bench: setup $(BIN)/installed-bench ## rows/s, tokens/s and memory, beside the old recipe
	$(BIN)/python -m tests.bench

clean: ## remove everything that was made here
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The packages and the test material come at the same time.
setup: $(BIN)/python
	@$(MAKE) -j2 --output-sync=target $(BIN)/installed-dev $(MATERIAL)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "etl needs Python 3.11 or newer with venv (Debian: apt-get install python3-venv);" \
	  "name one with make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv .venv

$(BIN)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[demo]'
	@touch $@

$(BIN)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[demo,dev]'
	@touch $(BIN)/installed $@

$(LOWEST)/installed: pyproject.toml constraints-lowest.txt | $(BIN)/python
	$(BIN)/python -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints-lowest.txt \
	  -e '.[demo]' cloudpickle hypothesis polars pytest pytest-timeout
	@touch $@

# One contender more; where it cannot be had the bench says so and goes on.
$(BIN)/installed-bench: pyproject.toml constraints.txt | $(BIN)/installed-dev
	-$(INSTALL) -e '.[demo,dev,bench]'
	@touch $@

$(MATERIAL): tests/material.py | $(BIN)/python
	$(BIN)/python tests/material.py
