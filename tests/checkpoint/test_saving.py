"""Which checkpoints stay, what a stop leaves, and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.ranks import ROOT, run_cli
from tests.train.conftest import conversations, losses, model, options  # noqa: F401
from tests.train.test_training import start, wait_for_step
from vlmtrain.checkpoint.model_folder import newest
from vlmtrain.checkpoint.training.checkpoint import droppable, find
from vlmtrain.core.files import SummedFile, checksum, verify_manifest
from vlmtrain.core.run_folder import complete


@pytest.mark.parametrize(
    ("steps", "keep", "every", "best", "gone"),
    [
        ([1, 2, 3], 2, 0, None, [1]),
        ([1, 2, 3], 3, 0, None, []),
        ([1, 2, 3], 1, 0, 1, [2]),
        ([10, 20, 30, 40, 50], 1, 20, None, [10, 30]),
        ([10, 20, 30, 40, 50], 2, 50, 20, [10, 30]),
        ([], 1, 7, None, []),
    ],
)
def test_which_checkpoints_go(steps, keep, every, best, gone):
    assert droppable(steps, keep, every, best) == gone


@pytest.mark.slow
def test_the_best_checkpoint_stays(model, conversations, tmp_path):  # noqa: F811
    """One sample is learnt by heart, so that the loss on others rises after a while. A run that
    goes on knows which checkpoint was the best, and may go back to it."""
    samples = json.loads(conversations.read_text())
    one, others, output = tmp_path / "one.json", tmp_path / "others.json", tmp_path / "run"
    one.write_text(json.dumps(samples[:1]))
    others.write_text(json.dumps(samples[1:4]))
    arguments = options(
        model, one, output, f"--evaluate.data={others}", "--evaluate.every=2",
        "--checkpoint.keep=1", "--checkpoint.keep_best", "--optimizer.lr=3e-3",
        "--train.global_batch=1", "--optimizer.lr_scheduler_type=constant", "--loader.workers=0",
    )  # fmt: skip
    for steps, resume in ((8, "none"), (10, "latest")):
        done = run_cli([*arguments, f"--train.steps={steps}", f"--checkpoint.resume={resume}"])
        assert done.code == 0, done.output
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        heldout = {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}
        assert list(heldout) == list(range(2, steps + 1, 2))
        best = min(heldout, key=heldout.__getitem__)
        assert best < steps, heldout
        assert complete(output / "checkpoints") == [best, steps]
        assert (output / "checkpoints" / "best").read_text() == f"step-{best:08d}\n"
    folder = output / "checkpoints" / f"step-{best:08d}"
    assert find(output / "checkpoints", "best") == folder == newest(output / "checkpoints" / "best")
    done = run_cli([*arguments, f"--train.steps={best + 1}", "--checkpoint.resume=best"])
    assert done.code == 0 and f"at step {best}" in done.output, done.output
    assert losses(output)[:best] == [row["loss"] for row in rows[:best]]
    # On data that is learnt worse the loss of before would never be reached again.
    hard = tmp_path / "hard.json"
    hard.write_text(json.dumps(samples[6:8]))
    done = run_cli(
        [*arguments, f"--train.steps={best + 3}", "--checkpoint.resume=latest"]
        + [f"--evaluate.data={hard}", "--evaluate.every=1"]
    )
    assert done.code == 0 and done.output.count("begins anew") == 1, done.output
    assert f"step {best}, the best so far, was measured on other" in done.output
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    new = min(rows[best + 1 :], key=lambda row: row["heldout_loss"])["step"]
    assert (output / "checkpoints" / "best").read_text() == f"step-{new:08d}\n"


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
    # The checkpoint that --model names stays: its config and tokenizer go into those that follow.
    source = output / "checkpoints" / f"step-{done:08d}"
    again = run_cli(
        [
            a
            for a in arguments
            if not a.startswith(("--train.steps", "--model", "--checkpoint.every"))
        ]
        + [f"--train.steps={done + 2}", "--parallel.pipeline=2", "--checkpoint.resume=latest"]
        + [f"--model={source}", "--checkpoint.every=1"]
    )
    assert again.code == 0, again.output
    assert len(losses(output)) == done + 2  # no step twice, none left out
    steps = complete(output / "checkpoints")
    assert source.is_dir() and steps[-1] == done + 2 and done + 1 not in steps


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
