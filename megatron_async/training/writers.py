# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""TensorBoard and wandb of the logging rank. Their faults are named and never stop training."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_async.checkpoint import folder
from megatron_async.checkpoint.manifest import arguments_as_json

_UPLOAD_SECONDS = "300"
"""Longest wait for uploads at the end of a run; what is left stays in wandb's folder."""


class Guarded:
    """A client whose first fault is named, and which is left alone after it: its methods then do nothing."""

    def __init__(self, name: str, client: Any) -> None:
        self._name, self._client, self._works = name, client, True

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name, None)
        return partial(self._try, value) if callable(value) else value

    def _try(self, call: Callable[..., Any], *values: Any) -> None:
        try:
            if self._works:
                call(*values)
        except Exception as error:
            self._works = False
            _say(f"{self._name}: {type(error).__name__}: {error}. Nothing more is logged there; training goes on")


def tensorboard(args: argparse.Namespace) -> Guarded | None:
    """TensorBoard's writer, or None. A resumed run hides what a run before it wrote about later iterations."""
    if not args.tensorboard_dir:
        return None
    purge = args.iteration + 1 if args.iteration and not args.skip_train else None
    try:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard_dir, purge_step=purge, max_queue=args.tensorboard_queue_size)  # type: ignore[no-untyped-call]
    except (ImportError, OSError) as error:
        _say(f"no TensorBoard: {type(error).__name__}: {error}")
        return None
    return Guarded("TensorBoard", writer)


def wandb(args: argparse.Namespace) -> Guarded | None:
    """The wandb run of a job on its logging rank; offline where its server cannot be reached, or None."""
    if not args.wandb_project or args.rank != args.world_size - 1:
        return None
    _continue(args)
    place = args.wandb_save_dir or (str(Path(args.save) / "wandb") if args.save else ".")
    options = {
        "project": args.wandb_project,
        "name": args.wandb_exp_name or None,
        "config": arguments_as_json(args),
        "dir": place,
        **({"entity": args.wandb_entity} if args.wandb_entity else {}),
    }
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", _UPLOAD_SECONDS)
    try:
        Path(place).mkdir(parents=True, exist_ok=True)
        import wandb as client

        try:
            client.init(**options)
        except Exception as error:
            _say(f"wandb: {error}. The run is recorded offline; upload it later with wandb sync")
            client.init(**options, mode="offline")
    except Exception as error:
        _say(f"no wandb: {type(error).__name__}: {error}")
        return None
    _say(f"wandb: files in {Path(place).resolve()}")
    return Guarded("wandb", client)


def _continue(args: argparse.Namespace) -> None:
    """Resume the wandb run of the checkpoint, unless the user names another one or this is another run."""
    if not args.load or args.finetune or args.skip_train:
        return
    found = folder.newest(Path(args.load))
    if found is not None and found.manifest is not None and found.manifest.wandb_run:
        os.environ.setdefault("WANDB_RUN_ID", found.manifest.wandb_run)
        os.environ.setdefault("WANDB_RESUME", "allow")


def _say(text: str) -> None:
    print(f"> {text}", flush=True)
