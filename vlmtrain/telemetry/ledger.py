"""The ledger of a step: what was worked on, how fast, and where the seconds went.

Every rank times its own spans (`core.clock.Clock`); one small all-gather after each step brings
them together with the counts of the packs. From that table rank 0 computes the rows of
`waterfall`, means over all ranks that add up to the step:

    compute      forward and backward of real tokens and patches; tensor-parallel communication and
                 recomputation are inside
    padding      the same for padded tails (tensor parallelism's), by FLOPs
    bubble       ranks of a pipeline that wait for others (also: transfers between stages, and the
                 exchange of multiplexed vision)
    imbalance    replicas that wait for the slowest one
    data_wait    the loader
    gradients    reduction of gradients that backward passes did not hide
    optimizer    clearing gradients, their norm, the update, gathering parameters
    checkpoint   copying state to the host; starting and completing the write
    evaluation   the loss of held-out data
    other        everything else on the host: moving packs, this ledger, the log

Waiting is told from work without comparing clocks: ranks leave the last step together, so the one
that passes longest through forward and backward has not waited after it, and what the others spend
more than that in reduction and optimizer is waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.config import FreezeSection, LoraSection, RecomputeSection
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models import flops
from vlmtrain.models.flops import Work
from vlmtrain.plan.hardware import Peak
from vlmtrain.telemetry.stragglers import Stragglers

ROWS = (
    "compute",
    "padding",
    "bubble",
    "imbalance",
    "data_wait",
    "gradients",
    "optimizer",
    "checkpoint",
    "evaluation",
    "other",
)


@dataclass(frozen=True)
class Totals:
    """Sums over packs; they add."""

    loss: float = 0.0
    tokens: float = 0.0  # without padding
    pad_tokens: float = 0.0
    target_tokens: float = 0.0
    image_tokens: float = 0.0  # of images and videos
    samples: float = 0.0
    images: float = 0.0
    videos: float = 0.0
    causal_pairs: float = 0.0  # padding left out
    pad_pairs: float = 0.0
    patches: float = 0.0
    frame_pairs: float = 0.0
    window_pairs: float = 0.0
    aux_loss: float = 0.0

    def values(self) -> list[float]:
        return [getattr(self, f.name) for f in fields(self)]


def replica_totals(
    packs: Sequence[PackedBatch], spec: ModelSpec, loss: float, aux_loss: float = 0.0
) -> Totals:
    """What a replica's packs of a step hold; the losses are summed over their target tokens.

    The packs must be in host memory: their offsets and grids are read.
    """
    useful, padded = Work(), Work()
    media = videos = 0
    for pack in packs:
        useful += Work.of_batch(pack, spec.vision)
        padded += Work.of_batch(pack, spec.vision, padding=True)
        media += len(pack.grid_thw)
        videos += _videos(pack, spec)
    return Totals(
        loss=loss,
        tokens=useful.tokens,
        pad_tokens=padded.tokens - useful.tokens,
        target_tokens=sum(pack.target_tokens for pack in packs),
        image_tokens=sum(pack.image_tokens for pack in packs),
        samples=sum(len(pack.sample_ids) for pack in packs),
        images=media - videos,
        videos=videos,
        causal_pairs=useful.causal_pairs,
        pad_pairs=padded.causal_pairs - useful.causal_pairs,
        patches=useful.patches,
        frame_pairs=useful.frame_pairs,
        window_pairs=useful.window_pairs,
        aux_loss=aux_loss,
    )


def _videos(pack: PackedBatch, spec: ModelSpec) -> int:
    """Videos among a pack's media: by the token at each one's first place."""
    if not len(pack.grid_thw):
        return 0
    ids = pack.input_ids[pack.visual_index >= 0]
    rows = pack.grid_thw.prod(1) // spec.vision.merge_unit
    first = rows.cumsum(0) - rows
    return int((ids[first] == spec.video_token_id).sum())


_SPANS = ("reading", "waited", "step", "passes", "gradients", "optimizer", "compute")


@dataclass(frozen=True)
class Ranks:
    """What every rank has measured in a step: float64 [world] each; seconds unless said."""

    reading: np.ndarray  # until its own packs were there
    waited: np.ndarray  # for data, its own and the others'
    step: np.ndarray  # Engine.step up to the gathering of this table
    passes: np.ndarray  # forward and backward of all microbatches, waiting included
    gradients: np.ndarray
    optimizer: np.ndarray
    compute: np.ndarray  # of passes: at work
    replica: np.ndarray  # data-parallel rank
    stage: np.ndarray  # pipeline rank
    memory: np.ndarray  # peak bytes so far

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same values on every rank."""

    loss: float  # mean over the target tokens of the global batch
    grad_norm: float
    tokens: int  # without padding
    target_tokens: int
    image_tokens: int
    pad_tokens: int
    samples: int
    images: int
    videos: int
    work: Work  # of all replicas, padding left out
    padded_work: Work  # with padding
    ranks: Ranks
    aux_loss: float  # load-balancing loss of a mixture of experts, mean over the target tokens


def gather(
    totals: Totals,
    spans: Mapping[str, float],
    *,
    grad_norm: float,
    reading: float,
    waited: float,
    step: float,
    place: tuple[int, int],
    memory: int,
    device: torch.device,
) -> StepResult:
    """Bring the ranks' counts and times together. Collective: one all-gather of 24 numbers.

    Args:
        totals: of this rank's replica, on the one rank that reports for it; zeros on the others.
        spans: `Clock.read()`.
        reading, waited, step: seconds for its own packs, for data and in `Engine.step`.
        place: data-parallel and pipeline rank.
        memory: peak bytes.
        device: where the process group gathers.
    """
    # passes contain the reduction of gradients, which Megatron's schedules call at their end
    passes = spans.get("passes", 0.0) - spans.get("gradients", 0.0)
    times = {**spans, "reading": reading, "waited": waited, "step": step, "passes": passes}
    local = [*totals.values(), *(times.get(name, 0.0) for name in _SPANS), *place, memory]
    row = torch.tensor(local, dtype=torch.float64, device=device)
    table = torch.empty(dist.get_world_size() * len(row), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(table, row)
    columns = table.view(-1, len(row)).T.cpu().numpy()
    counted = len(fields(Totals))
    total = Totals(*columns[:counted].sum(1).tolist())
    vision = int(total.patches), int(total.frame_pairs), int(total.window_pairs)
    work = Work(int(total.tokens), int(total.causal_pairs), *vision, int(total.target_tokens))
    return StepResult(
        loss=total.loss / max(total.target_tokens, 1.0),
        grad_norm=grad_norm,
        tokens=work.tokens,
        target_tokens=int(total.target_tokens),
        image_tokens=int(total.image_tokens),
        pad_tokens=int(total.pad_tokens),
        samples=int(total.samples),
        images=int(total.images),
        videos=int(total.videos),
        work=work,
        padded_work=work + Work(int(total.pad_tokens), int(total.pad_pairs)),
        ranks=Ranks(*columns[counted:]),
        aux_loss=total.aux_loss / max(total.target_tokens, 1.0),
    )


def waterfall(
    ranks: Ranks,
    seconds: float,
    checkpoint: float,
    padding: float,
    *,
    waits: bool,
    evaluation: float = 0.0,
) -> dict[str, float]:
    """Seconds of ROWS, means over all ranks.

    Args:
        ranks: the step's table; rank 0 comes first.
        seconds: wall time of the step on rank 0, everything between two steps' ends.
        checkpoint: of it, seconds of saving (ranks save together).
        padding: share of compute that goes into padding.
        waits: whether ranks of a replica wait for each other (pipeline, multiplexed vision); else
            what forward and backward passes take beside compute is `other`.
        evaluation: of `seconds`, those of measuring held-out data.
    """
    replicas = np.unique(ranks.replica)
    slowest_passes = {d: ranks.passes[ranks.replica == d].max() for d in replicas}
    replica_passes = np.array([slowest_passes[d] for d in ranks.replica])
    slowest = float(ranks.passes.max())
    late = slowest - ranks.passes  # waited somewhere after its own passes
    gradients = np.maximum(ranks.gradients - late, 0.0)
    remaining_wait = np.maximum(late - ranks.gradients, 0.0)
    optimizer = np.maximum(ranks.optimizer - remaining_wait, 0.0)
    # what is left: ranks did not start together after all
    unseen = np.maximum(remaining_wait - ranks.optimizer, 0.0)
    not_compute = replica_passes - ranks.compute - unseen
    host = ranks.step - ranks.passes - ranks.gradients - ranks.optimizer
    compute = float(ranks.compute.mean())
    outside = checkpoint + evaluation
    rest = seconds - outside - ranks.waited - ranks.step  # all ranks' steps are equally long
    return {
        "compute": compute * (1 - padding),
        "padding": compute * padding,
        "bubble": float(not_compute.mean()) if waits else 0.0,
        "imbalance": float((slowest - replica_passes).mean()),
        "data_wait": float(ranks.waited.mean()),
        "gradients": float(gradients.mean()),
        "optimizer": float(optimizer.mean()),
        "checkpoint": checkpoint,
        "evaluation": evaluation,
        "other": float((host + rest).mean()) + (0.0 if waits else float(not_compute.mean())),
    }


@dataclass(frozen=True)
class Ledger:
    """Turns a step's result into the figures of metrics.jsonl."""

    spec: ModelSpec
    layout: Layout
    peak: Peak
    freeze: FreezeSection = field(default_factory=FreezeSection)
    lora: LoraSection = field(default_factory=LoraSection)
    recompute: RecomputeSection = field(default_factory=RecomputeSection)
    stragglers: Stragglers = field(default_factory=Stragglers)

    def row(
        self, result: StepResult, seconds: float, checkpoint: float, evaluation: float = 0.0
    ) -> dict[str, Any]:
        """Throughput, FLOPs, utilization and the waterfall of a step of `seconds`, of which
        `checkpoint` went into saving and `evaluation` into held-out data."""
        ranks, world = result.ranks, len(result.ranks)
        model = self._count(result.work).total
        padded = self._count(result.padded_work).total
        executed = self.executed(result.padded_work)
        rate = self.peak.flops
        parts = waterfall(
            ranks,
            seconds,
            checkpoint,
            1 - model / padded,
            waits=self.layout.pipeline > 1 or self.layout.multiplexed,
            evaluation=evaluation,
        )
        return {
            "tokens_per_second_per_gpu": result.tokens / seconds / world,
            "samples_per_second": result.samples / seconds,
            "samples": result.samples,
            "images": result.images,
            "videos": result.videos,
            "model_flops": model,
            "hardware_flops": executed,
            "mfu": None if rate is None else flops.utilization(model, seconds, world, rate),
            "hfu": None if rate is None else flops.utilization(executed, seconds, world, rate),
            "waterfall": parts,
            **({"aux_loss": result.aux_loss} if self.spec.router_aux_loss_coef else {}),
            "replica_balance": _balance(ranks.compute, ranks.replica),
            "stage_balance": _balance(ranks.compute, ranks.stage),
            **self.stragglers.step(ranks.reading, ranks.compute, seconds),
            "peak_memory_gb": float(ranks.memory.max()) / 1e9,
            "memory_gb": [float(ranks.memory[ranks.stage == s].max()) / 1e9
                          for s in np.unique(ranks.stage)],
        }  # fmt: skip

    def executed(self, work: Work) -> int:
        """FLOPs that the machines execute for `work`, recomputation included."""
        levels = {"vision": self.recompute.vision, "language": self.recompute.language}
        full = [tower for tower, level in levels.items() if level == "full"]
        selective = [tower for tower, level in levels.items() if level == "selective"]
        counted = flops.count(
            self.spec, work, self.freeze, self.lora, recomputed=[*full, *selective]
        )
        return flops.hardware_flops(
            counted,
            recompute=full,
            selective=selective,
            multiplexed=self.layout.multiplexed,
        )

    def _count(self, work: Work) -> flops.FlopCount:
        return flops.count(self.spec, work, self.freeze, self.lora)


def _balance(seconds: np.ndarray, group: np.ndarray) -> float:
    """The busiest group's mean over the mean of all groups."""
    means = np.array([seconds[group == g].mean() for g in np.unique(group)])
    return float(means.max() / means.mean()) if means.mean() > 0 else 1.0
