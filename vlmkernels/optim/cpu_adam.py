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
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from vlmkernels._native import DTYPES, describe

from .native import (
    GRADIENTS,
    Rows,
    check_flags,
    check_gradient,
    check_hyperparameters,
    check_memory,
    check_nonfinite,
    is_dense,
    is_host,
    is_step,
    overlap,
    sum_of_squares,
)
from .state import (
    check_moments,
    check_shapes,
    ensure_moments,
    moment_keys,
    moment_tensors,
    step_count,
)

logger = logging.getLogger(__name__)


class _Known:
    """A parameter whose tensors were checked, and the row that they make, but for the gradient."""

    __slots__ = ("moment_type", "order", "param", "row", "shape", "state", "tensors")

    def __init__(
        self, param: Tensor, state: dict[str, Any], low: Tensor | None, keys: tuple[str, ...]
    ) -> None:
        self.param, self.shape, self.order = param, param.shape, _order(param)
        self.state = [(key, state[key]) for key in ("step", *keys)]
        tensors = [param, *(x for _, x in self.state), *([] if low is None else [low])]
        self.tensors = [(x, x.data_ptr(), x.dtype, x.shape, _order(x)) for x in tensors]
        exp_avg, exp_avg_sq, scales = moment_tensors(state)
        (_, self.moment_type), self.row = Rows.make(
            param, param, exp_avg, exp_avg_sq, state["step"], low, 0, scales
        )

    def ordered(self, x: Tensor) -> bool:
        """Whether a tensor of this shape has its elements in the parameter's order."""
        return x.is_contiguous() if self.order is None else x.stride() == self.order

    def holds(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Whether these are the same tensors, and lie where and as they did."""
        if self.param is not param:
            return False
        for key, value in self.state:
            if state.get(key) is not value:
                return False
        for x, pointer, dtype, shape, order in self.tensors:
            if x.data_ptr() != pointer or x.dtype is not dtype or x.shape != shape:
                return False
            if not (x.is_contiguous() if order is None else x.stride() == order):
                return False
        return True


def _order(x: Tensor) -> tuple[int, ...] | None:
    """Strides; None for a contiguous tensor, which is quicker to ask for."""
    return None if x.is_contiguous() else x.stride()


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
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        check_flags(group)
        for param in group["params"]:
            check_memory("a parameter", param)
            if not _is_usable(param):
                raise ValueError(
                    f"a parameter is {describe(param)} with strides {_strides(param)}; "
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
        if not _is_copy(copy, param):
            raise ValueError(
                f"copy is {describe(copy)} with strides {tuple(copy.stride())}; it must be "
                f"bfloat16 {list(param.shape)} on cpu with strides {tuple(param.stride())}, in "
                "memory of its own"
            )
        with torch.no_grad():
            copy.copy_(param)
        self._low[param] = copy
        self._known = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of this class or of torch.optim.Adam or AdamW. Whether weight decay is
        decoupled stays as it was, as with torch's AdamW.

        Raises:
            ValueError: a state that doesn't fit; then nothing is loaded.
        """
        state, groups = self.__dict__["state"], self.__dict__["param_groups"]
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.state, self.param_groups = state, groups
            raise
        for group, own in zip(self.param_groups, groups, strict=True):
            group["decoupled_weight_decay"] = own["decoupled_weight_decay"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; `decoupled_grad` is a gradient as well."""
        super().zero_grad(set_to_none)
        for param in (p for group in self.param_groups for p in group["params"]):
            grad = getattr(param, "decoupled_grad", None)
            if grad is not None:
                param.decoupled_grad = None if set_to_none else grad.detach().zero_()

    def __getstate__(self) -> dict[str, Any]:
        """torch's has state, groups and defaults only."""
        own = ("moments", "nonfinite", "skipped_steps", "_low")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known = []
        # Of pickles that earlier versions wrote.
        for name, value in (("moments", torch.float32), ("nonfinite", "propagate"), ("_low", {})):
            self.__dict__.setdefault(name, value)
        self.__dict__.setdefault("skipped_steps", 0)
        for group in self.param_groups:
            check_flags(group, "the loaded state")
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])
        for param, values in self.state.items():
            if "step" in values:  # Megatron loads one tensor for all parameters
                values["step"] = step_count(values["step"])
            check_shapes(values, param)

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
        for group in self.param_groups:
            check_flags(group)
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

        With thousands of small tensors Python takes longer than the arithmetic: a state that was
        checked at the last step and is the same tensors at the same addresses is not looked at
        again. `seen` holds the addresses of the steps met so far: a loader may have given one step
        tensor to several parameters, which would then count every update of each.
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
            if entry is None or state is None or not entry.holds(param, state):
                entry = known[i] = self._check(param)
            row = entry.row
            if row[5] in seen:
                states[param]["step"] = states[param]["step"].clone()
                entry = known[i] = self._check(param)
                row = entry.row
            seen.add(row[5])
            if (
                grad.dtype not in GRADIENTS
                or grad.shape != entry.shape
                or grad.layout is not torch.strided
                or not grad.is_cpu
            ):
                check_gradient(param, grad)
            if not entry.ordered(grad):  # the native step walks through memory, not indices
                grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
            pointer = grad.data_ptr()
            if not pointer and row[6]:
                check_gradient(param, grad)
            if pointer == row[0] and row[6]:
                raise ValueError(
                    f"a gradient, {describe(grad)}, lies in its parameter's memory; it needs its "
                    "own"
                )
            keep.append(grad)
            written.append(param)
            if row[4]:
                written.append(self._low[param])
            if pointer != row[1]:
                row = entry.row = (row[0], pointer, *row[2:])
            rows.append((DTYPES[grad.dtype], entry.moment_type), row)
        return rows

    def _check(self, param: Tensor) -> _Known:
        """The row of the parameter and its state, which is made where there is none."""
        if not _is_usable(param):
            raise ValueError(
                f"{self._name(param)} is {describe(param)} with strides {_strides(param)} now; it "
                "must be float32 on cpu, without gaps in memory, as when it came to CPUAdam"
            )
        state, low = self.state[param], self._low.get(param)
        if low is not None and not _is_copy(low, param):
            raise ValueError(
                f"the low-precision copy of {self._name(param)} is {describe(low)} with strides "
                f"{_strides(low)} now, for {describe(param)} with strides {_strides(param)}; give "
                "set_low_precision another"
            )
        ensure_moments(state, self.moments, param, param.device, lambda: self._name(param))
        if not is_step(state.get("step")):
            state["step"] = step_count(state.get("step", 0))
        return _Known(param, state, low, moment_keys(self.moments))

    def _name(self, param: Tensor) -> str:
        params = (p for group in self.param_groups for p in group["params"])
        return f"parameter {next(i for i, p in enumerate(params) if p is param)}"


def _is_usable(param: Tensor) -> bool:
    return param.dtype == torch.float32 and is_host(param) and is_dense(param)


def _is_copy(copy: Tensor, param: Tensor) -> bool:
    return (
        copy.dtype == torch.bfloat16
        and copy.shape == param.shape
        and copy.stride() == param.stride()
        and is_host(copy)
        and not overlap(copy, param)
    )


def _strides(x: Tensor) -> str:
    return str(tuple(x.stride())) if x.layout == torch.strided else str(x.layout)
