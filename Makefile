# make demo     train, compare and draw: the first thing to run
# make test     the tests: each mechanism, each component and each value of a parameter once
# make test-all the whole suite, with every combination of parameters
# make test-newest the tests of algorithms, core and torch on the newest Python of this machine, in an environment of its own
# make check    what must pass before a change goes in
# make fuzz     any bytes to every decoder and to the wire, for five minutes; a million damaged frames and a hundred thousand damaged files
# make nightly  the whole suite, a million damaged frames and a hundred thousand damaged files, and every published result anew, its verdict kept in docs/explanation/claims.md; hours
# make bench    what flockstep costs beside others, into docs/explanation/performance.md; under 20 minutes of a quiet machine
# make mutants  a sample of changed operators in every algorithm: do the tests notice? some minutes a folder
# make package  build the wheel and the sdist, install each in a clean environment, try the command there; then the wheel of flockstep-lab
# make docs     rewrite the generated tables in README.md and docs/, and draw the README's picture
# make tutorials run the tutorials in docs/ and rewrite what their commands print; some minutes
# make site     build the site of the documentation into build/site; a link that leads nowhere fails
# PIP_ARGS adds options to pip, for example an index that holds torch without CUDA.

PYTHON ?= python3
PIP_ARGS ?=
FUZZ_SECONDS ?= 150
MUTANTS ?= 6
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# a file's tests stay together; most tests wait for processes of their own: one test process more than cores, at most 4;
# they take the files in the order of tests/support/order.py
PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(4, 1 + os.cpu_count()))')
SPREAD := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
# what every push runs
PUSH := $(SPREAD) -m 'not full' --hypothesis-profile=push

# The processes that tests start share the compiled modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo test test-newest test-all check format docs tutorials site package bench fuzz nightly mutants clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

venv: $(READY)

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("flockstep needs Python 3.11 or newer; say which with make PYTHON=…" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) 'pip>=25.1'  # for --group
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[fast,torch,workloads]' -e lab --group dev
	touch $@

demo: $(READY)
	$(BIN)/flockstep compare digits -n 4 --seeds 3 --out runs/demo \
		-s all_reduce -s bsp -s "ps(consistency=ssp(3))" -s asgd -s local_sgd -s easgd -s gossip -s dpsgd -s broadcast

test: $(READY)
	$(BIN)/python -m pytest $(PUSH)

# The first that runs; a shim of pyenv may be on the search path for a version that is not active.
NEWEST ?= $(shell for n in 15 14 13 12 11; do for p in python3.$$n $(HOME)/.pyenv/versions/3.$$n.*/bin/python3.$$n; do \
	$$p -c '' 2>/dev/null && echo $$p && exit; done; done)
test-newest:
	$(MAKE) VENV=build/newest PYTHON=$(NEWEST) build/newest/.ready
	build/newest/bin/python -m pytest $(PUSH) tests/unit tests/laws tests/conformance

test-all: $(READY)
	$(BIN)/python -m pytest $(SPREAD)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/python tools/size.py --check
	$(BIN)/python -m pytest $(PUSH)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/picture.py
	$(BIN)/python docs/rooms.py

tutorials: $(READY)
	$(BIN)/python docs/tutorials.py

site: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[torch]' --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(READY)
	rm -rf build/package dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) build twine
	$(BIN)/python -m build
	$(BIN)/python -m build --outdir dist lab
	$(BIN)/python -m twine check --strict dist/*
	for file in dist/flockstep-*; do \
		rm -rf build/package && $(PYTHON) -m venv build/package && \
		build/package/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $$file && \
		(cd build/package && bin/flockstep doctor --full) || exit 1; \
	done
	build/package/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) dist/flockstep_lab-*.whl
	cd build/package && bin/flockstep reproduce A15 --strict

bench: $(READY)
	$(BIN)/python benchmarks/all.py
	$(BIN)/python docs/generate.py

fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[torch]' --group fuzz
	$(BIN)/python fuzz/fuzz_codecs.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python fuzz/fuzz_wire.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tools/fuzz.py --seed $(SEED)

nightly: test-all
	$(BIN)/python tools/fuzz.py --seed $(SEED)
	$(BIN)/flockstep reproduce --all --write

mutants: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[torch]' --group mutants
	$(BIN)/python mutants/mutate.py --sample $(MUTANTS) --seed $(SEED)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
