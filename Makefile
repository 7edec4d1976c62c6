# The commands of this repository. `make` alone lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/mmrouter-installed
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
# uv installs the lock in seconds, pip in a minute. Where uv reaches no index, pip may: it has another configuration.
UV := $(shell command -v uv)

# The first of these that is there and is 3.11 or newer. `make venv PYTHON=...` takes another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

ENGINE ?= sim
DEMO_vllm := examples/demo-vllm.yaml
DEMO_sglang := examples/demo-real-sglang.yaml
DEMO_qwen3.5 := examples/demo-hybrid.yaml
DEMO = $(DEMO_$(or $(MODEL),$(ENGINE)))
MODEL ?=
ARGS ?=
WRITE ?=
FAMILIES ?=
RELEASE ?=
LONG ?=

.PHONY: help venv native demo check fix generate test test-local test-cluster e2e picture cluster kind images conformance adopt bench bench-quick soak campaign docs dist sbom audit lock clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv from requirements.lock, with the command mmrouter in it

# The build backend is in the lock too: no step of the installation installs an unpinned version.
$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; set PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "make: $(PYTHON) cannot make a venv; Debian and Ubuntu have it in python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV)"
	@$(if $(UV),$(UV) pip install --quiet --python $(PY) --compile-bytecode --require-hashes --requirement requirements.lock ||) \
		$(PIP) --require-hashes --requirement requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

native: venv ## compile the hot loops and install them into .venv; needs Rust, and everything runs without it
	@$(PY) -m hack.native_wheel --install

demo: venv ## show exact image routing in under a minute; ENGINE=vllm or sglang takes two real engines, MODEL=qwen3.5 a hybrid
ifeq ($(MODEL)$(ENGINE),sim)
	@exec $(VENV)/bin/mmrouter up examples/demo.yaml --demo $(ARGS)
else
	@test -n "$(DEMO)" || { echo "make: there is no demo of $(or $(MODEL),$(ENGINE))" >&2; exit 2; }
	@env="$$($(PY) -m hack.engines.$(if $(MODEL),vllm,$(ENGINE))_env)" || { s=$$?; [ $$s -ne 3 ] || echo "not run: see the reason above" >&2; exit $$s; }; \
		exec $(VENV)/bin/mmrouter up $(DEMO) --demo --engines path --engine-env "$$env" $(ARGS)
endif

check: venv ## the inner loop: format, lint, types, import rules, unit tests
	@$(PY) -m hack.run_levels check

fix: venv ## format the code and apply the safe fixes of the linter
	@$(VENV)/bin/ruff check --fix --quiet . ; $(VENV)/bin/ruff format .

generate: venv ## write every generated file: CRD, tables of the docs, golden files; ARGS=--check only reports
	@$(PY) -m hack.generate $(ARGS)

test: venv ## every level that this machine can run, with a summary; ARGS=PATH::TEST runs one test, LONG=1 adds what takes hours
ifeq ($(ARGS),)
	@$(if $(LONG),MMROUTER_FAMILIES=all) $(PY) -m hack.run_levels check local cluster e2e conformance bench-quick
else
	@$(if $(LONG),MMROUTER_FAMILIES=all) $(PY) -m pytest $(ARGS)
endif

test-local: venv ## only the level on local processes
	@$(PY) -m hack.run_levels local

test-cluster: venv ## only the level on a real control plane, which is built once where Go and etcd are there
	@$(PY) -m hack.run_levels cluster

e2e: venv ## only the level with real pods: on a one-node cluster of its own, or on the one of MMROUTER_KUBECONFIG
	@$(PY) -m hack.run_levels e2e

picture: venv ## take docs/live-page.png, the README's picture of the live page; needs Debian's chromium
	@MMROUTER_PICTURE=docs/live-page.png $(PY) -m pytest -q tests/local/test_live_page.py -k running_deployment

cluster: venv ## a one-node cluster with the images in the foreground; another terminal takes it by `source build/cluster.sh`
	@exec $(PY) tests/e2e/one_node_cluster.py $(ARGS)

# It runs make itself, which must not take over these ARGS.
kind: venv ## a cluster of kind, with a Docker daemon of its own, for the level e2e; ARGS is another command for it
	@env -u MAKEFLAGS -u ARGS $(PY) -m hack.kind.cluster $(ARGS) || { s=$$?; [ $$s -ne 3 ] || echo "not run: see the reason above" >&2; exit $$s; }

images: venv ## build the images with docker, podman or buildah; ARGS="--export DIR" writes archives
	@$(PY) -m hack.images.build_images $(ARGS)

conformance: venv ## only the level with real engines; WRITE=1 writes docs/conformance.md, FAMILIES=all runs every setup with every family
	@$(if $(WRITE),MMROUTER_CONFORMANCE_DIR=docs) $(if $(FAMILIES),MMROUTER_FAMILIES=$(FAMILIES)) $(PY) -m hack.run_levels conformance

adopt: venv ## every layout, family and field of ENGINE's RELEASE, without a model, against the proved one; WRITE=1 adds it to docs/conformance.md
	@$(PY) -m hack.engines.adopt $(ENGINE) "$(RELEASE)" $(if $(WRITE),--write) $(ARGS) || { s=$$?; [ $$s -ne 3 ] || echo "not run: see the reason above" >&2; exit $$s; }

bench: venv ## the benchmarks; ARGS=--json for a machine
	@$(PY) -m bench $(ARGS)

bench-quick: venv ## fail where a figure is a quarter worse than committed; ARGS=--write-baseline writes the figures
	@$(PY) -m bench.quick $(ARGS)

soak: venv ## hand-overs between processes that are killed a thousand times; MMROUTER_SOAK takes another number of kills
	@MMROUTER_SOAK=$${MMROUTER_SOAK:-1000} $(PY) -m pytest -q handover/tests/shm/test_soak.py $(ARGS)

campaign: venv ## hostile inputs, faults and soak for two hours, and one table; CAMPAIGN_SECONDS takes another time, ARGS names targets
	@PYTHONPATH=.:tests $(PY) -m campaign $(ARGS)

docs: venv ## build the documentation's site into build/site, with MkDocs in an environment of its own
	@$(PY) -m hack.docs.build_site $(ARGS)

dist: venv ## build what a release publishes into dist/: sdist, wheels, chart, bills of materials, checksums, provenance
	@$(PY) -m hack.distribution $(ARGS)

sbom: venv ## write the bills of materials of wheel and images to build/sbom; ARGS="--images DIR" reads built images
	@$(PY) -m hack.supply_chain.bill_of_materials build/sbom $(ARGS)

audit: venv ## compare the locked dependencies with the known vulnerabilities; ARGS="--images DIR" adds built images
	@$(PY) -m hack.supply_chain.audit $(ARGS)

# pip-tools stays out of the development environment: it is needed here only, and brings its own pins.
lock: ## pin every dependency anew in requirements.lock, with hashes; ARGS=--upgrade takes newer versions
	@test -x build/lock/bin/pip-compile || { $(PYTHON) -m venv build/lock && \
		build/lock/bin/python -m pip --disable-pip-version-check install --quiet pip-tools; }
	build/lock/bin/pip-compile --quiet --extra dev --build-deps-for editable --generate-hashes --allow-unsafe \
		--strip-extras --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		$(ARGS) --output-file requirements.lock pyproject.toml
	build/lock/bin/pip-compile --quiet --generate-hashes --strip-extras --no-header \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		$(ARGS) --output-file native/build.lock native/build.in
	build/lock/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		$(ARGS) --output-file hack/supply_chain/audit.lock hack/supply_chain/audit.in
	build/lock/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		$(ARGS) --output-file hack/docs/build.lock hack/docs/build.in
	build/lock/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		$(ARGS) --output-file hack/clients/build.lock hack/clients/build.in
	cd hack/clients && npm install --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund
	@! grep -nE '://|--(index|extra-index|find-links)' requirements.lock native/build.lock hack/*/*.lock || \
		{ echo "make: a lock names a host" >&2; exit 1; }

clean: ## remove what was made in the checkout, .venv too; the cache outside it stays
	rm -rf $(VENV) build dist native/target .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
