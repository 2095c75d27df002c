# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Saving and loading a run: Megatron writes and reads, this module makes sure that nothing is lost on the way.

A save is written into a staging folder, forced to the disk, read back, described by a manifest, and only then given
its name; older ones are deleted after that. A load takes the newest checkpoint whose every byte is as it was written.
An error on one rank is raised on all of them.
"""

import argparse
import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.checkpoint import folder, manifest
from megatron_async.checkpoint.agreement import Agreement, JointError
from megatron_async.checkpoint.background import Notes, Writing, Written
from megatron_async.checkpoint.manifest import Manifest
from megatron_async.checkpoint.settings import fitted
from megatron_async.checkpoint.state import (
    NoHistory,
    SavedChunk,
    complete_optimizer_state,
    expect_previous_update,
    has_previous_update,
    largest,
)
from megatron_async.files import sync_to_disk
from megatron_async.mcore.arguments import overridden
from megatron_async.mcore.checkpoint import (
    CheckpointPart,
    arguments_of,
    check_structure,
    load_checkpoint,
    plan_checkpoint,
)
from megatron_async.mcore.parallel import store
from megatron_async.mcore.training import wandb_run as megatron_wandb_run
from megatron_async.pipeline.steps import History
from megatron_async.schedules.arguments import delay_pattern

# What a manifest says of the state, beyond the arguments that the run was started with.
_FACTS = ("older_weight_versions", "has_previous_update", "consumed_train_samples", "consumed_valid_samples")

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run.

    Args:
        args: Megatron's arguments and ours.
        model, optimizer, scheduler: as Megatron's `setup_model_and_optimizer` returns them.
        versions: versions of the software, for the manifest.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: list[Any],
        optimizer: MegatronOptimizer,
        scheduler: Any,
        versions: dict[str, str],
    ) -> None:
        self._args, self._model, self._optimizer, self._scheduler = args, model, optimizer, scheduler
        self._versions = versions
        self._everywhere = Agreement(args.distributed_timeout_minutes).on_all_ranks
        self._asynchronous = bool(args.async_save)
        self._writing: Writing | None = None
        self._saves = itertools.count()
        self._loaded: list[SavedChunk] = []
        self.saved: int | None = None
        """Iteration of the newest checkpoint that this run has loaded or published."""
        self.scheduler_steps: Sequence[int] = ()
        """Position in the learning-rate schedule for each model chunk, as loaded; a skipped update does not count."""

    def load(self) -> None:
        """Load what `--load` names into model, optimizer and scheduler; set `args.iteration`. Collective.

        Older weight versions are kept until `restore`. Without a checkpoint the run starts at iteration 0.
        """
        args = self._args
        if args.load is None and args.pretrained_checkpoint is None:
            return
        found = self._find(Path(args.load)) if args.load else None
        saved = arguments_of(found.path) if found else {}
        older = int(saved.get("older_weight_versions", 0))
        corrected = saved.get("has_previous_update", False) and delay_pattern(
            argparse.Namespace(**saved)
        ) == delay_pattern(args)
        self._loaded = [SavedChunk(chunk, 0 if args.finetune else older) for chunk in self._model]
        complete_optimizer_state(self._optimizer)
        if corrected and args.staleness_correction != "none" and not args.no_load_optim and not args.finetune:
            expect_previous_update(self._optimizer)
        if found and self._scheduler.wd_incr_style == "constant":
            # Megatron insists on an equal length of the run for a weight decay that never changes.
            self._scheduler.wd_incr_steps = saved.get("train_iters", args.train_iters) * args.global_batch_size
        step = found.iteration if found else None
        with overridden(args, ckpt_step=step), self._everywhere("loading a checkpoint failed"):
            args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(
                self._loaded, self._optimizer, self._scheduler, self._fit
            )
        complete_optimizer_state(self._optimizer)
        self.saved = args.iteration if found else None
        self.scheduler_steps = saved.get("scheduler_steps", ())

    def _fit(self, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's state besides tensors, for this run's optimizers."""
        if "optimizer" in state:
            state["optimizer"] = fitted(state["optimizer"], self._optimizer)
        return state

    def restore(self, histories: Sequence[History]) -> None:
        """Hand the loaded older weight versions to a schedule, one history for each chunk."""
        for index, history in enumerate(histories):
            chunk = self._loaded[index] if self._loaded else SavedChunk(self._model[index], 0)
            chunk.restore(history)
        self._loaded = []

    def prepare(self) -> None:
        """Find out before training whether `--save` can be written to. Collective.

        Raises:
            JointError: it cannot.
        """
        if self._args.save:
            root = Path(self._args.save)
            self._on_first_rank(lambda: folder.clean_staging(root), f"--save {root} cannot be written to")

    def save(self, iteration: int, histories: Sequence[History]) -> None:
        """Save the state after `iteration` batches; the pipe must be empty. Collective.

        With `--async-save` this returns when the tensors are copied; the rest follows behind the next batches, and
        `finish` waits for it. The save before must be complete first.

        Raises:
            JointError: it could not be written, or the save before could not; older checkpoints are as they were.
        """
        self.finish()
        args, root = self._args, Path(self._args.save)
        what = _what_failed(root, iteration)
        self._on_first_rank(lambda: folder.clean_staging(root), what)
        complete_optimizer_state(self._optimizer)
        args.older_weight_versions = largest(max((history.depth for history in histories), default=0))
        args.has_previous_update = args.staleness_correction != "none" and bool(
            largest(has_previous_update(self._optimizer))
        )
        if args.has_previous_update:
            expect_previous_update(self._optimizer)
        histories = histories or [NoHistory()] * len(self._model)
        chunks = [
            SavedChunk(chunk, args.older_weight_versions, history)
            for chunk, history in zip(self._model, histories, strict=True)
        ]
        temporary = {"save": str(folder.staging(root)), "save_retain_interval": None, "async_save": False}
        with self._emptying_on_error(root), overridden(args, **temporary), self._everywhere(what):
            part = plan_checkpoint(
                iteration, chunks, self._optimizer, self._scheduler, args.num_floating_point_operations_so_far
            )
            if self._asynchronous:
                part.copy_tensors()
        self._writing = Writing(
            iteration=iteration,
            part=part,
            notes=Notes(
                f"save/{next(self._saves)}",
                rank=dist.get_rank(),
                ranks=dist.get_world_size(),
                store=store(),
            ),
            publish=self._publication(root, iteration, part),
            timeout_minutes=args.distributed_timeout_minutes,
        )
        if not self._asynchronous:
            self.finish()

    @property
    def pending(self) -> int | None:
        """Iteration of the checkpoint that is being written."""
        return self._writing.iteration if self._writing else None

    @property
    def failed(self) -> bool:
        """Whether this rank could not write its share of a checkpoint in the background; `finish` raises it."""
        return self._writing is not None and self._writing.failed

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is published. Collective.

        Raises:
            JointError: it could not be written; older checkpoints are as they were.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        root = Path(self._args.save)
        with self._emptying_on_error(root), self._everywhere(_what_failed(root, writing.iteration)):
            writing.wait()
        self.saved = writing.iteration

    @contextlib.contextmanager
    def _emptying_on_error(self, root: Path) -> Iterator[None]:
        """Give the disk its space back if a save fails."""
        try:
            yield
        except JointError:
            if dist.get_rank() == 0:
                with contextlib.suppress(OSError):
                    folder.clean_staging(root)
            raise

    def _publication(self, root: Path, iteration: int, part: CheckpointPart) -> Callable[[Sequence[Written]], None]:
        """What rank 0 does when every rank's part is there. Collective."""
        args, wandb_run = self._args, megatron_wandb_run()
        # As they are now: training goes on.
        arguments = args._resolved | {name: getattr(args, name) for name in _FACTS}
        keep = args.keep_last or (1 if args.save_retain_interval else None)
        milestone = args.save_retain_interval

        def publish(parts: Sequence[Written]) -> None:
            staged = part.folder
            part.write_index([written.results for written in parts])
            check_structure(staged)
            files = {name: entry for written in parts for name, entry in written.files.items()}
            rest = [name for name in manifest.file_names(staged) if name not in files]
            described = Manifest(
                iteration=iteration,
                files=files | manifest.measure(staged, rest, sync=True),
                arguments=arguments,
                versions=self._versions,
                wandb_run=wandb_run,
            )
            sync_to_disk(staged)
            manifest.write(staged, described)
            folder.publish(root, iteration)
            sys.stdout.write(f"> checkpoint of iteration {iteration} is complete: {root / folder.name_of(iteration)}\n")
            sys.stdout.flush()
            if keep:
                for old in folder.expired(root, keep_last=keep, milestone=milestone):
                    folder.delete(root, old)

        return publish

    def _find(self, root: Path) -> folder.Found | None:
        """The checkpoint to load, every file compared with its checksum; skipped ones are named. Collective."""
        known = self._from_first_rank(lambda: folder.checkpoints(root))
        with self._everywhere(""):
            found, warnings = folder.choose(known, root, self._args.ckpt_step, self._content_problems)
        if dist.get_rank() == 0:
            for warning in warnings:
                _log.warning("> %s", warning)
        return found

    def _content_problems(self, found: folder.Found) -> list[str]:
        """Problems with the files of a checkpoint; every rank reads its share of them. Collective."""
        names = sorted(found.manifest.files if found.manifest else ())
        gathered: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(gathered, found.content_problems(names[dist.get_rank() :: dist.get_world_size()]))
        return [problem for part in gathered for problem in part]

    def _from_first_rank(self, action: Callable[[], Any]) -> Any:
        """What `action` returns on rank 0, on every rank."""
        box: list[Any] = [None]
        with self._everywhere(""):
            if dist.get_rank() == 0:
                box[0] = action()
        dist.broadcast_object_list(box)
        return box[0]

    def _on_first_rank(self, action: Callable[[], None], what: str) -> None:
        with self._everywhere(what):
            if dist.get_rank() == 0:
                action()


def _what_failed(root: Path, iteration: int) -> str:
    return f"saving the checkpoint of iteration {iteration} in {root} failed"
