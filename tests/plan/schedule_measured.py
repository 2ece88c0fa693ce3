"""The simulator against megatron-core's schedules, run on gloo with layers that sleep: part of
`make test-plan`, as its bounds need cores that nobody else uses."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.conftest import RUN_SEED
from tests.ranks import run_cases
from vlmtrain.plan import schedule

RANKS = 4


def case(
    name: str, virtual: int, microbatches: int, forward: Any, backward: Any = None
) -> dict[str, Any]:
    """`forward(stage, microbatch)` in seconds; backward takes twice as long unless it is given."""
    stages = RANKS * virtual
    backward = backward or (lambda stage, microbatch: 2 * forward(stage, microbatch))
    return {
        "name": name,
        "pipeline": RANKS,
        "virtual": virtual,
        "forward": [[forward(s, m) for m in range(microbatches)] for s in range(stages)],
        "backward": [[backward(s, m) for m in range(microbatches)] for s in range(stages)],
    }


def cases(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    drawn = [[rng.uniform(0.01, 0.07) for _ in range(8)] for _ in range(2 * RANKS)]
    return [
        case("even", 1, 8, lambda s, m: 0.04),
        case("heavy first stage", 1, 8, lambda s, m: 0.1 if s == 0 else 0.02),
        case("uneven stages and packs", 1, 8, lambda s, m: drawn[s][m]),
        case("fewer packs than ranks", 1, 3, lambda s, m: 0.04),
        case("interleaved", 2, 8, lambda s, m: 0.07),
        case("interleaved, uneven", 2, 8, lambda s, m: 1.5 * drawn[s][m]),
        case("frozen below", 1, 8, lambda s, m: 0.04, lambda s, m: 0.0 if s == 0 else 0.08),
    ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pipeline")
    wanted = cases(RUN_SEED)
    results = run_cases("tests.plan.pipeline_worker", wanted, RANKS, folder)
    return list(zip(wanted, results, strict=True))


def test_seconds_are_those_of_the_simulator(measured: Any) -> None:
    """Given how long each piece has really taken."""
    for wanted, real in measured:
        played = schedule.simulate(real["forward"], real["backward"], RANKS)
        ratio = real["seconds"] / played.seconds
        print(f"{wanted['name']}: {real['seconds']:.3f} s, simulated {played.seconds:.3f} s")
        assert 0.999 < ratio < 1.05, wanted["name"]


def test_ratios_between_schedules_are_those_predicted(measured: Any) -> None:
    """From the nominal times alone, as before a run."""
    planned = [schedule.simulate(w["forward"], w["backward"], RANKS).seconds for w, _ in measured]
    first = planned[0] / measured[0][1]["seconds"]
    for (wanted, real), seconds in zip(measured, planned, strict=True):
        assert real["seconds"] * first == pytest.approx(seconds, rel=0.05), wanted["name"]
