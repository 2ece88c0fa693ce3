"""Qwen2-VL: a tower of LayerNorm and quick_gelu, every layer attends to whole frames."""

from __future__ import annotations

from typing import Any

from vlmtrain.models.common.family import Family, MediaDefaults


class Qwen2VL(Family):
    name, title = "qwen2_vl", "Qwen2-VL"
    hidden_act, gated, normalization = "quick_gelu", False, "LayerNorm"
    vision_mlp = ("fc1",), "fc2"
    media = MediaDefaults(box_tokens=True)

    def tower_sizes(self, vision: dict[str, Any], text_hidden: int) -> dict[str, Any]:
        # Here the tower's width is embed_dim, and hidden_size the merger's output.
        width = int(vision.get("embed_dim", 1280))
        return {
            "hidden_size": width,
            "out_hidden_size": int(vision.get("hidden_size", text_hidden)),
            "intermediate_size": int(width * vision.get("mlp_ratio", 4)),
        }


FAMILY = Qwen2VL()
