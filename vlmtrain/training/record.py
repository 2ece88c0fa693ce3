"""What rank 0 prints and writes of a run: its facts at the start, then a row for each step."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from vlmtrain.core.config import TrainConfig
from vlmtrain.data.loader import PackedLoader
from vlmtrain.plan.hardware import Gpu, Peak
from vlmtrain.telemetry.drift import DriftMonitor
from vlmtrain.telemetry.ledger import Ledger, StepResult
from vlmtrain.telemetry.metrics import Metrics
from vlmtrain.telemetry.stragglers import WINDOW, describe
from vlmtrain.training.engine import Engine
from vlmtrain.training.rehearsal import RankPeak


class Record:
    """Metrics of a run, with its ledger and its comparison with the plan. On rank 0 only.

    Args:
        machine: `find_machine`'s answer.
        first, total: steps done before this start of the run, and of the whole run.
        resume: the checkpoint that it goes on from.
        peaks: of all ranks in rehearsal; empty: there was none.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        loader: PackedLoader,
        machine: tuple[Gpu | None, Peak],
        first: int,
        total: int,
        resume: Path | None,
        peaks: list[RankPeak],
    ) -> None:
        gpu, peak = machine
        spec, layout, train = engine.spec, engine.layout, config.train
        _describe(config, engine, loader, total)
        if resume is not None:
            print(f"resumed from {resume} at step {first}", flush=True)
        if os.environ.get("OMP_NUM_THREADS") is None and dist.get_world_size() > 1:
            print("OMP_NUM_THREADS is not set: processes may compete for cores", flush=True)
        self._loader = loader
        self._ledger = Ledger(spec, layout, peak, config.freeze, config.lora, config.recompute)
        self._drift = DriftMonitor(config, spec, layout, gpu, peak, loader.index)
        facts = {**self._drift.facts(), "rehearsal": [asdict(peak) for peak in peaks]}
        self._metrics = Metrics(
            config.output,
            first,
            total,
            train.log_every,
            tensorboard=train.tensorboard,
            wandb=train.wandb,
            facts=facts,
        )

    def step(
        self,
        step: int,
        result: StepResult,
        lr: float,
        seconds: float,
        waited: float,
        saving: float,
        more: dict[str, float],
    ) -> None:
        """The row of a step that took `seconds`, of which it waited for data, saved, evaluated;
        with `more` in it, what was measured on held-out data for one."""
        row = self._ledger.row(result, seconds, saving, more.get("heldout_seconds", 0.0))
        if step % WINDOW == 0 and (line := describe(row)):
            print(f"step {step}: {line}", flush=True)
        self._metrics.step(
            step,
            result,
            lr,
            seconds,
            data_seconds=waited,
            epoch=self._loader.epoch,
            **row,
            **self._loader.metrics,
            **self._drift.step(step, result, seconds, row),
            **more,
        )

    def close(self, *, finished: bool) -> None:
        if finished:
            self._metrics.write_facts(**self._drift.facts())
        self._metrics.close()


def _describe(config: TrainConfig, engine: Engine, loader: PackedLoader, total: int) -> None:
    spec, layout, train, index = engine.spec, engine.layout, config.train, loader.index
    print(
        f"{spec.family}: {spec.num_layers} language layers of width {spec.hidden_size}, "
        f"{spec.vision.depth} vision layers of width {spec.vision.hidden_size}; {train.precision}\n"
        f"{dist.get_world_size()} processes: {layout.describe()}\n"
        f"{len(index):,} samples, {int(index.lengths.sum()):,} tokens "
        f"({int(index.image_tokens.sum()):,} image, {int(index.target_tokens.sum()):,} target); "
        f"{train.global_batch_packs} packs of up to {train.pack_length:,} tokens a step "
        f"(about {loader.samples_per_step:,.0f} samples), "
        f"{train.global_batch_packs // layout.data} per replica; {loader.steps_per_epoch} steps an "
        f"epoch, {total} in all",
        flush=True,
    )
