# Two commands do everything on a fresh machine with Python 3.11+, pip and make:
#   make demo   install and run the showcase        make test   everything CI runs
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-full lint bench docs clean format chromium floors

# torch is named first and alone, so that pip takes the pinned build and not the newest CUDA one.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e ".[docs]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/gramscope demo

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The report is opened in a real browser; without root its tests skip with the reason.
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	  echo "no Chromium could be installed: the browser tests will be skipped"

# One thread for each of the two workers: the networks of the tests are tiny, and threads would wait for each other.
test: export OMP_NUM_THREADS = 1
test: lint chromium
	$(BIN)/pytest -n 2 tests
	$(BIN)/pytest -n 2 --doctest-modules src
	$(BIN)/pytest --doctest-glob='*.md' README.md docs

# Every case of the longest tests too: about five minutes more.
test-full: export OMP_NUM_THREADS = 1
test-full: test
	$(BIN)/pytest -n 2 -m full tests

# In an environment of its own, in a temporary folder.
floors:
	$(PYTHON) tools/floors.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/ntk.py

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build dist
