"""The learning rate of a step, and what a parameter's is of it."""

from __future__ import annotations

import math
import re
from typing import Any

from megatron.core.optimizer import ParamKey
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import Tensor

from vlmtrain.checkpoint.parameters import stage_parameters
from vlmtrain.core.config import OptimizerSection
from vlmtrain.core.spec import ModelSpec

_DECAY = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of 0-based `step`, as transformers' and Megatron's schedules have it.

    A function of the step alone: a run that is resumed needs no state of it.
    """
    warmup = section.warmup_steps or math.ceil(section.warmup_ratio * total_steps)
    if step < warmup:
        return section.lr * step / warmup
    shape: str = section.lr_scheduler_type
    decay = total_steps - warmup
    if shape == "wsd":
        shape = section.decay_type
        decay = min(decay, math.ceil(section.decay_ratio * total_steps))
    progress = (step - (total_steps - decay)) / max(1, decay)
    factor = _DECAY[shape](min(1.0, max(0.0, progress)))
    return section.min_lr + (section.lr - section.min_lr) * factor


def lr_overrides(
    section: OptimizerSection, spec: ModelSpec, parts: list[Any]
) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's overrides that put parameters of another learning rate into groups with its
    `lr_mult`; a name is the same on every layout, and so is what it gives."""
    scales = {
        parameter: lr_mult(section, spec, name)
        for part in parts
        for name, parameter in stage_parameters(part).items()
    }

    def key(scale: float) -> ParamKey:
        def matches(parameter: Tensor) -> bool:
            return scales[parameter] == scale

        return ParamKey(predicate=ParamPredicate(f"lr_mult {scale}", matches))

    return {key(scale): {"lr_mult": scale} for scale in sorted(set(scales.values()) - {1.0})}


def lr_mult(section: OptimizerSection, spec: ModelSpec, name: str) -> float:
    """A parameter's learning rate as a multiple of the run's, by its Megatron name in the whole
    model (`stage_parameters`). Layers are counted as BEiT does: what is before the first is 0, and
    the merger stands behind the last, in the place of BEiT's head."""
    if not name.startswith("vision."):
        return 1.0
    if name.startswith(("vision.merger.", "vision.deepstack_mergers.")):
        return 1.0 if section.merger_lr is None else section.merger_lr / section.lr
    match = re.match(r"vision\.blocks\.layers\.(\d+)\.", name)
    layer = int(match[1]) + 1 if match else 0
    decay = section.vision_layer_decay ** (spec.vision.depth + 1 - layer)
    return decay if section.vision_lr is None else section.vision_lr / section.lr * decay
