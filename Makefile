# Everything runs in .venv, which `make setup` creates. `make` alone lists the targets.
BIN := .venv/bin
# Touched last, so an interrupted set-up is taken up again.
READY := .venv/ready
BENCHMARKS := host lookup writes engine

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(READY) ## Make .venv: vLLM's CPU build, kvloft, development tools

$(READY): pyproject.toml tools/setup.sh
	@tools/setup.sh
	@touch $@

demo: $(READY) ## Serve small models twice, cold and restored, and compare
	$(BIN)/kvloft demo

lint: $(READY) ## Check style, types and the layering of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY) ## Fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: lint ## Lint, then all tests but the slow ones
	$(BIN)/pytest -n 2 --dist worksteal
	@echo "Not run: the slow tests. To run them: $(BIN)/pytest -m slow"

bench: $(READY) ## Measure copies, lookups, the disk and engine throughput; JSON in bench/results/
	@mkdir -p bench/results
	@set -e; for name in $(BENCHMARKS); do \
		$(BIN)/kvloft bench $$name --json bench/results/$$name.json; \
	done
	@mkdir -p build && $(BIN)/kvloft bench disk build --json bench/results/disk.json

clean: ## Remove .venv, caches and results
	rm -rf .venv build dist bench/results .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
