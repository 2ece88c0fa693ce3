"""Does the run fit, step by step as its packs will come? Else what would make it fit, in this
order: recomputation of vision, then of language, offload of the optimizer, another layout. The
first three change no result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from vlmtrain.core.config import TrainConfig
from vlmtrain.core.errors import UserError
from vlmtrain.core.layout import Layout, LayoutError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.parallel.layout import section_layout
from vlmtrain.training.rehearsal import Loads, peak_models

_LEVELS = ("none", "selective", "full")
_OFFLOADS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Peak:
    """The fullest rank of a run, as planned."""

    bytes: float
    stage: int  # pipeline rank
    step: int  # from 1
    place: tuple[int, int]  # in the loads: which step, which replica
    window: list[int]  # microbatches between forward and backward


def fullest(config: TrainConfig, spec: ModelSpec, layout: Layout, loads: Loads, cuda: bool) -> Peak:
    """Of all steps, replicas and stages."""
    best: Peak | None = None
    for stage, model in enumerate(peak_models(config, spec, layout, cuda=cuda)):
        for replica in range(loads.patches.shape[1]):
            of = loads.patches[:, replica]
            peaks = model.peaks(of, loads.largest[:, replica])
            i = int(peaks.argmax())
            if best is None or peaks[i] > best.bytes:
                step = loads.places[i].step + 1
                best = Peak(float(peaks[i]), stage, step, (i, replica), model.window(of[i]))
    assert best is not None
    return best


def fit(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    loads: Callable[[Layout], Loads],
    room: float,
    ids: Callable[[Layout, Peak], str],
    cuda: bool,
) -> tuple[TrainConfig, str]:
    """A configuration whose fullest rank is planned to fit, and what was changed for it.

    Args:
        loads: what the steps hold where packs are dealt to a layout's replicas.
        room: bytes for the run on its smallest rank.
        ids: the samples that make a peak.

    Raises:
        UserError: it does not fit, and `--train.fit` is refuse or nothing that changes no result
            would do.
    """
    peak = fullest(config, spec, layout, loads(layout), cuda)
    if peak.bytes <= room:
        return config, ""
    message = (
        f"step {peak.step} of this run needs {peak.bytes / 1e9:.1f} GB on pipeline rank "
        f"{peak.stage}, and there are {room / 1e9:.1f} GB; the packs at its peak hold "
        f"{ids(layout, peak)}"
    )
    for changed, options in _same_result(config, cuda):
        needed = fullest(changed, spec, layout, loads(layout), cuda).bytes
        if needed <= room:
            if config.train.fit == "auto":
                return changed, f"{message}: set {options}, with which it is {needed / 1e9:.1f}"
            raise UserError(
                f"{message}; with {options} it would be {needed / 1e9:.1f}: pass them, or "
                "--train.fit auto"
            )
    world = layout.tensor * layout.pipeline * layout.data
    *_, (last, options) = _same_result(config, cuda)
    for tensor, pipeline in _other_layouts(layout, world):
        parallel = replace(
            last.parallel,
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=1,
            sequence=tensor > 1,
            vision_layers=() if layout.multiplexed else "auto",
            text_layers="auto",
        )
        train = last.train
        try:
            other = section_layout(spec, parallel, world, pack_length=train.pack_length)
        except LayoutError:
            continue
        if train.global_batch_packs % other.data:
            continue
        needed = fullest(last, spec, other, loads(other), cuda).bytes
        if needed <= room:
            raise UserError(
                f"{message}; with {options}, --parallel.tensor {tensor} and --parallel.pipeline "
                f"{pipeline} it would be {needed / 1e9:.1f}"
            )
    raise UserError(
        f"{message}; no recomputation, offload or layout of {world} processes makes it fit: take "
        "more processes, a shorter --train.pack_length, or smaller images (max_pixels in "
        "preprocessor_config.json)"
    )


def _same_result(config: TrainConfig, cuda: bool) -> Iterator[tuple[TrainConfig, str]]:
    """More and more of what costs time and changes no number, with its options."""
    again, options = config.recompute, dict[str, str]()
    for tower in ("vision", "language"):
        for level in _LEVELS[_LEVELS.index(getattr(again, tower)) + 1 :]:
            again = replace(again, **{tower: level})  # type: ignore[arg-type]
            options[f"--recompute.{tower}"] = level
            yield replace(config, recompute=again), _written(options)
    schedule = config.optimizer.offload_schedule
    for fraction in _OFFLOADS if cuda and not schedule else ():
        if fraction > config.optimizer.offload_fraction:
            optimizer = replace(config.optimizer, offload_fraction=fraction)
            options["--optimizer.offload_fraction"] = str(fraction)
            yield replace(config, recompute=again, optimizer=optimizer), _written(options)
    yield replace(config, recompute=again), _written(options) or "what is set"


def _written(options: dict[str, str]) -> str:
    return " ".join(f"{name} {value}" for name, value in options.items())


def _other_layouts(layout: Layout, world: int) -> list[tuple[int, int]]:
    """Tensor and pipeline sizes with more ranks a replica, fewest first."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    ranks = layout.tensor * layout.pipeline
    pairs = [(t, p) for t, p in itertools.product(sizes, sizes) if t * p > ranks]
    return sorted((p for p in pairs if world % (p[0] * p[1]) == 0), key=lambda p: p[0] * p[1])
