"""Adam and AdamW on host memory: one native call a step for all tensors of a group.

Method: Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980), Loshchilov & Hutter 2019
(https://arxiv.org/abs/1711.05101), in the operation order of torch.optim.AdamW(fused=True), to
which parameters and moments are bit-identical on machines with AVX2 or AVX-512.

Speed of light: memory bandwidth at 28 bytes an element with float32 gradients (4 reads, 3 writes),
28 with bfloat16 gradients and a bfloat16 copy of the parameter written in the same pass, 20 with
bfloat16 moments as well, 16 with 8-bit ones (where arithmetic takes longer than memory).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor

from vlmkernels._native import describe, not_traced, overlap

from .base import AdamBase
from .checks import (
    check_gradients,
    check_memory,
    gradient_as,
    is_dense,
    is_host,
    is_sharded,
    is_step,
    local,
    local_as,
)
from .multi_tensor import gradients_of
from .native import AdamBatch, Pointers, pointers_of, sum_of_squares
from .state import (
    ensure_moments,
    is_finite_norm,
    loaded_steps,
    mark_codes,
    moment_tensors,
    step_count,
)

logger = logging.getLogger(__name__)


class CPUAdam(AdamBase):
    """AdamW (or Adam) for parameters in host memory.

    A drop-in for torch.optim.AdamW: state_dict()s are interchangeable both ways, state keys are
    step (float32, 0-dim), exp_avg and exp_avg_sq, and parameter groups may carry further keys, as
    Megatron's do.

    Args:
        params: parameters or parameter groups: float32, on the CPU, dense.
        lr: learning rate.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: AdamW's decay per unit of lr; L2 penalty where not decoupled.
        decoupled: True is AdamW, False is Adam with an L2 penalty (torch.optim.Adam).
        moments: torch.float32, or torch.bfloat16 to hold both moments in half the memory. They are
            then rounded up or down at random in proportion, which keeps their mean: rounded to
            nearest, exp_avg_sq would stand still at beta2 = 0.999. The random numbers depend on
            step and element alone, so that a run can be repeated and resumed bit for bit.
            torch.uint8 for 8-bit block-wise moments (Dettmers et al. 2022, arXiv:2110.02861) in a
            quarter of the memory: one code an element and one scale per 256; the state keys are
            then exp_avg_codes, exp_avg_scales and so on, and load from and into those of the
            other types. A gradient that is not finite, or whose square is not (2^64 and more),
            makes a block's moments NaN.
        nonfinite: what a NaN or an infinity in any gradient does. "propagate": as in torch, it goes
            into parameters and moments. "skip": the step changes nothing and is counted in
            `skipped_steps`; looking for them reads the gradients once more. With 8-bit moments a
            norm of 2^64 or more is skipped too.

    Gradients are float32 or bfloat16, read from `param.decoupled_grad` where that attribute is set
    (torch refuses a bfloat16 `grad` on a float32 parameter), else from `param.grad`. A parameter
    without a gradient is skipped. Gradients are read once and never written.

    Parameters may be DTensors, as FSDP2 makes them in host memory: each rank steps its shards.

    Raises:
        ValueError: a hyperparameter, parameter, gradient or loaded state that doesn't fit.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decoupled: bool = True,
        *,
        moments: torch.dtype = torch.float32,
        nonfinite: Literal["propagate", "skip"] = "propagate",
    ) -> None:
        self._low: dict[Tensor, Tensor] = {}
        super().__init__(params, lr, betas, eps, weight_decay, decoupled, moments, nonfinite)

    def _check_param(self, param: Tensor) -> None:
        shard = local(param)
        check_memory("a parameter", shard)
        if not _is_usable(shard):
            raise ValueError(
                f"a parameter is {describe(shard)} with strides {_strides(shard)}; "
                "CPUAdam needs float32 on cpu, without gaps in memory"
            )
        if shard is not param and (self.moments == torch.uint8 or self.nonfinite == "skip"):
            raise ValueError(
                f"a parameter is a DTensor with moments {self.moments} and nonfinite "
                f"{self.nonfinite!r}; a rank knows its own gradients only, and blocks of 256 end "
                "with a shard: it needs torch.float32 or torch.bfloat16, and 'propagate'"
            )

    def set_low_precision(self, param: Tensor, copy: Tensor | None) -> None:
        """Keep `copy` equal to `param` rounded to bfloat16: now, and in the same pass at each step.

        Args:
            param: one of this optimizer's parameters.
            copy: bfloat16, the parameter's shape and strides, in host memory of its own; None ends
                it. A change of the parameter by others reaches the copy with the next step.

        Raises:
            ValueError: a tensor that doesn't fit.
        """
        if copy is None:
            self._low.pop(param, None)
            self._forget_checks()
            return
        if not any(param is p for p in self._params()):
            raise ValueError(f"param, {describe(param)}, is not a parameter of this optimizer")
        if is_sharded(type(param)):
            raise ValueError("param is a DTensor, whose low-precision copy FSDP2 makes itself")
        if not _is_copy(copy, param):
            raise ValueError(
                f"copy is {describe(copy)} with strides {tuple(copy.stride())}; it must be "
                f"bfloat16 {list(param.shape)} on cpu with strides {tuple(param.stride())}, in "
                "memory of its own"
            )
        with torch.no_grad():
            copy.copy_(param)
        self._low[param] = copy
        self._forget_checks()

    def _load_one(self, param: Tensor, values: dict[str, Any]) -> None:
        if not values:
            self.state.pop(param, None)
            return
        state = self.state[param] = {
            key: x if isinstance(x, Tensor) else copy.deepcopy(x) for key, x in values.items()
        }
        state["step"] = loaded_steps(values)
        state.pop("steps", None)
        self._fit_state(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; `decoupled_grad` is a gradient as well."""
        super().zero_grad(set_to_none)
        for param in self._params():
            grad = getattr(param, "decoupled_grad", None)
            if grad is not None:
                param.decoupled_grad = None if set_to_none else grad.detach().zero_()

    def __getstate__(self) -> dict[str, Any]:
        """torch's has state, groups and defaults only."""
        more = ("moments", "nonfinite", "skipped_steps", "_low")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in more}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_checks()
        self.register_state_dict_post_hook(mark_codes)

    def grad_norm(self) -> float:
        """The L2 norm of all gradients, in one pass; infinite or NaN where a gradient is."""
        params, grads = gradients_of(self._params())
        if any(map(is_sharded, set(map(type, params)))):
            raise ValueError(
                "parameters are DTensors, of whose gradients this rank has a part: use "
                "torch.nn.utils.get_total_norm"
            )
        check_gradients(params, grads)
        return math.sqrt(sum_of_squares(g if is_dense(g) else g.contiguous() for g in grads))

    @not_traced
    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float = 1.0,
        found_inf: bool | Tensor | None = None,
    ) -> Any:
        """Updates every parameter that has a gradient; returns the closure's result.

        Args:
            closure: computes loss and gradients first.
            grad_scale: multiplies every gradient as it is read: a clip factor, the inverse of a
                loss scale, or their product.
            found_inf: whether a gradient is not finite, where the caller knows: True skips the
                step under either policy, False saves looking.
        """
        loss = self._loss(closure)
        settings = self._settings()
        work = [gradients_of(group["params"]) for group in self.param_groups]
        params = list(chain.from_iterable(params for params, _ in work))
        rows = iter(self._check_states(params))
        grads: list[Tensor] = []  # those copied to another layout must outlive the native calls
        batches = [self._collect(*item, rows, grads) for item in work]
        if found_inf is None and self.nonfinite == "skip":
            norm = math.sqrt(sum_of_squares(grads)) * abs(grad_scale)
            found_inf = not is_finite_norm(norm, self.moments)
        if found_inf:
            self.skipped_steps += 1
            logger.warning("a gradient is not finite: step skipped, %d so far", self.skipped_steps)
            return loss
        # Autograd is to notice when a saved tensor was overwritten. What is counted is in the
        # caches until the native calls.
        copies = [self._low[p] for p in params if p in self._low] if self._low else []
        torch.autograd.graph.increment_version([*params, *copies])
        for group, batch in zip(settings, batches, strict=True):
            batch.step(group, grad_scale)
        return loss

    def _collect(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        rows: Iterator[Pointers],
        keep: list[Tensor],
    ) -> AdamBatch:
        """Of parameters whose states were checked and are next in `rows`; gradients are checked
        here, and those that will be read go into `keep`."""
        batch = AdamBatch(self.moments)
        if not params:
            return batch
        shards = params
        if any(map(is_sharded, set(map(type, params)))):
            grads = list(map(gradient_as, grads, params))
            shards = list(map(local, params))
        keep += batch.add(shards, grads, list(islice(rows, len(params))))
        return batch

    def _fit_state(self, param: Tensor) -> None:
        shard, low, name = local(param), self._low.get(param), lambda: self._name(param)
        if not _is_usable(shard):
            raise ValueError(
                f"{name()} is {describe(shard)} with strides {_strides(shard)} now; it must be "
                "float32 on cpu, without gaps in memory, as when it came to CPUAdam"
            )
        if low is not None and not _is_copy(low, shard):
            raise ValueError(
                f"the low-precision copy of {name()} is {describe(low)} with strides "
                f"{_strides(low)} now, for {describe(shard)} with strides {_strides(shard)}; give "
                "set_low_precision another"
            )
        state = self.state[param]
        if not is_step(state.get("step")):
            state["step"] = step_count(state.get("step", 0))
        local_state = self._local_state(param)
        before = dict(local_state)
        ensure_moments(local_state, self.moments, shard, shard.device, name)
        for key in before.keys() - local_state.keys():
            del state[key]
        for key, x in local_state.items():
            if x is not before.get(key):
                state[key] = x if shard is param else _spread_as(param, x)

    def _local_state(self, param: Tensor) -> dict[str, Any]:
        """A parameter's state, of DTensors the shards."""
        return {
            key: local_as(f"{key} of a parameter", x, param) for key, x in self.state[param].items()
        }

    def _pointers(self, param: Tensor) -> Pointers:
        state, low = self._local_state(param), self._low.get(param)
        exp_avg, exp_avg_sq, scales = moment_tensors(state)
        return pointers_of(local(param), exp_avg, exp_avg_sq, state["step"], low, scales=scales)

    def _more_to_check(self) -> list[Tensor]:
        return list(self._low.values())


def _is_usable(param: Tensor) -> bool:
    host = is_host(param) and not param.is_neg()
    return host and param.dtype == torch.float32 and is_dense(param)


def _is_copy(copy: Tensor, param: Tensor) -> bool:
    return (
        copy.dtype == torch.bfloat16
        and copy.shape == param.shape
        and copy.stride() == param.stride()
        and is_host(copy)
        and not overlap(copy, param)
    )


def _spread_as(param: Any, shard: Tensor) -> Tensor:
    """A DTensor like the parameter, of which this rank has this shard."""
    mesh, placements = param.device_mesh, param.placements
    more = {"shape": param.shape, "stride": param.stride()}
    return type(param).from_local(shard, mesh, placements, **more)


def _strides(x: Tensor) -> str:
    return str(tuple(x.stride())) if x.layout == torch.strided else str(x.layout)
