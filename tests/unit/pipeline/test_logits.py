# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which logits are watched, and which batch a maximum belongs to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import attention_mask_func

from megatron_async.mcore.model import watch_logits
from megatron_async.pipeline import logits
from megatron_async.pipeline.logits import LogitMaxima

MEGATRON = Path(megatron.core.__path__[0]).parent
CAUSAL = torch.ones(5, 5).triu(1).bool()


def local_attention() -> tuple[Any, FusedScaleMaskSoftmax]:
    """Megatron's local core attention, of which only the softmax is needed."""
    core = DotProductAttention.__new__(DotProductAttention)
    torch.nn.Module.__init__(core)
    core.scale_mask_softmax = FusedScaleMaskSoftmax(
        False, False, AttnMaskType.causal, False, attention_mask_func, True, None
    )
    return SimpleNamespace(core_attention=core, num_attention_heads_per_partition=3), core.scale_mask_softmax


class Reporting(torch.nn.Module):
    """An attention that collects logits by itself, as Transformer Engine's does."""

    def __init__(self) -> None:
        super().__init__()
        self.current_max_attn_logits: torch.Tensor | None = None

    def forward(self, maxima: torch.Tensor) -> torch.Tensor:
        known = self.current_max_attn_logits
        self.current_max_attn_logits = maxima if known is None else torch.maximum(known, maxima)
        return maxima


def test_logits_are_watched_between_mask_and_softmax() -> None:
    """Micro-batches of 2, 3 heads; the largest scores of all are masked, in the last head by a boundary too."""
    attention, softmax = local_attention()
    seen: list[torch.Tensor] = []
    watch_logits(attention, seen.append)
    scores = torch.randn(2, 3, 5, 5)
    scores[..., 0, 4] = 1e3
    mask = CAUSAL.expand(2, 3, 5, 5).clone()
    scores[1, 2, 4, 0], mask[1, 2, 4, 0] = 50.0, True
    expected = scores.masked_fill(mask, -torch.inf).amax(dim=(0, 2, 3))
    given = scores.clone().requires_grad_()
    probabilities = softmax(given * 1, mask)
    torch.testing.assert_close(probabilities, scores.masked_fill(mask, -1e4).softmax(dim=-1), rtol=0, atol=0)
    assert len(seen) == 1 and torch.equal(seen[0], expected) and not seen[0].requires_grad
    softmax.eval()
    softmax(scores.clone(), mask)
    assert len(seen) == 1, "evaluation does not count"


def test_an_attention_that_reports_is_listened_to() -> None:
    core, seen = Reporting(), list[torch.Tensor]()
    watch_logits(SimpleNamespace(core_attention=core), seen.append)
    core(torch.tensor([1.0, 2.0]))
    core(torch.tensor([3.0, 0.5]))
    core.eval()
    core(torch.tensor([9.0, 9.0]))
    assert [maxima.tolist() for maxima in seen] == [[1.0, 2.0], [3.0, 0.5]] and core.current_max_attn_logits is None


def test_others_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear does not report attention logits"):
        watch_logits(SimpleNamespace(core_attention=torch.nn.Linear(1, 1)), list.append)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/fusions/fused_softmax.py", "mask_output = self.mask_func(input, mask) if mask is not None else input"),
        ("core/extensions/transformer_engine.py", "self.current_max_attn_logits = batch_max_attention_logits"),
        ("training/arguments.py", "'--qk-clip is only supported with TE >= 2.9.0.'"),
    ],
)
def test_the_megatron_lines_are_still_there(file: str, line: str) -> None:
    assert line in (MEGATRON / file).read_text()


class Alone:
    def size(self) -> int:
        return 1


def test_a_maximum_belongs_to_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of batch 1 and a recomputed one of batch 0 between batch 0's forwards and its reduction."""
    cores = [Reporting(), Reporting()]
    attentions = [SimpleNamespace(core_attention=core, num_attention_heads_per_partition=2) for core in cores]
    monkeypatch.setattr(logits, "softmax_attentions", lambda chunks: attentions)
    monkeypatch.setattr(logits, "device", lambda: torch.device("cpu"))
    maxima = LogitMaxima([], Alone())  # type: ignore[arg-type]
    for batch, layer, values in [
        (0, 0, [1.0, 5.0]),
        (0, 1, [2.0, -1.0]),
        (1, 0, [9.0, 9.0]),
        (0, 0, [3.0, 4.0]),
        (1, 1, [-7.0, 7.0]),
    ]:
        maxima.use(batch)
        cores[layer](torch.tensor(values))
    assert maxima.reduce(0) is None
    maxima.use(1)
    cores[0](torch.tensor([0.0, 10.0]))
    assert maxima.take(0).tolist() == [[3.0, 5.0], [2.0, -1.0]]
    maxima.reduce(1)
    assert maxima.take(1).tolist() == [[9.0, 10.0], [-7.0, 7.0]]
    maxima.use(2)
    cores[0](torch.tensor([4.0, 4.0]))
    maxima.forget(2)
    maxima.reduce(2)
    assert maxima.take(2).tolist() == [[-torch.inf, -torch.inf]] * 2


def test_a_stage_without_softmax_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "softmax_attentions", lambda chunks: [])
    monkeypatch.setattr(logits, "device", lambda: torch.device("cpu"))
    maxima = LogitMaxima([], Alone())  # type: ignore[arg-type]
    assert maxima.reduce(0) is None and maxima.take(0).numel() == 0
