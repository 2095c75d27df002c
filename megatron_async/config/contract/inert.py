# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's that are taken and do nothing here. One that is given is named at the start of the run."""

from megatron_async.config.contract.row import table

ROWS = table(
    "inert here",
    """
training generates no text
    inference-* max-tokens-to-oom use-legacy-static-engine decode-only-cuda-graphs enable-chunked-prefill
    num-speculative-tokens use-same-sampling-seed-across-dp-ranks mamba-inference-conv-states-dtype
    mamba-inference-ssm-states-dtype flash-decode nccl-all-reduce-for-prefill moe-pad-experts-for-cuda-graph-inference
    mlp-chunks-for-prefill cache-mla-latents chat-template
One Logger is a service inside NVIDIA that Megatron's step loop reports to
    no-one-logger one-logger-* app-tag-run-name app-tag-run-version
a name from an older Megatron-LM that has no effect there either
    onnx-safe use-flash-attn use-mcore-models use-dist-ckpt dist-ckpt-format ckpt-fully-parallel-save disable-msc
    no-position-embedding openai-gelu fp16-lm-cross-entropy
the signal of --exit-signal always ends a run with a checkpoint
    exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training
an update whose gradient is not finite is always skipped and counted; --max-consecutive-skips ends the run
    no-check-for-nan-in-loss-and-grad
batches are never run twice
    rerun-mode
every log line, every row of --metrics-file and TensorBoard have the throughput
    log-throughput
the loss scale is never written
    no-log-loss-scale-to-tensorboard
Megatron's timers are off, since they hold all ranks up; --log-timers-to-tensorboard takes times that do not
    timing-log-level timing-log-option no-barrier-with-level-1-timing
Megatron derives it from --hidden-size and --mup-base-hidden-size
    mup-width-mult
the launcher's environment decides
    local-rank
it is about Megatron's worker process; with --async-save each rank writes its part in a thread of its own
    async-strategy use-persistent-ckpt-worker async-ckpt-*
--load takes checkpoints of format torch_dist, and refuses others by name
    auto-detect-ckpt-format
checkpoints always have a checksum of each file, which --load compares
    verify-integrity
each rank writes one file
    dist-ckpt-workers
it is always on: a checkpoint loads on any layout
    dist-ckpt-optim-fully-reshardable
it is always off: each parameter is whole at one owner
    no-use-layer-wise-param-layout
with a gradient delay: the schedule posts every receive before the preceding compute
    no-overlap-p2p-communication
with a gradient delay: there is no bubble for interleaved stages to shrink; wpipe makes its own two
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
with a gradient delay: the schedule reduces gradients and gathers weights beside the compute by itself
    overlap-grad-reduce no-align-grad-reduce overlap-param-gather no-align-param-gather
on CPUs: the flight recorder watches NCCL
    flight-recorder-dump-path flight-recorder-trace-buffer-size no-flight-recorder-dump-on-timeout
    flight-recorder-include-stack-trace no-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec
on CPUs: nothing is compiled there
    disable-jit-fuser
on CPUs: the layers are torch's
    attention-backend flash-attention-version disable-bf16-reduced-precision-matmul
""",
)
