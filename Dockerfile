# Quire: one image, in which each service is a command.
#
#   docker build -t quire .
#   docker build -t quire:cuda --build-arg TORCH_BUILD=cuda .
#
# TORCH_BUILD   `cpu` (default), `cuda` (what a plain `pip install torch` gives), or a build by its name, such as cu130
# TORCH_INDEX_URL   one more package index, where yours does not carry that build

FROM python:3.11-slim-bookworm AS build
ARG TORCH_BUILD=cpu
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off
ENV PATH=/opt/quire/bin:$PATH
WORKDIR /source
RUN python -m venv /opt/quire
# torch first: it is nearly all of the image, and its layer stays while the code changes.
COPY constraints.txt deploy/install_torch.sh ./
RUN sh install_torch.sh
# Kernels of the CPU are compiled here, for each kind of CPU: the image itself carries no compiler.
RUN apt-get update -q && apt-get install -q -y --no-install-recommends g++
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY kvmanager kvmanager
COPY engine engine
COPY services services
RUN pip install -q -c constraints.txt '.[serve,tracing]'
RUN cd / && if [ "$(uname -m)" = x86_64 ]; then python -m engine.native.ready_made; fi

FROM python:3.11-slim-bookworm
COPY --from=build /opt/quire /opt/quire
RUN useradd --uid 10001 --user-group --home-dir /nonexistent --no-create-home quire \
    && install -d -o quire -g quire /var/cache/quire
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Models are kept here: make it a volume.
ENV QUIRE_CACHE=/var/cache/quire HF_HOME=/var/cache/quire/huggingface
USER 10001:10001
ENTRYPOINT ["quire"]
CMD ["--help"]
