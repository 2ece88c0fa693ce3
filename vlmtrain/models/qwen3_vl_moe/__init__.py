"""Qwen3-VL with a mixture of experts in place of each language layer's MLP (30B-A3B, 235B-A22B)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from vlmtrain.core.spec import ModelConfigError, ModelSpec
from vlmtrain.models.common.family import need
from vlmtrain.models.qwen3_vl import Qwen3VL

# What the mixture is like in every release: key -> the one value that is supported, and why.
_TEXT = {
    "decoder_sparse_step": (1, "every layer has experts"),
    "mlp_only_layers": ([], "every layer has experts"),
    "norm_topk_prob": (True, "transformers always divides by the sum of the chosen"),
}


class Qwen3VLMoe(Qwen3VL):
    name, title = "qwen3_vl_moe", "Qwen3-VL (mixture of experts)"
    text_defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-6, "rope_theta": 5e5}

    def read(self, config: dict[str, Any]) -> ModelSpec:
        text = config.get("text_config") or config
        for key, (value, why) in _TEXT.items():
            if text.get(key) not in (None, value):
                raise ModelConfigError(
                    f"{key} is {text[key]!r}; only {value!r} is supported: {why}"
                )
        # transformers 5 writes num_local_experts
        key = "num_experts" if text.get("num_experts") is not None else "num_local_experts"
        experts, active = int(need(text, key)), int(need(text, "num_experts_per_tok"))
        width = int(need(text, "moe_intermediate_size"))
        if not 2 <= active <= experts:  # Megatron weights a single one otherwise
            raise ModelConfigError(
                f"num_experts_per_tok {active} must be from 2 to {key} {experts}"
            )
        coefficient = 0.0
        if text.get("output_router_logits"):  # then transformers adds a load-balancing loss
            coefficient = float(text.get("router_aux_loss_coef", 0.001))
        if not 0 <= coefficient < math.inf:
            raise ModelConfigError(
                f"router_aux_loss_coef {coefficient:g} must be a number from 0 on"
            )
        spec = super().read({**config, "text_config": {"intermediate_size": width, **text}})
        if spec.hidden_size in (width, 2 * width):
            raise ModelConfigError(
                f"moe_intermediate_size {width} with hidden_size {spec.hidden_size} makes the "
                "experts' weights square, and transformers can't tell which of its two layouts a "
                f"square one has; use another moe_intermediate_size, e.g. {width + 16}"
            )
        return replace(
            spec,
            num_experts=experts,
            num_experts_per_tok=active,
            moe_intermediate_size=width,
            router_aux_loss_coef=coefficient,
        )


FAMILY = Qwen3VLMoe()
