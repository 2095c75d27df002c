#!/usr/bin/env bash
# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
#
# The 10B hybrid mixture of experts on 200B tokens, 8 nodes of 8 GPUs (64, the paper, 5).
#
#   MODE=async TOKENIZER=... DATA=... SAVE=... examples/moe-10b-hybrid/pretrain.sh
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
LAUNCH=${LAUNCH:-torchrun --nnodes ${NNODES:-8} --node-rank ${NODE_RANK:-0} --nproc-per-node $GPUS \
    --rdzv-backend c10d --rdzv-endpoint ${MASTER_ADDR:-localhost}:${MASTER_PORT:-29400} -m megatron_async.pretrain}

case $MODE in
    sync) schedule=(--pipeline-schedule 1f1b) ;;
    async) schedule=(--pipeline-schedule 2bw --staleness-correction error-feedback --correction-strength 1.0) ;;
    *) echo "MODE=$MODE: must be sync or async" >&2; exit 2 ;;
esac

# 24 layers, every 4th with full attention, the rest Gated DeltaNet, 512 experts, 10 for each token, gated shared
# expert, context 8192: the paper, E. What it leaves open is in docs/models.md. Precision: not stated.
model=(
    --model moe-10b-hybrid
    --bf16
)

# 4 stages; the head costs as much as 9 layers, so it has the last one to itself. Experts over all 16 ranks of a stage:
# none is replicated, as appendix F of the paper says of its run; its degrees are not stated.
layout=(
    --pipeline-model-parallel-size 4
    --pipeline-model-parallel-layout "Et*8|t*8|t*8|L"
    --expert-model-parallel-size 16
    --micro-batch-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

# 4M tokens, 200B tokens: the paper, 5. 512 x 8192 = 4,194,304 tokens; 200e9 / 4,194,304 = 47,684 steps.
batch=(
    --global-batch-size 512
    --train-iters 47684
)

# Muon, the paper, 5; momentum and update RMS as for the dense models (2.1). Weight decay and clipping of the runs
# with experts are not stated: those of the dense ones (E). Peak learning rate 0.00225: the
# paper, 5.
optimizer=(
    --optimizer muon
    --muon-momentum 0.95
    --muon-extra-scale-factor 0.2
    --weight-decay 0.1
    --clip-grad 1.0
    --lr 2.25e-3
)

# Not stated for these runs: as for the dense ones (E).
learning_rate=(
    --lr-decay-style cosine
    --min-lr 0.000225
    --lr-warmup-iters 4768
    --lr-decay-iters 47684
)

# FineWeb-Edu, tokenizer with 128k entries: the paper, E. Split and seed: not stated.
data=(
    --data-path "$DATA"
    --split 998,2,0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER"
    --seed 1234
)

output=(
    --eval-interval 500
    --eval-iters 10
    --log-interval 10
    --save "$SAVE"
    --save-interval 1000
    --metrics-file "$SAVE/metrics.jsonl"
)

# shellcheck disable=SC2086 # LAUNCH is several words
exec $LAUNCH "${model[@]}" "${layout[@]}" "${batch[@]}" "${optimizer[@]}" "${learning_rate[@]}" "${data[@]}" "${output[@]}" "${schedule[@]}" "$@"
