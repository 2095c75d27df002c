# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
#
# For GPU machines. The image brings PyTorch 2.10 (25.11 is the first with a PyTorch that counts as >= 2.9; 25.10 has
# a pre-release of 2.9), Transformer Engine and Apex built for it. Apex is not on the package index under that name,
# so outside such an image it has to be built from source; everything works without it.
#
# This file has not been built: the project's tests run on CPU, on the versions in constraints.txt.
#
#   docker build -t megatron-async .
#   docker run --gpus all --ipc=host megatron-async torchrun --nproc-per-node 8 -m megatron_async.pretrain ...

FROM nvcr.io/nvidia/pytorch:25.12-py3

WORKDIR /opt/megatron-async
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_async ./megatron_async
COPY tools ./tools
COPY examples ./examples

# What the image built against its own PyTorch must stay: its exact versions become constraints. constraints.txt is
# not used here, since it pins another PyTorch.
RUN python -m pip list --format=freeze \
        | grep -iE '^(torch|torchvision|triton|pytorch-triton|transformer[-_]engine.*|apex|flash[-_]attn)==' \
        > /tmp/image.txt \
    && python -m pip install --no-cache-dir -c /tmp/image.txt \
        'megatron-core[training]==0.19.2' 'emerging-optimizers==0.3.0' \
    && python -m pip install --no-cache-dir -c /tmp/image.txt -e '.[gpu]' \
    && rm /tmp/image.txt

CMD ["python", "-m", "megatron_async.pretrain", "--help"]
