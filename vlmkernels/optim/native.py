"""What all our optimizers share: one Adam step in plain torch, and its native multi-tensor form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, describe

GRADIENTS = (torch.float32, torch.bfloat16)
_MOMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # vlmk::MomentType


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
    grad_scale: float = 1.0,
) -> None:
    """What one step means, in place, in plain torch: tests and documentation. `step` is from 1."""
    beta1, beta2 = betas
    grad = grad.to(param.dtype) * grad_scale
    if decoupled:
        param.mul_(1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + eps
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


class Rows:
    """Tensors to step in one go: by the types of gradient and moments, what `_C.adam_step` takes.

    Nothing is checked here: every tensor of one `add` lies dense in host memory in the same element
    order, and must live until `step` returns.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    @staticmethod
    def make(
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: Tensor,
        low: Tensor | None = None,
        first: int = 0,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[tuple[int, int], tuple[int, ...]]:
        """A row and the types under which it goes.

        param float32, grad float32 or bfloat16, moments likewise, step float32 0-dim (counted up by
        `step`), low bfloat16: gets the rounded parameter; it may be grad's memory. Of a piece of a
        tensor `first` is the number of its first element in the whole, a multiple of 16. `scales`
        belong to moments that are 8-bit codes.
        """
        row = (
            param.data_ptr(),
            grad.data_ptr(),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            0 if low is None else low.data_ptr(),
            step.data_ptr(),
            param.numel(),
            first,
            *((0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())),
        )
        return (DTYPES[grad.dtype], _MOMENT_TYPES[exp_avg.dtype]), row

    def append(self, key: tuple[int, int], row: tuple[int, ...]) -> None:
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = []
        rows.append(row)

    def add(self, *tensors: Any) -> None:
        """A row of `make`'s arguments."""
        self.append(*self.make(*tensors))

    def step(
        self, group: dict[str, Any], grad_scale: float = 1.0, grad_factor: float = 1.0
    ) -> None:
        """One native call a pair of types, without the GIL, with a parameter group's settings.

        Gradients are multiplied by `grad_factor`, rounded to float32, and by `grad_scale`: two, so
        that the bits are those of a gradient that was multiplied in place and is clipped now.
        """
        for (grad_type, moment_type), rows in self._rows.items():
            _C.adam_step(
                rows,
                grad_type,
                moment_type,
                float(group["lr"]),
                *map(float, group["betas"]),
                float(group["eps"]),
                float(group["weight_decay"]),
                bool(group["decoupled_weight_decay"]),
                float(grad_factor),
                float(grad_scale),
            )


def sum_of_squares(grads: Iterable[Tensor]) -> float:
    """Over all elements of dense float32 or bfloat16 host tensors, in one pass; infinite or NaN
    only where an element is. The same bits with any number of threads."""
    return _C.sum_of_squares([(g.data_ptr(), g.numel(), DTYPES[g.dtype]) for g in grads])


def check_hyperparameters(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Raises ValueError naming the first that no Adam can use."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} is {value}; it must be one number")
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
    if len(betas) != 2:
        raise ValueError(f"betas is {betas}; it must be two numbers")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] is {beta}; it must be in [0, 1)")


def check_flags(group: dict[str, Any], name: str = "a parameter group") -> None:
    """Raises ValueError for a group that asks for a form of Adam that is not offered."""
    for flag in ("amsgrad", "maximize"):
        if group.get(flag):
            raise ValueError(f"{name} has {flag}=True, which is not offered here")


def check_nonfinite(nonfinite: str) -> None:
    """Raises ValueError for a policy that doesn't exist."""
    if nonfinite not in ("propagate", "skip"):
        raise ValueError(f"nonfinite is {nonfinite!r}; it must be 'propagate' or 'skip'")


def check_gradient(param: Tensor, grad: Tensor) -> None:
    """Raises ValueError unless `grad` can be a gradient of `param`."""
    check_memory("a gradient", grad)
    if (
        grad.dtype not in GRADIENTS
        or grad.shape != param.shape
        or grad.layout != torch.strided
        or grad.device != param.device
    ):
        raise ValueError(
            f"a gradient is {describe(grad)}, {grad.layout}; it must be dense float32 or "
            f"bfloat16 {list(param.shape)} on {param.device}"
        )


def check_memory(name: str, x: Tensor) -> None:
    """Raises ValueError for a tensor that is made of others, such as FSDP2's DTensor: it has no
    memory whose address a kernel could be given."""
    if hasattr(type(x), "__tensor_flatten__"):
        raise ValueError(
            f"{name} is a {type(x).__name__}, which has no memory of its own; pass plain tensors, "
            "such as parameters that share the memory of its to_local()"
        )


def is_dense(x: Tensor) -> bool:
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


def is_host(x: Tensor) -> bool:
    return x.layout == torch.strided and x.device.type == "cpu"


def is_step(step: object) -> bool:
    return isinstance(step, Tensor) and step.dtype == torch.float32 and is_host(step)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two dense host tensors share memory."""
    start, end = a.data_ptr(), a.data_ptr() + a.numel() * a.element_size()
    other = b.data_ptr()
    return start < other + b.numel() * b.element_size() and other < end
