"""The plan: exactly once, deterministic, full."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.step_plans import make_index
from tests.data.helpers import conversation, open_loader, write_json
from tests.released import released_spec
from vlmtrain.core.config import LoaderSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import scan_data
from vlmtrain.data.packing import plan as packing
from vlmtrain.data.packing.costs import sample_costs
from vlmtrain.data.packing.plan import POLICIES, Policy, deal, epoch_entries, plan_epoch
from vlmtrain.data.packing.sampler import Position, Sampler
from vlmtrain.data.processor import Processor
from vlmtrain.models.flops import Work, count
from vlmtrain.plan.workload import typical


@given(
    st.lists(st.integers(1, 100), max_size=200),
    st.integers(0, 2**31),
    st.integers(0, 5),
    st.text(),
    st.sampled_from(POLICIES),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_once_and_no_pack_too_long(
    lengths: list[int], seed: int, epoch: int, content_hash: str, policy: Policy
) -> None:
    array = np.array(lengths, dtype=np.int64)
    costs = array**2 % 77 + 1
    plan = plan_epoch(array, 100, seed, epoch, content_hash, costs=costs, policy=policy)
    assert sorted(i for pack in plan for i in pack.tolist()) == list(range(len(lengths)))
    assert all(0 < array[pack].sum() <= 100 for pack in plan)
    assert plan.tokens.tolist() == [array[pack].sum() for pack in plan]
    assert plan.costs.tolist() == [costs[pack].sum() for pack in plan]
    again = plan_epoch(array.copy(), 100, seed, epoch, content_hash, costs=costs, policy=policy)
    assert [pack.tolist() for pack in again] == [pack.tolist() for pack in plan]


@given(st.integers(1, 400), st.integers(1, 40_000))
@settings(max_examples=50, deadline=None)
def test_windows_cover_the_order_once(count: int, tokens: int) -> None:
    lengths = np.full(count, 100, dtype=np.int64)
    windows = packing._windows(np.arange(count), lengths, tokens)
    assert np.concatenate(windows).tolist() == list(range(count))


WRITTEN: dict[Policy, list[list[int]]] = {
    "balanced": [[6], [7, 3], [2, 5], [1], [4, 0]],
    "best_fit": [[1], [0], [5, 4], [6, 7], [3, 2]],
    "bucket": [[7, 2, 4], [1], [6], [3], [0], [5]],
    "in_order": [[4], [3], [5, 7], [1], [2], [6], [0]],
    "none": [[4], [3], [5], [7], [1], [2], [6], [0]],
}


def test_the_plan_of_a_seed_never_changes() -> None:
    """Written down: a change here breaks every saved position, and must raise PLAN_VERSION."""
    assert packing.PLAN_VERSION == 2
    lengths = np.array([5, 9, 3, 7, 4, 6, 8, 2])
    for policy, packs in WRITTEN.items():
        plan = plan_epoch(lengths, 10, 3, 1, "x", costs=lengths[::-1] ** 2, policy=policy)
        assert [pack.tolist() for pack in plan] == packs, policy


def test_shuffle_is_the_published_hash() -> None:
    """splitmix64 in Python's own integers."""
    mask = 2**64 - 1
    start = int.from_bytes(hashlib.sha256(b"2|samples|7|2|h").digest()[:8], "little")

    def splitmix(i: int) -> int:
        z = (start + (i + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    expected = sorted(range(500), key=splitmix)
    assert packing.shuffled(500, "samples", 7, 2, "h").tolist() == expected


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
        order = packing.shuffled(count, "samples", 7, epoch, "h")
        places[order] += np.arange(count)
    error = np.sqrt((count**2 - 1) / 12 / epochs)
    assert np.abs(places / epochs - (count - 1) / 2).max() < 5 * error


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_balance_fill_and_speed(family: str) -> None:
    """The mix of the planner, 7B: what the balance table of docs/data.md promises."""
    spec = released_spec(f"{family}-7b")
    data = typical(spec)
    grids = [grid for sample in data.grids for grid in sample]
    start = np.cumsum([0, *(len(sample) for sample in data.grids)])
    lengths = np.array(data.tokens)
    costs = sample_costs(lengths, np.array(data.targets), start, np.array(grids), spec).sum(1)
    whole = np.rint(16 * costs).astype(np.int64)
    began = time.process_time()
    plan = plan_epoch(lengths, 8192, 0, 0, "h", costs=whole)
    seconds = time.process_time() - began
    assert seconds < 2, "0.1 s for 10,000 samples on an idle core"
    assert plan.tokens.sum() == lengths.sum() and plan.costs.sum() == whole.sum()
    assert plan.tokens.sum() / (len(plan) * 8192) > 0.99
    full = plan_epoch(lengths, 8192, 0, 0, "h", costs=whole, policy="best_fit")
    assert plan.costs.std() / plan.costs.mean() < 0.8 * full.costs.std() / full.costs.mean()
    for ranks in (8, 32):
        balance = []
        for k in range(len(plan) // (8 * ranks)):
            batch = plan.costs[8 * ranks * k : 8 * ranks * (k + 1)]
            dealt = deal(batch, ranks)
            assert sorted(i for share in dealt for i in share) == list(range(len(batch)))
            assert {len(share) for share in dealt} == {8}
            balance.append(max(batch[share].sum() for share in dealt) / batch.sum() * ranks)
        assert np.mean(balance) < 1.01


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_a_deal_is_even_within_the_largest_cost(costs: list[int], ranks: int) -> None:
    """Equal numbers of packs, and no rank above the mean by more than the costliest pack."""
    array = np.array(costs * ranks)
    for policy in POLICIES:
        dealt = deal(array, ranks, policy)
        assert sorted(i for share in dealt for i in share) == list(range(len(array)))
        assert all(len(share) == len(costs) and share == sorted(share) for share in dealt)
    loads = [array[share].sum() for share in deal(array, ranks)]
    assert max(loads) - min(loads) <= max(costs)


def test_the_deal_by_hand() -> None:
    """9 | 8, then 7 to the 8 and 1 to the 9, which has room for one more."""
    assert deal(np.array([7, 9, 1, 8]), 2) == [[1, 2], [0, 3]]
    assert deal(np.array([7, 9, 1, 8]), 2, "in_order") == [[0, 2], [1, 3]]


def test_weights_over_epochs() -> None:
    """A quarter: four epochs see each sample once; two and a half: five in every two epochs."""
    source = np.array([0] * 8 + [1] * 6 + [2] * 3)
    weights = [0.25, 2.5, 1.0]
    seen = [epoch_entries(source, weights, 1, epoch, "h") for epoch in range(4)]
    assert [np.bincount(source[part], minlength=3).tolist() for part in seen] == [[2, 15, 3]] * 4
    total = np.bincount(np.concatenate(seen), minlength=17)
    assert total.tolist() == [1] * 8 + [10] * 6 + [4] * 3
    pair = np.bincount(np.concatenate(seen[:2]), minlength=17)
    assert set(pair[8:14].tolist()) == {5}
    assert len(epoch_entries(np.zeros(100), [0.29], 0, 0, "h")) == 29  # 0.29 * 100 is below
    again = [epoch_entries(source, weights, 1, epoch, "h") for epoch in range(4)]
    assert all(np.array_equal(a, b) for a, b in zip(seen, again, strict=True))
    assert epoch_entries(source, [1, 1, 1], 1, 3, "h").tolist() == list(range(17))
    plan = plan_epoch(np.full(17, 3), 10, 1, 0, "h", entries=seen[0])
    assert sorted(i for pack in plan for i in pack) == sorted(seen[0].tolist())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_costs_are_the_counted_flops(family: str) -> None:
    """Of the planner's exact counter, weighed by what each part reaches of peak."""
    spec = released_spec(f"{family}-7b")
    samples = [(70, []), (900, [(1, 34, 50)]), (3000, [(4, 20, 30), (1, 62, 6)]), (1, [])]
    start = np.array([0, 0, 1, 3, 3])
    grids = np.array([grid for _, media in samples for grid in media])
    targets = np.array([50, 20, 0, 1])
    costs = sample_costs(np.array([n for n, _ in samples]), targets, start, grids, spec)
    unit = count(spec, Work(tokens=1)).forward["language"] / 0.5
    for row, (length, media), learned in zip(costs, samples, targets, strict=True):
        forward = count(spec, Work.of([length], media, spec.vision, targets=int(learned))).forward
        language = (forward["language"] + forward["head"]) / 0.5
        vision = sum(forward[name] for name in ("patch_embed", "vision", "merger")) / 0.38
        np.testing.assert_allclose(row, [language / unit, vision / unit], rtol=1e-12)


def test_a_sample_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths go from 1 to 11; .*the pack length 10"):
        plan_epoch(np.array([1, 11]), 10, 0, 0, "")
    with pytest.raises(ValueError, match="lengths go from 0 to 3"):
        plan_epoch(np.array([0, 3]), 10, 0, 0, "")
    assert plan_epoch(np.array([], dtype=np.int64), 10, 0, 0, "").packs == []
    with pytest.raises(ValueError, match="policy is 'best'; it must be one of balanced, best_fit"):
        plan_epoch(np.array([1]), 10, 0, 0, "", policy="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("weight, held", [(0.25, 8), (0.1, 4)])
def test_a_step_of_small_weights_is_counted_as_it_is(
    weight: float, held: int, tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Four packs, of epochs of 2 and of 1 or no sample: nothing is seen twice."""
    records = [conversation("q", f"a {i}") for i in range(8)]
    data = write_json(tmp_path / "c.json", records)
    index = scan_data(f"{data}:{weight}", LoaderSection(), processor, 1000)
    lines: list[str] = []
    with open_loader(
        index, processor, spec, pack_length=1000, global_batch=4, prefetch=False, log=lines.append
    ) as loader:
        step = np.concatenate([pack for packs in loader.next.dealt for pack in packs])
        assert len(step) == held == len(set(step.tolist())) and not lines
        assert loader.samples_per_step == held


def test_a_batch_is_named_that_fits_data_and_ranks(
    tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Of an epoch of three packs two ranks can share two."""
    path = write_json(tmp_path / "c.json", [conversation("q", f"a {i}") for i in range(3)])
    index = scan_data(str(path), LoaderSection(), processor, 1000)
    lines: list[str] = []
    options: dict[str, Any] = {"pack_length": 1000, "packing": "none", "prefetch": False}
    open_loader(
        index, processor, spec, global_batch=8, dp_size=2, log=lines.append, **options
    ).close()
    assert len(lines) == 1 and lines[0].endswith("--train.global_batch_packs 2 fits")


def test_the_steps_of_a_fraction_of_an_epoch() -> None:
    """0.07 * 100 is a little above 7."""
    spec, options = released_spec("qwen2_5_vl-7b"), {"pack_length": 8192, "seed": 0, "ranks": 1}
    sampler = Sampler(make_index(100), spec, "none", global_batch=1, **options)
    assert len(sampler.epoch_plan(0)) == 100
    assert sampler.steps_for_epochs(0.07, Position()) == 7
