"""config.json of the released models, flat as it is published."""

from __future__ import annotations

from typing import Any

from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.family import parse_spec

# hidden, layers, heads, key/value heads, MLP, vocabulary, tied, vision MLP (None: Qwen2-VL's)
RELEASED = {
    "qwen2_vl-2b": (1536, 28, 12, 2, 8960, 151936, True, None),
    "qwen2_vl-7b": (3584, 28, 28, 4, 18944, 152064, False, None),
    "qwen2_vl-72b": (8192, 80, 64, 8, 29568, 152064, False, None),
    "qwen2_5_vl-3b": (2048, 36, 16, 2, 11008, 151936, True, 3420),
    "qwen2_5_vl-7b": (3584, 28, 28, 4, 18944, 152064, False, 3420),
    "qwen2_5_vl-32b": (5120, 64, 40, 8, 27648, 152064, False, 3456),
    "qwen2_5_vl-72b": (8192, 80, 64, 8, 29568, 152064, False, 3456),
    "qwen3_vl-2b": (2048, 28, 16, 8, 6144, 151936, True, 4096),
    "qwen3_vl-4b": (2560, 36, 32, 8, 9728, 151936, True, 4096),
    "qwen3_vl-8b": (4096, 36, 32, 8, 12288, 151936, False, 4304),
    "qwen3_vl-32b": (5120, 64, 64, 8, 25600, 151936, False, 4304),
    "qwen3_vl_moe-30b": (2048, 48, 32, 4, 6144, 151936, False, 4304),
    "qwen3_vl_moe-235b": (4096, 94, 64, 4, 12288, 151936, False, 4304),
}


def released_config(name: str) -> dict[str, Any]:
    hidden, layers, heads, kv, mlp, vocab, tied, vision_mlp = RELEASED[name]
    if name.startswith("qwen3_vl"):
        config = _qwen3_vl(hidden, layers, heads, kv, mlp, vocab, tied, vision_mlp)
        if name.startswith("qwen3_vl_moe"):
            config["model_type"] = config["vision_config"]["model_type"] = "qwen3_vl_moe"
            config["text_config"] |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "model_type": "qwen3_vl_moe_text",
                "moe_intermediate_size": 768 if hidden == 2048 else 1536,
                "norm_topk_prob": True,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            }
        return config
    vision: dict[str, Any] = {"depth": 32, "num_heads": 16, "patch_size": 14, "in_chans": 3}
    if vision_mlp is None:
        vision |= {"embed_dim": 1280, "hidden_size": hidden, "mlp_ratio": 4}
    else:
        vision |= {"hidden_size": 1280, "out_hidden_size": hidden, "window_size": 112}
        vision |= {"intermediate_size": vision_mlp, "fullatt_block_indexes": [7, 15, 23, 31]}
        vision |= {"tokens_per_second": 2}
    return {
        "model_type": name.split("-")[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "torch_dtype": "bfloat16",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": vision,
    }


def _qwen3_vl(
    hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int, tied: bool, vision_mlp: int
) -> dict[str, Any]:
    small = vision_mlp == 4096
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": tied,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "text_config": {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "vocab_size": vocab,
        },
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17] if small else [8, 16, 24],
            "depth": 24 if small else 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024 if small else 1152,
            "in_channels": 3,
            "intermediate_size": vision_mlp,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def released_spec(name: str) -> ModelSpec:
    return parse_spec(released_config(name))
