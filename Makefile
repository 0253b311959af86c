# Everything runs in .venv, made with pip. PYTHON is the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
ALL := $(VENV)/.installed
MODEL := smollm2-135m

.PHONY: help install model demo demo-langgraph test test-rest test-all lint bench notebooks
.DEFAULT_GOAL := help

help:
	@echo "make demo            run the AutoGen coder/tester workflow on a small real model"
	@echo "make demo-langgraph  the same in LangGraph"
	@echo "make test            the tests that take minutes; no model is downloaded"
	@echo "make test-all        all tests, with the demo model"
	@echo "make lint            ruff and mypy"
	@echo "make bench           measure a handoff against text replay"
	@echo "make notebooks       run the notebooks again, and write them with their outputs"
	@echo "make model           bring the demo model ($(MODEL)) into the cache"
	@echo "make install         make $(VENV) and install everything above needs"

install: $(ALL)

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || \
		{ echo "$(VENV) has no pip: rm -r $(VENV), then make again (Debian, Ubuntu: apt-get install python3-venv first)"; exit 1; }
	@touch $@

$(DEMO): $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing what the demo needs into $(VENV): 1.2 GB with torch for CPUs, minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo]"
	@touch $@

$(ALL): $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing everything into $(VENV): 2.6 GB, minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,dev]"
	@touch $(DEMO) $@

model: $(DEMO)
	@$(BIN)/qkvshare models pull $(MODEL)

demo: model
	@$(BIN)/python examples/coder_tester_autogen.py

demo-langgraph: model
	@$(BIN)/python examples/coder_tester_langgraph.py

# One torch thread per worker. Threads that wait by spinning make tests on busy machines 20 times slower.
test test-rest: export OMP_NUM_THREADS = 1
test test-rest: export OMP_WAIT_POLICY = PASSIVE

test: install
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not model" --durations=15

test-rest: install model
	@CI=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "slow or model" --durations=30

test-all: test test-rest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: model
	@$(BIN)/qkvshare bench handoff

notebooks: install model
	cd notebooks && ../$(BIN)/jupytext --quiet --to ipynb *.py && PYTHONWARNINGS=ignore ../$(BIN)/jupyter-execute --inplace *.ipynb
