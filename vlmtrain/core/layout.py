"""Which rank holds what: tensor, pipeline and virtual-pipeline sizes and the layers per stage.

A stage is one (pipeline rank, virtual chunk) pair; stages are numbered in the order that a
microbatch visits them: `stage = chunk * pipeline + pipeline_rank`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from vlmtrain.core.errors import UserError


class LayoutError(UserError):
    """A parallel layout that can't run; the message names the numbers and a valid choice."""


@dataclass(frozen=True)
class Layout:
    """A checked parallel layout. Build it with `parallel.layout.make_layout`."""

    tensor: int
    pipeline: int
    virtual_pipeline: int
    sequence: bool
    data: int
    vision_layers: tuple[int, ...]  # per stage
    text_layers: tuple[int, ...]  # per stage
    embedding_stage: int
    multiplexed: bool = False  # every rank holds the vision tower; vision_layers are all 0

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual_pipeline

    @property
    def sequence_parts(self) -> int:
        """Parts of a pack that the ranks of a tensor-parallel group have."""
        return self.tensor if self.sequence else 1

    @property
    def merger_stage(self) -> int:
        """The stage that feeds the language model: the last one with vision layers and the
        merger, or stage 0 where vision is multiplexed."""
        if self.multiplexed:
            return 0
        return max(i for i, n in enumerate(self.vision_layers) if n)

    def stage_of(self, layer: int, *, vision: bool) -> int:
        """The stage of a tower's layer; a multiplexed tower's rows come in at stage 0."""
        if vision and self.multiplexed:
            return 0
        counts = self.vision_layers if vision else self.text_layers
        return bisect_right(list(accumulate(counts)), layer)

    def carried(self, deepstack: Sequence[int], stage: int) -> list[int]:
        """Which of DeepStack's sets `stage` sends on: made behind vision layer deepstack[n] by then
        and added behind language layer n later."""
        return [
            n
            for n, layer in enumerate(deepstack)
            if self.stage_of(layer, vision=True) <= stage < self.stage_of(n, vision=False)
        ]

    def stage(self, pipeline_rank: int, chunk: int | None) -> int:
        return (chunk or 0) * self.pipeline + pipeline_rank

    def megatron_text_layout(self) -> list[list[str]] | None:
        """megatron-core's `pipeline_model_parallel_layout` of the language model."""
        if self.stages == 1:
            return None
        rows = [["decoder"] * n for n in self.text_layers]
        rows[self.embedding_stage].insert(0, "embedding")
        rows[-1].append("loss")
        return rows

    def megatron_vision_layout(self) -> list[list[str]] | None:
        """The same for the vision tower; only the counts of its layers matter there."""
        if self.stages == 1:
            return None
        rows = [["decoder"] * n for n in self.vision_layers]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        return rows

    def describe(self) -> str:
        return (
            f"tensor {self.tensor}{' + sequence' if self.sequence else ''}, pipeline "
            f"{self.pipeline}"
            + (f" x {self.virtual_pipeline} virtual" if self.virtual_pipeline > 1 else "")
            + f", data {self.data}; vision "
            + ("multiplexed" if self.multiplexed else f"layers {list(self.vision_layers)}")
            + f", text layers {list(self.text_layers)}"
        )
