"""Predicted and measured: the fit against known coefficients, and what is reported."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.released import released_spec
from vlmtrain.core.config import (
    FreezeSection,
    LoaderSection,
    LoraSection,
    RecomputeSection,
    TrainConfig,
    TrainSection,
)
from vlmtrain.models.flops import Work
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan import hardware
from vlmtrain.plan.hardware import Peak
from vlmtrain.telemetry import drift
from vlmtrain.telemetry.ledger import ROWS

SPEC = released_spec("qwen2_5_vl-7b")


def random_work(rng: np.random.Generator) -> Work:
    tokens, patches = int(rng.integers(4000, 9000)), int(rng.integers(1000, 30000))
    return Work(
        tokens,
        tokens * int(rng.integers(200, 4000)),
        patches,
        patches * int(rng.integers(500, 4000)),
        patches * int(rng.integers(30, 64)),
        int(tokens * rng.uniform(0.1, 0.9)),
    )


def test_fit_finds_what_steps_cost(seed: int) -> None:
    """Noise of 1%, and a tenth of the steps three times too long."""
    rng = np.random.default_rng(seed)
    true = np.array([0.05, 2e-5, 3e-9, 8e-6, 5e-10, 1e-5])
    rows = np.array([drift.features(random_work(rng), SPEC, 1) for _ in range(120)])
    clean = rows @ true
    seconds = clean * rng.normal(1, 0.01, len(rows))
    seconds[rng.permutation(len(rows))[:12]] *= 3
    actual = drift.fit(rows, seconds)
    fresh = np.array([drift.features(random_work(rng), SPEC, 1) for _ in range(50)])
    assert fresh @ actual == pytest.approx(fresh @ true, rel=0.03)


def test_pairs_are_a_mean_layers() -> None:
    """28 of 32 layers see windows, 4 see whole frames; two replicas share the work."""
    row = drift.features(Work(100, 5050, 640, 64000, 3200, 60), SPEC, 2)
    assert row == pytest.approx([1, 50, 2525, 320, (28 * 3200 + 4 * 64000) / 32 / 2, 30])


# --- the monitor  --------------------------------------------------------------------------


class _Index:
    """As much of a SampleIndex as the planner reads."""

    def __init__(self, count: int) -> None:
        self.sources, self.source, self.content_hash = (
            [SimpleNamespace(weight=1.0)],
            np.zeros(count),
            "",
        )
        self.lengths = np.full(count, 1200)
        self.lengths[7] = 2000
        self.target_tokens = np.full(count, 400)
        self.media_start = np.arange(count + 1)
        self.grids = np.tile([[1, 40, 60]], (count, 1))

    def __len__(self) -> int:
        return len(self.lengths)


def monitor(tmp_path: Path, gpu: hardware.Gpu | None) -> drift.DriftMonitor:
    config = TrainConfig(
        model=Path("m"),
        data="d",
        output=tmp_path,
        train=TrainSection(pack_length=4096, global_batch_packs=16),
    )
    layout = make_layout(SPEC, world_size=8, tensor=2, pipeline=2)
    return drift.DriftMonitor(config, SPEC, layout, gpu, Peak(1e15, "the peak"), _Index(300))


def parts(seconds: float, **more: float) -> dict[str, float]:
    rest = seconds - sum(more.values())
    return {**dict.fromkeys(ROWS, 0.0), "compute": 0.9 * rest, "bubble": 0.1 * rest, **more}


def result(work: Work) -> Any:
    return SimpleNamespace(padded_work=work)


def test_the_plan_is_printed_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    run = monitor(tmp_path, hardware.find_gpu("h100"))
    assert run.plan is not None
    printed = capsys.readouterr().out
    assert "MFU is measured against the peak" in printed
    assert f"plan for h100: step {run.plan.step_seconds:.3g} s" in printed
    slow = 1.5 * run.plan.step_seconds
    for step in range(1, 11):
        more = run.step(step, result(random_work(rng)), slow, {"waterfall": parts(slow)})
        assert more == {} or step > drift.WARMUP + drift.FEW
    printed = capsys.readouterr().out
    assert "step 10: measured" in printed and "50% more than the planned" in printed
    # the file that it writes makes the planner expect what was measured
    measured = hardware.find_gpu(str(tmp_path / "gpu.toml"))
    assert measured.measured and measured.peak == run.gpu.peak  # type: ignore[union-attr]
    config, layout = run.config, run.layout
    lengths = drift.workload.from_index(_Index(300), "data")
    again = drift.plan_of_run(config, SPEC, layout, measured, lengths)
    expected = again.waterfall()
    compute = expected["compute"] + expected["tensor"]
    assert compute == pytest.approx(0.9 * slow, rel=0.1)  # communication does not scale
    assert run.facts()["plan"]["step_seconds"] == run.plan.step_seconds


def test_a_plan_has_the_options_of_its_run(tmp_path: Path) -> None:
    """Each changes the time of a step, the states or the activations as it must."""
    run = monitor(tmp_path, None)

    def planned(gpu: str = "h100", layout: Any = run.layout, **sections: Any) -> Any:
        config = dataclasses.replace(run.config, **sections)
        kind = dataclasses.replace(hardware.find_gpu("h100"), name=gpu)
        lengths = drift.workload.from_index(_Index(300), "data")
        plan = drift.plan_of_run(config, SPEC, layout, kind, lengths)
        sums = ([getattr(rank, name) for rank in plan.memory] for name in ("states", "activations"))
        return plan.step_seconds, *map(sum, sums)

    seconds, states, kept = planned()
    train, section = run.config.train, run.config.optimizer
    frozen = planned(freeze=FreezeSection(language=True))
    assert frozen[0] < seconds and frozen[1] < states
    adapters = planned(lora=LoraSection(rank=8))
    assert adapters[0] < seconds and adapters[1] < 0.3 * states
    for level in (RecomputeSection("full", "none"), RecomputeSection("none", "full")):
        again = planned(recompute=level)
        assert again[0] > seconds and again[1] == states and again[2] < kept
    offloaded = planned(optimizer=dataclasses.replace(section, offload_fraction=1.0))
    assert offloaded[0] > seconds and offloaded[1] < 0.6 * states and offloaded[2] == kept
    exact = planned(train=dataclasses.replace(train, precision="fp32"))
    # 4 of weights, 4 of gradients and 8 bytes over 2 replicas; 2, 4 and 12
    assert exact[1] == pytest.approx(states * (8 + 8 / 2) / (6 + 12 / 2), rel=1e-3)
    assert exact[2] > 1.5 * kept
    assert planned(gpu="cpu")[2] != kept
    half = planned(train=dataclasses.replace(train, global_batch_packs=8))
    assert half[0] < 0.7 * seconds
    alone = planned(loader=LoaderSection(packing="none"))
    assert alone[0] < 0.5 * seconds  # of packs with one sample each


def test_a_run_within_its_plan_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    run = monitor(tmp_path, hardware.find_gpu("h100"))
    assert run.plan is not None
    near = 1.05 * run.plan.step_seconds
    for step in range(1, 11):
        run.step(step, result(random_work(rng)), near, {"waterfall": parts(near)})
    assert "step 10: measured" in capsys.readouterr().out
    assert not (tmp_path / "gpu.toml").exists()


def test_nothing_is_planned_for_an_unknown_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = monitor(tmp_path, None)
    assert run.facts()["plan"] is None
    for step in range(1, 20):
        work, spent = Work(8000, 10**7, 8000, 10**7, 10**6), 10.0 * (step % 3 == 0)
        row = parts(1.0 + spent, evaluation=spent)  # which is no work on the step
        more = run.step(step, result(work), 1.0 + spent, {"waterfall": row})
        if more:
            assert more["predicted_seconds"] == pytest.approx(1.0 + spent)
    assert more
    printed = capsys.readouterr().out
    assert "planned" not in printed and "fitted" not in printed


def test_drift_is_reported_once_each_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Steps that follow the model, then 20% longer ones, then steps that follow it again. What is
    spent on saving and waiting for data does not count as drift."""
    rng = np.random.default_rng(seed)
    run = monitor(tmp_path, None)
    true = np.array([0.05, 2e-5, 3e-9, 8e-6, 5e-10, 1e-5])
    printed: dict[int, str] = {}
    capsys.readouterr()
    for step in range(1, 121):
        work = random_work(rng)
        seconds = float(drift.features(work, SPEC, run.layout.data) @ true)
        seconds *= 1.2 if 60 <= step < 90 else rng.normal(1, 0.005)
        extra = {"checkpoint": 3 * seconds} if step % 20 < 15 else {"data_wait": seconds}
        row = parts(seconds + sum(extra.values()), **extra)
        run.step(step, result(work), sum(row.values()), {"waterfall": row})
        text = capsys.readouterr().out
        if text:
            printed[step] = text
    first, second = sorted(printed)
    assert 60 < first < 70 and re.search(
        r"took (1\d|20)% more than the model fitted to the steps before", printed[first]
    )
    assert 90 < second < 100 and "step time is back within 10% of the model" in printed[second]


def test_efficiencies_are_those_of_the_run() -> None:
    """Twice the planned compute, half the planned speed of links and of memory."""
    gpu = hardware.find_gpu("h100")
    planned = {
        "compute": 0.8,
        "tensor": 0.2,
        "gradients": 0.6,
        "optimizer": 0.1,
    }
    taken = {"compute": 1.5, "padding": 0.5, "gradients": 0.8, "optimizer": 0.4 + 0.2}
    actual = drift.as_measured(gpu, planned, taken, "bf16").efficiency
    assert actual == hardware.Efficiency(
        language=pytest.approx(0.25),
        vision=pytest.approx(0.19),
        link=pytest.approx(0.75 / 2),
        memory=pytest.approx(0.8 / 2),
    )
    alone = {**planned, "gradients": 0.0}
    taken = {"compute": 1.0, "padding": 0.0, "gradients": 0.001, "optimizer": 0.05}
    actual = drift.as_measured(gpu, alone, taken, "fp32").efficiency
    assert (actual.link, actual.memory) == (0.75, 1.0)


def test_device_names_of_the_driver() -> None:
    from vlmtrain.plan.detect import known_gpu

    assert known_gpu("NVIDIA H200") == hardware.find_gpu("h200")
    assert known_gpu("NVIDIA H100 80GB HBM3") == hardware.find_gpu("h100")
    assert known_gpu("NVIDIA H100 PCIe") is None  # another peak


def test_large_indexes_are_thinned_but_for_the_longest() -> None:
    lengths = drift.workload.from_index(_Index(50_000), "data")
    assert len(lengths) <= 20_001 and max(lengths.tokens) == 2000
    assert lengths.grids[0] == [(1, 40, 60)]
    assert "50,000 samples" in lengths.origin
