# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A model that Hugging Face's config.json and Megatron's arguments describe both, and the ways between the three."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_async.mcore.arguments import words
from megatron_async.models.huggingface.families import FAMILIES
from megatron_async.models.huggingface.families.family import Family
from megatron_async.models.huggingface.weights import Rule, whole

# What no family has, unless it is a pair; not written to config.json.
_ABSENT = {"mlp_bias": False, "use_sliding_window": False, "partial_rotary_factor": 1.0}


class ConversionProblems(ValueError):
    """Everything that prevents a conversion, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model that both sides know.

    Attributes:
        family: Hugging Face's architecture.
        settings: keys of config.json. `vocab_size` is without Megatron's padding.
    """

    family: Family
    settings: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]

    @property
    def name(self) -> str:
        """Hugging Face's class."""
        return self.family.name


def from_arguments(args: argparse.Namespace, vocabulary: int) -> Architecture:
    """The architecture of a Megatron model.

    Raises:
        ConversionProblems: the model has a part that none of the known architectures has.
    """
    family = next(family for family in reversed(FAMILIES.values()) if family.describes(args))
    fixed = {**family.fixed_arguments, **(family.fixed_with_experts if args.num_experts else {})}
    problems = [
        f"--{argument.replace('_', '-')} is {getattr(args, argument)}; {family.name} needs {value}, so this model has "
        "no such counterpart."
        for argument, value in fixed.items()
        if getattr(args, argument) != value
    ]
    if problems := [*problems, *family.problems_of_arguments(args)]:
        raise ConversionProblems(problems)
    settings = {
        key: pair.read(args) if pair.read else getattr(args, pair.argument) for key, pair in family.pairs.items()
    }
    family.normalize(settings)
    return Architecture(family, settings | {"vocab_size": vocabulary})


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes; missing keys have the defaults of transformers.

    Raises:
        ConversionProblems: another architecture, a feature of it that Megatron's model would not have, a missing key.
    """
    names = config.get("architectures") or ["none"]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ConversionProblems(
            [f"config.json: architecture {', '.join(names)}; only {', '.join(FAMILIES)} can be converted."]
        )
    family = FAMILIES[names[0]]
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    older = {"num_experts": config.get("num_local_experts"), "rope_type": rotary.get("type")}
    config = {**older, **config, **rotary}
    given = {key: value for key, value in config.items() if value is not None}
    problems = [
        f"config.json: no {key}, which {family.name} needs."
        for key in sorted(family.pairs.keys() - given.keys() - family.defaults.keys())
    ]
    problems += _other_values(given, family)
    if problems:
        raise ConversionProblems(problems)
    defaults = {key: value(config) if callable(value) else value for key, value in family.defaults.items()}
    settings = defaults | given
    family.normalize(settings)
    if problems := list(family.problems_of_config(settings)):
        raise ConversionProblems(problems)
    return Architecture(family, {key: settings[key] for key in family.pairs})


def _other_values(given: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Keys of a config.json that Megatron's model would not follow."""
    for key, value in {**_ABSENT, **family.fixed_keys}.items():
        found = given.get(key, family.defaults.get(key, value))
        if key not in family.pairs and found != value:
            yield f"config.json: {key} is {found}; only {value} can be converted."
    if "rope_type" not in family.pairs and given.get("rope_type", "default") != "default":
        yield f"config.json: position embedding of type {given['rope_type']}; only default can be converted."
    if given.get("rope_theta", 0) % 1:
        yield f"config.json: rope_theta is {given['rope_theta']}; Megatron's --rotary-base takes whole numbers."


def to_config(model: Architecture, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of an architecture.

    Args:
        model: the architecture.
        dtype: name of the weights' type, such as "bfloat16".
        end_of_text: id of the token that ends a document, if known.
    """
    config = {
        **{key: value for key, value in model.settings.items() if value is not None},
        **model.family.fixed_keys,
        "architectures": [model.name],
        "model_type": model.family.model_type,
        "dtype": dtype,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
    }
    if "rope_theta" in model.settings:
        # transformers 5 reads rope_parameters, earlier versions the keys themselves.
        rotary = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
        config["rope_parameters"] = {"rope_type": "default", **rotary}
    model.family.complete(config, model.settings)
    return config


def to_arguments(model: Architecture) -> list[str]:
    """Megatron's command-line arguments for an architecture."""
    family, settings = model.family, model.settings
    values = {
        pair.argument: pair.write(settings) if pair.write else settings[key] for key, pair in family.pairs.items()
    }
    values |= {"seq_length": settings["max_position_embeddings"], "group_query_attention": True}
    values |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, **family.fixed_arguments}
    if values.get("num_experts"):
        balancing = "aux_loss" if "router_aux_loss_coef" in settings else "none"
        values |= {"moe_router_load_balancing_type": balancing, "moe_router_dtype": "fp32", "moe_grouped_gemm": True}
        values |= {"moe_token_dispatcher_type": "alltoall", **family.fixed_with_experts}
    return words(values)


def rules(names: Iterable[str], model: Architecture) -> Iterator[tuple[str, Rule]]:
    """Each of Megatron's names with its rule.

    Raises:
        ValueError: a name without a rule.
    """
    for name in names:
        numbers = dict(re.findall(r"(layer|expert)s\.(\d+)", name))
        pattern = re.sub(r"(layer|expert)s\.\d+", r"\1s.{\1}", name)
        if pattern not in model.family.weights:
            raise ValueError(f"parameter {name}: has no counterpart in {model.name}")
        there = tuple(model.family.weights[pattern].format(**numbers).split())
        cut = model.family.cuts[name.split(".")[-2]] if len(there) > 1 else whole
        yield name, Rule(there, partial(cut, settings=model.settings))
