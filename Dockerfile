# jshard on NVIDIA GPUs. JAX's packages bring CUDA 12; the host needs the driver (525 or
# newer) and the NVIDIA Container Toolkit:
#
#     docker build -t jshard .
#     docker run --rm --gpus=all --ipc=host -v "$PWD/runs:/work/runs" jshard --config=gpt.py
#
# --ipc=host is for NCCL, which shares memory between the processes of a host.
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist

FROM python:3.12-slim
COPY --from=build /dist/*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/*.whl)[cuda12,text]" && rm /tmp/*.whl
RUN useradd --create-home --uid 1000 jshard && install -d -o jshard /work
USER jshard
WORKDIR /work
ENTRYPOINT ["python", "-m", "jshard.train"]
CMD ["--help"]
