"""The search: every layout that fits, sorted by a quick estimate, the best of them simulated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import get_args

import numpy as np

from vlmtrain.core.config import FreezeSection, LoraSection, Recompute
from vlmtrain.core.layout import LayoutError
from vlmtrain.core.spec import ModelSpec
from vlmtrain.core.stage_split import contiguous
from vlmtrain.data.packing.plan import BY_COST
from vlmtrain.models import flops
from vlmtrain.parallel.layout import expert_sizes, make_layout, tensor_split_sizes
from vlmtrain.plan import schedule, split
from vlmtrain.plan.costs import (
    COMM_B,
    COMM_F,
    COMPUTE_B,
    COMPUTE_F,
    CostModel,
    Option,
    RankMemory,
)
from vlmtrain.plan.hardware import Gpu, PlanError
from vlmtrain.plan.workload import Packs

OFFLOADS = (0.0, 0.25, 0.5, 0.75, 1.0)
_LEVELS = get_args(Recompute)
# multiplexed vision, recomputation of vision (a multiplexed tower always is) and of text
_KINDS = (
    *((False, vision, text) for vision in _LEVELS for text in _LEVELS),
    *((True, "none", text) for text in _LEVELS),
)
_MOST_STAGES = 128
_DEALT_BY_COST = 0.006  # what dealing packs by cost leaves of the replicas' imbalance
_FINALISTS = 16
_EVENTS = 1500  # pieces of work per simulation while splits are improved
_BUDGET = 60_000  # pieces of work simulated in improving one finalist


@dataclass(frozen=True)
class Prediction:
    """What is expected of one option. Times in seconds per optimizer step."""

    option: Option
    step_seconds: float
    uncertainty: float  # relative, one standard deviation
    tokens_per_second_per_gpu: float  # padding left out
    mfu: float  # causal model FLOPs
    bubble: float  # share of forward and backward time in which ranks wait
    stage_imbalance: float  # busiest rank over the mean rank, minus 1
    data_imbalance: float  # slowest replica over the mean replica, minus 1
    communication: float  # share of the step: tensor, data parallel; exposed
    data_parallel_seconds: float
    optimizer_seconds: float
    memory: tuple[RankMemory, ...]  # per pipeline rank

    @property
    def peak_bytes(self) -> float:
        return max(rank.total for rank in self.memory)

    def waterfall(self) -> dict[str, float]:
        """Seconds of a step by cause, which add up to the step: a mean rank's compute, its
        tensor-parallel communication, its waiting in the pipeline and for the slowest replica,
        reduction of gradients with gathering of parameters, and the optimizer."""
        data, optimizer = self.data_parallel_seconds, self.optimizer_seconds
        all_replicas = self.step_seconds - data - optimizer
        pipeline = all_replicas / (1 + self.data_imbalance)
        tensor = self.communication * self.step_seconds - data
        waiting = pipeline * self.bubble
        return {
            "compute": pipeline - waiting - tensor,
            "tensor": tensor,
            "bubble": waiting,
            "imbalance": all_replicas - pipeline,
            "gradients": data,
            "optimizer": optimizer,
        }


@dataclass(frozen=True)
class Plan:
    """The answer: predictions, best first."""

    spec: ModelSpec
    gpu: Gpu
    gpus: int
    global_batch: int
    packs: Packs
    ranked: tuple[Prediction, ...]
    considered: int  # options
    fitting: int
    freeze: FreezeSection = field(default_factory=FreezeSection)
    lora: LoraSection = field(default_factory=LoraSection)

    @property
    def best(self) -> Prediction:
        return self.ranked[0]


def default_global_batch(gpus: int) -> int:
    """Packs per step where none is given: 2 per GPU, but from 64 to 4,096 as far as that goes
    by halves and doubles."""
    batch = 2 * gpus
    while batch > 4096 and batch % 2 == 0:
        batch //= 2
    while batch < 64:
        batch *= 2
    return batch


def search(
    spec: ModelSpec,
    gpu: Gpu,
    gpus: int,
    packs: Packs,
    global_batch: int | None = None,
    *,
    freeze: FreezeSection | None = None,
    lora: LoraSection | None = None,
) -> Plan:
    """Rank all layouts that fit.

    Raises:
        PlanError: impossible sizes, or nothing fits; the message names what would.
    """
    if gpus < 1:
        raise PlanError(f"--gpus is {gpus}; it must be at least 1")
    if global_batch is not None and global_batch < 1:
        raise PlanError(f"--global_batch_packs is {global_batch}; it must be at least 1")
    batch = global_batch or default_global_batch(gpus)
    model = CostModel(spec, gpu, packs, freeze, lora)
    considered, fitting = 0, []
    tight: tuple[float, Option] | None = None
    for option in _options(model, gpus, batch):
        considered += 1
        fitted, peak = _fit(model, option)
        if fitted is None:
            relieved = _relieve(model, option)
            if relieved is not None:
                fitting.append((_quick(model, relieved), relieved))
            if tight is None or peak < tight[0]:
                tight = (peak, option)
            continue
        fitting.append((_quick(model, fitted), fitted))
    if not considered:
        raise PlanError(_no_layout(spec, gpu, gpus, batch))
    if not fitting:
        assert tight is not None
        raise PlanError(_too_small(model, gpus, global_batch, tight))
    fitting.sort(key=lambda pair: pair[0])
    unique = list(dict.fromkeys(option for _, option in _diverse(fitting, _FINALISTS)))
    ranked = []
    for option in unique:
        both = {option, _refine(model, option)}  # the split is refined on mean packs only
        ranked.append(min((predict(model, o, gpus) for o in both), key=_step))
    ranked.sort(key=_step)
    return Plan(
        spec,
        gpu,
        gpus,
        batch,
        packs,
        tuple(ranked),
        considered,
        len(fitting),
        model.freeze,
        model.lora,
    )


def _step(prediction: Prediction) -> float:
    return prediction.step_seconds


# --- candidates -------------------------------------------------------------------------------


def _tensor_sizes(spec: ModelSpec, gpu: Gpu, gpus: int, multiplexed: bool) -> list[int]:
    sizes = tensor_split_sizes(spec, multiplexed).values()
    return [
        t
        for t in range(1, min(gpus, gpu.gpus_per_node) + 1)
        if gpus % t == 0 and gpu.gpus_per_node % t == 0 and all(n % t == 0 for n in sizes)
    ]


def _options(model: CostModel, gpus: int, batch: int) -> Iterator[Option]:
    """Everything that divides; offload is decided in `_fit`."""
    spec = model.spec
    splits: dict[tuple[int, int, bool, str, str], split.Split | None] = {}
    sizes = {m: _tensor_sizes(spec, model.gpu, gpus, m) for m in (False, True)}
    for tensor in sizes[True]:  # those of False among them: a multiplexed tower is not split
        ranks = gpus // tensor
        for pipeline in range(1, min(ranks, spec.num_layers, _MOST_STAGES) + 1):
            if ranks % pipeline or batch % (ranks // pipeline):
                continue
            microbatches = batch // (ranks // pipeline)
            for virtual in range(1, min(8, spec.num_layers // pipeline) + 1):
                if virtual > 1 and (pipeline == 1 or microbatches % pipeline):
                    continue
                if pipeline * virtual > _MOST_STAGES:
                    continue
                for multiplexed, vision, text in _KINDS:
                    if (multiplexed and pipeline == 1) or tensor not in sizes[multiplexed]:
                        continue
                    key = (tensor, pipeline * virtual, multiplexed, vision, text)
                    if key not in splits:
                        splits[key] = _split(model, *key)
                    layers = splits[key]
                    if layers is None:
                        continue
                    shares = itertools.product(
                        (True, False) if tensor > 1 else (False,),
                        expert_sizes(spec, ranks // pipeline * tensor),
                    )
                    for sequence, expert in shares:
                        try:
                            layout = make_layout(
                                spec,
                                world_size=gpus,
                                tensor=tensor,
                                pipeline=pipeline,
                                virtual_pipeline=virtual,
                                sequence=sequence,
                                multiplexed=multiplexed,
                                vision_layers=layers[0],
                                text_layers=layers[1],
                                expert=expert,
                                microbatches=microbatches,
                            )
                        except LayoutError:
                            continue
                        yield Option(layout, microbatches, vision, text)


def _split(
    model: CostModel, tensor: int, stages: int, multiplexed: bool, again_v: str, again_t: str
) -> split.Split | None:
    sizes = tensor, tensor > 1
    units = model.units(*sizes)

    def total(block: np.ndarray) -> float:
        return float((block @ model.mean).sum())

    text = total(model.text_cost(*sizes, again_t))
    vision: list[float] = []
    if not multiplexed:
        tower = (model.vision_costs(*sizes, again_v) @ model.mean).sum(1)
        vision = np.diff(tower).tolist()
        vision[0] += total(units["patch_embed"])
        vision[-1] += total(units["merger"])
    head = total(units["head"] + model.text_end(tensor, again_t))
    layers = contiguous(vision, text, model.spec.num_layers, head, stages)
    return ((), layers[1]) if layers is not None and multiplexed else layers


def _fit(model: CostModel, option: Option) -> tuple[Option | None, float]:
    """The option with as little offload as makes it fit (or None), and its peak without any."""
    usable, first = model.gpu.usable_bytes, 0.0
    for offload in OFFLOADS:
        candidate = dataclasses.replace(option, offload=offload)
        ranks = model.rank_memory(candidate)
        peak = max(rank.total for rank in ranks)
        first = first or peak
        if offload == 0 and peak - max(rank.states for rank in ranks) * 2 / 3 > usable:
            return None, first  # what offload could take away would not be enough
        if peak <= usable and max(rank.host for rank in ranks) <= model.gpu.host_memory_gb * 1e9:
            return candidate, first
    return None, first


def _relieve(model: CostModel, option: Option) -> Option | None:
    """Move language layers from the fullest rank to the emptiest until every rank fits."""
    usable, pipeline = model.gpu.usable_bytes, option.layout.pipeline
    for _ in range(option.layout.pipeline * 4):
        totals = [rank.total for rank in model.rank_memory(option)]
        if max(totals) <= usable:
            return option
        full, empty = int(np.argmax(totals)), int(np.argmin(totals))
        if totals[empty] >= 0.97 * usable:
            return None
        layout = option.layout
        text = list(layout.text_layers)
        free = -1 if option.multiplexed or layout.stages == 1 else layout.merger_stage
        least = [0 if s == free and s < layout.stages - 1 else 1 for s in range(layout.stages)]
        spare = [s for s in range(full, layout.stages, pipeline) if text[s] > least[s]]
        room = [s for s in range(empty, layout.stages, pipeline) if s >= layout.merger_stage]
        if not spare or not room:
            return None
        text[max(spare, key=lambda s: text[s])] -= 1
        text[min(room, key=lambda s: text[s])] += 1
        option = dataclasses.replace(
            option, layout=dataclasses.replace(layout, text_layers=tuple(text))
        )
    return None


def _diverse(candidates: list[tuple[float, Option]], count: int) -> list[tuple[float, Option]]:
    """The first ones, at most 3 of each (tensor, pipeline, kind of vision)."""
    seen: dict[tuple[int, int, bool], int] = {}
    result = []
    for pair in candidates:
        option = pair[1]
        key = (option.layout.tensor, option.layout.pipeline, option.multiplexed)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3:
            result.append(pair)
        if len(result) == count:
            break
    return result


# --- prediction -------------------------------------------------------------------------------


def _fixed(model: CostModel, option: Option) -> float:
    vision = sum(model.multiplexed_seconds(option)) if option.multiplexed else 0.0
    return vision + model.data_parallel_seconds(option) + model.optimizer_seconds(option)


def _quick(model: CostModel, option: Option) -> float:
    times = (model.stage_costs(option) @ model.mean).sum(1)
    lags = 2 * sum(model.transfers(option))
    pipeline = schedule.estimate(times, option.layout.pipeline, option.microbatches)
    return pipeline + lags + _fixed(model, option)


def _refine(model: CostModel, option: Option) -> Option:
    """The same option with the best split that a bounded number of simulations finds."""
    pipeline, virtual = option.layout.pipeline, option.layout.virtual_pipeline
    if pipeline == 1:
        return option
    short = min(option.microbatches, 3 * pipeline)
    pieces = 2 * short * pipeline * virtual

    def changed(layers: split.Split) -> Option | None:
        try:
            layout = make_layout(
                model.spec,
                world_size=option.layout.tensor * pipeline * option.layout.data,
                tensor=option.layout.tensor,
                pipeline=pipeline,
                virtual_pipeline=virtual,
                sequence=option.layout.sequence,
                multiplexed=option.multiplexed,
                expert=option.layout.expert,
                vision_layers=layers[0],
                text_layers=layers[1],
            )
        except LayoutError:
            return None
        return dataclasses.replace(option, layout=layout)

    def load(layers: split.Split) -> np.ndarray:
        candidate = changed(layers)
        assert candidate is not None
        times = (model.stage_costs(candidate) @ model.mean).sum(1)
        return np.tile(times.reshape(virtual, pipeline).sum(0), virtual)

    def seconds(layers: split.Split) -> float:
        candidate = changed(layers)
        if candidate is None:
            return math.inf
        costs = model.stage_costs(candidate) @ model.mean
        forward = np.tile((costs[:, COMPUTE_F] + costs[:, COMM_F])[:, None], short)
        backward = np.tile((costs[:, COMPUTE_B] + costs[:, COMM_B])[:, None], short)
        lags = model.transfers(candidate)
        played = schedule.simulate(forward, backward, pipeline, transfer=lags)
        longer = (option.microbatches - short) * max(played.busy) / short
        fits = max(r.total for r in model.rank_memory(candidate)) <= model.gpu.usable_bytes
        return played.seconds + longer if fits else math.inf

    vision = () if option.multiplexed else option.layout.vision_layers
    start = (vision, option.layout.text_layers)
    budget = max(8, min(120, _BUDGET // max(pieces, _EVENTS)))
    best, _ = split.improve(start, seconds, load, budget)
    return changed(best) or option


def stage_times(
    model: CostModel, option: Option, work: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds [stages, packs] for packs of `work` [packs, 6]."""
    costs = model.stage_costs(option)
    forward = (costs[:, COMPUTE_F] + costs[:, COMM_F]) @ work.T
    backward = (costs[:, COMPUTE_B] + costs[:, COMM_B]) @ work.T
    return forward, backward


def sample_packs(model: CostModel, count: int, seed: int) -> np.ndarray:
    """[count, 6] packs drawn from the data, their mean moved onto the data's mean."""
    rng = np.random.default_rng(seed)
    work = model.packs.work
    rows = work[rng.permutation(len(work))[:count]] if count <= len(work) else work
    while len(rows) < count:
        rows = np.concatenate([rows, work[rng.permutation(len(work))[: count - len(rows)]]])
    mean = rows.mean(0)
    return rows * np.where(mean > 0, model.mean / np.where(mean > 0, mean, 1), 1)


def predict(model: CostModel, option: Option, gpus: int) -> Prediction:
    """What is expected of one option, fitting or not; two simulations with packs of the data."""
    layout, gpu = option.layout, model.gpu
    pipeline, virtual = layout.pipeline, layout.virtual_pipeline
    count = option.microbatches
    short = min(count, max(4 * pipeline, 16))
    short -= short % pipeline if virtual > 1 else 0
    played, bubbles = [], []
    for seed in range(2):
        forward, backward = stage_times(model, option, sample_packs(model, short, seed))
        timeline = schedule.simulate(forward, backward, pipeline, transfer=model.transfers(option))
        longer = (count - short) * max(timeline.busy) / short
        total = timeline.seconds + longer
        played.append(total)
        bubbles.append(1 - sum(timeline.busy) / pipeline * count / short / total)
    seconds = float(np.mean(played))
    costs = model.stage_costs(option)
    ranks = (costs @ model.mean).sum(1).reshape(virtual, pipeline).sum(0)
    vision = sum(model.multiplexed_seconds(option)) if option.multiplexed else 0.0
    slowest = _slowest_replica(model, option, costs)
    data, optimizer = model.data_parallel_seconds(option), model.optimizer_seconds(option)
    compute = (seconds + vision) * (1 + slowest)
    step = compute + data + optimizer
    comm = costs[:, COMM_F:].sum((0, 1)) @ model.mean / pipeline * count  # of a mean rank
    communication = (float(comm) + data) / step
    batch = count * layout.data
    per_pack = step_flops(model, model.mean)
    sigma = 0.05 if gpu.measured else 0.15
    uncertainty = math.sqrt(
        (sigma * (1 - communication)) ** 2
        + (0.4 * communication) ** 2
        + (0.5 * slowest / (1 + slowest)) ** 2
        + (float(np.std(played)) / seconds) ** 2
    )
    return Prediction(
        option=option,
        step_seconds=step,
        uncertainty=uncertainty,
        tokens_per_second_per_gpu=batch * float(model.mean[0]) / step / gpus,
        mfu=flops.utilization(batch * per_pack, step, gpus, gpu.peak),
        bubble=max(0.0, float(np.mean(bubbles))) * seconds / (seconds + vision),
        stage_imbalance=float(ranks.max() / ranks.mean() - 1),
        data_imbalance=slowest,
        communication=communication,
        data_parallel_seconds=data,
        optimizer_seconds=optimizer,
        memory=tuple(model.rank_memory(option)),
    )


def step_flops(model: CostModel, work: np.ndarray) -> float:
    """Model FLOPs, forward and backward, of (mean) work [6]."""
    factors = model.backward_factors()
    total = 0.0
    for name, price in flops.prices(model.spec).items():
        total += float(np.dot(price.weights.values(), work)) * (1 + factors[name][0])
        total += float(np.dot(price.attention.values(), work)) * (1 + factors[name][1])
    return total + model.adapter_flops(work)


def _slowest_replica(model: CostModel, option: Option, costs: np.ndarray) -> float:
    """How much longer the slowest of the data-parallel replicas takes than a mean one.

    Where packs are dealt by cost, half a percent is left. Where they are dealt in turn, times
    are nearly normal, and the largest of n normal values lies about
    Phi^-1((n - 3/8) / (n + 1/4)) standard deviations above the mean (Blom).
    """
    replicas = option.layout.data
    if replicas == 1:
        return 0.0
    pipeline = option.layout.pipeline
    per_pack = (costs.sum(1) @ model.packs.work.T).reshape(-1, pipeline, len(model.packs.work))
    loads = per_pack.sum(0)  # [ranks, packs]
    busiest = loads[int(loads.mean(1).argmax())]
    spread = float(busiest.std() / busiest.mean()) / math.sqrt(option.microbatches)
    random = spread * expected_largest(replicas)
    return min(random, _DEALT_BY_COST) if model.packs.policy in BY_COST else random


def expected_largest(count: int) -> float:
    """Mean of the largest of `count` standard normal values, by Blom's approximation."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


# --- refusals ---------------------------------------------------------------------------------


def _no_layout(spec: ModelSpec, gpu: Gpu, gpus: int, batch: int) -> str:
    replicas = {
        gpus // (t * p)
        for multiplexed in (False, True)
        for t in _tensor_sizes(spec, gpu, gpus, multiplexed)
        for p in range(1 + multiplexed, min(gpus // t, spec.num_layers, _MOST_STAGES) + 1)
        if (gpus // t) % p == 0
    }
    unit = min(replicas)
    near = max(unit, round(batch / unit) * unit)
    return (
        f"no layout of {gpus} GPUs can deal out {batch} packs a step evenly; set "
        f"--global_batch_packs to a multiple of {unit}, e.g. {near}"
    )


def _too_small(
    model: CostModel, gpus: int, global_batch: int | None, tight: tuple[float, Option]
) -> str:
    peak, option = tight
    gpu, layout = model.gpu, option.layout
    message = (
        f"the model does not fit in {gpus} x {gpu.name}: the smallest layout (tensor "
        f"{layout.tensor}, pipeline {layout.pipeline}) needs {peak / 1e9:,.0f} GB on a GPU that "
        f"has {gpu.usable_bytes / 1e9:,.0f} GB to give"
    )
    for factor in (2, 4, 8, 16, 32, 64):
        more = gpus * factor
        for other in _options(model, more, global_batch or default_global_batch(more)):
            if _fit(model, other)[0] is not None:
                return f"{message}; {more} GPUs would do"
    return f"{message}; lower --pack_length, or take GPUs with more memory"
