"""Which checkpoints stay, what a stop leaves, and kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.ranks import ROOT, run_cli
from tests.train.conftest import conversations, losses, model, options  # noqa: F401
from tests.train.test_training import start, wait_for_step
from vlmtrain.checkpoint.training.checkpoint import complete, droppable
from vlmtrain.core.files import SummedFile, checksum, verify_manifest


@pytest.mark.parametrize(
    ("steps", "keep", "every", "gone"),
    [
        ([1, 2, 3], 2, 0, [1]),
        ([1, 2, 3], 3, 0, []),
        ([10, 20, 30, 40, 50], 1, 20, [10, 30]),
        ([10, 20, 30, 40, 50], 2, 50, [10, 20, 30]),
        ([], 1, 7, []),
    ],
)
def test_which_checkpoints_go(steps, keep, every, gone):
    assert droppable(steps, keep, every) == gone


def test_a_files_checksum_is_made_while_it_is_written(tmp_path):
    file = SummedFile(tmp_path / "a")
    for part in (b"", b"abc", bytes(20_000_000), memoryview(b"xyz")):
        file.write(part)
    entry = file.close()
    assert entry["bytes"] == (tmp_path / "a").stat().st_size == 20_000_006
    assert entry["crc32"] == checksum(tmp_path / "a")


@pytest.mark.slow
def test_sigterm_saves_and_a_new_run_goes_on(model, conversations, tmp_path):  # noqa: F811
    """Through our own launcher: exit code 0, a whole checkpoint of the last step, which two
    data-parallel ranks wrote and two stages go on from. (That a resumed run has the numbers of one
    without a break, tests/train and the crash test show.)"""
    output = tmp_path / "run"
    arguments = options(
        model, conversations, output, "--train.steps=400", "--nproc=2", "--checkpoint.every=3",
        "--checkpoint.keep=1", "--checkpoint.keep_every=6",
    )  # fmt: skip
    process = start(arguments)
    wait_for_step(output, 7, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "stopped by SIGTERM after step" in printed and "Traceback" not in printed
    steps = complete(output / "checkpoints")
    done = len(losses(output))
    assert steps[-1] == done and 6 in steps and 3 not in steps
    assert (output / "checkpoints" / "latest").read_text() == f"step-{done:08d}\n"
    for step in steps:
        verify_manifest(output / "checkpoints" / f"step-{step:08d}")
    assert not (output / "hf").exists()
    names = {p.name for p in (output / "checkpoints").iterdir()}
    assert names == {"latest", *(f"step-{s:08d}" for s in steps)}
    again = run_cli(
        [a for a in arguments if "train.steps" not in a]
        + [f"--train.steps={done + 1}", "--parallel.pipeline=2", "--checkpoint.resume=latest"]
    )
    assert again.code == 0, again.output
    assert len(losses(output)) == done + 1  # no step twice, none left out


@pytest.mark.slow
def test_kill_9_at_random_moments():
    """A few of the moments of `make test-crash`."""
    moments = os.environ.get("VLMTRAIN_CRASH_MOMENTS", "4")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.crash", moments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
