"""Which checkpoints stay, what a stop leaves, and kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.ranks import ROOT, run_cli
from tests.train.conftest import conversations, losses, model, options  # noqa: F401
from tests.train.test_training import start, wait_for_step
from vlmtrain.checkpoint.megatron.torch_dist import COMMON, write_common
from vlmtrain.checkpoint.model_folder import newest
from vlmtrain.checkpoint.training.checkpoint import droppable, find, go_on_from
from vlmtrain.core.files import (
    MANIFEST,
    CheckpointError,
    SummedFile,
    checksum,
    manifest_of,
    verify_manifest,
    write_json,
)
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


def test_a_run_that_was_gone_back_from_is_not_gone_on_from(tmp_path):
    """Steps 1 to 7, then back to 1, from where another run saves 4 and 8."""
    histories = {step: list(range(1, step + 1)) for step in (1, 2, 3, 5, 6, 7)}
    paths = {step: tmp_path / f"step-{step:08d}" for step in range(1, 9)}
    for step, history in {**histories, 4: [1, 4], 8: [1, 4, 8]}.items():
        paths[step].mkdir()
        write_common(paths[step], {"history": history})
        write_json(paths[step] / MANIFEST, manifest_of(paths[step]))
    assert go_on_from(paths[8]) == [1, 4, 8]
    assert find(tmp_path, "latest") == newest(tmp_path) == paths[8]
    (paths[8] / COMMON).unlink()
    with pytest.raises(CheckpointError, match="damaged; resume from another .*resume 4$"):
        find(tmp_path, "latest")
    shutil.rmtree(paths[8])
    assert find(tmp_path, "latest") == newest(tmp_path) == paths[4]
    shutil.rmtree(paths[4])
    shutil.rmtree(paths[1])
    with pytest.raises(CheckpointError, match=r"name one of steps \[2, 3, 5, 6, 7\] with --check"):
        find(tmp_path, "latest")
    assert go_on_from(find(tmp_path, "7")) == [1, 2, 3, 4, 5, 6, 7]
    shutil.rmtree(paths[7])
    assert find(tmp_path, "latest") == newest(tmp_path) == paths[6]


def test_a_run_from_before_its_history_was_kept(tmp_path):
    """All earlier steps are taken to be its own."""
    for step in (1, 2, 3):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        write_common(path, {})
    assert newest(tmp_path) == path and go_on_from(path.with_name("step-00000002")) == [1, 2]


@pytest.mark.slow
def test_going_back_keeps_the_checkpoints_of_the_run(model, conversations, tmp_path):  # noqa: F811
    output = tmp_path / "run"
    arguments = options(model, conversations, output, "--optimizer.lr_scheduler_type=constant")
    measured = f"--evaluate.data={conversations}", "--evaluate.every=4", "--checkpoint.keep_best"
    best = output / "checkpoints" / "best"
    for has_best, more in (
        (True, ("--checkpoint.every=1", "--checkpoint.keep=9", *measured)),
        # Of before it was measured: what it becomes is not what was the best.
        (False, ("--checkpoint.every=3", "--checkpoint.keep=2", "--checkpoint.resume=1")),
    ):
        done = run_cli([*arguments, "--train.steps=6", *more])
        assert done.code == 0, done.output
        assert best.exists() == has_best
    assert complete(output / "checkpoints") == [3, 6]
    shutil.rmtree(output / "checkpoints" / "step-00000006")
    done = run_cli([*arguments, "--train.steps=7", "--checkpoint.resume=latest"])
    assert done.code == 0 and "at step 3" in done.output, done.output
    assert complete(output / "checkpoints") == [3, 7] and len(losses(output)) == 7


@pytest.mark.slow
def test_the_best_checkpoint_stays(model, conversations, tmp_path):  # noqa: F811
    """One sample is learnt by heart, so that the loss on others rises after a while. A run that
    goes on knows which checkpoint was the best, and may go back to it."""
    samples = json.loads(conversations.read_text())
    one, others, output = tmp_path / "one.json", tmp_path / "others.json", tmp_path / "run"
    one.write_text(json.dumps(samples[:1]))
    others.write_text(json.dumps(samples[1:4]))
    settings = options(
        model, one, output, "--evaluate.every=2",
        "--checkpoint.keep=1", "--checkpoint.keep_best", "--optimizer.lr=3e-3",
        "--train.global_batch=1", "--optimizer.lr_scheduler_type=constant", "--loader.workers=0",
    )  # fmt: skip
    arguments = [*settings, f"--evaluate.data={others}"]
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
        [*settings, f"--train.steps={best + 3}", "--checkpoint.resume=latest"]
        + [f"--evaluate.data={hard}", "--evaluate.every=1"]
    )
    assert done.code == 0 and done.output.count("begins anew") == 1, done.output
    assert f"step {best}, the best so far, was measured on other" in done.output
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    new = min(rows[best + 1 :], key=lambda row: row["heldout_loss"])["step"]
    assert (output / "checkpoints" / "best").read_text() == f"step-{new:08d}\n"


@pytest.mark.slow
def test_the_best_checkpoint_stays_until_another_held_out_set_has_one(
    model,  # noqa: F811
    conversations,  # noqa: F811
    tmp_path,
):
    """A run that is stopped before its first evaluation on the other data."""
    output, samples = tmp_path / "run", json.loads(conversations.read_text())
    data = {name: tmp_path / f"{name}.json" for name in "ab"}
    data["a"].write_text(json.dumps(samples[:2]))
    data["b"].write_text(json.dumps(samples[6:8]))
    arguments = options(model, conversations, output, "--checkpoint.every=1")
    arguments += ["--checkpoint.keep=1", "--checkpoint.keep_best"]
    done = run_cli(
        [*arguments, "--train.steps=2", f"--evaluate.data={data['a']}", "--evaluate.every=1"]
    )
    assert done.code == 0, done.output
    best = (output / "checkpoints" / "best").read_text().strip()
    process = start(
        [*arguments, "--train.steps=400", "--checkpoint.resume=latest"]
        + [f"--evaluate.data={data['b']}", "--evaluate.every=400"]
    )
    wait_for_step(output, 6, process)
    process.send_signal(signal.SIGTERM)
    assert "begins anew" in process.communicate(timeout=100)[0]
    assert (output / "checkpoints" / "best").read_text().strip() == best
    assert (output / "checkpoints" / best).is_dir()
    assert find(output / "checkpoints", "best") == output / "checkpoints" / best


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
    output, folder = tmp_path / "run", tmp_path / "model"
    shutil.copytree(model, folder)
    arguments = options(
        folder, conversations, output, "--train.steps=400", "--nproc=2", "--checkpoint.every=3",
        "--checkpoint.keep=1", "--checkpoint.keep_every=6", "--checkpoint.hf",
    )  # fmt: skip
    process = start(arguments)
    wait_for_step(output, 7, process)
    shutil.rmtree(folder)  # what a checkpoint holds of it was read at the start
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
    assert names == {"latest", "history", *(f"step-{s:08d}" for s in steps)}
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
