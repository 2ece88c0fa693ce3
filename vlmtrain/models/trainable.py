"""Which parameters learn, and how far down a backward pass must go.

A frozen part keeps its weights bit for bit, has no optimizer state, and no gradient is computed
below the lowest stage that still learns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.nn import Module

from vlmtrain.core.config import FreezeSection, LoraSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.lora import add_adapters
from vlmtrain.models.stage import QwenVLStage


def freeze(stages: Iterable[Module], section: FreezeSection) -> None:
    """Mark the parameters of the frozen parts. Before gradient buffers are made."""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if name.startswith(("vision.merger.", "vision.deepstack_mergers.")):
                frozen = section.merger
            elif name.startswith("vision."):
                frozen = section.vision
            else:
                frozen = section.language
            if frozen:
                parameter.requires_grad_(False)


def mark_trainable(
    parts: list[Any], spec: ModelSpec, section: FreezeSection, lora: LoraSection, seed: int
) -> None:
    """Freeze what `section` says, or with LoRA everything, and add the adapters."""
    if not lora.rank:
        freeze(parts, section)
        return
    freeze(parts, FreezeSection(vision=True, merger=True, language=True))
    for part in parts:
        if part.language_model is not None:
            layers = part.language_model.decoder.layers
            add_adapters(layers, spec, lora, vision=False, seed=seed)
        if lora.vision and part.vision is not None:
            add_adapters(part.vision.blocks.layers, spec, lora, vision=True, seed=seed)


def mark_lowest_trainable(stages: list[QwenVLStage], replica: Module | None = None) -> None:
    """Tell each stage whether an earlier one learns, and whether the tower does there beside
    DeepStack's mergers, which hidden states do not pass. Collective over the pipeline.

    A `replica` of the vision tower feeds stage 0 from outside the pipeline.
    """
    local = {
        (stage.stage, name.startswith("vision.") and "deepstack_mergers" not in name)
        for stage in stages
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    }
    if replica is not None and any(p.requires_grad for p in replica.parameters()):
        local.add((-1, True))
    group = parallel_state.get_pipeline_model_parallel_group()
    learning_of_ranks: list[set[tuple[int, bool]]] = [set()] * dist.get_world_size(group)
    dist.all_gather_object(learning_of_ranks, local, group=group)
    learning = set().union(*learning_of_ranks)
    for stage in stages:
        before = [tower for number, tower in learning if number < stage.stage]
        stage.learns_before, stage.tower_learns_before = bool(before), any(before)
