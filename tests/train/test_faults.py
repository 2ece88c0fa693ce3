"""One rank fails in the middle of a run: all end within 30 seconds, the cause is said once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT, Rank, run_cli, run_ranks
from tests.train.conftest import options

LIMIT = 30.0  # seconds from the fault to the end of the last rank
CAUSES = {
    "forward": "RuntimeError: a planted fault in the forward pass",
    "sample": "went bad while training",
}
LAYOUTS = {
    "pipeline": ["--parallel.pipeline=2"],
    "tensor": ["--parallel.tensor=2", "--parallel.sequence"],
    "data": ["--parallel.overlap_grad_reduce"],
    "multiplexed": ["--parallel.pipeline=2", "--parallel.vision=multiplexed"],
}


def environment(fault: str, rank: int) -> dict[str, str]:
    folder = Path(__file__).parent / "faults"
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"FAULT": fault, "FAULT_RANK": str(rank), "PYTHONPATH": path}


def seconds_after(output: Path, end: float) -> float:
    """From the second step, after which the fault comes, to the end."""
    return end - (output / "metrics.jsonl").stat().st_mtime


def check(ranks: list[Rank], fault: str, faulty: int, output: Path, end: float) -> None:
    everything = "\n".join(rank.output for rank in ranks)
    assert all(rank.code != 0 for rank in ranks), everything
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 2
    assert seconds_after(output, end) < LIMIT, everything
    if fault == "killed":
        assert ranks[faulty].code == -9
    else:
        assert everything.count(CAUSES[fault]) == 1, everything
    assert everything.count("Traceback") == (fault == "forward"), everything
    for number, rank in enumerate(ranks):
        if number != faulty and fault != "sample":
            said = [line for line in rank.output.splitlines() if line.startswith("vlmtrain: ")]
            assert len(said) == 1, rank.output
            assert said[0].startswith(f"vlmtrain: rank {number} ends at step 3, "), rank.output
            assert f": rank {faulty} is gone (process " in said[0], rank.output


FEW = [
    ("forward", "multiplexed", 0),
    ("killed", "pipeline", 0),
    ("sample", "multiplexed", 1),
]


def fail_without_a_launcher(fault, layout, faulty, model, conversations, output):
    more = ["--train.steps=60", "--loader.workers=0", *LAYOUTS[layout]]
    arguments = ["-m", "vlmtrain.cli", *options(model, conversations, output, *more)]
    ranks = run_ranks(arguments, 2, timeout=120, env=environment(fault, faulty))
    check(ranks, fault, faulty, output, time.time())


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "layout", "faulty"), FEW)
def test_without_a_launcher(fault, layout, faulty, model, conversations, tmp_path):
    """Nobody ends the other ranks for them. `matrix.py` has the other layouts."""
    fail_without_a_launcher(fault, layout, faulty, model, conversations, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["forward", "killed"])
def test_with_our_launcher(fault, model, conversations, tmp_path):
    output = tmp_path / "run"
    more = ["--train.steps=60", "--nproc=2", "--loader.workers=0", *LAYOUTS["multiplexed"]]
    done = run_cli(
        options(model, conversations, output, *more), timeout=120, env=environment(fault, 1)
    )
    assert done.code != 0
    assert seconds_after(output, time.time()) < LIMIT, done.output
    assert done.output.count("Traceback") == (fault == "forward"), done.output
    cause = CAUSES.get(fault, "vlmtrain: rank 1 was ended by SIGKILL")
    assert done.output.count(cause) == 1, done.output
