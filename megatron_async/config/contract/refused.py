# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's that are refused: another value than the default ends the command before anything starts."""

from megatron_async.config.contract.row import table

ROWS = table(
    "refused",
    """
# Other models
an older way to say what --hybrid-layer-pattern says. Use --hybrid-layer-pattern; beside it --is-hybrid-model is taken.
    mtp-hybrid-override-pattern is-hybrid-model
the Mamba layer is this package's, and has one way to compute.
    disable-mamba-mem-eff-path mamba-training-ssm-states-dtype
it belongs to BERT, T5, retrieval or vision models, which this package does not train. A GPT has --num-layers and
--seq-length.
    decoder-num-layers decoder-seq-length encoder-seq-length encoder-num-layers mask-prob short-seq-prob sample-rate
    vocab-extra-ids bert-* ict-head-size biencoder-* ict-load titles-data-path query-in-block-prob use-one-sent-docs
    evidence-data-path retriever-* block-data-path embedding-path indexer-batch-size indexer-log-interval
    output-bert-embeddings num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction
    no-data-sharding head-lr-mult vision-* swin-backbone-type mask-type mask-factor iter-per-epoch dino-*
multi-token prediction is untested: the forward step gives later stages no tokens, and its gradients have a norm of
their own.
    mtp-*
sparse attention with an indexer is untested.
    experimental-attention-variant=dsa dsa-* no-dsa-*
it needs Transformer Engine's layers, with which it was never compared.
    moe-latent-size fp32-residual-connection
layers of different kinds in one model are untested, their names in checkpoints included.
    heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
YaRN is for longer contexts than those of pretraining, and untested. Use --position-embedding-type rope, with
--rotary-base or --use-rope-scaling.
    position-embedding-type=yarn yarn-* no-yarn-correction-range-round-to-int
the forward step passes one position a token and no attention bias. Use --position-embedding-type rope,
learned_absolute or none.
    position-embedding-type=mrope mrope-section position-embedding-type=relative relative-attention-*
the forward step cannot take packed sequences, so documents would see each other. Use --reset-attention-mask with
--transformer-impl local.
    dataloader-inter-document-masking
initial weights and QK-clip rely on this package's layer specifications. Extend megatron_async/models/specs.py. With
--hybrid-layer-pattern Megatron's hybrid_stack_spec is taken.
    spec
upcycling happens while Megatron loads a dense model.
    moe-use-upcycling moe-upcycling-granularity
# Other programs
this package pretrains; reinforcement learning is Megatron-LM's train_rl.py.
    perform-rl-step rl-* grpo-* langrl-env-config refit-method moe-enable-routing-replay
the data set is Megatron's GPTDataset; documents of another kind would be read as plain text.
    sft sft-tokenizer-prompt-format fim-*
distillation needs another forward step.
    logits-*
the command line is the only source of arguments, so that all of them are checked before anything starts. Give the
options, or --model PRESET. A resume names every value that differs from the saved run's.
    yaml-cfg use-checkpoint-args use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args
# Training loop
this package's log does not have it. Use --log-memory-to-tensorboard, or --dry-run for an estimate.
    log-memory-interval log-device-memory-used
the step loop writes Chrome traces.
    pytorch-profiler-collect-chakra
a batch has the size that was asked for. Give sizes that are multiples of --micro-batch-size x data-parallel size.
    decrease-batch-size-if-needed
the data cannot change in the middle of a run. Start a second run.
    phase-transition-iterations
it belongs to Megatron's own tests.
    test-mode
Megatron's step loop does it, and this package has its own. Every batch is checked for a finite loss and gradient, and
jumps of the loss are logged.
    gpu-sniff-test-interval train-sync-interval check-for-large-grads check-for-spiky-loss
batches are not run twice: micro-batches of two batches are in flight.
    rerun-mode=report_stats error-injection-* result-rejected-tracker-filename
Megatron-LM 0.19 cannot write a configuration that holds process groups. The first line of --metrics-file has every
argument.
    config-logger-dir
dumps are written by Megatron's step loop. Write a callback (megatron_async/training/callbacks.py).
    save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval
    save-dgrads-interval moe-routing-trace-*
it needs a scheduler of NVIDIA's own; with it nothing would be trained. SIGTERM (--exit-signal) ends a run with a
checkpoint.
    adlr-autoresume adlr-autoresume-interval
Megatron's monitor waits for all ranks in every batch. Read the devices' counters beside the run: nvidia-smi
--query-gpu=power.draw --format=csv -l 10.
    log-energy
Megatron's detector waits for all ranks, which a delayed schedule never does. --trace-file shows the time of every
action on every rank.
    log-straggler straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup
    run-workload-inspector-server
restarts inside a process are part of Megatron's step loop. Let torchrun restart the job (--max-restarts); a resume is
exact.
    inprocess-* enable-ft-package calc-ft-timeouts ft-num-warmup-iters fault-injector-*
no process can catch it. Use SIGTERM or SIGUSR1.
    exit-signal=SIGKILL exit-signal=SIGSTOP
it needs a loader of the user's. Use single or cyclic.
    dataloader-type=external
Megatron's step loop sets it. --distributed-timeout-minutes.
    distributed-timeout-seconds-after-init
# Checkpoints
every checkpoint is complete and published in one step. Use --save-interval with --keep-last, and --async-save.
    non-persistent-* replication*
checkpoints have one format, torch_dist, which holds the state of a delayed run on any layout. Convert other
checkpoints with tools/convert_checkpoint.py.
    ckpt-convert-* dist-ckpt-save-pre-mcore-014 load-main-params-from-ckpt override-ckpt-iteration
    no-strict-fsdp-dtensor-load no-stream-ckpt-dequant distrib-optim-fully-reshardable-mem-efficient
files are read and written through the file system alone.
    enable-msc object-storage-cache-path
# Layout
context parallelism is untested, batches hold whole sequences. Use --context-parallel-size 1, and tensor parallelism
with --sequence-parallel for long sequences.
    context-parallel-size hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank hybrid-context-parallel
    cp-comm-type
FSDP gathers weights for each use, so two versions cannot be kept. Use data parallelism, with
--use-distributed-optimizer.
    use-megatron-fsdp use-torch-fsdp2 fsdp-manual-registration create-all-gather-group data-parallel-sharding-strategy
    outer-dp-sharding-strategy no-gradient-reduce-div-fusion fsdp-double-buffer suggested-communication-unit-size
    keep-fp8-transpose-cache enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward megatron-fsdp-*
    fsdp-db-use-persist-buf-on-alloc-fail ckpt-format=fsdp_dtensor ckpt-format=torch_dcp
weights would be gathered for each use, so two versions cannot be kept.
    tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
untested: the schedule reduces over one data-parallel group. Use 1.
    num-distributed-optimizer-instances
the optimizer steps all layers at once. Use --overlap-param-gather alone.
    overlap-param-gather-with-optimizer-step
the schedule has two gradient buffers of its own and runs the reduction itself.
    ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation
Megatron's own schedules run the postponed work; a delayed schedule has no bubble for it, and it is untested with 1f1b.
    defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute overlap-moe-expert-parallel-comm
    overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release high-priority-a2a-comm-stream
    overlap-p2p-communication-warmup-flush microbatch-group-size-per-virtual-pipeline-stage
every link and reduction of the schedule has a process group of its own, which Megatron's choice does not reach. Leave
it out; NCCL's environment variables reach all groups.
    pipeline-model-parallel-comm-backend use-ring-exchange-p2p use-sharp sharp-enabled-group use-nccl-ub
    disable-symmetric-registration nccl-communicator-config-path high-priority-stream-groups
recomputed activations would be cut and gathered again; untested. Use --sequence-parallel, which cuts them anyway.
    distribute-saved-activations
process groups would not be made.
    lazy-mpu-init fake-process-group
# Kernels
FP8 and FP4 are untested: quantized copies of the weights would have to follow their versions. Use --bf16.
    fp8-* no-fp8-wgrad first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 fp4-*
    te-precision-config-file moe-router-padding-for-quantization moe-router-padding-for-fp8
    reuse-grad-buf-for-mxfp8-param-ag
CUDA graphs hold fixed weight addresses, which a delayed schedule switches, and Megatron's step loop captures them.
    enable-cuda-graph external-cuda-graph cuda-graph-* optimizer-cuda-graph te-rng-tracker inference-rng-tracker
optimizers step on fp32 gradients, weights and state.
    use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
offloading is untested: activations of two batches, and two versions of the weights, are in use at once. Use
--recompute-granularity, or --use-distributed-optimizer.
    optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d
    no-pin-cpu-grads no-pin-cpu-params cpu-offloading-* fine-grained-activation-offloading offload-modules
    min-offloaded-tensor-size delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks
    activation-offload-fraction fine-grained-offloading-max-inflight-offloads moe-paged-stash*
    moe-expert-rank-capacity-factor
these fused kernels and buffers were never run under weights that change their address.
    tp-comm-* no-tp-comm-* fused-residual-rmsnorm use-transformer-engine-op-fuser use-te-activation-func
    use-grouped-gemm-for-shared-expert use-grouped-gemm-for-dense-mlp moe-single-grouped-weight moe-single-grouped-bias
    moe-shared-expert-glu-interleave-size moe-mlp-glu-interleave-size mla-down-proj-fusion symmetric-ar-type
    transformer-impl=inference_optimized batch-invariant-mode use-kitchen-attention kitchen-attention-backend
    moe-shared-expert-overlap
DeepEP, HybridEP and NCCL-EP are untested: their buffers hold one batch. Use --moe-token-dispatcher-type alltoall.
    moe-token-dispatcher-type=flex moe-enable-deepep moe-flex-* moe-deepep-num-sms moe-permute-fusion-into-hybridep
    moe-hybridep-* moe-ncclep-*
# Initial weights
not supported: initial weights are drawn on the run's device, from the seed and each parameter's name, so that every
layout starts from the same model.
    use-cpu-initialization init-model-with-meta-device
all data-parallel replicas start from the same weights and draw from one stream.
    data-parallel-random-init
the fixed bias is in no checkpoint, so a resumed run would route in another way. Use --moe-router-force-load-balancing
for benchmarks.
    moe-router-force-biased
Megatron's model builder pads all the same. Give --padded-vocab-size N.
    no-pad-vocab-size
Megatron-LM 0.19 passes it on under a name that its TransformerConfig does not have. Use --init-method-std.
    init-method-xavier-uniform
Megatron-Core has no such model and would ignore it.
    apply-residual-connection-post-layernorm
# No longer valid
Megatron no longer takes it. Use --micro-batch-size.
    batch-size
Megatron no longer takes it. Use --lr-warmup-fraction.
    warmup
Megatron no longer takes it. Use --tensor-model-parallel-size.
    model-parallel-size
Megatron no longer takes it. Use --recompute-granularity.
    checkpoint-activations
# By condition
with a gradient delay: its dynamic loss scale decides about a step after later forwards have run. Use --bf16.
    fp16
with a gradient delay: it carries statistics from one micro-batch to the next, and micro-batches of two batches are in
flight. Use aux_loss or seq_aux_loss.
    moe-router-load-balancing-type=global_aux_loss moe-router-load-balancing-type=quantile_balancing
on CPUs: it asks CUDA. Use the memory of --dry-run.
    record-memory-history log-memory-to-tensorboard
on CPUs: it needs a GPU. Leave it out, or run on GPUs.
    transformer-impl=transformer_engine distributed-backend=nccl cross-entropy-loss-fusion moe-permute-fusion
    moe-router-fusion
without --multi-latent-attention: it would be ignored. Add --multi-latent-attention.
    q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim
""",
)
