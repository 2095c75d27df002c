# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Activations of torch modules: planned beside the tensors that autograd saves in each kind of layer."""

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async import platform

platform.activate("cpu")

from megatron_async.config import arguments  # noqa: E402
from megatron_async.mcore import parallel  # noqa: E402
from megatron_async.mcore.model import build_model  # noqa: E402
from megatron_async.models import gpt  # noqa: E402
from megatron_async.planning.activations import ActivationModel  # noqa: E402
from megatron_async.planning.parameters import blocks  # noqa: E402

DENSE = (
    "--num-layers 2 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --seq-length 128 --max-position-embeddings 128 "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
)
MODELS = {
    "dense": DENSE,
    "attention dropout": DENSE.replace("--attention-dropout 0", "--attention-dropout 0.1"),
    "query groups": "--model tiny --num-layers 2",
    "latent attention": f"{DENSE} --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 24 --rope-type rope --qk-layernorm",
    "experts": "--model moe-2b-mini --num-layers 2",
    "Gated DeltaNet and gated attention": "--model moe-10b-hybrid-mini --num-layers 4",
    "every letter": "--model nemotron-h-mini --hybrid-layer-pattern M-*E",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_is_planned(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    line = f"--device cpu {MODELS[name]} --micro-batch-size 2 --vocab-size 500 --dry-run"
    args = arguments.parse(line.split())
    planned = ActivationModel.of(args, blocks(args))
    parallel.pretend_rank(args, 0)
    try:
        saved = saved_bytes(args)
    finally:
        parallel.shut_down()
    parts = len(saved) // args.num_layers  # a GPT's layer is two of a HybridModel
    for layer in range(args.num_layers):
        held = sum(saved[parts * layer : parts * (layer + 1)])
        assert planned.layer(layer) == pytest.approx(held, rel=0.05), f"layer {layer}"


def saved_bytes(args) -> list[int]:
    """Bytes of the storages that each layer's forward saves and no layer before it did, without weights."""
    model = build_model(gpt.model_config(args), ProcessGroupCollection.use_mpu_process_groups(), None)
    known = {own.untyped_storage().data_ptr() for own in (*model.parameters(), *model.buffers())}
    kept: list[torch.Tensor] = []  # so that no storage takes the place of another
    sizes = [0] * len(model.decoder.layers)
    current: list[int | None] = [None]

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept.append(tensor)
            if current[0] is not None:
                sizes[current[0]] += storage.nbytes()
        return tensor

    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: current.__setitem__(0, number))
        layer.register_forward_hook(lambda *_: current.__setitem__(0, None))
    shape = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, 500, shape)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(tokens, torch.arange(args.seq_length).expand(shape), None, labels=tokens)
    return sizes
