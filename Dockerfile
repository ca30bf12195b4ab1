# distrain with PyTorch, to train in a container:
#
#     docker build -t distrain .
#     docker run --rm --init --shm-size=1g -v "$PWD:/work" distrain run --num-workers 2 train.py
#
# For NVIDIA GPUs: build with --build-arg TORCH=cu128, and run with --gpus all. TORCH is what uv calls a torch backend.

ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS base

# git and ssh: how distrain finds the files of a project, and reaches other hosts
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git openssh-client \
    && rm -rf /var/lib/apt/lists/*

FROM base

ARG TORCH=cpu
COPY pyproject.toml README.md LICENSE /src/
COPY distrain /src/distrain
# hadolint ignore=DL3013
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend="${TORCH}" "/src[torch]"
WORKDIR /work
ENTRYPOINT ["distrain"]
