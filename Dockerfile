# One image for all roles: router, workers, Ray's head and the commands. The command of the container selects the role.
#
#   docker build -t baton:0.1.0 .                                                                  # for NVIDIA GPUs
#   docker build -t baton:0.1.0-cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu . # for CPUs only
#
# Every step is a script in tools/image. tests/guards/test_image.py runs them in this order below a scratch folder.
# BuildKit is required (RUN --mount).
# The digest selects the image; the tag is only for readers. To renew it: docker buildx imagetools inspect python:TAG
FROM python:3.11.16-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84 AS base
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# The dependencies without Baton itself: gigabytes that change only with constraints.txt.
FROM base AS dependencies
ARG TORCH_INDEX=""
COPY pyproject.toml constraints.txt ./
COPY tools/image/dependencies.sh tools/image/
RUN bash tools/image/dependencies.sh /opt/baton

# gcc is needed to build the wheel, and by triton at run time.
FROM base AS system
RUN --mount=type=bind,source=tools/image/system.sh,target=/src/tools/image/system.sh \
    bash tools/image/system.sh

FROM system AS wheel
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/image/wheel.sh tools/image/wheel_hook.py tools/image/
COPY baton baton
COPY router router
COPY prefill_workers prefill_workers
COPY decode_workers decode_workers
COPY kvtransfer kvtransfer
COPY configs configs
COPY models/demo models/demo
RUN bash tools/image/wheel.sh /dist

FROM system AS runtime
COPY --from=dependencies /opt/baton /opt/baton
COPY configs /opt/baton/configs
COPY models/demo /opt/baton/models/demo
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,source=tools/image/install.sh,target=/src/tools/image/install.sh \
    bash tools/image/install.sh /opt/baton /dist

# Nothing in the image is written at run time. The root may be read-only if /tmp is a volume: Ray's session, the state
# folder, compiled kernels and caches are there. NVIDIA_VISIBLE_DEVICES is not set: it would give all GPUs to pods that
# request none.
ENV PATH=/opt/baton/bin:$PATH \
    HOME=/tmp \
    BATON_HOME=/tmp/baton \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton" \
      org.opencontainers.image.description="A disaggregated LLM server: prefill and decode on separate workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

# A numeric user, so that Kubernetes can check that it is not root (runAsNonRoot).
USER 10001:10001
# `baton up -c configs/local.yaml` reads its file here, and the path of the model starts here.
WORKDIR /opt/baton
# gRPC, HTTP and metrics, as in configs/.
EXPOSE 50051 8000 9100
# Each role has another health check. Kubernetes uses its own probes and ignores this.
HEALTHCHECK NONE
# No ENTRYPOINT: KubeRay starts pods with `bash -c "ray start ..."`, the chart starts others with `baton router ...`.
# No tini: KubeRay would replace it by bash, and Baton's processes handle SIGTERM and wait for their children. Other
# commands can use `docker run --init`.
CMD ["baton", "--help"]
