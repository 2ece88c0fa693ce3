"""What travels between pipeline stages has shapes that every rank knows beforehand.

Packs differ in length and in images. megatron-core's `variable_seq_lengths` has every message
preceded by one with its shape, which the receiver waits for on the host: two device-wide stops a
message. But both ends hold the same pack, so both can work the shape out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from vlmtrain.core.layout import Layout
from vlmtrain.parallel.step_inputs import Shape, StepInputs


class KnownShapes(P2PCommunicator):
    """Megatron's messages between stages, without those that announce shapes."""

    def __init__(self, layout: Layout, config: TransformerConfig) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._layout = layout
        self._forward: Iterator[Shape] = iter(())
        self._backward: Iterator[Shape] = iter(())

    def expect(self, inputs: StepInputs) -> None:
        """Prepare for a step, forward and backward."""
        layout, chunks = self._layout, self._layout.virtual_pipeline
        packs = len(inputs.lengths)
        group = self.config.microbatch_group_size_per_vp_stage or packs
        order = get_schedule_table(packs, chunks, group if chunks > 1 else packs)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        forward, backward = [], []
        for number, chunk in order:
            stage = layout.stage(rank, chunk)
            if stage > 0:
                forward.append((stage - 1, number))
            stage = layout.stage(rank, chunks - 1 - chunk)
            if stage < layout.stages - 1:
                backward.append((stage, number))
        self._forward, self._backward = (
            iter([inputs.message(stage, number, tensor_rank) for stage, number in messages])
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
