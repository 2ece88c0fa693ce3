"""A plan's pipeline as a picture (PNG) and as a Chrome trace (for chrome://tracing or Perfetto)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlmtrain.plan import schedule
from vlmtrain.plan.costs import COMM_B, COMM_F, COMPUTE_B, COMPUTE_F, CostModel, Option
from vlmtrain.plan.search import Plan, Prediction, sample_packs, stage_times

_BOXES = 200  # pieces of work of one rank that are still told apart

INK, SOFT, LINE, EMPTY = "#1b1f24", "#626c77", "#c3cad3", "#dde2e8"
COLOURS = {
    "vision forward": "#ffc46b",
    "vision backward": "#e07b00",
    "text forward": "#8fc1f0",
    "text backward": "#1f6fc0",
    "gradients": "#b0529b",
    "optimizer": "#4b9a6a",
}
MEMORY = (
    ("states", "parameters, gradients, optimizer", "#3d4f66"),
    ("activations", "activations", "#6fa8dc"),
    ("transient", "short-lived", "#b7d3ee"),
    ("batch", "pixels and ids", "#ffc46b"),
)


@dataclass(frozen=True)
class Scene:
    """What is drawn: a simulated pipeline, of a few microbatches if the real ones are too many."""

    timeline: schedule.Timeline
    shown: int  # microbatches
    vision_share: tuple[tuple[float, float], ...]  # per stage, of its forward and backward time


def scene(model: CostModel, option: Option, *, boxes: int = _BOXES) -> Scene:
    """Play the option with packs drawn from the data."""
    layout = option.layout
    pipeline, virtual = layout.pipeline, layout.virtual_pipeline
    shown = option.microbatches
    if 2 * shown * virtual > boxes:
        shown = min(shown, max(2 * pipeline, boxes // (4 * virtual)))
    if virtual > 1:
        shown -= shown % pipeline
    forward, backward = stage_times(model, option, sample_packs(model, shown, 0))
    before, after = 0.0, 0.0
    if option.multiplexed:
        before, after = (t * shown / option.microbatches for t in model.multiplexed_seconds(option))
    timeline = schedule.simulate(
        forward,
        backward,
        pipeline,
        transfer=model.transfers(option),
        vision_forward=before,
        vision_backward=after,
        events=True,
    )
    whole = model.stage_costs(option) @ model.mean
    text = model.stage_costs(option, with_vision=False) @ model.mean
    shares = []
    for all_, only in zip(whole, text, strict=True):
        pairs = ((COMPUTE_F, COMM_F), (COMPUTE_B, COMM_B))
        shares.append(tuple(1 - (only[a] + only[b]) / (all_[a] + all_[b]) for a, b in pairs))
    return Scene(timeline, shown, tuple(shares))  # type: ignore[arg-type]


# --- picture ----------------------------------------------------------------------------------


def draw(path: Path, plan: Plan, chosen: Prediction, model: CostModel, title: str) -> Path:
    """Draw the pipeline of `chosen` to `path`: ranks by time with every wait visible, memory of
    each rank, and where a step's seconds go."""
    from matplotlib.figure import Figure

    option = chosen.option
    layout = option.layout
    played = scene(model, option)
    ranks = layout.pipeline
    row = 0.62 if ranks <= 8 else 0.42 if ranks <= 16 else 0.26
    body = max(1.9, ranks * row)
    height = 1.75 + body + 0.6 + 1.6
    width = 17.0
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")

    def place(left: float, bottom: float, wide: float, high: float) -> Any:
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    _text(figure, width, height, plan, chosen, title, played)
    low = 1.6 + 0.6
    labels = 2.35
    _draw_timeline(place(labels, low, 10.2, body), chosen, played)
    _draw_memory(place(labels + 10.2 + 0.35, low, 3.55, body), plan, chosen)
    _draw_step(place(0.45, 0.62, width - 0.9, 0.5), chosen)
    figure.savefig(path, dpi=110)
    return path


def _text(
    figure: Any,
    width: float,
    height: float,
    plan: Plan,
    chosen: Prediction,
    title: str,
    played: Scene,
) -> None:
    option = chosen.option

    def write(x: float, y: float, text: str, size: float, colour: str, **more: Any) -> None:
        figure.text(x / width, 1 - y / height, text, fontsize=size, color=colour, **more)

    write(0.45, 0.52, f"{title} on {plan.gpus:,} {plan.gpu.name.upper()}", 21, INK, weight="bold")
    facts = (
        f"step {_seconds(chosen.step_seconds)} ± {chosen.uncertainty:.0%}   ·   "
        f"{chosen.tokens_per_second_per_gpu:,.0f} tokens/s per GPU   ·   "
        f"causal MFU {chosen.mfu:.1%}   ·   bubble {chosen.bubble:.1%}   ·   "
        f"{plan.global_batch:,} packs of up to {plan.packs.pack_length:,} tokens a step"
    )
    write(0.45, 0.87, facts, 12.5, INK)
    how = describe(option)
    if played.shown < option.microbatches:
        how += f"; shown are {played.shown} of {option.microbatches} microbatches, the rest repeat"
    write(0.45, 1.17, how, 11, SOFT)


def describe(option: Option) -> str:
    layout = option.layout
    parts = [f"tensor {layout.tensor}{' + sequence' if layout.sequence else ''}"]
    virtual = f" x {layout.virtual_pipeline} virtual" if layout.virtual_pipeline > 1 else ""
    parts.append(f"pipeline {layout.pipeline}{virtual}")
    parts.append(f"data {layout.data}")
    if layout.expert > 1:
        parts.append(f"expert {layout.expert}")
    parts.append(f"{option.microbatches} microbatches per replica")
    if option.multiplexed:
        parts.append("multiplexed vision")
    for name, level in (("vision", option.recompute_vision), ("text", option.recompute_text)):
        if level != "none":
            parts.append(f"{name} {'MLPs ' if level == 'selective' else ''}recomputed")
    if option.offload:
        parts.append(f"{option.offload:.0%} of the optimizer offloaded")
    return ", ".join(parts)


def _draw_timeline(axes: Any, chosen: Prediction, played: Scene) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    layout = chosen.option.layout
    ranks = layout.pipeline
    timeline = played.timeline
    # The tail (gradients, optimizer) is as long as in the real step, unless that hides the rest.
    tail = (("gradients", chosen.data_parallel_seconds), ("optimizer", chosen.optimizer_seconds))
    end = timeline.seconds + sum(t for _, t in tail)
    boxes: dict[str, list[Any]] = {name: [] for name in COLOURS}
    numbers: list[tuple[float, float, str, str]] = []

    def box(name: str, rank: int, start: float, stop: float, top: float, low: float) -> None:
        if stop > start:
            y = rank
            boxes[name].append(
                [(start, y - low), (stop, y - low), (stop, y + top), (start, y + top)]
            )

    for rank in range(ranks):
        axes.axhspan(rank - 0.42, rank + 0.42, color=EMPTY, zorder=0)
        start = timeline.seconds
        for name, seconds in tail:
            box(name, rank, start, start + seconds, 0.42, 0.42)
            start += seconds
    for event in timeline.events:
        if event.kind in (schedule.VISION_FORWARD, schedule.VISION_BACKWARD):
            box(schedule.NAMES[event.kind], event.rank, event.start, event.end, 0.42, 0.42)
            continue
        share = played.vision_share[event.stage][event.kind]
        direction = schedule.NAMES[event.kind]
        # vision comes first on the way forward and last on the way back
        middle = event.start + (event.end - event.start) * (
            share if event.kind == schedule.FORWARD else 1 - share
        )
        first, second = ("vision", "text") if event.kind == schedule.FORWARD else ("text", "vision")
        box(f"{first} {direction}", event.rank, event.start, middle, 0.42, 0.42)
        box(f"{second} {direction}", event.rank, middle, event.end, 0.42, 0.42)
        if (event.end - event.start) / end * 10.2 > 0.14 and ranks <= 16:
            colour = "white" if event.kind == schedule.BACKWARD else INK
            numbers.append(
                ((event.start + event.end) / 2, event.rank, str(event.microbatch + 1), colour)
            )
    crowd = sum(len(shapes) for shapes in boxes.values()) / ranks
    edge = 0.5 if crowd < 120 else 0.25
    for name, shapes in boxes.items():
        if shapes:
            axes.add_collection(
                PolyCollection(
                    shapes, facecolors=COLOURS[name], edgecolors="white", linewidths=edge, zorder=2
                )
            )
    for x, y, text, colour in numbers:
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour, zorder=3)
    axes.set_xlim(0, end)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks))
    axes.set_yticklabels(
        [_rank_label(layout, rank, chosen.option.multiplexed) for rank in range(ranks)],
        fontsize=9 if ranks <= 16 else 6.5,
        color=INK,
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, colors=SOFT)
    axes.set_xlabel("seconds", fontsize=9.5, color=SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    used = [name for name in COLOURS if boxes[name]]
    handles = [Patch(color=COLOURS[name], label=name) for name in used]
    handles.append(Patch(facecolor=EMPTY, edgecolor=LINE, label="waiting"))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncol=len(handles),
        frameon=False,
        fontsize=9.5,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.3,
    )


def _rank_label(layout: Any, rank: int, multiplexed: bool) -> str:
    """What a rank holds: vision (v) and text (t) layers of its chunks."""
    vision = [] if multiplexed else layout.vision_layers[rank :: layout.pipeline]
    text = layout.text_layers[rank :: layout.pipeline]
    parts = []
    if sum(vision):
        parts.append(f"{sum(vision)} vision")
    if sum(text) or not parts:
        parts.append(f"{sum(text)} text")
    if multiplexed:
        parts.insert(0, f"1/{layout.pipeline * layout.tensor} of vision")
    name = f"rank {rank}" if layout.pipeline <= 16 else str(rank)
    return f"{name}:  {' + '.join(parts)}"


def _draw_memory(axes: Any, plan: Plan, chosen: Prediction) -> None:
    ranks = range(len(chosen.memory))
    left = np.zeros(len(chosen.memory))
    for field, label, colour in MEMORY:
        size = np.array([getattr(rank, field) for rank in chosen.memory]) / 1e9
        axes.barh(list(ranks), size, 0.84, left=left, color=colour, label=label)
        left += size
    capacity = plan.gpu.memory_gb
    for rank in ranks:
        if len(chosen.memory) <= 32:
            axes.text(
                left[rank] + capacity * 0.012,
                rank,
                f"{left[rank]:.0f}",
                va="center",
                fontsize=8.5,
                color=INK,
                zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
            )
    usable = plan.gpu.usable_bytes / 1e9
    axes.axvline(usable, color="#cf222e", linewidth=1.2)
    axes.set_xlim(0, capacity * 1.08)
    axes.set_ylim(len(chosen.memory) - 0.5, -0.5)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=9, colors=SOFT)
    axes.set_xlabel(f"GB per GPU (red: {usable:.0f} usable)", fontsize=9.5, color=SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.03, 1.0),
        ncol=2,
        frameon=False,
        fontsize=8.2,
        handlelength=1.1,
        columnspacing=0.9,
        borderaxespad=0.2,
        labelspacing=0.25,
    )


_CAUSES = {
    "compute": ("compute", "#1f6fc0"),
    "tensor": ("tensor-parallel communication", "#6d5bb0"),
    "bubble": ("pipeline bubble", "#c3cad3"),
    "imbalance": ("slowest replica", "#e3a3a3"),
    "gradients": ("gradients and parameters", "#b0529b"),
    "optimizer": ("optimizer", "#4b9a6a"),
}


def _draw_step(axes: Any, chosen: Prediction) -> None:
    parts = chosen.waterfall()
    total = sum(parts.values())
    left = 0.0
    shown = []
    for key, seconds in parts.items():
        name, colour = _CAUSES[key]
        axes.barh([0], [seconds], 0.9, left=left, color=colour, edgecolor="white", linewidth=0.8)
        if seconds / total > 0.035:
            axes.text(
                left + seconds / 2,
                0,
                f"{seconds / total:.0%}",
                ha="center",
                va="center",
                fontsize=10,
                color="white" if colour not in ("#c3cad3", "#e3a3a3") else INK,
            )
        shown.append((name, seconds, colour))
        left += seconds
    axes.set_xlim(0, total)
    axes.set_ylim(-0.5, 0.5)
    axes.axis("off")
    axes.text(0, 0.78, "Where a step's seconds go", fontsize=11, weight="bold", color=INK)
    x = 0.0
    for name, seconds, colour in shown:
        axes.text(
            x, -1.02, "■ ", transform=axes.get_yaxis_transform(), fontsize=11, color=colour,
            va="center",
        )  # fmt: skip
        label = f"{name} {_seconds(seconds)}"
        axes.text(
            x + 0.011, -1.02, label, transform=axes.get_yaxis_transform(), fontsize=9.5,
            color=INK, va="center",
        )  # fmt: skip
        x += 0.028 + 0.0061 * len(label)


def _seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1000:.1f} ms"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


# --- Chrome trace -----------------------------------------------------------------------------


def write_trace(path: Path, chosen: Prediction, model: CostModel) -> Path:
    """Chrome's trace event format: one thread per pipeline rank, times in microseconds."""
    played = scene(model, chosen.option, boxes=2000)
    layout = chosen.option.layout
    rows: list[dict[str, Any]] = [
        {
            "ph": "M",
            "pid": 0,
            "tid": rank,
            "name": "thread_name",
            "args": {"name": _rank_label(layout, rank, chosen.option.multiplexed)},
        }
        for rank in range(layout.pipeline)
    ]
    for event in played.timeline.events:
        name = schedule.NAMES[event.kind]
        args: dict[str, Any] = {}
        if event.microbatch >= 0:
            name = f"{name} {event.microbatch + 1}"
            args = {
                "microbatch": event.microbatch + 1,
                "stage": event.stage,
                "vision_layers": layout.vision_layers[event.stage],
                "text_layers": layout.text_layers[event.stage],
            }
        rows.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": event.rank,
                "name": name,
                "cat": schedule.NAMES[event.kind],
                "ts": round(event.start * 1e6, 3),
                "dur": round((event.end - event.start) * 1e6, 3),
                "args": args,
            }
        )
    path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path
