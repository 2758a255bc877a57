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
.PHONY: help demo test test-slow lint types docs notebooks bench build-check constraints clean .venv

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(STAMP) ## real data, a table and a picture under build/demo/
	$(BIN)/python examples/demo.py

# First the tests that take `dtype`, without 64-bit floats, as most users run JAX; then everything.
test: $(STAMP) ## the fast tests: first float32 only, then all of them with 64-bit floats
	PNKRYLOV_TEST_X64=0 $(BIN)/pytest -q -n 2 -m "x32 and not slow"
	$(BIN)/pytest -n 2

test-slow: $(STAMP) ## the slow tests
	$(BIN)/pytest -n 2 -m slow

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
bench: $(STAMP) ## every benchmarks/bench_*.py, pinned to one core
	@ls benchmarks/bench_*.py >/dev/null 2>&1 || echo "benchmarks/: THERE ARE NO BENCHMARKS, so none was run"
	@for file in $(sort $(wildcard benchmarks/bench_*.py)); do \
	  echo "== $$file"; \
	  env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE taskset -c 0 $(BIN)/python $$file || exit 1; \
	done

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
