"""The checks of test_embedding.py fail where the native kernels are handed something wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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
from vlmkernels import _native, visual_embedding, visual_index
from vlmkernels.embedding.lookup import visual_embedding_reference

#: Arguments of the native functions, in order.
ARGUMENTS = {
    "embedding_forward": "ids visual_index table visual out first rows hidden vocab_start "
    "vocab_rows visual_rows partial table_type visual_type out_type",
    "embedding_gather": "visual_index grad inverse dvisual first rows hidden visual_rows "
    "grad_type dvisual_type",
    "embedding_sort": "ids visual_index keys order first rows vocab_start vocab_rows padding_idx",
    "embedding_reduce": "keys order grad dweight count hidden vocab_rows grad_type dweight_type "
    "accumulate",
}
#: function, what is wrong, {argument: its value made of all arguments}
MUTANTS: list[tuple[str, str, dict[str, Callable[[Any], Any]]]] = [
    ("forward", "first position", {"first": lambda a: a.first - 1}),
    ("forward", "a row short", {"rows": lambda a: a.rows - 1}),
    ("forward", "an element short", {"hidden": lambda a: a.hidden - 1}),
    ("forward", "range start", {"vocab_start": lambda a: a.vocab_start + 1}),
    ("forward", "range end", {"vocab_rows": lambda a: a.vocab_rows - 1}),
    ("forward", "no visual", {"visual_rows": lambda a: -1}),
    ("forward", "fp16 table for bf16", {"table_type": lambda a: a.table_type + 1}),
    ("forward", "fp16 visual for bf16", {"visual_type": lambda a: a.visual_type + 1}),
    ("gather", "first position", {"first": lambda a: a.first - 1}),
    ("gather", "a row short", {"rows": lambda a: a.rows - 1}),
    ("gather", "an element short", {"hidden": lambda a: a.hidden - 1}),
    ("gather", "fp16 for bf16", {"dvisual_type": lambda a: a.dvisual_type + 1}),
    ("sort", "first position", {"first": lambda a: a.first - 1}),
    ("sort", "half the rows", {"rows": lambda a: a.rows // 2}),
    ("sort", "range start", {"vocab_start": lambda a: a.vocab_start + 1}),
    ("sort", "range end", {"vocab_rows": lambda a: a.vocab_rows - 1}),
    ("sort", "an id skipped", {"padding_idx": lambda a: 0}),
    ("reduce", "most entries missing", {"count": lambda a: 3}),
    ("reduce", "a row of the table short", {"vocab_rows": lambda a: a.vocab_rows - 1}),
    ("reduce", "keys for order", {"keys": lambda a: a.order, "order": lambda a: a.keys}),
    ("reduce", "fp16 for bf16", {"grad_type": lambda a: a.grad_type + 1}),
    ("reduce", "fp16 sums for bf16", {"dweight_type": lambda a: a.dweight_type + 1}),
    ("reduce", "added to what was there", {"accumulate": lambda a: 1}),
]


class MutatedModule:
    """The native module with arguments of one function changed."""

    def __init__(self, function: str, changes: dict[str, Callable[[Any], Any]]) -> None:
        self.function, self.changes, self.native = function, changes, _native._C

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.native, name)
        if name != self.function:
            return function

        def call(*args: Any) -> Any:
            names = ARGUMENTS[name].split()
            if len(names) != len(args):  # no error that a test of a mutant expects
                raise TypeError(f"{name} takes {len(args)} arguments, ARGUMENTS names {len(names)}")
            passed = dict(zip(names, args, strict=True))
            changes = {k: make(SimpleNamespace(**passed)) for k, make in self.changes.items()}
            return function(*{**passed, **changes}.values())

        return call


@pytest.mark.parametrize(
    ("function", "changes"),
    [pytest.param(f"embedding_{f}", c, id=f"{f}: {name}") for f, name, c in MUTANTS],
)
def test_mutant_is_noticed(
    function: str, changes: dict[str, Callable[[Any], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_ids(120, 0.5)
    ids[[0, 59, 60, 119]] = IMAGE  # both ends of the shard that is tested, and of its neighbour
    ids[61:63] = torch.tensor([0, VOCABULARY - 1])
    index = visual_index(ids, IMAGE)
    weight = torch.randn(VOCABULARY, 16).bfloat16()
    visual = torch.randn(int((ids == IMAGE).sum()), 16).bfloat16()
    kw: Any = {"shard": (1, 2), "vocab_range": (0, VOCABULARY)}
    dout = torch.randn(60, 16).bfloat16()
    reference = visual_embedding_reference
    plain = gradients(reference, ids, weight, visual, index, dout, **kw)
    exact = gradients(reference, ids, weight.double(), visual.double(), index, dout.double(), **kw)

    def check() -> None:
        check_forward(ids, weight, visual, index, **kw)
        with poisoned():
            ours = gradients(visual_embedding, ids, weight, visual, index, dout, **kw)
        assert_accurate("dweight", ours[0], plain[0], exact[0])
        assert_bitwise("dvisual", ours[1], plain[1])

    check()
    monkeypatch.setattr(_native, "_C", MutatedModule(function, changes))
    with pytest.raises((AssertionError, ValueError)):
        check()
