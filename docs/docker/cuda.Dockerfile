# An mtpjax image for NVIDIA GPUs. Run in the clone:
#
#   docker build -f docs/docker/cuda.Dockerfile -t mtpjax:cuda .
#   docker run --rm --gpus all mtpjax:cuda generate --model org/name --prompt "Hello"
#
# JAX's wheels include the CUDA 13 libraries; the host must have the driver and the NVIDIA Container Toolkit.
#
# Tested on 2026-11-27 without Docker and without a GPU: the files of COPY were put into an empty folder, and the first RUN
# command ran in a new virtual environment with Python 3.11 (4.9 GB), in which `import jax` then finds only the CPU.
# Not tested: docker build, docker run, the base image, the user, and a GPU inside a container.
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mtpjax mtpjax
COPY pallas_kernels pallas_kernels
COPY conversion conversion
RUN pip install --no-cache-dir ".[cuda13,serve,train,gguf]"

# Runs, models and the cache of compiled programs belong to a user without root privileges.
RUN useradd --create-home --home-dir /data mtpjax
USER mtpjax
WORKDIR /data

EXPOSE 30000
ENTRYPOINT ["mtpjax"]
CMD ["--help"]
