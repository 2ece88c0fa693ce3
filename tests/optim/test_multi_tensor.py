"""Facts of many tensors, read in one native call and as with an older torch."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlmkernels._native import _C
from vlmkernels.optim import multi_tensor

NATIVE, OLDER = "native", "an older torch"


@pytest.fixture(params=[NATIVE, OLDER])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == OLDER:
        monkeypatch.setattr(multi_tensor, "_EXCHANGE", None)
    elif not hasattr(torch._C, "_dlpack_exchange_api"):  # where torch has them, they must be read
        pytest.skip(f"torch {torch.__version__} has no exchange functions")
    return request.param


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


def test_forms_differ_where_tensors_do(reader: str) -> None:
    made = {name: make() for name, make in TENSORS.items()}
    if reader == OLDER:
        del made["no memory"]
    forms = {name: multi_tensor.forms([x]) for name, x in made.items()}
    assert {name: multi_tensor.forms([x]) for name, x in made.items()} == forms
    if reader == NATIVE:  # what has no memory has no form: it never comes to a kernel
        assert forms.pop("another device") == forms["no memory"]
    for a, b in itertools.combinations(forms, 2):
        assert forms[a] != forms[b], (a, b)


def test_forms_of_many(reader: str) -> None:
    """They are read ahead, and none too many."""
    tensors = [torch.randn(i % 7, 2) for i in range(100)]
    forms = multi_tensor.forms(tensors)
    assert multi_tensor.forms(tensors) == forms
    if reader == NATIVE:
        assert forms == b"".join(multi_tensor.forms([x]) for x in tensors)
    for place in (0, 50, 99):
        others = [*tensors[:place], tensors[place].clone(), *tensors[place + 1 :]]
        assert (multi_tensor.forms(others) == forms) == (tensors[place].numel() == 0)


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
def test_gradients_are_known(name: str, reader: str) -> None:
    params = [nn.Parameter(torch.zeros(4, 6)) for _ in range(20)]
    for place in (0, 19):
        grads: list = [torch.ones(4, 6) for _ in params]
        grads[place] = GRADIENTS[name]()
        assert multi_tensor.are_gradients(params, grads) == (name in GOOD)
    strings: list = ["no tensor"] * 20
    assert not multi_tensor.are_gradients(params, strings)
    assert not multi_tensor.are_gradients(params, grads[:19])


# The gradients that a step reads where they lie: of parameters [4, 6], contiguous and turned.
IN_ORDER = {"contiguous": ("float32", "bfloat16", "a parameter"), "turned": ("turned",)}
MORE: dict[str, Callable[[], object]] = {
    "negated": lambda: torch._neg_view(torch.ones(4, 6)),
    "from further on": lambda: torch.ones(48)[24:].view(4, 6),
    "of columns": lambda: torch.ones(4, 12)[:, :6],
}
IN_ORDER["contiguous"] += ("from further on",)


@pytest.mark.parametrize("order", IN_ORDER)
@pytest.mark.parametrize("name", [*GRADIENTS, *MORE])
def test_rows_of_gradients_in_order(name: str, order: str, reader: str) -> None:
    def like(x: Tensor) -> Tensor:
        return x if order == "contiguous" else x.view(6, 4).t()

    params = [nn.Parameter(like(torch.zeros(4, 6))) for _ in range(20)]
    rows = [struct.pack("9q", p.data_ptr(), *range(8)) for p in params]
    for place in (0, 19):
        grads: list = [like(torch.ones(4, 6)) for _ in params]
        grads[place] = (GRADIENTS | MORE)[name]()
        packed = multi_tensor.packed_rows(params, grads, rows)
        assert (packed is not None) == (name in IN_ORDER[order])
        if packed is not None:
            for dtype in multi_tensor.GRADIENTS:
                expected = [
                    row + struct.pack("q", grad.data_ptr())
                    for row, grad in zip(rows, grads, strict=True)
                    if grad.dtype == dtype
                ]
                assert packed.get(dtype, b"") == b"".join(expected)
    grads = [like(torch.ones(4, 6)) for _ in params]
    assert multi_tensor.packed_rows(params, [*grads[:7], params[7], *grads[8:]], rows) is None
    if reader == OLDER:
        return
    with pytest.raises(ValueError, match="rows and grads differ in length"):
        multi_tensor.packed_rows(params, grads, rows[:19])
    with pytest.raises(ValueError, match="a row has 9 numbers of 8 bytes"):
        multi_tensor.packed_rows(params, grads, [*rows[:19], b"short"])


def test_rows_of_strides_that_do_not_count(reader: str) -> None:
    """Of one element or none in a dimension any stride is the parameter's; with an older torch such
    gradients are copied."""
    for shape, strides in (((1, 6), (77, 1)), ((6, 1), (1, 77)), ((), ()), ((0, 3), (9, 9))):
        param, grad = torch.zeros(shape), torch.empty_strided(shape, strides)
        row = struct.pack("9q", param.data_ptr(), *range(8))
        packed = multi_tensor.packed_rows([param], [grad], [row])
        if reader == OLDER:
            assert packed is None or grad.stride() == param.stride()
            continue
        assert packed is not None and len(packed[torch.float32]) == 80, (shape, strides)


def test_gradients_of_parameters() -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(40)]
    expected = []
    for i, param in enumerate(params):
        if i % 4 != 3:
            param.grad = torch.ones(3)
        if i % 3 == 0:
            param.decoupled_grad = torch.ones(3).bfloat16() if i % 2 else None  # type: ignore[attr-defined]
        grad = getattr(param, "decoupled_grad", None)
        grad = param.grad if grad is None else grad
        if grad is not None:
            expected.append((param, grad))
    active, grads = multi_tensor.gradients_of(params)
    assert len(active) == len(grads) == len(expected)
    assert all(a is p and b is g for a, b, (p, g) in zip(active, grads, expected, strict=True))
    assert multi_tensor.gradients_of([]) == ([], [])
    strangers: list[Any] = [object()]
    with pytest.raises(AttributeError):
        multi_tensor.gradients_of(strangers)


def test_held_tensors(reader: str) -> None:
    """At the first and the last place of many."""
    tensors = [torch.randn(i % 5, 2) for i in range(40)]
    holders: list = [None if i % 4 == 0 else {i: x} for i, x in enumerate(tensors)]
    forms = multi_tensor.forms(tensors)

    def are_held(**new: Any) -> bool:
        now = {"holders": holders, "keys": list(range(40)), "tensors": tensors, "then": forms}
        return multi_tensor.are_held(**now | new)

    assert are_held()
    for place in (1, 39):
        others: list[object] = [{}, {place: tensors[place].clone()}, {place + 1: tensors[place]}]
        for holder in [*others, *(["no dict"] if reader == NATIVE else [])]:
            assert not are_held(holders=[*holders[:place], holder, *holders[place + 1 :]])
        changed = tensors[place].clone()
        assert not are_held(
            holders=[None] * 40, tensors=[*tensors[:place], changed, *tensors[place + 1 :]]
        )
    assert are_held(holders=[None] * 40)
    if reader == OLDER:
        return
    assert not are_held(then=forms[:-8]) and not are_held(then=forms + bytes(8))
    assert not are_held(keys=list(range(39))) and not are_held(holders=holders[:39])
    with pytest.raises(TypeError, match="unhashable"):
        are_held(keys=[[]] * 40)


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
