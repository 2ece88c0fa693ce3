"""What all our optimizers share: one Adam step in plain torch, and its native multi-tensor form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, describe, pointer, take_threads

from .blockwise import BLOCK
from .checks import check_gradient
from .multi_tensor import ADDRESS, GRADIENTS, packed_rows

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


Pointers = bytes  # what `_C.adam_step` takes of a tensor, beside its gradient
_ROW = Struct("9q")  # vlmk::AdamRow is this and the address of the gradient


def pointers_of(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    low: Tensor | None = None,
    first: int = 0,
    scales: tuple[Tensor, Tensor] | None = None,
    numel: int | None = None,
) -> Pointers:
    """Tensors to step: each lies dense in host memory, in the same element order, and must live
    until they are stepped. Of them only that they have memory is checked here.

    Args:
        param: float32.
        exp_avg, exp_avg_sq: float32 or bfloat16, or 8-bit codes with their `scales`.
        step: float32, 0-dim; counted up by the native call.
        low: bfloat16: gets the rounded parameter; it may be the gradient's memory.
        first: of a piece of these tensors, the number of its first element, a multiple of 16, of
            256 with codes.
        numel: of a piece, its elements.
    """
    return _ROW.pack(
        pointer(param) + 4 * first,
        pointer(exp_avg) + exp_avg.itemsize * first,
        pointer(exp_avg_sq) + exp_avg_sq.itemsize * first,
        0 if low is None else pointer(low) + low.itemsize * first,
        pointer(step),
        param.numel() if numel is None else numel,
        first,
        *((0, 0) if scales is None else (pointer(x) + 4 * (first // BLOCK) for x in scales)),
    )


class AdamBatch:
    """Tensors to step in one go, whose moments have one type."""

    def __init__(self, moments: torch.dtype) -> None:
        self._moments = _MOMENT_TYPES[moments]
        self._rows: dict[torch.dtype, bytearray] = {}  # by the type of gradients

    def add(self, like: list[Tensor], grads: list[Tensor], tensors: list[Pointers]) -> list[Tensor]:
        """Gradients of tensors of which `pointers_of` returned `tensors`.

        Args:
            like: of each the parameter, or else a tensor of its shape, device and element order.

        Returns:
            the gradients that will be read, which must live until they are: one whose elements lie
            in another order, or with the other sign, is copied.

        Raises:
            ValueError: one can't be a gradient, or lies in its parameter's memory.
        """
        packed = packed_rows(like, grads, tensors)
        if packed is None:
            for x, grad in zip(like, grads, strict=True):
                check_gradient(x, grad)
            grads = [_ordered_like(x, grad) for x, grad in zip(like, grads, strict=True)]
            packed = {dtype: bytearray() for dtype in GRADIENTS}
            for grad, row in zip(grads, tensors, strict=True):
                if pointer(grad) == _ROW.unpack(row)[0] and grad.numel():
                    raise ValueError(
                        f"a gradient, {describe(grad)}, lies in its parameter's memory; it needs "
                        "its own"
                    )
                packed[grad.dtype] += row + ADDRESS.pack(pointer(grad))
        for dtype, rows in packed.items():
            self._rows.setdefault(dtype, bytearray()).extend(rows)
        return grads

    def step(
        self, settings: Mapping[str, Any], grad_scale: float = 1.0, grad_factor: float = 1.0
    ) -> None:
        """One native call a type of gradients, without the GIL, with settings of `hyperparameters`.

        Gradients are multiplied by `grad_factor`, rounded to float32, and by `grad_scale`: two, so
        that the bits are those of a gradient that was multiplied in place and is clipped now.
        """
        for dtype, rows in self._rows.items():
            take_threads()
            _C.adam_step(
                rows,
                DTYPES[dtype],
                self._moments,
                settings["lr"],
                *settings["betas"],
                settings["eps"],
                settings["weight_decay"],
                settings["decoupled_weight_decay"],
                float(grad_factor),
                float(grad_scale),
            )


def _ordered_like(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient with its elements in x's order and, of a negated view, its sign."""
    same = grad.is_contiguous() if x.is_contiguous() else grad.stride() == x.stride()
    return grad if same and not grad.is_neg() else torch.empty_like(x, dtype=grad.dtype).copy_(grad)


def sum_of_squares(grads: Iterable[Tensor]) -> float:
    """Over all elements of dense float32 or bfloat16 host tensors, in one pass; infinite or NaN
    only where an element is. The same bits with any number of threads."""
    take_threads()
    return _C.sum_of_squares([(g.data_ptr(), g.numel(), DTYPES[g.dtype]) for g in grads])
