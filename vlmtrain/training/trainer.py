"""`vlmtrain train`: from a Hugging Face folder and conversations to a Hugging Face folder."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vlmkernels.integrations.megatron import offload
from vlmtrain.checkpoint.hf.adapters import merged, save_adapters
from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.checkpoint.hf.save import save_weights
from vlmtrain.checkpoint.load import load_weights
from vlmtrain.checkpoint.training import checkpoint as checkpoints
from vlmtrain.checkpoint.weights import check_weights
from vlmtrain.core import device
from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.collectives import on_every_rank, on_first_rank, shared_error
from vlmtrain.core.config import TrainConfig, to_dict
from vlmtrain.core.errors import UserError
from vlmtrain.core.files import exists, is_dir, writing
from vlmtrain.core.launch import Process, connect
from vlmtrain.core.layout import Layout
from vlmtrain.core.lock import FolderLock
from vlmtrain.core.run_folder import name_of
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import SampleIndex, scan_data
from vlmtrain.data.loader import check_position
from vlmtrain.data.media.limits import describe_sizes
from vlmtrain.data.packing.sampler import Position
from vlmtrain.data.processor import Processor
from vlmtrain.models.family import read_spec
from vlmtrain.models.lora_costs import check_lora
from vlmtrain.parallel.overlap import check_tensor_overlap, prepare_tensor_overlap
from vlmtrain.plan.detect import find_machine
from vlmtrain.telemetry.ledger import StepResult
from vlmtrain.telemetry.metrics import check_wandb
from vlmtrain.training.agreement import check_plan, check_program, check_resumed, check_shared
from vlmtrain.training.engine import Engine
from vlmtrain.training.evaluation import HeldOutScore, measure
from vlmtrain.training.learning_rate import learning_rate
from vlmtrain.training.memory_plan import MemoryPlan
from vlmtrain.training.optimizer import offload_fraction
from vlmtrain.training.record import Record
from vlmtrain.training.setup import open_loader, run_layout, say
from vlmtrain.training.spikes import examine
from vlmtrain.training.watchdog import SAVING, Watchdog


def run(config: TrainConfig, process: Process) -> None:
    """Train as `config` says, as one of `process.world_size` processes.

    Raises:
        UserError: bad input; raised on every rank, marked so that only rank 0 prints it.
    """
    check_tensor_overlap(config.parallel, os.environ)
    prepare_tensor_overlap(config.parallel, os.environ)
    backend = device.setup(process.local_rank)
    if backend.is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = config.train.precision == "bf16"
    connect(process, backend.process_group, config.train.timeout)
    lock = FolderLock(config.output)
    try:
        # Together: what one machine alone refuses would leave the others waiting for its ranks.
        spec, layout = on_every_rank(lambda: check(config, process.world_size))
        check_program(config, spec)
        trainer = Trainer(config, spec, layout, backend, lock)
        trainer.finish(trainer.loop())
    finally:
        lock.release()
        # After a failure the other ranks may be anywhere: a barrier would wait for them.
        if process.world_size == 1 or sys.exc_info()[0] is None:
            dist.barrier()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def check(config: TrainConfig, world_size: int) -> tuple[ModelSpec, Layout]:
    """What can be refused by options and the model's config.json alone."""
    spec = read_spec(config.model)
    check_wandb(config.train.wandb)
    check_lora(config.lora, config.freeze, spec)
    layout = run_layout(
        spec,
        config.parallel,
        world_size,
        global_batch=config.train.global_batch_packs,
        option="--train.global_batch_packs",
    )
    return spec, layout


class Trainer:
    """A run on one rank: built, looped over its steps, finished. Every method is collective."""

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        layout: Layout,
        backend: device.Backend,
        lock: FolderLock,
    ) -> None:
        self.config, self.spec = config, spec
        # Step and loss of the best evaluation, and a hash of the data.
        self.best: dict[str, Any] | None = None
        self.spikes = 0  # updates withheld since this start of the run
        before = backend.memory_bytes()
        train, template = config.train, config.loader.template or None
        self.processor = processor = on_every_rank(
            lambda: Processor.from_folder(
                config.model,
                spec,
                section=config.media,
                pack_length=train.pack_length,
                template=template,
                system=config.loader.system,
            )
        )
        on_first_rank(lambda: _check_output(config, lock))
        check_shared(config.output)
        # Rank 0 reads and checks all input; its error is raised on every rank.
        index, held_out, resume = on_first_rank(lambda: self._read_input(processor))
        self.files = on_every_rank(lambda: ModelFiles(config.model))
        self.held_out = None if held_out is None else held_out.content_hash
        position = self._position(resume, index)
        memory = MemoryPlan(config, spec, layout, backend, index, position, before)
        self.config = config = memory.fit()
        self.engine = self._build_engine(layout, backend)
        self.offloaded = config.optimizer.offload_fraction
        self.loader = open_loader(
            index,
            processor,
            config.loader,
            self.engine,
            pack_length=train.pack_length,
            global_batch=train.global_batch_packs,
            seed=train.seed,
        )
        self.measure: Callable[[], HeldOutScore] | None = None
        if held_out is not None:
            self.measure = partial(
                measure,
                self.engine,
                held_out,
                processor,
                config.loader,
                pack_length=train.pack_length,
                global_batch=train.global_batch_packs,
            )
        if resume is not None:
            state = on_first_rank(lambda: checkpoints.loader_state(resume))
            if state is not None:
                on_every_rank(lambda: self.loader.load_state_dict(state))
        self.total = self._count_steps(position.step)
        check_plan(self.loader, layout)
        gpu, peak = find_machine(backend, self.engine.dtype, spec, train.pack_length, layout.tensor)
        # While all moments are zero: before a checkpoint's are loaded.
        peaks = memory.rehearse(self.engine, self.loader, gpu)
        self.first = 0 if resume is None else self._resume(resume)
        if gpu is not None:
            gpu = replace(gpu, step_memory=memory.factor)
        self.record: Record | None = None
        if dist.get_rank() == 0:
            config.output.mkdir(parents=True, exist_ok=True)
            self.record = Record(
                config,
                self.engine,
                self.loader,
                (gpu, peak),
                self.first,
                self.total,
                resume,
                peaks,
            )
        self.saver = checkpoints.Saver(
            config.output / "checkpoints",
            self.files,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            resume=resume,
            adapt=self.processor.write_settings,
        )

    def loop(self) -> int:
        """Make steps until the last one, or SIGTERM; returns how many the run has made."""
        config, engine, reached = self.config, self.engine, self.first
        place = engine.clock.place
        with checkpoints.StopRequest() as stop, Watchdog(place, config.train.timeout):
            start = time.perf_counter()
            for step in range(self.first, self.total):
                before = time.perf_counter()
                place.begin(step + 1, self.loader.ids(self.loader.next))
                epoch = self.loader.position.epoch
                packs = self.loader.next_step()
                new_epoch = self.loader.position.epoch > epoch
                waited = time.perf_counter() - before
                lr = learning_rate(config.optimizer, step, self.total)
                place.enter("step")
                self._offload(step)
                result = engine.step(packs, lr, waited, self.loader.reading)
                reached = step + 1
                self._judge(reached, packs, result)
                place.enter("evaluation")
                heldout = self._evaluate(reached, new_epoch)
                saving = time.perf_counter()
                place.enter(SAVING)
                due = self._due(config.checkpoint.every, reached, new_epoch)
                due |= self._is_best(reached, heldout)
                stopped = self.saver.poll(stop.asked)
                if due or stopped:
                    self._save(reached)
                # The rest of this round, the record itself, counts as `other` of the next step.
                end = time.perf_counter()
                seconds, start = end - start, end
                if self.record is not None:
                    self.record.step(
                        reached,
                        result,
                        lr,
                        seconds,
                        waited,
                        end - saving,
                        {**heldout, "spikes": self.spikes},
                    )
                if stopped:
                    break
            place.enter(SAVING)
            self.saver.finish()
        self.loader.close()
        return reached

    def finish(self, reached: int) -> None:
        """Write the Hugging Face folder, unless the run has been stopped before its end."""
        config, engine = self.config, self.engine
        if reached < self.total:
            if self.record is not None:
                self.record.close(finished=False)
                say(
                    f"stopped by SIGTERM after step {reached}, checkpoint saved; go on with "
                    "--checkpoint.resume latest"
                )
            return
        engine.gather_weights()
        self._export(config.output)
        if self.record is not None:
            self.record.close(finished=True)
            say(f"Hugging Face folder: {config.output / 'hf'}")

    def _export(self, folder: Path) -> None:
        """Write hf/, and with LoRA adapter/, into `folder`."""
        config, parts, adapt = self.config, self.engine.exported, self.processor.write_settings
        save_weights(parts, self.spec, self.files, folder / "hf", adapt, merged(parts))
        if config.lora.rank:
            save_adapters(parts, config.lora, self.files, folder / "adapter", adapt)

    # --- parts of building and of a step ------------------------------------------------------

    def _read_input(
        self, processor: Processor
    ) -> tuple[SampleIndex, SampleIndex | None, Path | None]:
        """Samples to train on, held-out samples, and the checkpoint to go on from. On rank 0."""
        config, spec, length = self.config, self.spec, self.config.train.pack_length
        resume = checkpoints.find(config.output / "checkpoints", config.checkpoint.resume)
        if resume is None and exists(config.output / "hf"):
            raise UserError(
                f"--output {config.output} holds the model of a run (hf) and no checkpoint to go "
                "on from, so that training would begin again and replace it; name another folder, "
                "or move hf away"
            )
        check_weights(config.model, spec)
        if processor.differs[0]:
            say(describe_sizes(processor.images, processor.videos))
        index = scan_data(config.data, config.loader, processor, length, say)
        held_out = None
        if config.evaluate.data:
            held_out = scan_data(config.evaluate.data, config.loader, processor, length, say)
        elif config.evaluate.split_ratio:
            index, held_out = index.split(config.evaluate.split_ratio)
        if held_out is not None:
            say(f"held out: {len(held_out):,} samples of {config.evaluate.data or config.data}")
        if config.freeze.language and not config.lora.rank and not index.image_tokens.any():
            raise UserError(
                "with --freeze.language only images and videos teach anything, and none of the "
                f"{len(index):,} samples to train on has one; add some to {config.data}, or drop "
                "--freeze.language"
            )
        return index, held_out, resume

    def _build_engine(self, layout: Layout, backend: device.Backend) -> Engine:
        config = self.config
        engine = Engine(
            self.spec,
            layout,
            backend,
            dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
            seed=config.train.seed,
            recompute=config.recompute,
            lora=config.lora,
            vision_piece=config.parallel.vision_piece,
            timeout=config.train.timeout,
        )
        on_every_rank(lambda: load_weights(engine.parts, self.spec, config.model))
        engine.prepare(config.optimizer, config.freeze, config.parallel)
        return engine

    def _position(self, resume: Path | None, index: SampleIndex) -> Position:
        """In the stream of packs, from where the run goes on."""
        if resume is not None:
            on_every_rank(lambda: check_resumed(resume, self.spec, self.config.lora))
        state = None if resume is None else on_first_rank(lambda: checkpoints.loader_state(resume))
        if state is None:
            return Position()
        train = self.config.train
        same = (state, index, self.config.loader, train.pack_length, train.seed)
        on_every_rank(lambda: check_position(*same))
        return Position(*(int(state[name]) for name in ("step", "epoch", "pack")))

    def _resume(self, checkpoint: Path) -> int:
        """Take up a checkpoint's state; returns the number of its step."""
        engine, config = self.engine, self.config
        base = config.model if config.lora.rank else None
        extra = checkpoints.load(checkpoint, engine.parts, engine.optimizer, base)
        self.engine.guard.recent.extend(extra.get("norms", ()))
        best = extra.get("best")
        if best and is_dir(checkpoint.parent / name_of(best["step"])):
            self.best = best
            if self.config.checkpoint.keep_best and best.get("data") not in (None, self.held_out):
                # Any loss is lower; until there is one, the checkpoint stays.
                self.best = {"step": best["step"], "loss": math.inf, "data": self.held_out}
                if dist.get_rank() == 0:
                    say(
                        f"step {best['step']}, the best so far, was measured on other held-out "
                        "data: --checkpoint.keep_best begins anew"
                    )
        return extra["step"]

    def _count_steps(self, made: int) -> int:
        """Of the whole run, of which so many are made."""
        train = self.config.train
        total = train.steps or self.loader.steps_for_epochs(train.epochs)
        if not total:
            raise shared_error(
                f"--train.epochs {train.epochs:g} of this data hold no sample, so there is no step "
                "to make; raise it, or the weights in --data, or set --train.steps"
            )
        if made > total:
            option = "steps" if train.steps else "epochs"
            raise shared_error(
                f"--train.{option} {getattr(train, option):g} ends after step {total}, and the "
                f"checkpoint to go on from is of step {made}: raise it, or name an earlier "
                "checkpoint by --checkpoint.resume"
            )
        return total

    def _offload(self, step: int) -> None:
        """Move optimizer state between device and host where the schedule says so. No value
        changes."""
        fraction = offload_fraction(self.config.optimizer, step)
        if fraction == self.offloaded:
            return
        offload(self.engine.optimizer, fraction, early=True)
        self.offloaded = fraction
        if dist.get_rank() == 0:
            say(f"step {step + 1}: {fraction:.0%} of the optimizer is offloaded")

    def _judge(self, step: int, packs: list[PackedBatch], result: StepResult) -> None:
        """What a step whose update was withheld, or whose loss is no number, means."""
        train, withheld = self.config.train, self.engine.guard.withheld
        if not withheld and math.isfinite(result.loss):
            return
        spike = examine(self.engine, packs, step, withheld or f"the loss is {result.loss}")
        self.spikes += 1
        if dist.get_rank() == 0:
            spike.write(self.config.output)
        if train.on_spike == "stop" or not withheld:
            raise shared_error(
                f"{spike.describe()}; look at these samples, lower --optimizer.lr, or leave out "
                "such updates with --train.on_spike skip"
            )
        if dist.get_rank() == 0:
            say(f"{spike.describe()}; no update was made")

    def _due(self, every: int | Literal["epoch"], step: int, new_epoch: bool) -> bool:
        if every == "epoch":
            return new_epoch or step == self.total
        return step == self.total or (every > 0 and step % every == 0)

    def _evaluate(self, step: int, new_epoch: bool) -> dict[str, float]:
        """The held-out loss where one is due after `step`."""
        if self.measure is None or not self._due(self.config.evaluate.every, step, new_epoch):
            return {}
        score = self.measure()
        return {
            "heldout_loss": score.loss,
            "heldout_perplexity": score.perplexity,
            "heldout_samples": score.samples,
            "heldout_seconds": score.seconds,
        }

    def _is_best(self, step: int, heldout: dict[str, float]) -> bool:
        """Whether `--checkpoint.keep_best` asks for a checkpoint of this evaluation."""
        loss = heldout.get("heldout_loss", math.inf)
        lowest = math.inf if self.best is None else self.best["loss"]
        if not self.config.checkpoint.keep_best or not loss < lowest:
            return False
        self.best = {"step": step, "loss": loss, "data": self.held_out}
        return True

    def _save(self, step: int) -> None:
        self.engine.gather_weights()
        extra = {
            "loader": self.loader.state_dict(),
            "config": to_dict(self.config),
            "best": self.best,
            "norms": list(self.engine.guard.recent),
        }
        export = self._export if self.config.checkpoint.hf else None
        self.saver.start(step, self.engine.parts, self.engine.optimizer, extra, export)


def _check_output(config: TrainConfig, lock: FolderLock) -> None:
    output = config.output
    if exists(output) and not is_dir(output):
        raise UserError(f"--output {output} is a file; name a folder")
    with writing(f"--output {output}"):
        output.mkdir(parents=True, exist_ok=True)
    lock.acquire()  # a file in it
    used = [n for n in ("metrics.jsonl", "checkpoints", "hf") if exists(output / n)]
    if used and config.checkpoint.resume == "none":
        raise UserError(
            f"--output {output} already holds a run ({used[0]}); continue it with "
            "--checkpoint.resume latest, or name another folder"
        )
