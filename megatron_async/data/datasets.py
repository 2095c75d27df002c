# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The data sets of a GPT pretraining run, built with Megatron's own classes from Megatron's own arguments."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_async.data.blend import DataSources, data_sources, is_local
from megatron_async.data.documents import DocumentDataset
from megatron_async.data.index_cache import building, cache_folder

SampleCounts = Sequence[int | None]
# In a longer blend the default surplus exceeds any rounding.
_LARGEST_TRIAL = 1_000_000


def train_valid_test_datasets(
    args: argparse.Namespace, num_samples: SampleCounts, *, tokenizer: Any = None, vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build training, validation and test data sets. With a process group, every rank must call this.

    Args:
        args: validated arguments for which `missing_data_files(args)` is empty.
        num_samples: samples to draw for training, validation and test; None means one pass over the set.
        tokenizer: Megatron tokenizer; None builds the one that `args` name.
        vp_stage: virtual pipeline stage, None without virtual stages.

    Returns:
        Three data sets; a part without data is None, and all are None on ranks that need none (`is_built_on_rank`).
        With `--multiple-validation-sets` the second is a list. Samples are dictionaries of `tokens`, `labels`,
        `position_ids` (int64) and `loss_mask` (float32), shape (sequence length,), and, unless switched off, a bool
        `attention_mask` of shape (1, sequence length, sequence length), True where attention is barred.
    """
    sources = DataSources(None, None, ()) if args.mock_data else data_sources(args)
    if sources.problems:
        raise ValueError("\n".join(sources.problems))
    tokenizer = build_tokenizer(args) if tokenizer is None else tokenizer
    cache = _own_cache(args, sources)
    config = dataset_config(args, sources, tokenizer, num_samples, cache or args.data_cache_path)
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if config.mock else DocumentDataset if args.one_document_per_sequence else GPTDataset,
        list(num_samples),
        lambda: is_built_on_rank(args, vp_stage),
        config,
    )
    with building(cache):
        train, valid, test = builder.build()
    return train, valid, test


def is_built_on_rank(args: argparse.Namespace, vp_stage: int | None = None) -> bool:
    """Whether this rank reads data: the first tensor-parallel rank of the first and the last pipeline stage.

    With document masks, which every attention layer needs, of every stage.
    """
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    if args.dataloader_inter_document_masking or args.reset_attention_mask:
        return True
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return bool(parallel_state.is_pipeline_first_stage(**where) or parallel_state.is_pipeline_last_stage(**where))


# Fields of the data set configuration that are arguments of the same name.
_SAME_NAMES = (
    *("multiple_validation_sets", "full_validation", "num_dataset_builder_threads", "mmap_bin_files"),
    *("allow_ambiguous_pad_tokens", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    *("object_storage_cache_path", "data_parallel_size", "hybrid_context_parallel", "context_parallel_size"),
)


def dataset_config(
    args: argparse.Namespace, sources: DataSources, tokenizer: Any, num_samples: SampleCounts, cache: str | None
) -> GPTDatasetConfig:
    """Megatron's data set configuration for these arguments; sample orders are cached in the folder `cache`."""
    per_split, sequences = sources.per_split, args.per_dataset_sequences_path
    return GPTDatasetConfig(
        **{name: getattr(args, name) for name in _SAME_NAMES},
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=sources.blend,
        blend_per_split=per_split and list(per_split),
        split=args.split if per_split is None else None,
        path_to_cache=cache,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=_surplus(args.mid_level_dataset_surplus, sources, num_samples),
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
        sequences_per_dataset=None if sequences is None else json.loads(Path(sequences).read_text()),
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def sufficient_surplus(weights: Sequence[float], samples: int, given: float) -> float:
    """Smallest surplus, at least `given`, with which no set of a blend runs out.

    Megatron prepares ceil(ceil(samples x weight) x (1 + surplus)) samples of each set, then draws from the set that
    lags most. The total is the sum of the rounded-up shares, so with many small sets the large ones are asked for more
    than was prepared, and Megatron stops. Drawing the blend beforehand gives the counts that it will ask for.
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    targets = np.array([math.ceil(samples * share) for share in shares.tolist()])
    total = int(targets.sum())
    if total == 0 or total > _LARGEST_TRIAL:
        return given
    drawn_from = np.zeros(total, dtype=np.int16)
    helpers.build_blending_indices(
        drawn_from, np.zeros(total, dtype=np.int64), shares.tolist(), len(shares), total, False
    )
    drawn = np.bincount(drawn_from, minlength=len(shares))
    if np.all(drawn <= np.ceil(targets * (1 + given))):
        return given
    return max(given, float(np.max(drawn / targets)) - 1)


def _surplus(given: float, sources: DataSources, num_samples: SampleCounts) -> float:
    """One surplus for all parts, because Megatron's configuration has one."""
    blends = sources.per_split or (sources.blend,) * len(num_samples)
    return max(
        sufficient_surplus(blend.weights, samples, given) if blend and blend.weights and samples else given
        for blend, samples in zip(blends, num_samples, strict=True)
    )


def _own_cache(args: argparse.Namespace, sources: DataSources) -> str | None:
    """Our folder for sample orders; None where Megatron reads prepared caches or needs none."""
    prefixes = list(sources.prefixes())
    prepared = args.dataloader_fast_cache_load or args.dataloader_defer_npy_index_mmap
    if prepared or not prefixes or not all(is_local(prefix) for prefix in prefixes):
        return None
    return cache_folder(prefixes, args.data_cache_path)
