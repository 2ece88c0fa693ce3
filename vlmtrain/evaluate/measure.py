"""Held-out loss on any layout, and answers to questions, scored."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vlmtrain.checkpoint.model_folder import as_hf, described, needs_merging, newest
from vlmtrain.core import device
from vlmtrain.core.collectives import long_on_every_rank, on_every_rank, on_first_rank
from vlmtrain.core.files import write_text, writing
from vlmtrain.core.launch import Process, connect
from vlmtrain.core.layout import Layout
from vlmtrain.core.progress import progress
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import SampleIndex, scan_data
from vlmtrain.evaluate.config import EvaluateConfig
from vlmtrain.evaluate.tasks import Scored, Task, read_tasks, summary
from vlmtrain.models.family import read_spec
from vlmtrain.training.evaluation import HeldOutScore, measure
from vlmtrain.training.setup import run_layout, say

SCORES, ANSWERS = "scores.json", "answers.jsonl"


def run(config: EvaluateConfig, process: Process) -> None:
    """Measure as one of `process.world_size` processes; rank 0 prints and writes the results.

    Raises:
        UserError: bad input; raised on every rank, marked so that only rank 0 prints it.
    """
    spec = read_spec(described(config.model))
    layout = run_layout(
        spec,
        config.parallel,
        process.world_size,
        global_batch=config.global_batch_packs,
        option="--global_batch_packs",
    )
    backend = device.setup(process.local_rank)
    connect(process, backend.process_group)
    try:
        on_first_rank(lambda: _make_output(config.output))
        # A run that trains on may have another newest checkpoint a moment later.
        model = Path(on_first_rank(lambda: str(newest(config.model))))
        results: dict[str, Any] = {"model": str(model)}
        scored: list[Scored] = []
        with ExitStack() as stack:
            # transformers loads Hugging Face folders; Megatron both kinds, without adapters.
            readable = model
            if config.tasks is not None or needs_merging(model):
                readable = stack.enter_context(_converted(model, config.output))
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


def _make_output(output: Path) -> None:
    with writing(f"--output {output}"):
        output.mkdir(parents=True, exist_ok=True)


@contextmanager
def _converted(model: Path, output: Path) -> Iterator[Path]:
    """The model as a Hugging Face folder, converted by rank 0 where it is none: into the output
    folder, which all ranks see."""
    with ExitStack() as stack:
        folder = on_first_rank(lambda: str(stack.enter_context(as_hf(model, output))))
        yield Path(folder)
        dist.barrier()  # nobody reads any more


def _held_out(
    config: EvaluateConfig, spec: ModelSpec, layout: Layout, backend: device.Backend, source: Path
) -> HeldOutScore:
    from megatron.core import parallel_state

    from vlmtrain.checkpoint.load import load_weights
    from vlmtrain.checkpoint.weights import check_weights
    from vlmtrain.data.media.limits import describe_sizes
    from vlmtrain.data.processor import Processor
    from vlmtrain.training.engine import Engine

    processor = on_every_rank(
        lambda: Processor.from_folder(
            source,
            spec,
            section=config.media,
            pack_length=config.pack_length,
            template=config.loader.template or None,
            system=config.loader.system,
        )
    )

    def prepare() -> SampleIndex:
        check_weights(source, spec)
        if processor.differs[0]:
            say(describe_sizes(processor.images, processor.videos))
        return scan_data(config.data, config.loader, processor, config.pack_length, say)

    index = on_first_rank(prepare)
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if backend.is_cuda else "fp32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    piece = config.parallel.vision_piece
    engine = Engine(spec, layout, backend, dtype=dtype, vision_piece=piece)
    on_every_rank(lambda: load_weights(engine.parts, spec, source))
    engine.prepare_evaluation()
    score = measure(
        engine,
        index,
        processor,
        config.loader,
        pack_length=config.pack_length,
        global_batch=config.global_batch_packs or layout.data * layout.pipeline,
    )
    parallel_state.destroy_model_parallel()
    return score


def _ask(config: EvaluateConfig, path: Path, folder: Path) -> list[Scored]:
    """Every task's answer, in file order; the questions are dealt to the ranks in turn."""
    from vlmtrain.generate.model import Answerer, Sampling

    rank, size = dist.get_rank(), dist.get_world_size()
    tasks: list[Task] = on_first_rank(lambda: read_tasks(path, config.loader))
    sampling = Sampling(max_new_tokens=config.max_new_tokens)

    def ready() -> Answerer:
        answerer = Answerer(
            folder,
            precision=config.precision,
            kernels=config.kernels,
            section=config.media,
            template=config.loader.template or None,
            system=config.loader.system,
        )
        for task in tasks[rank::size]:
            answerer.check(task.sample)
        return answerer

    def ask(check: Callable[[], None]) -> list[str]:
        answers = []
        with progress("evaluate", "questions", shown=rank == 0) as update:
            for number in range(rank, len(tasks), size):
                check()
                update(number, len(tasks))
                answers.append(answerer.answer(tasks[number].sample, sampling).text)
        return answers

    answerer = on_every_rank(ready)
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, long_on_every_rank(ask))
    answers: dict[int, str] = {
        number: answer
        for r, part in enumerate(parts)
        for number, answer in zip(range(r, len(tasks), size), part, strict=True)
    }
    return [Scored(task, answers[number]) for number, task in enumerate(tasks)]


def _report(output: Path, results: dict[str, Any], scored: list[Scored]) -> None:
    """scores.json, answers.jsonl where questions were asked, and the table on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    with writing(f"--output {output}"):
        if scored:
            lines = (json.dumps(one.to_dict(), ensure_ascii=False) + "\n" for one in scored)
            write_text(output / ANSWERS, "".join(lines))
        else:  # those of an earlier run would be taken for this one's
            (output / ANSWERS).unlink(missing_ok=True)
        write_text(output / SCORES, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    table = Table(title=Text(results["model"]), title_justify="left")  # no markup in names
    for name in ("what", "measure", "number", "value"):
        table.add_column(name, justify="right" if name in ("number", "value") else "left")
    held_out = results.get("heldout")
    if held_out is not None:
        tokens = f"{held_out['target_tokens']:,} tokens"
        table.add_row("held-out conversations", "loss", tokens, f"{held_out['loss']:.4f}")
        table.add_row(
            "", "perplexity", f"{held_out['samples']:,} samples", f"{held_out['perplexity']:.4g}"
        )
    for row in results.get("tasks", []):
        questions = f"{row['questions']:,} questions"
        table.add_row(Text(row["task"]), row["metric"], questions, f"{row['score']:.4f}")
    Console().print(table)
    print(f"{output / SCORES}")
