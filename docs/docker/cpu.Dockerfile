# An mtpjax image for CPUs. Run in the clone:
#
#   docker build -f docs/docker/cpu.Dockerfile -t mtpjax:cpu .
#   docker run --rm -v "$PWD/runs:/data/runs" mtpjax:cpu quickstart --quick
#
# Tested on 2026-11-27 without Docker: the files of COPY were put into an empty folder, the first RUN command ran in a new
# virtual environment with Python 3.11 (0.9 GB), and then `mtpjax --version` and `mtpjax serve --host 0.0.0.0` with a
# request ran in a folder outside the clone.
# Not tested: docker build, docker run, the base image, the user, and the folder /data.
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mtpjax mtpjax
COPY pallas_kernels pallas_kernels
COPY conversion conversion
RUN pip install --no-cache-dir ".[serve,train,gguf]"

# Runs, models and the cache of compiled programs belong to a user without root privileges.
RUN useradd --create-home --home-dir /data mtpjax
USER mtpjax
WORKDIR /data

EXPOSE 30000
ENTRYPOINT ["mtpjax"]
CMD ["--help"]
