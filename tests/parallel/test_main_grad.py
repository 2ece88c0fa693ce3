"""The embedding's gradient straight into Megatron's main_grad."""

from __future__ import annotations

from tests.ranks import run_ranks


def test_under_ddp(seed: int) -> None:
    """On two ranks, with and without overlap_grad_reduce, weights tied to the output layer or not,
    with an output layer that adds to main_grad itself or not."""
    ranks = run_ranks(["tests/parallel/main_grad_worker.py", str(seed)], 2)
    assert all(r.code == 0 for r in ranks), "\n\n".join(r.output[-3000:] for r in ranks)
