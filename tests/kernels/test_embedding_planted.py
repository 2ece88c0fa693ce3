"""The checks of test_embedding.py fail where the native kernels are handed something wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.numeric import assert_accurate, assert_bitwise, poisoned
from tests.kernels.test_embedding import (
    IMAGE,
    VOCABULARY,
    check_forward,
    gradients,
    make_ids,
)
from vlmkernels import _native, embedding, embedding_grad, visual_embedding, visual_index


class _Planted:
    """The native module with one argument of one function changed."""

    def __init__(self, function: str, change: Callable[[list[Any]], None]) -> None:
        self.function, self.change = function, change

    def __getattr__(self, name: str) -> Any:
        native = getattr(_native._C, name)
        if name != self.function:
            return native

        def call(*args: Any) -> Any:
            changed = list(args)
            self.change(changed)
            return native(*changed)

        return call


def _add(place: int, amount: int) -> Callable[[list[Any]], None]:
    def change(args: list[Any]) -> None:
        args[place] += amount

    return change


def _swap(a: int, b: int) -> Callable[[list[Any]], None]:
    def change(args: list[Any]) -> None:
        args[a], args[b] = args[b], args[a]

    return change


def _set(place: int, value: int) -> Callable[[list[Any]], None]:
    def change(args: list[Any]) -> None:
        args[place] = value

    return change


# embedding_forward(ids, visual_index, table, visual, out, first, rows, hidden, vocab_start,
# vocab_rows, visual_rows, partial, types of table, visual and out);
# embedding_gather(visual_index, grad, inverse, dvisual, first, rows, hidden, visual_rows, types of
# grad and dvisual); embedding_reduce(keys, order, grad, dweight, count, hidden, vocab_rows, types
# of grad and dweight, accumulate).
PLANTED = [
    ("first position", "embedding_forward", _add(5, -1)),
    ("a row short", "embedding_forward", _add(6, -1)),
    ("an element short", "embedding_forward", _add(7, -1)),
    ("range start", "embedding_forward", _add(8, 1)),
    ("range end", "embedding_forward", _add(9, -1)),
    ("no visual", "embedding_forward", _set(10, -1)),
    ("fp16 table for bf16", "embedding_forward", _add(12, 1)),
    ("fp16 visual for bf16", "embedding_forward", _add(13, 1)),
    ("first position", "embedding_gather", _add(4, -1)),
    ("a row short", "embedding_gather", _add(5, -1)),
    ("an element short", "embedding_gather", _add(6, -1)),
    ("fp16 for bf16", "embedding_gather", _add(9, 1)),
    ("most entries missing", "embedding_reduce", _set(4, 3)),
    ("a row of the table short", "embedding_reduce", _add(6, -1)),
    ("keys for order", "embedding_reduce", _swap(0, 1)),
    ("fp16 for bf16", "embedding_reduce", _add(7, 1)),
    ("fp16 sums for bf16", "embedding_reduce", _add(8, 1)),
    ("added to what was there", "embedding_reduce", _set(9, 1)),
]


@pytest.mark.parametrize(
    ("function", "change"),
    [pytest.param(f, c, id=f"{f.removeprefix('embedding_')}: {n}") for n, f, c in PLANTED],
)
def test_planted_bug_is_seen(
    function: str, change: Callable[[list[Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_ids(120, 0.5)
    ids[[0, 59, 60, 119]] = IMAGE  # both ends of the shard that is tested, and of its neighbour
    ids[61:63] = torch.tensor([0, VOCABULARY - 1])
    index = visual_index(ids, IMAGE)
    weight = torch.randn(VOCABULARY, 16).bfloat16()
    visual = torch.randn(int((ids == IMAGE).sum()), 16).bfloat16()
    kw: Any = {"shard": (1, 2), "vocab_range": (0, VOCABULARY)}
    dout = torch.randn(60, 16).bfloat16()
    reference = embedding.visual_embedding_reference
    plain = gradients(reference, ids, weight, visual, index, dout, **kw)
    exact = gradients(reference, ids, weight.double(), visual.double(), index, dout.double(), **kw)

    def check() -> None:
        check_forward(ids, weight, visual, index, **kw)
        with poisoned():
            ours = gradients(visual_embedding, ids, weight, visual, index, dout, **kw)
        assert_accurate("dweight", ours[0], plain[0], exact[0])
        assert_bitwise("dvisual", ours[1], plain[1])

    check()
    monkeypatch.setattr(embedding_grad, "_C", _Planted(function, change))
    with pytest.raises((AssertionError, ValueError)):
        check()
