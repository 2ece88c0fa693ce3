"""Gradients that are not finite: which samples and which part of the model, and no update."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import losses, options
from vlmtrain import cli
from vlmtrain.data.builder import PackBuilder
from vlmtrain.models.stage import QwenVLStage
from vlmtrain.training import guard
from vlmtrain.training.guard import SpikeGuard
from vlmtrain.training.spikes import Origin


@pytest.mark.slow
def test_a_bad_sample_costs_its_step(model, conversations, tmp_path, monkeypatch, capsys):
    """One sample's pixels are no numbers; another's hidden states get a gradient that is none."""
    records = json.loads(conversations.read_text())
    pixels, gradient = (str(record["id"]) for record in records[:2])
    build, forward = PackBuilder.build, QwenVLStage.forward

    def bad_pixels(self: Any, pack: list[int], decode: Any) -> Any:
        batch, bad = build(self, pack, decode)
        if pixels in batch.sample_ids:
            batch = replace(batch, pixel_values=batch.pixel_values * math.nan)
        return batch, bad

    def spoil(_module: Any, _inputs: Any, output: Any) -> None:
        output.register_hook(lambda g: g * math.nan)

    def bad_gradient(self: Any, batch: Any, **more: Any) -> Any:
        if gradient not in batch.sample_ids or pixels in batch.sample_ids:
            return forward(self, batch, **more)
        with self.language_model.decoder.register_forward_hook(spoil):
            return forward(self, batch, **more)

    monkeypatch.setattr(PackBuilder, "build", bad_pixels)
    monkeypatch.setattr(QwenVLStage, "forward", bad_gradient)
    more = ["--train.steps=8", "--loader.workers=0", "--train.global_batch_packs=1"]
    common = options(model, conversations, tmp_path / "run", *more)
    assert cli.main([*common, "--train.on_spike=skip"]) == 0
    said = capsys.readouterr().out
    spikes = [json.loads(line) for line in (tmp_path / "run" / "spikes.jsonl").open()]
    found = {pixels: (0, "vision tower"), gradient: (1, "language model")}
    named = set()
    for spike in spikes:
        origin = spike["origin"]
        ids = spike["packs"][0][0]
        cause = pixels if pixels in ids else gradient
        assert cause in ids and origin["samples"] == ids and origin["microbatch"] == 1
        assert (origin["direction"], origin["part"]) == found[cause], spike
        named.add(cause)
        assert f"step {spike['step']}: the gradient norm is nan; the first value" in said
    assert named == {pixels, gradient}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["spikes"] == len(spikes) < 8
    bad = {spike["step"] - 1 for spike in spikes if pixels in spike["packs"][0][0]}
    for step, loss in enumerate(losses(tmp_path / "run")):
        assert math.isfinite(loss) == (step not in bad)
    stopped = options(model, conversations, tmp_path / "stop", *more)
    assert cli.main(stopped) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--train.on_spike skip" in said and " of replica 0" in said


def test_a_loss_that_is_no_number_ends_the_run(model, conversations, tmp_path, monkeypatch, capsys):
    """With on_spike=skip too: gradients are finite, so the update was made."""
    forward = QwenVLStage.forward
    monkeypatch.setattr(QwenVLStage, "forward", lambda *a, **k: forward(*a, **k) + math.nan)
    more = ["--train.steps=2", "--loader.workers=0", "--train.on_spike=skip"]
    assert cli.main(options(model, conversations, tmp_path / "run", *more)) == 1
    printed = capsys.readouterr()
    assert "step 1: the loss is nan" in printed.err and "no update" not in printed.out


def test_what_comes_first_in_a_pipeline() -> None:
    """Of every pack stage 0 goes first forward, and the last stage first backward."""
    events = [(0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 0), (1, 1, 2), (1, 1, 1), (1, 1, 0)]
    in_time = [Origin(*event, "language model", "mlp", 0, ["a"]) for event in events]
    drawn = random.sample(in_time, len(in_time))
    assert sorted(drawn, key=lambda origin: origin.order) == in_time


class Steps:
    """Megatron's ChainedOptimizer as far as the guard knows it."""

    def __init__(self, norms: list[float]) -> None:
        self.norms, self.made = iter(norms), 0

    def get_grad_norm(self) -> float:
        return next(self.norms)

    def step_with_ready_grads(self) -> bool:
        self.made += 1
        return True


def test_what_a_spike_is() -> None:
    """A hundred times the median of at least 20 steps, and what is no number."""
    norms = [1.0] * 19 + [101.0, 99.0, 101.0, math.inf, 1.0]
    optimizer = Steps(norms)
    spikes = SpikeGuard(optimizer)
    made = []
    for _ in norms:
        optimizer.get_grad_norm()
        made.append(optimizer.step_with_ready_grads())
    assert made == [True] * 21 + [False, False, True] and optimizer.made == 22
    assert not spikes.withheld


def test_the_usual_norm_is_known_after_a_resume(
    model, conversations, tmp_path, monkeypatch, capsys
):
    """Step 5 is a spike, in one run as in one that goes on behind step 4."""
    judge = SpikeGuard._judge
    monkeypatch.setattr(guard, "_LEAST", 3)

    def run(folder: Path, spike: int, *more: str) -> str:
        calls = itertools.count(1)

        def spiking(self: SpikeGuard, norm: float) -> str:
            return judge(self, norm * (5000 if next(calls) == spike else 1))

        monkeypatch.setattr(SpikeGuard, "_judge", spiking)
        common = ["--train.steps=6", "--train.on_spike=skip", "--checkpoint.every=4", *more]
        assert cli.main(options(model, conversations, folder, *common)) == 0
        return capsys.readouterr().out

    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert "step 5: the gradient norm is" in run(straight, 5)
    shutil.copytree(straight, resumed)
    for folder in (resumed / "checkpoints" / "step-00000006", resumed / "hf"):
        shutil.rmtree(folder)
    assert "step 5: the gradient norm is" in run(resumed, 1, "--checkpoint.resume=4")
    assert losses(resumed) == losses(straight)
