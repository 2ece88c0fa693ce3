"""The steps of a run that need most memory on one of its ranks, and whose samples are in them.

The packs of a run follow from data and seed, so all of its steps are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vlmtrain.core.config import TrainConfig
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.packing.sampler import PlannedStep, Position, Sampler
from vlmtrain.parallel.step_inputs import StepInputs
from vlmtrain.plan.peak import PeakModel


class Patches:
    """Patches of an index's samples and packs."""

    def __init__(self, index: SampleIndex) -> None:
        media = index.grids.prod(1)
        total = np.concatenate(([0], media.cumsum()))
        self._sums = total[index.media_start[1:]] - total[index.media_start[:-1]]
        self._most = np.array([media[a:b].max(initial=0) for a, b in pairwise(index.media_start)])

    def of(self, packs: Iterable[np.ndarray]) -> np.ndarray:
        """Of each pack."""
        return np.array([self._sums[pack].sum() for pack in packs], dtype=np.float64)

    def largest(self, packs: Iterable[np.ndarray]) -> float:
        """Of the largest medium."""
        return float(max(self._most[pack].max(initial=0) for pack in packs))


@dataclass(frozen=True)
class Loads:
    """What each step of a run holds, as far as its memory depends on it."""

    places: list[Position]
    tokens: np.ndarray  # [steps, replicas, microbatches], without padding
    targets: np.ndarray  # [steps, replicas, microbatches]
    patches: np.ndarray  # [steps, replicas, microbatches]
    largest: np.ndarray  # [steps, replicas]: patches of the largest medium
    # Patches that each rank of a replica encodes, where vision is multiplexed; the fullest of those
    # behind the embedding's ranks last: [steps, replicas, tensor + 1].
    encoded: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        steps: Iterable[PlannedStep],
        index: SampleIndex,
        spec: ModelSpec | None = None,
        layout: Layout | None = None,
    ) -> Loads:
        """spec, layout: where vision may be multiplexed."""
        patches, places = Patches(index), []
        encoded: list[list[np.ndarray]] = []
        tokens: list[list[np.ndarray]] = []
        targets: list[list[list[float]]] = []
        counts: list[list[np.ndarray]] = []
        largest: list[list[float]] = []
        for step in steps:
            places.append(step.at)
            tokens.append([lengths(index, packs) for packs in step.dealt])
            targets.append(
                [[float(index.target_tokens[p].sum()) for p in packs] for packs in step.dealt]
            )
            counts.append([patches.of(packs) for packs in step.dealt])
            largest.append([patches.largest(packs) for packs in step.dealt])
            if spec is not None and layout is not None and layout.multiplexed:
                encoded.append([_encoded(index, spec, layout, packs) for packs in step.dealt])
        own = np.array(encoded) if encoded else None
        return cls(
            places, np.array(tokens), np.array(targets), np.array(counts), np.array(largest), own
        )


def lengths(index: SampleIndex, packs: Iterable[np.ndarray]) -> np.ndarray:
    """Tokens of each pack, without padding."""
    return np.array([index.pack_tokens(pack) for pack in packs], dtype=np.float64)


def _encoded(
    index: SampleIndex, spec: ModelSpec, layout: Layout, packs: list[np.ndarray]
) -> np.ndarray:
    inputs = StepInputs(spec, layout, [index.pack_grids(pack) for pack in packs])
    ranks = np.zeros(layout.tensor * layout.pipeline)
    for owners, patches in zip(inputs.owners, inputs.patches, strict=True):
        for owner, count in zip(owners, patches, strict=True):
            ranks[owner] += count
    return np.append(ranks[: layout.tensor], ranks[layout.tensor :].max(initial=0))


def heaviest(loads: Loads, models: list[PeakModel]) -> list[list[Position]]:
    """For each replica the steps that are planned to fill one of the pipeline's ranks most, and
    those with the most tokens, targets and patches in a step, in a pack and in a medium: what the
    plan may have wrong is a factor of these. It takes every token for a target."""
    found: list[list[Position]] = []
    for replica in range(loads.patches.shape[1]):
        tokens, targets, patches, largest = (
            x[:, replica] for x in (loads.tokens, loads.targets, loads.patches, loads.largest)
        )
        keys = [model.peaks(tokens, patches, largest) for model in models]
        for counts in (patches, tokens, targets):
            keys += [counts.sum(1), counts.max(1)]
        keys.append(largest)
        if loads.encoded is not None:
            keys += list(loads.encoded[:, replica].T)
        chosen = dict.fromkeys(int(key.argmax()) for key in keys)
        found.append([loads.places[i] for i in chosen])
    return found


def peak_models(
    config: TrainConfig, spec: ModelSpec, layout: Layout, *, cuda: bool, factor: float = 1.0
) -> list[PeakModel]:
    """Of each rank of a pipeline; factor: see `PeakModel`."""
    return [
        PeakModel(config, spec, layout, rank, cuda=cuda, factor=factor)
        for rank in range(layout.pipeline)
    ]


@dataclass(frozen=True)
class Peak:
    """The fullest rank of a run, as planned."""

    bytes: float
    stage: int  # pipeline rank
    step: int  # from 1
    place: tuple[int, int]  # in the loads: which step, which replica
    window: list[int]  # microbatches between forward and backward

    def ids(self, sampler: Sampler, loads: Loads) -> list[str]:
        """The samples in its window."""
        step, replica = self.place
        packs = sampler.take(loads.places[step]).dealt[replica]
        return [sampler.index.ids[i] for number in self.window for i in packs[number].tolist()]


def fullest(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    loads: Loads,
    cuda: bool,
    factor: float = 1.0,
) -> Peak:
    """Of all steps, replicas and stages."""
    best: Peak | None = None
    for stage, model in enumerate(peak_models(config, spec, layout, cuda=cuda, factor=factor)):
        for replica in range(loads.patches.shape[1]):
            tokens, of = loads.tokens[:, replica], loads.patches[:, replica]
            peaks = model.peaks(tokens, of, loads.largest[:, replica])
            i = int(peaks.argmax())
            if best is None or peaks[i] > best.bytes:
                step = loads.places[i].step + 1
                best = Peak(
                    float(peaks[i]), stage, step, (i, replica), model.window(tokens[i], of[i])
                )
    assert best is not None
    return best
