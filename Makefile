# make demo   train two small decoders on real text in three ways, compare memory and time
# make test   run the tests
# make bench  measure memory growth, FLOPs, compile time and step time on this machine's CPU
# make coverage  try every causal LM of the transformers catalogue, write docs/coverage.md
# make objectives  measure every training objective, write docs/objectives.md
# make trainers  measure memory inside trainers, write docs/trainers.md
# make planning  predict the longest sequences of published models, write docs/planning.md
# make outside   try decoders of other packages, write docs/coverage-outside.md
# make fuzz   try N random decoders (make fuzz N=2000)
# make gpu    measure on a GPU, with the Python that has torch; installs nothing
# make lint   check style and formatting
# make clean  remove everything these commands made
#
# demo, test, bench and lint set up .venv on their first run, and again when the lists of
# dependencies change.

PYTHON ?= python3
GPU_PYTHON ?= python3
# Test processes; each computes with one thread.
WORKERS ?= 2
PYTEST_ARGS ?=
TESTS ?= tests
BENCHMARKS ?= memory_growth flop_count compile_time step_time

VENV := .venv
VENV_PYTHON := $(CURDIR)/$(VENV)/bin/python
SITE := .cache/site

.PHONY: help demo test bench coverage objectives trainers planning outside fuzz gpu lint clean
.DELETE_ON_ERROR:
.PRECIOUS: $(VENV)/.installed-%

help:
	@sed -n 's/^# make /make /p' Makefile

demo: $(VENV)/.installed-demo
	$(VENV_PYTHON) examples/demo.py

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -n $(WORKERS) $(TESTS) $(PYTEST_ARGS)

bench: $(VENV)/.installed-test
	status=0; \
	for name in $(BENCHMARKS); do $(VENV_PYTHON) -m benchmarks.$$name || status=1; done; \
	exit $$status

coverage: $(VENV)/.installed-test
	$(VENV_PYTHON) -m benchmarks.catalogue --workers $(WORKERS)

objectives: $(VENV)/.installed-test
	$(VENV_PYTHON) -m benchmarks.objectives

trainers: $(VENV)/.installed-test
	$(VENV_PYTHON) -m benchmarks.trainers

planning: $(VENV)/.installed-test
	$(VENV_PYTHON) -m benchmarks.planning

outside: $(VENV)/.installed-test
	$(VENV_PYTHON) -m benchmarks.outside --workers $(WORKERS)

N ?= 200
fuzz: $(VENV)/.installed-test
	cd tests && $(VENV_PYTHON) fuzzing.py $(N) --workers $(WORKERS)

# Uninstalled, the package is in two folders. Put together by links it is what an installation
# would be, and the links are what Python sees from inside $(SITE).
gpu:
	rm -rf $(SITE)
	mkdir -p $(SITE)/seqsplit
	ln -s $(CURDIR)/seqsplit/* $(CURDIR)/passes $(SITE)/seqsplit/
	ln -s $(CURDIR)/benchmarks $(SITE)/
	cd $(SITE) && PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) .cache build dist *.egg-info demo_memory.png .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV_PYTHON) -m pip install -c constraints.txt -e ".[$*]"
	@touch $@
