"""Which checkpoints stay, what a stop leaves, and kill -9."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity import reference as ref
from tests.ranks import ROOT, run_cli
from tests.train.conftest import conversations, losses, model, options  # noqa: F401
from tests.train.test_training import start, wait_for_step
from vlmtrain.checkpoint.convert import layout_for, to_megatron
from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.checkpoint.megatron.torch_dist import (
    COMMON,
    ChunkFile,
    ChunkReader,
    read_common,
    write_common,
    write_metadata,
)
from vlmtrain.checkpoint.model_folder import newest
from vlmtrain.checkpoint.training.checkpoint import (
    Saver,
    _fill,
    droppable,
    find,
    go_on_from,
    load,
    loader_state,
)
from vlmtrain.checkpoint.training.optimizer_state import (
    distributed_parts,
    set_steps,
    steps_taken,
)
from vlmtrain.checkpoint.training.sharding import Piece
from vlmtrain.core.config import ParallelSection
from vlmtrain.core.errors import UserError
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
from vlmtrain.models.family import read_spec


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    small = ref.make_model("qwen2_5_vl", seed=torch.initial_seed() % 2**31)
    return ref.save_model(small, tmp_path_factory.mktemp("saving") / "model")


def held(engine) -> dict[str, dict[str, torch.Tensor]]:
    """All that the optimizer holds of each parameter: master weights, both moments."""
    (part,) = distributed_parts(engine.optimizer)
    return {
        name: part._get_main_param_and_optimizer_states(parameter)
        for name, parameter in engine.parts[0].named_parameters()
        if parameter.requires_grad
    }


def generators() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def test_a_checkpoint_is_the_whole_state(alone, folder, tmp_path, synced):
    """In bfloat16 the master weights are apart from the model's. What is written is on disk before
    it has its name."""
    engine, kinds = alone(folder, dtype=torch.bfloat16), ("param", "exp_avg", "exp_avg_sq")
    state = held(engine)
    for tensor in [p.data for p in engine.parts[0].parameters()] + [
        state[name][kind] for name in state for kind in kinds
    ]:
        tensor.normal_(0.0, 0.1)
    set_steps(engine.optimizer, 11)
    weights = {name: p.detach().clone() for name, p in engine.parts[0].named_parameters()}
    state = {name: {kind: one[kind].clone() for kind in kinds} for name, one in state.items()}
    assert len(state) == len(weights) and generators()  # from here on they are others than at first
    saver = Saver(tmp_path / "c", ModelFiles(folder), keep=3)
    saver.start(7, engine.parts, engine.optimizer, {"note": "kept", "loader": {"step": 7}})
    drawn = generators()  # after the state was taken, as the training that goes on
    for tensor in [p.data for p in engine.parts[0].parameters()] + [
        one[kind] for one in held(engine).values() for kind in kinds
    ]:
        tensor.fill_(torch.nan)
    saver.finish()
    path = tmp_path / "c" / "step-00000007"
    assert {p.name for p in path.iterdir()} >= {".metadata", MANIFEST, COMMON, "config.json"}
    synced(path)
    names = {p.name for p in path.iterdir()} - {MANIFEST}
    assert json.loads((path / MANIFEST).read_text()).keys() == names
    config = json.loads((path / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"

    for change in (False, True):
        engine = alone(folder, dtype=torch.bfloat16)
        if change:  # of a model that is elsewhere
            random.seed(1)
        extra = load(path, engine.parts, engine.optimizer)
        assert generators() == drawn
        assert extra["note"] == "kept" and "optimizer_steps" not in extra
        assert loader_state(path) == {"step": 7}
        for name, parameter in engine.parts[0].named_parameters():
            assert torch.equal(parameter, weights[name]), name
        for name, one in held(engine).items():
            assert all(torch.equal(one[kind], state[name][kind]) for kind in kinds), name
        assert steps_taken(engine.optimizer) == 11
    # On another layout's place each rank keeps the random numbers of its start.
    common = read_common(path)
    common["random"][0]["position"] = [1, 0, 0, 0]
    write_common(path, common)
    before = torch.get_rng_state()
    load(path, engine.parts, engine.optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    # In float32 what is frozen from here on has the master weights too.
    engine = alone(folder, freeze={"vision": True})
    load(path, engine.parts, engine.optimizer)
    assert len(held(engine)) < len(state)
    for name, parameter in engine.parts[0].named_parameters():
        assert torch.equal(parameter, state[name]["param"].view_as(parameter)), name


def test_weights_that_a_checkpoint_does_not_have_are_named(alone, folder, tmp_path):
    lora = {"rank": 2, "targets": ("q_proj", "o_proj")}
    engine, saver = alone(folder, lora=lora), Saver(tmp_path, ModelFiles(folder), keep=9)
    saver.start(1, engine.parts, engine.optimizer, {})
    saver.finish()
    adapted, plain = tmp_path / "step-00000001", tmp_path / "step-00000002"
    assert load(adapted, engine.parts, engine.optimizer, folder)["step"] == 1
    name = "vision.blocks.layers.2.mlp.linear_fc2.weight"
    frozen = dict(engine.parts[0].named_parameters())[name]
    frozen.data[-1, -1] += 1
    with pytest.raises(UserError, match=r"on other base weights than --model .*mlp.linear_fc2.w"):
        load(adapted, engine.parts, engine.optimizer, folder)
    # Without a base to compare with, the checkpoint's are taken.
    load(adapted, engine.parts, engine.optimizer)
    assert torch.equal(frozen, dict(alone(folder).parts[0].named_parameters())[name])

    engine = alone(folder, lora={**lora, "targets": ("q_proj",)})
    with pytest.raises(UserError, match=r"holds .*linear_proj.adapters.* this run has no place"):
        load(adapted, engine.parts, engine.optimizer, folder)
    engine = alone(folder)
    with pytest.raises(UserError, match="holds no optimizer state of .* was frozen when"):
        load(adapted, engine.parts, engine.optimizer)
    saver.start(2, engine.parts, engine.optimizer, {})
    saver.finish()
    engine = alone(folder, lora=lora)
    with pytest.raises(UserError, match=r"does not hold the parameter .*adapters.*--lora options"):
        load(plain, engine.parts, engine.optimizer)
    layout = layout_for(read_spec(folder), ParallelSection())
    to_megatron(folder, tmp_path / "weights", layout)
    with pytest.raises(UserError, match=r"weights holds weights only; start a new run .*--model"):
        load(tmp_path / "weights", engine.parts, engine.optimizer)
    engine = alone(folder)
    dict(engine.parts[0].named_parameters())[name].data[3, 2] = torch.nan
    saver.start(3, engine.parts, engine.optimizer, {})
    saver.finish()
    with pytest.raises(UserError, match=r"step-00000003: .*linear_fc2.weight holds NaN"):
        to_megatron(tmp_path / "step-00000003", tmp_path / "again", layout)
    wider = ref.make_model("qwen2_5_vl").config
    wider.text_config.intermediate_size = 112
    other = ref.save_model(type(ref.make_model("qwen2_5_vl"))(wider), tmp_path / "wider")
    engine = alone(other)
    with pytest.raises(
        UserError, match=r"linear_fc1.weight is \[4, 216, 96\], this model needs \[4, 224, 96\]"
    ):
        load(plain, engine.parts, engine.optimizer)


@pytest.mark.parametrize(("first", "rows"), [(0, 3), (2, 4), (4, 4), (6, 2), (5, 1)])
def test_words_padded_for_another_layout(first, rows, tmp_path):
    """Five rows are stored; those behind them are zeros, whatever the memory held."""
    file, words = ChunkFile(tmp_path / "a.distcp"), torch.randn(5, 3)
    file.add("words", (5, 3), (0, 0), words)
    file.close()
    write_metadata(tmp_path, file.chunks)
    reader = ChunkReader(tmp_path)
    want = torch.cat([words, torch.zeros(5, 3)])[first : first + rows]
    data = torch.full((rows, 3), torch.nan)
    _fill(reader, Piece("words", (8, 3), (first, 0), data, padded=True))
    assert torch.equal(data, want)
    for piece in (
        Piece("words", (8, 3), (first, 0), data, padded=False),
        Piece("words", (8, 2), (first, 0), data[:, :2], padded=True),
    ):
        with pytest.raises(CheckpointError, match=r"words is \[5, 3\], this model needs \[8, "):
            _fill(reader, piece)


def test_what_a_save_leaves(alone, folder, tmp_path, monkeypatch):
    """What a killed run left goes at the start, what is not ours stays. A disk that is full leaves
    what was there."""
    engine, places = alone(folder), tmp_path / "checkpoints"
    mine = ("step-00000009.old", "step-00000009.incomplete.txt", "notes", "step-9.incomplete")
    gone = ("step-00000009.incomplete", "step-00000008.vlmtrain-removed1")
    gone += ("step-00000007.incomplete.vlmtrain-removed12",)
    for name in (*mine, *gone):
        (places / name).mkdir(parents=True)
    saver = Saver(places, ModelFiles(folder), keep=2, keep_every=3)
    assert {p.name for p in places.iterdir()} == set(mine)
    for step in range(1, 7):
        best = {"step": 2, "loss": 1.0} if step > 1 else None
        saver.start(step, engine.parts, engine.optimizer, {"best": best})
    saver.finish()
    assert complete(places) == [2, 3, 5, 6]
    assert read_common(places / "step-00000006")["history"] == [2, 3, 4, 5, 6]
    texts = {name: (places / name).read_text().split() for name in ("latest", "best", "history")}
    names = [f"step-{step:08d}" for step in (2, 3, 4, 5, 6)]
    assert texts == {"latest": names[-1:], "best": names[:1], "history": names}
    before = sorted(p.name for p in places.iterdir())
    write = SummedFile.write

    def full(self, data):
        if self.bytes > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(SummedFile, "write", full)
    saver.start(7, engine.parts, engine.optimizer, {})
    with pytest.raises(UserError, match="step-00000007 can't be written: No space left on device"):
        saver.finish()
    assert sorted(p.name for p in places.iterdir()) == before
    monkeypatch.undo()
    saver.start(8, engine.parts, engine.optimizer, {}, lambda path: (path / "x").write_text("mine"))
    while not complete(places)[-1] == 8:
        assert saver.poll(stop=True)
    assert not saver.poll() and (places / "step-00000008" / "x").read_text() == "mine"
    verify_manifest(places / "step-00000008")


def test_moments_of_different_ages_are_none(alone, folder):
    """All begin as zeros."""
    engine = alone(folder)
    assert not any(
        one[kind].any() for one in held(engine).values() for kind in ("exp_avg", "exp_avg_sq")
    )
    (part,) = distributed_parts(engine.optimizer)
    assert steps_taken(engine.optimizer) == 0
    next(iter(part.optimizer.state.values()))["step"] += 1
    with pytest.raises(RuntimeError, match=r"different numbers of steps: \[0, 1\]"):
        steps_taken(engine.optimizer)


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
