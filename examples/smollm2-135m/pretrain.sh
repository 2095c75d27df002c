#!/usr/bin/env bash
# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
#
# SmolLM2-135M on 2.7B tokens of FineWeb-Edu, 8 GPUs.
#
#   MODE=async TOKENIZER=... DATA=... SAVE=... examples/smollm2-135m/pretrain.sh
#
# MODE       sync: Megatron-Core's 1F1B.  async (default): 2BW with error feedback. Everything else is the same, as in the
#            paper's comparison.
# TOKENIZER  Hugging Face tokenizer folder.  DATA: data prefix of tools/preprocess_data.py.  SAVE: folder for checkpoints.
# GPUS       processes on this node (default 8).  LAUNCH replaces the torchrun command, for instance under SLURM (see
#            examples/slurm) or to print the arguments: LAUNCH=echo.
# More arguments are passed on and win: --dry-run prints parameters, memory, schedule and time and starts nothing.
#
# "The paper" is arXiv 2606.30634; a number without a source is our choice.
set -euo pipefail

MODE=${MODE:-async}
TOKENIZER=${TOKENIZER:?a Hugging Face tokenizer folder}
DATA=${DATA:?a data prefix, without .bin}
SAVE=${SAVE:?a folder for checkpoints}
GPUS=${GPUS:-8}
LAUNCH=${LAUNCH:-torchrun --nnodes ${NNODES:-1} --node-rank ${NODE_RANK:-0} --nproc-per-node $GPUS \
    --rdzv-backend c10d --rdzv-endpoint ${MASTER_ADDR:-localhost}:${MASTER_PORT:-29400} -m megatron_async.pretrain}

case $MODE in
    sync) schedule=(--pipeline-schedule 1f1b) ;;
    async) schedule=(--pipeline-schedule 2bw --staleness-correction error-feedback --correction-strength 1.0) ;;
    *) echo "MODE=$MODE: must be sync or async" >&2; exit 2 ;;
esac

# Shape: HuggingFaceTB/SmolLM2 config.json. Context 1024: the paper, section 2. Precision: not stated.
model=(
    --model smollm2-135m
    --bf16
)

# The head costs as much as 8 layers, so the last of 2 stages has fewer. The other GPUs are data parallel.
layout=(
    --pipeline-model-parallel-size 2
    --decoder-first-pipeline-num-layers 19
    --micro-batch-size 8
)

# 256 sequences: the paper, E. About 700 of 1024 tokens are real there, 180K in a step;
# 20 tokens per parameter = 2.7B tokens (the paper, 2), so 15000 steps.
batch=(
    --global-batch-size 256
    --train-iters 15000
)

# Muon: momentum 0.95 and update RMS 0.2, the paper, 2.1 (the defaults here). Weight decay and clipping: E.
# Peak learning rate: 4e-3 is AdamW's (E); the others' lie in a narrow range around it.
optimizer=(
    --optimizer muon
    --muon-momentum 0.95
    --muon-extra-scale-factor 0.2
    --weight-decay 0.1
    --clip-grad 1.0
    --lr 4e-3
)

# Cosine to a tenth of the peak, warm-up a tenth of the run: the paper, E.
learning_rate=(
    --lr-decay-style cosine
    --min-lr 4e-04
    --lr-warmup-iters 1500
    --lr-decay-iters 15000
)

# Split and seed: not stated.
data=(
    --data-path "$DATA"
    --split 995,5,0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER"
    --seed 1234
)

output=(
    --eval-interval 500
    --eval-iters 20
    --log-interval 10
    --save "$SAVE"
    --save-interval 1000
    --metrics-file "$SAVE/metrics.jsonl"
)

# shellcheck disable=SC2086 # LAUNCH is several words
exec $LAUNCH "${model[@]}" "${layout[@]}" "${batch[@]}" "${optimizer[@]}" "${learning_rate[@]}" "${data[@]}" "${output[@]}" "${schedule[@]}" "$@"
