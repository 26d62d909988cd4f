# An image of mtpjax for CPUs. In the clone:
#
#   docker build -f docs/docker/cpu.Dockerfile -t mtpjax:cpu .
#   docker run --rm -v "$PWD/runs:/data/runs" mtpjax:cpu quickstart --quick
#
# Tried on 2026-11-27, without Docker: the files of COPY in an empty folder, the command of RUN in a new virtual
# environment of Python 3.11 (0.9 GB), then `mtpjax --version` and `mtpjax serve --host 0.0.0.0` with a request, in a
# folder outside the clone.
# Not tried: docker build and docker run, so neither the base image, nor the user, nor the folder /data.
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mtpjax mtpjax
COPY pallas_kernels pallas_kernels
COPY conversion conversion
RUN pip install --no-cache-dir ".[serve,train,gguf]"

# Runs, models and the cache of compiled programs belong to a user without rights of root.
RUN useradd --create-home --home-dir /data mtpjax
USER mtpjax
WORKDIR /data

EXPOSE 30000
ENTRYPOINT ["mtpjax"]
CMD ["--help"]
