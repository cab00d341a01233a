# Every target sets up what it needs, once: a virtual environment in exact versions.
# Another Python: make demo PYTHON=/path/to/python. Arguments: make test ARGS="-k routing -x".

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PYTHON

VENV := .venv
COMPAT := .venv-compat
NEXT := .venv-next
# libtpu compiles for TPUs on any machine. JAX looks for a TPU first if libtpu is installed.
TPU := .venv-tpu
TUNIX := .venv-tunix
CLIENTS := .venv-clients
RAY := .venv-ray
DOCS := .venv-docs
BIN := $(VENV)/bin
ARGS ?=
# Three processes for two cores, because tests also wait. Each has engines of its own, which the tests
# of a file share.
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: constraints.txt
$(COMPAT)/.installed: constraints-0.0.3rc99.txt
$(VENV)/.installed $(COMPAT)/.installed: pyproject.toml
	@scripts/install $(@D) $(filter constraints%,$^)
	@touch $@

$(TPU)/.installed: EXTRAS := tpu,dev
$(RAY)/.installed: EXTRAS := cpu,dev,ray,ray-data
$(TUNIX)/.installed: EXTRAS := cpu,dev,tunix,lm-eval
$(TPU)/.installed $(RAY)/.installed $(TUNIX)/.installed: $(VENV)/.installed
	@scripts/install $(@D) constraints.txt $(EXTRAS) $(VENV)
	@touch $@

# These versions do not fit other packages of the base, so they are installed without their
# dependencies.
$(CLIENTS)/.installed: constraints-clients.txt
$(NEXT)/.installed: constraints-next.txt
$(CLIENTS)/.installed $(NEXT)/.installed: $(VENV)/.installed
	@scripts/overlay $(@D) $(VENV)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --ignore-installed \
		--requirement $(filter constraints%,$^)
	@touch $@

# The documents' tools read the code and never run it, so nothing of ours is installed here.
$(DOCS)/.installed: constraints-docs.txt pyproject.toml
	@"$$(scripts/find-python)" -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint $< --upgrade pip
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint $< --group docs
	@touch $@

.PHONY: setup
setup: $(VENV)/.installed ## Make the environment in .venv

.PHONY: demo
demo: setup ## Four engines on four virtual CPU devices answer prompts side by side
	@JAX_PLATFORMS=cpu $(BIN)/python -m enginepool.cli demo $(ARGS)

.PHONY: test
test: setup ## Run the tests except the slow ones
	$(BIN)/python $(PYTEST) -m "not slow" $(ARGS)

.PHONY: coverage
coverage: setup ## make test, with the coverage of lines in the tests' own processes
	$(BIN)/python $(PYTEST) -m "not slow" --cov --cov-report= $(ARGS)
	@$(BIN)/coverage report --skip-covered

.PHONY: test-slow
test-slow: setup ## Run whole commands and benchmarks as their users run them
	$(BIN)/python $(PYTEST) -m slow $(ARGS)

# Where the older upstream differs: patches, programs, scheduling, sampling, the mapping of weights,
# request models.
UPSTREAM := tests/patches tests/process/test_host_state.py \
	$(addprefix tests/engine/test_,joins.py optimisations.py other_upstream.py penalised_logprobs.py precision.py \
		prefill.py steady.py steady_grammar.py steady_pages.py steady_penalties.py steady_sampling.py) \
	$(addprefix tests/pool/test_,cancel.py engines.py generation.py grammar.py replay.py score.py start.py \
		stream.py) \
	$(addprefix tests/runtime/test_,faults.py recovery.py staged.py) \
	$(addprefix tests/weights/test_,families.py sources.py) \
	$(addprefix tests/lora/test_,exact.py served.py updates.py) \
	$(addprefix tests/checkpoints/test_,configurations.py end_ids.py refused.py rotary.py) \
	$(addprefix tests/serve/test_,chat_stream.py fields.py openai.py responses.py)

.PHONY: test-compat
test-compat: $(COMPAT)/.installed ## Run the tests that depend on upstream, on sglang-jax 0.0.3rc99; all tests: UPSTREAM=tests
	$(COMPAT)/bin/python $(PYTEST) -m "not slow" $(UPSTREAM) $(ARGS)

.PHONY: test-next
test-next: $(NEXT)/.installed ## Run the tests on the newest JAX, flax and NumPy that upstream works with
	$(NEXT)/bin/python $(PYTEST) -m "not slow" $(ARGS)

.PHONY: test-tpu
test-tpu: $(TPU)/.installed ## Run the tests that need libtpu but no TPU
	$(TPU)/bin/python $(PYTEST) $(ARGS) tests/doctor/test_ahead_of_time.py tests/doctor/test_tpu_check.py

.PHONY: tpu-check
tpu-check: $(TPU)/.installed ## Compile the programs of an engine for TPUs, without one
	@JAX_PLATFORMS=cpu $(TPU)/bin/python -m scripts.tpu_check $(ARGS)

.PHONY: test-integrations
test-integrations: setup $(TUNIX)/.installed $(CLIENTS)/.installed $(RAY)/.installed ## Run the tests of Tunix, lm_eval, Ray and clients, and of the TPU's attention kernel, interpreted on CPU
# tests/integrations is in pyproject.toml's norecursedirs, so that `make test` skips it.
	$(BIN)/python $(PYTEST) -m "not slow" $(ARGS) tests/integrations
	$(TUNIX)/bin/python $(PYTEST) -m "not slow" $(ARGS) tests/integrations/test_tunix.py tests/integrations/test_lm_eval.py \
		tests/integrations/test_pages.py
	$(CLIENTS)/bin/python $(PYTEST) -m "not slow" $(ARGS) tests/integrations/test_clients.py tests/integrations/test_renderers.py
	$(RAY)/bin/python -m pytest --durations=10 -m "not slow" $(ARGS) tests/integrations/test_ray*.py tests/integrations/test_pages.py

.PHONY: lint
lint: setup ## Check style, formatting, which package imports which, and that every import is declared
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/deptry enginepool patches

.PHONY: types
types: setup ## Check types
	$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: build
build: setup ## Make the source distribution in dist, and the wheel from it
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation >build.log 2>&1 || { cat build.log; exit 1; }
	@rm -f build.log
	@ls dist

.PHONY: test-wheel
test-wheel: build ## Install the wheel into empty environments of both Pythons, and use it there
	@scripts/try-wheel dist constraints.txt

.PHONY: docs
docs: $(DOCS)/.installed ## Make the site in site/, from README.md and docs/; broken links and anchors fail
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

.PHONY: bench
bench: setup ## Measure the device's busy share, for docs/benchmarks.md
	@JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.busy --engines 1 4 --step-ms 5 10 $(ARGS)

.PHONY: constraints
constraints: ## Rewrite the constraints files that scripts/lock writes, with the newest versions that fit
	scripts/lock

.PHONY: clean
clean: ## Remove the environments and what was built
	rm -rf build dist site $(VENV) $(COMPAT) $(NEXT) $(TPU) $(TUNIX) $(CLIENTS) $(RAY) $(DOCS)
