# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Launch scripts of the usual kinds pass as they are, and with the three arguments of an asynchronous run added.

Checked as on a machine with GPUs, Transformer Engine and Apex; nothing is computed.
"""

import os

import pytest

from megatron_async import platform

platform.activate("cpu")

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from megatron_async.config import arguments  # noqa: E402
from megatron_async.platform import gpu  # noqa: E402
from megatron_async.platform.packages import OptionalPackage  # noqa: E402

ASYNCHRONOUS = "--pipeline-schedule 2bw --optimizer muon --staleness-correction error-feedback"

RUN = """
    --micro-batch-size 1 --global-batch-size 512 --train-iters 500000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
    --lr-decay-iters 430000 --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9
    --adam-beta2 0.95 --init-method-std 0.006 --bf16 --mock-data --split 949,50,1 --vocab-size 32000
    --tokenizer-type NullTokenizer --num-workers 6 --no-mmap-bin-files --no-create-attention-mask-in-dataloader
    --eval-iters 10 --eval-interval 1000 --distributed-timeout-minutes 60 --exit-duration-in-mins 230
    --exit-signal-handler --manual-gc --manual-gc-interval 100 --use-mcore-models --transformer-impl transformer_engine
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --no-check-for-nan-in-loss-and-grad
"""
LOGS = """
    --log-interval 1 --log-throughput --log-timers-to-tensorboard --log-memory-to-tensorboard --log-params-norm
    --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard --log-progress --timing-log-level 2
    --timing-log-option minmax --tensorboard-dir board --wandb-project runs --wandb-exp-name one
"""
SAVES = """
    --save checkpoints --save-interval 1000 --save-retain-interval 10000 --ckpt-format torch_dist
    --ckpt-fully-parallel-save --ckpt-fully-parallel-load --dist-ckpt-strictness log_all --auto-detect-ckpt-format
    --async-save --use-persistent-ckpt-worker --async-strategy mcore
"""
LLAMA_BLOCK = """
    --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
"""
EXPERTS = """
    --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall
    --moe-aux-loss-coeff 1e-3
"""
SCRIPTS = {
    "GPT-3": f"""
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
        --attention-backend auto --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel
        {RUN} {LOGS} --save checkpoints --save-interval 10000
    """,
    "Llama": f"""
        --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 8192
        --max-position-embeddings 131072 --rotary-base 500000 --rotary-percent 1.0 --use-rope-scaling --no-rope-fusion
        --no-masked-softmax-fusion --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --use-flash-attn
        --empty-unused-memory-level 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 5
        --sequence-parallel {LLAMA_BLOCK} {RUN} {LOGS} {SAVES}
    """,
    "Mixtral": f"""
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 4096
        --max-position-embeddings 32768 --no-position-embedding --rotary-base 1000000 --num-experts 8
        --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --expert-model-parallel-size 8
        --pipeline-model-parallel-size 4
        {LLAMA_BLOCK} {EXPERTS} {RUN} {LOGS} {SAVES}
    """,
    "DeepSeek": f"""
        --num-layers 28 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 16
        --seq-length 4096 --max-position-embeddings 4096 --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion --attention-dropout 0
        --hidden-dropout 0 --qk-layernorm --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128
        --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707
        --num-experts 64 --moe-layer-freq ([0]*1+[1]*27) --moe-ffn-hidden-size 1408 --moe-router-topk 6
        --moe-shared-expert-intermediate-size 2816 --moe-router-load-balancing-type seq_aux_loss
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
        --moe-router-topk-scaling-factor 2.446 --recompute-granularity selective --recompute-modules mla_up_proj moe_act
        --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 {EXPERTS} {RUN} {LOGS} {SAVES}
    """,
    "Nemotron-H": f"""
        --hybrid-override-pattern {"M-M-M-M*-M-M-" * 4} --is-hybrid-model --num-layers 52
        --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hidden-size 4096
        --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
        --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128 --squared-relu --normalization RMSNorm
        --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type none --seq-length 8192
        --max-position-embeddings 8192 --attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 4
        --pipeline-model-parallel-size 4 --sequence-parallel {RUN} {LOGS} {SAVES}
    """,
}
DEVICES = {"GPT-3": 256, "Llama": 64, "Mixtral": 64, "DeepSeek": 64, "Nemotron-H": 64}


@pytest.fixture
def gpus(monkeypatch):
    """A machine with everything that a run on GPUs wants, as far as checks of arguments look."""
    monkeypatch.setattr(platform, "choose", lambda requested: ("cuda", "device: cuda"))
    monkeypatch.setattr(OptionalPackage, "usable", True)
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *version: True)
    for module, kernels in {
        rope_utils: "fused_apply_rotary_pos_emb fused_apply_rotary_pos_emb_thd",
        moe_utils: "fused_permute fused_permute_with_probs fused_sort_chunks_by_index "
        "fused_sort_chunks_by_index_with_probs fused_unpermute",
    }.items():
        for kernel in kernels.split():
            monkeypatch.setattr(module, kernel, object())
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):  # set for the layers of a plan
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_three_arguments_make_a_script_asynchronous(gpus, monkeypatch, name):
    monkeypatch.setenv("WORLD_SIZE", str(DEVICES[name]))
    parsed = []
    for added, queues in (("", "1"), (ASYNCHRONOUS, "32")):
        monkeypatch.setenv(gpu.QUEUES, queues)
        parsed.append(arguments.parse([*SCRIPTS[name].split(), *added.split()]))
    synchronous, asynchronous = map(vars, parsed)
    assert (asynchronous["pipeline_schedule"], asynchronous["optimizer"]) == ("2bw", "muon")
    changed = {name for name, value in asynchronous.items() if value != synchronous.get(name)}
    assert not changed & {
        "hidden_size",
        "seq_length",
        "global_batch_size",
        "lr",
        "bf16",
        "recompute_granularity",
        "save",
    }
    new = [notice for notice in parsed[1]._notices if notice not in parsed[0]._notices]
    assert all("has no effect here" in notice for notice in new)
    assert "--overlap-param-gather" in {notice.split()[0] for notice in new}
    assert os.environ[gpu.QUEUES] == "32"
