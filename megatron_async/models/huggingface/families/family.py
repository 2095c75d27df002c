# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What an architecture of Hugging Face brings to be converted: tables, and functions for what tables cannot say."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_async.models.huggingface.weights import Cut

Settings = Mapping[str, Any]
"""Keys of config.json that determine a model, without the fixed ones; None for a part that the model does not have."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One of Megatron's arguments, and how it corresponds to a key of config.json.

    Attributes:
        argument: destination of Megatron's argument.
        read: arguments -> value of the key; None takes the argument's value.
        write: settings -> value of the argument; None takes the key's value.
    """

    argument: str
    read: Callable[[Namespace], Any] | None = None
    write: Callable[[Settings], Any] | None = None


def same(**arguments: str) -> dict[str, Pair]:
    """Key of config.json = argument with the same value."""
    return {key: Pair(argument) for key, argument in arguments.items()}


def opposite(key: str, argument: str) -> dict[str, Pair]:
    """A key that is true where an argument is false."""
    return {key: Pair(argument, lambda args: not getattr(args, argument), lambda settings: not settings[key])}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture: its config.json beside Megatron's arguments, its weights beside Megatron's.

    Attributes:
        name: Hugging Face's class.
        model_type: of config.json.
        describes: whether arguments are those of such a model, or of one that no earlier family is closer to.
        pairs: key of config.json -> Megatron's argument.
        defaults: of transformers, for keys that config.json leaves out: a value, or a function of config.json. Keys of
            `pairs` without one are required.
        fixed_arguments: Megatron's arguments that the architecture leaves no choice about, by destination.
        fixed_with_experts: further ones of models with experts.
        fixed_keys: keys of config.json that Megatron leaves no choice about.
        weights: name of Megatron's weight -> Hugging Face's names, separated by spaces; "{layer}" and "{expert}" stand
            for numbers.
        cuts: module of Megatron's -> how its weight is cut, where it becomes several.
        problems_of_arguments: further parts of Megatron's model that the architecture does not have.
        problems_of_config: the same the other way, from the keys of config.json with their defaults.
        normalize: changes settings that can say the same in several ways.
        complete: changes the config.json that is written for settings.
    """

    name: str
    model_type: str
    describes: Callable[[Namespace], bool]
    pairs: Mapping[str, Pair]
    defaults: Mapping[str, Any]
    fixed_arguments: Mapping[str, Any]
    fixed_with_experts: Mapping[str, Any] = MappingProxyType({})
    fixed_keys: Mapping[str, Any]
    weights: Mapping[str, str]
    cuts: Mapping[str, Cut]
    problems_of_arguments: Callable[[Namespace], Iterator[str]] = lambda args: iter(())
    problems_of_config: Callable[[Settings], Iterator[str]] = lambda settings: iter(())
    normalize: Callable[[dict[str, Any]], None] = lambda settings: None
    complete: Callable[[dict[str, Any], Settings], None] = lambda config, settings: None
