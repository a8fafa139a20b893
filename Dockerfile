# nbkit with JupyterLab and the lessons.
#   docker build -t nbkit .
#   docker run --rm --gpus all --shm-size=8g -p 127.0.0.1:8888:8888 nbkit     (without GPUs: leave out --gpus all)
# torch's own packages contain CUDA and NCCL. The host needs the driver and the NVIDIA Container Toolkit.
# A smaller image for the CPU: --build-arg TORCH_INDEX=ADDRESS, with the address of PyTorch's index of CPU builds.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS wheel
COPY . /source
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheel /source

FROM python:${PYTHON}-slim
ARG TORCH=torch
ARG TORCH_INDEX
RUN pip install --no-cache-dir "${TORCH}" ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"}
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[all]"
RUN useradd --create-home --home-dir /nbkit nbkit
USER nbkit
WORKDIR /nbkit
RUN python -c "from pathlib import Path; from nbkit.notebook.lessons import write_lessons; write_lessons(Path('lessons'))"
EXPOSE 8888
# Listens on all interfaces of the container, for the port that docker publishes. The token stays on.
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "lessons"]
