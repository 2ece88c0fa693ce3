"""megatron-core's DistributedOptimizer with part of its state in host memory.

Usage, in a training script of your own, after the optimizer was made and the weights were loaded:

    optimizer = get_megatron_optimizer(config, model_chunks)
    offload(optimizer, 0.5)

and nothing else: clipping over all ranks, loss scaling, dist_checkpointing, reload_model_params and
learning-rate schedules work as before; a checkpoint doesn't know the fraction it was written with.

The shards of a rank's float32 master weights and moments that are offloaded live in host memory and
are stepped there. Gradients are copied D2H while Megatron computes their norm; with `early=True`
and `overlap_grad_reduce` as soon as they are reduced, bucket by bucket while the backward pass goes
on (gradients.py). The clip factor is applied as they are read; new values are copied H2D in
buckets, before Megatron gathers the parameters. What stays on the device is stepped by Megatron's
own optimizer meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from vlmkernels._native import describe
from vlmkernels.optim.checks import hyperparameters
from vlmkernels.optim.cpu_adam import CPUAdam
from vlmkernels.optim.host_step import HostStep, Shard, Work
from vlmkernels.optim.masters import differs
from vlmkernels.optim.multi_tensor import GRADIENTS
from vlmkernels.optim.placement import check_fraction, preference, relocate
from vlmkernels.optim.state import copy_moments, ensure_moments, step_count
from vlmkernels.optim.transfer import Transfers, Waitable

from .gradients import EarlyGradients


def offload(
    optimizer: Any,
    fraction: float,
    *,
    gradients: torch.dtype | None = None,
    early: bool = False,
    bucket_bytes: int = 32 << 20,
    transfers: Transfers | None = None,
) -> None:
    """Keep this share of the optimizer state of each rank in host memory, from now on.

    Can be called again at any time between steps, with another fraction: state moves, no value
    changes. Largest shards first.

    Args:
        optimizer: a DistributedOptimizer, or a ChainedOptimizer of such.
        fraction: of the elements of a rank's shards, 0 to 1.
        gradients: type in which they are copied: None: the parameter's own (bfloat16 halves the
            traffic and rounds gradients that were reduced in float32); torch.float32: as they are.
        early: with `overlap_grad_reduce`, send gradients during the backward pass. For a script
            that knows what happens to them between it and the step: they may be changed in place
            by Megatron's `finalize_model_grads` alone, or in ways that autograd's version counters
            see (not through `.data`). Counts in the first call.
        bucket_bytes: of gradients stepped at a time.
        transfers: the copies; None: CUDA streams or plain copies, as the device needs.

    Raises:
        ValueError: a fraction, or an optimizer of a kind or configuration, that can't be used.
    """
    check_fraction("fraction", fraction)
    if gradients not in (None, *GRADIENTS):
        raise ValueError(
            f"gradients is {gradients}; it must be torch.float32, torch.bfloat16 or None"
        )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue
        if fraction > 0:
            _check(part)
        if not isinstance(part, OffloadedOptimizer):
            # Without buffers: of a rank that trains nothing, with the groups of other ranks.
            if fraction == 0 or not part.buffers:
                continue
            part.__class__ = OffloadedOptimizer
            part.begin_offloading(gradients, early, bucket_bytes, transfers)
        part.set_offload_fraction(fraction)


def check_masters(optimizer: Any) -> None:
    """Compare all float32 masters, rounded, with the model's weights on this rank.

    Raises:
        RuntimeError: they differ.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, OffloadedOptimizer):
            part.check_masters()


def _check(part: Any) -> None:
    if not isinstance(part, DistributedOptimizer):
        raise ValueError(
            f"optimizer has a {type(part).__name__}; offload needs a DistributedOptimizer: set "
            "OptimizerConfig.use_distributed_optimizer and the same in the DDP config"
        )
    unusable = {
        "Megatron-FSDP": part.ddp_config.use_megatron_fsdp,
        "use_precision_aware_optimizer": part.config.use_precision_aware_optimizer,
        "optimizer_cpu_offload": part.config.optimizer_cpu_offload,
        "reuse_grad_buf_for_mxfp8_param_ag": part.config.reuse_grad_buf_for_mxfp8_param_ag,
        "log_num_zeros_in_grad": part.config.log_num_zeros_in_grad,  # reads gradients of masters
    }
    for name, used in unusable.items():
        if used:
            raise ValueError(f"offload doesn't work together with {name}; switch it off")
    for buffer in part.buffers:
        if buffer.param_dtype not in GRADIENTS:
            raise ValueError(
                f"parameters are {buffer.param_dtype}; offload needs float32 or bfloat16"
            )


def weights_of(part: DistributedOptimizer, model: Tensor) -> Tensor:
    """This rank's shard of a model parameter, in the buffer that is gathered."""
    in_buffer = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    number, _, bucket = part.model_param_gbuf_map[model]
    data = part.buffers[number].buckets[bucket].param_data
    return data.view(-1)[in_buffer.start : in_buffer.end]


def counts_for_norm(part: DistributedOptimizer, main: Tensor) -> bool:
    """Megatron's choice: whether this rank's gradient of the shard is part of the norm."""
    group = getattr(part, "tp_group", None)
    return param_is_not_shared(main) and tensor_parallel.param_is_not_tensor_parallel_duplicate(
        main, group
    )


@dataclass(eq=False)
class _ShardLocation:
    """Where a rank's shard of one model parameter is kept by the DistributedOptimizer."""

    model: Tensor  # the whole parameter
    mains: list[Tensor]  # the list that holds its float32 shard ...
    position: int  # ... at this position
    group: dict[str, Any]  # the optimizer's parameter group ...
    order: int  # ... and its position there

    @property
    def main(self) -> Tensor:
        return self.mains[self.position]


class OffloadedOptimizer(DistributedOptimizer):
    """A DistributedOptimizer becomes one by `offload`."""

    def begin_offloading(
        self,
        gradients: torch.dtype | None,
        early: bool,
        bucket_bytes: int,
        transfers: Transfers | None,
    ) -> None:
        device = self.buffers[0].param_data.device
        self._gradients = gradients
        self._host = HostStep(transfers, bucket_bytes)  # shards by float32 master
        self._host.connect(device)
        # Where the inner optimizer keeps a shard's count of steps: None: in the group.
        self._steps: dict[Tensor, torch.device | None] = {}
        self._grads: dict[Tensor, Tensor] = {}  # on the device, of this step
        self._factors: dict[Tensor, Any] = {}  # of gradients that were sent before it was applied
        self._early: EarlyGradients | None = None
        if early and self.ddp_config.overlap_grad_reduce:
            self._early = EarlyGradients(
                self.model_chunks, self.buffers, self._begin_early, self._host.before_change
            )
        # Rides along when Megatron clips, to learn the factor: its gradient is 1.
        self._probe = torch.zeros(1, device=device)
        self._own_steps()

    def _own_steps(self) -> None:
        """Megatron's load gives all parameters one tensor of steps, which each would count up."""
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    def _home(self, location: _ShardLocation, device: torch.device) -> torch.device | None:
        """Where the inner optimizer keeps the count of steps of a parameter on `device`; None: in
        its group."""
        if not isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW, CPUAdam)):
            return None
        on_device = location.group.get("fused") or location.group.get("capturable")
        return device if on_device else torch.device("cpu")

    # ---- where state is --------------------------------------------------------------------------

    def _locations(self) -> Iterator[_ShardLocation]:
        """In the order of the parameter groups."""
        for number, group in enumerate(self.optimizer.param_groups):
            order = 0
            for models, mains in (
                (self.model_fp32_groups, self.shard_fp32_groups),
                (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            ):
                for i, model in enumerate(models[number]):
                    yield _ShardLocation(model, mains[number], i, group, order)
                    order += 1

    def _gradient(self, model: Tensor) -> Tensor:
        part = self._get_model_param_range_map(model)["param"]
        return model.main_grad.view(-1)[part.start : part.end]  # type: ignore[attr-defined]

    def set_offload_fraction(self, fraction: float) -> None:
        """See `offload`."""
        locations = list(self._locations())
        mains = [location.main for location in locations]
        order = preference(mains, "largest")
        relocate(
            mains, fraction, order, self._host.shards, lambda i, to: self._move(locations[i], to)
        )
        self._host.trim()

    @torch.no_grad()
    def _move(self, location: _ShardLocation, to_host: bool) -> None:
        old, target = location.main, weights_of(self, location.model)
        state = self.optimizer.state[old]
        device = torch.device("cpu") if to_host else target.device
        moved = copy_moments(state, torch.float32, old.shape, device)
        steps = state.get("step")
        shard = None
        if to_host:
            counted = location.group.get("step", 0) if steps is None else steps
            moved["step"] = step_count(counted)
            shard = self._host.make_shard(target, state, self._gradients or target.dtype, old)
            new = shard.master
        else:
            home = self._steps[old]
            if home is None:  # moved before its first step
                home = self._home(location, target.device)
            if home is not None:
                moved["step"] = steps.to(home, copy=True)
            self._host.settle(old)
            part = self._get_model_param_range_map(location.model)["param"]
            own = target.dtype == torch.float32  # then Megatron's shard is a view of the parameter
            with torch.enable_grad():
                view = location.model.view(-1)[part.start : part.end]
            new = view if own else old.to(device, copy=True)
        tensor_parallel.copy_tensor_model_parallel_attributes(new, location.model)
        if hasattr(location.model, "shared"):
            new.shared = location.model.shared  # type: ignore[attr-defined]
        # All memory is there: nothing fails from here on.
        self._host.drop(old)
        self._grads.pop(old, None)
        self._steps.pop(old, None)
        state.pop("step", None)
        state.update(moved)
        del self.optimizer.state[old]
        if isinstance(self.optimizer, CPUAdam):
            self.optimizer.set_low_precision(old, None)
        self.optimizer.state[new] = state
        location.mains[location.position] = location.group["params"][location.order] = new
        if target.dtype != torch.float32:
            location.model.main_param = new  # type: ignore[attr-defined]
        if shard is not None:
            self._host.shards[new] = shard
            self._steps[new] = None if steps is None else steps.device

    def check_masters(self) -> None:
        """See the function of this name."""
        for location in self._locations():
            if differs(location.main, weights_of(self, location.model)):
                raise RuntimeError(
                    f"the master copy of a parameter of shape {list(location.model.shape)} differs "
                    "from the model: after other weights were loaded call "
                    "optimizer.reload_model_params()"
                )

    # ---- Megatron's step -------------------------------------------------------------------------

    @torch.no_grad()
    def _begin_early(self, model: Tensor, after: Waitable | None) -> bool:
        """Start a reduced gradient's copy, unless it will be changed or isn't this rank's."""
        index = self.model_param_group_index_map.get(model)
        if self.grad_scaler or index is None:
            return False
        shard = self._host.shards.get(self.optimizer.param_groups[index[0]]["params"][index[1]])
        if shard is not None:
            self._host.begin(shard, self._gradient(model), after)
        return shard is not None

    def _copy_model_grads_to_main_grads(self) -> None:
        self._probe.grad = torch.ones_like(self._probe)
        early = self._early.take() if self._early is not None else {}
        self._factors = {}
        late = []
        for location in self._locations():
            grad, main = self._gradient(location.model), location.main
            shard = self._host.shards.get(main)
            if shard is None:
                # Clipped in place: `.data` keeps that out of the version that the buffer's other
                # gradients share, which would be sent again.
                main.grad = grad.data.float()
                continue
            self._grads[main] = grad
            if location.model in early and shard.grad is not None:
                self._factors[main] = early[location.model]
                shard.version = grad._version
                continue
            self._host.forget([shard])
            late.append((shard, grad))
        if not self.grad_scaler:  # which changes them first
            self._begin(late)

    def _begin(self, late: list[tuple[Shard, Tensor]]) -> None:
        self._host.begin_all([shard for shard, _ in late], [grad for _, grad in late])

    def _main_grads(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                yield main, self._grads[main] if main in self._host.shards else main.grad

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """For offloaded shards the gradients on the device."""
        return [
            grad.float()
            for main, grad in self._main_grads()
            if grad is not None and counts_for_norm(self, main)
        ]

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        return [grad.data for _, grad in self._main_grads() if grad is not None]

    def get_parameters(self) -> list[Any]:
        """What Megatron clips: gradients on the device, and the probe."""
        return [*super().get_parameters(), self._probe]

    def _copy_main_params_to_model_params(self) -> None:
        self._step_shards()
        for location in self._locations():
            if location.main not in self._host.shards:
                weights_of(self, location.model).copy_(location.main.detach())

    def _step_shards(self) -> None:
        if not self._host.shards:
            return
        assert self._probe.grad is not None
        work: Work = {}
        late = []
        factors: dict[int, float] = {}  # one device tensor for all parameters of a chunk
        for group in self.optimizer.param_groups:
            decoupled = self.config.decoupled_weight_decay
            settings = hyperparameters(
                {**group, "decoupled_weight_decay": decoupled}, "a parameter group"
            )
            for main in group["params"]:
                shard = self._host.shards.get(main)
                if shard is None:
                    continue
                shard.state = self.optimizer.state[main]  # a load replaces it
                self._check_shard(main, shard)
                if not shard.has(self._grads[main]):
                    late.append((shard, self._grads[main]))
                elif main in self._factors:
                    factor = self._factors[main]
                    if id(factor) not in factors:
                        factors[id(factor)] = float(factor)
                    shard.factor = factors[id(factor)]
                work[shard] = settings
        self._begin(late)
        self._host.step(work, float(self._probe.grad))

    @staticmethod
    def _check_shard(main: Tensor, shard: Shard) -> None:
        """Raises ValueError for tensors that others have changed: kernels get addresses."""

        def name() -> str:
            return f"an offloaded shard of {shard.slot.numel()} elements"

        if main.dtype != torch.float32 or main.shape != shard.slot.shape:
            raise ValueError(f"the master of {name()} is {describe(main)}; its shape must stay")
        ensure_moments(shard.state, torch.float32, shard.slot, shard.slot.device, name)
        if any(x.is_shared() for x in (main, shard.state["exp_avg"], shard.state["exp_avg_sq"])):
            raise ValueError(
                f"the state of {name()} was sent to another process, as Megatron's persistent "
                "checkpoint worker has it, which would save what this step writes; save without "
                "it, and offload(optimizer, 0) and back gives the state memory of its own again"
            )

    # ---- loading ---------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any) -> None:
        """Megatron's, which makes the state to load into only where there is none at all."""
        self._host.settle()
        for location in self._locations():
            state = self.optimizer.state[location.main]
            if "exp_avg" not in state:
                state |= {
                    name: torch.zeros_like(location.main) for name in ("exp_avg", "exp_avg_sq")
                }
                if (home := self._home(location, location.main.device)) is not None:
                    state["step"] = torch.zeros((), device=home)
        super().load_state_dict(state_dict)
        self._own_steps()
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                if main in self._host.shards and self._steps[main] is None:
                    self.optimizer.state[main]["step"] = step_count(group.get("step", 0))

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        self._host.settle()
        super()._copy_model_params_to_main_params(state_dict=state_dict)

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        self._host.settle(main)
        # Megatron saves the count of steps once, and then misses it here or has an older one.
        state = self.optimizer.state[main]
        tensors = {**tensors, **({"step": state["step"]} if "step" in state else {})}
        super()._set_main_param_and_optimizer_states(model_param, tensors)
        target = weights_of(self, model_param)
        if main in self._host.shards and target.dtype == torch.float32:
            # Without offloading, a float32 master is the model's own memory.
            with torch.no_grad():
                target.copy_(main)


__all__ = ["OffloadedOptimizer", "check_masters", "offload"]
