"""`vlmtrain plan`: ranks the layouts of a model on some GPUs and writes the best one's recipe."""

from __future__ import annotations

import dataclasses
import json
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from vlmtrain.core.config import (
    FreezeSection,
    LoaderSection,
    LoraSection,
    MediaSection,
    RecomputeSection,
    TrainConfig,
    TrainSection,
    check_ranges,
)
from vlmtrain.core.errors import shown
from vlmtrain.core.files import write_text, writing
from vlmtrain.core.options import spelled
from vlmtrain.core.run_folder import model_of
from vlmtrain.core.spec import ModelSpec
from vlmtrain.core.toml import toml_tables, toml_value
from vlmtrain.models import flops
from vlmtrain.models.family import family_of, read_spec
from vlmtrain.models.lora_costs import check_lora
from vlmtrain.plan import picture, workload
from vlmtrain.plan.costs import CostModel
from vlmtrain.plan.hardware import PlanError, find_gpu
from vlmtrain.plan.search import Plan, Prediction, search

if TYPE_CHECKING:
    from vlmtrain.data.index import SampleIndex

NOTHING_FROZEN, NO_ADAPTERS = FreezeSection(), LoraSection()
USUAL_LOADER, MODEL_SIZES = LoaderSection(), MediaSection()
Tables = dict[str, dict[str, Any]]  # sections of a recipe


def main(arguments: list[str]) -> int:
    arguments = spelled(arguments, plan, {"global_batch": "global_batch_packs"})
    warnings.filterwarnings("ignore")
    return tyro.cli(plan, prog="vlmtrain plan", args=arguments, use_underscores=True)


def plan(
    model: Path,
    gpus: int,
    gpu: str,
    data: str | None = None,
    length_histogram: Path | None = None,
    output: Path = Path("plan_out"),
    pack_length: int = 8192,
    global_batch_packs: int | None = None,
    freeze: FreezeSection = NOTHING_FROZEN,
    lora: LoraSection = NO_ADAPTERS,
    loader: LoaderSection = USUAL_LOADER,
    media: MediaSection = MODEL_SIZES,
) -> int:
    """Find the fastest layout that fits, before any machine is rented.

    Args:
        model: Hugging Face folder; config.json is enough.
        gpus: how many GPUs.
        gpu: a100-80, h100, h200, b200, or a TOML file that describes another kind.
        data: conversation files or shard folders, comma-separated: their lengths are used.
        length_histogram: JSON file of lengths instead; without both, a typical mix.
        output: folder to write plan.toml, plan.json, plan.png and trace.json to.
        pack_length: tokens that a pack holds at most.
        global_batch_packs: packs per optimizer step; default: 2 per GPU, doubled or halved until it
            is from 64 to 4,096, as far as it divides.
        freeze: parts of the model that keep their weights.
        lora: low-rank adapters; everything else is frozen then.
        loader: how `--data` is read and packed, as in training.
        media: sizes of the images and videos of `--data`, as in training.

    Raises:
        UserError: impossible sizes, unreadable files, an unknown GPU, or a model that doesn't fit.
    """
    if gpus < 1:
        raise PlanError(f"--gpus is {gpus}; it must be at least 1")
    if pack_length < 1:
        raise PlanError(f"--pack_length is {pack_length}; it must be at least 1")
    if data and length_histogram:
        raise PlanError("--data and --length_histogram both give lengths; pass one of them")
    check_ranges(loader, "--loader.")
    check_ranges(media, "--media.")
    reading = {"loader": _changed(loader), "media": _changed(media)}
    if not data and (name := next((f"{s}.{o}" for s in reading for o in reading[s]), None)):
        raise PlanError(f"--{name} says how --data is read; pass --data too")
    kind = find_gpu(gpu)
    model = model_of(model)
    spec = read_spec(model)
    check_lora(lora, freeze, spec)
    index = None
    if data:
        index = workload.read_index(data, model, spec, pack_length, loader, media)
        lengths = workload.from_index(index, data)
    elif length_histogram is not None:
        lengths = workload.read_histogram(length_histogram, spec)
    else:
        lengths = workload.typical(spec, pack_length)
    packs = workload.make_packs(lengths, spec, pack_length, loader.packing)
    ranking = search(spec, kind, gpus, packs, global_batch_packs, freeze=freeze, lora=lora)
    title = model_title(spec)
    print(render(ranking, title))
    if index is not None:
        print(fullest_step(ranking, index, loader))
    for path in write(ranking, output, model, data, reading, title):
        print(path)
    return 0


def model_title(spec: ModelSpec) -> str:
    """Family and number of parameters, of a mixture of experts those that a token meets too."""
    family = family_of(spec).title
    billions = sum(flops.parameter_counts(spec).values()) / 1e9
    active = f", {flops.active_parameters(spec) / 1e9:.1f}B active" if spec.num_experts else ""
    return f"{family} ({billions:.1f}B{active})" if billions >= 0.1 else family


def best_five(ranking: Plan) -> list[Prediction]:
    """The first five that differ in more than details."""
    seen, distinct = set(), []
    for prediction in ranking.ranked:
        option = prediction.option
        layout = option.layout
        key = (layout.tensor, layout.pipeline, option.multiplexed)
        if key not in seen:
            seen.add(key)
            distinct.append(prediction)
    return distinct[:5]


def compact(layers: tuple[int, ...]) -> str:
    """[3, 3, 3, 1] as 3x3 1."""
    runs: list[list[int]] = []
    for n in layers:
        if runs and runs[-1][0] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    return " ".join(str(n) if count == 1 else f"{n}x{count}" for n, count in runs)


def render(ranking: Plan, title: str) -> str:
    """The answer for people."""
    packs, gpu = ranking.packs, ranking.gpu
    lines = [
        f"{title} on {ranking.gpus:,} x {gpu.name}: {ranking.considered:,} layouts considered, "
        f"{ranking.fitting:,} fit",
        f"data: {packs.origin}; packs of up to {packs.pack_length:,} tokens, {packs.fill:.1%} full,"
        f" {packs.image_share:.0%} image tokens; {ranking.global_batch:,} packs a step",
        "efficiency of matrix work: language "
        f"{gpu.efficiency.language:.0%}, vision {gpu.efficiency.vision:.0%} of peak "
        f"({'measured' if gpu.measured else 'assumed; feed measured ones back in a GPU file'})",
        *(
            ["experts: multiplied one after another, taken to be as efficient as other products"]
            if ranking.spec.num_experts
            else []
        ),
        "",
        "    step s   tok/s/GPU   MFU    ±   bubble  imbalance  comm.   GB/GPU     layout",
    ]
    for number, p in enumerate(best_five(ranking), 1):
        low, high = (f(r.total for r in p.memory) / 1e9 for f in (min, max))
        imbalance = (1 + p.stage_imbalance) * (1 + p.data_imbalance) - 1
        mark = "*" if p is ranking.best else " "
        lines.append(
            f"{number}{mark} {p.step_seconds:8.2f}  {p.tokens_per_second_per_gpu:9,.0f}  "
            f"{p.mfu:6.1%} {p.uncertainty:4.0%}  {p.bubble:6.1%}    {imbalance:6.1%}  "
            f"{p.communication:6.1%}  {low:4.0f}-{high:<4.0f}  {picture.describe(p.option)}"
        )
        layout = p.option.layout
        vision = "on every rank" if p.option.multiplexed else compact(layout.vision_layers)
        lines.append(f"     vision layers {vision}; text layers {compact(layout.text_layers)}")
        lines.append(f"     GB per pipeline rank: {_memory(p)}")
    lines += ["", "* is the fastest: it is what plan.toml says."]
    return "\n".join(lines)


def fullest_step(ranking: Plan, index: SampleIndex, loader: LoaderSection) -> str:
    """The step of the first epoch that needs most memory in the best layout, and its samples."""
    from vlmtrain.data.packing.sampler import Position, Sampler
    from vlmtrain.plan.heaviest import Loads, fullest

    option, spec = ranking.best.option, ranking.spec
    batch = ranking.global_batch
    train = TrainSection(pack_length=ranking.packs.pack_length, global_batch_packs=batch)
    config = TrainConfig(Path(), "", Path(), train=train, freeze=ranking.freeze, lora=ranking.lora)
    again = (option.recompute_vision, option.recompute_text)
    config.recompute = RecomputeSection(*again)  # type: ignore[arg-type]
    config.optimizer.offload_fraction = option.offload
    sampler = Sampler(
        index,
        spec,
        loader.packing,
        pack_length=train.pack_length,
        global_batch=train.global_batch_packs,
        seed=train.seed,
        ranks=option.layout.data,
    )
    steps = sampler.steps(Position(), max(1, sampler.steps_per_epoch))
    loads = Loads.of(steps, index)
    peak = fullest(config, spec, option.layout, loads, True, ranking.gpu.step_memory)
    return (
        f"Fullest in the first epoch of seed {train.seed}: step {peak.step} of "
        f"{len(loads.places)}, {peak.bytes / 1e9:.0f} GB on pipeline rank {peak.stage}, by "
        f"{shown(peak.ids(sampler, loads))}"
    )


def _memory(p: Prediction) -> str:
    totals = [rank.total / 1e9 for rank in p.memory]
    if len(totals) <= 16:
        return " ".join(f"{t:.0f}" for t in totals)
    return f"{totals[0]:.0f} (first) ... {totals[-1]:.0f} (last), most {max(totals):.0f}"


# --- files ------------------------------------------------------------------------------------


def write(
    ranking: Plan, output: Path, model: Path, data: str | None, reading: Tables, title: str
) -> list[Path]:
    """Write the recipe of the best layout, the figures, the picture and the trace.

    Args:
        reading: sections of the recipe that say how `data` is read.

    Returns:
        The files written.

    Raises:
        PlanError: the folder can't be written.
    """
    costs = CostModel(ranking.spec, ranking.gpu, ranking.packs, ranking.freeze, ranking.lora)
    recipe_path, figures = output / "plan.toml", output / "plan.json"
    with writing(f"--output {output}", raises=PlanError):
        output.mkdir(parents=True, exist_ok=True)
        write_text(
            recipe_path, to_toml(ranking, ranking.best, recipe_path, model, data, reading, title)
        )
        write_text(figures, json.dumps(to_json(ranking), indent=1) + "\n")
        drawn = picture.draw(output / "plan.png", ranking, ranking.best, costs, title)
        trace = picture.write_trace(output / "trace.json", ranking.best, costs)
    return [recipe_path, figures, drawn, trace]


def to_toml(
    ranking: Plan,
    p: Prediction,
    path: Path,
    model: Path,
    data: str | None,
    reading: Tables,
    title: str,
) -> str:
    """The recipe that `vlmtrain train --config` reads from `path`."""
    gpus, nodes = ranking.gpus, -(-ranking.gpus // ranking.gpu.gpus_per_node)
    here = f"train --config {shlex.quote(str(path))}"
    if nodes == 1:
        start = f"vlmtrain {here} --nproc {gpus}"
    else:
        even = gpus % nodes == 0 and gpus // nodes % p.option.layout.tensor == 0
        each = f"{gpus // nodes}" if even else f"GPUS_OF_THE_NODE ({gpus} in all)"
        start = f"torchrun --nnodes {nodes} --nproc-per-node {each} ... -m vlmtrain.cli {here}"
    lines = [
        f"# {title} on {ranking.gpus} x {ranking.gpu.name}, by vlmtrain plan.",
        f"# Expected: step {p.step_seconds:.2f} s (± {p.uncertainty:.0%}), "
        f"{p.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, causal MFU {p.mfu:.1%}, "
        f"up to {p.peak_bytes / 1e9:.0f} GB per GPU.",
        f"# Start, where vlmtrain plan was: {start}"
        + ("" if data else " --data FILE")
        + " --output FOLDER",
        f"model = {toml_value(str(model))}",
    ]
    if data:
        lines.append(f"data = {toml_value(data)}")
    tables = {**recipe(ranking, p), **{name: said for name, said in reading.items() if said}}
    return "\n".join(lines) + "\n" + toml_tables(tables)


def _changed(section: LoaderSection | MediaSection) -> dict[str, Any]:
    """The options of a section that are not the usual ones."""
    usual = dataclasses.asdict(type(section)())
    return {k: v for k, v in dataclasses.asdict(section).items() if v != usual[k]}


def recipe(ranking: Plan, p: Prediction) -> Tables:
    """The sections of the recipe; recomputation and offload only where they are used."""
    option, layout = p.option, p.option.layout
    parallel: dict[str, Any] = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "virtual_pipeline": layout.virtual_pipeline,
        "sequence": layout.sequence,
        "vision": "multiplexed" if option.multiplexed else "pipelined",
        "text_layers": layout.text_layers,
    }
    if layout.expert > 1:
        parallel["expert"] = layout.expert
    if not option.multiplexed:
        parallel["vision_layers"] = layout.vision_layers
    tables: Tables = {
        "train": {
            "pack_length": ranking.packs.pack_length,
            "global_batch_packs": ranking.global_batch,
            "precision": "bf16",
        },
        "parallel": parallel,
    }
    if option.recomputes:
        tables["recompute"] = {
            "vision": option.recompute_vision,
            "language": option.recompute_text,
        }
    frozen = {name: True for name, still in dataclasses.asdict(ranking.freeze).items() if still}
    if frozen:
        tables["freeze"] = frozen
    if ranking.lora.rank:
        tables["lora"] = dataclasses.asdict(ranking.lora)
    if option.offload:
        tables["optimizer"] = {"offload_fraction": option.offload}
    return tables


def to_json(ranking: Plan) -> dict[str, Any]:
    """Figures for programs; a run compares itself with them."""

    def row(p: Prediction) -> dict[str, Any]:
        option = dataclasses.asdict(p.option)
        figures = {
            f.name: getattr(p, f.name)
            for f in dataclasses.fields(p)
            if f.name not in ("option", "memory")
        }
        memory = [{**dataclasses.asdict(rank), "total": rank.total} for rank in p.memory]
        return {
            **figures,
            **option,
            "memory_bytes": memory,
            "waterfall_seconds": p.waterfall(),
        }

    return {
        "gpu": dataclasses.asdict(ranking.gpu),
        "gpus": ranking.gpus,
        "global_batch": ranking.global_batch,
        "pack_length": ranking.packs.pack_length,
        "data": ranking.packs.origin,
        "fill": ranking.packs.fill,
        "image_share": ranking.packs.image_share,
        "best": [row(p) for p in best_five(ranking)],
    }
