"""Model, optimizer and pipeline schedule of one rank: give it packs, it makes one step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
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
from torch import Tensor

from vlmtrain.config import FreezeSection, LoraSection, OptimizerSection, RecomputeSection
from vlmtrain.data.batch import PackedBatch
from vlmtrain.device import Backend, without_shim
from vlmtrain.models.configs import language_config, vision_config
from vlmtrain.models.lora import add_adapters
from vlmtrain.models.spec import ModelSpec
from vlmtrain.models.stage import QwenVLStage
from vlmtrain.models.trainable import freeze, mark_lowest_trainable
from vlmtrain.optimizer import build_optimizer, set_learning_rate
from vlmtrain.parallel.layout import Layout
from vlmtrain.parallel.multiplex import Multiplexer, VisionReplica, replicated_groups

IGNORED_LABEL = -100


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same values on every rank."""

    loss: float  # mean over the target tokens of the global batch
    grad_norm: float
    tokens: int  # without padding
    target_tokens: int
    image_tokens: int
    pad_tokens: int


class Engine:
    """This rank's stages. Load their weights, `prepare` the optimizer, then `step`.

    `torch.distributed` must be initialised; one engine a process. Without weights loaded the
    parameters are Megatron's random initialisation.
    """

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
        self.data_rank = parallel_state.get_data_parallel_rank()
        # The rank whose counts stand for its data-parallel replica.
        self._reports = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    def prepare(self, optimizer: OptimizerSection, frozen: FreezeSection | None = None) -> None:
        """Gradient buffers and optimizer. After the weights are loaded: both take copies.

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
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False
        )
        self.chunks: list[Any] = [
            DistributedDataParallel(self.config, ddp, stage, disable_bucketing=i > 0)
            for i, stage in enumerate(self.stages)
        ]
        for chunk in self.chunks:
            _skip_lonely_collectives(chunk)
        self.optimizer = build_optimizer(optimizer, self.chunks, self.dtype)
        self.multiplexer: Multiplexer | None = None
        if self.replica is not None:
            groups = replicated_groups()
            self.tower = DistributedDataParallel(
                self.replica.config, ddp, self.replica, pg_collection=groups
            )
            _skip_lonely_collectives(self.tower)
            towers = build_optimizer(optimizer, [self.tower], self.dtype, groups)
            self.optimizer = ChainedOptimizer(
                [*self.optimizer.chained_optimizers, *towers.chained_optimizers]
            )
            self.multiplexer = Multiplexer(self.tower, self.spec, self.layout.tensor, self.dtype)
        self.config.grad_scale_func = self.optimizer.scale_loss

    def prepare_evaluation(self) -> None:
        """What `evaluate` needs, and no more: no gradient buffers, no optimizer. Instead of
        `prepare`; before or after the weights are loaded."""
        self.chunks = list(self.stages)
        self.multiplexer = None
        if self.replica is not None:
            self.multiplexer = Multiplexer(self.replica, self.spec, self.layout.tensor, self.dtype)

    def _add_adapters(self) -> None:
        for part in self.parts:
            if part.language_model is not None:
                layers = part.language_model.decoder.layers
                add_adapters(layers, self.spec, self.lora, vision=False, seed=self.seed)
            if self.lora.vision and part.vision is not None:
                layers = part.vision.blocks.layers
                add_adapters(layers, self.spec, self.lora, vision=True, seed=self.seed)

    @property
    def parts(self) -> list[Any]:
        """Everything on this rank that has weights: its stages, and a replica of the tower."""
        return [*self.stages, *([self.replica] if self.replica is not None else [])]

    @property
    def exported(self) -> list[Any]:
        """The parts that this rank writes when the model is saved: a replica only once."""
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        return self.parts if first else list(self.stages)

    @property
    def needs_pixels(self) -> bool:
        """Whether this rank embeds patches."""
        return self.layout.multiplexed or any(stage.stage == 0 for stage in self.stages)

    def step(self, packs: list[PackedBatch], lr: float) -> StepResult:
        """One optimizer step over this data-parallel rank's packs (the same on its whole model
        parallel group). The loss is the mean over the target tokens of all ranks' packs."""
        set_learning_rate(self.optimizer, self.section, lr)
        outputs = self._forward_backward(packs, forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        return self._result(packs, outputs, grad_norm)

    def evaluate(self, packs: list[PackedBatch]) -> StepResult:
        """The same loss without a backward pass or a step. It draws no random numbers and leaves
        gradients, weights and optimizer alone, so training goes on as if it had not been."""
        for part in self.parts:
            part.eval()
        try:
            with torch.no_grad():
                outputs = self._forward_backward(packs, forward_only=True)
        finally:
            for part in self.parts:
                part.train()
        return self._result(packs, outputs, 0.0)

    def _forward_backward(
        self, packs: list[PackedBatch], forward_only: bool
    ) -> list[dict[str, Tensor]]:
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        packs = [pack.to(self.backend.device, non_blocking=True) for pack in packs]
        if self.multiplexer is not None:
            if not forward_only:
                self.tower.zero_grad_buffer()
            packs = list(self.multiplexer.encode(packs))
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
        )
        if self.multiplexer is not None and not forward_only:
            self.multiplexer.backward()
            self.tower.finish_grad_sync()
            self.tower.scale_gradients(1.0 / max(1, self._global_targets))
        return outputs

    def _finalize(self, chunks: list[Any], num_tokens: Tensor, **options: Any) -> None:
        """Megatron's reduction of gradients; remembers the global number of target tokens, by
        which it has divided them."""
        finalize_model_grads(chunks, num_tokens, **options)
        self._global_targets = int(num_tokens)

    def _result(
        self, packs: list[PackedBatch], outputs: list[dict[str, Tensor]], grad_norm: Any
    ) -> StepResult:
        totals = torch.zeros(5, dtype=torch.float64)
        if self._reports:
            totals[0] = sum(float(out["loss"]) for out in outputs)
            totals[1] = sum(p.target_tokens for p in packs)
            totals[2] = sum(p.image_tokens for p in packs)
            totals[3] = sum(p.pad_tokens for p in packs)
            totals[4] = sum(p.input_ids.shape[0] for p in packs)
        totals = totals.to(self.backend.device)
        dist.all_reduce(totals)
        loss, target, image, pad, every = totals.tolist()
        return StepResult(
            loss=loss / max(target, 1.0),
            grad_norm=float(grad_norm or 0.0),
            tokens=int(every - pad),
            target_tokens=int(target),
            image_tokens=int(image),
            pad_tokens=int(pad),
        )


def _skip_lonely_collectives(chunk: DistributedDataParallel) -> None:
    """With one data-parallel rank, gloo's reduce-scatter of gradients and all-gather of weights
    copy whole buffers onto themselves, several times. (NCCL returns at once.)"""
    for group in chunk.bucket_groups:
        if group.intra_distributed_optimizer_instance_size == 1:
            group.start_grad_sync = group.finish_grad_sync = _nothing
            group.start_param_sync = _nothing


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
