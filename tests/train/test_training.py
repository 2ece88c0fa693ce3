"""Whole runs of `vlmtrain train`: what they leave, resume after kill -9, nothing moves at lr 0."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.ranks import ROOT, run_cli
from tests.train.conftest import losses, options
from vlmtrain import cli
from vlmtrain.checkpoint import convert
from vlmtrain.core.config import LoraSection, RecomputeSection
from vlmtrain.core.run_folder import complete
from vlmtrain.training import trainer
from vlmtrain.training.engine import Engine

TWO = ["--nproc=2", "--parallel.pipeline=2"]
RATES = (
    "--optimizer.lr_scheduler_type=wsd --optimizer.warmup_ratio=0.15 --optimizer.decay_ratio=0.4 "
    "--optimizer.vision_lr=2e-3 --optimizer.merger_lr=5e-4 --optimizer.vision_layer_decay=0.9"
).split()


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "vlmtrain.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(output: Path, step: int, process: subprocess.Popen, limit: float = 120) -> None:
    end = time.monotonic() + limit
    path = output / "metrics.jsonl"
    while time.monotonic() < end and process.poll() is None:
        if path.is_file() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[0][-3000:]}")


def wait_for_checkpoint(output: Path, process: subprocess.Popen, limit: float = 60) -> None:
    """Checkpoints are written while training goes on: complete a step or two later."""
    end = time.monotonic() + limit
    while time.monotonic() < end and process.poll() is None:
        if (output / "checkpoints" / "latest").is_file():
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint: {process.communicate()[0][-3000:]}")


def workers(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def kill(process: subprocess.Popen) -> None:
    """kill -9 of the launcher and of every worker."""
    for victim in [*workers(process), psutil.Process(process.pid)]:
        victim.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def straight(model, conversations, tmp_path_factory) -> Path:
    """Ten steps without a break on two pipeline stages."""
    output = tmp_path_factory.mktemp("straight") / "run"
    done = run_cli(options(model, conversations, output, "--train.steps=10", *TWO, *RATES))
    assert done.code == 0, done.output
    assert "step 10/10" in done.output and "Traceback" not in done.output
    assert re.search(r"^step  9/10  loss .* 0:\d\d:\d\d left$", done.output, re.MULTILINE)
    return output


def test_metrics_of_a_run(straight):
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    for row in rows:
        assert {"loss", "grad_norm", "lr", "tokens", "target_tokens", "image_tokens"} <= row.keys()
        assert row["padding_share"] == 0 and row["tokens"] <= 640  # 4 packs of at most 160
        assert 0 < row["target_tokens"] < row["tokens"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
    rates = [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]  # of 1e-3: warmed up, constant, decayed
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * rate for rate in rates])
    check_waterfall(rows)
    assert 0 < rows[-1]["mfu"] < rows[-1]["hfu"] < 1
    facts = json.loads((straight / "run.json").read_text())
    assert facts["processes"] == 2 and facts["plan"]["step_seconds"] > 0
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert list((straight / "tensorboard").glob("events.*"))


def check_waterfall(rows: list[dict]) -> None:
    """Parts add up to the step, none is negative, and most of a step has a name: in the middle step
    of the run, since a busy machine may run something else between two clock readings."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        parts, seconds = row["waterfall"], row["step_seconds"]
        assert sum(parts.values()) == pytest.approx(seconds, rel=0.02)
        for name, part in parts.items():
            shares.setdefault(name, []).append(part / seconds)
    middle = {name: statistics.median(share) for name, share in shares.items()}
    assert min(middle.values()) > -0.02, shares
    assert middle["other"] < 0.35, shares


def test_the_folder_loads_in_transformers(straight, model):
    import transformers

    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        straight / "hf", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    before = load_file(model / "model.safetensors")
    moved = sum(
        not torch.equal(tensor, before[name])
        for file in (straight / "hf").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    )
    assert moved == len(before)  # every tensor was trained
    transformers.AutoTokenizer.from_pretrained(straight / "hf")


@pytest.mark.slow
def test_kill_and_resume_is_bitwise(straight, model, conversations, tmp_path):
    output = tmp_path / "run"
    arguments = options(
        model, conversations, output, "--train.steps=10", "--checkpoint.every=5", *TWO, *RATES
    )
    arguments.append("--checkpoint.hf")
    process = start(arguments)
    wait_for_step(output, 6, process)
    wait_for_checkpoint(output, process)
    kill(process)
    assert not (output / "hf").exists()
    assert (output / "checkpoints" / "latest").read_text() == "step-00000005\n"
    done = run_cli([*arguments, "--checkpoint.resume=latest"])
    assert done.code == 0, done.output
    assert losses(output) == losses(straight)
    for file in (straight / "hf").glob("*.safetensors"):
        other = load_file(output / "hf" / file.name)
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, other[name]), name
    first, last = (output / "checkpoints" / f"step-{step:08d}" for step in (5, 10))
    assert folder_bytes(last / "hf") == folder_bytes(output / "hf")
    convert.to_hf(first, tmp_path / "converted")
    for name, tensor in load_file(tmp_path / "converted" / "model.safetensors").items():
        files = [load_file(file) for file in (first / "hf").glob("*.safetensors")]
        assert [torch.equal(tensor, file[name]) for file in files if name in file] == [True], name


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_with_one_line(model, conversations, tmp_path):
    output = tmp_path / "run"
    process = start(options(model, conversations, output, "--train.steps=10", *TWO))
    wait_for_step(output, 2, process)
    ranks = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in printed, printed
    assert printed.splitlines().count("vlmtrain: interrupted") == 1, printed
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_moves_at_learning_rate_zero(precision, model, conversations, tmp_path):
    folder = model
    if precision == "bf16":  # weights that bf16 holds exactly
        folder = tmp_path / "model"
        shutil.copytree(model, folder)
        weights = load_file(folder / "model.safetensors")
        save_file(
            {n: t.bfloat16() for n, t in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
    done = run_cli(
        options(
            folder,
            conversations,
            tmp_path / "run",
            "--train.steps=3",
            "--optimizer.lr=0",
            "--optimizer.weight_decay=0",
            f"--train.precision={precision}",
        )
    )
    assert done.code == 0, done.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    check_waterfall(rows)
    for row in rows:
        assert row["waterfall"]["bubble"] == row["waterfall"]["imbalance"] == 0  # one process
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


@pytest.mark.slow
def test_a_split_is_measured_each_epoch(model, conversations, tmp_path):
    """3 of 12 samples are held out: the loss on them is that of a run that is given them apart."""
    data = tmp_path / "data.jsonl"
    lines = [json.dumps(sample) for sample in json.loads(conversations.read_text())]
    data.write_text("".join(line + "\n" for line in lines))
    apart = sorted(lines, key=lambda line: zlib.crc32(line.encode()))
    (tmp_path / "held.jsonl").write_text("".join(line + "\n" for line in apart[:3]))
    kept = [line for line in lines if line in apart[3:]]
    (tmp_path / "kept.jsonl").write_text("".join(line + "\n" for line in kept))
    epochs = [
        "--train.epochs=3",
        "--loader.workers=0",
        "--train.global_batch=1",
        "--loader.packing=none",
    ]
    every = ["--evaluate.every=epoch", "--checkpoint.every=epoch", "--checkpoint.keep=9"]
    runs = {
        "split": (data, "--evaluate.split_ratio=0.25"),
        "apart": (tmp_path / "kept.jsonl", f"--evaluate.data={tmp_path / 'held.jsonl'}"),
    }
    for name, (file, option) in runs.items():
        done = run_cli(options(model, file, tmp_path / name, *epochs, *every, option))
        assert done.code == 0 and "held out: 3 samples of" in done.output, done.output
        assert complete(tmp_path / name / "checkpoints") == [9, 18, 27]
        text = (tmp_path / name / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert [row["step"] for row in rows if "heldout_loss" in row] == [9, 18, 27]
        assert {row["heldout_samples"] for row in rows if "heldout_loss" in row} == {3}
        done = run_cli(
            ["evaluate", f"--model={tmp_path / name / 'hf'}", f"--data={tmp_path / 'held.jsonl'}"]
            + [f"--output={tmp_path / name / 'scores'}", "--pack_length=160", "--precision=fp32"]
        )
        assert done.code == 0, done.output
        score = json.loads((tmp_path / name / "scores" / "scores.json").read_text())["heldout"]
        assert score["loss"] == pytest.approx(rows[-1]["heldout_loss"], rel=1e-6)


IN_PROCESS = ["--train.steps=1", "--loader.workers=0", "--train.global_batch_packs=2"]


@pytest.mark.parametrize("parts", [("vision", "merger"), ("language",)])
def test_frozen_parts_stay_as_they_were(parts, model, conversations, tmp_path):
    """Bit by bit, and every other tensor moves."""
    frozen = [f"--freeze.{part}" for part in parts]
    assert cli.main(options(model, conversations, tmp_path / "run", *IN_PROCESS, *frozen)) == 0
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if ("visual." in name) == ("language" in parts)}


def test_the_system_prompt_is_trained_with(model, conversations, tmp_path):
    """The tokens of all twelve samples with one of ours and with the template's."""
    more = ["--train.steps=1", "--loader.workers=0", "--loader.packing=none"]
    more.append("--train.global_batch=12")
    rows = []
    for name, system in (("usual", []), ("own", ["--loader.system=Be brief and right, please."])):
        assert cli.main(options(model, conversations, tmp_path / name, *more, *system)) == 0
        rows.append(json.loads((tmp_path / name / "metrics.jsonl").read_text()))
    usual, own = (
        len(AutoTokenizer.from_pretrained(model)(text)["input_ids"])
        for text in ("You are a helpful assistant.", "Be brief and right, please.")
    )
    assert usual != own
    assert rows[1]["tokens"] - rows[0]["tokens"] == 12 * (own - usual)
    assert rows[1]["target_tokens"] == rows[0]["target_tokens"]


def test_options_of_the_engine(model, conversations, tmp_path, monkeypatch):
    """It is made with the sections that were asked for; another seed, other adapters."""
    made, adapters = [], []

    def make(*arguments, **options):
        made.append(options)
        return Engine(*arguments, **options)

    monkeypatch.setattr(trainer, "Engine", make)
    asked = ["--lora.rank=2", "--optimizer.lr=0", "--parallel.vision_piece=4096"]
    asked += ["--recompute.language=full", "--train.timeout=3"]
    for number, seed in enumerate((5, 5, 6)):
        output = tmp_path / str(number)
        more = [*IN_PROCESS, *asked, f"--train.seed={seed}"]
        assert cli.main(options(model, conversations, output, *more)) == 0
        adapters.append(load_file(output / "adapter" / "adapter_model.safetensors"))
    assert [options["seed"] for options in made] == [5, 5, 6]
    assert made[0] == dict(
        dtype=torch.float32,
        seed=5,
        recompute=RecomputeSection(language="full"),
        lora=LoraSection(rank=2),
        vision_piece=4096,
        timeout=3.0,
    )
    name = next(name for name in adapters[0] if "lora_A" in name)
    first, again, other = (table[name] for table in adapters)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.slow
def test_a_recipe_and_overrides(model, conversations, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model = "{model}"\ndata = "{conversations}"\noutput = "{tmp_path / "run"}"\n'
        '[train]\nsteps = 5\npack_length = 160\nglobal_batch_packs = 2\nprecision = "fp32"\n'
        "[optimizer]\nlr = 1e-3\nwarmup_steps = 2\n"
    )
    done = run_cli(["train", "--config", str(recipe), "--train.steps", "3"])
    assert done.code == 0, done.output
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([0, 5e-4, 1e-3])
