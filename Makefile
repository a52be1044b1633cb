# make demo   train two small decoders on real text in three ways, compare memory and time
# make test   run the tests
# make bench  compare memory, FLOPs and time with other methods, write docs/performance.md
# make streambp  install StreamBP and the versions it pins, for make bench to compare with
# make coverage  try every causal LM of the transformers catalogue, write docs/coverage.md
# make objectives  measure every training objective, write docs/objectives.md
# make trainers  measure memory inside trainers, write docs/trainers.md
# make planning  predict the longest sequences of published models, write docs/planning.md
# make outside   try decoders of other packages, write docs/coverage-outside.md
# make walkthrough  write docs/walkthrough.md, one model on its way through the passes
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
# All of them by default, in two runs: processes that have captured a thousand models are slow.
TESTS ?=
BENCH ?= --default

VENV := .venv
VENV_PYTHON := $(CURDIR)/$(VENV)/bin/python
PYTEST = OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -n $(WORKERS)
SITE := .cache/site
STREAMBP := .cache/streambp

.PHONY: help demo test bench streambp coverage objectives trainers planning outside fuzz gpu lint walkthrough
.PHONY: clean
.DELETE_ON_ERROR:
.PRECIOUS: $(VENV)/.installed-%

help:
	@sed -n 's/^# make /make /p' Makefile

demo: $(VENV)/.installed-demo
	$(VENV_PYTHON) examples/demo.py

test: $(VENV)/.installed-test
ifneq ($(TESTS),)
	$(PYTEST) $(TESTS) $(PYTEST_ARGS)
else
	$(PYTEST) tests --ignore=tests/trainers $(PYTEST_ARGS)
	$(PYTEST) tests/trainers $(PYTEST_ARGS)
endif

# For more or less: make bench BENCH=--full, make bench BENCH=--quick.
bench: $(VENV)/.installed-dev
	status=0; \
	$(VENV_PYTHON) -m benchmarks.compile_time || status=1; \
	$(VENV_PYTHON) -m benchmarks.suite $(BENCH) || status=1; \
	exit $$status

streambp: $(STREAMBP)/.installed

$(STREAMBP)/.installed: benchmarks/suite/streambp.txt
	$(PYTHON) -m venv $(STREAMBP)
	$(STREAMBP)/bin/python -m pip install -r $<
	@touch $@

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

walkthrough: $(VENV)/.installed-test
	$(VENV_PYTHON) docs/walkthrough.py

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
