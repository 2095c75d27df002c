# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Saves and loads a run. Megatron writes and reads the tensors; this module makes checkpoints complete and verified.

A save is written into a staging folder, forced to the disk, read back, described by a manifest and renamed into place;
then older checkpoints are deleted. A load takes the newest checkpoint whose files all agree with their checksums.
An error on one rank is raised on all of them.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.checkpoint import folder, manifest, optimizer_state
from megatron_async.checkpoint.agreement import Agreement, JointError
from megatron_async.checkpoint.background import Entries, Writing
from megatron_async.checkpoint.lock import FolderLock
from megatron_async.checkpoint.manifest import Facts, Manifest
from megatron_async.checkpoint.state import SavedChunk, largest
from megatron_async.data.iterators import train_samples
from megatron_async.files import sync_to_disk
from megatron_async.mcore import checkpoint as distributed
from megatron_async.mcore.arguments import overridden
from megatron_async.mcore.parallel import store
from megatron_async.mcore.training import wandb_run
from megatron_async.pipeline.steps import History
from megatron_async.schedules.arguments import delay_pattern

# Facts about the state that a manifest holds besides the arguments that the run was started with.
_FACTS = (
    *("older_weight_versions", "has_previous_update", "consumed_train_samples", "consumed_valid_samples"),
    *("consumed_train_tokens", "skipped_train_samples", "data_order_samples", "valid_order_samples"),
)

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run. `versions` are those of the software, for the manifest.

    Without optimizer and scheduler it loads weights alone and cannot save.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: list[Any],
        optimizer: MegatronOptimizer | None,
        scheduler: Any,
        versions: dict[str, str],
    ) -> None:
        self._args, self._model, self._optimizer, self._scheduler = args, model, optimizer, scheduler
        args.consumed_train_tokens = 0
        self._versions = versions
        self._agreement = Agreement(args.distributed_timeout_minutes)
        self._lock: FolderLock | None = None
        self._writing: Writing | None = None
        self._saves = itertools.count()
        self._loaded: list[SavedChunk] = []
        self.saved: int | None = None
        """Iteration of the newest checkpoint that this run has loaded or published."""
        self.scheduler_steps: Sequence[int] = ()
        """Position in the learning-rate schedule for each model chunk, as loaded; skipped updates do not count."""

    def load(self) -> None:
        """Load what `--load` names into model, optimizer and scheduler; set `args.iteration`. Collective.

        Older weight versions are kept until `restore`. Without a checkpoint the run starts at iteration 0.
        """
        args = self._args
        if args.load is None and args.pretrained_checkpoint is None:
            return
        found = self._find(Path(args.load)) if args.load else None
        saved = distributed.arguments_of(found.path) if found else argparse.Namespace()
        older = 0 if args.finetune else int(getattr(saved, "older_weight_versions", 0))
        self._loaded = [SavedChunk(chunk, older) for chunk in self._model]
        optimizer_state.complete(self._optimizer)
        if self._continues_correction(saved):
            optimizer_state.expect_previous_update(self._optimizer)
        step = found.iteration if found else None
        fit = partial(optimizer_state.fit, self._optimizer)
        with (
            overridden(args, ckpt_step=step),
            self._length_of(saved),
            self._agreement.on_all_ranks("loading a checkpoint failed"),
        ):
            args.iteration, args.num_floating_point_operations_so_far = distributed.load_checkpoint(
                self._loaded, self._optimizer, self._scheduler, fit
            )
        optimizer_state.complete(self._optimizer)
        self.saved = args.iteration if found else None
        if found and not args.finetune:
            self.scheduler_steps = getattr(saved, "scheduler_steps", ())
            positions = args.consumed_train_samples * args.seq_length  # of a checkpoint that did not count tokens
            args.consumed_train_tokens = getattr(saved, "consumed_train_tokens", positions)
            args.data_order_samples = (
                args.data_order_samples or getattr(saved, "data_order_samples", None) or train_samples(saved)
            )
            args.valid_order_samples = getattr(saved, "valid_order_samples", 0)

    @contextlib.contextmanager
    def _length_of(self, saved: argparse.Namespace) -> Iterator[None]:
        """Megatron wants an equal length of the run even for a constant weight decay; every run saves its own."""
        scheduler, args = self._scheduler, self._args
        if scheduler is None or scheduler.wd_incr_style != "constant":
            yield
            return
        iterations = getattr(saved, "train_iters", args.train_iters) or 0
        samples = getattr(saved, "train_samples", None) or iterations * args.global_batch_size
        with overridden(scheduler, wd_incr_steps=samples):
            yield

    def _continues_correction(self, saved: argparse.Namespace) -> bool:
        """Whether the saved previous update is one of this run's: both delay the same parameters."""
        args = self._args
        if args.staleness_correction == "none" or args.no_load_optim or args.finetune:
            return False
        return getattr(saved, "has_previous_update", False) and delay_pattern(saved) == delay_pattern(args)

    def restore(self, histories: Sequence[History]) -> None:
        """Copy the loaded older weight versions into a schedule, which has one history for each chunk."""
        chunks = self._loaded or [SavedChunk(chunk, 0) for chunk in self._model]
        for chunk, history in zip(chunks, histories, strict=False):
            chunk.restore(history)
        self._loaded = []

    def prepare(self) -> None:
        """Raise JointError before training if `--save` cannot be written to or is in use. Collective."""
        if self._args.save:
            root = Path(self._args.save)
            self._agreement.on_first_rank(f"--save {root} cannot be written to", lambda: self._take(root))

    def _take(self, root: Path) -> None:
        """Lock the folder, or see that it is still locked by this run, and empty its staging folder."""
        self._lock = self._lock or FolderLock(root)
        self._lock.check()
        folder.clean_staging(root)

    def close(self) -> None:
        """Give the folder free for other runs."""
        if self._lock is not None:
            self._lock.release()

    def save(self, iteration: int, histories: Sequence[History]) -> None:
        """Save the state after `iteration` batches; the pipeline must be empty. Collective.

        With `--async-save` this returns when the tensors are copied; the rest runs beside the next batches.

        Raises:
            JointError: this save or the one before failed. Older checkpoints stay as they were.
        """
        self.finish()
        args, root = self._args, Path(self._args.save)
        asynchronous = bool(args.async_save)
        self._agreement.on_first_rank(self._failure(iteration), lambda: self._take(root))
        optimizer_state.complete(self._optimizer)
        args.consumed_train_tokens = largest(args.consumed_train_tokens)  # the ranks with losses count them
        args.older_weight_versions = largest(max((history.depth for history in histories), default=0))
        args.has_previous_update = args.staleness_correction != "none" and bool(
            largest(optimizer_state.has_previous_update(self._optimizer))
        )
        if args.has_previous_update:
            optimizer_state.expect_previous_update(self._optimizer)
        chunks = [
            SavedChunk(chunk, args.older_weight_versions, history)
            for chunk, history in itertools.zip_longest(self._model, histories)
        ]
        temporary = {"save": str(root / folder.STAGING), "save_retain_interval": None, "async_save": False}
        with self._saving(iteration), overridden(args, **temporary):
            part = distributed.plan_checkpoint(
                iteration, chunks, self._optimizer, self._scheduler, args.num_floating_point_operations_so_far
            )
            if asynchronous:
                part.copy_tensors()
        arguments = args._resolved | {name: getattr(args, name) for name in _FACTS}
        described = Manifest(iteration, {}, arguments, self._versions, wandb_run())
        self._writing = Writing(
            part,
            partial(self._publish, root, part, described),
            iteration=iteration,
            name=f"save/{next(self._saves)}",
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            store=store(),
            timeout_minutes=args.distributed_timeout_minutes,
        )
        if not asynchronous:
            self.finish()

    @property
    def pending(self) -> int | None:
        """Iteration of the checkpoint that is being written."""
        return self._writing.iteration if self._writing else None

    @property
    def failed(self) -> bool:
        """Whether this rank could not write its part of a checkpoint in the background; `finish` raises the error."""
        return self._writing is not None and self._writing.error is not None

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is published; errors as `save`. Collective."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._saving(writing.iteration):
                writing.wait()
            self.saved = writing.iteration

    def _failure(self, iteration: int) -> str:
        return f"saving the checkpoint of iteration {iteration} in {self._args.save} failed"

    @contextlib.contextmanager
    def _saving(self, iteration: int) -> Iterator[None]:
        """Make errors joint, and free the disk space of a failed save."""
        root = Path(self._args.save)
        try:
            with self._agreement.on_all_ranks(self._failure(iteration)):
                yield
        except JointError:
            if dist.get_rank() == 0:
                with contextlib.suppress(OSError):
                    folder.clean_staging(root)
            raise

    def _publish(
        self, root: Path, part: distributed.CheckpointPart, described: Manifest, results: Entries, written: Facts
    ) -> None:
        """On rank 0, when every rank's part is on the disk: complete the checkpoint and delete older ones."""
        part.write_index(results)
        rest = [name for name in manifest.file_names(part.folder) if name not in written]
        files = written | manifest.measure(part.folder, rest, sync=True)
        sync_to_disk(part.folder)
        manifest.write(part.folder, dataclasses.replace(described, files=files))
        folder.publish(root, described.iteration)
        place = root / folder.name_of(described.iteration)
        sys.stdout.write(f"> checkpoint of iteration {described.iteration} is complete: {place}\n")
        sys.stdout.flush()
        milestone = self._args.save_retain_interval
        if keep := self._args.keep_last or (1 if milestone else None):
            for old in folder.expired(root, described.iteration, keep_last=keep, milestone=milestone):
                folder.delete(root, old)

    def _find(self, root: Path) -> folder.Found | None:
        """The checkpoint to load, every file compared with its checksum; skipped ones are named. Collective."""
        known = self._agreement.on_first_rank("", lambda: folder.checkpoints(root))
        warn = partial(_log.log, logging.DEBUG if dist.get_rank() else logging.WARNING, "> %s")
        with self._agreement.on_all_ranks(""):
            return folder.choose(root, self._args.ckpt_step, _content_problems, known=known, warn=warn)


def _content_problems(found: folder.Found) -> list[str]:
    """Problems with the files of a checkpoint; every rank reads its share of them. Collective."""
    names = sorted(found.manifest.files if found.manifest else ())
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, found.content_problems(names[dist.get_rank() :: dist.get_world_size()]))
    return [problem for part in gathered for problem in part]
