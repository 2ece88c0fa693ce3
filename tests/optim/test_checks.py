"""Many tensors read in one native call, against the same read one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vlmkernels._native import _C
from vlmkernels.optim import checks

if not hasattr(torch._C, "_dlpack_exchange_api"):  # where torch has them, they must be read
    pytest.skip(f"torch {torch.__version__} has no exchange functions", allow_module_level=True)

BASE = torch.randn(24)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: BASE,
    "another address": lambda: BASE[1:],
    "shorter": lambda: BASE[:23],
    "another shape": lambda: BASE.view(4, 6),
    "turned": lambda: BASE.view(6, 4).t(),
    "more dimensions": lambda: BASE.view(4, 6, 1),
    "another type": lambda: BASE.view(torch.int32),
    "another device": lambda: torch.empty(24, device="meta"),
    "no elements": lambda: BASE[:0],
    "none of another shape": lambda: BASE[:0].view(0, 3),
    "no memory": lambda: BASE.to_sparse(),
}


def test_forms_differ_where_tensors_do() -> None:
    forms = {name: checks._forms([make()]) for name, make in TENSORS.items()}
    assert {name: checks._forms([make()]) for name, make in TENSORS.items()} == forms
    # What has no memory has no form: it never comes to a kernel.
    assert forms.pop("another device") == forms["no memory"]
    assert len(set(forms.values())) == len(forms)
    numbers = [make() for name, make in TENSORS.items() if name != "another device"]
    assert checks._forms(numbers) == b"".join(forms.values())  # read ahead, and none too many
    many = [torch.randn(i % 7, 2) for i in range(100)]
    assert checks._forms(many) == b"".join(checks._forms([x]) for x in many)


GRADIENTS: dict[str, Callable[[], object]] = {
    "float32": lambda: torch.ones(4, 6),
    "bfloat16": lambda: torch.ones(4, 6).bfloat16(),
    "turned": lambda: torch.ones(6, 4).t(),
    "a parameter": lambda: nn.Parameter(torch.ones(4, 6)),
    "float16": lambda: torch.ones(4, 6).half(),
    "float64": lambda: torch.ones(4, 6).double(),
    "int32": lambda: torch.ones(4, 6).int(),
    "as many of another shape": lambda: torch.ones(6, 4),
    "a dimension more": lambda: torch.ones(4, 6, 1),
    "another device": lambda: torch.ones(4, 6, device="meta"),
    "sparse": lambda: torch.ones(4, 6).to_sparse(),
    "without memory": lambda: torch._efficientzerotensor((4, 6)),
    "a class of its own": lambda: torch.ones(4, 6).as_subclass(type("Sub", (Tensor,), {})),
}
GOOD = ("float32", "bfloat16", "turned", "a parameter")


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_known(name: str) -> None:
    params = [nn.Parameter(torch.zeros(4, 6)) for _ in range(20)]
    for place in (0, 19):
        grads: list = [torch.ones(4, 6) for _ in params]
        grads[place] = GRADIENTS[name]()
        classes = (Tensor, nn.Parameter)
        assert _C.are_gradients(checks._EXCHANGE, classes, params, grads) == (name in GOOD)
    assert not _C.are_gradients(checks._EXCHANGE, classes, params, ["no tensor"] * 20)
    assert not _C.are_gradients(checks._EXCHANGE, classes, params, grads[:19])


@pytest.mark.parametrize(
    ("version", "function", "known"),
    [
        ((1, 2), 1, True),
        ((1, 9), 1, True),
        ((1, 1), 1, False),
        ((2, 2), 1, False),
        ((1, 3), 0, False),
    ],
)
def test_only_known_exchange_functions_are_called(
    version: tuple[int, int], function: int, known: bool
) -> None:
    table = (ctypes.c_uint64 * 7)(version[0] | version[1] << 32, 0, 0, 0, 0, function, 0)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    capsule = make(ctypes.addressof(table), b"dlpack_exchange_api", None)
    assert _C.reads_tensors(capsule) == known
    if not known:
        with pytest.raises(ValueError, match="exchange is not of DLPack 1.2"):
            _C.tensor_forms(capsule, [])
