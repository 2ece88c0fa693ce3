"""Model, optimizer and pipeline schedule of one rank: give it packs, it makes one step."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    finalize_model_grads,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from vlmtrain.checkpoint.training.checkpoint import random_state, set_random_state
from vlmtrain.checkpoint.training.optimizer_state import set_steps
from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.clock import Clock
from vlmtrain.core.config import (
    FreezeSection,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    RecomputeSection,
    offload_fractions,
)
from vlmtrain.core.copies import Copies
from vlmtrain.core.device import Backend, model_code
from vlmtrain.core.launch import group_timeout
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.configs import language_config, vision_config
from vlmtrain.models.stage import QwenVLStage
from vlmtrain.models.trainable import mark_lowest_trainable, mark_trainable
from vlmtrain.parallel import ddp
from vlmtrain.parallel.multiplex import Multiplexer, VisionReplica, replicated_groups
from vlmtrain.parallel.p2p_shapes import KnownShapes
from vlmtrain.parallel.pixel_sharing import SharedPixels
from vlmtrain.parallel.step_inputs import StepInputs
from vlmtrain.telemetry.ledger import StepResult, Totals, gather, replica_totals
from vlmtrain.training.guard import SpikeGuard
from vlmtrain.training.optimizer import build_optimizer, set_learning_rate


def _make_communicators(device: torch.device) -> None:
    """NCCL makes a group's communicator when it is first used, in memory that torch's allocator
    does not give back: now, before it is counted what a run has."""
    world = dist.distributed_c10d._get_default_group()
    groups = [
        world,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_embedding_group(check_initialized=False),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
        parallel_state.get_intra_distributed_optimizer_instance_group(),
    ]
    for group in groups:
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


class Engine:
    """This rank's stages. Load their weights, `prepare` the optimizer, then `step`.

    `torch.distributed` must be initialised; one engine a process. Without weights loaded the
    parameters are Megatron's random initialisation.
    """

    bucket_size: int | None = None  # numbers in a gradient bucket; None: Megatron's 40 million

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        backend: Backend,
        *,
        dtype: torch.dtype,
        seed: int = 0,
        recompute: RecomputeSection | None = None,
        lora: LoraSection | None = None,
        vision_piece: int = ParallelSection.vision_piece,
        timeout: float = 0.0,
    ) -> None:
        self.spec, self.layout, self.backend, self.dtype = spec, layout, backend, dtype
        self.lora, self.seed, self.vision_piece = lora or LoraSection(), seed, vision_piece
        self.clock = Clock(backend.is_cuda)
        self.clock.place.chunks = layout.virtual_pipeline
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1 if spec.num_experts else None,  # experts.py
            distributed_timeout_minutes=math.ceil(group_timeout(timeout).total_seconds() / 60),
        )
        _make_communicators(backend.device)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

        recompute = recompute or RecomputeSection()
        self.config = language_config(spec, layout, dtype, recompute.language)
        vision = vision_config(spec, layout, dtype, recompute.vision)
        self.config.finalize_model_grads_func = self._finalize
        self.stages = [
            QwenVLStage(
                spec, layout, self.config, vision, i if layout.virtual_pipeline > 1 else None
            ).to(backend.device)
            for i in range(layout.virtual_pipeline)
        ]
        self.replica: VisionReplica | None = None
        if layout.multiplexed:
            self.replica = VisionReplica(spec, vision).to(backend.device)
        for stage in self.parts:
            for parameter in stage.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.p2p: KnownShapes | None = None
        if layout.pipeline > 1:
            self.p2p = KnownShapes(layout, self.config)
        self.vision_rank: int | None = None  # among those that decode; as in StepInputs.owners
        self.shared_pixels: SharedPixels | None = None
        if layout.multiplexed:
            self.vision_rank = dist.get_rank(parallel_state.get_model_parallel_group())
        elif any(stage.stage == 0 for stage in self.stages):
            self.vision_rank = parallel_state.get_tensor_model_parallel_rank()
            if layout.tensor > 1:
                self.shared_pixels = SharedPixels(parallel_state.get_tensor_model_parallel_group())
        self._rehearsing = False
        self.data_rank = parallel_state.get_data_parallel_rank()
        # The rank whose counts stand for its data-parallel replica.
        self._reports = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    def prepare(
        self,
        optimizer: OptimizerSection,
        frozen: FreezeSection | None = None,
        parallel: ParallelSection | None = None,
    ) -> None:
        """Gradient buffers and optimizer. After the weights are loaded: both take copies.

        Args:
            optimizer: AdamW's settings.
            frozen: parts that do not learn.
            parallel: what is overlapped with the passes. With `overlap_param_gather` call
                `gather_weights` before weights are read elsewhere.
        """
        self.section = optimizer
        parallel = parallel or ParallelSection()
        mark_trainable(self.parts, self.spec, frozen or FreezeSection(), self.lora, self.seed)
        mark_lowest_trainable(self.stages, self.replica)
        self.overlap_param_gather = parallel.overlap_param_gather
        # With one data-parallel rank there is nothing to reduce, but it is how Megatron tells when
        # gradients are final, and the D2H copies of offloaded ones can start.
        offloads = any(offload_fractions(optimizer).values())
        overlap_stages = parallel.overlap_grad_reduce or (offloads and self.layout.data == 1)
        wrap = partial(
            ddp.wrap,
            overlap_param_gather=parallel.overlap_param_gather,
            bucket_size=self.bucket_size,
        )
        self.chunks: list[Any] = [
            wrap(stage, overlap_grad_reduce=overlap_stages, disable_bucketing=i > 0)
            for i, stage in enumerate(self.stages)
        ]
        self.wrapped: list[DistributedDataParallel] = list(self.chunks)
        if overlap_stages:
            syncs = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
            for chunk in self.chunks:
                tower = chunk.module.vision
                if tower is not None:
                    parts = list(tower.in_order())
                    tower.on_skipped_backward = partial(ddp.parameters_ready, chunk, parts)
        self.optimizer = build_optimizer(optimizer, self.spec, self.chunks, self.dtype)
        self.multiplexer: Multiplexer | None = None
        if self.replica is not None:
            groups = replicated_groups()
            tower = wrap(
                self.replica, overlap_grad_reduce=parallel.overlap_grad_reduce, groups=groups
            )
            self.wrapped.append(tower)
            tower_optimizer = build_optimizer(optimizer, self.spec, [tower], self.dtype, groups)
            self.optimizer = ChainedOptimizer(
                [*self.optimizer.chained_optimizers, *tower_optimizer.chained_optimizers]
            )
            self.multiplexer = self._multiplex(tower)
        self.guard = SpikeGuard(self.optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.timers = self.clock

    def prepare_evaluation(self) -> None:
        """What `evaluate` needs, and no more: no gradient buffers, no optimizer. Instead of
        `prepare`; before or after the weights are loaded."""
        self.chunks = list(self.stages)
        self.multiplexer = None if self.replica is None else self._multiplex(self.replica)

    def _multiplex(self, tower: Any) -> Multiplexer:
        return Multiplexer(
            tower, self.spec, self.layout.tensor, self.dtype, self.clock, self.vision_piece
        )

    def gather_weights(self) -> None:
        """Wait until this rank has all updated weights. Collective; before they are saved."""
        if self.overlap_param_gather:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)

    @property
    def parts(self) -> list[Any]:
        """Everything on this rank that has weights: its stages, and a replica of the tower."""
        return [*self.stages, *([self.replica] if self.replica is not None else [])]

    @property
    def exported(self) -> list[Any]:
        """The parts that this rank writes when the model is saved: a replica only once."""
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        return self.parts if first else list(self.stages)

    def decodes(self, grids: Sequence[np.ndarray]) -> list[tuple[bool, ...]]:
        """Which media of a step's packs this rank's loader decodes (see `PackedLoader`)."""
        return StepInputs(self.spec, self.layout, grids).decoded_by(self.vision_rank)

    def step(
        self, packs: list[PackedBatch], lr: float, waited: float = 0.0, reading: float = 0.0
    ) -> StepResult:
        """One optimizer step over this data-parallel rank's packs (the same on its whole model
        parallel group). The loss is the mean over the target tokens of all ranks' packs. No update
        is made where `guard.withheld` says why.

        `waited`: seconds that this rank has waited for the packs, for the ledger; `reading`: of
        them, those until its own were there.
        """
        start = time.perf_counter()
        set_learning_rate(self.optimizer, self.section, lr)
        outputs = self._forward_backward(packs, forward_only=False)
        with self.clock.span("optimizer"):
            _, grad_norm, _ = self.optimizer.step()
        return self._result(packs, outputs, grad_norm, start, waited, reading)

    def rehearse(self, packs: list[PackedBatch]) -> StepResult:
        """A whole step, optimizer included, that leaves every bit of weights, optimizer and random
        state as it was. Only before the first step of a start, while all moments are zero: then
        gradients of zero and a learning rate of zero change nothing."""
        state = random_state()
        self._rehearsing = True
        try:
            return self.step(packs, 0.0)
        finally:
            self._rehearsing = False
            self.guard.forget()
            set_steps(self.optimizer, 0)
            set_random_state(state)

    def passes_again(self, packs: list[PackedBatch]) -> None:
        """Forward and backward of a step without its update, for hooks that look at values;
        gradients and timers are cleared."""
        self._forward_backward(packs, forward_only=False)
        self.backend.synchronize()
        self.clock.read()

    def evaluate(self, packs: list[PackedBatch]) -> StepResult:
        """The same loss without a backward pass or a step. It draws no random numbers and leaves
        gradients, weights and optimizer alone, so training goes on as if it had not been."""
        start = time.perf_counter()
        for part in self.parts:
            part.eval()
        try:
            with torch.no_grad():
                outputs = self._forward_backward(packs, forward_only=True)
        finally:
            for part in self.parts:
                part.train()
        return self._result(packs, outputs, 0.0, start, 0.0)

    def _forward_backward(
        self, packs: list[PackedBatch], forward_only: bool
    ) -> list[dict[str, Tensor]]:
        if not forward_only:
            with self.clock.span("optimizer"):
                for chunk in self.wrapped:
                    chunk.zero_grad_buffer()
                self.optimizer.zero_grad()
        with self.clock.span("passes"):
            return self._passes(packs, forward_only)

    def _passes(self, packs: list[PackedBatch], forward_only: bool) -> list[dict[str, Tensor]]:
        inputs = StepInputs.of(self.spec, self.layout, packs)
        p2p: dict[str, Any] = {}
        if self.p2p is not None:
            self.p2p.expect(inputs)
            p2p = dict(p2p_communicator=self.p2p, pg_collection=self.groups)
        if self.multiplexer is not None:
            self.multiplexer.expect(inputs, packs)
        copies = Copies.start(packs, self.backend)
        if self.shared_pixels is not None:
            copies = Copies(self.shared_pixels.gather(inputs, list(copies.in_turn())), [])
        if self.multiplexer is not None:
            copies = Copies(self.multiplexer.encode(list(copies.in_turn())), [])
        iterators: Any = [copies.in_turn() for _ in self.chunks]
        single = len(self.chunks) == 1
        outputs = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=len(packs),
            seq_length=packs[0].input_ids.shape[0],
            micro_batch_size=1,
            forward_only=forward_only,
            **p2p,
        )
        if self.multiplexer is not None and not forward_only:
            self.multiplexer.backward(self._global_targets)
        return outputs

    def _finalize(self, chunks: list[Any], num_tokens: Tensor, **options: Any) -> None:
        """Megatron's reduction of gradients; remembers the global number of target tokens, by
        which it has divided them."""
        with self.clock.span("gradients"):
            if self._rehearsing:  # a mean over infinitely many tokens is zero
                num_tokens = torch.full_like(num_tokens, math.inf, dtype=torch.float32)
            finalize_model_grads(chunks, num_tokens, **options)
            self._global_targets = num_tokens

    def _result(
        self,
        packs: list[PackedBatch],
        outputs: list[dict[str, Tensor]],
        grad_norm: Any,
        start: float,
        waited: float,
        reading: float = 0.0,
    ) -> StepResult:
        totals = Totals()
        if self._reports:
            sums = {
                name: torch.stack([out[name] for out in outputs]).double().sum().item()
                for name in outputs[0]
            }
            totals = replica_totals(packs, self.spec, **sums)
        self.backend.synchronize()  # the loss has been read: nothing is left to wait for
        return gather(
            totals,
            self.clock.read(),
            grad_norm=float(grad_norm or 0.0),
            reading=reading,
            waited=waited,
            step=time.perf_counter() - start,
            place=(self.data_rank, parallel_state.get_pipeline_model_parallel_rank()),
            memory=self.backend.peak_memory_bytes(),
            device=self.backend.device,
        )


def _forward_step(packs: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
    pack = next(packs)
    with model_code():
        return model(pack), partial(_loss, pack)


def _loss(pack: PackedBatch, sums: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over target tokens, weighted, and their number: Megatron divides by the global number."""
    aux_loss = {"aux_loss": sums[1].detach()} if sums.dim() else {}
    total = sums[0].clone() if aux_loss else sums  # Megatron frees it, which a view does not allow
    count = total.new_full((), pack.target_tokens, dtype=torch.int32)
    return total, count, {"loss": total.detach().clone(), **aux_loss}
