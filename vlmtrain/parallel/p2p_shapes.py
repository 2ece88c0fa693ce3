"""What travels between pipeline stages has shapes that every rank knows beforehand.

Packs differ in length and in images. megatron-core's `variable_seq_lengths` has every message
preceded by one with its shape, which the receiver waits for on the host: two device-wide stops a
message. But both ends hold the same pack, so both can work the shape out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.vision import padded_groups

Shape = tuple[int, int, int]


def message_shape(spec: ModelSpec, layout: Layout, stage: int, pack: PackedBatch) -> Shape:
    """Shape of what `stage` sends to the next one for `pack`, whose grids are in host memory."""
    shards = layout.tensor if layout.sequence else 1
    tokens, width = pack.length // shards, spec.hidden_size
    if layout.multiplexed or stage >= layout.merger_stage:
        return tokens, 1, width
    unit = spec.vision.merge_unit
    groups = int(pack.grid_thw.prod(1).sum()) // unit
    patches = padded_groups(groups, shards) * unit // shards
    if stage < layout.embedding_stage:
        return patches, 1, spec.vision.hidden_size
    return 1, 1, patches * spec.vision.hidden_size + tokens * width


class KnownShapes(P2PCommunicator):
    """Megatron's messages between stages, without those that announce shapes."""

    def __init__(self, spec: ModelSpec, layout: Layout, config: TransformerConfig) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._spec, self._layout = spec, layout
        self._forward: Iterator[Shape] = iter(())
        self._backward: Iterator[Shape] = iter(())

    def expect(self, packs: Sequence[PackedBatch]) -> None:
        """Prepare for a step over `packs` (in host memory), forward and backward."""
        layout, chunks = self._layout, self._layout.virtual_pipeline
        group = self.config.microbatch_group_size_per_vp_stage or len(packs)
        order = get_schedule_table(len(packs), chunks, group if chunks > 1 else len(packs))
        rank = parallel_state.get_pipeline_model_parallel_rank()
        forward, backward = [], []
        for number, chunk in order:
            stage = layout.stage(rank, chunk)
            if stage > 0:
                forward.append((stage - 1, number))
            stage = layout.stage(rank, chunks - 1 - chunk)
            if stage < layout.stages - 1:
                backward.append((stage, number))
        self._forward, self._backward = (
            iter([message_shape(self._spec, layout, s, packs[n]) for s, n in messages])
            for messages in (forward, backward)
        )

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        none = (0, 0, 0)
        return (
            next(self._forward) if recv_prev else none,
            next(self._backward) if recv_next else none,
        )
