"""LoRA adapters out: a folder that `peft` loads onto the transformers model, and merged weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save
from torch import Tensor

from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.core.collectives import on_first_rank
from vlmtrain.core.config import LoraSection
from vlmtrain.core.files import fsync_tree, replace_folder, replacing, start_folder
from vlmtrain.models.lora import adapted_linears

# Module paths of transformers >= 4.52 in memory, which peft matches.
_MODULES = (
    ("model.layers.", "model.language_model.layers."),
    ("visual.blocks.", "model.visual.blocks."),
)


def save_adapters(
    parts: list[Any],
    section: LoraSection,
    source: ModelFiles,
    target: Path,
    adapt: Callable[[Path], None] | None = None,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json to `target`, and the processor's
    files, changed by `adapt`. Collective.

    parts: what this rank exports (`Engine.exported`); source: of the base model.
    """
    named = {name: tensor for name, tensor in _whole(parts)}
    writer = (
        parallel_state.get_data_parallel_rank() == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    first = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(named if writer else {}, gathered, dst=0)

    def write() -> None:
        tensors = {name: tensor for part in gathered or [] for name, tensor in part.items()}
        work = start_folder(target)
        # Not save_file: what that raises where the disk is full is no OSError.
        weights = save(tensors, metadata={"format": "pt"})
        (work / "adapter_model.safetensors").write_bytes(weights)
        modules = sorted({n.split(".lora_")[0].removeprefix("base_model.model.") for n in tensors})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            # Absolute: it must name the same folder wherever a reader is started.
            "base_model_name_or_path": os.path.abspath(source.folder),
            "r": section.rank,
            "lora_alpha": section.alpha,
            "lora_dropout": section.dropout,
            "target_modules": modules,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (work / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        source.write_processor(work)
        if adapt is not None:
            adapt(work)
        fsync_tree(work)
        replace_folder(work, target)

    on_first_rank(replacing(target)(write))


def _whole(parts: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """(peft name, whole CPU tensor) of every A and B here, gathered over the TP group."""
    for linear in adapted_linears(parts):
        group = linear.tp_group
        size = group.size()
        for adapter in linear.adapters:
            name = adapter.hf_name
            for old, new in _MODULES:
                if name.startswith(old):
                    name = new + name[len(old) :]
            for letter, parameter in (("A", adapter.a), ("B", adapter.b)):
                whole = parameter.detach()
                if size > 1 and parameter.tensor_model_parallel:
                    pieces = [torch.empty_like(whole) for _ in range(size)]
                    dist.all_gather(pieces, whole.contiguous(), group=group)
                    whole = torch.cat(pieces, parameter.partition_dim)
                if letter == "B":
                    whole = linear.lora_fused.hf_rows(whole)
                path = f"base_model.model.{name}.lora_{letter}.weight"
                yield path, whole.to("cpu", copy=True).contiguous()


def merged(parts: list[Any]) -> Callable[[Tensor], Tensor]:
    """What is saved of a parameter: W + (alpha / rank) B A of an adapted weight, else itself."""
    linears = {id(linear.weight): linear for linear in adapted_linears(parts)}

    @torch.no_grad()
    def value(parameter: Tensor) -> Tensor:
        if id(parameter) not in linears:
            return parameter.detach()
        whole = parameter.float() + linears[id(parameter)].weight_delta()
        return whole.to(parameter.dtype)

    return value
