"""Qwen2-VL: a tower of LayerNorm and quick_gelu, every layer attends to whole frames."""

from __future__ import annotations

from typing import Any

from vlmtrain.core.spec import VisionSpec
from vlmtrain.models.common.family import Family


class Qwen2VL(Family):
    name = "qwen2_vl"
    title = "Qwen2-VL"
    vision_mlp = ("fc1",), "fc2"

    def read_vision(self, vision: dict[str, Any], text_hidden: int) -> VisionSpec:
        # Here the tower's width is embed_dim, and hidden_size the merger's output.
        width = int(vision.get("embed_dim", 1280))
        return self.vision_spec(
            vision,
            text_hidden,
            hidden_size=width,
            out_hidden_size=int(vision.get("hidden_size", text_hidden)),
            intermediate_size=int(width * vision.get("mlp_ratio", 4)),
            hidden_act="quick_gelu",
            gated=False,
            normalization="LayerNorm",
            window_size=None,
            full_attention_layers=(),
            tokens_per_second=None,
        )


FAMILY = Qwen2VL()
