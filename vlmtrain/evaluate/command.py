"""`vlmtrain evaluate`: held-out loss on any layout, and answers to questions, scored."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from vlmtrain.checkpoint.hf.from_checkpoint import as_hf, described, needs_merging, newest
from vlmtrain.core import device
from vlmtrain.core.collectives import on_every_rank, on_first_rank
from vlmtrain.core.config import LoaderSection, ParallelSection
from vlmtrain.core.errors import UserError
from vlmtrain.core.files import write_text
from vlmtrain.core.launch import Process, connect
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import SampleIndex
from vlmtrain.evaluate.tasks import Scored, Task, read_tasks, summary
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.training.evaluation import HeldOutScore

SCORES, ANSWERS = "scores.json", "answers.jsonl"


@dataclass
class EvaluateConfig:
    """Measure a model: --data gives loss and perplexity, --tasks scores; both may be given."""

    model: Path
    """Hugging Face folder, training checkpoint (also OUTPUT/checkpoints: the newest), or LoRA
    adapter folder."""
    tasks: Path | None = None
    """JSONL file of questions with right answers (docs/evaluation.md)."""
    data: str = ""
    """Held-out conversations, in all forms that training takes."""
    output: Path = Path("evaluate_out")
    """Folder for scores.json and answers.jsonl; those of an earlier run are replaced."""
    nproc: int = 0
    """Processes to start on this machine; 0: join the launcher's (torchrun, Slurm, MPI)."""
    pack_length: int = 8192
    """Tokens per pack; with --data."""
    global_batch: int = 0
    """Packs computed together; with --data. 0: as few as the layout needs."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on a GPU, fp32 on the CPU."""
    max_new_tokens: int = 512
    """Longest answer; with --tasks."""
    kernels: bool = True
    """With --tasks: attend with vlmkernels; --no_kernels: with transformers' own code."""
    parallel: ParallelSection = field(default_factory=ParallelSection)
    loader: LoaderSection = field(default_factory=LoaderSection)

    def validate(self) -> None:
        """Raise UserError for options that can't be used."""
        if self.tasks is None and not self.data:
            raise UserError("nothing to measure; pass --data, --tasks or both")
        for name, smallest in (
            ("nproc", 0),
            ("pack_length", 1),
            ("global_batch", 0),
            ("max_new_tokens", 1),
        ):
            if getattr(self, name) < smallest:
                raise UserError(
                    f"--{name} is {getattr(self, name)}; it must be at least {smallest}"
                )
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"--output {self.output} is a file; name a folder")


def run(config: EvaluateConfig, process: Process) -> None:
    """Measure as one of `process.world_size` processes; rank 0 prints and writes the results.

    Raises:
        UserError: bad input; raised on every rank, marked so that only rank 0 prints it.
    """
    spec = read_spec(described(config.model))
    layout = _layout(config, spec, process.world_size)
    backend = device.setup(process.local_rank)
    connect(process, backend.process_group)
    try:
        on_first_rank(lambda: _make_output(config.output))
        results: dict[str, Any] = {"model": str(config.model)}
        scored: list[Scored] = []
        with ExitStack() as stack:
            model = newest(config.model)
            # transformers loads Hugging Face folders; Megatron both kinds, without adapters.
            readable = model
            if config.tasks is not None or needs_merging(model):
                readable = stack.enter_context(_converted(config))
            if config.data:
                source = readable if needs_merging(model) else model
                score = _held_out(config, spec, layout, backend, source)
                results["heldout"] = score.to_dict()
            if config.tasks is not None:
                scored = _ask(config, config.tasks, readable)
                results["tasks"] = summary(scored)
        if dist.get_rank() == 0:
            _report(config.output, results, scored)
    finally:
        # After a failure the other ranks may be anywhere: a barrier would wait for them.
        if process.world_size == 1 or sys.exc_info()[0] is None:
            dist.barrier()
            dist.destroy_process_group()


def _layout(config: EvaluateConfig, spec: ModelSpec, world_size: int) -> Layout:
    parallel = config.parallel
    replicas = max(1, world_size // max(1, parallel.tensor * parallel.pipeline))
    microbatches = config.global_batch // replicas if config.global_batch else parallel.pipeline
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
        microbatches=microbatches,
        pack_length=config.pack_length,
    )
    if config.global_batch % layout.data:
        nearest = config.global_batch - config.global_batch % layout.data + layout.data
        raise UserError(
            f"--global_batch {config.global_batch} packs can't be divided over {layout.data} "
            f"data-parallel ranks; use {nearest}"
        )
    return layout


def _make_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in (SCORES, ANSWERS):
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} can't be written: {error.strerror}") from error


@contextmanager
def _converted(config: EvaluateConfig) -> Iterator[Path]:
    """The model as a Hugging Face folder, converted by rank 0 where it is none: into the output
    folder, which all ranks see."""
    with ExitStack() as stack:
        folder = on_first_rank(lambda: str(stack.enter_context(as_hf(config.model, config.output))))
        yield Path(folder)
        dist.barrier()  # nobody reads any more


def _held_out(
    config: EvaluateConfig, spec: ModelSpec, layout: Layout, backend: device.Backend, source: Path
) -> HeldOutScore:
    from megatron.core import parallel_state

    from vlmtrain.checkpoint.hf.load import load_weights
    from vlmtrain.checkpoint.weights import check_weights
    from vlmtrain.data.processor import Processor
    from vlmtrain.training.engine import Engine
    from vlmtrain.training.evaluation import HeldOut, scan

    processor = Processor.from_folder(source, spec, template=config.loader.template or None)
    say = partial(print, flush=True)

    def prepare() -> SampleIndex:
        check_weights(source, spec)
        return scan(config.data, config.loader, processor, spec, config.pack_length, say)

    index = on_first_rank(prepare)
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if backend.is_cuda else "fp32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine = Engine(spec, layout, backend, dtype=dtype)
    on_every_rank(lambda: load_weights(engine.parts, spec, source))
    engine.prepare_evaluation()
    held_out = HeldOut(
        index,
        processor,
        config.loader,
        pack_length=config.pack_length,
        global_batch=config.global_batch or layout.data * layout.pipeline,
        log=say if dist.get_rank() == 0 else None,
    )
    score = held_out.measure(engine)
    parallel_state.destroy_model_parallel()
    return score


def _ask(config: EvaluateConfig, path: Path, folder: Path) -> list[Scored]:
    """Every task's answer, in file order; the questions are dealt to the ranks in turn."""
    from rich.console import Console
    from rich.progress import track

    from vlmtrain.generate.model import Answerer, Sampling

    rank, size = dist.get_rank(), dist.get_world_size()
    tasks: list[Task] = on_first_rank(lambda: read_tasks(path))
    sampling = Sampling(max_new_tokens=config.max_new_tokens)
    console = Console(stderr=True)

    def work() -> list[Scored]:
        answerer = Answerer(folder, precision=config.precision, kernels=config.kernels)
        for task in tasks:
            answerer.check(task.sample)
        mine = track(
            tasks[rank::size],
            "questions",
            console=console,
            disable=rank > 0 or not console.is_terminal,
            transient=True,
        )
        return [Scored(task, answerer.answer(task.sample, sampling).text) for task in mine]

    mine = on_every_rank(work)
    every: list[Any] = [None] * size
    dist.all_gather_object(every, [one.answer for one in mine])
    answers: dict[int, str] = {
        number: answer
        for r, part in enumerate(every)
        for number, answer in zip(range(r, len(tasks), size), part, strict=True)
    }
    return [Scored(task, answers[number]) for number, task in enumerate(tasks)]


def _report(output: Path, results: dict[str, Any], scored: list[Scored]) -> None:
    """The table on the terminal, scores.json, and answers.jsonl where questions were asked."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=results["model"], title_justify="left")
    for name in ("what", "measure", "number", "value"):
        table.add_column(name, justify="right" if name in ("number", "value") else "left")
    held = results.get("heldout")
    if held is not None:
        tokens = f"{held['target_tokens']:,} tokens"
        table.add_row("held-out conversations", "loss", tokens, f"{held['loss']:.4f}")
        table.add_row("", "perplexity", f"{held['samples']:,} samples", f"{held['perplexity']:.4g}")
    for row in results.get("tasks", []):
        questions = f"{row['questions']:,} questions"
        table.add_row(row["task"], row["metric"], questions, f"{row['score']:.4f}")
    Console().print(table)
    try:
        if scored:
            lines = (json.dumps(one.to_dict(), ensure_ascii=False) + "\n" for one in scored)
            write_text(output / ANSWERS, "".join(lines))
        write_text(output / SCORES, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--output {output} can't be written: {error.strerror}") from error
    print(f"{output / SCORES}")
