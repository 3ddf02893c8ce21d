# Everything that a contributor runs. Each target makes .venv first when it is missing or out of date.
# A Python other than the one that is found: make setup PYTHON=/path/to/python3.11

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BENCH ?= *
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-kafka test test-kafka fuzz chaos coverage lint bench lock clean kafka-tools

help: ## Show these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with the pinned versions of requirements/cpu.txt

$(STAMP): requirements/cpu.txt pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh
	@touch $@

demo: $(STAMP) ## Train, kill, restore on other ranks, prove it bit for bit (DEMO_ARGS=...)
	@$(PY) recipes/demo.py $(DEMO_ARGS)

demo-kafka: kafka-tools ## The same over a Kafka broker that it starts and stops
	@$(PY) recipes/demo.py --kafka $(DEMO_ARGS)

# One thread a process: ranks that share few cores otherwise wait for each other's spinning threads.
test: kafka-tools ## Run all tests, Kafka included (PYTEST_ARGS="tests/unit -x")
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

test-kafka: kafka-tools ## Run only the tests that need a broker (PYTEST_ARGS=...)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m kafka $(PYTEST_ARGS)

fuzz: $(STAMP) ## Damage bytes and read them (FUZZ_ARGS="--seconds 600 --seed 1")
	@$(PY) -m tests.fuzz $(FUZZ_ARGS)

chaos: kafka-tools ## Kill, stop, fill, cut and tamper, in the long form (CHAOS_ARGS="--only power --seed 7")
	@OMP_NUM_THREADS=1 $(PY) -m tests.faults $(CHAOS_ARGS)

coverage: $(STAMP) ## Write docs/coverage.md anew: what the tests show, cell by cell
	@$(PY) -m tests.coverage

lint: $(STAMP) ## Check style and types: ruff, mypy --strict on the package
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy --strict

bench: $(STAMP) ## Run benchmarks/*/run.py (BENCH=NAME for one, BENCH_ARGS=...)
	@set -e; for script in benchmarks/$(BENCH)/run.py; do \
	  [ -f "$$script" ] || { echo "make bench: no $$script" >&2; exit 1; }; \
	  echo "== $$script"; $(PY) "$$script" $(BENCH_ARGS); \
	done

lock: $(STAMP) ## Resolve requirements/cpu.txt anew from pyproject.toml (UPGRADE=1 takes newer versions)
	@bash scripts/lock.sh $(if $(UPGRADE),--upgrade)

clean: ## Remove caches, build products and the demo's folder; .venv stays
	rm -rf build dist demo-run *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

kafka-tools: $(STAMP)
	@bash scripts/kafka_tools.sh
