"""Adam and AdamW on host memory: one native call a step for all tensors of a group.

Method: Kingma & Ba 2015 (https://arxiv.org/abs/1412.6980), Loshchilov & Hutter 2019
(https://arxiv.org/abs/1711.05101), in the operation order of torch.optim.AdamW(fused=True), to
which parameters and moments are bit-identical on machines with AVX2 or AVX-512.

Speed of light: memory bandwidth at 28 bytes an element with float32 gradients (4 reads, 3 writes),
28 with bfloat16 gradients and a bfloat16 copy of the parameter written in the same pass, 20 with
bfloat16 moments as well, 16 with 8-bit ones (where arithmetic takes longer than memory).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vlmkernels._native import describe

from . import blockwise
from .native import (
    Rows,
    check_gradient,
    check_hyperparameters,
    check_nonfinite,
    is_dense,
    is_host,
    is_step,
    overlap,
    sum_of_squares,
)
from .state import (
    CODES,
    EIGHT_BIT,
    MOMENTS,
    SCALES,
    check_loaded,
    check_moments,
    fill_groups,
    fit_moments,
    is_like,
)

logger = logging.getLogger(__name__)


class _Known:
    """A parameter whose tensors were checked, and the row that they make."""

    __slots__ = (
        *("param", "grad", "keys", "exp_avg", "exp_avg_sq", "scales", "step", "key", "row"),
        "written",
    )

    def __init__(
        self,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        low: Tensor | None,
        keys: tuple[str, str],
    ) -> None:
        self.param = param
        self.grad = weakref.ref(grad)  # zero_grad is to free its memory
        self.keys = keys
        self.exp_avg, self.exp_avg_sq = (state[key] for key in keys)
        coded = keys is CODES
        self.scales = (state[SCALES[0]], state[SCALES[1]]) if coded else None
        self.step = state["step"]
        self.written = (param,) if low is None else (param, low)
        self.key, self.row = Rows.make(
            param, grad, self.exp_avg, self.exp_avg_sq, self.step, low, 0, self.scales
        )

    def holds(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> bool:
        """Whether these are the same tensors, and lie where they did."""
        row = self.row
        return (
            self.param is param
            and param.data_ptr() == row[0]
            and grad.data_ptr() == row[1]
            and grad is self.grad()
            and self.exp_avg.data_ptr() == row[2]
            and self.exp_avg_sq.data_ptr() == row[3]
            and self.step.data_ptr() == row[5]
            and self.exp_avg is state.get(self.keys[0])
            and self.exp_avg_sq is state.get(self.keys[1])
            and self.step is state.get("step")
            and (self.scales is None or self.scales[0] is state.get(SCALES[0]))
            and (self.scales is None or self.scales[1] is state.get(SCALES[1]))
        )


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
        moments: torch.float32, or torch.bfloat16 to hold both moments in half the memory. They are
            then rounded up or down at random in proportion, which keeps their mean: rounded to
            nearest, exp_avg_sq would stand still at beta2 = 0.999. The random numbers depend on
            step and element alone, so that a run can be repeated and resumed bit for bit.
            torch.uint8 for 8-bit block-wise moments (Dettmers et al. 2022, arXiv:2110.02861) in a
            quarter of the memory: one code an element and one scale per 256; the state keys are
            then exp_avg_codes, exp_avg_scales and so on, and load from and into those of the
            other types. A gradient that is not finite makes a block's moments NaN.
        nonfinite: what a NaN or an infinity in any gradient does. "propagate": as in torch, it goes
            into parameters and moments. "skip": the step changes nothing and is counted in
            `skipped_steps`; looking for them reads the gradients once more.

    Gradients are float32 or bfloat16, read from `param.decoupled_grad` where that attribute is set
    (torch refuses a bfloat16 `grad` on a float32 parameter), else from `param.grad`. A parameter
    without a gradient is skipped. Gradients are read once and never written.

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
        check_hyperparameters(lr, betas, eps, weight_decay)
        check_moments(moments)
        check_nonfinite(nonfinite)
        self.moments = moments
        self.nonfinite = nonfinite
        #: Steps that changed nothing, because of a gradient that was not finite or `found_inf`.
        self.skipped_steps = 0
        self._low: dict[Tensor, Tensor] = {}
        self._known: list[list[_Known | None]] = []  # by group and parameter, of the last step
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
            if param.dtype != torch.float32 or param.device.type != "cpu" or not is_dense(param):
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter is {describe(param)} with strides {tuple(param.stride())}; "
                    "CPUAdam needs float32 on cpu, without gaps in memory"
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
        if not any(param is p for group in self.param_groups for p in group["params"]):
            raise ValueError(f"param, {describe(param)}, is not a parameter of this optimizer")
        if copy is None:
            self._low.pop(param, None)
            self._known = []
            return
        if (
            copy.dtype != torch.bfloat16
            or copy.shape != param.shape
            or copy.stride() != param.stride()
            or not is_host(copy)
            or overlap(copy, param)
        ):
            raise ValueError(
                f"copy is {describe(copy)} with strides {tuple(copy.stride())}; it must be "
                f"bfloat16 {list(param.shape)} on cpu with strides {tuple(param.stride())}, in "
                "memory of its own"
            )
        with torch.no_grad():
            copy.copy_(param)
        self._low[param] = copy
        self._known = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known = []
        # torch pickles state, groups and defaults only.
        for name, value in (("moments", torch.float32), ("nonfinite", "propagate"), ("_low", {})):
            self.__dict__.setdefault(name, value)
        self.__dict__.setdefault("skipped_steps", 0)
        fill_groups(self.param_groups, self.defaults)
        for param, values in self.state.items():
            if "step" in values:  # Megatron loads one tensor for all parameters
                values["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)
            check_loaded(values, param)

    def grad_norm(self) -> float:
        """The L2 norm of all gradients, in one pass; infinite or NaN where a gradient is."""
        grads = [self._gradient(p) for group in self.param_groups for p in group["params"]]
        dense = [g if is_dense(g) else g.contiguous() for g in grads if g is not None]
        return math.sqrt(sum_of_squares(dense))

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        seen: set[int] = set()
        keep: list[Tensor] = []
        written: list[Tensor] = []
        numbers = range(len(self.param_groups))
        collected = [self._collect(i, seen, keep, written) for i in numbers]
        if found_inf is None and self.nonfinite == "skip":
            found_inf = not math.isfinite(sum_of_squares(keep) * grad_scale)
        if found_inf:
            self.skipped_steps += 1
            logger.warning("a gradient is not finite: step skipped, %d so far", self.skipped_steps)
            return loss
        for group, rows in zip(self.param_groups, collected, strict=True):
            rows.step(group, grad_scale)
        # Autograd is to notice when a saved tensor was overwritten.
        torch.autograd.graph.increment_version(written)
        return loss

    @staticmethod
    def _gradient(param: Tensor) -> Tensor | None:
        grad = getattr(param, "decoupled_grad", None)
        grad = param.grad if grad is None else grad
        if grad is not None:
            check_gradient(param, grad)
        return grad

    def _collect(
        self, number: int, seen: set[int], keep: list[Tensor], written: list[Tensor]
    ) -> Rows:
        """Checks the tensors of a group and returns them as rows; their gradients go into `keep`,
        since those copied to another layout must outlive the native calls, and what a step changes
        of the model into `written`.

        With thousands of small tensors Python takes longer than the arithmetic: what was checked at
        the last step and is the same objects at the same addresses is not looked at again (a
        third of the time). `seen` holds the addresses of the steps met so far: a loader may have
        given one step tensor to several parameters, which would then count every update of each.
        """
        params, rows, states = self.param_groups[number]["params"], Rows(), self.state
        if len(self._known) <= number or len(self._known[number]) != len(params):
            del self._known[number:]
            self._known.append([None] * len(params))
        known = self._known[number]
        for i, param in enumerate(params):
            # The attribute is looked up where it would be, as its absence is slow to find out.
            grad = param.__dict__.get("decoupled_grad")
            if grad is None:
                grad = param.grad
                if grad is None:
                    continue
            state, entry = states.get(param), known[i]
            if entry is None or state is None or not entry.holds(param, grad, state):
                grad, entry = self._check(param, grad)
                known[i] = entry
            if entry.row[5] in seen:
                self.state[param]["step"] = entry.step.clone()
                grad, entry = self._check(param, grad)
                known[i] = entry
            seen.add(entry.row[5])
            keep.append(grad)
            written += entry.written
            rows.append(entry.key, entry.row)
        return rows

    def _check(self, param: Tensor, grad: Tensor) -> tuple[Tensor, _Known]:
        """The gradient in the parameter's memory layout, perhaps a copy, and the row."""
        check_gradient(param, grad)
        stride = param.stride()
        if grad.stride() != stride:  # the native step walks through memory, not indices
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        elif grad.data_ptr() == param.data_ptr() and grad.numel():
            raise ValueError(
                f"a gradient, {describe(grad)}, lies in its parameter's memory; it needs its own"
            )
        state = self.state[param]
        if not is_step(state.get("step")) or not self._holds_moments(state, stride, param.numel()):
            if not is_step(state.get("step")):
                state["step"] = torch.tensor(float(state.get("step", 0)), dtype=torch.float32)
            fit_moments(state, self.moments, partial(torch.empty_like, param))
        keys = CODES if self.moments == EIGHT_BIT else MOMENTS
        return grad, _Known(param, grad, state, self._low.get(param), keys)

    def _holds_moments(self, state: dict[str, Any], stride: tuple[int, ...], numel: int) -> bool:
        if self.moments == EIGHT_BIT:
            for key in SCALES:
                scales = state.get(key)
                if scales is None or scales.dtype != torch.float32 or not scales.is_contiguous():
                    return False
                if scales.numel() != blockwise.num_blocks(numel):
                    return False
            return all(is_like(state.get(key), EIGHT_BIT, stride) for key in CODES)
        return all(is_like(state.get(key), self.moments, stride) for key in MOMENTS)
