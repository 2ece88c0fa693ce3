"""Does the run fit, step by step as its packs will come? Else what would make it fit, in this
order: recomputation of vision, then of language, offload of the optimizer, smaller pieces of
multiplexed vision, another layout. The first two change no bit of any result, the third none in
float32; in bfloat16 gradients that go to the host are rounded before they are divided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from vlmtrain.core.config import Recompute, TrainConfig
from vlmtrain.core.errors import UserError
from vlmtrain.core.layout import Layout, LayoutError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.parallel.layout import section_layout
from vlmtrain.plan.heaviest import Loads, Peak, fullest
from vlmtrain.plan.search import OFFLOADS

_LEVELS = get_args(Recompute)
_SMALLEST_PIECE = 1024  # patches; smaller ones leave a GPU idle


@dataclass(frozen=True)
class Remedy:
    """Options that make a run fit."""

    config: TrainConfig
    layout: Layout
    options: str
    same_result: bool  # but for how bfloat16 gradients are rounded on their way to the host
    bytes: float = 0.0  # its peak


def fit(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    loads: Callable[[Layout], Loads],
    room: float,
    ids: Callable[[Layout, Peak], str],
    cuda: bool,
    factor: float = 1.0,
) -> tuple[TrainConfig, str]:
    """A configuration whose fullest rank is planned to fit, and what was changed for it.

    Args:
        loads: what the steps hold where packs are dealt to a layout's replicas.
        room: bytes for the run on its smallest rank.
        ids: the samples that make a peak.
        factor: by which a step needs more than planned (`PeakModel`).

    Raises:
        UserError: it does not fit, and `--train.fit` is refuse or nothing that changes no result
            would do.
    """
    peak = fullest(config, spec, layout, loads(layout), cuda, factor)
    if peak.bytes <= room:
        return config, ""
    message = (
        f"step {peak.step} of this run needs {peak.bytes / 1e9:.1f} GB on pipeline rank "
        f"{peak.stage}, and there are {room / 1e9:.1f} GB; the packs at its peak hold "
        f"{ids(layout, peak)}"
    )
    remedy = find_remedy(config, spec, layout, loads, room, cuda, factor)
    if remedy is None:
        raise UserError(f"{message}; {nothing_fits(layout)}")
    if remedy.same_result and config.train.fit == "auto":
        done = f"set {remedy.options}, with which it is {remedy.bytes / 1e9:.1f}"
        return remedy.config, f"{message}: {done}"
    auto = ", or --train.fit auto" if remedy.same_result else ""
    raise UserError(f"{message}; {advice(remedy)}{auto}")


def advice(remedy: Remedy) -> str:
    return f"with {remedy.options} it would be {remedy.bytes / 1e9:.1f}: pass them"


def nothing_fits(layout: Layout) -> str:
    world = layout.tensor * layout.pipeline * layout.data
    return (
        f"no recomputation, offload or layout of {world} processes makes it fit: take more "
        "processes, a shorter --train.pack_length, or smaller images (--media.max_pixels)"
    )


def find_remedy(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    loads: Callable[[Layout], Loads],
    room: float,
    cuda: bool,
    factor: float,
) -> Remedy | None:
    """The first of all that is planned to fit; arguments as of `fit`."""
    for remedy in _remedies(config, spec, layout, cuda):
        peak = fullest(remedy.config, spec, remedy.layout, loads(remedy.layout), cuda, factor)
        if peak.bytes <= room:
            return replace(remedy, bytes=peak.bytes)
    return None


def _remedies(config: TrainConfig, spec: ModelSpec, layout: Layout, cuda: bool) -> Iterator[Remedy]:
    """More and more that saves memory, each with what came before it."""
    options = dict[str, str]()

    def remedy(same_result: bool, one: Layout = layout, more: str = "") -> Remedy:
        text = " ".join(f"{name} {value}" for name, value in options.items())
        return Remedy(config, one, f"{text} {more}".strip(), same_result)

    for tower in ("vision", "language"):
        for level in _LEVELS[_LEVELS.index(getattr(config.recompute, tower)) + 1 :]:
            again = replace(config.recompute, **{tower: level})  # type: ignore[arg-type]
            config = replace(config, recompute=again)
            options[f"--recompute.{tower}"] = level
            yield remedy(True)
    for fraction in OFFLOADS[1:] if cuda and not config.optimizer.offload_schedule else ():
        if fraction > config.optimizer.offload_fraction:
            config = replace(config, optimizer=replace(config.optimizer, offload_fraction=fraction))
            options["--optimizer.offload_fraction"] = str(fraction)
            yield remedy(True)
    while layout.multiplexed and (piece := config.parallel.vision_piece // 2) >= _SMALLEST_PIECE:
        config = replace(config, parallel=replace(config.parallel, vision_piece=piece))
        options["--parallel.vision_piece"] = str(piece)
        yield remedy(False)
    world = layout.tensor * layout.pipeline * layout.data
    for tensor, pipeline in _other_layouts(layout, world):
        parallel = replace(
            config.parallel,
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=1,
            sequence=tensor > 1,
            vision_layers=() if layout.multiplexed else "auto",
            text_layers="auto",
        )
        try:
            other = section_layout(spec, parallel, world)
        except LayoutError:
            continue
        if config.train.global_batch_packs % other.data == 0:
            more = f"--parallel.tensor {tensor} --parallel.pipeline {pipeline}"
            more += " --parallel.sequence" if tensor > 1 else ""
            more += "" if layout.multiplexed else " --parallel.vision_layers auto"
            yield remedy(False, other, more)


def _other_layouts(layout: Layout, world: int) -> list[tuple[int, int]]:
    """Tensor and pipeline sizes with more ranks a replica, fewest first."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    ranks = layout.tensor * layout.pipeline
    pairs = [(t, p) for t, p in itertools.product(sizes, sizes) if t * p > ranks]
    return sorted((p for p in pairs if world % (p[0] * p[1]) == 0), key=lambda p: p[0] * p[1])
