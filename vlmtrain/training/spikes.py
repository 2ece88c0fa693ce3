"""What is to blame for a step whose gradients are not finite: looked for in a second pass."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.errors import shown
from vlmtrain.core.files import writing
from vlmtrain.plan import schedule

if TYPE_CHECKING:
    from vlmtrain.training.engine import Engine


@dataclass(frozen=True)
class Origin:
    """The first value that is not finite."""

    direction: int
    microbatch: int  # from 1; 0: before them all, where vision is multiplexed
    stage: int
    part: str  # of the model
    module: str
    replica: int
    samples: list[str]

    @property
    def order(self) -> tuple[int, int, int]:
        """Forward before backward; backward from the last stage."""
        return self.direction, self.microbatch, self.stage * (1 - 2 * self.direction)

    def describe(self) -> str:
        kind = ("an output of", "a gradient at the output of")[self.direction]
        where = f"in microbatch {self.microbatch}" if self.microbatch else "in the images"
        return (
            f"the first value that is not finite is {kind} {self.module} ({self.part}, stage "
            f"{self.stage}), {where} of replica {self.replica}: samples "
            f"{shown(self.samples, 12)}"
        )


@dataclass(frozen=True)
class Spike:
    """A step without an update."""

    step: int
    cause: str
    origin: Origin | None
    packs: list[list[list[str]]]  # sample ids of each replica's packs

    def describe(self) -> str:
        if self.origin is not None:
            return f"step {self.step}: {self.cause}; {self.origin.describe()}"
        ids = [name for packs in self.packs for pack in packs for name in pack]
        samples = shown(ids, 12, " (spikes.jsonl)")
        return f"step {self.step}: {self.cause}; its samples are {samples}"

    def write(self, output: Path) -> None:
        path = output / "spikes.jsonl"
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def examine(engine: Engine, packs: list[PackedBatch], step: int, cause: str) -> Spike:
    """Forward and backward of a step once more, with a look at what each module puts out. No
    update; the same on every rank. Collective."""
    found: list[Origin] = []
    handles = [
        module.register_forward_hook(_hook(engine, packs, part, name, found))
        for part in engine.parts
        for name, module in part.named_modules()
        if not list(module.children())
    ]
    try:
        engine.passes_again(packs)
    finally:
        for handle in handles:
            handle.remove()
    everyone: list[Any] = [None] * dist.get_world_size()
    local = min(found, key=lambda origin: origin.order, default=None)
    dist.all_gather_object(everyone, (engine.data_rank, [pack.sample_ids for pack in packs], local))
    origins = [origin for _, _, origin in everyone if origin is not None]
    replicas = {replica: ids for replica, ids, _ in everyone}
    return Spike(
        step,
        cause,
        min(origins, key=lambda origin: (*origin.order, origin.replica), default=None),
        [replicas[replica] for replica in sorted(replicas)],
    )


def _hook(
    engine: Engine, packs: list[PackedBatch], part: Any, name: str, found: list[Origin]
) -> Any:
    layout = engine.layout
    tower = "merger" if ".merger" in name else "vision tower"
    rank = parallel_state.get_pipeline_model_parallel_rank()
    order = schedule.order(layout.pipeline, layout.virtual_pipeline, len(packs), rank)

    def note(direction: int) -> None:
        if any(one.direction <= direction for one in found):
            return  # the first of each direction, which is the first in time
        ids, number = [name for pack in packs for name in pack.sample_ids], 0
        if part is not engine.replica:
            passes = engine.clock.place.passes[("forward", "backward")[direction]]
            numbers = [pack for kind, _, pack in order if kind == direction]
            number = numbers[passes - 1] + 1
            ids = packs[number - 1].sample_ids
        found.append(
            Origin(
                direction,
                number,
                0 if part is engine.replica else part.stage,
                tower if name.startswith("vision") else "language model",
                name,
                engine.data_rank,
                ids,
            )
        )

    def look(gradient: Tensor | None) -> None:
        """None: nothing reads that output, as the sum beside the last norm."""
        if gradient is not None and not torch.isfinite(gradient).all():
            note(schedule.BACKWARD)

    def hook(module: Any, inputs: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if not torch.isfinite(value).all():
                note(schedule.FORWARD)
            elif value.requires_grad:
                value.register_hook(look)

    return hook
