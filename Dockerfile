# offload_rt on a CPU. scripts/fresh_machine.sh runs its steps in a Debian root; no image has been built.
# With an NVIDIA GPU, install g++ in the second image, too, and "[server,cuda]" from https://download.pytorch.org/whl/cu130; run with
# `--gpus all --ulimit memlock=-1`. The first run compiles the CUDA kernels.
#
#   docker build -t offload_rt .
#   docker run --rm -p 8000:8000 -v ~/.cache/huggingface:/root/.cache/huggingface offload_rt \
#       serve Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key KEY
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist /src

FROM python:3.12-slim
COPY --from=build /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[server]" --extra-index-url https://download.pytorch.org/whl/cpu
ENTRYPOINT ["offload-rt"]
CMD ["doctor"]
