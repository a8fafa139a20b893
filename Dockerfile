# nbkit with JupyterLab and the lessons.
#   CPU:    docker build -t nbkit .
#           docker run --rm --shm-size=8g -p 127.0.0.1:8888:8888 nbkit
#   CUDA:   docker build -t nbkit:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#           docker run --rm --gpus all --shm-size=8g -p 127.0.0.1:8888:8888 nbkit:cuda
# torch's own CUDA packages bring CUDA and NCCL. The host brings the driver, and the NVIDIA Container Toolkit.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS wheel
COPY . /source
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheel /source

FROM python:${PYTHON}-slim
ARG TORCH=torch
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "${TORCH}" --index-url "${TORCH_INDEX}"
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[all]"
RUN useradd --create-home nbkit
USER nbkit
WORKDIR /home/nbkit
RUN python -c "from pathlib import Path; from nbkit.notebook.lessons import write_lessons; write_lessons(Path('lessons'))"
EXPOSE 8888
# Inside of the container it listens for the port that docker publishes. Its token stays on.
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "lessons"]
