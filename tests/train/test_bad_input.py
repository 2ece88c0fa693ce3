"""Bad input of every kind: one sentence that names the culprit, exit code 1, nothing written."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_convert import edit, variant
from tests.ranks import run_cli, run_ranks
from tests.train.conftest import options
from vlmtrain import cli
from vlmtrain.checkpoint.training.checkpoint import find, go_on_from
from vlmtrain.core import lock
from vlmtrain.core.files import CheckpointError
from vlmtrain.core.run_folder import complete


@pytest.fixture
def samples(conversations) -> list[dict[str, Any]]:
    return json.loads(conversations.read_text())


def write(tmp_path: Path, samples: Any) -> Path:
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(samples))
    return path


def refused(capsys, arguments: list[str], output: Path) -> str:
    """Run in this process; returns the one line of stderr."""
    code = cli.main(arguments)
    printed = capsys.readouterr()
    assert code == 1, printed
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("vlmtrain: ")
    for name in ("metrics.jsonl", "checkpoints", "hf"):
        assert not (output / name).exists()
    return lines[0]


def broken(kind: str, samples: list[dict[str, Any]], tmp_path: Path) -> tuple[Any, list[str]]:
    """Samples with one fault, and what the message must name."""
    first = samples[0]
    if kind == "missing image":
        first["image"] = str(tmp_path / "no-such.jpg")
        return samples, ["no-such.jpg", first["id"]]
    if kind == "not an image":
        (tmp_path / "text.jpg").write_text("hello")
        first["image"] = str(tmp_path / "text.jpg")
        return samples, ["text.jpg", first["id"]]
    if kind == "more marks than images":
        first["conversations"][0]["value"] += " <image>"
        return samples, [first["id"], "2", "1"]
    if kind == "unknown role":
        first["conversations"][1]["from"] = "robot"
        return samples, [first["id"], "robot"]
    if kind == "empty":
        return [], ["conversations.json"]
    first["conversations"][1]["value"] = "word " * 500
    return samples, [first["id"], "160"]


@pytest.mark.parametrize(
    "kind",
    [
        "missing image",
        "not an image",
        "more marks than images",
        "unknown role",
        "empty",
        "longer than the pack",
    ],
)
def test_bad_sample(kind, capsys, model, conversations, samples, tmp_path):
    content, names = broken(kind, samples, tmp_path)
    data = write(tmp_path, content)
    message = refused(capsys, options(model, data, tmp_path / "run"), tmp_path / "run")
    for name in names:
        assert name in message, message


def test_truncated_image(capsys, model, conversations, samples, tmp_path):
    whole = Path(samples[0]["image"][0]).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    samples[0]["image"] = str(tmp_path / "cut.jpg")
    data = write(tmp_path, samples)
    message = refused(capsys, options(model, data, tmp_path / "run"), tmp_path / "run")
    assert "cut.jpg" in message and samples[0]["id"] in message


def check_model(folder: Path, words: list[str], capsys, conversations, tmp_path) -> None:
    output = tmp_path / "run"
    message = refused(capsys, options(folder, conversations, output), output)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("size", [0.0, 0.5], ids=["missing", "cut short"])
def test_damaged_download(size, capsys, model, conversations, tmp_path):
    """Of two files, as a large model has them."""
    folder = variant(model, tmp_path / "model", torch.float32, 2, new_names=False)
    file = folder / "model-00002-of-00002.safetensors"
    os.truncate(file, int(size * file.stat().st_size)) if size else file.unlink()
    words = [file.name, "cut short" if size else "missing"]
    check_model(folder, words, capsys, conversations, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update(extra=torch.zeros(2)), ["extra"]),  # found when names are read
        (lambda w: w["lm_head.weight"].view(-1)[3].fill_(float("nan")), ["lm_head.weight", "NaN"]),
    ],
    ids=["unexpected", "nan"],
)
def test_bad_weights(change, words, capsys, model, conversations, tmp_path):
    """Every kind of them: tests/checkpoint/test_convert.py."""
    folder = edit(model, tmp_path / "model", change)
    check_model(folder, words, capsys, conversations, tmp_path)


def test_no_folder_no_config_other_model(capsys, model, conversations, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    check_model(tmp_path / "nowhere", ["nowhere"], capsys, conversations, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "llama"
    (folder / "config.json").write_text(json.dumps(config))
    check_model(folder, ["llama", "qwen2_5_vl"], capsys, conversations, tmp_path)
    (folder / "config.json").unlink()
    check_model(folder, ["config.json"], capsys, conversations, tmp_path)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--optimizer.offload_fraction=1.5", ["--optimizer.offload_fraction", "at most 1"]),
        ("--optimizer.offload_schedule 9:1.5", ["9:1.5", "STEP:FRACTION"]),
        ("--optimizer.offload_schedule 1:0.5 1:0.6", ["1:0.6", "STEP:FRACTION"]),
        ("--train.timeout 1e9", ["--train.timeout is 1000000000.0", "at most 1000000"]),
        ("--checkpoint.resume ²", ["--checkpoint.resume is '²'"]),
        ("--lora.targets=qkv --lora.rank=4", ["--lora.targets", "qkv", "q_proj"]),
        ("--lora.rank=-1", ["--lora.rank", "-1"]),
        ("--parallel.tensor=2", ["1 processes", "multiple of 2"]),
        ("--parallel.sequence", ["parallel.sequence", "parallel.tensor"]),
        ("--lora.alpha=nan --lora.rank=4", ["--lora.alpha", "nan", "finite"]),
        ("--train.steps=-1", ["--train.steps", "-1"]),
        ("--train.epochs=0", ["--train.epochs 0", "--train.steps"]),
        ("--train.epochs=10001", ["--train.epochs is 10001.0", "at most 10000"]),
        ("--train.epochs=inf", ["--train.epochs", "inf", "finite"]),
        ("--train.seed=4294967296", ["--train.seed", "4294967296", "below"]),
        ("--optimizer.lr=inf", ["--optimizer.lr", "inf", "finite"]),
        ("--optimizer.beta2=1", ["--optimizer.beta2", "1.0", "below 1"]),
        ("--optimizer.beta1=nan", ["--optimizer.beta1", "nan"]),
        ("--optimizer.eps=-1", ["--optimizer.eps", "-1"]),
        ("--checkpoint.resume=soon", ["--checkpoint.resume", "soon"]),
        ("--checkpoint.resume=7", ["step-00000007"]),
    ],
)
def test_bad_option(option, names, capsys, model, conversations, tmp_path):
    message = refused(
        capsys, options(model, conversations, tmp_path / "run", *option.split()), tmp_path / "run"
    )
    for name in names:
        assert name in message, message


def test_everything_frozen(capsys, model, conversations, tmp_path):
    frozen = ["--freeze.vision", "--freeze.merger", "--freeze.language"]
    message = refused(
        capsys, options(model, conversations, tmp_path / "run", *frozen), tmp_path / "run"
    )
    assert "nothing to train" in message


def test_a_frozen_language_model_and_no_images(capsys, model, samples, tmp_path):
    texts = [sample for sample in samples if not sample.get("image")]
    assert texts
    data = write(tmp_path, texts)
    message = refused(
        capsys, options(model, data, tmp_path / "run", "--freeze.language"), tmp_path / "run"
    )
    assert f"none of the {len(texts)} samples to train on has one; add some to {data}" in message


def test_existing_run_is_not_overwritten(capsys, model, conversations, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert cli.main(options(model, conversations, tmp_path / "run")) == 1
    assert "--checkpoint.resume latest" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


def test_a_trained_model_without_checkpoints_is_not_overwritten(
    capsys, model, conversations, tmp_path
):
    """Who removed checkpoints/ to save room has a finished run, not one to begin again."""
    kept = tmp_path / "run" / "hf" / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert (
        cli.main(options(model, conversations, tmp_path / "run", "--checkpoint.resume=latest")) == 1
    )
    assert (
        "holds the model of a run (hf) and no checkpoint to go on from" in capsys.readouterr().err
    )
    assert kept.read_text() == "{}" and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_second_start_in_the_same_folder(capsys, monkeypatch, model, conversations, tmp_path):
    """Also with --checkpoint.resume latest, as job scripts pass it; a run that ended has let go."""
    monkeypatch.setattr(lock, "_PATIENCE", 0.0)
    output = tmp_path / "run"
    output.mkdir()
    running = lock.FolderLock(output)
    running.acquire()
    arguments = options(model, conversations, output, "--checkpoint.resume=latest")
    message = refused(capsys, arguments, output)
    assert f"process {os.getpid()} on " in message and str(output) in message, message
    running.release()
    none = tmp_path / "none.json"
    unreadable = options(model, none, output, "--checkpoint.resume=latest")
    for _ in range(2):
        assert "none.json" in refused(capsys, unreadable, output)


@pytest.mark.slow
def test_checkpoint_cut_short(model, conversations, tmp_path):
    output = tmp_path / "run"
    arguments = options(model, conversations, output, "--train.steps=2", "--checkpoint.every=1")
    done = run_cli(arguments)
    assert done.code == 0, done.output
    newest = output / "checkpoints" / "step-00000002"
    file = max(newest.rglob("*.distcp"), key=lambda p: p.stat().st_size)
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size - 100)
    before = (output / "metrics.jsonl").read_text()
    again = options(model, conversations, output, "--train.steps=4", "--checkpoint.resume=latest")
    done = run_cli(again)
    assert done.code == 1
    assert file.name in done.output and "--checkpoint.resume 1" in done.output
    assert "Traceback" not in done.output
    assert (output / "metrics.jsonl").read_text() == before
    # A run that goes on from step 1 leaves alone what another left behind it, and `latest` is its
    # own last step, not the highest number.
    abandoned = newest.with_name("step-00000009")
    newest.rename(abandoned)
    done = run_cli([*again[:-1], "--checkpoint.resume=1", "--checkpoint.keep=1"])
    assert done.code == 0, done.output
    newest = output / "checkpoints" / "step-00000004"
    assert complete(output / "checkpoints") == [4, 9]
    assert (output / "checkpoints" / "latest").read_text() == "step-00000004\n"
    # other packs: said before anything is planned by the old position
    done = run_cli([*again, "--train.pack_length=320", "--train.rehearse"])
    assert done.code == 1 and "Traceback" not in done.output, done.output
    assert "made with another pack length (pack_length was 160 and is 320)" in done.output
    # fewer steps than were made: no older model is to be had, and this one is not written as it
    done = run_cli([*again, "--train.steps=3"])
    assert done.code == 1, done.output
    assert "--train.steps 3 ends after step 3" in done.output and "is of step 4" in done.output
    done = run_cli([*again, "--train.steps=0", "--train.epochs=0.5", "--train.rehearse"])
    assert done.code == 1, done.output
    assert "--train.epochs 0.5 ends after step 1" in done.output, done.output
    # the same size but another content
    file = max(newest.rglob("*.distcp"), key=lambda p: p.stat().st_size)
    with open(file, "r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
    done = run_cli([*again, "--train.steps=5"])
    assert done.code == 1 and "checksum" in done.output, done.output
    assert str(newest) in done.output
    # Resuming from a step makes it the latest, before anything is saved.
    go_on_from(abandoned)
    with pytest.raises(CheckpointError, match="step-00000009"):
        find(output / "checkpoints", "latest")


@pytest.mark.slow
def test_a_broken_tokenizer_is_said_once(model, conversations, tmp_path):
    mine = shutil.copytree(model, tmp_path / "model")
    (mine / "tokenizer.json").write_text("{")
    ended = run_cli(options(mine, conversations, tmp_path / "run", "--nproc=2"))
    said = [line for line in ended.output.splitlines() if line.startswith("vlmtrain: ")]
    assert ended.code == 1 and len(said) == 1 and "the tokenizer cannot be loaded" in said[0], said


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_ranks_end_and_one_speaks(ours, model, conversations, samples, tmp_path):
    """Two ranks of our launcher or another's: the fault is on rank 0's desk, rank 1 won't wait."""
    samples[1]["image"] = str(tmp_path / "no-such.jpg")
    data = write(tmp_path, samples)
    arguments = options(model, data, tmp_path / "run", "--parallel.pipeline=2")
    if ours:
        done = run_cli([*arguments, "--nproc=2"], timeout=90)
        assert done.code == 1 and done.output.count("no-such.jpg") == 1, done.output
        assert "Traceback" not in done.output
        return
    ranks = run_ranks(["-m", "vlmtrain.cli", *arguments], 2, timeout=90)
    assert [r.code for r in ranks] == [1, 1], [r.output for r in ranks]
    assert "no-such.jpg" in ranks[0].output and "no-such.jpg" not in ranks[1].output
    assert "Traceback" not in ranks[0].output + ranks[1].output


def test_unknown_command_and_option(capsys):
    assert cli.main(["fly"]) == 2
    assert "fly" in capsys.readouterr().err
    done = run_cli(["train", "--model", "a", "--data", "b", "--output", "c", "--train.stepz", "3"])
    assert done.code == 2 and "stepz" in done.output
    assert sys.executable
