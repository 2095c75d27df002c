# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's that are refused: another value than the default ends the command before anything starts."""

from megatron_async.config.contract import elsewhere
from megatron_async.config.contract.row import DELAYED, ON_CPU, WITHOUT_LATENTS, Row, refused

_TRAINING_LOOP = (
    refused(
        "log-memory-interval log-device-memory-used",
        "this package's log does not have it",
        "Use --log-memory-to-tensorboard, or --dry-run for an estimate.",
    ),
    refused("pytorch-profiler-collect-chakra", "the step loop writes Chrome traces"),
    refused(
        "decrease-batch-size-if-needed",
        "a batch has the size that was asked for",
        "Give sizes that are multiples of --micro-batch-size x data-parallel size.",
    ),
    refused("phase-transition-iterations", "the data cannot change in the middle of a run", "Start a second run."),
    refused("test-mode", "it belongs to Megatron's own tests"),
    refused(
        "gpu-sniff-test-interval train-sync-interval check-for-large-grads check-for-spiky-loss",
        "Megatron's step loop does it, and this package has its own",
        "Every batch is checked for a finite loss and gradient, and jumps of the loss are logged.",
    ),
    refused(
        "rerun-mode=report_stats error-injection-rate error-injection-type result-rejected-tracker-filename",
        "batches are not run twice: micro-batches of two batches are in flight",
    ),
    refused(
        "config-logger-dir",
        "Megatron-LM 0.19 cannot write a configuration that holds process groups",
        "The first line of --metrics-file has every argument.",
    ),
    refused(
        "save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval "
        "save-dgrads-interval moe-routing-trace-path moe-routing-trace-max-training-iters "
        "moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights",
        "dumps are written by Megatron's step loop",
        "Write a callback (megatron_async/training/callbacks.py).",
    ),
    refused(
        "adlr-autoresume adlr-autoresume-interval",
        "it needs a scheduler of NVIDIA's own; with it nothing would be trained",
        "SIGTERM (--exit-signal) ends a run with a checkpoint.",
    ),
    refused(
        "log-energy",
        "Megatron's monitor waits for all ranks in every batch",
        "Read the devices' counters beside the run: nvidia-smi --query-gpu=power.draw --format=csv -l 10.",
    ),
    refused(
        "log-straggler straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup "
        "run-workload-inspector-server",
        "Megatron's detector waits for all ranks, which a delayed schedule never does",
        "--trace-file shows the time of every action on every rank.",
    ),
    refused(
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
    refused("exit-signal=SIGKILL exit-signal=SIGSTOP", "no process can catch it", "Use SIGTERM or SIGUSR1."),
    refused("dataloader-type=external", "it needs a loader of the user's", "Use single or cyclic."),
    refused("distributed-timeout-seconds-after-init", "Megatron's step loop sets it", "--distributed-timeout-minutes."),
)

_CHECKPOINTS = (
    refused(
        "non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir "
        "non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication replication-jump "
        "replication-factor",
        "every checkpoint is complete and published in one step",
        "Use --save-interval with --keep-last, and --async-save.",
    ),
    refused(
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format "
        "dist-ckpt-save-pre-mcore-014 load-main-params-from-ckpt override-ckpt-iteration no-strict-fsdp-dtensor-load "
        "no-stream-ckpt-dequant distrib-optim-fully-reshardable-mem-efficient",
        "checkpoints have one format, torch_dist, which holds the state of a delayed run on any layout",
        "Convert other checkpoints with tools/convert_checkpoint.py.",
    ),
    refused("enable-msc object-storage-cache-path", "files are read and written through the file system alone"),
)

_LAYOUT = (
    refused(
        "context-parallel-size hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank hybrid-context-parallel "
        "cp-comm-type",
        "context parallelism is untested, batches hold whole sequences",
        "Use --context-parallel-size 1, and tensor parallelism with --sequence-parallel for long sequences.",
    ),
    refused(
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
    refused(
        "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards",
        "weights would be gathered for each use, so two versions cannot be kept",
    ),
    refused(
        "num-distributed-optimizer-instances",
        "untested: the schedule reduces over one data-parallel group",
        "Use 1.",
    ),
    refused(
        "overlap-param-gather-with-optimizer-step",
        "the optimizer steps all layers at once",
        "Use --overlap-param-gather alone.",
    ),
    refused(
        "ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation",
        "the schedule has two gradient buffers of its own and runs the reduction itself",
    ),
    refused(
        "defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute overlap-moe-expert-parallel-comm "
        "overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release "
        "high-priority-a2a-comm-stream overlap-p2p-communication-warmup-flush "
        "microbatch-group-size-per-virtual-pipeline-stage",
        "Megatron's own schedules run the postponed work; a delayed schedule has no bubble for it, and it is untested "
        "with 1f1b",
    ),
    refused(
        "pipeline-model-parallel-comm-backend use-ring-exchange-p2p use-sharp sharp-enabled-group use-nccl-ub "
        "disable-symmetric-registration nccl-communicator-config-path high-priority-stream-groups",
        "every link and reduction of the schedule has a process group of its own, which Megatron's choice does not "
        "reach",
        "Leave it out; NCCL's environment variables reach all groups.",
    ),
    refused(
        "distribute-saved-activations",
        "recomputed activations would be cut and gathered again; untested",
        "Use --sequence-parallel, which cuts them anyway.",
    ),
    refused("lazy-mpu-init fake-process-group", "process groups would not be made"),
)

_KERNELS = (
    refused(
        "fp8-format fp8-recipe fp8-quantizer-factory fp8-margin fp8-interval fp8-amax-history-len "
        "fp8-amax-compute-algo no-fp8-wgrad fp8-output-proj first-last-layers-bf16 num-layers-at-start-in-bf16 "
        "num-layers-at-end-in-bf16 fp4-format fp4-recipe fp4-quantizer-factory fp8-param-gather fp4-param-gather "
        "te-precision-config-file moe-router-padding-for-quantization moe-router-padding-for-fp8 "
        "reuse-grad-buf-for-mxfp8-param-ag",
        "FP8 and FP4 are untested: quantized copies of the weights would have to follow their versions",
        "Use --bf16.",
    ),
    refused(
        "enable-cuda-graph external-cuda-graph cuda-graph-impl cuda-graph-warmup-steps cuda-graph-scope "
        "cuda-graph-modules optimizer-cuda-graph te-rng-tracker inference-rng-tracker",
        "CUDA graphs hold fixed weight addresses, which a delayed schedule switches, and Megatron's step loop captures "
        "them",
    ),
    refused(
        "use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
        "optimizers step on fp32 gradients, weights and state",
    ),
    refused(
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
    refused(
        "tp-comm-overlap no-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs "
        "tp-comm-overlap-rs-dgrad no-tp-comm-split-ag no-tp-comm-split-rs tp-comm-overlap-cfg "
        "tp-comm-bootstrap-backend fused-residual-rmsnorm "
        "use-transformer-engine-op-fuser use-te-activation-func use-grouped-gemm-for-shared-expert "
        "use-grouped-gemm-for-dense-mlp moe-single-grouped-weight moe-single-grouped-bias "
        "moe-shared-expert-glu-interleave-size moe-mlp-glu-interleave-size mla-down-proj-fusion symmetric-ar-type "
        "transformer-impl=inference_optimized batch-invariant-mode use-kitchen-attention kitchen-attention-backend "
        "moe-shared-expert-overlap",
        "these fused kernels and buffers were never run under weights that change their address",
    ),
    refused(
        "moe-token-dispatcher-type=flex moe-enable-deepep moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms "
        "moe-deepep-num-sms moe-permute-fusion-into-hybridep moe-hybridep-pad-uneven-dispatch-inputs "
        "moe-hybridep-num-sms moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute "
        "moe-hybridep-num-sms-preprocessing moe-ncclep-static-shape moe-ncclep-zero-copy",
        "DeepEP, HybridEP and NCCL-EP are untested: their buffers hold one batch",
        "Use --moe-token-dispatcher-type alltoall.",
    ),
)

_INITIAL_WEIGHTS = (
    refused(
        "use-cpu-initialization init-model-with-meta-device",
        "not supported: initial weights are drawn on the run's device, from the seed and each parameter's name, so "
        "that every layout starts from the same model",
    ),
    refused(
        "data-parallel-random-init",
        "all data-parallel replicas start from the same weights and draw from one stream",
    ),
    refused(
        "moe-router-force-biased",
        "the fixed bias is in no checkpoint, so a resumed run would route in another way",
        "Use --moe-router-force-load-balancing for benchmarks.",
    ),
    refused("no-pad-vocab-size", "Megatron's model builder pads all the same", "Give --padded-vocab-size N."),
    refused(
        "init-method-xavier-uniform",
        "Megatron-LM 0.19 passes it on under a name that its TransformerConfig does not have",
        "Use --init-method-std.",
    ),
    refused("apply-residual-connection-post-layernorm", "Megatron-Core has no such model and would ignore it"),
)

_NO_LONGER_VALID = (
    refused("batch-size", "Megatron no longer takes it", "Use --micro-batch-size."),
    refused("warmup", "Megatron no longer takes it", "Use --lr-warmup-fraction."),
    refused("model-parallel-size", "Megatron no longer takes it", "Use --tensor-model-parallel-size."),
    refused("checkpoint-activations", "Megatron no longer takes it", "Use --recompute-granularity."),
)

_BY_CONDITION = (
    refused(
        "fp16", "its dynamic loss scale decides about a step after later forwards have run", "Use --bf16.", DELAYED
    ),
    refused(
        "moe-router-load-balancing-type=global_aux_loss moe-router-load-balancing-type=quantile_balancing",
        "it carries statistics from one micro-batch to the next, and micro-batches of two batches are in flight",
        "Use aux_loss or seq_aux_loss.",
        DELAYED,
        "pipeline/rules.py",
    ),
    refused(
        "record-memory-history log-memory-to-tensorboard",
        "it asks CUDA",
        "Use the memory of --dry-run.",
        ON_CPU,
    ),
    refused(
        "transformer-impl=transformer_engine distributed-backend=nccl cross-entropy-loss-fusion moe-permute-fusion "
        "moe-router-fusion",
        "it needs a GPU",
        when=ON_CPU,
        rule="platform/cpu.py",
    ),
    refused(
        "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale "
        "mscale-all-dim",
        "it would be ignored",
        "Add --multi-latent-attention.",
        WITHOUT_LATENTS,
    ),
)

ROWS: tuple[Row, ...] = (
    *elsewhere.ROWS,
    *_TRAINING_LOOP,
    *_CHECKPOINTS,
    *_LAYOUT,
    *_KERNELS,
    *_INITIAL_WEIGHTS,
    *_NO_LONGER_VALID,
    *_BY_CONDITION,
)
