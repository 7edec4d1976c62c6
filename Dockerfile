# Two images, built by `make images` (hack/images/build_images.py): `mmrouter`, with operator, router and sidecar behind one
# command, and `sim`, the simulated engines. Both run as user 65532 and write nothing to their root.
#
# The base is pinned by the digest of its index, which covers every architecture, because tags move.
# `--build-arg MMROUTER_BASE_IMAGE=...` selects another one with Python 3.11 or newer as python3, and venv.
ARG MMROUTER_BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${MMROUTER_BASE_IMAGE} AS tools
# The machine's pip configuration is a secret, so it is in no layer and no history.
ENV PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY pyproject.toml requirements.lock LICENSE README.md ./
COPY docker/requirements.py docker/packages.sh docker/strip.py docker/
RUN python3 -m venv /build/tools
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca \
    python3 docker/requirements.py build >build.txt && tools/bin/pip install --quiet --require-hashes -r build.txt
# More extras of pyproject.toml for the image `mmrouter`, separated by blanks: `mistral`.
ARG MMROUTER_EXTRAS=
# Dependencies form a layer of their own, which code changes leave unchanged.
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca \
    docker/packages.sh /opt/mmrouter cli operator router sidecar ${MMROUTER_EXTRAS}

# Both images begin with the same layer. The simulator's modules need no shared library that those of mmrouter do not.
FROM tools AS system
COPY docker/base_files.py docker/
RUN python3 docker/base_files.py /build/system /opt/mmrouter

FROM tools AS sim-tools
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca docker/packages.sh /opt/sim sim

FROM tools AS wheel
COPY docker/project.sh docker/
# The compiled form, if the build machine could build it: the images have no compiler.
COPY native/wheel native
COPY mmrouter mmrouter
COPY operator operator
COPY sidecar sidecar
COPY router router
COPY handover handover
COPY sim sim
COPY cli cli
COPY kube kube
COPY examples/demo.yaml examples/demo-sglang.yaml examples/
COPY examples/models examples/models
RUN tools/bin/pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir dist . && \
    docker/project.sh /opt/mmrouter

FROM sim-tools AS sim-wheel
COPY docker/project.sh docker/
COPY --from=wheel /build/dist dist
RUN docker/project.sh /opt/sim

FROM scratch AS runtime
COPY --from=system /build/system /
ENV PATH=/opt/mmrouter/bin:/opt/sim/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
LABEL org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /tmp

# The version stands last: what comes before it stays in the builder's cache.
FROM runtime AS sim
COPY --from=sim-tools /opt/sim /opt/sim
COPY --from=sim-wheel /build/own /
USER 65532:65532
CMD ["vllm", "--help"]
LABEL org.opencontainers.image.title="mmrouter-sim" \
      org.opencontainers.image.description="Simulated vLLM and SGLang engines for mmrouter: the real flags and the real wire, no GPU"
ARG VERSION=0
ARG REVISION=
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"

FROM runtime AS mmrouter
COPY --from=tools /opt/mmrouter /opt/mmrouter
COPY --from=wheel /build/own /
USER 65532:65532
ENTRYPOINT ["mmrouter"]
CMD ["--help"]
LABEL org.opencontainers.image.title="mmrouter" \
      org.opencontainers.image.description="Proved-exact KV-cache routing for vision-language models on Kubernetes"
ARG VERSION=0
ARG REVISION=
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
