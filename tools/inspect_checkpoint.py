# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Show the contents of a checkpoint, check that it is complete, and say what it loads into.

    python tools/inspect_checkpoint.py DIR            every checkpoint of a folder, and the one a run starts from
    python tools/inspect_checkpoint.py DIR/iter_...   one checkpoint; --tensors lists its tensors

Reads every byte, except with --quick. Exit status 1 if the checkpoint, or the newest of the folder, is damaged.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_async.checkpoint import folder, manifest
from megatron_async.checkpoint.manifest import Manifest

_LAYOUT = {
    "pipeline_model_parallel_size": "pipeline",
    "tensor_model_parallel_size": "tensor",
    "data_parallel_size": "data",
    "expert_model_parallel_size": "expert",
    "micro_batch_size": "micro-batch",
}
_FIXED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "global_batch_size", "optimizer", "seed")


def main(argv: list[str]) -> int:
    """Exit status: 0 complete, 1 damaged or nothing there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder that --save wrote to, or one checkpoint in it")
    parser.add_argument("--quick", action="store_true", help="compare sizes only; do not read the files")
    parser.add_argument("--tensors", action="store_true", help="list name, shape and type of every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(argv)
    single = any((options.path / name).exists() for name in (manifest.NAME, ".metadata"))
    found = [folder.judge(options.path)] if single else folder.checkpoints(options.path)
    if not found:
        sys.stderr.write(f"{options.path}: no checkpoint there\n")
        return 1
    reports = [examine(entry, quick=options.quick, tensors=options.tensors) for entry in found]
    newest = next((report["path"] for report in reports if not report["problems"]), None)
    if options.json:
        sys.stdout.write(json.dumps({"checkpoints": reports, "newest_complete": newest}) + "\n")
    else:
        sys.stdout.write("\n\n".join(map(_text, reports)) + "\n")
        if not single:
            sys.stdout.write(f"\na run with --load {options.path} starts from: {newest}\n")
    return 1 if reports[0]["problems"] else 0


def examine(entry: folder.Found, *, quick: bool, tensors: bool) -> dict[str, Any]:
    """Facts about one checkpoint; `problems` is empty if it is complete."""
    problems = list(entry.problems) or ([] if quick else entry.content_problems())
    content = entry.manifest
    if content is None:
        return {"path": str(entry.path), "problems": problems, **_tensors(entry.path, tensors)}
    return {
        "path": str(entry.path),
        "problems": problems,
        "iteration": content.iteration,
        "bytes": sum(facts.bytes for facts in content.files.values()),
        "files": {name: asdict(facts) for name, facts in content.files.items()},
        "state": _state(content),
        "layout": {label: content.arguments.get(name) for name, label in _LAYOUT.items()},
        "fixed": {name: content.arguments.get(name) for name in _FIXED},
        "versions": dict(content.versions),
        "wandb_run": content.wandb_run,
        **_tensors(entry.path, tensors),
    }


def _state(content: Manifest) -> dict[str, Any]:
    saved, delay = content.arguments, content.arguments.get("gradient_delay")
    return {
        "schedule": f"gradient delay {delay}" if delay else saved.get("pipeline_schedule"),
        "older_weight_versions": saved.get("older_weight_versions", 0),
        "correction": saved.get("staleness_correction"),
        "previous_update": saved.get("has_previous_update", False),
        "consumed_train_samples": saved.get("consumed_train_samples"),
        "optimizer": "missing: loads with --no-load-optim or --finetune" if saved.get("no_save_optim") else "saved",
    }


def _tensors(path: Path, wanted: bool) -> dict[str, Any]:
    """Name, shape and type of each tensor, from the index alone."""
    if not wanted:
        return {}
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    return {
        "tensors": {
            name: [list(entry.size), str(entry.properties.dtype)]
            for name, entry in sorted(index.items())
            if isinstance(entry, TensorStorageMetadata)
        }
    }


def _text(report: dict[str, Any]) -> str:
    verified = (
        "complete" if "iteration" in report else f"written by Megatron, without {manifest.NAME}: cannot be verified"
    )
    lines = [f"{report['path']}: " + ("DAMAGED" if report["problems"] else verified)]
    lines += [f"  problem: {problem}" for problem in report["problems"]]
    if "iteration" in report:
        lines.append(f"  iteration {report['iteration']}, {len(report['files'])} files, {report['bytes']} bytes")
        for heading, key in (("state", "state"), ("layout", "layout"), ("fixed", "fixed"), ("versions", "versions")):
            lines.append(f"  {heading}: " + ", ".join(f"{name} {value}" for name, value in report[key].items()))
        lines.append(
            "  loads into any pipeline, tensor, data and expert parallel size, micro-batch size and schedule, with the "
            "same model, optimizer and data"
        )
    lines += [f"  {name} {shape} {dtype}" for name, (shape, dtype) in report.get("tensors", {}).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
