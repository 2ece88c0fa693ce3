"""The names that a rank's parameters have in the whole model."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def split_group(parameter: Tensor) -> dist.ProcessGroup:
    """The ranks that divide a parameter where it is split."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_model_parallel_group()  # Megatron's mark of experts


def stage_parameters(stage: Any) -> dict[str, Tensor]:
    """This stage's parameters by global name: layer numbers count over the whole model."""
    offsets = {}
    if stage.vision is not None:
        for i, layer in enumerate(stage.vision.blocks.layers):
            offsets[f"vision.blocks.layers.{i}."] = (
                f"vision.blocks.layers.{layer.layer_number - 1}."
            )
    if stage.language_model is not None:
        for i, layer in enumerate(stage.language_model.decoder.layers):
            offsets[f"language_model.decoder.layers.{i}."] = (
                f"language_model.decoder.layers.{layer.layer_number - 1}."
            )
    named = {}
    for name, parameter in stage.named_parameters():
        match = re.match(r"(.*?\.layers\.\d+\.)(.*)", name)
        if match:
            name = offsets[match[1]] + match[2]
        named[name] = parameter
    return named
