# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's that are refused: another value than the default ends the command before anything starts."""

from megatron_async.config.contract.row import DELAYED, ON_CPU, Row

_LEAVE = "Leave it out."


def _refused(options: str, reason: str, instead: str = _LEAVE, when: str = "") -> Row:
    return Row("refused", options, reason, instead, when=when)


_OTHER_MODELS = (
    _refused(
        "hybrid-override-pattern mtp-hybrid-override-pattern is-hybrid-model",
        "an older way to say what --hybrid-layer-pattern says",
        "Use --hybrid-layer-pattern.",
    ),
    _refused(
        "disable-mamba-mem-eff-path mamba-training-ssm-states-dtype",
        "the Mamba layer is this package's, and has one way to compute",
    ),
    _refused(
        "decoder-num-layers decoder-seq-length encoder-seq-length encoder-num-layers mask-prob short-seq-prob "
        "sample-rate vocab-extra-ids bert-no-binary-head",
        "it belongs to BERT or T5, and this package trains Megatron's GPT",
        "Use --num-layers and --seq-length.",
    ),
    _refused(
        "ict-head-size biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load "
        "titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path retriever-report-topk-accuracies "
        "retriever-score-scaling block-data-path embedding-path indexer-batch-size indexer-log-interval "
        "output-bert-embeddings bert-embedder-type",
        "it belongs to retrieval models, and this package trains Megatron's GPT",
    ),
    _refused(
        "num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction no-data-sharding "
        "head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type mask-type "
        "mask-factor iter-per-epoch dino-local-img-size dino-local-crops-number dino-head-hidden-size "
        "dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp "
        "dino-warmup-teacher-temp-epochs",
        "it belongs to vision models, and this package trains Megatron's GPT",
    ),
    _refused(
        "mtp-num-layers mtp-loss-scaling-factor mtp-use-repeated-layer mtp-detach-heads mtp-standalone",
        "multi-token prediction is untested: the forward step gives later stages no tokens, and its gradients have a "
        "norm of their own",
    ),
    _refused(
        "experimental-attention-variant=dsa dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk "
        "dsa-indexer-topk-freq dsa-indexer-skip-topk-offset dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss "
        "dsa-kernel-backend dsa-indexer-rope-interleaved no-dsa-indexer-rotate-activation "
        "no-dsa-indexer-scoring-relu dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32",
        "sparse attention with an indexer is untested",
    ),
    _refused(
        "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim "
        "rotary-scaling-factor mscale mscale-all-dim rope-type",
        "multi-latent attention is untested: torch's local attention cannot run it",
    ),
    _refused(
        "moe-latent-size fp32-residual-connection",
        "it needs Transformer Engine's layers, with which it was never compared",
    ),
    _refused(
        "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
        "layers of different kinds in one model are untested, their names in checkpoints included",
    ),
    _refused(
        "position-embedding-type=yarn yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow "
        "yarn-correction-range-round-to-int no-yarn-correction-range-round-to-int",
        "YaRN is for longer contexts than those of pretraining, and untested",
        "Use --position-embedding-type rope, with --rotary-base or --use-rope-scaling.",
    ),
    _refused(
        "position-embedding-type=mrope mrope-section position-embedding-type=relative relative-attention-num-buckets "
        "relative-attention-max-distance",
        "the forward step passes one position a token and no attention bias",
        "Use --position-embedding-type rope, learned_absolute or none.",
    ),
    _refused(
        "dataloader-inter-document-masking",
        "the forward step cannot take packed sequences, so documents would see each other",
        "Use --reset-attention-mask with --transformer-impl local.",
    ),
    _refused(
        "spec",
        "initial weights and QK-clip rely on this package's layer specifications",
        "Extend megatron_async/models/specs.py instead.",
    ),
    _refused("moe-use-upcycling moe-upcycling-granularity", "upcycling happens while Megatron loads a dense model"),
)

_OTHER_PROGRAMS = (
    _refused(
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
    _refused(
        "sft sft-tokenizer-prompt-format fim-data fim-rate fim-spm-rate fim-split-sample fim-fragment-rate "
        "fim-no-prefix fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token fim-eod-token",
        "the data set is Megatron's GPTDataset; documents of another kind would be read as plain text",
    ),
    _refused(
        "logits-save-top-k logits-save-top-p logits-save-top-p-min-k logits-save-dir logits-save-dtype "
        "logits-load-dir logits-load-decode-threads logits-load-prefetch-factor logits-load-msc-prefetch-depth "
        "logits-load-kd-loss-alpha logits-load-ignore-errors",
        "distillation needs another forward step",
    ),
    _refused(
        "yaml-cfg use-checkpoint-args use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args",
        "the command line is the only source of arguments, so that all of them are checked before anything starts",
        "Give the options, or --model PRESET. A resume names every value that differs from the saved run's.",
    ),
)

_TRAINING_LOOP = (
    _refused(
        "log-timers-to-tensorboard log-memory-interval log-device-memory-used",
        "this package's log does not have it; Megatron's timers wait for all stages",
        "See --metrics-file, --trace-file and --log-memory-to-tensorboard.",
    ),
    _refused("pytorch-profiler-collect-chakra", "the step loop writes Chrome traces", "Leave it out."),
    Row(
        "refused",
        "profile use-pytorch-profiler record-memory-history log-memory-to-tensorboard",
        "it asks CUDA; on CPUs torch's profiler crashes beside gloo's threads",
        "Use --trace-file and the memory of --dry-run.",
        when=ON_CPU,
    ),
    _refused(
        "decrease-batch-size-if-needed",
        "a batch has the size that was asked for",
        "Give sizes that are multiples of --micro-batch-size x data-parallel size.",
    ),
    Row(
        "refused",
        "rampup-batch-size",
        "Megatron-Core 0.19 ignores it",
        "Give --step-batch-size-schedule.",
        rule="training/rules.py",
    ),
    _refused("phase-transition-iterations", "the data cannot change in the middle of a run", "Start a second run."),
    _refused("test-mode", "it belongs to Megatron's own tests"),
    _refused("freeze-all-layers", "the step loop would train every parameter"),
    _refused(
        "empty-unused-memory-level",
        "the step loop leaves cached memory to torch's allocator, since activations of the next batch are in use",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation.",
    ),
    _refused(
        "check-weight-hash-across-dp-replicas-interval gpu-sniff-test-interval train-sync-interval "
        "check-for-large-grads check-for-spiky-loss",
        "Megatron's step loop does it, and this package has its own",
        "Every batch is checked for a finite loss and gradient, and jumps of the loss are logged.",
    ),
    _refused(
        "rerun-mode=report_stats error-injection-rate error-injection-type result-rejected-tracker-filename",
        "batches are not run twice: micro-batches of two batches are in flight",
    ),
    _refused(
        "config-logger-dir",
        "Megatron-LM 0.19 cannot write a configuration that holds process groups",
        "The first line of --metrics-file has every argument.",
    ),
    _refused(
        "save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval "
        "save-dgrads-interval moe-routing-trace-path moe-routing-trace-max-training-iters "
        "moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights",
        "dumps are written by Megatron's step loop",
        "Write a callback (megatron_async/training/callbacks.py).",
    ),
    _refused(
        "adlr-autoresume adlr-autoresume-interval",
        "it needs a scheduler of NVIDIA's own; with it nothing would be trained",
        "SIGTERM (--exit-signal) ends a run with a checkpoint.",
    ),
    _refused(
        "log-energy log-straggler straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup "
        "run-workload-inspector-server",
        "Megatron's step loop does it, and this package has its own",
        "--trace-file shows the time of every action on every rank.",
    ),
    _refused(
        "inprocess-restart inprocess-max-iterations inprocess-monitor-thread-interval "
        "inprocess-monitor-process-interval inprocess-progress-watchdog-interval inprocess-heartbeat-interval "
        "inprocess-soft-timeout inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout "
        "inprocess-completion-timeout inprocess-last-call-wait inprocess-termination-grace-time "
        "inprocess-granularity inprocess-active-world-size inprocess-empty-cuda-cache enable-ft-package "
        "calc-ft-timeouts ft-num-warmup-iters fault-injector-ranks fault-injector-num-ranks "
        "fault-injector-fault-types fault-injector-fault-probabilities fault-injector-fault-delay "
        "fault-injector-delay-start-iteration fault-injector-mtti-seconds fault-injector-offset-seconds "
        "fault-injector-seed",
        "restarts inside a process are part of Megatron's step loop",
        "Let torchrun restart the job (--max-restarts); a resume is exact.",
    ),
    _refused("exit-signal=SIGKILL exit-signal=SIGSTOP", "no process can catch it", "Use SIGTERM or SIGUSR1."),
    _refused("dataloader-type=external", "it needs a loader of the user's", "Use single or cyclic."),
    _refused(
        "distributed-timeout-seconds-after-init", "Megatron's step loop sets it", "--distributed-timeout-minutes."
    ),
)

_CHECKPOINTS = (
    _refused(
        "non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir "
        "non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication replication-jump "
        "replication-factor",
        "every checkpoint is complete and published in one step",
        "Use --save-interval with --keep-last, and --async-save.",
    ),
    _refused(
        "async-strategy use-persistent-ckpt-worker async-ckpt-use-cpu-shm async-ckpt-cpu-priority "
        "async-ckpt-io-priority",
        "it would be ignored: it is about a worker process of Megatron's. With --async-save each rank writes its part "
        "of a checkpoint in a thread of its own",
    ),
    _refused(
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format auto-detect-ckpt-format "
        "dist-ckpt-save-pre-mcore-014 load-main-params-from-ckpt override-ckpt-iteration no-strict-fsdp-dtensor-load "
        "verify-integrity no-stream-ckpt-dequant distrib-optim-fully-reshardable-mem-efficient",
        "checkpoints have one format, torch_dist, which holds the state of a delayed run on any layout",
        "Convert other checkpoints with tools/convert_checkpoint.py.",
    ),
    _refused("enable-msc object-storage-cache-path", "files are read and written through the file system alone"),
)

_LAYOUT = (
    _refused(
        "context-parallel-size hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank hybrid-context-parallel "
        "cp-comm-type",
        "context parallelism is untested, batches hold whole sequences",
        "Use --context-parallel-size 1, and tensor parallelism with --sequence-parallel for long sequences.",
    ),
    _refused(
        "use-megatron-fsdp use-torch-fsdp2 fsdp-manual-registration create-all-gather-group "
        "data-parallel-sharding-strategy outer-dp-sharding-strategy no-gradient-reduce-div-fusion fsdp-double-buffer "
        "suggested-communication-unit-size keep-fp8-transpose-cache enable-full-sharding-in-hsdp "
        "torch-fsdp2-no-reshard-after-forward megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype "
        "megatron-fsdp-grad-comm-dtype megatron-fsdp-enable-fine-grained-param-gather "
        "megatron-fsdp-max-pool-double-buffer fsdp-db-use-persist-buf-on-alloc-fail ckpt-format=fsdp_dtensor "
        "ckpt-format=torch_dcp",
        "FSDP gathers weights for each use, so two versions cannot be kept",
        "Use data parallelism, with --use-distributed-optimizer.",
    ),
    _refused(
        "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards",
        "weights would be gathered for each use, so two versions cannot be kept",
    ),
    _refused(
        "num-distributed-optimizer-instances",
        "untested: the schedule reduces over one data-parallel group",
        "Use 1.",
    ),
    _refused(
        "overlap-param-gather overlap-param-gather-with-optimizer-step no-align-param-gather",
        "the schedule itself publishes new weights; gathers that start inside a forward would meet two versions",
    ),
    _refused(
        "ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation",
        "the schedule has two gradient buffers of its own and runs the reduction itself",
    ),
    _refused(
        "defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute overlap-moe-expert-parallel-comm "
        "overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release "
        "high-priority-a2a-comm-stream overlap-p2p-communication-warmup-flush "
        "microbatch-group-size-per-virtual-pipeline-stage",
        "Megatron's own schedules run the postponed work; a delayed schedule has no bubble for it, and it is untested "
        "with 1f1b",
    ),
    _refused(
        "pipeline-model-parallel-comm-backend use-ring-exchange-p2p use-sharp sharp-enabled-group use-nccl-ub "
        "disable-symmetric-registration nccl-communicator-config-path high-priority-stream-groups",
        "every link and reduction of the schedule has a process group of its own, which Megatron's choice does not "
        "reach",
        "Leave it out; NCCL's environment variables reach all groups.",
    ),
    _refused(
        "distribute-saved-activations",
        "recomputed activations would be cut and gathered again; untested",
        "Use --sequence-parallel, which cuts them anyway.",
    ),
    _refused("lazy-mpu-init fake-process-group", "process groups would not be made"),
)

_KERNELS = (
    _refused(
        "fp8-format fp8-recipe fp8-quantizer-factory fp8-margin fp8-interval fp8-amax-history-len "
        "fp8-amax-compute-algo no-fp8-wgrad fp8-output-proj first-last-layers-bf16 num-layers-at-start-in-bf16 "
        "num-layers-at-end-in-bf16 fp4-format fp4-recipe fp4-quantizer-factory fp8-param-gather fp4-param-gather "
        "te-precision-config-file moe-router-padding-for-quantization moe-router-padding-for-fp8 "
        "reuse-grad-buf-for-mxfp8-param-ag",
        "FP8 and FP4 are untested: quantized copies of the weights would have to follow their versions",
        "Use --bf16.",
    ),
    _refused(
        "enable-cuda-graph external-cuda-graph cuda-graph-impl cuda-graph-warmup-steps cuda-graph-scope "
        "cuda-graph-modules optimizer-cuda-graph te-rng-tracker inference-rng-tracker",
        "CUDA graphs hold fixed weight addresses, which a delayed schedule switches, and Megatron's step loop captures "
        "them",
    ),
    _refused(
        "use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
        "optimizers step on fp32 gradients, weights and state",
    ),
    _refused(
        "optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload "
        "overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params cpu-offloading-num-layers "
        "cpu-offloading-retain-pinned-cpu-buffers fine-grained-activation-offloading offload-modules "
        "min-offloaded-tensor-size delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks "
        "activation-offload-fraction fine-grained-offloading-max-inflight-offloads moe-paged-stash "
        "moe-paged-stash-page-size moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu "
        "moe-expert-rank-capacity-factor",
        "offloading is untested: activations of two batches, and two versions of the weights, are in use at once",
        "Use --recompute-granularity, or --use-distributed-optimizer.",
    ),
    _refused(
        "tp-comm-overlap no-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs "
        "tp-comm-overlap-rs-dgrad no-tp-comm-split-ag no-tp-comm-split-rs tp-comm-overlap-cfg "
        "tp-comm-bootstrap-backend cross-entropy-fusion-impl=te fused-residual-rmsnorm "
        "use-transformer-engine-op-fuser use-te-activation-func use-grouped-gemm-for-shared-expert "
        "use-grouped-gemm-for-dense-mlp moe-single-grouped-weight moe-single-grouped-bias "
        "moe-shared-expert-glu-interleave-size moe-mlp-glu-interleave-size mla-down-proj-fusion symmetric-ar-type "
        "transformer-impl=inference_optimized batch-invariant-mode use-kitchen-attention kitchen-attention-backend "
        "moe-shared-expert-overlap use-fused-weighted-squared-relu",
        "these fused kernels and buffers were never run under weights that change their address",
    ),
    _refused(
        "moe-token-dispatcher-type=flex moe-enable-deepep moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms "
        "moe-deepep-num-sms moe-permute-fusion-into-hybridep moe-hybridep-pad-uneven-dispatch-inputs "
        "moe-hybridep-num-sms moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute "
        "moe-hybridep-num-sms-preprocessing moe-ncclep-static-shape moe-ncclep-zero-copy",
        "DeepEP, HybridEP and NCCL-EP are untested: their buffers hold one batch",
        "Use --moe-token-dispatcher-type alltoall.",
    ),
)

_INITIAL_WEIGHTS = (
    _refused(
        "use-cpu-initialization init-model-with-meta-device",
        "not supported: initial weights are drawn on the run's device, from the seed and each parameter's name, so "
        "that every layout starts from the same model",
    ),
    _refused(
        "data-parallel-random-init",
        "all data-parallel replicas start from the same weights and draw from one stream",
    ),
    _refused(
        "moe-router-force-load-balancing moe-router-force-biased",
        "routing would be random or fixed, which is for benchmarks of kernels; nothing would be learnt",
    ),
    _refused("no-pad-vocab-size", "Megatron's model builder pads all the same", "Give --padded-vocab-size N."),
    _refused(
        "init-method-xavier-uniform",
        "Megatron-LM 0.19 passes it on under a name that its TransformerConfig does not have",
        "Use --init-method-std.",
    ),
    _refused("apply-residual-connection-post-layernorm", "Megatron-Core has no such model and would ignore it"),
)

_NO_LONGER_VALID = (
    _refused("batch-size", "Megatron no longer takes it", "Use --micro-batch-size."),
    _refused("warmup", "Megatron no longer takes it", "Use --lr-warmup-fraction."),
    _refused("model-parallel-size", "Megatron no longer takes it", "Use --tensor-model-parallel-size."),
    _refused("checkpoint-activations", "Megatron no longer takes it", "Use --recompute-granularity."),
)

_WITH_DELAY = (
    _refused(
        "fp16",
        "its dynamic loss scale decides about a step after later forwards have run",
        "Use --bf16.",
        DELAYED,
    ),
)

ROWS: tuple[Row, ...] = (
    *_OTHER_MODELS,
    *_OTHER_PROGRAMS,
    *_TRAINING_LOOP,
    *_CHECKPOINTS,
    *_LAYOUT,
    *_KERNELS,
    *_INITIAL_WEIGHTS,
    *_NO_LONGER_VALID,
    *_WITH_DELAY,
)
