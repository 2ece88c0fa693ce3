"""The plan: exactly once, deterministic, full."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmtrain.data import packing
from vlmtrain.data.packing import plan_epoch


@given(
    st.lists(st.integers(1, 100), max_size=200), st.integers(0, 2**31), st.integers(0, 5), st.text()
)
@settings(max_examples=100, deadline=None)
def test_every_sample_once_and_no_pack_too_long(
    lengths: list[int], seed: int, epoch: int, content_hash: str
) -> None:
    array = np.array(lengths, dtype=np.int64)
    packs = plan_epoch(array, 100, seed, epoch, content_hash)
    assert sorted(i for pack in packs for i in pack.tolist()) == list(range(len(lengths)))
    assert all(0 < array[pack].sum() <= 100 for pack in packs)
    again = plan_epoch(array.copy(), 100, seed, epoch, content_hash)
    assert [pack.tolist() for pack in again] == [pack.tolist() for pack in packs]


@given(st.integers(1, 400), st.integers(1, 40_000))
@settings(max_examples=50, deadline=None)
def test_windows_cover_the_order_once(count: int, tokens: int) -> None:
    lengths = np.full(count, 100, dtype=np.int64)
    windows = packing._windows(np.arange(count), lengths, tokens)
    assert np.concatenate(windows).tolist() == list(range(count))


def test_the_plan_of_a_seed_never_changes() -> None:
    """Written down: a change here breaks every saved position, and must raise PLAN_VERSION."""
    packs = plan_epoch(np.array([5, 9, 3, 7, 4, 6, 8, 2]), 10, seed=3, epoch=1, content_hash="x")
    assert packing.PLAN_VERSION == 1
    assert [pack.tolist() for pack in packs] == [[5, 4], [3, 2], [0], [1], [6, 7]]


def test_shuffle_is_the_published_hash() -> None:
    """splitmix64 in Python's own integers."""
    mask = 2**64 - 1
    start = int.from_bytes(hashlib.sha256(b"1|samples|7|2|h").digest()[:8], "little")

    def splitmix(i: int) -> int:
        z = (start + (i + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    expected = sorted(range(500), key=splitmix)
    assert packing._shuffled(500, "samples", 7, 2, "h").tolist() == expected


def test_best_fit_by_hand() -> None:
    """Longest first, each into the fullest pack with room: 9 | 8 2 | 7 3 | 6 4 | 5."""
    lengths = np.array([5, 9, 3, 7, 4, 6, 8, 2])
    packs = packing._best_fit(np.arange(8), lengths, 10)
    assert [lengths[pack].tolist() for pack in packs] == [[9], [8, 2], [7, 3], [6, 4], [5]]
    # A 3 goes to the 7, which it fills, not to the 6, which came later and has more room.
    lengths = np.array([7, 6, 3])
    packs = packing._best_fit(np.arange(3), lengths, 10)
    assert [lengths[pack].tolist() for pack in packs] == [[7, 3], [6]]


def test_order_depends_on_seed_epoch_and_data() -> None:
    lengths = np.full(50, 10, dtype=np.int64)
    plans = [
        [pack.tolist() for pack in plan_epoch(lengths, 10, *arguments)]
        for arguments in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    ]
    for i, plan in enumerate(plans):
        assert plan != sorted(plan)
        assert all(plan != other for other in plans[i + 1 :])


def test_shuffle_is_even() -> None:
    """Over many epochs each sample's mean place is the middle, within 5 standard errors."""
    count, epochs = 40, 400
    places = np.zeros(count)
    for epoch in range(epochs):
        order = packing._shuffled(count, "samples", 7, epoch, "h")
        places[order] += np.arange(count)
    error = np.sqrt((count**2 - 1) / 12 / epochs)
    assert np.abs(places / epochs - (count - 1) / 2).max() < 5 * error


def test_fill_and_speed(rng: np.random.Generator) -> None:
    """A mix like natural data (mean about 1,500 tokens): over 99% full, and quick to plan."""
    lengths = np.minimum(rng.lognormal(6.9, 0.9, 10_000).astype(np.int64) + 20, 8192)
    start = time.perf_counter()
    packs = plan_epoch(lengths, 8192, 0, 0, "h")
    seconds = time.perf_counter() - start
    assert lengths.sum() / (len(packs) * 8192) > 0.99
    assert seconds < 2, "0.1 s on an idle core"


def test_a_sample_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths go from 1 to 11; .*the pack length 10"):
        plan_epoch(np.array([1, 11]), 10, 0, 0, "")
    with pytest.raises(ValueError, match="lengths go from 0 to 3"):
        plan_epoch(np.array([0, 3]), 10, 0, 0, "")
    assert plan_epoch(np.array([], dtype=np.int64), 10, 0, 0, "") == []
