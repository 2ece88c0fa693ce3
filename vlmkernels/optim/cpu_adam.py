"""Adam and AdamW on host memory: one native call a step for all tensors of a group.

Method: Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980), Loshchilov & Hutter 2019
(https://arxiv.org/abs/1711.05101), in the operation order of torch.optim.AdamW(fused=True), to
which parameters and moments are bit-identical on machines with AVX2 or AVX-512.

Speed of light: 28 bytes an element with float32 gradients (4 reads, 3 writes), so memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, describe

_GRADIENTS = (torch.float32, torch.bfloat16)


def adam_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """What one step means, in place, in plain torch: tests and documentation. `step` is from 1."""
    beta1, beta2 = betas
    grad = grad.to(param.dtype)
    if decoupled:
        param.mul_(1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + eps
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


def _is_dense(x: Tensor) -> bool:
    """Its elements fill one piece of memory without gaps or overlaps, in any order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class CPUAdam(torch.optim.Optimizer):
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

    Gradients are float32 or bfloat16, read from `param.decoupled_grad` where that attribute is set
    (torch refuses a bfloat16 `grad` on a float32 parameter), else from `param.grad`. A parameter
    without a gradient is skipped.

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
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        for i, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{i}] is {beta}; it must be in [0, 1)")
        # The name under which torch.optim.Adam and AdamW keep this flag.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype != torch.float32 or param.device.type != "cpu" or not _is_dense(param):
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter is {describe(param)} with strides {tuple(param.stride())}; "
                    "CPUAdam needs float32 on cpu, without gaps in memory"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])
            for flag in ("amsgrad", "maximize"):
                if group.get(flag):
                    raise ValueError(f"the loaded state has {flag}=True; CPUAdam has no {flag}")
        for param, values in self.state.items():
            if "step" in values:  # Megatron loads a plain number, or one tensor for all parameters
                values["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)
            for key in ("exp_avg", "exp_avg_sq"):
                if key in values and values[key].shape != param.shape:
                    raise ValueError(
                        f"the loaded {key} is {describe(values[key])} for a parameter of shape "
                        f"{list(param.shape)}; they must be equal"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        rows: dict[torch.dtype, list[tuple[int, int, int, int, int]]] = {}
        steps: dict[torch.dtype, list[float]] = {}
        keep: list[Tensor] = []  # gradients copied to another layout must outlive the native call
        counters: list[tuple[dict[str, Any], float]] = []
        for param in group["params"]:
            grad = getattr(param, "decoupled_grad", None)
            grad = param.grad if grad is None else grad
            if grad is None:
                continue
            grad = self._check_gradient(param, grad)
            keep.append(grad)
            state = self.state[param]
            moments = [self._moment(param, state, key) for key in ("exp_avg", "exp_avg_sq")]
            step = float(state.get("step", 0)) + 1
            counters.append((state, step))
            addresses = (x.data_ptr() for x in (param, grad, *moments))
            rows.setdefault(grad.dtype, []).append((*addresses, param.numel()))  # type: ignore[arg-type]
            steps.setdefault(grad.dtype, []).append(step)
        for dtype, tensors in rows.items():
            _C.adam_step(
                tensors,
                steps[dtype],
                DTYPES[dtype],
                float(group["lr"]),
                *map(float, group["betas"]),
                float(group["eps"]),
                float(group["weight_decay"]),
                bool(group["decoupled_weight_decay"]),
            )
        for state, step in counters:
            # A new tensor, not an addition in place: a loader may have shared one among parameters.
            state["step"] = torch.tensor(step, dtype=torch.float32)

    @staticmethod
    def _check_gradient(param: Tensor, grad: Tensor) -> Tensor:
        if (
            grad.dtype not in _GRADIENTS
            or grad.shape != param.shape
            or grad.layout != torch.strided
            or grad.device != param.device
        ):
            layout = "" if grad.layout == torch.strided else f" ({grad.layout})"
            raise ValueError(
                f"a gradient is {describe(grad)}{layout}; it must be dense float32 or bfloat16 "
                f"{list(param.shape)} on {param.device}"
            )
        if grad.stride() == param.stride():
            return grad
        return torch.empty_like(param, dtype=grad.dtype).copy_(grad)

    @staticmethod
    def _moment(param: Tensor, state: dict[str, Any], key: str) -> Tensor:
        """The moment in the parameter's memory layout: the native step walks memory, not indices."""
        moment = state.get(key)
        if moment is None:
            moment = state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        elif moment.dtype != torch.float32 or moment.stride() != param.stride():
            moment = state[key] = torch.empty_like(param).copy_(moment)
        return moment
