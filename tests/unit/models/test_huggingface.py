# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 (the platform comes before everything of Megatron)
"""Logits of converted models against transformers, fp32; round trips bit for bit; folders that must be refused."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.testing import assert_close

from megatron_async import platform

platform.activate("cpu")

from megatron_async.cli import convert as command
from megatron_async.config import arguments
from megatron_async.models import one_process
from megatron_async.models.huggingface import convert
from megatron_async.models.huggingface import folder as folders
from megatron_async.models.huggingface.architecture import (
    Architecture,
    ConversionProblems,
    from_arguments,
    from_config,
    to_arguments,
    to_config,
)
from megatron_async.models.huggingface.families import FAMILIES

MODELS = {
    **{name: f"--model {name}" for name in ("smollm2-135m-mini", "moe-2b-mini", "moe-10b-hybrid-mini")},
    "nemotron": "--hybrid-layer-pattern M-M*-M* --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --kv-channels 24 --seq-length 128 --max-position-embeddings 128 "
    "--normalization RMSNorm --disable-bias-linear --squared-relu --position-embedding-type none --mamba-head-dim 16 "
    "--mamba-num-groups 2 --mamba-state-dim 8 --untie-embeddings-and-output-weights",
}
LATENT = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear "
    "--position-embedding-type rope --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 12 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 20 --qk-layernorm --untie-embeddings-and-output-weights"
)
CHOICE = (
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 4 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type none --moe-router-dtype fp32"
)
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-layer-freq [0]*1+[1]*3"
YARN = "--rope-type yarn --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 1"
MODELS |= {
    "latent": f"{LATENT} --rope-type rope",
    "latent, yarn": f"{LATENT} {YARN}",
    "latent, experts": f"{LATENT} --rope-type rope {CHOICE} {SHARED} --moe-router-topk-scaling-factor 2.5",
    "latent, groups": f"{LATENT} {YARN} {CHOICE} {SHARED} --moe-router-num-groups 4 --moe-router-group-topk 2",
}
VOCABULARY, LENGTH = 101, 70


def parse(*argv: str):
    return arguments.parse(
        ["--device", "cpu", "--mock-data", "--tokenizer-type", "NullTokenizer", "--micro-batch-size", "1"]
        + ["--train-iters", "1", "--make-vocab-size-divisible-by", "8", "--padded-vocab-size", "104", *argv]
    )


def logits_of(model, tokens):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, None)[..., :VOCABULARY].float()


def randomize(model):
    """Every parameter away from its initial value, so that none can be left out unnoticed."""
    torch.manual_seed(5)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    with torch.no_grad():
        for param in (*model.parameters(), *biases):
            param.add_(torch.randn_like(param) * 0.05)


def architecture_of(folder: Path) -> Architecture:
    return from_config(folders.read_config(folder))


def transformers_logits(folder: Path, tokens):
    from transformers import AutoConfig, AutoModelForCausalLM

    # Loading draws values, and leaves tables that no file holds, to torch functions that the CPU platform replaces.
    as_computed = {"dtype": torch.float32, "attn_implementation": "eager"}
    if architecture_of(folder).name == "NemotronHForCausalLM":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **as_computed).eval()
        model.load_state_dict(load_file(folder / "model.safetensors"))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, **as_computed).eval()
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        return model(tokens, use_cache=False).logits.float()


def exported(folder: Path, *argv: str):
    """A random model in a Hugging Face folder, its logits, its tensors."""
    args = parse("--vocab-size", str(VOCABULARY), *argv)
    architecture = from_arguments(args, VOCABULARY)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with one_process.model(args, initialize=True) as model:
        randomize(model)
        expected = logits_of(model, tokens)
        weights = {name: tensor.clone() for name, tensor in convert.to_hugging_face(model, architecture)}
    folders.write(folder, to_config(architecture, "float32", 0), iter(weights.items()), tokenizer=None)
    return tokens, expected, weights


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    tokens, expected, _ = exported(tmp_path, *MODELS[name].split())
    found = transformers_logits(tmp_path, tokens)
    assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_help_and_page_name_the_families():
    """The help is a text because the registry, and with it Megatron, takes seconds to import."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| Architectures |"))
    for text in (command.__doc__, row):
        assert sorted(re.findall(r"\w+ForCausalLM", text)) == sorted(FAMILIES)


def test_a_family_from_outside_is_one_registry_entry(tmp_path, monkeypatch):
    """Mistral without its window: Llama under another name, with one more fixed key."""
    mistral = replace(
        FAMILIES["LlamaForCausalLM"],
        name="MistralForCausalLM",
        model_type="mistral",
        describes=lambda args: args.num_query_groups == 2,
        fixed_keys={"hidden_act": "silu", "sliding_window": None},
    )
    monkeypatch.setitem(FAMILIES, mistral.name, mistral)
    model = "--model smollm2-135m-mini --num-attention-heads 8".split()
    assert from_arguments(parse("--vocab-size", "101", *model), 101).name == "LlamaForCausalLM"
    tokens, expected, _ = exported(tmp_path, *model, "--num-query-groups", "2")
    assert folders.read_config(tmp_path)["architectures"] == [mistral.name]
    assert_close(transformers_logits(tmp_path, tokens), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    architecture = architecture_of(tmp_path)
    assert from_arguments(parse(*to_arguments(architecture)), VOCABULARY) == architecture
    with pytest.raises(ConversionProblems, match="sliding_window is 4096; only None"):
        from_config(folders.read_config(tmp_path) | {"sliding_window": 4096})


def test_logits_of_the_real_smollm2_135m(tmp_path):
    tokens, expected, _ = exported(tmp_path, "--model", "smollm2-135m", "--num-layers", "3")
    found = transformers_logits(tmp_path, tokens)
    assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_read_and_written_again_is_bit_equal(name, tmp_path):
    tokens, expected, weights = exported(tmp_path, *MODELS[name].split())
    architecture = architecture_of(tmp_path)
    with one_process.model(parse(*to_arguments(architecture)), initialize=False) as model:
        assert convert.from_hugging_face(model, architecture, tmp_path) == []
        again = dict(convert.to_hugging_face(model, architecture))
        assert again.keys() == weights.keys()
        for key, value in weights.items():
            assert torch.equal(again[key], value), key
        assert torch.equal(logits_of(model, tokens), expected)


def test_many_shards_hold_the_same(tmp_path):
    _, _, weights = exported(tmp_path / "one", "--model", "smollm2-135m-mini")
    config = to_config(architecture_of(tmp_path / "one"), "float32", None)
    folders.write(tmp_path / "many", config, iter(weights.items()), tokenizer=None, shard_bytes=500_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    read = folders.Weights(tmp_path / "many", {name: tuple(value.shape) for name, value in weights.items()})
    assert all(torch.equal(read[name], value) for name, value in weights.items())
    (tmp_path / "many" / sorted(set(index["weight_map"].values()))[1]).unlink()
    with pytest.raises(ConversionProblems, match=r"model-00002-of-\d+\.safetensors: this shard is missing"):
        folders.Weights(tmp_path / "many", {})


def test_an_export_that_fails_leaves_no_shards(tmp_path):
    def tensors():
        yield "one", torch.zeros(8)
        yield "two", torch.zeros(8)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        folders.write(tmp_path, {}, tensors(), tokenizer=None, shard_bytes=32)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("index", ["{", "[]", "{}"])
def test_a_damaged_index_is_named(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConversionProblems, match=r"model\.safetensors\.index\.json: not an index of shards"):
        folders.Weights(tmp_path, {})


def test_a_start_that_cannot_be_written_leaves_no_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(one_process.distributed, "save_model_weights", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            one_process.save(torch.nn.Module(), argparse.Namespace(), tmp_path)


def test_wrong_tensors_are_all_named(tmp_path):
    _, _, weights = exported(tmp_path, "--model", "moe-2b-mini")
    architecture = architecture_of(tmp_path)
    weights["model.layers.2.mlp.experts.5.up_proj.weight"] = torch.zeros(3, 4)
    del weights["model.layers.1.self_attn.q_norm.weight"]
    weights["model.layers.0.self_attn.sinks"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors")
    args = parse(*to_arguments(architecture))
    with one_process.model(args, initialize=False) as model, pytest.raises(ConversionProblems) as wrong:
        convert.from_hugging_face(model, architecture, tmp_path)
    assert set(wrong.value.problems) == {
        "tensor model.layers.2.mlp.experts.5.up_proj.weight: expected [64, 128], found [3, 4].",
        "tensor model.layers.1.self_attn.q_norm.weight: missing; expected [8].",
        "tensor model.layers.0.self_attn.sinks [2]: unknown in this architecture.",
    }


def test_a_truncated_shard_is_named(tmp_path):
    exported(tmp_path, "--model", "smollm2-135m-mini")
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ConversionProblems, match=r"model.safetensors: not a whole safetensors file"):
        folders.Weights(tmp_path, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel; only LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu; only silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "position embedding of type yarn"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "position embedding of type linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; only 1.0"),
        ({"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta is 10000.5; .* whole numbers"),
        ({"rms_norm_eps": None, "hidden_size": None}, "no hidden_size, .*\n.* no rms_norm_eps, which LlamaForCausalLM"),
    ],
)
def test_other_architectures_are_refused(change, message, tmp_path):
    exported(tmp_path, "--model", "smollm2-135m-mini")
    config = folders.read_config(tmp_path) | change
    with pytest.raises(ConversionProblems, match=message):
        from_config(config)


def test_models_without_a_counterpart_are_refused():
    args = parse("--model", "smollm2-135m-mini", "--vocab-size", "101", "--add-qkv-bias")
    with pytest.raises(ConversionProblems, match="--add-qkv-bias is True; LlamaForCausalLM needs False"):
        from_arguments(args, 101)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model smollm2-135m-mini --rotary-percent 0.5", "--rotary-percent is 0.5; LlamaForCausalLM needs 1.0"),
        (
            "--model moe-10b-hybrid-mini --num-layers 4",
            "no --moe-shared-expert-intermediate-size: Qwen3NextForCausalLM",
        ),
    ],
)
def test_what_config_json_cannot_say_is_refused(words, message):
    args = parse(*words.split(), "--vocab-size", "101")
    if "hybrid" in words:
        args.moe_shared_expert_intermediate_size = None
    with pytest.raises(ConversionProblems, match=message):
        from_arguments(args, 101)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "NemotronHForCausalLM"])
def test_missing_keys_have_the_defaults_of_transformers(name):
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[FAMILIES[name].model_type]()
    keys, optional = FAMILIES[name].pairs, FAMILIES[name].defaults
    given = {key: getattr(known, key, None) for key in keys if key not in optional}
    found = from_config({"architectures": [name], **given})
    rotary = {"rope_theta": 10_000.0} | ({"partial_rotary_factor": 0.25} if name == "Qwen3NextForCausalLM" else {})
    rotary["rope_type"] = "default"
    assert known.rope_parameters == rotary
    for key in keys:
        if key == "full_attention_interval":
            assert known.layer_types.index("full_attention") + 1 == found[key]
        elif key == "head_dim" and name == "Qwen3MoeForCausalLM":
            assert found[key] == known.hidden_size // known.num_attention_heads
        else:
            assert found[key] == (rotary[key] if key in rotary else getattr(known, key, None)), key


def test_a_stored_copy_of_a_tied_head_is_taken_and_another_head_refused(tmp_path):
    _, _, weights = exported(tmp_path, "--model", "smollm2-135m-mini")
    architecture = architecture_of(tmp_path)
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with one_process.model(parse(*to_arguments(architecture)), initialize=False) as model:
        convert.from_hugging_face(model, architecture, tmp_path)
        assert torch.equal(dict(convert.to_hugging_face(model, architecture))["model.embed_tokens.weight"], head)
        head[3, 5] += 1
        save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        with pytest.raises(
            ConversionProblems, match=r"tensor lm_head\.weight: .* ties it to model\.embed_tokens\.weight"
        ):
            convert.from_hugging_face(model, architecture, tmp_path)


def test_rounded_tensors_are_named(tmp_path):
    """Qwen3-Next's folders hold decays in float32 among bfloat16 weights."""
    _, _, weights = exported(tmp_path, "--model", "moe-10b-hybrid-mini", "--num-layers", "4")
    mixed = {name: value if name.endswith("A_log") else value.bfloat16() for name, value in weights.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    architecture = architecture_of(tmp_path)
    with one_process.model(parse(*to_arguments(architecture), "--bf16"), initialize=False) as model:
        rounded = convert.from_hugging_face(model, architecture, tmp_path)
    assert rounded == [f"model.layers.{layer}.linear_attn.A_log" for layer in range(3)]
    with one_process.model(parse(*to_arguments(architecture)), initialize=False) as model:
        assert convert.from_hugging_face(model, architecture, tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model nemotron-h-mini", "'E' at position 5: .* sigmoid"),
        (f"{MODELS['nemotron']} --norm-epsilon 1e-6", "--layernorm-epsilon is 1e-06; NemotronHForCausalLM needs 1e-05"),
    ],
)
def test_hybrids_without_a_counterpart_are_refused_with_the_position(words, message):
    with pytest.raises(ConversionProblems, match=message):
        from_arguments(parse(*words.split(), "--vocab-size", "101"), 101)


def test_a_limit_of_dt_is_refused(tmp_path):
    exported(tmp_path, *MODELS["nemotron"].split())
    config = folders.read_config(tmp_path)
    assert from_config(config)["hybrid_override_pattern"] == "M-M*-M*"
    del config["time_step_min"]
    with pytest.raises(ConversionProblems, match=r"time_step_min is 0\.001; only 1e-12"):
        from_config(config)


@pytest.mark.parametrize("end", ["</s>", {"content": "</s>", "special": True}, None])
def test_the_end_of_a_text_comes_from_the_tokenizer(end, tmp_path):
    vocabulary = {"a": 0, "</s>": 1, "<|endoftext|>": 2}
    Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end} if end else {}))
    tokenizer, token = folders.read_tokenizer(tmp_path)
    assert (tokenizer.get_vocab_size(), token) == (3, 1 if end else 2)


FULL_SIZE = ("smollm2-135m", "smollm2-360m", "moe-2b", "moe-10b-hybrid")


@pytest.mark.parametrize("name", [*FULL_SIZE, *(name for name in MODELS if "latent" in name)])
def test_config_and_arguments_describe_the_same_model(name):
    """args -> architecture -> config.json -> architecture -> args -> architecture."""
    args = parse("--vocab-size", "101", *MODELS[name].split()) if name in MODELS else parse("--model", name)
    architecture = from_arguments(args, args.vocab_size)
    config = json.loads(json.dumps(to_config(architecture, "bfloat16", None)))
    assert from_config(config) == architecture
    assert from_arguments(parse(*to_arguments(architecture)), args.vocab_size) == architecture


@pytest.mark.parametrize(("full", "interval"), [((2, 5), 3), ((0, 1, 2, 3, 4, 5, 6, 7), 1), ((), 9)])
def test_every_nth_layer_of_qwen3_next_has_full_attention(full, interval):
    args = parse("--model", "moe-10b-hybrid-mini", "--vocab-size", "101")
    kinds = ["full_attention" if layer in full else "linear_attention" for layer in range(8)]
    config = to_config(from_arguments(args, 101), "float32", None) | {"layer_types": kinds}
    assert from_config(config)["full_attention_interval"] == interval
    with pytest.raises(ConversionProblems, match=r"layer_types is .*; only a full_attention layer every n-th"):
        from_config(config | {"layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("latent", {"layernorm_epsilon": 1e-5}, "--layernorm-epsilon is 1e-05; DeepseekV3ForCausalLM needs 1e-06"),
        ("latent", {"rotary_scaling_factor": 2.0}, "--rotary-scaling-factor 2.0 with --rope-type rope"),
        ("latent", {"q_lora_rank": None}, "no --q-lora-rank"),
        ("latent, yarn", {"mscale_all_dim": 0.0}, "--mscale 0.7 --mscale-all-dim 0.0: "),
        ("latent, experts", {"moe_layer_freq": [1, 0, 0, 0]}, "has its dense layers first"),
        (
            "latent, experts",
            {"moe_router_score_function": "softmax"},
            "softmax; DeepseekV3ForCausalLM needs sigmoid",
        ),
        ("latent, experts", {"moe_shared_expert_intermediate_size": 24}, "-size 24: .* multiple of --moe-ffn-hidden"),
        ("latent, experts", {"moe_router_topk": 1}, "1 expert for each token"),
        ("latent, groups", {"moe_router_group_topk": 4}, "Megatron by 4 // 4 = 1"),
    ],
)
def test_latent_models_without_a_counterpart_are_refused(name, change, message):
    args = parse("--vocab-size", "101", *MODELS[name].split())
    with pytest.raises(ConversionProblems, match=message):
        from_arguments(argparse.Namespace(**vars(args) | change), 101)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is null"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; only 1e-06"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"num_experts_per_tok": 1}, "1 expert for each token"),
        ({"n_group": 2, "topk_group": 1}, r"4 experts from 1 of 2 groups: .* 4 // 1 = 4"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1, "beta_fast": 16}},
            "no factor.*\n.*beta_fast is",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "attention_factor": 1.2}}, "attention_factor"),
    ],
)
def test_deepseek_folders_that_megatron_cannot_be_are_refused(change, message, tmp_path):
    exported(tmp_path, *MODELS["latent, experts"].split())
    config = folders.read_config(tmp_path)
    assert from_config(config)["n_routed_experts"] == 8
    with pytest.raises(ConversionProblems, match=message):
        from_config(config | change)


def test_a_checkpoint_holds_all_that_a_folder_does(tmp_path):
    """Biases of routers are no parameters."""
    _, _, weights = exported(tmp_path / "hf", *MODELS["latent, groups"].split())
    architecture = architecture_of(tmp_path / "hf")
    args = parse(*to_arguments(architecture))
    with one_process.model(args, initialize=False) as model:
        convert.from_hugging_face(model, architecture, tmp_path / "hf")
        checkpoint = one_process.save(model, args, tmp_path / "start")
    assert convert.export(checkpoint, tmp_path / "again", vocabulary=VOCABULARY) == architecture
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], value) for name, value in weights.items())


def test_a_router_bias_stays_in_float32(tmp_path):
    _, _, weights = exported(tmp_path, *MODELS["latent, experts"].split())
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    bias = weights[name]
    assert bias.abs().min() > 0 and not torch.equal(bias.bfloat16().float(), bias)
    save_file({key: value if key == name else value.bfloat16() for key, value in weights.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    architecture = architecture_of(tmp_path)
    with one_process.model(parse(*to_arguments(architecture), "--bf16"), initialize=False) as model:
        rounded = convert.from_hugging_face(model, architecture, tmp_path)
        again = dict(convert.to_hugging_face(model, architecture))
    assert name not in rounded and torch.equal(again[name], bias)


def test_padding_of_the_vocabulary_is_not_exported(tmp_path):
    exported(tmp_path, "--model", "moe-2b-mini")
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape[0] == VOCABULARY
    assert weights["lm_head.weight"].shape[0] == VOCABULARY
