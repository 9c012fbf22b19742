# Two commands do everything on a fresh machine with Python 3.11+, pip and make:
#   make demo   install and run the showcase        make test   everything CI runs
# And:  make quick   tests of two minutes            make docs   the site, in docs/_build/html
#       make dist    a release, tried in an empty environment
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-full quick lint bench docs links notebooks dist clean format chromium floors

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

$(VENV)/.installed-dist: $(VENV)/.installed
	$(PIP) -e ".[dist]"
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

# The foundations and every measure, without the zoo of networks, the browser and the demo: under two minutes on two cores.
QUICK := base capture diagnose measures references spectra tasks test_arguments.py test_docs.py test_names.py \
  test_reference_pages.py test_release.py test_sources.py
quick: export OMP_NUM_THREADS = 1
quick: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 -x --deselect tests/measures/test_richness_experiments.py \
	  --deselect tests/capture/test_untouched.py --deselect tests/test_docs.py::test_a_notebook_runs \
	  $(addprefix tests/,$(QUICK))

# Every case of the longest tests too, and the site in a browser: about five minutes more.
test-full: export OMP_NUM_THREADS = 1
test-full: $(VENV)/.installed-docs test
	$(BIN)/pytest -n 2 -m full tests

# In an environment of its own, in a temporary folder.
floors:
	$(PYTHON) tools/floors.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/ntk.py

# Runs the notebooks; NOTEBOOKS=off takes their outputs as they were committed.
docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# Every address in the docs is asked for; needs the network.
links: $(VENV)/.installed-docs
	NOTEBOOKS=off $(BIN)/sphinx-build -b linkcheck docs docs/_build/links

# Writes the outputs of the notebooks anew, for readers on the web.
notebooks: $(VENV)/.installed-docs
	$(BIN)/python tools/notebooks.py

# What is uploaded: wheel and sdist, checked, and the wheel tried in an empty environment.
# REPOSITORY=https://... makes the README's links absolute and names the project's addresses; SITE=https://... the docs.
dist: export REPOSITORY := $(REPOSITORY)
dist: export SITE := $(SITE)
dist: $(VENV)/.installed-dist
	@test -n "$(REPOSITORY)" || echo "REPOSITORY is not set: on the index the README has no picture, and no links"
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) tools/try_wheel.py dist/*.whl

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build dist
