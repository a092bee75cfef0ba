# Everything here makes .venv when it is absent and needs only Python 3.11+, make and the package index.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first interpreter that runs and can make environments. Override: make PYTHON=/path/to/python3 test
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$p && break; done)

.PHONY: reproduce test lab notebooks install clean

reproduce: $(STAMP)  ## measure the findings and write figures/reproduce/
	$(BIN)/dspine-probe reproduce

test: $(STAMP)  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lab: $(STAMP)  ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir=notebooks

notebooks: $(STAMP)  ## run every notebook again, in place, with still pictures for pages that cannot draw
	$(BIN)/jupyter execute --inplace notebooks/*.ipynb
	$(BIN)/python -m dspine_probe.plots.stills notebooks/*.ipynb

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11+ with venv found: install one (Debian: apt-get install \
	python3-venv) or name it with make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

clean:  ## remove the environment and everything that was built; data/ and the user cache stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
