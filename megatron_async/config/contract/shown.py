# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Options of Megatron's that have the effect that they have in Megatron-LM, after the test that shows it.

tests/distributed/options.py gives each of its options to a short delayed pipeline run and compares effect and numbers
(`make options`). tests/unit/config/test_contract.py shows that a value reaches the code that reads it, where the effect
needs a GPU or a service.
"""

from megatron_async.config.contract.row import table

ROWS = table(
    "as in Megatron",
    """
tests/distributed/options.py: part of the model, which is Megatron-Core's
    hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels hidden-dropout
    attention-dropout norm-epsilon apply-layernorm-1p add-qkv-bias glu-linear-offset activation-func-clamp-value
    rotary-interleaved qk-l2-norm init-method-std embedding-init-method-std use-mup mup-base-hidden-size
    mup-embedding-mult mup-output-mult mup-base-head-dim mup-attn-scale-power apply-query-key-layer-scaling window-size
    window-attn-skip-freq position-embedding-type use-rotary-position-embeddings rotary-base rotary-percent
    rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor no-rope-freq squared-relu quick-geglu
    make-vocab-size-divisible-by padded-vocab-size softmax-type attention-softmax-in-fp32 qk-layernorm normalization
    swiglu disable-bias-linear attention-output-gate linear-conv-kernel-dim mamba-num-heads max-position-embeddings
    untie-embeddings-and-output-weights
tests/distributed/options.py: part of the experts, which are Megatron-Core's
    moe-router-num-groups moe-router-group-topk moe-router-pre-softmax moe-router-topk-scaling-factor moe-router-dtype
    moe-shared-expert-intermediate-size moe-shared-expert-gate moe-input-jitter-eps moe-expert-capacity-factor
    moe-pad-expert-input-to-capacity moe-token-drop-policy moe-layer-recompute moe-apply-probs-on-input
    moe-router-quantile-balancing-ema moe-router-force-load-balancing
tests/distributed/options.py: rate, decay and optimizer by parameter
    apply-wd-to-qk-layernorm no-weight-decay-cond-type adam-beta1 adam-beta2 adam-eps weight-decay lr-wsd-decay-style
    lr-wsd-decay-iters lr-warmup-fraction lr-warmup-init start-weight-decay end-weight-decay weight-decay-incr-style
    decoupled-lr decoupled-min-lr lr-decay-iters sgd-momentum lion-beta2 muon-nesterov muon-scale-mode
    muon-coefficient-type muon-extra-scale-factor
tests/distributed/options.py: layout, memory and precision
    dataloader-type recompute-activations mlp-chunks-for-training account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split decoder-last-pipeline-num-layers num-layers-per-virtual-pipeline-stage
    no-overlap-p2p-communication overlap-grad-reduce no-align-grad-reduce ddp-num-buckets ddp-bucket-size
    ddp-pad-buckets-for-high-nccl-busbw use-tp-pp-dp-mapping accumulate-allreduce-grads-in-fp32
    no-clone-scatter-output-in-embedding enable-experimental dump-param-to-param-group-map expert-tensor-parallel-size
    num-virtual-stages-per-pipeline-rank fp16 loss-scale
tests/distributed/matrix.py: every schedule and layout equals the delay oracle in one process
    tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel expert-model-parallel-size bf16
    num-experts moe-ffn-hidden-size moe-router-topk moe-router-score-function moe-router-enable-expert-bias
    moe-aux-loss-coeff moe-token-dispatcher-type use-distributed-optimizer optimizer clip-grad global-batch-size
    train-iters
tests/distributed/matrix.py: multi-latent attention equals the delay oracle in one process
    multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rope-type
tests/unit/models/test_latent_attention.py: YaRN of multi-latent attention, equal to transformers'
    rotary-scaling-factor mscale mscale-all-dim
tests/distributed/jobs.py: an argument of every training run that the tests compare with another one
    num-layers seq-length vocab-size tokenizer-type mock-data micro-batch-size lr min-lr lr-decay-style lr-warmup-iters
    seed num-workers eval-iters eval-interval
tests/distributed/test_matrix.py: compared with the delay oracle
    calculate-per-token-loss grad-reduce-in-bf16 decoder-first-pipeline-num-layers recompute-granularity
    recompute-method recompute-num-layers
tests/distributed/test_models.py: compared with the delay oracle
    experimental-attention-variant linear-key-head-dim linear-value-head-dim linear-num-key-heads
    linear-num-value-heads linear-attention-freq pipeline-model-parallel-layout reset-attention-mask
tests/distributed/test_expert_balance.py: balance and losses of the experts are logged and compared
    recompute-modules moe-layer-freq moe-router-bias-update-rate moe-z-loss-coeff
tests/distributed/test_router_losses.py: router gradients
    moe-router-load-balancing-type moe-grouped-gemm
tests/distributed/test_optimizers.py: compared with the delay oracle
    qk-clip qk-clip-alpha qk-clip-threshold log-max-attention-logit muon-momentum muon-no-split-qkv
    muon-fp32-matmul-prec muon-num-ns-steps muon-tp-mode muon-scalar-optimizer lion-beta1
tests/distributed/matrix.py: Megatron-Core's HybridModel under every schedule
    hybrid-layer-pattern mamba-state-dim mamba-head-dim mamba-num-groups
tests/unit/models/test_hybrid.py: the older name of --hybrid-layer-pattern
    hybrid-override-pattern
tests/unit/training/test_collector.py: the allocator's free memory is returned after batches and evaluations; with a
delay where the pipeline drains
    empty-unused-memory-level
tests/distributed/test_options.py: the pipeline drains there; unequal weights end the run before they are saved
    check-weight-hash-across-dp-replicas-interval
tests/distributed/test_freezing.py: the weights stay; losses and counters go on
    freeze-all-layers
tests/distributed/test_evaluation.py: values equal those of one process
    skip-train start-eval-at-iter full-validation multiple-validation-sets validation-set-names eval-global-batch-size
    eval-micro-batch-size test-data-path
tests/distributed/test_interventions.py: one learning-rate schedule or the other goes on
    override-opt_param-scheduler use-checkpoint-opt_param-scheduler
tests/distributed/test_batches.py: under every schedule and in the delay oracle
    iterations-to-skip step-batch-size-schedule train-samples lr-warmup-samples lr-decay-samples
tests/unit/mcore/test_batch_sizes.py: a schedule of batch sizes with the rule that Megatron-LM had; Megatron-Core 0.19
ignores it
    rampup-batch-size
tests/unit/training/test_collector.py: Python collects at the same batches on every rank
    manual-gc manual-gc-interval no-manual-gc-eval
tests/distributed/test_logs.py: totals equal those of one process; times of forwards, backwards and updates are those
of the trace
    log-params-norm log-num-zeros-in-grad log-world-size-to-tensorboard log-progress log-timers-to-tensorboard
tests/unit/training/test_writers.py: what TensorBoard's and wandb's writers are given
    log-validation-ppl-to-tensorboard tensorboard-log-interval moe-per-layer-logging wandb-save-dir wandb-entity
tests/unit/training/test_profiling.py: windows and counters, with a stand-in for CUDA's functions
    profile profile-step-start profile-step-end use-pytorch-profiler pytorch-profiler-collect-shapes
    pytorch-profiler-collect-callstack profile-ranks record-memory-history memory-snapshot-path record-shapes
    nvtx-ranges log-memory-to-tensorboard
tests/distributed/test_ddp_options.py: the same numbers; weights are gathered inside forwards
    ddp-average-in-collective overlap-param-gather no-align-param-gather
tests/distributed/test_resume.py: a resumed run equals the undisturbed one bit for bit
    save save-interval load ckpt-step exit-interval
tests/distributed/test_async_save.py: checkpoints are written beside training
    async-save
tests/distributed/test_conversion.py: weights without their run
    finetune
tests/unit/data/test_blend.py: data files, shares and splits
    data-path train-data-path valid-data-path data-args-path per-split-data-args-path split
tests/unit/data/test_datasets.py: samples of Megatron's GPTDataset
    data-cache-path reset-position-ids eod-mask-loss no-create-attention-mask-in-dataloader no-mmap-bin-files
    num-dataset-builder-threads mid-level-dataset-surplus allow-ambiguous-pad-tokens
tests/unit/data/test_prepare.py: Megatron's tokenizers
    tokenizer-model
tests/distributed/options.py: saved and loaded again, by Megatron's distributed checkpoints
    exit-on-missing-checkpoint no-ckpt-fully-parallel-save ckpt-fully-parallel-load
    ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group
    ckpt-fully-parallel-load-process-group ckpt-assume-constant-structure no-ckpt-load-validate-sharding-integrity
    dist-ckpt-strictness no-save-optim no-save-rng no-load-optim no-load-rng
tests/unit/checkpoint/test_rules.py: torch_dist alone
    ckpt-format
tests/unit/training/test_writers.py: each iteration once
    tensorboard-dir tensorboard-queue-size
tests/unit/models/test_kernels.py: kernels that Megatron-Core's layers call; stand-ins where they need a GPU. On CPUs
fused ones are off
    attention-backend flash-attention-version disable-bf16-reduced-precision-matmul cross-entropy-loss-fusion
    no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
    moe-router-fusion
tests/distributed/test_standins.py: fused weight gradients, with a stand-in for Apex's kernel. On CPUs they are off
    no-gradient-accumulation-fusion
tests/unit/config/test_contract.py: kernels of Megatron-Core, which reads them from its TransformerConfig; on CPUs
fused ones are off
    moe-permute-fusion cross-entropy-fusion-impl no-persist-layer-norm
tests/unit/config/test_effects.py: the loss scale, learning rate or tokenizer that Megatron builds from them
    initial-loss-scale min-loss-scale loss-scale-window hysteresis lr-wsd-decay-samples tiktoken-pattern
    tiktoken-num-special-tokens null-tokenizer-eod-id null-tokenizer-pad-id
tests/unit/config/test_effects.py: how process groups and loggers are made, and the variables of torch's flight
recorder
    distributed-backend distributed-timeout-minutes logging-level flight-recorder-dump-path
    flight-recorder-trace-buffer-size no-flight-recorder-dump-on-timeout flight-recorder-include-stack-trace
    no-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec
tests/unit/config/test_effects.py: groups that Megatron makes, functions that it compiles
    disable-gloo-process-groups disable-jit-fuser
tests/unit/data/test_datasets.py: the same samples without reading some files
    per-dataset-sequences-path dataloader-fast-cache-load dataloader-defer-npy-index-mmap
tests/unit/data/test_tokenizer_options.py: what Megatron's tokenizers make of a text
    vocab-file merge-file tokenizer-metadata tokenizer-special-tokens tokenizer-sentencepiece-legacy
    no-tokenizer-sentencepiece-ignore-extra-whitespaces tokenizer-hf-no-include-special-tokens trust-remote-code
tests/unit/config/test_contract.py: handed to transformers, whose version 5 has one kind of tokenizers
    tokenizer-hf-no-use-fast
tests/distributed/test_options.py: when a run ends, which checkpoints stay, and where it begins
    exit-duration-in-mins save-retain-interval pretrained-checkpoint
tests/distributed/test_transformer_engine.py: equal to the delay oracle, with a stand-in for Transformer Engine's
layers
    use-fused-weighted-squared-relu
tests/unit/planning/test_full_size.py: for runs that load every weight
    no-initialization
tests/unit/platform/test_packages.py: torch or Transformer Engine
    transformer-impl deterministic-mode
tests/distributed/test_steadiness.py: every so many batches have a log line
    log-interval
tests/distributed/test_resume_faults.py: one wandb run for all starts
    wandb-project wandb-exp-name
tests/unit/repository/test_slurm.py: ends the run with a checkpoint
    exit-signal
""",
)
