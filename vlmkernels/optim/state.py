"""Adam's state of one parameter: its forms, their conversion, and what is loaded.

`step` is a float32 0-dim tensor in host memory. The two moments are held by element, as exp_avg and
exp_avg_sq, or as 8-bit codes (blockwise.py), as exp_avg_codes, exp_avg_scales and the same of
exp_avg_sq. `master` is the float32 copy of a parameter of another type (masters.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import describe

from . import blockwise
from .checks import hyperparameters, local, to_number

EIGHT_BIT = torch.uint8
MOMENT_TYPES = (torch.float32, torch.bfloat16, EIGHT_BIT)
MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scales", "exp_avg_sq_scales")
ALL_MOMENTS = (*MOMENTS, *CODES, *SCALES)
#: Gradients whose squares are float32 numbers are below it.
LARGEST = 2.0**64


def step_count(steps: Any = 0.0) -> Tensor:
    """A count of steps, in host memory whatever torch's default device is."""
    return torch.tensor(to_number("step", steps), dtype=torch.float32, device="cpu")


def check_moments(moments: torch.dtype) -> None:
    """Raises ValueError for a type that moments can't have."""
    if moments not in MOMENT_TYPES:
        raise ValueError(
            f"moments is {moments}; it must be torch.float32, torch.bfloat16 or torch.uint8"
        )


def is_finite_norm(norm: float, moments: torch.dtype) -> bool:
    """Whether gradients of this L2 norm have squares that moments of this type can hold: an
    infinite one makes 8-bit moments of a block NaN, in others it stops one element."""
    return abs(norm) < LARGEST if moments == EIGHT_BIT else math.isfinite(norm)


def moment_keys(moments: torch.dtype) -> tuple[str, ...]:
    """Of the tensors that hold moments of this type."""
    return (*CODES, *SCALES) if moments == EIGHT_BIT else MOMENTS


def moment_tensors(state: dict[str, Any]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """exp_avg, exp_avg_sq and the codes' scales, as pointers_of takes them."""
    if CODES[0] in state:
        return state[CODES[0]], state[CODES[1]], (state[SCALES[0]], state[SCALES[1]])
    return state[MOMENTS[0]], state[MOMENTS[1]], None


def fit_moments(state: dict[str, Any], moments: torch.dtype, empty: Callable[..., Tensor]) -> None:
    """Gives a state moments of this type: those it has in any form, else zeros. What fits already
    is kept as it is.

    Args:
        state: of one parameter; changed.
        moments: one of MOMENT_TYPES.
        empty: `empty(dtype=...)` returns a tensor as the moments are to be: shape, strides, device.
    """
    for key, codes_key, scales_key in zip(MOMENTS, CODES, SCALES, strict=True):
        signed = key == "exp_avg"
        moment = state.pop(key, None)
        if codes_key in state:
            codes, scales = state.pop(codes_key), state.pop(scales_key).to(torch.float32)
            if moments == EIGHT_BIT:
                target = empty(dtype=EIGHT_BIT)
                if codes.stride() == target.stride():  # blocks are in memory order
                    fits = codes.dtype == EIGHT_BIT and codes.device == target.device
                    state[codes_key] = codes if fits else target.copy_(codes)
                    state[scales_key] = scales.to(target.device).contiguous()
                    continue
            moment = blockwise.dequantize(codes, scales, signed=signed)
        if moments == EIGHT_BIT:
            dense = empty(dtype=torch.float32)
            dense = dense.zero_() if moment is None else dense.copy_(moment)
            state[codes_key], state[scales_key] = blockwise.quantize(dense, signed=signed)
            continue
        target = empty(dtype=moments)
        if moment is None:
            state[key] = target.zero_()
        elif is_like(moment, moments, target.stride()) and moment.device == target.device:
            state[key] = moment
        else:
            state[key] = target.copy_(moment)


def is_like(x: Tensor | None, dtype: torch.dtype, stride: tuple[int, ...]) -> bool:
    return x is not None and x.dtype == dtype and x.stride() == stride


def ensure_moments(
    state: dict[str, Any],
    moments: torch.dtype,
    like: Tensor,
    device: torch.device,
    name: Callable[[], str],
) -> None:
    """Before a step, of a state that may have been changed by others: moments of this type, with
    the shape and strides of `like`, on this device; other types and places are converted.

    Raises:
        ValueError: a tensor is missing or has another shape; `name()` is the parameter's.
    """
    keys = CODES if moments == EIGHT_BIT else MOMENTS
    shape, contiguous = like.shape, like.is_contiguous()  # quicker to ask for than strides
    fits = True
    for key in keys:
        x = state.get(key)
        fits &= (
            x is not None
            and x.dtype is moments
            and x.shape == shape
            and (x.is_contiguous() if contiguous else x.stride() == like.stride())
            and x.device == device
        )
    for key in SCALES if moments == EIGHT_BIT else ():
        x = state.get(key)
        fits &= (
            x is not None
            and x.dtype is torch.float32
            and x.is_contiguous()
            and x.numel() == blockwise.num_blocks(like.numel())
            and x.device == device
        )
    if not fits:
        check_shapes(state, like, "{} of " + name())
        empty = partial(torch.empty_strided, shape, like.stride(), device=device)
        fit_moments(state, moments, empty)


def copy_moments(
    state: dict[str, Any], moments: torch.dtype, shape: torch.Size, device: torch.device
) -> dict[str, Tensor]:
    """The moments of this type in new memory on a device; zeros where there are none."""
    found = {key: state[key].to(device, copy=True) for key in ALL_MOMENTS if key in state}
    fit_moments(found, moments, partial(torch.empty, shape, device=device))
    return found


def state_bytes(state: dict[str, Any]) -> int:
    """Of moments and master."""
    tensors = [state[key] for key in (*ALL_MOMENTS, "master") if key in state]
    return sum(x.numel() * x.element_size() for x in tensors)


# ---- saving and loading --------------------------------------------------------------------------

# What torch's Adam, which can't step 8-bit moments, says when they are loaded into it: it takes
# `step` for a number.
_EIGHT_BIT_STEP = (
    b"8-bit moments; load them into a CPUAdam(moments=torch.float32) and save its state_dict()"
)


def mark_codes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook of state_dict."""
    for number, state in state_dict["state"].items():
        if isinstance(state, dict) and CODES[0] in state:
            state_dict["state"][number] = {
                **state,
                "step": _EIGHT_BIT_STEP,
                "steps": state["step"],
            }


def loaded_steps(values: dict[str, Any]) -> Tensor:
    """A count of steps with memory of its own: Megatron loads one tensor for all parameters."""
    return step_count(values.get("steps", values.get("step", 0)))


def check_shapes(state: dict[str, Any], param: Tensor, name: str) -> None:
    """Raises ValueError naming a tensor of a state that can't belong to the parameter, or the one
    that is missing beside others. `name` is filled in with the tensor's key."""
    for form in (MOMENTS, (*CODES, *SCALES)):
        missing = [key for key in form if key not in state]
        if 0 < len(missing) < len(form):
            raise ValueError(f"{name.format(missing[0])} is missing")
    for key in (*ALL_MOMENTS, "master"):
        x = state.get(key)
        if isinstance(x, Tensor) and (
            x.layout != torch.strided or x.is_meta or x.dtype.is_complex or x.is_quantized
        ):
            raise ValueError(
                f"{name.format(key)} is {describe(x)}, {x.layout}; it must be dense real numbers "
                "in memory"
            )
    for key in (*MOMENTS, *CODES, "master"):
        if key in state and getattr(state[key], "shape", None) != param.shape:
            raise ValueError(
                f"{name.format(key)} is {describe(state[key])} for a parameter of shape "
                f"{list(param.shape)}; they must be equal"
            )
    for key in SCALES:
        blocks = blockwise.num_blocks(param.numel())
        if key in state and (not isinstance(state[key], Tensor) or state[key].numel() != blocks):
            raise ValueError(
                f"{name.format(key)} is {describe(state[key])} for a parameter of shape "
                f"{list(param.shape)}; it needs {blocks} elements"
            )


def read_state_dict(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """The parameter groups of a loaded state_dict and each parameter's state, checked; an empty one
    where there is none. Runs the hooks that come before; the optimizer is not changed.

    Whether weight decay is decoupled stays as it was, as with torch's AdamW.
    """
    state_dict = dict(state_dict)
    hooks: Any = optimizer
    for hook in hooks._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the loaded state has no {key!r}; pass an optimizer's state_dict()")
    groups = copy.deepcopy(state_dict["param_groups"])
    sizes = [[len(g.get("params", [])) for g in x] for x in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the loaded state has parameter groups of {sizes[0]} parameters; this optimizer's are "
            f"of {sizes[1]}"
        )
    loaded: dict[Any, dict[str, Any]] = {}
    numbers = set()
    for i, (group, before) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for number, param in zip(group["params"], before["params"], strict=True):
            numbers.add(number)
            values = loaded[param] = state_dict["state"].get(number) or {}
            if not isinstance(values, dict):
                raise ValueError(
                    f"the loaded state of parameter {number} is {describe(values)}; it must be a "
                    "dict of its tensors"
                )
            check_shapes(values, param, f"the loaded {{}} of parameter {number}")
            loaded_steps(values)
            if "exp_avg_sq" in values and bool((local(values["exp_avg_sq"]) < 0).any()):
                raise ValueError(
                    f"the loaded exp_avg_sq of parameter {number} has negative elements; squares "
                    "have none"
                )
        group["params"] = before["params"]
        group["decoupled_weight_decay"] = before["decoupled_weight_decay"]
        hyperparameters(group, f"parameter group {i} of the loaded state")
        for key in before.keys() - group.keys():  # param_names, settings of a newer torch
            group[key] = before[key]
    # What belongs to no parameter is kept as it is, as torch does.
    loaded |= {key: x for key, x in state_dict["state"].items() if key not in numbers}
    return groups, loaded
