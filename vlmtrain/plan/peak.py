"""What each step of a run needs at its peak on a rank, from the packs that it will have.

The planner's search asks for a typical step (`CostModel.rank_memory`); here every pack of a run is
known. They differ in tokens and patches: the peak is the largest sum over the microbatches that are
between forward and backward, in megatron-core's order, with the short-lived memory of the one in
work.
"""

from __future__ import annotations

import numpy as np

from vlmtrain.core.config import TrainConfig, offload_fractions
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.plan import memory, schedule

_BLOCK = 4096  # steps at once


class PeakModel:
    """Bytes of one rank of a run."""

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        *,
        cuda: bool,
        factor: float = 1.0,
    ) -> None:
        """
        Args:
            rank: of the pipeline.
            factor: by which a step needs more than planned, beside the model's states; measured.
        """
        self.factor = factor
        self.config, self.spec, self.layout, self.rank, self.cuda = config, spec, layout, rank, cuda
        self.element = 2 if config.train.precision == "bf16" else 4
        self.microbatches = config.train.global_batch_packs // layout.data
        learning = memory.Learning.of(spec, config.freeze, config.lora)
        self._model = memory.ActivationModel(
            spec, layout.tensor, layout.sequence, self.element, cuda, learning
        )
        self._tower = memory.ActivationModel(spec, 1, False, self.element, cuda, learning)

    def states(self) -> float:
        """Parameters, gradients and optimizer state of the fullest of its data-parallel ranks."""
        config = self.config
        states = memory.model_states(
            self.spec,
            self.layout,
            self.rank,
            0,
            bf16=self.element == 2,
            freeze=config.freeze,
            lora=config.lora,
            overlap=config.parallel.overlap_grad_reduce,
        )
        # Of a schedule the least: what comes back from the host must have room.
        offloaded = min(offload_fractions(config.optimizer).values()) if self.cuda else 0.0
        return states.total - offloaded * states.optimizer

    def peaks(self, tokens: np.ndarray, patches: np.ndarray, largest: np.ndarray) -> np.ndarray:
        """Of steps with these tokens and patches in their packs, [steps, microbatches] each, and
        patches in their largest medium, [steps]: bytes, [steps]."""
        parts = [
            self._moments(tokens[i : i + _BLOCK], patches[i : i + _BLOCK]).max(1)
            for i in range(0, len(patches), _BLOCK)
        ]
        moments = np.concatenate([np.empty(0), *parts])
        total = patches.sum(1)
        held = self.rank == 0
        if self.layout.multiplexed:  # one phase after the other; rows and their gradients stay
            spec, ranks = self.spec, self.layout.pipeline * self.layout.tensor
            again = self.config.recompute.vision
            kept = self._tower.tower(again) + self._tower.layer_transient(vision=True)
            if again != "none":
                kept += self._tower.vision_layer()
            most = self.config.parallel.vision_piece
            piece = np.maximum(np.minimum(total / ranks, most), largest)
            rows = 2 * self.element * spec.hidden_size * total / spec.vision.merge_unit
            rows *= spec.visual_sets
            moments = np.maximum(moments, kept.per_patch * piece)
            moments = moments + (rows / self.layout.tensor if held else 0.0)
            total, held = np.maximum(total / ranks, largest), True
        pixels = self.element * self.spec.vision.patch_dim * total if held else 0.0
        packs = memory.batch_bytes(1) * tokens.sum(1)
        return self.states() + self.factor * (moments + pixels + packs)

    def window(self, tokens: np.ndarray, patches: np.ndarray) -> list[int]:
        """The microbatches between forward and backward at the peak of a step, [microbatches]."""
        peak = int(self._moments(tokens[None], patches[None])[0].argmax())
        alive: dict[int, int] = {}
        for kind, _, number in self._order()[: peak + 1]:
            alive[number] = alive.get(number, 0) + (1 if kind == schedule.FORWARD else -1)
        alive[self._order()[peak][2]] = 1
        return sorted(number for number, count in alive.items() if count)

    def _order(self) -> tuple[schedule.Step, ...]:
        layout = self.layout
        return schedule.order(
            layout.pipeline, layout.virtual_pipeline, self.microbatches, self.rank
        )

    def _moments(self, tokens: np.ndarray, patches: np.ndarray) -> np.ndarray:
        """Activations during each piece of work, [steps, pieces]."""
        layout, model, again = self.layout, self._model, self.config.recompute
        per_token, per_patch = model.stages(
            layout, recompute_vision=again.vision, recompute_text=again.language
        )
        text, vision = model.layer_transient(vision=False), model.layer_transient(vision=True)
        if again.language != "none":
            text += model.text_layer()
        if again.vision != "none":
            vision += model.vision_layer()
        order = self._order()
        kept = np.empty((len(patches), len(order)))
        short = np.empty_like(kept)
        for piece, (_, chunk, number) in enumerate(order):
            stage = chunk * layout.pipeline + self.rank
            length, count = tokens[:, number], patches[:, number]
            kept[:, piece] = per_token[stage] * length + per_patch[stage] * count
            if layout.virtual_pipeline > 1:  # outputs are not freed after sending
                sent = model.text_input().per_token * length
                kept[:, piece] += (
                    sent if layout.text_layers[stage] else model.vision_input().per_patch * count
                )
            short[:, piece] = text.per_token * length if layout.text_layers[stage] else 0.0
            if layout.vision_layers[stage]:
                short[:, piece] = np.maximum(short[:, piece], vision.per_patch * count)
            if stage == layout.stages - 1:
                head = model.head_transient(length)
                short[:, piece] = np.maximum(short[:, piece], head)
        signs = np.array([1.0 if kind == schedule.FORWARD else -1.0 for kind, *_ in order])
        after = (kept * signs).cumsum(1)
        return after + np.where(signs < 0, kept, 0.0) + short
