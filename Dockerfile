# Two stages: the first installs everything into one environment, the second contains only that environment.
# `--build-arg EXTRAS=pipeline` adds Spark and a Java runtime for `headwater sync`; `EXTRAS=cluster` adds what a node of a
# cluster needs.
FROM python:3.13-slim-bookworm AS build
ARG EXTRAS=""
WORKDIR /build
RUN python -m venv /opt/headwater
COPY requirements/ requirements/
RUN /opt/headwater/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt \
    && case "$EXTRAS" in "") lock=runtime;; cluster) lock=cluster;; *) lock=stack;; esac \
    && /opt/headwater/bin/pip install --no-cache-dir --require-hashes -r "requirements/$lock.txt"
COPY pyproject.toml hatch_build.py README.md ./
COPY src/ src/
RUN /opt/headwater/bin/pip install --no-cache-dir --no-build-isolation --no-deps .

FROM python:3.13-slim-bookworm
ARG EXTRAS=""
RUN if [ "$EXTRAS" = pipeline ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --system --uid 10437 --home-dir /var/lib/headwater --create-home headwater \
    && install -d -o headwater -g headwater /stack
COPY --from=build /opt/headwater /opt/headwater
COPY config/ /etc/headwater/config/
ENV PATH=/opt/headwater/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DS_SERVER__HOST=0.0.0.0 \
    DS_STORAGE__MODE=file-durable \
    DS_STORAGE__DATA_DIR=/var/lib/headwater/streams \
    DS_STACK__DATA_DIR=/stack
WORKDIR /etc/headwater
USER headwater
VOLUME /var/lib/headwater
EXPOSE 4437
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:4437/readyz', timeout=2)"]
CMD ["headwater", "serve"]
