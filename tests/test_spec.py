"""Sizes are read from config.json: the seven released shapes, flat and nested, and what is not."""

from __future__ import annotations

import json

import pytest

from vlmtrain.core.config import ParallelSection, TrainConfig
from vlmtrain.core.layout import LayoutError
from vlmtrain.core.spec import ModelConfigError
from vlmtrain.models.family import parse_spec, read_spec
from vlmtrain.training.setup import run_layout
from vlmtrain.training.trainer import check

# hidden, layers, heads, key/value heads, MLP, vocabulary, tied, vision MLP (None: Qwen2-VL)
RELEASED = {
    "Qwen2-VL-2B": (1536, 28, 12, 2, 8960, 151936, True, None),
    "Qwen2-VL-7B": (3584, 28, 28, 4, 18944, 152064, False, None),
    "Qwen2-VL-72B": (8192, 80, 64, 8, 29568, 152064, False, None),
    "Qwen2.5-VL-3B": (2048, 36, 16, 2, 11008, 151936, True, 3420),
    "Qwen2.5-VL-7B": (3584, 28, 28, 4, 18944, 152064, False, 3420),
    "Qwen2.5-VL-32B": (5120, 64, 40, 8, 27648, 152064, False, 3456),
    "Qwen2.5-VL-72B": (8192, 80, 64, 8, 29568, 152064, False, 3456),
}


def config(name: str) -> dict:
    hidden, layers, heads, kv, mlp, vocab, tied, vision_mlp = RELEASED[name]
    common = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
    if vision_mlp is None:
        vision = {**common, "embed_dim": 1280, "hidden_size": hidden, "mlp_ratio": 4, "in_chans": 3}
    else:
        vision = {
            **common,
            "hidden_size": 1280,
            "out_hidden_size": hidden,
            "intermediate_size": vision_mlp,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        }
    return {
        "model_type": "qwen2_vl" if vision_mlp is None else "qwen2_5_vl",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": vision,
    }


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes(name):
    hidden, layers, heads, kv, mlp, vocab, tied, vision_mlp = RELEASED[name]
    spec = parse_spec(config(name))
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (hidden, layers, heads)
    assert (spec.num_kv_heads, spec.intermediate_size, spec.vocab_size) == (kv, mlp, vocab)
    assert spec.head_dim == 128 and spec.tie_word_embeddings == tied
    vision = spec.vision
    assert (vision.depth, vision.hidden_size, vision.head_dim, vision.patch_dim) == (
        32,
        1280,
        80,
        1176,
    )
    assert vision.intermediate_size == (vision_mlp or 5120)
    assert vision.out_hidden_size == hidden
    assert vision.window_size == (None if vision_mlp is None else 112)
    assert vision.full_attention_layers == (() if vision_mlp is None else (7, 15, 23, 31))


def test_nested_form_says_the_same():
    flat = config("Qwen2.5-VL-7B")
    top = {k: v for k, v in flat.items() if k.endswith("_id") or k in ("model_type",)}
    vision = flat["vision_config"]
    text = {k: v for k, v in flat.items() if k not in top and k != "vision_config"}
    theta = text.pop("rope_theta")
    section = text.pop("rope_scaling")["mrope_section"]
    text["rope_parameters"] = {"mrope_section": section, "rope_theta": theta}
    nested = {
        **top,
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
    }
    assert parse_spec(nested) == parse_spec(flat)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llava"}, ["llava", "qwen2_vl"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_attention_heads": 27}, ["3584", "27"]),
        ({"rope_scaling": {"mrope_section": [16, 24]}}, ["mrope_section", "128"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"vision_config": None}, ["vision_config"]),
    ],
)
def test_refused(change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**config("Qwen2.5-VL-7B"), **change}))
    with pytest.raises(ModelConfigError) as error:
        read_spec(tmp_path)
    for word in ["config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["holds a list"]),
        ("{", ["is not valid JSON"]),
        (json.dumps({**config("Qwen2.5-VL-7B"), "hidden_size": "wide"}), ["wide"]),
        (json.dumps({**config("Qwen2.5-VL-7B"), "num_attention_heads": 0}), ["zero"]),
        (json.dumps({**config("Qwen2.5-VL-7B"), "vision_config": [3]}), ["describe a model"]),
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
    flat = config("Qwen2.5-VL-7B")
    assert parse_spec({**flat, "text_config": None}) == parse_spec(flat)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_sizes_below_one_are_refused_before_they_divide(name, size, tmp_path):
    section = ParallelSection(**{name: size})
    spec = parse_spec(config("Qwen2.5-VL-7B"))
    with pytest.raises(LayoutError, match=f"parallel.{name} is {size}; it must be at least 1"):
        run_layout(spec, section, 1, pack_length=8192, global_batch=0, option="--global_batch")
    (tmp_path / "config.json").write_text(json.dumps(config("Qwen2.5-VL-7B")))
    with pytest.raises(LayoutError, match=f"parallel.{name} is {size}; it must be at least 1"):
        check(TrainConfig(model=tmp_path, data="a", output=tmp_path, parallel=section), 1)
