"""Tensor-parallel ranks decode a part of the pixels each."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_medium_is_decoded_once(ranks, model, conversations, tmp_path):
    case = tmp_path / "case.pt"
    torch.save({"model": str(model), "data": str(conversations)}, case)
    done = run_ranks(["tests/train/pixels_worker.py", str(case)], ranks)
    assert all(rank.code == 0 for rank in done), "\n".join(r.output[-3000:] for r in done)
