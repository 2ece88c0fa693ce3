"""RMSNorm and SwiGLU of a transformer layer: one native call each way, on the CPU and on CUDA.

Plain torch makes them of 3 to 9 calls with a tensor each: page faults and fixed costs on the CPU,
passes over memory on CUDA.

Arithmetic is float32 for all dtypes, rounded once; bitwise repeatable with any number of threads.
With AVX-512 BF16 (Zen 4 and later, Xeons since Cooper Lake) bfloat16 results below 2^-126 become 0.

torch.compile calls these functions and does not trace them: compiled code has a graph break there.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from vlmkernels._native import (
    _C,
    DTYPES,
    check,
    check_in_place,
    check_not_recorded,
    check_tensors,
    check_whole,
    describe,
    has_cuda_kernels,
    launch,
    main_grad_of,
    not_traced,
    once,
    pointer,
    recorded,
)

Grad = Literal["dense", "main_grad"]


def has_norm(x: Tensor) -> bool:
    """Whether rms_norm and add_rms_norm_ take x: on CUDA rows of whole units of 16 bytes, which one
    thread block has."""
    width = x.shape[-1]
    whole = width * x.element_size() % 16 == 0
    return _is_known(x) and (not x.is_cuda or (whole and width <= _C.NORM_COLUMNS))


def has_swiglu(x: Tensor) -> bool:
    """Whether swiglu_ takes x: on CUDA halves of rows that are whole units of 8 bytes."""
    return _is_known(x) and (not x.is_cuda or x.shape[-1] // 2 * x.element_size() % 8 == 0)


def _is_known(x: Tensor) -> bool:
    where = x.device.type == "cpu" or (x.is_cuda and has_cuda_kernels())
    return where and x.dtype in DTYPES


def _check(op: str, x: Tensor, name: str, parameter: Tensor | None) -> None:
    """x: float32, bfloat16 or float16 on the CPU or CUDA; a parameter of its last dimension."""
    check_tensors(x=x, **({} if parameter is None else {name: parameter}))
    check_not_recorded(op)
    if x.dtype not in DTYPES or x.device.type not in ("cpu", "cuda") or x.dim() == 0:
        raise ValueError(
            f"x is {describe(x)}; {op} needs float32, bfloat16 or float16 [.., width] on the CPU "
            "or on CUDA"
        )
    if not (has_swiglu if op == "swiglu_" else has_norm)(x):
        rows = f"rows of whole units of 16 bytes, at most {_C.NORM_COLUMNS} elements"
        rows = "halves of rows that are whole units of 8 bytes" if op == "swiglu_" else rows
        raise ValueError(
            f"x is {describe(x)}; on CUDA {op} takes {rows}, where vlmkernels was built with CUDA "
            "kernels"
        )
    if parameter is not None and (
        parameter.shape != x.shape[-1:]
        or parameter.dtype != x.dtype
        or parameter.device != x.device
    ):
        raise ValueError(
            f"{name} is {describe(parameter)}; {op} of x, {describe(x)}, needs "
            f"{[x.shape[-1]]} of its dtype and device"
        )


def _check_eps(eps: object) -> None:
    if not isinstance(eps, Real):
        raise ValueError(f"eps is {eps!r}; it must be a number")


def _check_start(op: str, x: Tensor) -> None:
    """Where x is written over, it can't be copied to a better place."""
    if x.is_cuda and x.data_ptr() % 16:
        raise ValueError(
            f"x begins {x.data_ptr() % 16} bytes behind a multiple of 16; {op} needs it at one"
        )


def _check_apart(name: str, begin: int, x: Tensor, x_begin: int) -> None:
    """x, at x_begin, is written while rows of it still need the dense parameter at `begin`."""
    if begin and x_begin - x.shape[-1] * x.itemsize < begin < x_begin + x.nbytes:
        raise ValueError(f"{name} lies in the memory of x, which is written; pass {name}.clone()")


def _parameter(
    name: str, parameter: Tensor | None, grad: str, x: Tensor
) -> tuple[Tensor | None, tuple[Any, Tensor | None]]:
    """What autograd gets of a parameter; the dense parameter, and the main_grad that its gradient
    is added to."""
    if grad not in ("dense", "main_grad"):
        raise ValueError(f"{name}_grad is {grad!r}; it must be 'dense' or 'main_grad'")
    main_grad = None
    if parameter is not None:
        main_grad = main_grad_of(parameter, name) if grad == "main_grad" else None
        parameter = _aligned(parameter)
    # Without x the parameter brings the backward pass about.
    seen = None if main_grad is not None and x.requires_grad else parameter
    return seen, (parameter, main_grad)


class _Gradient:
    """Where a native call sums a parameter's gradient over rows: in `new`, or None where it does
    not learn or main_grad gets it. To be held until the call."""

    def __init__(
        self,
        like: Tensor,
        columns: int,
        rows: int,
        learns: bool,
        main_grad: Tensor | None,
        part: int,  # rows of a part on CUDA
    ) -> None:
        self.new: Tensor | None = None
        self.sums = 0, 0, False  # vlmk::ColumnSums
        if not learns and main_grad is None:
            return
        part = part if like.is_cuda else _C.SUM_ROWS
        self.parts = like.new_empty((rows + part - 1) // part, columns, dtype=torch.float32)
        if main_grad is None:
            # without rows no kernel writes it
            total = self.new = like.new_empty(columns) if rows else like.new_zeros(columns)
        else:
            total = main_grad
            torch.autograd.graph.increment_version(main_grad)
        self.sums = pointer(total), pointer(self.parts), main_grad is not None


def _contiguous(x: Tensor) -> Tensor:
    return x.resolve_neg().contiguous() if x.is_neg() else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """x, contiguous, copied where it does not begin at a multiple of 16 bytes: kernels on CUDA load
    as many at a time."""
    x = _contiguous(x)
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def _kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What was saved, _aligned, in the dtype that it had: hooks, or module.to(), may have changed
    it."""
    return _aligned(x.to(dtype))


@not_traced
def rms_norm_backward(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    of_weight: tuple[bool, Tensor | None],
    of_bias: tuple[bool, Tensor | None] = (False, None),
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx and the gradients of weight and bias, None where one does not learn or main_grad has it.
    ds: the gradient of x's use beside the norm, added to dx. of_weight, of_bias: whether it learns,
    and its main_grad."""
    rows, width = rstd.shape[0], dy.shape[-1]
    fits = x.shape == dy.shape and len(weight) == width
    alike = x.device == weight.device == rstd.device == dy.device
    if not fits or not alike or rstd.numel() != dy.numel() // max(width, 1):
        raise ValueError(
            f"x is {describe(x)} and weight {describe(weight)} now, for a gradient "
            f"{list(dy.shape)} on {dy.device}: their data was exchanged after the forward pass"
        )
    dy, x, weight = _aligned(dy), _kept(x, dy.dtype), _kept(weight, dy.dtype)
    rstd = _kept(rstd, torch.float32)
    dx = torch.empty_like(x)
    ds = ds if ds is None else _aligned(ds)
    dweight = _Gradient(x, width, rows, *of_weight, _C.CUDA_NORM_ROWS)
    dbias = _Gradient(x, width, rows, *of_bias, _C.CUDA_NORM_ROWS)
    launch(
        "rms_norm_backward",
        x,
        pointer(dy),
        pointer(ds),
        pointer(x),
        pointer(weight),
        pointer(rstd),
        pointer(dx),
        dweight.sums,
        dbias.sums,
        rows,
        width,
        DTYPES[x.dtype],
    )
    return dx, dweight.new, dbias.new


def _normalize(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and what the backward pass reads beside x: the weight, and rstd of every row."""
    width = x.shape[-1]
    rows = x.numel() // max(width, 1)
    y, rstd = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    pointers = (pointer(x), pointer(residual), pointer(bias), pointer(weight), pointer(y))
    if residual is not None:
        _check_apart("bias", pointers[2], x, pointers[0])
        _check_apart("weight", pointers[3], x, pointers[0])
    launch("rms_norm", x, *pointers, pointer(rstd), rows, width, eps, DTYPES[x.dtype])
    return y, weight, rstd


class _RMSNorm(torch.autograd.Function):
    """`values`: weight and main_grad; `weight`: the same for autograd, None where main_grad has the
    gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, values: tuple[Tensor, Tensor | None], eps: float
    ) -> Tensor:
        gain, ctx.main_grad = values
        y, *kept = _normalize(x, None, None, gain, eps)
        ctx.save_for_backward(x, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_weight = ctx.needs_input_grad[1], ctx.main_grad
        dx, dweight, _ = once(rms_norm_backward, dy, None, *ctx.saved_tensors, of_weight)
        return dx, dweight, None, None


_norm = recorded(_RMSNorm)


@not_traced
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_grad: Grad = "dense") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        x: [.., width], float32, bfloat16 or float16; a strided one is copied. On CUDA a width of
            up to 8,192 elements, a multiple of 16 bytes.
        weight: [width], x's dtype.
        weight_grad: "dense", or "main_grad": added to weight.main_grad, a contiguous float32
            [width], and no hook of the weight runs where x requires a gradient.

    Returns:
        [.., width], contiguous, x's dtype. Differentiable once in x and weight; keeps x and a
        float32 a row for it.

    Raises:
        TypeError: x or weight is no tensor.
        ValueError: a dtype, device or shape does not fit.
        RuntimeError: traced (FakeTensorMode, make_fx, torch.jit).
    """
    check_tensors(weight=weight)
    _check("rms_norm", x, "weight", weight)
    _check_eps(eps)
    seen, values = _parameter("weight", weight, weight_grad, x)
    return _norm(_aligned(x), seen, values, eps)  # a copy that autograd sees


class _AddRMSNorm(torch.autograd.Function):
    """`values`: weight and bias, each with its main_grad; `weight`, `bias`: as in _RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        values: tuple[tuple[Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]],
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        (gain, ctx.main_grad), (added, ctx.bias_main_grad) = values
        ctx.set_materialize_grads(False)
        if residual is not None:
            residual = _aligned(residual)
            torch.autograd.graph.increment_version(x)
        y, *kept = _normalize(x, residual, added, gain, eps)
        total = x if residual is None else x.detach()
        ctx.save_for_backward(total, *kept)
        return total, y

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, ds: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        _, needs_residual, learns, bias_learns, *_ = ctx.needs_input_grad
        dx, dweight, dbias = ds, None, None
        if dy is not None:
            both = (learns, ctx.main_grad), (bias_learns, ctx.bias_main_grad)
            dx, dweight, dbias = once(rms_norm_backward, dy, ds, *ctx.saved_tensors, *both)
        elif ds is not None and (bias_learns or ctx.bias_main_grad is not None):
            dbias = ds.reshape(-1, ds.shape[-1]).sum(0)
            if ctx.bias_main_grad is not None:
                ctx.bias_main_grad.add_(dbias)
                dbias = None
        return dx, dx if needs_residual else None, dweight, dbias, None, None


_add_norm = recorded(_AddRMSNorm)


@not_traced
def add_rms_norm_(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    weight_grad: Grad = "dense",
    bias_grad: Grad = "dense",
) -> tuple[Tensor, Tensor]:
    """s = x + residual + bias and rms_norm(s), in one pass over memory; s is written over x.

    Args:
        x: [.., width] as rms_norm's, contiguous, on CUDA starting at a multiple of 16 bytes: with a
            residual a linear's output, which nobody else reads, no leaf that requires a gradient.
        residual: x's shape and dtype, in memory of its own or x itself. None: s is x. That too
            saves a pass, in backward: gradients of s and of the norm are added where the latter are
            made.
        weight, weight_grad: as in rms_norm.
        bias: [width], x's dtype; with a residual only.
        bias_grad: as weight_grad.

    Returns:
        s and rms_norm(s), [.., width] of x's dtype, rounded once each. Differentiable once in all;
        keeps s and a float32 a row for it.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a dtype, device, shape or stride does not fit.
        RuntimeError: as rms_norm.
    """
    check_tensors(weight=weight)
    _check("add_rms_norm_", x, "weight", weight)
    _check("add_rms_norm_", x, "bias", bias)
    _check_eps(eps)
    if residual is not None:
        check_tensors(residual=residual)
    if not x.is_contiguous():
        raise ValueError(f"x has strides {x.stride()}; add_rms_norm_ needs a contiguous one")
    _check_start("add_rms_norm_", x)
    if residual is not None:
        check_in_place("x", x, "pass x.clone()")
    if residual is None:
        check(bias is None, "bias is given without a residual; add_rms_norm_ adds both or nothing")
    elif (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        raise ValueError(f"residual is {describe(residual)}; it must be as x, {describe(x)}")
    else:
        apart = abs(residual.data_ptr() - x.data_ptr())
        if residual.is_contiguous() and 0 < apart < x.nbytes:
            raise ValueError(
                "residual lies in the memory of x, which is written; pass residual.clone()"
            )
    seen, of_weight = _parameter("weight", weight, weight_grad, x)
    seen_bias, of_bias = _parameter("bias", bias, bias_grad, x)
    return _add_norm(x, residual, seen, seen_bias, (of_weight, of_bias), eps)


@not_traced
def swiglu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, learns: bool, main_grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dx and the bias's gradient, None where it does not learn or main_grad has it. On the CPU the
    bias is in x; on CUDA dy's rows may be apart or padded."""
    both = x.shape[-1]
    rows = x.numel() // max(both, 1)
    fits = x.shape[:-1] == dy.shape[:-1] and dy.shape[-1] >= both // 2 and x.device == dy.device
    if not fits or (bias is not None and (len(bias) != both or bias.device != dy.device)):
        kept = describe(x) if bias is None else f"{describe(x)} and bias {describe(bias)}"
        raise ValueError(
            f"x is {kept} now, for a gradient {list(dy.shape)} on {dy.device}: their data was "
            "exchanged after the forward pass"
        )
    x, bias = _kept(x, dy.dtype), bias if bias is None else _kept(bias, dy.dtype)
    dy, dx = dy.reshape(rows, dy.shape[-1]), torch.empty_like(x)
    if not x.is_cuda or dy.is_neg():
        dy = _contiguous(dy)
    elif (
        dy.stride(1) != 1
        or dy.stride(0) < both // 2  # expanded over rows
        or dy.stride(0) * dy.itemsize % 8
        or dy.data_ptr() % 16
    ):
        dy = dy.clone(memory_format=torch.contiguous_format)
    dbias = _Gradient(x, both, rows, learns, main_grad, _C.CUDA_SWIGLU_ROWS)
    launch(
        "swiglu_backward",
        x,
        pointer(dy),
        dy.stride(0),
        pointer(x),
        pointer(bias),
        pointer(dx),
        dbias.sums,
        rows,
        both // 2,
        DTYPES[x.dtype],
    )
    return dx, dbias.new


class _SwiGLU(torch.autograd.Function):
    """`values`: bias and main_grad; `bias`: as in _RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        values: tuple[Tensor | None, Tensor | None],
        padding: int,
    ) -> tuple[Tensor, Tensor | None]:
        both, (added, ctx.main_grad) = x.shape[-1], values
        origin = None
        rows = x.numel() // max(both, 1)
        y = x.new_empty(*x.shape[:-1], both // 2 + padding)
        if added is not None and not x.is_cuda:
            _check_apart("bias", pointer(added), x, pointer(x))
            torch.autograd.graph.increment_version(x)
            x = x.detach()  # of a view autograd would refuse what it sees written
            origin = x.new_empty(0)  # through which it still sees what x and bias come from
        ctx.set_materialize_grads(False)  # of origin
        ctx.save_for_backward(x, added if x.is_cuda else None, origin)
        pointers = (pointer(x), pointer(added), pointer(y))
        launch("swiglu", x, *pointers, rows, both // 2, DTYPES[x.dtype], y.shape[-1])
        return y, origin

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor, _: None
    ) -> tuple[Tensor | None, ...]:
        *saved, origin = ctx.saved_tensors
        inputs = dy, *saved, ctx.needs_input_grad[1], ctx.main_grad
        return *once(swiglu_backward, *inputs, also=origin), None, None


_swiglu = recorded(_SwiGLU)


@not_traced
def swiglu_(
    x: Tensor, bias: Tensor | None = None, *, bias_grad: Grad = "dense", padding: int = 0
) -> Tensor:
    """silu(gate) * up of x + bias = [gate | up] (arXiv 2002.05202). x is the op's own from now on:
    on the CPU it becomes x + bias.

    Args:
        x: [.., 2 F], float32, bfloat16 or float16, contiguous: a linear's output, which nobody else
            reads, no leaf that requires a gradient. On CUDA F elements are a multiple of 8 bytes,
            and x starts at one of 16.
        bias: [2 F], x's dtype.
        bias_grad: "dense", or "main_grad": added to bias.main_grad, a contiguous float32 [2 F],
            and no hook of the bias runs where x requires a gradient.
        padding: columns of zeros behind the result's, on CUDA: a multiple of 8 bytes. With them a
            product's rows can be whole units of 16.

    Returns:
        [.., F + padding], contiguous, x's dtype. Differentiable once in x and bias; keeps x for it.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a dtype, device, shape or stride does not fit.
        RuntimeError: as rms_norm.
    """
    _check("swiglu_", x, "bias", bias)
    if x.shape[-1] % 2 or not x.is_contiguous():
        raise ValueError(
            f"x has shape {list(x.shape)} and strides {x.stride()}; swiglu_ needs a contiguous "
            "tensor whose last dimension is even"
        )
    check_whole(padding=padding)
    if padding < 0 or (padding and not x.is_cuda) or padding * x.element_size() % 8:
        raise ValueError(
            f"padding is {padding} for x, {describe(x)}; it must be 0, or on CUDA a multiple of 8 "
            "bytes"
        )
    _check_start("swiglu_", x)
    if bias is not None and not x.is_cuda:
        check_in_place("x", x, "pass x.clone()")
    seen, values = _parameter("bias", bias, bias_grad, x)
    return _swiglu(x, seen, values, padding)[0]
