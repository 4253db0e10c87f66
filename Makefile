# Everything runs inside .venv, which the first target that needs it creates. pip is the only tool required.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

.PHONY: help reproduce test test-slow lint format bench docs docs-serve tutorials clean

help:
	@echo "make reproduce  train all runs of the paper, draw its figures, judge its claims; results in out/reproduce"
	@echo "make test       set up .venv, then style, types, layering and tests"
	@echo "make test-slow  compile every router, and kernels from nothing; every router on up to 8 ranks: before a release"
	@echo "make bench      time the exact balanced assignment against its peers; results in out/bench-assign"
	@echo "make docs       build the documentation, out/site/index.html; make docs-serve shows it while you write"
	@echo "make tutorials  run the examples that are tutorials, and store their pages with what they print and draw"
	@echo "make lint       style, types and layering only"
	@echo "make format     rewrite the sources in the project's format"
	@echo "make clean      remove .venv, results and caches"

# torch first and alone: its pin decides which build (CPU or GPU) the configured index offers.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; a few minutes on a fresh machine)"
	@$(PIP) install "torch==2.13.0"
	@$(PIP) install -c constraints.txt -e ".[lab,peers,transformers,docs,dev]"
	@touch $@

# Kernels are compiled while the sources are checked: two cores, two jobs. Files go to the two processes in the order of
# their names, and the many short ones come last, so that both end at about the same time; xdist's own order, by the
# number of tests in a file, puts those last that start processes or train.
test: $(STAMP)
	@$(BIN)/equipoise warmup > $(VENV)/warmup.log 2>&1 & \
	$(MAKE) --no-print-directory lint; checked=$$?; wait $$! || { cat $(VENV)/warmup.log; exit 1; }; exit $$checked
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reproduce: $(STAMP)
	$(BIN)/equipoise reproduce

bench: $(STAMP)
	$(BIN)/equipoise bench assign

# The site needs nothing from elsewhere, at build time or when it is read. Warnings are errors (mkdocs.yml: strict).
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "out/site/index.html"

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

tutorials: $(STAMP)
	$(BIN)/python docs/_tools/tutorials.py

clean:
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
