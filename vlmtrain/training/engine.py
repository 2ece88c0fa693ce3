"""Model, optimizer and pipeline schedule of one rank: give it packs, it makes one step."""

from __future__ import annotations

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
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from vlmkernels.integrations.megatron import offload
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
from vlmtrain.core.device import Backend
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.cpu.shim import without_shim
from vlmtrain.models.common.configs import language_config, vision_config
from vlmtrain.models.lora import add_adapters
from vlmtrain.models.stage import QwenVLStage
from vlmtrain.models.trainable import freeze, mark_lowest_trainable
from vlmtrain.parallel.multiplex import Multiplexer, VisionReplica, replicated_groups
from vlmtrain.parallel.overlap import parameters_ready
from vlmtrain.parallel.p2p_shapes import KnownShapes
from vlmtrain.parallel.pixel_sharing import SharedPixels
from vlmtrain.parallel.step_inputs import StepInputs
from vlmtrain.telemetry.ledger import StepResult, Totals, gather, replica_totals
from vlmtrain.training.optimizer import build_optimizer, set_learning_rate

IGNORED_LABEL = -100


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
    ) -> None:
        self.spec, self.layout, self.backend, self.dtype = spec, layout, backend, dtype
        self.lora, self.seed = lora or LoraSection(), seed
        self.clock = Clock(backend.is_cuda)
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        )
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
        self.messages: KnownShapes | None = None
        if layout.pipeline > 1:
            self.messages = KnownShapes(layout, self.config)
        self.vision_rank: int | None = None  # among those that decode; as in StepInputs.owners
        self.pixels: SharedPixels | None = None
        if layout.multiplexed:
            self.vision_rank = dist.get_rank(parallel_state.get_model_parallel_group())
        elif any(stage.stage == 0 for stage in self.stages):
            self.vision_rank = parallel_state.get_tensor_model_parallel_rank()
            if layout.tensor > 1:
                self.pixels = SharedPixels(parallel_state.get_tensor_model_parallel_group())
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

        Raises:
            UserError: `frozen` leaves nothing to train.
        """
        self.section = optimizer
        if self.lora.rank:
            freeze(self.parts, FreezeSection(vision=True, merger=True, language=True))
            self._add_adapters()
        else:
            freeze(self.parts, frozen or FreezeSection())
        mark_lowest_trainable(self.stages, self.replica)
        parallel = parallel or ParallelSection()
        self.overlap_param_gather = parallel.overlap_param_gather
        # With one data-parallel rank there is nothing to reduce, but it is how Megatron tells when
        # gradients are final, and offloaded ones can start down.
        offloads = any(offload_fractions(optimizer).values())
        overlap_chunks = parallel.overlap_grad_reduce or (offloads and self.layout.data == 1)
        ddp = partial(
            DistributedDataParallelConfig,
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,
            overlap_param_gather=parallel.overlap_param_gather,
            bucket_size=self.bucket_size,
        )
        self.chunks: list[Any] = [
            DistributedDataParallel(
                self.config, ddp(overlap_grad_reduce=overlap_chunks), stage, disable_bucketing=i > 0
            )
            for i, stage in enumerate(self.stages)
        ]
        for chunk in self.chunks:
            _skip_lonely_collectives(chunk)
        if overlap_chunks:
            syncs = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
            for chunk in self.chunks:
                tower = chunk.module.vision
                if tower is not None:
                    tower.on_skipped_backward = partial(parameters_ready, chunk, tower)
        self.optimizer = build_optimizer(optimizer, self.chunks, self.dtype)
        self.offload_fraction = optimizer.offload_fraction
        self.multiplexer: Multiplexer | None = None
        if self.replica is not None:
            groups = replicated_groups()
            self.tower = DistributedDataParallel(
                self.replica.config,
                ddp(overlap_grad_reduce=parallel.overlap_grad_reduce),
                self.replica,
                pg_collection=groups,
            )
            _skip_lonely_collectives(self.tower)
            towers = build_optimizer(optimizer, [self.tower], self.dtype, groups)
            self.optimizer = ChainedOptimizer(
                [*self.optimizer.chained_optimizers, *towers.chained_optimizers]
            )
            self.multiplexer = Multiplexer(
                self.tower, self.spec, self.layout.tensor, self.dtype, self.clock
            )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.timers = self.clock

    def prepare_evaluation(self) -> None:
        """What `evaluate` needs, and no more: no gradient buffers, no optimizer. Instead of
        `prepare`; before or after the weights are loaded."""
        self.chunks = list(self.stages)
        self.multiplexer = None
        if self.replica is not None:
            self.multiplexer = Multiplexer(
                self.replica, self.spec, self.layout.tensor, self.dtype, self.clock
            )

    def _add_adapters(self) -> None:
        for part in self.parts:
            if part.language_model is not None:
                layers = part.language_model.decoder.layers
                add_adapters(layers, self.spec, self.lora, vision=False, seed=self.seed)
            if self.lora.vision and part.vision is not None:
                layers = part.vision.blocks.layers
                add_adapters(layers, self.spec, self.lora, vision=True, seed=self.seed)

    def set_offload_fraction(self, fraction: float) -> bool:
        """Move optimizer state between device and host, between steps; whether there was a change.
        No value changes."""
        if fraction == self.offload_fraction:
            return False
        offload(self.optimizer, fraction, early=True)
        self.offload_fraction = fraction
        return True

    def gather_weights(self) -> None:
        """Wait until this rank has all updated weights. Collective; before they are saved."""
        if self.overlap_param_gather:
            for chunk in self._wrapped():
                chunk.start_param_sync(force_sync=True)

    def _wrapped(self) -> list[DistributedDataParallel]:
        return [*self.chunks, *([self.tower] if self.replica is not None else [])]

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

    def step(self, packs: list[PackedBatch], lr: float, waited: float = 0.0) -> StepResult:
        """One optimizer step over this data-parallel rank's packs (the same on its whole model
        parallel group). The loss is the mean over the target tokens of all ranks' packs.

        `waited`: seconds that this rank has waited for the packs, for the ledger.
        """
        start = time.perf_counter()
        set_learning_rate(self.optimizer, self.section, lr)
        outputs = self._forward_backward(packs, forward_only=False)
        with self.clock.span("optimizer"):
            _, grad_norm, _ = self.optimizer.step()
        return self._result(packs, outputs, grad_norm, start, waited)

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
                towers = [self.tower] if self.multiplexer is not None else []
                for chunk in [*self.chunks, *towers]:
                    chunk.zero_grad_buffer()
                self.optimizer.zero_grad()
        with self.clock.span("passes"):
            return self._passes(packs, forward_only)

    def _passes(self, packs: list[PackedBatch], forward_only: bool) -> list[dict[str, Tensor]]:
        inputs = StepInputs.of(self.spec, self.layout, packs)
        more: dict[str, Any] = {}
        if self.messages is not None:
            self.messages.expect(inputs)
            more = dict(p2p_communicator=self.messages, pg_collection=self.groups)
        if self.multiplexer is not None:
            self.multiplexer.expect(inputs, packs)
        packs = [pack.to(self.backend.device, non_blocking=True) for pack in packs]
        if self.pixels is not None:
            packs = self.pixels.gather(inputs, packs)
        if self.multiplexer is not None:
            packs = self.multiplexer.encode(packs)
        iterators: Any = [iter(packs) for _ in self.chunks]
        single = len(self.chunks) == 1
        outputs = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=len(packs),
            seq_length=packs[0].input_ids.shape[0],
            micro_batch_size=1,
            forward_only=forward_only,
            **more,
        )
        if self.multiplexer is not None and not forward_only:
            self.multiplexer.backward()
            with self.clock.span("gradients"):
                self.tower.finish_grad_sync()
                self.tower.scale_gradients(1.0 / self._global_targets.clamp_min(1))
        return outputs

    def _finalize(self, chunks: list[Any], num_tokens: Tensor, **options: Any) -> None:
        """Megatron's reduction of gradients; remembers the global number of target tokens, by
        which it has divided them."""
        with self.clock.span("gradients"):
            finalize_model_grads(chunks, num_tokens, **options)
            self._global_targets = num_tokens

    def _result(
        self,
        packs: list[PackedBatch],
        outputs: list[dict[str, Tensor]],
        grad_norm: Any,
        start: float,
        waited: float,
    ) -> StepResult:
        totals = Totals()
        if self._reports:
            loss = torch.stack([out["loss"] for out in outputs]).double().sum().item()
            totals = replica_totals(packs, self.spec, loss)
        self.backend.synchronize()  # the loss has been read: nothing is left to wait for
        return gather(
            totals,
            self.clock.read(),
            grad_norm=float(grad_norm or 0.0),
            waited=waited,
            step=time.perf_counter() - start,
            place=(self.data_rank, parallel_state.get_pipeline_model_parallel_rank()),
            memory=self.backend.peak_memory_bytes(),
            device=self.backend.device,
        )


def _skip_lonely_collectives(chunk: DistributedDataParallel) -> None:
    """With one data-parallel rank, gloo's reduce-scatter of gradients and all-gather of weights
    copy whole buffers onto themselves, several times. (NCCL returns at once.)"""
    for group in chunk.bucket_groups:
        if group.intra_distributed_optimizer_instance_size == 1:
            group.start_grad_sync = group.finish_grad_sync = _nothing
            group.start_param_sync = group.finish_param_sync = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _forward_step(packs: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
    pack = next(packs)
    with without_shim():
        return model(pack), partial(_loss, pack)


def _loss(pack: PackedBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over target tokens and their number: Megatron divides by the global number."""
    target = pack.labels != IGNORED_LABEL
    # where, not a product: a masked position's loss must not count even if it is not finite
    losses = torch.where(target, output.float().view(-1), 0.0)
    total = losses.sum()
    return total, target.sum().int(), {"loss": total.detach().clone()}
