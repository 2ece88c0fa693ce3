"""The simulator against enumeration of all paths, closed forms, and megatron-core's own order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vlmtrain.plan import schedule

SHAPES = [(1, 1, 3), (2, 1, 1), (2, 1, 3), (3, 1, 2), (3, 1, 4), (2, 2, 2), (2, 3, 2), (2, 2, 4)]


def _longest_path(forward, backward, pipeline: int, transfer) -> float:  # type: ignore[no-untyped-def]
    """The longest of all chains of dependent work, every one of them walked.

    Written from the definitions alone: work depends on its rank's previous piece and on the
    neighbouring stage's piece of the same microbatch.
    """
    stages, microbatches = forward.shape
    virtual = stages // pipeline
    previous: dict[tuple[int, int, int], list[tuple[tuple[int, int, int], float]]] = {}
    for rank in range(pipeline):
        last = None
        for kind, chunk, m in schedule.order(pipeline, virtual, microbatches, rank):
            stage = chunk * pipeline + rank
            node = (kind, stage, m)
            sources = [] if last is None else [(last, 0.0)]
            if kind == schedule.FORWARD and stage:
                sources.append(((kind, stage - 1, m), transfer[stage - 1]))
            if kind == schedule.BACKWARD:
                if stage == stages - 1:
                    sources.append(((schedule.FORWARD, stage, m), 0.0))
                else:
                    sources.append(((kind, stage + 1, m), transfer[stage]))
            previous[node] = sources
            last = node
    times = (forward, backward)
    paths = 0

    def walk(node: tuple[int, int, int], length: float) -> float:
        nonlocal paths
        length += times[node[0]][node[1]][node[2]]
        if not previous[node]:
            paths += 1
            return length
        return max(walk(source, length + lag) for source, lag in previous[node])

    longest = max(walk(node, 0.0) for node in previous)
    assert paths > 0
    return longest


@pytest.mark.parametrize("pipeline,virtual,microbatches", SHAPES)
def test_equals_the_longest_of_all_paths(
    pipeline: int, virtual: int, microbatches: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(3):
        stages = pipeline * virtual
        forward = rng.random((stages, microbatches))
        backward = 2 * rng.random((stages, microbatches))
        transfer = 0.3 * rng.random(stages - 1)
        timeline = schedule.simulate(forward, backward, pipeline, transfer=transfer.tolist())
        expected = _longest_path(forward, backward, pipeline, transfer)
        assert timeline.seconds == pytest.approx(expected, rel=1e-12)
        busy = (forward + backward).sum(1).reshape(virtual, pipeline).sum(0)
        assert timeline.busy == pytest.approx(tuple(busy))


@pytest.mark.parametrize("pipeline,microbatches", [(1, 4), (2, 2), (4, 4), (4, 16), (8, 9), (5, 3)])
def test_uniform_1f1b_closed_form(pipeline: int, microbatches: int) -> None:
    f, b = 1.0, 2.0
    shape = (pipeline, microbatches)
    timeline = schedule.simulate(np.full(shape, f), np.full(shape, b), pipeline)
    assert timeline.seconds == (microbatches + pipeline - 1) * (f + b)
    bubble = (pipeline - 1) / (microbatches + pipeline - 1)
    assert timeline.bubble == pytest.approx(bubble)
    quick = schedule.estimate(np.full(pipeline, f + b), pipeline, microbatches)
    if microbatches >= pipeline:
        assert quick == timeline.seconds


@pytest.mark.parametrize("pipeline,virtual,microbatches", [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_uniform_interleaved_closed_form(pipeline: int, virtual: int, microbatches: int) -> None:
    """M full microbatches and a ramp that is `virtual` times shorter."""
    shape = (pipeline * virtual, microbatches)
    timeline = schedule.simulate(np.full(shape, 1.0), np.full(shape, 2.0), pipeline)
    assert timeline.seconds == (microbatches * virtual + pipeline - 1) * 3.0
    quick = schedule.estimate(np.full(pipeline * virtual, 3.0), pipeline, microbatches)
    assert quick == timeline.seconds


def test_the_estimate_of_uneven_chunks(seed: int) -> None:
    """The busiest rank's work and the ramp: within 12%."""
    rng = np.random.default_rng(seed)
    for _ in range(30):
        times = rng.uniform(0.5, 1.5, 8)
        forward = np.tile(times[:, None] / 3, 16)
        real = schedule.simulate(forward, 2 * forward, 4).seconds
        assert schedule.estimate(times, 4, 16) == pytest.approx(real, rel=0.12)


def test_the_estimate_of_fewer_microbatches_than_ranks() -> None:
    """The first of four stages is the slowest and never waits: no less than its own work."""
    times = np.array([30.0, 1.0, 1.0, 1.0])
    forward = np.tile(times[:, None] / 3, 2)
    real = schedule.simulate(forward, 2 * forward, 4).seconds
    assert 2 * 30 <= schedule.estimate(times, 4, 2) <= real


def test_vision_before_and_behind_the_pipeline() -> None:
    """All ranks are busy with it; nothing else runs then."""
    shape = (3, 4)
    timeline = schedule.simulate(
        np.full(shape, 1.0),
        np.full(shape, 2.0),
        3,
        vision_forward=5.0,
        vision_backward=7.0,
        events=True,
    )
    pipeline = (4 + 3 - 1) * 3.0
    assert timeline.seconds == 5 + pipeline + 7
    assert timeline.busy == (5 + 4 * 3.0 + 7,) * 3
    assert timeline.bubble == pytest.approx(1 - 24 / 30)
    vision = [e for e in timeline.events if e.kind >= schedule.VISION_FORWARD]
    others = [e for e in timeline.events if e.kind < schedule.VISION_FORWARD]
    assert len(vision) == 6 and len(others) == 24
    for event in vision:
        first = event.kind == schedule.VISION_FORWARD
        assert (event.start, event.end) == ((0, 5) if first else (5 + pipeline, 30))
    assert min(e.start for e in others) == 5 and max(e.end for e in others) == 5 + pipeline


def test_closed_form_of_random_stages(seed: int) -> None:
    """The cost model's 1F1B formula errs by less than 1% on average (it states -0.4%)."""
    rng = np.random.default_rng(seed)
    errors = []
    for _ in range(100):
        times = rng.uniform(0.7, 1.3, 4)
        forward = np.tile(times[:, None] / 3, 16)
        real = schedule.simulate(forward, 2 * forward, 4).seconds
        errors.append(schedule.estimate(times, 4, 16) / real - 1)
    assert abs(np.mean(errors)) < 0.01
    assert np.max(np.abs(errors)) < 0.08


@pytest.mark.parametrize(
    "pipeline,virtual,microbatches", [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 4, 9), (4, 1, 6)]
)
def test_order_is_that_of_megatron(
    pipeline: int, virtual: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: pipeline)
    monkeypatch.setattr(
        parallel_state,
        "get_virtual_pipeline_model_parallel_world_size",
        lambda: virtual if virtual > 1 else None,
    )
    table = schedules.get_schedule_table(microbatches, virtual, pipeline)
    for rank in range(pipeline):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda r=rank: r)
        total, _, warmup, _ = schedules.get_pp_rank_microbatches(microbatches, virtual, pipeline)
        steps = schedule.order(pipeline, virtual, microbatches, rank)
        forwards = [(m, chunk) for kind, chunk, m in steps if kind == schedule.FORWARD]
        backwards = [
            (m, virtual - 1 - chunk) for kind, chunk, m in steps if kind == schedule.BACKWARD
        ]
        assert forwards == table and backwards == table and total == len(table)
        first_backward = next(i for i, step in enumerate(steps) if step[0] == schedule.BACKWARD)
        assert first_backward == min(warmup + 1, total)
        kinds = [step[0] for step in steps[warmup : 2 * total - warmup]]
        assert kinds == [schedule.FORWARD, schedule.BACKWARD] * (total - warmup)


@pytest.mark.parametrize("pipeline,virtual,microbatches", [(4, 1, 9), (4, 1, 2), (4, 3, 8)])
def test_peak_kept_is_that_of_the_timeline(
    pipeline: int, virtual: int, microbatches: int, seed: int
) -> None:
    rng = random.Random(seed)
    for rank in range(pipeline):
        kept = [rng.random() for _ in range(virtual)]
        now = peak = 0.0
        for kind, chunk, _ in schedule.order(pipeline, virtual, microbatches, rank):
            now += kept[chunk] if kind == schedule.FORWARD else -kept[chunk]
            peak = max(peak, now)
        assert schedule.peak_kept(pipeline, virtual, microbatches, rank, kept) == pytest.approx(
            peak
        )


def test_in_flight_microbatches_of_interleaving() -> None:
    """PP (1 + (PP - 1) / (PP v)) microbatches' worth of chunks on the first rank."""
    for pipeline, virtual in ((4, 2), (8, 2), (4, 5)):
        peak = schedule.peak_kept(pipeline, virtual, 8 * pipeline, 0, [1 / virtual] * virtual)
        formula = pipeline * (1 + (pipeline - 1) / (pipeline * virtual))
        assert peak == pytest.approx(formula, abs=1.01 / virtual)


# --- the cost model's efficiency table: 7B is 28 layers, a ViT of 15.7 and a head of 2.3 --------

SEVEN, LARGE = (28, 15.7, 2.3), (80, 4.2, 1.4)


def efficiency(
    model: tuple[float, float, float],
    text: list[int],
    pipeline: int,
    microbatches: int,
    *,
    multiplexed: bool = False,
) -> float:
    """Of a pipeline with the tower on its first stage, or on every rank."""
    layers, vision, head = model
    assert sum(text) == layers
    stages = np.array(text, dtype=float)
    stages[0] += 0.0 if multiplexed else vision
    stages[-1] += head
    forward = np.tile(stages[:, None] / 3, microbatches)
    share = vision * microbatches / pipeline if multiplexed else 0.0
    timeline = schedule.simulate(
        forward,
        2 * forward,
        pipeline,
        vision_forward=share / 3,
        vision_backward=share * 2 / 3,
    )
    return microbatches * (layers + vision + head) / pipeline / timeline.seconds


@pytest.mark.parametrize(
    "model,text,pipeline,microbatches,published,tolerance,multiplexed",
    [
        (SEVEN, [14, 14], 2, 16, 0.764, 0.01, False),
        (SEVEN, [7, 21], 2, 16, 0.931, 0.005, False),
        (SEVEN, [7] * 4, 4, 16, 0.506, 0.005, False),
        (SEVEN, [0, 10, 10, 8], 4, 16, 0.692, 0.01, False),
        (SEVEN, [4, 4, 4, 4, 3, 3, 3, 3], 4, 16, 0.502, 0.03, False),
        (LARGE, [10] * 8, 4, 16, 0.852, 0.02, False),
        (LARGE, [7, 11, 11, 11, 11, 11, 10, 8], 4, 16, 0.928, 0.01, False),
        (LARGE, [5] * 16, 8, 32, 0.721, 0.04, False),
        (SEVEN, [15, 13], 2, 16, 0.955, 0.01, True),
        (SEVEN, [8, 8, 7, 5], 4, 16, 0.870, 0.005, True),
        (SEVEN, [4, 4, 4, 3, 4, 4, 3, 2], 4, 16, 0.938, 0.02, True),
        (LARGE, [10, 10, 10, 10, 10, 10, 11, 9], 4, 16, 0.928, 0.02, True),
    ],
)
def test_published_efficiencies(
    model: tuple[float, float, float],
    text: list[int],
    pipeline: int,
    microbatches: int,
    published: float,
    tolerance: float,
    multiplexed: bool,
) -> None:
    real = efficiency(model, text, pipeline, microbatches, multiplexed=multiplexed)
    assert real == pytest.approx(published, abs=tolerance)


def test_variable_microbatches_cost_what_is_published(seed: int) -> None:
    """About 0.7 x cv extra at PP4 M16."""
    rng = np.random.default_rng(seed)
    extra = []
    for _ in range(60):
        size = rng.gamma(1 / 0.2**2, 0.2**2, 16)  # mean 1, cv 0.2
        forward = np.tile(size / size.mean(), (4, 1))
        extra.append(schedule.simulate(forward, 2 * forward, 4).seconds / (19 * 3) - 1)
    assert np.mean(extra) == pytest.approx(0.7 * 0.2, abs=0.06)


def test_bad_sizes_are_refused() -> None:
    one = np.ones((3, 4))
    with pytest.raises(ValueError, match=r"multiple of pipeline 2 rows"):
        schedule.simulate(one, one, 2)
    with pytest.raises(ValueError, match=r"transfer has 1 entries; it needs 2"):
        schedule.simulate(one, one, 3, transfer=[0.1])
    with pytest.raises(ValueError, match=r"microbatches is 3; interleaving needs a multiple"):
        schedule.order(2, 2, 3, 0)
