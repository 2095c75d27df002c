# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Continue a text with a model from a Megatron checkpoint of any parallel layout.

python tools/generate.py --load runs/mine/checkpoints --tokenizer TOKENIZER_FOLDER --prompt "def main("
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/ is not installed

from megatron_async import platform


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="folder that --save wrote to, or one checkpoint in it")
    parser.add_argument("--ckpt-step", type=int, help="iteration to read (default: the newest complete checkpoint)")
    parser.add_argument("--tokenizer", type=Path, required=True, help="Hugging Face tokenizer folder")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) always takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the K likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.temperature < 0 or options.top_k < 0 or options.max_new_tokens < 1:
        parser.error("--temperature and --top-k must be at least 0, --max-new-tokens at least 1")
    if not options.prompt:
        parser.error("--prompt: give at least one character")
    return options


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    options = _parse(argv)
    platform.activate_or_exit("cpu")
    import torch

    from megatron_async.checkpoint import folder
    from megatron_async.mcore.checkpoint import load_model_weights
    from megatron_async.models import one_process
    from megatron_async.models.huggingface.folder import read_tokenizer
    from tools.generation import generate

    try:
        tokenizer, end = read_tokenizer(options.tokenizer)
        checkpoint = folder.locate(options.load, options.ckpt_step)
        args = one_process.arguments_of(checkpoint)
        with one_process.model(args, initialize=False) as model:
            load_model_weights(model, checkpoint)
            tokens = generate(
                model,
                tokenizer.encode(options.prompt).ids,
                new_tokens=options.max_new_tokens,
                vocabulary=min(tokenizer.get_vocab_size(), args.padded_vocab_size),
                context=args.max_position_embeddings,
                temperature=options.temperature,
                top_k=options.top_k,
                end=end,
                generator=torch.Generator().manual_seed(options.seed),
            )
    except ValueError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    print(options.prompt + tokenizer.decode(tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
