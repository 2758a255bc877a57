# One environment serves every target: the demo would save little with a smaller one of its own, and
# two sets of versions would have to be kept right. torch (extra `peers`) is not in it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
EXTRAS := dev,docs,demo,notebooks,bench
STAMP := .venv/.stamp
SOURCES := pnkrylov tests scripts $(wildcard examples benchmarks notebooks)

export MPLBACKEND ?= Agg
# mkdocs-material prints a notice about its own end of life (May 2027) otherwise.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint types docs notebooks bench bench-more peers build-check constraints clean .venv

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(STAMP) ## real data, tables and pictures under build/demo/
	$(BIN)/python examples/demo.py
	$(BIN)/python examples/laplace_demo.py

# First the tests that take `dtype`, in float32 without 64-bit floats, as most users run JAX; then
# everything, with `dtype` float64.
test: $(STAMP) ## the fast tests: float32 without 64-bit floats, then all of them with 64-bit floats
	PNKRYLOV_TEST_X64=0 $(BIN)/pytest -q -n 2 -m "x32 and not slow and not one_precision"
	$(BIN)/pytest -n 2

test-slow: $(STAMP) ## the slow tests, and float32 in a JAX that has 64-bit floats
	PNKRYLOV_TEST_DTYPES=all $(BIN)/pytest -n 2 -m "slow or x32"

lint: $(STAMP) ## ruff and the validity of CITATION.cff
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/cffconvert --validate -i CITATION.cff

types: $(STAMP) ## pyright over the package
	$(BIN)/pyright --pythonpath $(BIN)/python

# Not --quiet: it hides warnings from --strict, and a broken link would pass.
docs: $(STAMP) ## build the documentation strictly into build/site
	$(BIN)/mkdocs build --strict
	$(BIN)/python scripts/check_site.py build/site

notebooks: $(STAMP) ## run every notebook at small size
	$(BIN)/python scripts/run_notebooks.py

# The two OPENBLAS variables force an old kernel on some machines; one core, so that ratios compare.
# `bench`: the costs beside bare products, and everything beside peers that docs/performance.md shows;
# under 15 minutes on a quiet machine. `bench-more`: costs without peers. Long tables (calibration,
# trace compare, preconditioners, whitening) are made by their own commands, which stand under every
# table. PEERS is a Python with torch's peers; without it their rows are left out.
PEERS ?= $(wildcard .venv-peers/bin/python)
PINNED := env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE taskset -c 0 $(BIN)/python
bench: $(STAMP) ## costs, and speed beside peers (`make peers` first), pinned to one core
	$(PINNED) benchmarks/bench_cost.py
	$(PINNED) benchmarks/bench_performance.py $(if $(PEERS),--peers $(PEERS))
	$(BIN)/python scripts/tables_performance.py

bench-more: $(STAMP) ## costs of single pieces, pinned to one core
	$(PINNED) benchmarks/bench_layout.py
	$(PINNED) benchmarks/bench_ggn.py
	$(PINNED) benchmarks/bench_trace.py wall
	$(PINNED) benchmarks/bench_hmc.py condition

peers: ## an environment of its own with torch and its libraries, for make bench
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check \
	  torch gpytorch linear_operator laplace-torch curvlinops-for-pytorch backpack-for-pytorch

build-check: $(STAMP) ## build sdist and wheel, install the wheel away from here and use it
	scripts/check_build.sh

constraints: ## resolve the newest working set and write constraints.txt
	rm -rf build/resolve && $(PYTHON) -m venv build/resolve
	build/resolve/bin/pip install --quiet -e '.[$(EXTRAS)]'
	build/resolve/bin/pip freeze --exclude-editable \
	  | sed -E 's/^(probnum==.*)$$/\1; python_version < "3.12"/' > constraints.txt

clean: ## remove everything that was made, .venv included
	rm -rf .venv build .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
