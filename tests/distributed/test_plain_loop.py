# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop, with no Megatron in it, confirms one small configuration from outside.

A Llama-style decoder written here, one-step-old gradients from a queue, AdamW, clipping, warm-up and cosine decay: the
losses of a real 2BW run over two stages have to come out.
"""

import math
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F

from megatron_async import report
from megatron_async.data.preprocessing.indexed import IndexedWriter

HIDDEN, HEADS, LAYERS, SEQUENCE, VOCABULARY = 32, 4, 4, 16, 61
BATCHES, BATCH_SIZE, WARMUP, PEAK, FLOOR, DECAY, CLIP = 6, 8, 2, 0.02, 0.002, 0.1, 1.0

ARGUMENTS = (
    "--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw"
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [batch, sequence, heads, channels], base 10,000, halves rotated against each other."""
    channels = x.shape[-1]
    frequency = 10_000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), frequency).repeat(1, 2)[None, :, None]
    left, right = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-right, left), dim=-1) * angle.sin()


def decoder(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [batch, sequence, vocabulary] of tokens [batch, sequence]."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(LAYERS):
        w = {name.split(f"layers.{layer}.")[1]: value for name, value in weights.items() if f"layers.{layer}." in name}
        y = rms_norm(x, w["input_layernorm.weight"]) @ w["self_attention.linear_qkv.weight"].T
        # Megatron's fused projection holds query, key and value of one head after another.
        q, k, v = y.view(*tokens.shape, HEADS, -1).chunk(3, dim=-1)
        q, k, v = (part.transpose(1, 2) for part in (rotate(q), rotate(k), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + attended @ w["self_attention.linear_proj.weight"].T
        gate, up = (rms_norm(x, w["pre_mlp_layernorm.weight"]) @ w["mlp.linear_fc1.weight"].T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ w["mlp.linear_fc2.weight"].T
    x = rms_norm(x, weights["decoder.final_layernorm.weight"])
    return x @ weights["output_layer.weight"][:VOCABULARY].T


def learning_rate(step: int) -> float:
    """Megatron's: linear warm-up from 0 at the first step, then half a cosine."""
    if step <= WARMUP:
        return PEAK * step / WARMUP
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (BATCHES - WARMUP)))


def train(
    weights: dict[str, torch.Tensor], batches: list[tuple[torch.Tensor, torch.Tensor]], padding: int = -100
) -> list[float]:
    """Losses of AdamW with gradients that wait one step in a queue; labels that equal `padding` have no loss."""
    params = {name: value.clone().requires_grad_() for name, value in weights.items()}
    groups = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
    queue: deque[list[torch.Tensor]] = deque()
    losses = []
    for step, (tokens, labels) in enumerate(batches):
        loss = F.cross_entropy(decoder(params, tokens).flatten(0, 1), labels.flatten(), ignore_index=padding)
        queue.append(list(torch.autograd.grad(loss, list(params.values()))))
        losses.append(loss.item())
        if step > 0:  # what was computed a step ago is applied now, with the learning rate of its own step
            for param, gradient in zip(params.values(), queue.popleft(), strict=True):
                param.grad = gradient
            torch.nn.utils.clip_grad_norm_(params.values(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1)
            optimizer.step()
    return losses


def confirm(pool, more: list[str], padding: int = -100, file: str = "") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compare 2BW over two stages, with a metrics file if named, with the plain loop; return the batches."""
    words = ARGUMENTS.split()
    metrics = ["--metrics-file", file] if file else []
    pipeline = pool.run("tests.distributed.jobs:train", [*words, *more, *metrics], ranks=2)
    weights, batches = pool.run("tests.distributed.jobs:initial_state", [*words[:-4], *more], BATCHES, ranks=1)[0]
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    data = [(torch.from_numpy(tokens), torch.from_numpy(labels)) for tokens, labels in batches]
    np.testing.assert_allclose(pipeline[-1].losses, train(tensors, data, padding), rtol=2e-5, atol=2e-6)
    return data


def test_plain_loop_confirms_2bw(pool):
    confirm(pool, [])


def test_plain_loop_confirms_padded_documents(pool, tmp_path):
    """Documents of 2 to 40 tokens, none of them 0, which stands for padding."""
    generator = np.random.default_rng(5)
    documents = [generator.integers(1, VOCABULARY - 1, size).tolist() for size in generator.integers(2, 41, 64)]
    prefix = str(tmp_path / "documents")
    with IndexedWriter(prefix, VOCABULARY) as writer:
        for document in documents:
            writer.add(document)
        writer.commit()
    file = tmp_path / "metrics.jsonl"
    more = ["--train-data-path", prefix, "--one-document-per-sequence", "--calculate-per-token-loss"]
    batches = confirm(pool, more, padding=0, file=str(file))
    counted = [row["consumed_tokens"] for row in report.read_metrics(file).training]
    assert counted == np.cumsum([int((labels != 0).sum()) for _, labels in batches]).tolist()
    parts = {
        tuple(document[start : start + SEQUENCE + 1])
        for document in documents
        for start in range(0, len(document) - 1, SEQUENCE)
    }
    rows = [row for tokens, labels in batches for row in zip(tokens.tolist(), labels.tolist(), strict=True)]
    assert any(0 in labels for _, labels in rows) and any(0 not in labels for _, labels in rows)
    for tokens, labels in rows:
        length = len(labels) - labels.count(0)
        assert (*tokens[:1], *labels[:length]) in parts and not any(labels[length:])
