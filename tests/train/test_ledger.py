"""The ledger: rows of the waterfall against delays put in known places, counts against packs."""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.reference import make_model, save_model
from tests.plan.megatron_worker import make_batch
from tests.ranks import run_cases
from tests.train.ledger_worker import DELAY, PACKS
from vlmtrain.core import files
from vlmtrain.core.config import LoraSection, RecomputeSection, TrainSection
from vlmtrain.core.errors import UserError
from vlmtrain.core.progress import time_left
from vlmtrain.models import flops
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan.hardware import Peak
from vlmtrain.telemetry import ledger
from vlmtrain.telemetry.ledger import ROWS, Ranks, waterfall
from vlmtrain.telemetry.metrics import Metrics, check_wandb
from vlmtrain.telemetry.stragglers import Stragglers, describe


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """All cases, measured once for each number that is asked for."""
    folder = tmp_path_factory.mktemp("ledger")
    save_model(make_model("qwen2_5_vl", vision_heads=4), folder / "model")

    @functools.cache
    def run(attempt: int) -> dict[str, Any]:
        results = folder / str(attempt)
        results.mkdir()
        return run_cases("tests.train.ledger_worker", folder / "model", 2, results)

    return run


@pytest.fixture
def measured(measure: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    return measure(0)


def best(measured: dict[str, Any], name: str, row: str) -> tuple[float, dict[str, float]]:
    """The least of a row over a case's steps: a loaded machine only adds; and that step."""
    actual = min(measured[name]["rows"], key=lambda step: step["waterfall"][row])
    return actual["waterfall"][row], actual["waterfall"]


# case, row, seconds that were put there (of a mean rank)
PLACED = [
    ("a slow replica", "imbalance", PACKS * DELAY / 2),
    ("a slow replica", "compute", PACKS * DELAY / 2),
    ("a slow stage", "bubble", PACKS * DELAY / 2),
    ("slow reduction", "gradients", DELAY),
    ("a slow optimizer", "optimizer", DELAY),
    # one piece a rank, encoded twice
    ("slow multiplexed vision", "compute", 2 * DELAY),
    ("waiting for data", "data_wait", DELAY),
    ("saving", "checkpoint", DELAY),
]


def misplaced(measured: dict[str, Any], name: str, row: str, seconds: float) -> list[str]:
    """What is wrong with a delay of `seconds` that was put in `row` of the case `name`."""
    quiet = best(measured, "quiet replicas", "compute")[0]
    actual, step = best(measured, name, row)
    compute = row == "compute"
    if compute:
        actual += step["padding"]
    least = 0.97 * seconds
    if row in ("bubble", "imbalance"):  # while one rank sleeps, the other has the cores for itself
        actual = max(one["waterfall"][row] for one in measured[name]["rows"])
        least = 0.8 * seconds
    work = 3 * quiet + 0.05
    faults = [] if least < actual < seconds + work else [f"{row} {actual}, put there {seconds}"]
    # and in no other row
    for other in set(ROWS) - {row, "compute", "padding", *(["imbalance"] if compute else [])}:
        others = min(one["waterfall"][other] for one in measured[name]["rows"])
        if others >= 0.4 * DELAY + 0.2 * work:
            faults.append(f"{other} {others}, nothing put there (a quiet step's work: {quiet})")
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("name,row,seconds", PLACED)
def test_delays_are_found_where_they_were_put(
    name: str, row: str, seconds: float, measure: Callable[[int], dict[str, Any]]
) -> None:
    """Other processes take the cores at times: one of three measurements must be right."""
    for attempt in range(3):
        faults = misplaced(measure(attempt), name, row, seconds)
        print(attempt, faults)
        if not faults:
            return
    pytest.fail("; ".join(faults))


@pytest.mark.slow
def test_rows_add_up_to_the_step(measured: dict[str, Any]) -> None:
    for name, case in measured.items():
        for step in case["rows"]:
            parts = step["waterfall"]
            assert sum(parts.values()) == pytest.approx(step["seconds"], rel=0.02), name
            assert min(parts.values()) > -0.02 * step["seconds"], (name, parts)


def table(**columns: list[float]) -> Ranks:
    zero = [0.0] * len(columns["step"])
    names = Ranks.__dataclass_fields__
    return Ranks(*(np.array(columns.get(name, zero), dtype=float) for name in names))


def test_waterfall_of_a_known_step() -> None:
    """Two replicas of two stages, by hand: 1 s of data, passes of 6 s and 8 s, then 0.5 s of
    reduction and 1.5 s of optimizer once the slowest is done; 0.25 s of saving, 3 s of evaluation,
    0.75 s of rest."""
    ranks = table(
        waited=[1, 1, 1, 1],
        step=[10, 10, 10, 10],
        # the last stage of each replica is done 1 s before the first
        passes=[6, 5, 8, 7],
        gradients=[2.5, 3.5, 0.5, 1.5],
        optimizer=[1.5, 1.5, 1.5, 1.5],
        compute=[4, 3, 7, 5],
        replica=[0, 0, 1, 1],
        stage=[0, 1, 0, 1],
    )
    parts = waterfall(ranks, 15.0, 0.25, 0.2, waits=True, evaluation=3.0)
    assert parts == pytest.approx(
        {
            "compute": 4.75 * 0.8,
            "padding": 4.75 * 0.2,
            "bubble": ((6 - 4) + (6 - 3) + (8 - 7) + (8 - 5)) / 4,
            "imbalance": (2 + 2 + 0 + 0) / 4,
            "data_wait": 1.0,
            "gradients": 0.5,
            "optimizer": 1.5,
            "checkpoint": 0.25,
            "evaluation": 3.0,
            "other": 0.75,
        }
    )
    assert sum(parts.values()) == pytest.approx(15.0)


def test_waiting_that_shows_up_in_the_optimizer() -> None:
    """A rank whose reduction is its own business waits in the norm of the gradients instead."""
    ranks = table(
        step=[10, 10],
        passes=[5, 8],
        gradients=[0.5, 0.5],
        optimizer=[4.5, 1.5],
        compute=[5, 8],
        replica=[0, 1],
    )
    parts = waterfall(ranks, 10.0, 0.0, 0.0, waits=False)
    assert parts["imbalance"] == pytest.approx(1.5)
    assert parts["optimizer"] == pytest.approx((2.0 + 1.5) / 2)
    assert parts["gradients"] == pytest.approx((0.0 + 0.5) / 2)
    assert parts["bubble"] == 0
    assert sum(parts.values()) == pytest.approx(10.0)


def test_who_the_others_wait_for() -> None:
    """Four ranks, by hand: rank 2 computes 0.4 s longer, in every fifth step rank 1 reads for 1 s;
    steps of 2 s. After fifty steps in which rank 3 is late, the first ones are forgotten."""
    stragglers, quiet = Stragglers(), np.zeros(4)
    for step in range(10):
        reading = np.array([0, (step % 5 == 4) * 1.0, 0, 0])
        row = stragglers.step(reading, np.array([1, 1, 1.4, 1]), 2.0)
    assert row["straggler_rank"] == 2 and row["straggler_phase"] == "compute"
    assert row["straggler_seconds"] == pytest.approx(0.4)
    assert "the others waited for rank 2 computing, 0.4 s a step" in describe(row)
    for _ in range(50):
        row = stragglers.step(np.array([0, 0, 0, 0.2]), quiet, 2.0)
    assert row["straggler_rank"] == 3 and row["straggler_phase"] == "reading"
    assert row["straggler_seconds"] == pytest.approx(0.2)
    for _ in range(50):
        row = stragglers.step(np.array([0, 0, 0, 0.09]), quiet, 2.0)
    assert row == {} and describe(row) == ""
    assert Stragglers().step(np.array([0.0]), np.array([1.0]), 2.0) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a slow replica", "a slow stage"])
def test_the_slow_rank_is_named(name: str, measured: dict[str, Any]) -> None:
    row = measured[name]["rows"][-1]
    assert (row["straggler_rank"], row["straggler_phase"]) == (1, "compute"), row


# --- counts -----------------------------------------------------------------------------------


def test_totals_are_those_of_the_packs(seed: int) -> None:
    spec = parse_spec(make_model("qwen2_5_vl").config.to_dict())
    one = make_batch(spec, 60, [[1, 8, 12], [2, 4, 6], [1, 4, 4]])
    # the second medium becomes a video, of 2 frames in 12 tokens after the first's 24
    one.input_ids[24:36] = spec.video_token_id
    other = make_batch(spec, 30, [])
    totals = ledger.replica_totals([one.padded_to(70), other.padded_to(70)], spec, 2.5)
    assert totals.loss == 2.5 and totals.tokens == 90 and totals.pad_tokens == 50
    assert totals.images == 2 and totals.videos == 1 and totals.samples == 2
    assert totals.image_tokens == (96 + 48 + 16) / 4
    assert totals.target_tokens == 90
    assert totals.causal_pairs == 60 * 61 / 2 + 30 * 31 / 2
    assert totals.pad_pairs == 10 * 11 / 2 + 40 * 41 / 2
    work = flops.Work.of([60, 30], [[1, 8, 12], [2, 4, 6], [1, 4, 4]], spec.vision, targets=90)
    assert (totals.patches, totals.frame_pairs, totals.window_pairs) == work.values()[2:5]


@pytest.mark.slow
def test_padding_and_utilization_of_a_row(measured: dict[str, Any]) -> None:
    """40 tokens of 50 count: the share of FLOPs that padding takes, and MFU below HFU."""
    spec = parse_spec(make_model("qwen2_5_vl", vision_heads=4).config.to_dict())
    useful = flops.count(spec, flops.Work.of([40], [[1, 8, 8]], spec.vision, targets=40)).total
    padded = flops.count(spec, flops.Work.of([40, 10], [[1, 8, 8]], spec.vision, targets=40)).total
    for step in measured["quiet replicas"]["rows"]:
        assert step["model_flops"] == 2 * PACKS * useful
        parts = step["waterfall"]
        share = parts["padding"] / (parts["padding"] + parts["compute"])
        assert share == pytest.approx(1 - useful / padded)
        rate = step["model_flops"] / step["seconds"] / 2 / 1e9
        assert step["mfu"] == pytest.approx(rate)
        assert step["hfu"] / step["mfu"] == pytest.approx(
            step["hardware_flops"] / step["model_flops"]
        )
        # the padded step, and the scores that the backward pass computes again
        again = flops.hardware_flops(
            flops.count(spec, flops.Work.of([40, 10], [[1, 8, 8]], spec.vision, targets=40))
        )
        assert step["hardware_flops"] == 2 * PACKS * again
        assert step["tokens_per_second_per_gpu"] == pytest.approx(PACKS * 40 / step["seconds"])


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("tower", ["on a stage", "multiplexed"])
def test_a_row_by_hand(tower: str, rank: int) -> None:
    """Two replicas of two stages in a step of 2 s; a tenth of the tokens is padding."""
    spec = parse_spec(make_model("qwen2_5_vl").config.to_dict())
    work = flops.Work.of([450, 450], [[1, 8, 12]], spec.vision, targets=300)
    padded = work + flops.Work(100, 100 * 101 // 2)
    ranks = table(
        step=[2, 2, 2, 2],
        passes=[2, 2, 2, 2],
        compute=[1.0, 1.5, 2.0, 0.5],
        replica=[0, 0, 1, 1],
        stage=[0, 1, 0, 1],
        memory=[3e9, 2e9, 4e9, 1e9],
    )
    result: Any = SimpleNamespace(
        ranks=ranks, work=work, padded_work=padded, tokens=900, samples=6, images=1, videos=0
    )
    layout = make_layout(spec, world_size=4, pipeline=2, multiplexed=tower == "multiplexed")
    again = RecomputeSection("full", "selective")
    lora = LoraSection(rank=rank)
    one = ledger.Ledger(spec, layout, Peak(1e12, "the peak"), lora=lora, recompute=again)
    row = one.row(result, 2.0, 0.0)
    counted = flops.count(spec, padded, lora=lora, recomputed=["vision", "language"])
    executed = flops.hardware_flops(
        counted, recompute=["vision"], selective=["language"], multiplexed=layout.multiplexed
    )
    model = flops.count(spec, work, lora=lora).total
    assert (row["model_flops"], row["hardware_flops"]) == (model, executed)
    assert row["mfu"] == pytest.approx(row["model_flops"] / 2 / 4 / 1e12)
    assert row["hfu"] == pytest.approx(executed / 2 / 4 / 1e12)
    share = 1 - model / flops.count(spec, padded, lora=lora).total
    assert row["waterfall"]["padding"] == pytest.approx(1.25 * share)
    assert (row["tokens_per_second_per_gpu"], row["samples_per_second"]) == (900 / 8, 3)
    assert row["replica_balance"] == pytest.approx(1)  # 1.25 s and 1.25 s
    assert row["stage_balance"] == pytest.approx(1.5 / 1.25)  # 1.5 s and 1 s
    assert row["memory_gb"] == [4, 2] and row["peak_memory_gb"] == 4
    assert row["straggler_rank"] == 2 and "aux_loss" not in row


def test_lines_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every third step and the last; what is left by the mean of the steps; padding's share of all
    tokens; the board has every step, and of a run that went back no step twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result: Any = SimpleNamespace(
        loss=2.5, grad_norm=1.0, tokens=900, target_tokens=300, image_tokens=50, pad_tokens=100
    )
    for resumed, last in ((0, 4), (2, 7)):
        metrics = Metrics(tmp_path, resumed, 7, 3)
        for step in range(resumed + 1, last + 1):
            metrics.step(step, result, 1e-5 * step, 60.0 + 60 * (step % 2))
        metrics.close()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in printed] == ["3/7", "3/7", "6/7", "7/7"]
    left = [" ".join(line[line.index("padding") + 1 :]) for line in printed]
    assert left[0] == f"10.0% {time_left(4 * 100)} left" and left[-1] == "10.0%"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert {row["padding_share"] for row in rows} == {0.1}
    assert [row["tokens_per_second"] for row in rows[:2]] == [900 / 120, 900 / 60]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    rates = [(event.step, event.value) for event in board.Scalars("train/lr")]
    assert rates == [(step, pytest.approx(1e-5 * step)) for step in range(1, 8)]


def test_a_resumed_run_goes_on_in_its_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its id; `resume` alone would begin another."""
    given: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        given.append(options)
        return SimpleNamespace(log=lambda *a, **k: None, finish=lambda: None)

    service = SimpleNamespace(init=init, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", service)
    for resumed in (0, 3, 0):
        Metrics(tmp_path, resumed, 10, 1, tensorboard=False, wandb="mine").close()
    first, again, new = (options["id"] for options in given)
    assert first == again != new and all(options["resume"] == "allow" for options in given)


def test_missing_wandb_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_wandb(TrainSection().wandb)
    with pytest.raises(UserError, match="--train.wandb mine needs the package wandb, which is not"):
        check_wandb("mine")


def test_a_full_disk_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run drops the lines that it makes again; if it can't, all stay."""
    lines = [f'{{"step": {step}}}\n' for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))

    def full(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", full)
        with pytest.raises(UserError, match="metrics.jsonl can't be written: No space left"):
            Metrics(tmp_path, 2, 4, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines)
    metrics = Metrics(tmp_path, 2, 4, 1, tensorboard=False)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", full)
        with pytest.raises(UserError, match="run.json can't be written: No space left"):
            metrics.write_facts(more=1)
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2])
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "run.json"}


def test_a_resumed_record_is_cut_and_says_what_it_lacks(tmp_path: Path, capsys: Any) -> None:
    for name, steps in (("metrics.jsonl", (1, 2, 5, 6)), ("spikes.jsonl", (2, 6))):
        (tmp_path / name).write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    Metrics(tmp_path, 5, 9, 1, tensorboard=False).close()
    assert capsys.readouterr().out == ""
    assert (tmp_path / "spikes.jsonl").read_text() == '{"step": 2}\n'
    Metrics(tmp_path, 7, 9, 1, tensorboard=False).close()
    assert "metrics.jsonl has no steps 6 to 7" in capsys.readouterr().out
    Metrics(tmp_path, 0, 9, 1, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "spikes.jsonl").read_text() == ""


def test_a_full_disk_under_the_board_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __getattr__(self, name: str) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    names = ("loss", "grad_norm", "tokens", "target_tokens", "image_tokens", "pad_tokens")
    result: Any = SimpleNamespace(**dict.fromkeys(names, 1))
    metrics = Metrics(tmp_path, 0, 4, 1)
    board = metrics._board
    monkeypatch.setattr(metrics, "_board", Full())
    for write in (lambda: metrics.step(1, result, 1e-5, 1.0), metrics.close):
        with pytest.raises(UserError, match="tensorboard can't be written: No space left"):
            write()
    board.close()


def test_times_of_a_clock() -> None:
    from vlmtrain.core.clock import Clock

    clock = Clock(cuda=False)
    with clock.span("a"):
        torch.zeros(1)
    timer = clock("forward-compute", log_level=2)
    for _ in range(2):
        timer.start()
        clock("forward-recv").start()
        clock("forward-recv").stop()
        timer.stop()
    first = clock.read()
    assert set(first) == {"a", "compute"} and min(first.values()) > 0
    assert clock.read() == {}
