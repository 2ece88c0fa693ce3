"""A run's memory plan on a machine made small, and what an earlier rehearsal had measured."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.step_plans import make_index
from tests.parity.reference import make_model
from vlmtrain.core.clock import Clock
from vlmtrain.core.config import OptimizerSection, RecomputeSection, TrainConfig, TrainSection
from vlmtrain.core.device import Backend
from vlmtrain.core.errors import UserError
from vlmtrain.data.packing.sampler import Position
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan.hardware import find_gpu
from vlmtrain.plan.heaviest import fullest
from vlmtrain.plan.peak import PeakModel
from vlmtrain.telemetry.drift import write_gpu
from vlmtrain.training import memory_plan
from vlmtrain.training.memory_plan import MemoryPlan
from vlmtrain.training.rehearsal import RankPeak, check_fits

SPEC = parse_spec(make_model("qwen2_5_vl", vision_heads=4).config.to_dict())
BEFORE = 10**8  # bytes of the program


@dataclass(frozen=True)
class Small(Backend):
    """A CPU with as much memory as a test says."""

    capacity: int = 0

    def capacity_bytes(self, processes: int) -> int:
        return self.capacity


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plan(output: Path, capacity: float, fit: str) -> MemoryPlan:
    train = TrainSection(pack_length=8192, global_batch_packs=4, fit=fit)  # type: ignore[arg-type]
    config = TrainConfig(Path("model"), "data", output, train=train)
    layout = make_layout(SPEC, world_size=1)
    backend = Small(torch.device("cpu"), "gloo", int(capacity))
    return MemoryPlan(config, SPEC, layout, backend, make_index(100), Position(), BEFORE)


def needed(one: MemoryPlan, vision: str, language: str, factor: float = 1.0) -> float:
    again = RecomputeSection(vision, language)  # type: ignore[arg-type]
    config = replace(one.config, recompute=again)
    loads = one._loads(one.layout)
    return BEFORE + fullest(config, SPEC, one.layout, loads, False, factor).bytes


def test_the_next_start_plans_with_what_was_measured(tmp_path: Path) -> None:
    one = plan(tmp_path, 1e18, "auto")
    assert one.fit() == one.config and one.factor == 1
    room = needed(one, "none", "none") + 1
    assert plan(tmp_path, room, "auto").fit().recompute == RecomputeSection()

    write_gpu(tmp_path / "gpu.toml", replace(find_gpu("h100"), step_memory=1.5))
    corrected = plan(tmp_path, room, "auto")
    assert corrected.factor == 1.5
    changed = corrected.fit()
    assert changed.recompute != RecomputeSection()
    assert needed(one, changed.recompute.vision, changed.recompute.language, 1.5) <= room
    assert changed.optimizer == OptimizerSection() and changed.parallel == one.config.parallel
    with pytest.raises(UserError, match="with --recompute.vision .*: pass them, or --train.fit"):
        plan(tmp_path, room, "refuse").fit()


def test_a_rank_keeps_its_own_place_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first rank's configuration only what may change is taken over."""
    one = plan(tmp_path, 1e18, "auto")
    of_first = replace(one.config, model=Path("elsewhere"), recompute=RecomputeSection("full"))
    monkeypatch.setattr("vlmtrain.training.memory_plan.on_first_rank", lambda _: (of_first, ""))
    got = one.fit()
    assert got.model == Path("model") and got.recompute == RecomputeSection("full")


def test_a_peak_above_the_capacity_says_what_would_do(tmp_path: Path) -> None:
    one = plan(tmp_path, 0, "refuse")
    room = needed(one, "full", "none")
    one = plan(tmp_path, room, "refuse")
    peak = RankPeak(0, 0, BEFORE, room, 2 * room, room, 7, ["cup-1"])
    with pytest.raises(UserError, match="in step 7 .*hold cup-1; with --recompute.vision full it"):
        check_fits([peak], partial(one._advice, room - BEFORE))
    one._keep(find_gpu("h100"))
    assert find_gpu(str(tmp_path / "gpu.toml")).step_memory == 1
    one.factor = 1.25
    one._keep(find_gpu("h100"))
    assert plan(tmp_path, room, "refuse").factor == 1.25


def test_a_damaged_gpu_file_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It only advises: what can't be read or written is a line."""
    file = tmp_path / "gpu.toml"
    for text in ("", "peak_tflops = \n", "factor = 2\n"):
        file.write_text(text)
        one = plan(tmp_path, 1e18, "auto")
        assert one.gpu is None and one.factor == 1
        printed = capsys.readouterr().out
        assert str(file) in printed and "memory is planned without it" in printed, printed

    write_gpu(file, replace(find_gpu("h100"), step_memory=1.5))
    before = file.read_text()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    one = plan(tmp_path, 1e18, "auto")
    one.factor = 3.0
    one._keep(find_gpu("h100"))
    printed = capsys.readouterr().out
    assert f"{file} can't be written: No space left on device; the run goes on" in printed
    assert "3.00 times the planned memory\n" in printed and file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_the_smallest_rank_has_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan(tmp_path, 4e9 + BEFORE, "auto")

    def of_two(values: list[Any], own: Any) -> None:
        """The first rank has twice as much."""
        values[:] = [own, own] if isinstance(own, str) else [2 * own, own]

    monkeypatch.setattr(dist, "all_gather_object", of_two)
    assert one._room() == 4e9


def test_the_rehearsal_adds_what_a_schedule_brings_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures with the share of its step; the least share comes later."""
    one = plan(tmp_path, 1e12, "refuse")
    one.backend = replace(one.backend, device=torch.device("cuda"))

    def states(share: float) -> float:
        section = OptimizerSection(offload_fraction=share)
        config = replace(one.config, optimizer=section)
        return PeakModel(config, SPEC, one.layout, 0, cuda=True).states()

    optimizer = states(0.0) - states(1.0)
    section = OptimizerSection(offload_fraction=1.0, offload_schedule=("500:0.25", "800:0.5"))
    one.config = replace(one.config, optimizer=section)
    assert optimizer > 0 and one._comes_back() == [pytest.approx(0.75 * optimizer)]
    own = (one.layout, one._loads(one.layout))
    planned = fullest(one._now(), SPEC, *own, True, 1.5).bytes
    before = BEFORE + PeakModel(one._now(), SPEC, one.layout, 0, cuda=True).states()
    measured = before + 3 * (BEFORE + planned - before)
    comes = 0.75 * optimizer
    for capacity in (measured + 1.01 * comes, measured + 0.99 * comes):
        peak = RankPeak(0, 0, before, BEFORE + planned, measured, capacity, 7, ["cup-1"])
        monkeypatch.setattr(memory_plan, "rehearse", lambda *_, peak=peak: [peak])
        one.factor = 1.5
        engine: Any = SimpleNamespace(clock=Clock(False))
        if capacity > measured + comes:
            assert one.rehearse(engine, None, None) == [peak]
        else:
            needs = f"rank 0 needs {(measured + comes) / 1e9:.1f} GB in step 7 "
            with pytest.raises(UserError, match=needs):
                one.rehearse(engine, None, None)
        assert one.factor == pytest.approx(4.5)  # what was known, and three times that
    one.position = Position(step=499)
    now = one._now().optimizer
    assert (now.offload_fraction, now.offload_schedule) == (0.25, ())
    assert one._comes_back() == [0.0]
