# `make help` lists the verbs. CI calls the same ones.
.DEFAULT_GOAL := help
.PHONY: help venv models serve test test-long lint check simulate loadtest clean
python := .venv/bin/python

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make .venv (the first time installs the dependencies, 6 GB, into the user's cache)
	@scripts/venv.sh

models: venv ## fetch the weights of the shipped models and the sample photographs
	@$(python) models/fetch.py

serve: models ## serve models/ on http://127.0.0.1:8000 with whatever device is there (more flags: ARGS="--port 9000")
	@exec .venv/bin/outboard serve --models models $(ARGS)

test: models lint ## everything that must pass before a commit, in minutes (ARGS="-k word" narrows it; two processes: most of it waits)
	$(python) -m pytest -n 2 --dist loadfile $(ARGS)

test-long: models ## the tests that take long, too
	$(python) -m pytest -m "long or not long" --timeout 1800 $(ARGS)

lint: venv ## ruff, and the import rules of the architecture
	$(python) -m ruff check .
	@.venv/bin/lint-imports --cache-dir .cache/import_linter

check: lint ## lint and the unit tests: seconds
	$(python) -m pytest tests/unit $(ARGS)

simulate: venv ## the engine in virtual time, with SEEDS=2000 that it has not seen before, or one again: SEED=123
	$(if $(SEED),SEED=$(SEED),SEEDS=$(or $(SEEDS),2000)) $(python) -m pytest tests/simulation -s -m "long or not long" -k "$(if $(SEED),this_seed,many_new_seeds)" $(ARGS)

loadtest: models ## Locust against a server that runs (ARGS="--users 16 --run-time 30s --min-fps 20")
	.venv/bin/locust -f loadtests/locustfile.py --headless --host $${OUTBOARD_URL:-http://127.0.0.1:8000} $(ARGS)

clean: ## remove what was made here (the shared dependencies in the user's cache stay)
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis *.egg-info server/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
