"""Qwen3-VL: a tower with a table of learned positions, whose middle layers feed the first language
layers too (DeepStack, arXiv 2406.04334), and a language model that normalises queries and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from vlmtrain.core.spec import ModelConfigError, ModelSpec
from vlmtrain.models.qwen3_vl.media import TimedVideos

if TYPE_CHECKING:
    from vlmtrain.models.common.vision import VisionTower

# What the language model is like in every release: key -> the one value that is supported.
_TEXT = {"attention_bias": False}
_ROPE = {"rope_type": "default", "mrope_interleaved": True}


class Qwen3VL(TimedVideos):
    name, title = "qwen3_vl", "Qwen3-VL"
    hidden_act, gated, normalization = "gelu_pytorch_tanh", False, "LayerNorm"
    vision_mlp = ("linear_fc1",), "linear_fc2"
    vision_defaults: ClassVar[dict[str, Any]] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    }
    #: What transformers takes where a config.json does not say it.
    text_defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
    }
    merger_names = "norm", "linear_fc1", "linear_fc2"
    vision_prefix, text_prefix = "model.visual.", "model.language_model."
    qkv_bias, qk_norm, interleaved_mrope = False, True, True

    def tower_sizes(self, vision: dict[str, Any], text_hidden: int) -> dict[str, Any]:
        positions, depth = int(vision["num_position_embeddings"]), int(vision["depth"])
        side = math.isqrt(positions)
        if side < 1 or side**2 != positions:
            raise ModelConfigError(
                f"vision_config: num_position_embeddings {positions} is no square of a whole "
                f"number; the table of positions is square, e.g. {max(side, 1) ** 2}"
            )
        layers = tuple(int(layer) for layer in vision["deepstack_visual_indexes"])
        if layers != tuple(sorted({n for n in layers if 0 <= n < depth})):
            raise ModelConfigError(
                f"vision_config: deepstack_visual_indexes {list(layers)} must be layers of the "
                f"tower, 0 to {depth - 1}, in ascending order"
            )
        return {
            "hidden_size": int(vision["hidden_size"]),
            "out_hidden_size": int(vision.get("out_hidden_size", text_hidden)),
            "intermediate_size": int(vision["intermediate_size"]),
            "patch_bias": True,
            "position_side": side,
            "deepstack_layers": layers,
        }

    def read(self, config: dict[str, Any]) -> ModelSpec:
        text = config.get("text_config") or config
        rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        for where, section, supported in (("", text, _TEXT), ("rope_scaling.", rope, _ROPE)):
            for key, value in supported.items():
                if section.get(key, value) != value:
                    raise ModelConfigError(
                        f"{where}{key} is {section[key]!r}; only {value!r} is supported"
                    )
        text = {**self.text_defaults, **text}
        if "tie_word_embeddings" in config:  # transformers looks nowhere else then
            text["tie_word_embeddings"] = config["tie_word_embeddings"]
        spec = super().read({**config, "text_config": text})
        if len(spec.vision.deepstack_layers) > spec.num_layers:
            raise ModelConfigError(
                f"vision_config: deepstack_visual_indexes {list(spec.vision.deepstack_layers)} "
                f"feed as many language layers, num_hidden_layers is {spec.num_layers}"
            )
        return spec

    @property
    def tower(self) -> type[VisionTower]:
        from vlmtrain.models.qwen3_vl.vision import Qwen3VLTower  # megatron-core

        return Qwen3VLTower


FAMILY = Qwen3VL()
