# One virtual environment, .venv, from requirements/cpu.lock; every target makes it first when it is missing or outdated.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run observe preview pictures axe-core test-ui test-clients demo record-demo demo-autoscaling docs docs-files lock-docs test test-all chaos check check-locks check-cuda model lock lock-audit bench-overhead bench-latency bench-long-prompts bench-gpu bench-batching bench-batch bench-batch-interference bench-batch-steps bench-autoscaling bench-autoscaling-cases bench-autoscaling-sizes bench-routing bench-routing-live bench-tenants bench-tenants-litellm bench-fairness bench-fairness-at-scale bench-fairness-virtual bench-apart bench-steps soak hostile bench-cold-start bench-false-ejections scorecard selftest-loadtest manifests dist dist-images image image-cuda test-cluster test-cluster-cuda test-interruptions clean

.PHONY: charts generated chart-files monitoring-files lock-charts
BIN := .venv/bin
CHARTS_PATH := $(CURDIR)/.venv-charts/bin:$(PATH):$(or $(KUBE_TESTBED),$(HOME)/.cache/kube-testbed)/bin
TORCH := torch==2.13.0+cpu
PYTORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# LlamaIndex takes no newer client of OpenAI's than 2, and so decides which versions of the two agents fit beside it.
LANGCHAIN := langchain-openai==1.7.4
ANTHROPIC := anthropic==2.14.0
LLAMA_INDEX := llama-index-llms-openai-like==0.8.1
PYDANTIC_AI := pydantic-ai-slim[openai]==2.31.1
OPENAI_AGENTS := openai-agents==0.20.0
OPENAI_PYTHON := openai==2.54.0
OPENAI_JS := openai@6.49.0
VERCEL_AI := ai@7.0.173 @ai-sdk/openai-compatible@3.0.92
AXE_CORE := axe-core@4.14.1
EMBEDDED_MODEL := smollm2-135m-instruct
# Two workers have the tests that start engines (tests/conftest.py): Ray gives its raylet 30 s, and two cores cannot start three fleets in
# that time. The third has tests that mostly wait.
WORKERS := -n 3 --dist loadgroup --no-loadscope-reorder
# pytest with a second try for what failed; prints the flaky tests at its end and writes them into its first argument.
TWICE := $(BIN)/python -m tests.second_try
# Tests that compute on vLLM's CPU engine, which its CUDA build lacks.
ON_CPU_ENGINES := ingress/test_generate.py ingress/test_generate_disconnect.py replica/test_tensor_parallel.py
# The newest whose packages for the proxy are all on PyPI.
LITELLM := litellm[proxy]==1.108.7
CONFIG ?= examples/cpu.yaml
CHAOS ?= build/chaos
TARGET ?= 127.0.0.1:8010
PROMETHEUS_PORT ?= 9090
GRAFANA_PORT ?= 3000
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= localhost/serve-app:$(VERSION)
CUDA_IMAGE ?= $(addsuffix -cuda,$(IMAGE))
REDIS_IMAGE ?= localhost/serve-app-redis:$(VERSION)
BUILD ?= docker build
DIST ?= dist/$(VERSION)
DIST_IMAGES ?= $(DIST)-images
# The repository that the charts of a release take images from; empty: that of values.yaml, localhost/serve-app.
IMAGE_REPOSITORY ?=
# A private key in PEM form that signs SHA256SUMS, of any kind that `openssl dgst` signs with.
SIGNING_KEY ?=
# The base image with its digest, for images of a release; empty: the tag that the Dockerfile names, as it is now.
BASE ?=
# Where BUILD puts images, in skopeo's words; containers-storage: for podman and buildah.
IMAGE_STORE ?= docker-daemon:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: model ## serve CONFIG (default examples/cpu.yaml) on this machine, with a button on the fleet page that kills an engine; Ctrl-C stops
	$(BIN)/serve-app up --demo -f $(CONFIG)

observe: .venv ## Prometheus, and Grafana where it is installed, beside `make run`: rules, alerts, dashboards; TARGET=HOST:PORT, Ctrl-C stops
	tools/fetch-prometheus build/prometheus
	$(BIN)/python -m tools.observe --target $(TARGET) --port $(PROMETHEUS_PORT) --grafana-port $(GRAFANA_PORT)

preview: .venv ## a picture of each dashboard in build/preview, drawn from the Prometheus of `make observe`
	$(BIN)/python -m tools.monitoring.preview --prometheus http://127.0.0.1:$(PROMETHEUS_PORT)

pictures: model ## renew the pictures of the pages and dashboards in docs/figures, from simulated fleets; wants chromium; 8 to 12 minutes
	tools/fetch-prometheus build/prometheus
	$(BIN)/python -m tests.ui.pictures docs/figures

demo: model ## start, ask, break a replica in mid-stream, show that the answer continues
	$(BIN)/serve-app demo

record-demo: model ## run make demo and draw what it prints as docs/figures/demo.svg; 4 minutes
	$(BIN)/python -m tools.record_demo docs/figures/demo.svg

demo-autoscaling: model ## a simulated fleet, a load that jumps, and the plot of replicas and latencies: 5 minutes, no GPU
	$(BIN)/python -m tools.demo_autoscaling

test: .venv ## the tests that need neither a cluster nor Helm, 20 to 35 minutes on 2 cores
	$(TWICE) build/flaky.txt $(WORKERS) -m "not slow and not cluster and not cuda" --ignore tests/chart --durations 30

test-all: .venv ## the same and the slow ones, then the answers of an ingress without shortcuts
	$(TWICE) build/flaky.txt $(WORKERS) -m "not cluster and not cuda" --ignore tests/chart
	SERVE_APP_TEST_SHORTCUTS=off $(TWICE) build/flaky-without-shortcuts.txt $(WORKERS) -m "not slow" tests/ingress tests/e2e

test-ui: .venv ## the chat page and the fleet page in a headless Chromium, in front of a fake service and of a fleet; writes tests/ui/axe-report.json; 2 minutes
	@command -v chromium chromium-browser >/dev/null || { echo "error: no chromium on the PATH; on Debian and Ubuntu: apt install chromium" >&2; exit 2; }
	AXE_REPORT=tests/ui/axe-report.json $(BIN)/pytest --durations 10 tests/ui

axe-core: ## renew tests/ui/axe.min.js.gz, which checks the pages for people who cannot see or use no mouse; wants npm
	rm -rf build/axe-core; mkdir -p build/axe-core
	npm pack --silent --pack-destination build/axe-core $(AXE_CORE)
	tar -xzOf build/axe-core/axe-core-*.tgz package/axe.min.js | gzip -9n > tests/ui/axe.min.js.gz

test-clients: model ## client libraries against a fleet, with silences and a killed engine, and the code of docs/api.md; fetches them; without node no JavaScript; 8 minutes
	@[ -x .venv-clients/bin/python ] || $(BIN)/python -m venv .venv-clients
	$(call quiet-pip,.venv-clients,-q $(OPENAI_PYTHON) $(LANGCHAIN) $(ANTHROPIC) $(LLAMA_INDEX) "$(PYDANTIC_AI)" $(OPENAI_AGENTS))
	@if command -v npm >/dev/null; then npm install --silent --no-fund --no-audit --prefix build/clients $(OPENAI_JS) $(VERCEL_AI); \
	else echo "npm is not on the PATH: the JavaScript is skipped; on Debian and Ubuntu: apt install nodejs npm" >&2; fi
	$(BIN)/pytest -n 0 tests/clients tests/examples -k "clients or client_library or javascript or python_of_the_api"

chaos: .venv ## each fault of tests/chaos five times, or those of SCENARIO; continues where it was stopped, prints the worst counts
	status=0; SERVE_APP_CHAOS=$(CHAOS) $(BIN)/pytest tests/chaos $(if $(SCENARIO),-k "$(SCENARIO)") || status=$$?; \
	$(BIN)/python -m tests.chaos.records $(CHAOS); exit $$status

check: .venv check-locks ## format, lint, types, dependency direction, known-bad versions in the locks; under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check-locks: .venv ## compare the locks, TORCH and what installed packages bundle with requirements/known-bad*.txt, without a network: a second
	$(BIN)/python -m tools.lock_audit --pin $(TORCH)

ADVISORIES ?= https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip
lock-audit: .venv ## renew requirements/known-bad-osv.txt from the archive ADVISORIES (default: OSV's of PyPI), then compare as make check-locks
	curl -fsSL --create-dirs -o build/advisories.zip $(ADVISORIES)
	$(BIN)/python -m tools.lock_audit --pin $(TORCH) --renew build/advisories.zip

check-cuda: .venv .venv-cuda/.installed ## what of the GPU path needs no GPU, with the CUDA image's packages: 10 GB of disk and gcc; 9 minutes, 13 the first time
	.venv-cuda/bin/pytest tests/cuda
	VLLM_TARGET_DEVICE=cpu .venv-cuda/bin/pytest $(WORKERS) tests/contracts tests/ingress tests/replica tests/simulated tests/config/test_vllm_*.py \
	  $(addprefix --ignore tests/,$(ON_CPU_ENGINES))

charts: .venv .venv-charts/.installed ## tests of the Helm charts, lint of Dockerfiles, shell scripts and workflows, without a cluster, under two minutes; wants helm, helm-docs, kubeconform
	@PATH="$(CHARTS_PATH)" command -v helm >/dev/null || { echo "error: helm is neither on the PATH nor in KUBE_TESTBED/bin" >&2; exit 2; }
	.venv-charts/bin/yamllint --strict .github .pre-commit-config.yaml helm/*/Chart.yaml helm/*/values.yaml helm/*/ci helm/loadtest/files
	.venv-charts/bin/hadolint Dockerfile tests/cluster/redis/Dockerfile
	.venv-charts/bin/shellcheck .ci/run .ci/kind .ci/interruptions k8s/gpu-day k8s/manifests/render requirements/complete-cuda tools/fetch-prometheus tools/verify-release .github/release.env
	.venv-charts/bin/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv-charts/bin/zizmor --offline --no-progress --quiet .github/workflows
	.venv-charts/bin/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	.venv-charts/bin/check-jsonschema -q --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	PATH="$(CHARTS_PATH)" helm lint --strict --quiet helm/serve-app
	PATH="$(CHARTS_PATH)" helm lint --strict --quiet helm/loadtest --values helm/loadtest/ci/job-values.yaml
	PATH="$(CHARTS_PATH)" helm lint --strict --quiet helm/batch --values helm/batch/ci/job-values.yaml
	tools/fetch-prometheus build/prometheus || echo "promtool is missing: the tests that need it are skipped" >&2
	PATH="$(CHARTS_PATH)" $(BIN)/pytest -n 2 --dist loadgroup tests/chart tests/monitoring

monitoring-files: .venv ## renew what tools/monitoring makes: rules, dashboards, tables of docs/monitoring.md
	$(BIN)/python -m tools.monitoring

chart-files: .venv monitoring-files ## renew what is made from the charts' values: schemas and READMEs
	$(BIN)/python -m tools.chart_schema
	$(BIN)/python -m tools.loadtest_chart_schema
	$(BIN)/python -m tools.batch_chart_schema
	PATH="$(CHARTS_PATH)" helm-docs --log-level error --chart-search-root helm

generated: docs-files chart-files manifests ## renew every file that is made from the code or the charts; wants helm and helm-docs

model: .venv ## fetch the embedded model (once)
	$(BIN)/serve-app model fetch $(EMBEDDED_MODEL)

bench-overhead: .venv ## the fleet beside a bare vLLM server: throughput, latency, CPU per token (15 minutes)
	$(BIN)/python -m benchmarks.overhead

bench-latency: .venv ## open-loop latency of the fleet and a bare server, and our generator beside vLLM's (55 minutes)
	$(BIN)/python -m benchmarks.latency

bench-long-prompts: .venv ## what prompts of 100,000 tokens do to short streams of the same ingress (10 minutes)
	$(BIN)/python -m benchmarks.long_prompts

bench-gpu: model .venv-cuda/.installed ## the fleet beside vLLM's own two servers on this machine's NVIDIA GPU; MODEL=ID_OR_PATH, without it the embedded model; 10 GB of disk
	.venv-cuda/bin/python -m tests.gpu.compare $(if $(MODEL),--model "$(MODEL)")

bench-batching: model ## static against continuous batching: throughput, latency, KV memory (hours)
	$(BIN)/python -m benchmarks.batching

bench-batch: model ## prompts through fixed batches, our Beam handler and our command line: CPU-hours and simulated GPU-hours (15 minutes)
	$(BIN)/python -m benchmarks.batch

bench-batch-interference: .venv ## what a batch of the API costs those who chat, and how much idle capacity it fills (5 minutes)
	$(BIN)/python -m benchmarks.batch_interference

bench-batch-steps: .venv ## the same, computed without processes, for each way to bound a batch (half a minute)
	$(BIN)/python -m benchmarks.batch_steps

bench-autoscaling: .venv ## autoscaling policies on a simulated fleet: SLO attainment and replica-seconds (20 minutes)
	$(BIN)/python -m benchmarks.autoscaling

bench-autoscaling-cases: .venv ## the policy on loads where it once went wrong, with the seeds of benchmarks/results/autoscaling-cases.json (10 minutes)
	$(BIN)/python -m benchmarks.scaling_cases --seeds 31 32 33 34

REPLICAS ?= 1 10 65
bench-autoscaling-sizes: .venv ## 17 shapes of load on simulated fleets of REPLICAS (25 CPU minutes; 1000 takes four hours)
	for n in $(REPLICAS); do $(BIN)/python -m benchmarks.scaling_cases --replicas $$n --seeds 1 2 3 4 || exit; done

bench-routing: .venv ## routing policies on 16 simulated replicas with prefix caches, and what a choice costs (15 minutes)
	$(BIN)/python -m benchmarks.routing
	$(BIN)/python -m benchmarks.routing_truth
	$(BIN)/python -m benchmarks.routing_cost

bench-routing-live: .venv ## the same policies live: 4 replicas on simulated accelerators, 12 engines in all, 16 GiB (15 minutes)
	$(BIN)/python -m benchmarks.routing_live

MINUTES_OF_SOAK ?= 60
soak: .venv ## a fleet at 70 % load while clients and replicas come and go, for MINUTES_OF_SOAK: is memory flat, are descriptors, threads, tasks?
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES_OF_SOAK)

CASES_OF_HOSTILE ?= 10000
hostile: .venv ## hostile clients against a fleet of simulated accelerators, and what other clients notice: CASES_OF_HOSTILE requests, 1,000 slow clients; 15 minutes
	$(BIN)/python -m benchmarks.hostile --cases $(CASES_OF_HOSTILE)

bench-tenants: .venv ## how exactly three ingresses keep quotas together, while one is killed (7 minutes)
	$(BIN)/python -m benchmarks.quotas

bench-tenants-litellm: .venv ## tokens per minute and CPU per request beside LiteLLM's proxy, which it fetches (750 MB) into .venv-litellm; wants redis-server (20 minutes)
	@command -v redis-server >/dev/null || { echo "error: no redis-server on the PATH; on Debian and Ubuntu: apt install redis-server" >&2; exit 2; }
	@[ -x .venv-litellm/bin/python ] || $(BIN)/python -m venv .venv-litellm
	$(call quiet-pip,.venv-litellm,-q "$(LITELLM)")
	$(BIN)/python -m benchmarks.quotas_litellm

bench-fairness-at-scale: .venv ## shares of 200 tenants on 1,000 simulated engines behind 20 ingresses, and what a decision costs (5 CPU minutes)
	$(BIN)/python -m benchmarks.fairness_at_scale

SEEDS ?= 1 2 3 4 5
bench-fairness-virtual: .venv ## the same for each of SEEDS on real schedulers and ingress cores in virtual time, which a busy machine does not change (10 CPU minutes)
	$(BIN)/python -m benchmarks.fairness_virtual --seeds $(SEEDS)
	$(BIN)/python -m benchmarks.fairness_contexts --seeds $(SEEDS)

bench-apart: .venv ## prefill and decode apart, and drains with KV, on real schedulers and ingress cores in virtual time (30 CPU minutes)
	$(BIN)/python -m benchmarks.apart --seeds $(SEEDS)

bench-steps: .venv ## steps that keep an ITL target beside fixed ones, on real schedulers in virtual time (10 CPU minutes)
	$(BIN)/python -m benchmarks.steps --seeds $(SEEDS)

bench-fairness: .venv ## noisy neighbours, shares, weights, three times the load: fair beside first come first served, for each of SEEDS (50 minutes each)
	for seed in $(SEEDS); do \
	  for parts in "capacity noisy" nearly equal weights "reference burst" "storm patient behind" overload; do \
	    $(BIN)/python -m benchmarks.fairness --parts $$parts --seed $$seed || exit; done; \
	  for parts in noisy weights; do $(BIN)/python -m benchmarks.fairness --parts $$parts --ingresses 2 --seed $$seed || exit; done; done

bench-cold-start: .venv ## what the start of a replica costs, phase by phase (5 to 15 minutes)
	$(BIN)/python -m tools.cold_start --warm

MINUTES ?= 30
bench-false-ejections: .venv ## a slow replica is left alone: 3x overload with a fifth of a core, for MINUTES
	$(BIN)/python -m benchmarks.false_ejections --minutes $(MINUTES)

RAY_PYTHON ?= .venv-ray-llm/bin/python
scorecard: .venv ## what clients notice of faults, beside Ray Serve LLM (RAY_PYTHON) and vLLM behind HAProxy (2 hours)
	$(BIN)/python -m benchmarks.scorecard --ray-python $(RAY_PYTHON)

selftest-loadtest: .venv ## the load generator against a server of known laws: all of it, with the slow tests (30 minutes)
	@out=results/selftest-$$(date -u +%Y%m%dT%H%M%SZ); status=0; \
	$(BIN)/serve-app-loadtest selftest --out "$$out" || status=$$?; \
	$(BIN)/pytest $(WORKERS) tests/loadtest --junitxml "$$out/pytest.xml" || status=$$?; \
	echo "results: $$out/selftest.json, selftest.md and pytest.xml"; exit $$status

image: .venv ## build the CPU image as IMAGE with BUILD (default: docker build), pip configured as here
	$(call build-image,cpu,$(IMAGE))

image-cuda: .venv ## build the image of GPU model pods as CUDA_IMAGE (default: IMAGE-cuda); 6 minutes after make image, 30 GB of disk
	$(call build-image,cuda,$(CUDA_IMAGE))

# Args: target, tag. The secret is pip's own configuration: settings of the environment win over those of files, as for pip. A constraint
# is left out: it names a file of this machine, which the build does not see, and the locks say every version.
define build-image
	@config=$$(mktemp); trap 'rm -f "$$config"' EXIT; \
	{ echo "[global]"; $(BIN)/pip config list | sed -n "s/^\(:env:\|global\)[.]*\([a-z-]*\)='\(.*\)'$$/\2 = \3/p" | awk '$$1 != "constraint" && !seen[$$1]++'; } > "$$config"; \
	$(BUILD) --target $(1) $(if $(BASE),--build-arg BASE=$(BASE)) --build-arg TORCH=$(TORCH) --build-arg PYTORCH_CPU_INDEX=$(PYTORCH_CPU_INDEX) \
	  --secret id=pip,src="$$config" -t $(2) .
endef

CLUSTER_TESTS ?= cluster
test-cluster: image ## install on the cluster of KUBECONFIG and test it, half an hour on 2 cores, 20 minutes with CLUSTER_TESTS="cluster and not slow"; BUILD must load images where its nodes find them
	@[ -n "$${KUBECONFIG:-}" ] || { echo "error: KUBECONFIG names no cluster" >&2; exit 2; }
	$(BUILD) -t $(REDIS_IMAGE) tests/cluster/redis
	SERVE_APP_IMAGE=$(IMAGE) SERVE_APP_REDIS_IMAGE=$(REDIS_IMAGE) $(TWICE) build/flaky-cluster.txt -m "$(CLUSTER_TESTS)" --durations=0 tests/cluster

test-cluster-cuda: image image-cuda ## the same for a fleet of both images: install, answers, lost pods, scaling; 15 minutes, 60 GB of disk
	@[ -n "$${KUBECONFIG:-}" ] || { echo "error: KUBECONFIG names no cluster" >&2; exit 2; }
	$(BUILD) -t $(REDIS_IMAGE) tests/cluster/redis
	SERVE_APP_IMAGE=$(IMAGE) SERVE_APP_REDIS_IMAGE=$(REDIS_IMAGE) SERVE_APP_CUDA_IMAGE=$(CUDA_IMAGE) $(BIN)/pytest -m cluster --durations=0 \
	  $(addprefix tests/cluster/test_,1_release.py 4_losses.py 5_scaling.py 7_gpu_values.py)

test-interruptions: image ## spot notices, drift, consolidation, upgrades without spare GPUs, k8s/cluster/values/models, KV between pods, engines that share a GPU or span pods, on a cluster with three nodes of pretended GPUs that have the taint nvidia.com/gpu: .ci/interruptions makes one; an hour
	@[ -n "$${KUBECONFIG:-}" ] || { echo "error: KUBECONFIG names no cluster" >&2; exit 2; }
	$(BUILD) -t $(REDIS_IMAGE) tests/cluster/redis
	SERVE_APP_IMAGE=$(IMAGE) SERVE_APP_REDIS_IMAGE=$(REDIS_IMAGE) $(BIN)/pytest -m cluster --durations=0 $(addprefix tests/cluster/test_,4_interruptions.py 8_first_models.py 9_engines.py)

lock: .venv ## renew requirements/*.lock after a change of pyproject.toml; known versions stay
	@links=$${PIP_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}; \
	args=(); for link in $${links:-$(PYTORCH_CPU_INDEX)/torch/}; do args+=(--find-links "$$link"); done; \
	compile() { UV_CUSTOM_COMPILE_COMMAND="make lock  # on $$(date -u +%F)" $(BIN)/uv pip compile -q --override requirements/overrides.txt \
	  --generate-hashes --no-emit-index-url "$$@"; }; \
	compile --override requirements/overrides-cpu.txt --python-version 3.11 --extra cpu --extra loadtest --extra ui --extra shared-batches --extra kv --no-emit-package torch "$${args[@]}" \
	  -o requirements/cpu.lock pyproject.toml; \
	compile --override requirements/overrides-dev.txt --python-version 3.11 --group dev -c requirements/cpu.lock -o requirements/dev.lock; \
	compile --python-version 3.11 --group sbom -o requirements/sbom.lock; \
	compile --override requirements/overrides-cuda.txt --python-version 3.11 --extra cuda --extra loadtest --extra shared-batches --extra kv -c requirements/cpu.lock -o requirements/cuda.lock pyproject.toml
	@echo "requirements/*.lock are renewed; make test installs them"

lock-charts: .venv ## renew requirements/charts.lock after a change of charts.in
	UV_CUSTOM_COMPILE_COMMAND="make lock-charts  # on $$(date -u +%F)" $(BIN)/uv pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url \
	  -o requirements/charts.lock requirements/charts.in

docs: .venv-docs/.installed ## the documentation as a site in build/site, without a network; every link is checked
	PYTHONPATH=. .venv-docs/bin/python -m tools.site
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --clean
	@echo "open build/site/index.html"

docs-files: .venv ## renew docs/configuration.md, docs/scenario.md and docs/openapi.json, which are made from the code
	$(BIN)/serve-app-loadtest schema --markdown > docs/scenario.md
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.openapi

lock-docs: .venv ## renew requirements/docs.lock after a change of docs.in
	UV_CUSTOM_COMPILE_COMMAND="make lock-docs  # on $$(date -u +%F)" $(BIN)/uv pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url \
	  -o requirements/docs.lock requirements/docs.in

dist: .venv .venv-sbom/.installed ## the files of a release in DIST: wheel, sdist, locks, SBOMs, charts with IMAGE_REPOSITORY, notes, provenance, checksums, signed by SIGNING_KEY; wants helm
	$(call empty-folder,$(DIST))
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/uv build -q --no-build-isolation --python $(BIN)/python -o $(DIST) .
	$(call date-source,$(DIST),serve_app-$(VERSION))
	cp requirements/cpu.lock $(DIST)/serve_app-$(VERSION)-cpu.txt
	cp requirements/cuda.lock $(DIST)/serve_app-$(VERSION)-cuda.txt
	{ echo $(TORCH); cat requirements/cpu.lock; } | $(call list-packages,cpu)
	$(call list-packages,cuda) < requirements/cuda.lock
	cp -r helm $(DIST)/helm
	$(if $(IMAGE_REPOSITORY),sed -i 's|localhost/serve-app|$(IMAGE_REPOSITORY)|' $(DIST)/helm/*/values.yaml $(DIST)/helm/*/README.md)
	PATH="$(CHARTS_PATH)" helm package $(DIST)/helm/serve-app $(DIST)/helm/loadtest $(DIST)/helm/batch -d $(DIST)
	rm -r $(DIST)/helm
	for chart in $(DIST)/*.tgz; do $(BIN)/python -m tools.chart_layout "$$chart" "$${chart%.tgz}-chart.oci.tar"; done
	awk '/^## /{n++} n==1' CHANGELOG.md > $(DIST)/NOTES.md
	rm -f $(DIST)/.gitignore
	$(BIN)/python -m tools.provenance dist $(DIST) $(DIST)/serve-app-$(VERSION)-provenance.json $(if $(IMAGE_REPOSITORY),IMAGE_REPOSITORY=$(IMAGE_REPOSITORY))
	$(call write-checksums,$(DIST))

dist-images: .venv ## the images out of IMAGE_STORE as OCI archives in DIST_IMAGES, with SBOMs, provenance, checksums, signed by SIGNING_KEY; CUDA_IMAGE= saves the CPU image alone, IMAGE= CUDA_IMAGE=NAME that for GPUs; wants skopeo
	@[ -n "$(IMAGE)$(CUDA_IMAGE)" ] || { echo "error: IMAGE and CUDA_IMAGE are both empty: name one of them" >&2; exit 2; }
	$(call empty-folder,$(DIST_IMAGES))
	$(if $(IMAGE),$(call save-image,cpu,$(IMAGE)))
	$(if $(CUDA_IMAGE),$(call save-image,cuda,$(CUDA_IMAGE)))
	$(BIN)/python -m tools.provenance dist-images $(DIST_IMAGES) $(DIST_IMAGES)/serve-app-$(VERSION)-images-provenance.json $(if $(BASE),BASE=$(BASE))
	$(call write-checksums,$(DIST_IMAGES))

# Arg: folder.
define empty-folder
	@mkdir -p $(1); [ -z "$$(ls $(1))" ] || { echo "error: $(1) is not empty" >&2; exit 1; }
endef

# Args: folder, name. setuptools writes the time of the build into the source archive, and PyPI takes a file again only if it is the same.
define date-source
	date=$$(git log -1 --format=%ct); cd $(1); tar -xzf $(2).tar.gz; \
	tar -c --sort=name --mtime=@$$date --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX $(2) | gzip -9n > $(2).tar.gz; rm -r $(2)
endef

define write-checksums
	cd $(1) && sha256sum -- * > SHA256SUMS
	$(if $(SIGNING_KEY),openssl dgst -sha256 -sign $(SIGNING_KEY) -out $(1)/SHA256SUMS.sig $(1)/SHA256SUMS,@echo "$(1)/SHA256SUMS is not signed: SIGNING_KEY is empty")
endef

# Arg: cpu or cuda. Reads a lock. A lock does not tell which packages serve-app itself asked for, of which the tool warns.
list-packages = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) PYTHONWARNINGS=ignore::UserWarning .venv-sbom/bin/cyclonedx-py requirements \
	  --pyproject pyproject.toml --short-PURLs --output-reproducible -o $(DIST)/serve_app-$(VERSION)-$(1).cdx.json -

# Args: cpu or cuda, image.
define save-image
	skopeo copy --quiet '$(IMAGE_STORE)$(2)' oci-archive:$(DIST_IMAGES)/serve-app-$(VERSION)-image-$(1).oci.tar:$(2)
	$(BIN)/python -m tools.image_sbom $(DIST_IMAGES)/serve-app-$(VERSION)-image-$(1){.oci.tar,.cdx.json}
endef

manifests: ## render the chart into k8s/manifests; needs helm
	@mkdir -p build
	k8s/manifests/render > build/serve-app.yaml
	mv build/serve-app.yaml k8s/manifests/serve-app.yaml

clean: ## remove .venv and caches; fetched models stay
	rm -rf .venv .venv-charts .venv-cuda .venv-docs .venv-sbom .venv-clients .venv-litellm build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find serve_app loadtest tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: .venv
.venv: .venv/.installed

# Args: virtual environment, arguments of pip install. pip warns once for each package that one of its sources lacks, and of retries: these
# lines go to a file, and to the terminal only if pip fails.
quiet-pip = { $(1)/bin/pip install $(2) 2>$(1)/pip.log || { status=$$?; cat $(1)/pip.log >&2; exit $$status; }; }

# Reads pip's output and prints a line for every 25 packages, for 30 s without one, and when pip unpacks: pip itself prints hundreds of
# lines, or none. In bash, since Debian's awk (mawk) reads a pipe in blocks, and would report a minute's work when the work is over.
tell-progress = { n=0; SECONDS=0; while :; do if IFS= read -r -t 30 line; then case $$line in \
  Collecting*|Processing*|"Requirement already satisfied"*) n=$$((n + 1)); [ $$((n % 25)) != 0 ] || echo "  $$n packages fetched or there, $$SECONDS s";; \
  "Installing collected"*) echo "  unpacking 4 GB, 1 to 4 minutes";; esac; \
  elif [ $$? -gt 128 ]; then echo "  still at work after $$SECONDS s; pip's warnings, if any, are in .venv/pip.log"; else break; fi; done; }

# Not the directory: its time changes with every file made in it.
.venv/.installed: requirements/cpu.lock requirements/dev.lock pyproject.toml
	@python=$$(command -v python3.11 || command -v python3.12 || command -v python3 || true); \
	[ -n "$$python" ] || { echo "error: no python3 found; install Python 3.11 or 3.12 (Debian: apt install python3 python3-venv)" >&2; exit 1; }; \
	version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	case $$version in 3.11|3.12) ;; *) \
	  echo "error: $$python is Python $$version; serve-app needs 3.11 or 3.12, for example as python3.11 in PATH" >&2; exit 1;; esac; \
	"$$python" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $$python cannot make a virtual environment; on Debian and Ubuntu: apt install python$$version-venv" >&2; exit 1; }; \
	if [ "$$($(BIN)/python -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)" = "$$version" ]; then \
	  echo "Python $$version ($$python): bringing .venv up to date"; \
	else echo "Python $$version ($$python): making .venv, about 3 minutes and 4 GB"; rm -rf .venv; "$$python" -m venv .venv; fi
	@echo "1 of 3: $(TORCH), 200 MB"
	@if $(BIN)/pip install -q --no-deps $(TORCH) 2>/dev/null; then echo "$(TORCH) came from where pip is configured to look"; \
	else echo "pip's own sources lack $(TORCH): taking it from $(PYTORCH_CPU_INDEX)"; \
	  $(call quiet-pip,.venv,-q --no-deps --index-url $(PYTORCH_CPU_INDEX) $(TORCH)); fi
	@echo "2 of 3: $$(grep -ohE '^[^ #]+==' requirements/cpu.lock requirements/dev.lock | sort -u | wc -l) packages of requirements/cpu.lock and dev.lock, every file checked against its hash"
	@$(call quiet-pip,.venv,--progress-bar off --no-deps --require-hashes -r requirements/cpu.lock -r requirements/dev.lock) | $(tell-progress)
	@echo "3 of 3: serve-app itself"
	@$(call quiet-pip,.venv,-q --no-deps --no-build-isolation -e .)
	@$(BIN)/python -m serve_app.host.libraries
	@touch $@
	@echo ".venv is ready: $$($(BIN)/python --version), $$($(BIN)/python -c 'import torch; print("torch", torch.__version__)')"

# The CUDA image's packages beside .venv, of the same Python. pip may know a CPU build of torch by the same version: the hashes refuse it.
.venv-cuda/.installed: requirements/cuda.lock requirements/complete-cuda requirements/dev.lock pyproject.toml | .venv/.installed
	@[ -x .venv-cuda/bin/python ] || { echo "making .venv-cuda, 10 GB"; $(BIN)/python -m venv .venv-cuda; }
	@$(call quiet-pip,.venv-cuda,-q --no-deps --require-hashes -r requirements/cuda.lock -r requirements/dev.lock)
	@requirements/complete-cuda .venv-cuda/lib/python3.*/site-packages
	@$(call quiet-pip,.venv-cuda,-q --no-deps --no-build-isolation -e .)
	@touch $@
	@echo ".venv-cuda is ready: $$(.venv-cuda/bin/python --version), torch $$(.venv-cuda/bin/python -c 'import torch; print(torch.__version__)')"

# Of its own: checkov pins versions that serve-app's dependencies do not have.
.venv-charts/.installed: requirements/charts.lock
	@python=$$(command -v python3.11 || command -v python3.12 || command -v python3); \
	rm -rf .venv-charts; "$$python" -m venv .venv-charts
	@$(call quiet-pip,.venv-charts,-q --no-deps --require-hashes -r requirements/charts.lock)
	@touch $@

# Of its own: MkDocs and its theme are of no use to anything else.
.venv-docs/.installed: requirements/docs.lock
	@python=$$(command -v python3.11 || command -v python3.12 || command -v python3); \
	rm -rf .venv-docs; "$$python" -m venv .venv-docs
	@$(call quiet-pip,.venv-docs,-q --no-deps --require-hashes -r requirements/docs.lock)
	@touch $@

# Of its own, as in the Dockerfile: the list of packages is not of the tool that makes it.
.venv-sbom/.installed: requirements/sbom.lock | .venv/.installed
	@rm -rf .venv-sbom; $(BIN)/python -m venv .venv-sbom
	@$(call quiet-pip,.venv-sbom,-q --no-deps --require-hashes -r requirements/sbom.lock)
	@touch $@
