"""Facts of thousands of tensors at a time, for steps that would take longer in Python than in
arithmetic.

Where torch exports its C functions for DLPack (2.11 and 2.13 do) one native call reads all tensors,
with an older torch `map`, which takes several times as long.
"""

from __future__ import annotations

from itertools import compress
from operator import add, attrgetter, eq
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import _C

#: Types that gradients may have.
GRADIENTS = (torch.float32, torch.bfloat16)
_CLASSES = (Tensor, torch.nn.Parameter)
_DEVICE, _DTYPE, _LAYOUT, _SHAPE = map(attrgetter, ("device", "dtype", "layout", "shape"))
_FORM = (Tensor.data_ptr, _DEVICE, _DTYPE, _SHAPE, Tensor.stride)
#: Of a gradient, behind a row of `pointers_of`.
ADDRESS = Struct("q")

#: Torch's functions, or None. Only torch's own: extensions set the same attribute where an older
#: torch has none.
_EXCHANGE: Any = None
if hasattr(torch._C, "_dlpack_exchange_api"):
    _EXCHANGE = Tensor.__dlpack_c_exchange_api__
    if not _C.reads_tensors(_EXCHANGE):
        _EXCHANGE = None
_C.learn_layout(_PROBE := torch.empty(0, device="cpu"), _PROBE._cdata)


def forms(tensors: list[Tensor]) -> Any:
    """Where and what each of them is, to be compared with what it was."""
    if _EXCHANGE is not None:
        return _C.tensor_forms(_EXCHANGE, tensors)
    return [list(map(part, tensors)) for part in _FORM]


def are_held(
    holders: list[dict[Any, Any] | None], keys: list[Any], tensors: list[Tensor], then: Any
) -> bool:
    """Whether each holder has its tensor under its key still (None: nobody holds it), and their
    `forms` are what they were then."""
    if _EXCHANGE is not None:
        return _C.are_held(_EXCHANGE, holders, keys, tensors, then)
    return hold(holders, keys, tensors) and forms(tensors) == then


def hold(holders: list[dict[Any, Any] | None], keys: list[Any], tensors: list[Tensor]) -> bool:
    """The first half of `are_held`, for any objects."""
    return all(
        [
            holder is None or holder.get(key) is tensor
            for holder, key, tensor in zip(holders, keys, tensors, strict=True)
        ]
    )


def gradients_of(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that have a gradient, `decoupled_grad` or else `grad`, and these."""
    return _C.gradients_of(list(params))


def are_gradients(params: list[Tensor], grads: list[Tensor]) -> bool:
    """Whether each is a plain tensor that `check_gradient` would let pass. Of an older torch, False
    where one has no elements."""
    if _EXCHANGE is not None:
        return _C.are_gradients(_EXCHANGE, _CLASSES, params, grads)
    return (
        len(params) == len(grads)
        and set(map(type, grads)) <= set(_CLASSES)
        and set(map(_DTYPE, grads)) <= set(GRADIENTS)
        and set(map(_LAYOUT, grads)) <= {torch.strided}
        and all(map(eq, map(_SHAPE, grads), map(_SHAPE, params)))
        and all(map(eq, map(_DEVICE, grads), map(_DEVICE, params)))
        and all(map(Tensor.data_ptr, grads))
    )


def packed_rows(
    like: list[Tensor], grads: list[Tensor], rows: list[bytes]
) -> dict[torch.dtype, bytes | bytearray] | None:
    """Rows and the addresses of their gradients, by the gradients' types; None unless each passes
    `check_gradient`, is no negated view, and has its elements in the order of `like`'s in memory of
    its own on the CPU."""
    if _EXCHANGE is not None:
        packed = _C.adam_rows(_EXCHANGE, _CLASSES, like, grads, rows)
        return None if packed is None else dict(zip(GRADIENTS, packed, strict=True))
    if (
        not are_gradients(like, grads)
        or not all(map(eq, map(Tensor.stride, grads), map(Tensor.stride, like)))
        or any(map(Tensor.is_neg, grads))
        or any(grad.device.type != "cpu" for grad in grads[:1])  # all are where `like` is
    ):
        return None
    addresses = list(map(ADDRESS.pack, map(Tensor.data_ptr, grads)))
    if any(map(bytes.startswith, rows, addresses)):
        return None
    types = list(map(_DTYPE, grads))
    return {
        dtype: b"".join(map(add, compress(rows, right), compress(addresses, right)))
        for dtype in GRADIENTS
        if any(right := [x is dtype for x in types])
    }
