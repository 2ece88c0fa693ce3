"""Qwen2.5-VL: a tower of RMSNorm and SwiGLU, most layers attend within windows, and M-RoPE that
knows seconds of video."""

from __future__ import annotations

from typing import Any

from vlmtrain.core.spec import ModelConfigError
from vlmtrain.models.common.family import Family, MediaDefaults


class Qwen2_5VL(Family):
    name, title = "qwen2_5_vl", "Qwen2.5-VL"
    hidden_act, gated, normalization = "silu", True, "RMSNorm"
    vision_mlp = ("gate_proj", "up_proj"), "down_proj"
    media = MediaDefaults(box_scale=None)

    def tower_sizes(self, vision: dict[str, Any], text_hidden: int) -> dict[str, Any]:
        full = vision.get("fullatt_block_indexes", (7, 15, 23, 31))
        window = int(vision.get("window_size", 112))
        unit = int(vision.get("patch_size", 14)) * int(vision.get("spatial_merge_size", 2))
        if window < unit:
            raise ModelConfigError(
                f"vision_config: window_size {window} is below {unit}, the side of a merged patch"
            )
        return {
            "hidden_size": int(vision.get("hidden_size", 1280)),
            "out_hidden_size": int(vision.get("out_hidden_size", text_hidden)),
            "intermediate_size": int(vision.get("intermediate_size", 3420)),
            "window_size": window,
            "full_attention_layers": tuple(sorted(int(i) for i in full)),
            "tokens_per_second": float(vision.get("tokens_per_second", 4)),
        }


FAMILY = Qwen2_5VL()
