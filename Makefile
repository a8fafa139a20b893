# Each target creates the environment (.venv in this folder) if it does not exist.
# Another Python:  make test PYTHON=python3.13        A part of the tests:  make test T=tests/rank

PYTHON ?= python3
BIN := .venv/bin
# make creates this file when everything in pyproject.toml is installed.
READY := .venv/.installed
T ?=
P ?=
V ?=
Z ?=
L ?=
SEEDS ?=
G ?=
W ?=
O ?=
C ?=
D ?=
S ?=

.PHONY: help demo test long versions lab lessons bench parity planted zoo optimizers fuzz-tp plan-check machines gpu-check why chaos drills docs shots check clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a GPT on real text, on 4 CPU ranks or one per GPU: about 3 minutes"
	@echo "make lab     open the first notebook in JupyterLab"
	@echo "make lessons execute the lessons whose code has changed, and store copies with outputs for the site"
	@echo "make test    the tests; a part of them: make test T=tests/rank"
	@echo "make long    the tests that make test leaves out because they take long: half an hour"
	@echo "make versions run a sample of the tests on each version of torch and Python that can be installed: an hour"
	@echo "make bench   compare with %%px, nbdistributed, a plain kernel and torchrun: more than an hour"
	@echo "make parity  compare every strategy with one process in plain torch: about 20 minutes"
	@echo "make planted put 32 known bugs into the ranks; each must make parity fail: about 4 minutes"
	@echo "make zoo     train 59 architectures under every strategy; each must equal one process, or be refused: about 13 minutes"
	@echo "make optimizers  train each optimizer under every strategy beside one process, and store the table"
	@echo "make fuzz-tp split 500 models of random operations over two ranks, and compare with one process: about 10 minutes"
	@echo "make plan-check compare memory and seconds that the planner predicts with measurements: about 50 minutes"
	@echo "make machines start, run, stop and break clusters over Slurm, SSH and MPI: half an hour"
	@echo "make gpu-check  check strategies, switches, errors and more on a pretended GPU: about 20 minutes"
	@echo "make why     hang four ranks in 24 ways, and ask which rank is stuck where: about 3 minutes"
	@echo "make drills  make 86 mistakes and failures in a notebook, and check the answers: about 3 minutes"
	@echo "make chaos   kill ranks, parents, controllers and notebooks during trainings; fill disks and memory: up to an hour"
	@echo "make docs    build the site of the manual, docs/build/html; a warning or a dead link is an error"
	@echo "make shots   take the pictures of docs/gallery.md in JupyterLab: about 8 minutes"
	@echo "make check   ruff, mypy, import-linter"
	@echo "make clean   remove the environment and the caches"

demo: $(READY)
	@$(BIN)/nbkit demo

# All tests: three files at a time. Tests of clusters and browsers mostly wait, so on two cores a third worker helps.
# A part of the tests, with T=: one file after the other, so that the output is in order.
# Hundreds of processes import nbkit: with stored bytecode each starts half a second sooner.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)
	@$(if $(T),,$(BIN)/python -m tests.support.rewritten)
	@$(BIN)/python -m pytest --durations=10 --durations-min=5 $(if $(T),$(T),-n 3 --dist loadfile)

# The tests marked long; those on several hosts: make machines. Each browser test continues from the one before, so
# the browser tests of make test run here too.
long: export PYTHONDONTWRITEBYTECODE =
long: $(READY)
	@$(if $(T),,$(BIN)/python -m tests.support.rewritten)
	@$(BIN)/python -m pytest -m long $(if $(T),$(T),--ignore tests/machines --ignore tests/browser -n 4 --dist loadfile)
	@$(if $(T),,$(BIN)/python -m pytest -m "" tests/browser)

# The sample of tests/support/versions.py on all versions; the table is stored. One, only printed:  make versions V=2.14.1
versions: export PYTHONDONTWRITEBYTECODE =
versions: $(READY)
	@$(BIN)/python -m tests.support.versions $(V)

lab: $(READY)
	@$(BIN)/jupyter lab --notebook-dir=. notebooks/00_quickstart.ipynb

# The lessons whose code has changed, or by name:  make lessons L=09
lessons: $(READY)
	@$(BIN)/python -m tests.support.lessons $(L)

bench: $(READY)
	@$(BIN)/python -m bench

# A part:  make parity P="gpt2 zbv"
parity: $(READY)
	@$(BIN)/python -m verify parity $(P)

planted: $(READY)
	@$(BIN)/python -m verify planted

# The whole table is stored; a part is only printed:  make zoo Z="gpt2 tp"
IMAGES := .venv/image-models
zoo: $(READY)
	@test -d $(IMAGES)/timm || $(BIN)/python -m pip install -q --no-deps --target $(IMAGES) torchvision==0.28.0 timm==1.0.31
	@$(BIN)/python -m verify zoo $(if $(Z),$(Z),--out verify/results.md)

# The whole table is stored; a part is only printed:  make optimizers O="muon tp=2"
optimizers: $(READY)
	@$(BIN)/python -m verify optimizers $(if $(O),$(O),--out verify/optimizers.md)

# 50 models, from seed 100 on:  make fuzz-tp SEEDS="50 100"
fuzz-tp: $(READY)
	@$(BIN)/python -m verify fuzz $(SEEDS)

# A part:  make plan-check P="peak llama"
plan-check: $(READY)
	@$(BIN)/python -m bench.plan $(P)

# Needs root, slurm-wlm, munge, openssh-server and iproute2.
machines: $(READY)
	@$(BIN)/python -m tests.support.machine_times
	@$(BIN)/python -m pytest -m "" tests/machines

# A part:  make gpu-check G="llama errors"
gpu-check: $(READY)
	@$(BIN)/python -m tests.support.gpu_check $(G)

# A part:  make why W="operation DDP"
why: $(READY)
	@$(BIN)/python -m tests.support.planted_hangs $(W)

# The whole list is stored; a part is only printed:  make drills D="strategy Stop"
drills: $(READY)
	@$(BIN)/python -m tests.support.drills $(if $(D),$(D),--out docs/evidence)

# A part:  make chaos C="faults N=20 SEED=40"     make chaos C=kill     make chaos C=pairs
# Runs only if it is named, 40 minutes:  make chaos C="goodput MINUTES=20"
chaos: $(READY)
	@$(BIN)/python -m tests.support.chaos $(C)

# --fail-on-warning: a link to a missing page or heading is a warning, and so is a page that is in no list.
# Built from scratch each time, because the tables of the reference depend on all code.
docs: $(READY)
	@rm -rf docs/build
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --builder html docs docs/build/html

# All pictures, or some:  make shots S="panel why"
shots: $(READY)
	@$(BIN)/python -m tests.support.shots $(S)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) here. nbkit needs Python >= 3.11:  make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "nbkit needs Python >= 3.11, and $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name a newer one:  make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make environments: its venv module is missing."; \
	  echo "On Debian and Ubuntu:  sudo apt-get install python3-venv"; exit 1; }
	@echo "Installing into .venv (once; torch is the large part) ..."
	@# If the creation of the venv was interrupted, it has a python but no pip.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
