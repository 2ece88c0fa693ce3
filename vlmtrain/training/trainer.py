"""`vlmtrain train`: from a Hugging Face folder and conversations to a Hugging Face folder."""

from __future__ import annotations

import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vlmtrain.core import device
from vlmtrain.core.collectives import on_every_rank, on_first_rank, shared_error
from vlmtrain.core.config import TrainConfig, to_dict
from vlmtrain.core.errors import UserError
from vlmtrain.core.launch import Process, connect
from vlmtrain.core.layout import Layout
from vlmtrain.core.lock import FolderLock
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.family import read_spec
from vlmtrain.models.lora import check_section
from vlmtrain.parallel.layout import make_layout
from vlmtrain.parallel.overlap import check_tensor_overlap, prepare_tensor_overlap
from vlmtrain.telemetry.metrics import check_wandb


def run(config: TrainConfig, process: Process) -> None:
    """Train as `config` says, as one of `process.world_size` processes.

    Raises:
        UserError: bad input; raised on every rank, marked so that only rank 0 prints it.
    """
    spec, layout = check(config, process.world_size)
    prepare_tensor_overlap(config.parallel, os.environ)
    backend = device.setup(process.local_rank)
    if backend.is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = config.train.precision == "bf16"
    connect(process, backend.process_group)
    lock = FolderLock(config.output)
    try:
        _train(config, spec, layout, backend, lock)
    finally:
        lock.release()
        # After a failure the other ranks may be anywhere: a barrier would wait for them.
        if process.world_size == 1 or sys.exc_info()[0] is None:
            dist.barrier()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def check(config: TrainConfig, world_size: int) -> tuple[ModelSpec, Layout]:
    """Everything that can be refused before a process group exists."""
    spec = read_spec(config.model)
    check_wandb(config.train.wandb)
    if config.lora.rank:
        check_section(config.lora, spec)
    parallel, train = config.parallel, config.train
    check_tensor_overlap(parallel, os.environ)
    replicas = max(1, world_size // max(1, parallel.tensor * parallel.pipeline))
    layout = make_layout(
        spec,
        world_size=world_size,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        sequence=parallel.sequence,
        vision_layers=parallel.vision_layers,
        text_layers=parallel.text_layers,
        multiplexed=parallel.vision == "multiplexed",
        microbatches=train.global_batch // replicas,
        pack_length=train.pack_length,
    )
    if train.global_batch % layout.data:
        low = train.global_batch - train.global_batch % layout.data
        raise UserError(
            f"--train.global_batch {train.global_batch} packs can't be divided over {layout.data} "
            f"data-parallel ranks; use {low + layout.data}"
        )
    return spec, layout


def _train(
    config: TrainConfig, spec: ModelSpec, layout: Layout, backend: device.Backend, lock: FolderLock
) -> None:
    from vlmtrain.checkpoint.hf.adapters import merged, save_adapters
    from vlmtrain.checkpoint.hf.load import load_weights
    from vlmtrain.checkpoint.hf.save import save_weights
    from vlmtrain.checkpoint.training import checkpoint as checkpoints
    from vlmtrain.checkpoint.weights import check_weights
    from vlmtrain.data.collective_errors import across_ranks
    from vlmtrain.data.formats.sources import parse_sources
    from vlmtrain.data.index import SampleIndex, scan_sources
    from vlmtrain.data.loader import PackedLoader
    from vlmtrain.data.processor import Processor
    from vlmtrain.plan.detect import find_machine
    from vlmtrain.telemetry import drift
    from vlmtrain.telemetry.ledger import Ledger
    from vlmtrain.telemetry.metrics import Metrics
    from vlmtrain.training import evaluation
    from vlmtrain.training.engine import Engine
    from vlmtrain.training.optimizer import learning_rate, offload_fraction

    rank = dist.get_rank()
    train = config.train
    folder = config.output / "checkpoints"
    data = config.loader
    processor = Processor.from_folder(config.model, spec, template=data.template or None)
    template = processor.template.template if data.template else None  # goes where the model goes

    def prepare() -> tuple[SampleIndex, SampleIndex | None, Path | None]:
        _check_output(config, lock)
        resume = checkpoints.find(folder, config.checkpoint.resume)
        check_weights(config.model, spec)
        sources = parse_sources(
            config.data, max_samples=data.max_samples, media_root=data.media_root
        )
        index = scan_sources(
            sources,
            processor,
            spec,
            train.pack_length,
            verify=data.verify,
            skip_limit=data.skip_limit if data.unreadable == "skip" else 0,
            log=partial(print, flush=True),
        )
        apart = None
        if config.evaluate.data:
            held = config.evaluate.data
            apart = evaluation.scan(held, data, processor, spec, train.pack_length)
            print(f"held out: {len(apart):,} samples of {held}", flush=True)
        return index, apart, resume

    # One rank reads and judges all input; the others hear its verdict instead of a hang.
    index, apart, resume = on_first_rank(prepare)
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    engine = Engine(
        spec,
        layout,
        backend,
        dtype=dtype,
        seed=train.seed,
        recompute=config.recompute,
        lora=config.lora,
    )
    on_every_rank(lambda: load_weights(engine.parts, spec, config.model))
    engine.prepare(
        config.optimizer,
        config.freeze,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    loader = PackedLoader(
        index,
        processor,
        spec,
        pack_length=train.pack_length,
        global_batch=train.global_batch,
        dp_rank=engine.data_rank,
        dp_size=layout.data,
        seed=train.seed,
        packing=data.packing,
        need_pixels=engine.needs_pixels,
        pixel_share=engine.pixel_share,
        pixel_dtype=dtype,
        workers=data.workers or 2,
        isolate=data.workers > 0,
        pin_memory=backend.is_cuda,
        unreadable=data.unreadable,
        skip_limit=data.skip_limit,
        agree=across_ranks("cpu") if dist.get_world_size() > 1 else None,
        log=partial(print, flush=True) if rank == 0 else None,
    )
    held_out = None
    if apart is not None:
        held_out = evaluation.HeldOut(
            apart,
            processor,
            data,
            pack_length=train.pack_length,
            global_batch=train.global_batch,
            log=partial(print, flush=True) if rank == 0 else None,
        )
    done = 0
    if resume is not None:
        extra = checkpoints.load(resume, engine.parts, engine.optimizer)
        on_every_rank(lambda: loader.load_state_dict(extra["loader"]))
        alpha = extra.get("config", {}).get("lora", {}).get("alpha", config.lora.alpha)
        if config.lora.rank and alpha != config.lora.alpha:
            raise shared_error(
                f"{resume} was trained with --lora.alpha {alpha:g}, and alpha / rank is a factor "
                f"of its weights; it is now {config.lora.alpha:g}: restore it"
            )
        done = extra["step"]
    total = train.steps or loader.steps_for_epochs(train.epochs)
    if not total:
        raise shared_error(
            f"--train.epochs {train.epochs:g} of this data hold no sample, so there is no step to "
            "make; raise it, or the weights in --data, or set --train.steps"
        )
    gpu, peak = find_machine(backend, dtype)
    ledger = Ledger(spec, layout, peak, config.freeze, config.lora, config.recompute)
    metrics = None
    if rank == 0:
        config.output.mkdir(parents=True, exist_ok=True)
        if resume is not None:
            checkpoints.go_on_from(resume)
        _describe(config, spec, layout, index, loader, total, done, resume)
        follow = drift.Follow(config, spec, layout, gpu, peak, index)
        metrics = Metrics(
            config.output,
            done,
            total,
            train.log_every,
            wandb=train.wandb,
            facts=follow.facts(),
        )

    saver = checkpoints.Saver(
        folder,
        config.model,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        template=template,
    )

    def save(step: int) -> None:
        engine.gather_weights()
        extra = {"loader": loader.state_dict(), "config": to_dict(config)}
        saver.start(step, engine.parts, engine.optimizer, extra)

    reached = done
    with checkpoints.StopRequest() as stop:
        start = time.perf_counter()
        for step in range(done, total):
            before = time.perf_counter()
            packs = loader.next_step()
            waited = time.perf_counter() - before
            lr = learning_rate(config.optimizer, step, total)
            fraction = offload_fraction(config.optimizer, step)
            if engine.set_offload_fraction(fraction) and rank == 0:
                print(f"step {step + 1}: {fraction:.0%} of the optimizer is offloaded", flush=True)
            result = engine.step(packs, lr, waited)
            if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
                raise shared_error(
                    f"step {step + 1}: loss is {result.loss}, gradient norm {result.grad_norm}; "
                    "lower --optimizer.lr, or look at the samples of this step"
                )
            held: dict[str, float] = {}
            every = config.evaluate.every or total
            if held_out is not None and ((step + 1) % every == 0 or step + 1 == total):
                score = held_out.measure(engine)
                held = {
                    "heldout_loss": score.loss,
                    "heldout_perplexity": score.perplexity,
                    "heldout_seconds": score.seconds,
                }
            saving = time.perf_counter()
            reached = step + 1
            due = config.checkpoint.every and reached % config.checkpoint.every == 0
            stopped = saver.poll(stop.asked)
            if due or stopped or reached == total:
                save(reached)
            # What is left of this round, the record itself, counts as `other` of the next step.
            end = time.perf_counter()
            seconds, start = end - start, end
            if metrics is not None:
                evaluating = held.get("heldout_seconds", 0.0)
                row = ledger.row(result, seconds, end - saving, evaluating)
                metrics.step(
                    reached,
                    result,
                    lr,
                    seconds,
                    data_seconds=waited,
                    epoch=loader.epoch,
                    **row,
                    **loader.metrics,
                    **follow.step(reached, result, seconds, row),
                    **held,
                )
            if stopped:
                break
        saver.finish()
    loader.close()
    if reached < total:
        if metrics is not None:
            metrics.close()
            print(
                f"stopped by SIGTERM after step {reached}, checkpoint saved; go on with "
                "--checkpoint.resume latest",
                flush=True,
            )
        return
    engine.gather_weights()
    with merged(engine.exported):
        save_weights(engine.exported, spec, config.model, config.output / "hf", template)
    if config.lora.rank:
        save_adapters(engine.exported, config.lora, config.model, config.output / "adapter")
    if metrics is not None:
        metrics.write_facts(**follow.facts())
        metrics.close()
        print(f"Hugging Face folder: {config.output / 'hf'}", flush=True)


def _check_output(config: TrainConfig, lock: FolderLock) -> None:
    output = config.output
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output {output} can't be written: {error.strerror}") from error
    lock.acquire()
    used = [n for n in ("metrics.jsonl", "checkpoints", "hf") if (output / n).exists()]
    if used and config.checkpoint.resume == "none":
        raise UserError(
            f"--output {output} already holds a run ({used[0]}); continue it with "
            "--checkpoint.resume latest, or name another folder"
        )


def _describe(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    index: Any,
    loader: Any,
    total: int,
    done: int,
    resume: Path | None,
) -> None:
    train = config.train
    print(
        f"{spec.family}: {spec.num_layers} language layers of width {spec.hidden_size}, "
        f"{spec.vision.depth} vision layers of width {spec.vision.hidden_size}; {train.precision}\n"
        f"{dist.get_world_size()} processes: {layout.describe()}\n"
        f"{len(index):,} samples, {int(index.lengths.sum()):,} tokens "
        f"({int(index.image_tokens.sum()):,} image, {int(index.target_tokens.sum()):,} target); "
        f"{train.global_batch} packs of {train.pack_length:,} tokens a step, "
        f"{train.global_batch // layout.data} per replica; {loader.steps_per_epoch} steps an "
        f"epoch, {total} in all"
        + (f"\nresumed from {resume} at step {done}" if resume is not None else ""),
        flush=True,
    )
    if os.environ.get("OMP_NUM_THREADS") is None and dist.get_world_size() > 1:
        print("OMP_NUM_THREADS is not set: processes may compete for cores", flush=True)
