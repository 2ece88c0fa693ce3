"""How Adam's two moments are held in a parameter's state: by element, or as 8-bit codes.

By element the state has exp_avg and exp_avg_sq; as codes (blockwise.py) exp_avg_codes and
exp_avg_scales, and the same of exp_avg_sq. State of one form becomes any other when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import describe

from . import blockwise

EIGHT_BIT = torch.uint8
TYPES = (torch.float32, torch.bfloat16, EIGHT_BIT)
KEYS = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
SCALES = ("exp_avg_scales", "exp_avg_sq_scales")
ALL_KEYS = (*KEYS, *CODES, *SCALES)


def check_type(moments: torch.dtype) -> None:
    """Raises ValueError for a type that moments can't have."""
    if moments not in TYPES:
        raise ValueError(
            f"moments is {moments}; it must be torch.float32, torch.bfloat16 or torch.uint8"
        )


def keys(moments: torch.dtype) -> tuple[str, ...]:
    """Of the tensors that hold moments of this type."""
    return (*CODES, *SCALES) if moments == EIGHT_BIT else KEYS


def tensors(state: dict[str, Any]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """exp_avg, exp_avg_sq and the codes' scales, as Rows.make takes them."""
    if CODES[0] in state:
        return state[CODES[0]], state[CODES[1]], (state[SCALES[0]], state[SCALES[1]])
    return state[KEYS[0]], state[KEYS[1]], None


def fit(state: dict[str, Any], moments: torch.dtype, make: Callable[..., Tensor]) -> None:
    """Gives a state moments of this type: those it has in any form, else zeros. What fits already
    is kept as it is.

    Args:
        state: of one parameter; changed.
        moments: one of TYPES.
        make: `make(dtype=...)` returns a tensor like the moments are to be: shape, strides, device.
    """
    for key, codes, scales in zip(KEYS, CODES, SCALES, strict=True):
        signed = key == "exp_avg"
        moment = state.pop(key, None)
        if codes in state:
            # torch makes floats of what it loads, which hold every code.
            held, scale = state.pop(codes), state.pop(scales).to(torch.float32)
            if moments == EIGHT_BIT:
                target = make(dtype=EIGHT_BIT)
                if held.stride() == target.stride():  # blocks are in memory order
                    like = held.dtype == EIGHT_BIT and held.device == target.device
                    state[codes] = held if like else target.copy_(held)
                    state[scales] = scale.to(target.device).contiguous()
                    continue
            moment = blockwise.dequantize(held, scale, signed=signed)
        if moments == EIGHT_BIT:
            dense = make(dtype=torch.float32)
            dense = dense.zero_() if moment is None else dense.copy_(moment)
            state[codes], state[scales] = blockwise.quantize(dense, signed=signed)
            continue
        target = make(dtype=moments)
        if moment is None:
            state[key] = target.zero_()
        elif is_like(moment, moments, target.stride()) and moment.device == target.device:
            state[key] = moment
        else:
            state[key] = target.copy_(moment)


def is_like(x: Tensor | None, dtype: torch.dtype, stride: tuple[int, ...]) -> bool:
    return x is not None and x.dtype == dtype and x.stride() == stride


def check_loaded(state: dict[str, Any], param: Tensor) -> None:
    """Raises ValueError naming a tensor of a loaded state that can't belong to the parameter."""
    for key in (*KEYS, *CODES, "master"):
        if key in state and state[key].shape != param.shape:
            raise ValueError(
                f"the loaded {key} is {describe(state[key])} for a parameter of shape "
                f"{list(param.shape)}; they must be equal"
            )
    for key in SCALES:
        if key in state and state[key].numel() != blockwise.num_blocks(param.numel()):
            raise ValueError(
                f"the loaded {key} is {describe(state[key])} for a parameter of shape "
                f"{list(param.shape)}; it needs {blockwise.num_blocks(param.numel())} elements"
            )
