# The service: API, worker and migrations in one image; the command chooses (docker-compose.yml).
# Triton has an image of its own. Builds with BuildKit and with Docker's older builder.

FROM python:3.11.15-slim-bookworm AS environment
WORKDIR /build
RUN python -m venv /venv
COPY requirements.txt .
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check \
        --no-deps --require-hashes --only-binary :all: --requirement requirements.txt && \
    /venv/bin/python -m pip uninstall --yes --quiet pip setuptools

FROM python:3.11.15-slim-bookworm
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin llm
WORKDIR /srv
COPY --from=environment /venv /venv
COPY db db
COPY app app
COPY docs/errors.md docs/errors.md
# Goes along with launches.
COPY triton/health triton/health
# The root file system is mounted read-only: byte code is made here or never.
RUN python -m compileall -q app db
USER 10001:10001
EXPOSE 8887
ENTRYPOINT ["python", "-m", "app"]
CMD ["serve"]
