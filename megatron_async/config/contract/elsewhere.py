# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Refused options of models and programs that this package is not."""

from megatron_async.config.contract.row import Row, refused

_OTHER_MODELS = (
    refused(
        "mtp-hybrid-override-pattern is-hybrid-model",
        "an older way to say what --hybrid-layer-pattern says",
        "Use --hybrid-layer-pattern; beside it --is-hybrid-model is taken.",
    ),
    refused(
        "disable-mamba-mem-eff-path mamba-training-ssm-states-dtype",
        "the Mamba layer is this package's, and has one way to compute",
    ),
    refused(
        "decoder-num-layers decoder-seq-length encoder-seq-length encoder-num-layers mask-prob short-seq-prob "
        "sample-rate vocab-extra-ids bert-no-binary-head ict-head-size biencoder-projection-dim "
        "biencoder-shared-query-context-model ict-load bert-load titles-data-path query-in-block-prob "
        "use-one-sent-docs evidence-data-path retriever-report-topk-accuracies retriever-score-scaling "
        "block-data-path embedding-path indexer-batch-size indexer-log-interval output-bert-embeddings "
        "bert-embedder-type num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction "
        "no-data-sharding head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type "
        "swin-backbone-type mask-type mask-factor iter-per-epoch dino-local-img-size dino-local-crops-number "
        "dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer "
        "dino-warmup-teacher-temp dino-teacher-temp dino-warmup-teacher-temp-epochs",
        "it belongs to BERT, T5, retrieval or vision models, which this package does not train",
        "A GPT has --num-layers and --seq-length.",
    ),
    refused(
        "mtp-num-layers mtp-loss-scaling-factor mtp-use-repeated-layer mtp-detach-heads mtp-standalone",
        "multi-token prediction is untested: the forward step gives later stages no tokens, and its gradients have a "
        "norm of their own",
    ),
    refused(
        "experimental-attention-variant=dsa dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk "
        "dsa-indexer-topk-freq dsa-indexer-skip-topk-offset dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss "
        "dsa-kernel-backend dsa-indexer-rope-interleaved no-dsa-indexer-rotate-activation "
        "no-dsa-indexer-scoring-relu dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32",
        "sparse attention with an indexer is untested",
    ),
    refused(
        "moe-latent-size fp32-residual-connection",
        "it needs Transformer Engine's layers, with which it was never compared",
    ),
    refused(
        "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
        "layers of different kinds in one model are untested, their names in checkpoints included",
    ),
    refused(
        "position-embedding-type=yarn yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow "
        "yarn-correction-range-round-to-int no-yarn-correction-range-round-to-int",
        "YaRN is for longer contexts than those of pretraining, and untested",
        "Use --position-embedding-type rope, with --rotary-base or --use-rope-scaling.",
    ),
    refused(
        "position-embedding-type=mrope mrope-section position-embedding-type=relative relative-attention-num-buckets "
        "relative-attention-max-distance",
        "the forward step passes one position a token and no attention bias",
        "Use --position-embedding-type rope, learned_absolute or none.",
    ),
    refused(
        "dataloader-inter-document-masking",
        "the forward step cannot take packed sequences, so documents would see each other",
        "Use --reset-attention-mask with --transformer-impl local.",
    ),
    refused(
        "spec",
        "initial weights and QK-clip rely on this package's layer specifications",
        "Extend megatron_async/models/specs.py. With --hybrid-layer-pattern Megatron's hybrid_stack_spec is taken.",
    ),
    refused("moe-use-upcycling moe-upcycling-granularity", "upcycling happens while Megatron loads a dense model"),
)

_OTHER_PROGRAMS = (
    refused(
        "perform-rl-step rl-prompts-per-eval grpo-prompts-per-step grpo-group-size rl-generation-lag "
        "rl-submission-granularity rl-consumption-granularity grpo-iterations grpo-clamp-eps-lower "
        "grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight grpo-filter-groups-with-same-reward "
        "langrl-env-config rl-default-temperature rl-default-top-p rl-default-top-k "
        "rl-offload-optimizer-during-inference rl-kv-cache-management-mode rl-persist-cuda-graphs "
        "rl-partial-rollouts rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef "
        "rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin rl-sequence-packing-algo "
        "rl-training-cuda-graphs rl-inference-tensor-model-parallel-size rl-inference-pipeline-model-parallel-size "
        "rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size "
        "rl-inference-model-unified-memory-level rl-offload-inference-model-weights-when-idle refit-method "
        "rl-verify-model-weights-swap rl-skip-bos-token rl-profile rl-profile-dir rl-inference-parsers "
        "moe-enable-routing-replay",
        "this package pretrains; reinforcement learning is Megatron-LM's train_rl.py",
    ),
    refused(
        "sft sft-tokenizer-prompt-format fim-data fim-rate fim-spm-rate fim-split-sample fim-fragment-rate "
        "fim-no-prefix fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token fim-eod-token",
        "the data set is Megatron's GPTDataset; documents of another kind would be read as plain text",
    ),
    refused(
        "logits-save-top-k logits-save-top-p logits-save-top-p-min-k logits-save-dir logits-save-dtype "
        "logits-load-dir logits-load-decode-threads logits-load-prefetch-factor logits-load-msc-prefetch-depth "
        "logits-load-kd-loss-alpha logits-load-ignore-errors",
        "distillation needs another forward step",
    ),
    refused(
        "yaml-cfg use-checkpoint-args use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args",
        "the command line is the only source of arguments, so that all of them are checked before anything starts",
        "Give the options, or --model PRESET. A resume names every value that differs from the saved run's.",
    ),
)


ROWS: tuple[Row, ...] = (*_OTHER_MODELS, *_OTHER_PROGRAMS)
