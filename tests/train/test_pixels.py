"""Tensor-parallel ranks decode a part of the pixels each."""

from __future__ import annotations

import pytest

from tests.ranks import run_cases


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_medium_is_decoded_once(ranks, model, conversations, tmp_path):
    case = {"model": model, "data": conversations}
    run_cases("tests.train.pixels_worker", case, ranks, tmp_path)
