# The environment lives in .venv/ and is made once. Two stamps stand for it:
#   .venv/.packages   the locked packages are all installed; older than a lock: made anew
#   .venv/.ready      rollsync itself is installed (editable); older than pyproject.toml: again
# A stamp is written last, so a set-up that was interrupted starts over.

VENV := .venv
PY := $(VENV)/bin/python
# -qq: errors only
PIP := $(PY) -m pip -qq --disable-pip-version-check --no-input
PYTHON ?=

# Nothing below looks anything up at a hub or reports to anyone.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TRANSFORMERS_OFFLINE := 1
export DO_NOT_TRACK := 1
export VLLM_NO_USAGE_STATS := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup demo test check lint types imports test-slow test-soak test-all bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      set up, then run the main job: train, get killed, resume, account for it"
	@echo "make test      set up, then the tests"
	@echo "make check     format, lint, types, import rules, tests"
	@echo "make test-all  all tests: slow ones, and those that kill at random for long, too"
	@echo "make bench     measure against the goals; writes benchmarks/results/*.json"
	@echo "make clean     remove the environment and all caches"

setup: $(VENV)/.ready

demo: $(VENV)/.ready
	$(VENV)/bin/rollsync demo $(ARGS)

test: $(VENV)/.ready
	$(PY) -m pytest $(ARGS)

test-slow: $(VENV)/.ready
	$(PY) -m pytest -m slow $(ARGS)

test-soak: $(VENV)/.ready
	$(PY) -m pytest -m soak $(ARGS)

test-all: $(VENV)/.ready
	$(PY) -m pytest -m "slow or soak or not slow" $(ARGS)

check: lint types imports test

lint: $(VENV)/.ready
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(VENV)/.ready
	$(PY) -m mypy

imports: $(VENV)/.ready
	$(VENV)/bin/lint-imports

bench: $(VENV)/.ready
	@mkdir -p benchmarks/results
	@for script in tests/bench/bench_*.py; do \
	    name=$$(basename "$$script" .py); name=$${name#bench_}; \
	    echo "$$script"; \
	    $(PY) -m "tests.bench.bench_$$name" --out "benchmarks/results/$$name.json" || exit 1; \
	done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build runs

$(VENV)/.ready: $(VENV)/.packages pyproject.toml
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# The whole environment is made anew: an update in place would keep what the lock has dropped.
$(VENV)/.packages: requirements/torch.txt requirements/cpu.txt requirements/compiled.txt
	@echo "Making the environment in $(VENV)/ (once; two to four minutes, about 3 GB)"
	@python=$$(PYTHON="$(PYTHON)" sh requirements/find-python.sh) && "$$python" -m venv --clear $(VENV)
	$(PIP) install --no-compile --constraint requirements/cpu.txt -r requirements/torch.txt
	$(PIP) install --no-compile --no-deps -r requirements/cpu.txt
	@$(PIP) install --no-compile --no-deps -r requirements/compiled.txt 2> $(VENV)/compiled.log || { \
	    echo "Going on without requirements/compiled.txt (see $(VENV)/compiled.log)"; \
	    touch "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pycosat.py"; }
	@$(PY) -m compileall -q -j 0 $(VENV)/lib > $(VENV)/compileall.log 2>&1 || true
	@touch $@
