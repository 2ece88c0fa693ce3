"""visual_index against its definition, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vlmkernels import visual_index
from vlmkernels.embedding.visual_index import visual_index_reference


def test_visual_index() -> None:
    ids = torch.tensor([5, 7, 7, 1, 9, 7, 9, 2])
    assert visual_index(ids, 7).tolist() == [-1, 0, 1, -1, -1, 2, -1, -1]
    both = visual_index(ids, [7, 9], counts=[2, 3])
    assert both.tolist() == [-1, 0, 1, -1, 2, 3, 4, -1] and both.dtype == torch.int32
    for tokens in (7, [9], [7, 9], [100]):
        expected = visual_index_reference(ids, tokens)
        assert visual_index(ids, tokens).tolist() == expected.tolist()
    assert visual_index(ids[:0], 7, counts=0).shape == (0,)
    for counts in (torch.tensor([1, 2]), np.int64(3), np.array([1, 2])):
        assert visual_index(ids, 7, counts=counts).max() == 2


def test_visual_index_names_both_counts() -> None:
    ids = torch.tensor([5, 7, 7, 1])
    with pytest.raises(ValueError, match=r"holds 2 placeholders .*\[7\].* 3 visual rows"):
        visual_index(ids, 7, counts=[1, 2])
    with pytest.raises(ValueError, match="holds 0 placeholders .* 4 visual rows"):
        visual_index(ids[:0], 7, counts=4)
    with pytest.raises(ValueError, match="sample b of input_ids holds 1 .* 2 visual rows"):
        visual_index(ids, 7, counts=[1, 2], cu_seqlens=[0, 2, 4], names=["a", "b"])
    with pytest.raises(ValueError, match=r"names is \['a'\]; it must hold one .* 2 samples"):
        visual_index(ids, 7, counts=[1, 2], cu_seqlens=[0, 2, 4], names=["a"])
    with pytest.raises(ValueError, match=r"cu_seqlens is \[\]; it must rise from 0 to the 4"):
        visual_index(ids, 7, counts=[], cu_seqlens=[])
    with pytest.raises(ValueError, match="token_ids is empty"):
        visual_index(ids, [])
    with pytest.raises(ValueError, match=r"input_ids is int32 \[4\].* must be int64 \[S\]"):
        visual_index(ids.int(), 7)


def test_kinds_of_counts_and_ids() -> None:
    ids = torch.tensor([5, 7, 7, 1])
    two = [[np.int64(2)], np.array([2]), torch.tensor([2]), (2,), [torch.tensor([1, 1])]]
    for counts in (2, np.int64(2), *two):
        for options in ({}, {"separate": True}, {"cu_seqlens": [0, 4]}):
            if not options or not isinstance(counts, (int, np.int64)):
                want = [-1, 0, 1, -1]
                assert visual_index(ids, [7], counts, **options).tolist() == want
            else:
                with pytest.raises(ValueError, match="counts is 2; with .* it must hold one entry"):
                    visual_index(ids, [7], counts, **options)
    wrong: Any
    for wrong in (2.0, "2", [2.5], torch.tensor([2.0]), torch.tensor(2.9), np.array(2)):
        with pytest.raises(ValueError, match="counts holds .* it must hold whole numbers"):
            visual_index(ids, 7, wrong)
    with pytest.raises(ValueError, match="cu_seqlens is .* must hold whole numbers"):
        visual_index(ids, 7, [1, 1], cu_seqlens=[0.0, 2.9, 4.0])
    with pytest.raises(ValueError, match=r"token_ids \[7, 7\] has an id twice"):
        visual_index(ids, [7, 7], separate=True)
    for wrong in (None, torch.tensor(7), 7.0, [7.9]):
        with pytest.raises(ValueError, match="token_ids is .* it must be an id or several"):
            visual_index(ids, wrong)
