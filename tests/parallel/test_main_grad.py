"""The embedding's gradient straight into Megatron's main_grad."""

from __future__ import annotations

import pytest

from tests.ranks import run_workers


@pytest.mark.slow
def test_under_ddp(seed: int) -> None:
    """On two ranks, with and without overlap_grad_reduce, weights tied to the output layer or not,
    with an output layer that adds to main_grad itself or not."""
    run_workers(["-m", "tests.parallel.main_grad_worker", str(seed)], 2)
