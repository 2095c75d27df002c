# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's that are taken and do nothing here. One that is given is named at the start of the run."""

from megatron_async.config.contract.row import DELAYED, ON_CPU, Row


def _inert(options: str, reason: str, when: str = "") -> Row:
    return Row("inert here", options, reason, when=when)


ROWS: tuple[Row, ...] = (
    _inert(
        "inference-batch-times-seqlen-threshold max-tokens-to-oom use-legacy-static-engine inference-max-requests "
        "inference-max-seq-length inference-dynamic-batching inference-dynamic-batching-buffer-size-gb "
        "inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-mamba-memory-ratio "
        "inference-dynamic-batching-block-size inference-dynamic-batching-max-requests "
        "inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs "
        "inference-dynamic-batching-track-paused-request-events "
        "inference-dynamic-batching-track-generated-token-events decode-only-cuda-graphs "
        "inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens "
        "inference-dynamic-batching-unified-memory-level enable-chunked-prefill num-speculative-tokens "
        "inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-eviction-policy "
        "inference-dynamic-batching-prefix-caching-coordinator-policy "
        "inference-dynamic-batching-prefix-caching-routing-alpha "
        "inference-dynamic-batching-prefix-caching-mamba-gb "
        "inference-dynamic-batching-cuda-graph-mixed-prefill-count "
        "inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-sampling-backend "
        "use-same-sampling-seed-across-dp-ranks inference-dynamic-batching-async-sched-mode "
        "inference-dynamic-batching-logprobs-mode inference-logging-step-interval "
        "inference-text-gen-server-logging inference-wandb-logging inference-coordinator-port "
        "mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype "
        "inference-use-synchronous-zmq-collectives inference-disable-ep-consensus inference-shards "
        "inference-cuda-graph-scope flash-decode nccl-all-reduce-for-prefill inference-fuse-tp-communication "
        "inference-disable-triton-nvls-kernels inference-grouped-gemm-backend "
        "inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type "
        "moe-pad-experts-for-cuda-graph-inference mlp-chunks-for-prefill cache-mla-latents chat-template",
        "training generates no text",
    ),
    _inert(
        "no-one-logger one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version",
        "One Logger is a service inside NVIDIA that Megatron's step loop reports to",
    ),
    _inert(
        "onnx-safe use-flash-attn use-mcore-models use-dist-ckpt dist-ckpt-format ckpt-fully-parallel-save "
        "disable-msc no-position-embedding openai-gelu fp16-lm-cross-entropy",
        "a name from an older Megatron-LM that has no effect there either",
    ),
    _inert(
        "exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training",
        "the signal of --exit-signal always ends a run with a checkpoint",
    ),
    _inert(
        "no-check-for-nan-in-loss-and-grad",
        "an update whose gradient is not finite is always skipped and counted; --max-consecutive-skips ends the run",
    ),
    _inert("rerun-mode", "batches are never run twice"),
    _inert("log-throughput", "every log line, every row of --metrics-file and TensorBoard have the throughput"),
    _inert("no-log-loss-scale-to-tensorboard", "the loss scale is never written"),
    _inert(
        "timing-log-level timing-log-option no-barrier-with-level-1-timing",
        "Megatron's timers are off, since they hold all ranks up; --log-timers-to-tensorboard takes times that do not",
    ),
    _inert("mup-width-mult", "Megatron derives it from --hidden-size and --mup-base-hidden-size"),
    _inert("local-rank", "the launcher's environment decides"),
    _inert(
        "async-strategy use-persistent-ckpt-worker async-ckpt-use-cpu-shm async-ckpt-cpu-priority "
        "async-ckpt-io-priority",
        "it is about Megatron's worker process; with --async-save each rank writes its part in a thread of its own",
    ),
    _inert("auto-detect-ckpt-format", "--load takes checkpoints of format torch_dist, and refuses others by name"),
    _inert("verify-integrity", "checkpoints always have a checksum of each file, which --load compares"),
    _inert("dist-ckpt-workers", "each rank writes one file"),
    _inert("dist-ckpt-optim-fully-reshardable", "it is always on: a checkpoint loads on any layout"),
    _inert("no-use-layer-wise-param-layout", "it is always off: each parameter is whole at one owner"),
    _inert(
        "no-overlap-p2p-communication", "the schedule posts every receive before the preceding compute", when=DELAYED
    ),
    _inert(
        "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank",
        "there is no bubble for interleaved stages to shrink; wpipe makes its own two",
        when=DELAYED,
    ),
    _inert(
        "overlap-grad-reduce no-align-grad-reduce overlap-param-gather no-align-param-gather",
        "the schedule reduces gradients and gathers weights beside the compute by itself",
        when=DELAYED,
    ),
    _inert(
        "flight-recorder-dump-path flight-recorder-trace-buffer-size no-flight-recorder-dump-on-timeout "
        "flight-recorder-include-stack-trace no-flight-recorder-include-only-active "
        "no-flight-recorder-extra-dump-on-exec",
        "the flight recorder watches NCCL",
        when=ON_CPU,
    ),
    _inert("disable-jit-fuser", "nothing is compiled there", when=ON_CPU),
    _inert(
        "attention-backend flash-attention-version disable-bf16-reduced-precision-matmul",
        "the layers are torch's",
        when=ON_CPU,
    ),
)
