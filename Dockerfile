# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
#
# For GPU machines. The image has PyTorch 2.10, with Transformer Engine and Apex built for it. Images before 25.11 do not
# meet torch >= 2.9: 25.10 has a pre-release of it. Apex has no package on the index; outside such an image it must be built
# from source. Without it the run says at its start what is off.
#
# This file has not been built: the project's tests run on CPU, on the versions in constraints.txt. A test resolves its pip
# step over the versions of the base: torch 2.10.0a0, Transformer Engine 2.10, flash-attn 2.7.4, Triton 3.5.1, CUDA 13.1,
# Python 3.12 stay. The base has a list of its own, /etc/pip/constraint.txt, that pip follows too.
#
#   docker build -t megatron-async .
#   docker run --rm --gpus all --ipc=host --network host --ulimit memlock=-1 -v /data:/data megatron-async \
#       torchrun --nproc-per-node 8 -m megatron_async.pretrain ...
#   docker run --rm --gpus all --ipc=host --network host --ulimit memlock=-1 megatron-async \
#       python -m megatron_async.doctor
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v $PWD/runs:/opt/megatron-async/runs megatron-async \
#       python tools/check_gpu.py
#
# --ipc=host           NCCL and data loaders share memory between processes; Docker's default is 64 MB.
# --network host       the nodes of a run reach each other at the host's address and ports.
# --ulimit memlock=-1  NCCL pins host memory for transfers between nodes.
#
# Without a command the container prints the arguments of a run.

FROM nvcr.io/nvidia/pytorch:25.12-py3

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/megatron-async
COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff SECURITY.md Makefile constraints.txt ./
COPY megatron_async ./megatron_async
COPY benchmarks ./benchmarks
COPY docs ./docs
COPY examples ./examples
COPY tests ./tests
COPY tools ./tools

# Packages that the image built against its own PyTorch keep their versions. constraints.txt is not used: it pins
# another PyTorch.
RUN python -m pip list --format=freeze \
        | grep -iE '^(torch|torchvision|triton|pytorch-triton|transformer[-_]engine.*|apex|flash[-_]attn)==' \
        > /tmp/image.txt \
    && python -m pip install --no-cache-dir -c /tmp/image.txt \
        'megatron-core[training]==0.19.2' 'emerging-optimizers==0.3.0' \
    && python -m pip install --no-cache-dir --no-build-isolation -c /tmp/image.txt -e '.[gpu,dev]' \
    && rm /tmp/image.txt

CMD ["python", "-m", "megatron_async.pretrain", "--help"]
