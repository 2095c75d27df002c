# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Convert between Megatron checkpoints and Hugging Face folders, and between checkpoints of GPTs and HybridModels.

    megatron-async convert to-hf --load runs/mine/checkpoints --save runs/mine/hf --tokenizer FOLDER
    megatron-async convert from-hf --load HF_FOLDER --save runs/start
    megatron-async convert to-hybrid --load runs/mine/checkpoints --save runs/hybrid
    megatron-async convert to-gpt --load runs/hybrid --save runs/gpt

to-hybrid writes a checkpoint of a GPT, ours or Megatron's, as that of the HybridModel with --hybrid-layer-pattern that
has the same layers, to-gpt the other way, both with the optimizer's state. A run with the arguments of a GPT saves
those of a GPT, whatever --model-class says.

to-hf reads a checkpoint of any parallel layout, chosen as a run chooses it; from-hf writes one that any layout loads.
Architectures: LlamaForCausalLM (SmolLM2), Qwen3MoeForCausalLM (the 2B MoE), Qwen3NextForCausalLM (the 10B hybrid),
NemotronHForCausalLM without experts (--hybrid-layer-pattern of M, * and -), DeepseekV3ForCausalLM
(--multi-latent-attention).
"""

import argparse
import shlex
import sys
from pathlib import Path

from megatron_async import platform
from megatron_async.cli import make_parser, refuse

DTYPES = ("float32", "bfloat16")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("convert", __doc__)
    directions = parser.add_subparsers(dest="direction", required=True)
    for name, (convert, help) in _WAYS.items():
        own = directions.add_parser(name, help=help)
        own.set_defaults(convert=convert)
        loaded = "folder that --save of a run wrote to, or one checkpoint in it"
        own.add_argument("--load", type=Path, required=True, help="folder to read" if name == "from-hf" else loaded)
        own.add_argument("--save", type=Path, required=True, help="folder to write")
        if name != "from-hf":
            own.add_argument(
                "--ckpt-step", type=int, help="iteration to read (default: the newest complete checkpoint)"
            )
        if "hf" in name:
            default = "float32" if name == "from-hf" else "the run's"
            own.add_argument("--dtype", choices=DTYPES, help=f"type of the written weights (default: {default})")
    export = directions.choices["to-hf"]
    export.add_argument("--tokenizer", type=Path, help="folder whose tokenizer files are copied")
    export.add_argument("--vocab-size", type=int, help="true vocabulary size, without padding")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 if something stands in the way; every reason is printed."""
    options = _parse(argv)
    platform.activate_or_exit("cpu")
    try:
        print(options.convert(options))
    except (ValueError, OSError) as error:
        return refuse("convert", "nothing was converted", str(error).splitlines())
    return 0


def _export(options: argparse.Namespace) -> str:
    import torch

    from megatron_async.checkpoint import folder
    from megatron_async.models.huggingface import convert

    model = convert.export(
        folder.locate(options.load, options.ckpt_step),
        options.save,
        vocabulary=options.vocab_size,
        tokenizer=options.tokenizer,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
    )
    return f"{options.save}: {model.name}, {model['num_hidden_layers']} layers, vocabulary {model['vocab_size']}"


def _import(options: argparse.Namespace) -> str:
    from megatron_async.config import arguments
    from megatron_async.models import one_process
    from megatron_async.models.huggingface import convert
    from megatron_async.models.huggingface.architecture import from_config, to_arguments
    from megatron_async.models.huggingface.folder import read_config
    from megatron_async.planning import resolve

    config = read_config(options.load)
    architecture = from_config(config)
    words = to_arguments(architecture)
    run = "--device cpu --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --train-iters 1".split()
    args = arguments.parse([*run, *words, *(["--bf16"] if options.dtype == "bfloat16" else [])])
    resolve.pad_vocabulary(args)
    args.tokenizer_end = end if isinstance(end := config.get("eos_token_id"), int) else None
    with one_process.model(args, initialize=False) as model:
        rounded = convert.from_hugging_face(model, architecture, options.load)
        one_process.save(model, args, options.save)
    if rounded:
        more = f" and {len(rounded) - 8} more" if len(rounded) > 8 else ""
        print(f"rounded to {options.dtype}: {', '.join(rounded[:8])}{more}", file=sys.stderr)
    return (
        f"{options.save}: {architecture.name}. Start a run from it with\n"
        f"--load {shlex.quote(str(options.save))} --finetune {shlex.join(words)}"
    )


def _rename(options: argparse.Namespace) -> str:
    from megatron_async.checkpoint import conversion, folder

    source = folder.locate(options.load, options.ckpt_step)
    args = conversion.convert(source, options.save, to_gpt=options.direction == "to-gpt")
    pattern = "" if args.hybrid_layer_pattern is None else f", --hybrid-layer-pattern '{args.hybrid_layer_pattern}'"
    return f"{options.save}: {source.name} with {args.num_layers} layers{pattern}"


_WAYS = {
    "to-hf": (_export, "Megatron to Hugging Face"),
    "from-hf": (_import, "Hugging Face to Megatron"),
    "to-hybrid": (_rename, "GPT to HybridModel"),
    "to-gpt": (_rename, "HybridModel to GPT"),
}
