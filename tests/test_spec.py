"""Sizes are read from config.json: the released shapes, flat and nested, and what is not."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from tests.released import RELEASED, released_config, released_spec
from vlmtrain.core.config import ParallelSection, TrainConfig
from vlmtrain.core.layout import LayoutError
from vlmtrain.core.spec import ModelConfigError
from vlmtrain.models.family import parse_spec, read_spec
from vlmtrain.training.setup import run_layout
from vlmtrain.training.trainer import check

FLAT = released_config("qwen2_5_vl-7b")


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes(name):
    hidden, layers, heads, kv, mlp, vocab, tied, vision_mlp = RELEASED[name]
    spec = released_spec(name)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (hidden, layers, heads)
    assert (spec.num_kv_heads, spec.intermediate_size, spec.vocab_size) == (kv, mlp, vocab)
    assert spec.head_dim == 128 and spec.tie_word_embeddings == tied
    vision = spec.vision
    assert vision.intermediate_size == (vision_mlp or 5120)
    assert vision.out_hidden_size == hidden
    sizes = (vision.depth, vision.hidden_size, vision.head_dim, vision.patch_dim)
    windows = vision.window_size, vision.full_attention_layers
    if spec.family.startswith("qwen3_vl"):
        small = vision_mlp == 4096
        assert sizes == ((24, 1024, 64, 1536) if small else (27, 1152, 72, 1536))
        assert vision.deepstack_layers == ((5, 11, 17) if small else (8, 16, 24))
        assert vision.position_side == 48 and windows == (None, ())
        assert not spec.qkv_bias and spec.qk_norm and spec.interleaved_mrope
        mixture = spec.num_experts, spec.num_experts_per_tok, spec.moe_intermediate_size
        width = 768 if hidden == 2048 else 1536
        assert mixture == ((128, 8, width) if spec.family == "qwen3_vl_moe" else (0, 0, 0))
        return
    assert sizes == (32, 1280, 80, 1176)
    assert windows == ((None, ()) if vision_mlp is None else (112, (7, 15, 23, 31)))
    assert spec.qkv_bias and not spec.qk_norm and not vision.deepstack_layers


def test_nested_form_says_the_same():
    top = {k: v for k, v in FLAT.items() if k.endswith("_id") or k in ("model_type",)}
    vision = FLAT["vision_config"]
    text = {k: v for k, v in FLAT.items() if k not in top and k != "vision_config"}
    theta = text.pop("rope_theta")
    section = text.pop("rope_scaling")["mrope_section"]
    text["rope_parameters"] = {"mrope_section": section, "rope_theta": theta}
    nested = {
        **top,
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
    }
    assert parse_spec(nested) == parse_spec(FLAT)


@pytest.mark.parametrize("name", ["qwen2_5_vl-7b", "qwen3_vl-8b", "qwen3_vl_moe-30b"])
def test_keys_are_looked_for_where_transformers_looks(name):
    """Beside a text_config those at the top are none of the language model's."""
    config = released_config(name)
    text = config.get("text_config") or {k: v for k, v in config.items() if k != "vision_config"}
    rope = {**(text.pop("rope_scaling", None) or {}), **text.pop("rope_parameters", {})}
    rope.pop("rope_theta", None)
    for change in ({}, {"rope_theta": 2e6}):
        said = {k: v for k, v in text.items() if k not in ("rope_theta", "rms_norm_eps")}
        said |= {"rope_scaling": rope, **change}
        top = {k: v for k, v in config.items() if k.endswith("_id") or k == "vision_config"}
        both = {**top, "model_type": config["model_type"], "text_config": said}
        spec = parse_spec({**both, "rope_theta": 7e6, "rms_norm_eps": 0.5})
        actual = AutoConfig.for_model(**both).text_config
        theta = actual.rope_parameters["rope_theta"]
        assert (spec.rope_theta, spec.norm_eps) == (theta, actual.rms_norm_eps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llava"}, ["llava", "qwen2_vl"]),
        ({"model_type": "qwen3_5"}, ["qwen3_5", "qwen3_vl"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_attention_heads": 27}, ["3584", "27"]),
        ({"rope_scaling": {"mrope_section": [16, 24]}}, ["mrope_section", "128"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"attention_dropout": 0.1}, ["attention_dropout is 0.1", "0"]),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "mrope_section": [16, 24, 24]}},
            ["rope_type is 'yarn'", "default"],
        ),
        ({"vision_config": None}, ["vision_config"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["quantized (awq)"]),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, ["quantized (fp8)"]),
    ],
)
def test_refused(change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**FLAT, **change}))
    with pytest.raises(ModelConfigError) as error:
        read_spec(tmp_path)
    for word in ["config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("text_config", {"attention_bias": True}, ["attention_bias is True", "False"]),
        ("text_config", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ("text_config", {"attention_dropout": 0.1}, ["attention_dropout is 0.1", "0"]),
        ("text_config", {"rope_parameters": {"rope_type": "yarn"}}, ["rope_type", "default"]),
        (
            "text_config",
            {
                "rope_scaling": {"type": "yarn", "mrope_section": [24, 20, 20]},
                "rope_parameters": {},
            },
            ["rope_type is 'yarn'", "default"],
        ),
        ("text_config", {"num_hidden_layers": 2}, ["deepstack_visual_indexes", "is 2"]),
        ("vision_config", {"num_position_embeddings": 2300}, ["2300", "2209"]),
        ("vision_config", {"deepstack_visual_indexes": [8, 27]}, ["[8, 27]", "0 to 26"]),
        ("vision_config", {"deepstack_visual_indexes": [16, 8]}, ["[16, 8]", "ascending"]),
        ("vision_config", {"out_hidden_size": 3584}, ["3584", "4096"]),
    ],
)
def test_qwen3_vl_refused(section, change, words):
    refuses("qwen3_vl-8b", section, change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder_sparse_step": 2}, ["decoder_sparse_step is 2", "1", "every layer has experts"]),
        ({"mlp_only_layers": [0]}, ["mlp_only_layers is [0]", "every layer has experts"]),
        ({"norm_topk_prob": False}, ["norm_topk_prob is False", "True"]),
        ({"output_router_logits": True, "router_aux_loss_coef": -1}, ["coef -1", "from 0 on"]),
        ({"num_experts": None}, ["missing"]),
        ({"num_experts_per_tok": 129}, ["129", "num_experts 128"]),
        ({"num_experts_per_tok": 1}, ["num_experts_per_tok 1 must be from 2"]),
        ({"moe_intermediate_size": 1024}, ["1024", "2048", "square"]),
    ],
)
def test_mixture_of_experts_refused(change, words):
    refuses("qwen3_vl_moe-30b", "text_config", change, words)


def test_a_window_below_a_merged_patch_is_refused():
    refuses("qwen2_5_vl-3b", "vision_config", {"window_size": 14}, ["window_size 14", "28"])


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize(
    ("name", "outer"),  # None: not said, where versions of transformers differ for Qwen3-VL
    [(n, o) for n in ("qwen2_5_vl-3b", "qwen3_vl-8b") for o in (True, False)]
    + [("qwen2_5_vl-3b", None)],
)
def test_embeddings_are_tied_where_transformers_ties_them(name, outer, inner):
    config = released_config(name)
    text = config.setdefault("text_config", dict(config))
    text["tie_word_embeddings"] = inner
    config.pop("tie_word_embeddings", None)
    if outer is not None:
        config["tie_word_embeddings"] = outer
    theirs = AutoConfig.for_model(**config).tie_word_embeddings
    assert parse_spec(config).tie_word_embeddings == theirs


@pytest.mark.parametrize("name", ["qwen3_vl-8b", "qwen3_vl_moe-30b"])
def test_what_a_config_does_not_say_is_what_transformers_takes(name):
    config = released_config(name)
    for key in ("rms_norm_eps", "head_dim"):
        config["text_config"].pop(key)
    config["text_config"]["output_router_logits"] = True
    theirs = AutoConfig.for_model(**config).text_config
    if theirs.head_dim == 64:  # the mixture's 2,048 / 32
        config["text_config"]["rope_scaling"]["mrope_section"] = [12, 10, 10]
    spec = parse_spec(config)
    assert (spec.norm_eps, spec.head_dim) == (theirs.rms_norm_eps, theirs.head_dim)
    assert spec.router_aux_loss_coef == getattr(theirs, "router_aux_loss_coef", 0.0)


def test_experts_as_transformers_counts_them():
    config = released_config("qwen3_vl_moe-30b")
    spec = parse_spec(config)
    config["text_config"]["num_local_experts"] = config["text_config"].pop("num_experts")
    assert parse_spec(config) == spec


def refuses(name, section, change, words):
    config = released_config(name)
    with pytest.raises(ModelConfigError) as error:
        parse_spec({**config, section: {**config[section], **change}})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["holds a list"]),
        ("{", ["is not valid JSON"]),
        (json.dumps({**FLAT, "hidden_size": "wide"}), ["wide"]),
        (json.dumps({**FLAT, "num_attention_heads": 0}), ["zero"]),
        (
            json.dumps({**FLAT, "vision_config": [3]}),
            ["describe a model"],
        ),
    ],
    ids=["list", "cut short", "text", "zero", "list inside"],
)
def test_what_no_release_writes_is_one_sentence(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError) as error:
        read_spec(tmp_path)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_text_config_is_the_flat_form():
    assert parse_spec({**FLAT, "text_config": None}) == parse_spec(FLAT)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_sizes_below_one_are_refused_before_they_divide(name, size, tmp_path):
    section = ParallelSection(**{name: size})
    spec = released_spec("qwen2_5_vl-7b")
    with pytest.raises(LayoutError, match=f"parallel.{name} is {size}; it must be at least 1"):
        run_layout(spec, section, 1, global_batch=0, option="--global_batch_packs")
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    with pytest.raises(LayoutError, match=f"parallel.{name} is {size}; it must be at least 1"):
        check(TrainConfig(model=tmp_path, data="a", output=tmp_path, parallel=section), 1)
