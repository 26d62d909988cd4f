# An image of mtpjax for NVIDIA GPUs. In the clone:
#
#   docker build -f docs/docker/cuda.Dockerfile -t mtpjax:cuda .
#   docker run --rm --gpus all mtpjax:cuda generate --model org/name --prompt "Hello"
#
# The wheels of JAX bring the CUDA 13 libraries; the host has the driver and the NVIDIA Container Toolkit.
#
# Tried on 2026-11-27, without Docker and without a GPU: the files of COPY in an empty folder, and the command of RUN in
# a new virtual environment of Python 3.11 (4.9 GB), in which `import jax` then finds only the CPU.
# Not tried: docker build and docker run, so neither the base image, nor the user, nor a GPU inside a container.
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mtpjax mtpjax
COPY pallas_kernels pallas_kernels
COPY conversion conversion
RUN pip install --no-cache-dir ".[cuda13,serve,train,gguf]"

# Runs, models and the cache of compiled programs belong to a user without rights of root.
RUN useradd --create-home --home-dir /data mtpjax
USER mtpjax
WORKDIR /data

EXPOSE 30000
ENTRYPOINT ["mtpjax"]
CMD ["--help"]
