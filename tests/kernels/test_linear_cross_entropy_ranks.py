"""A vocabulary in parts on gloo ranks."""

from __future__ import annotations

from tests.ranks import run_ranks


def test_ranks(seed: int) -> None:
    """Losses and gradients are those of the whole vocabulary; wrong parts are an error on all."""
    ranks = run_ranks(["tests/kernels/linear_cross_entropy_worker.py", str(seed)], 2)
    assert all(r.code == 0 for r in ranks), "\n\n".join(r.output[-3000:] for r in ranks)
