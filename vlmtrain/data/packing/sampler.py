"""Which packs each optimizer step takes, and who gets them: known for the whole run beforehand.

The packs of epoch 0, 1, 2, ... form one endless stream. Step k takes the next `global_batch` packs
of it, dealt to the data-parallel ranks by cost. A position in the stream is all the state.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.packing.costs import sample_costs
from vlmtrain.data.packing.plan import Plan, Policy, deal, epoch_entries, plan_epoch

_AHEAD = 1_000_000  # packs: looking at them takes a quarter of a minute (benchmarks/step_plans.py)
_COST_UNIT = 16  # costs are whole numbers of 1/16 token, so that every machine plans the same


@dataclass(frozen=True)
class Position:
    """A place in the stream of packs."""

    step: int = 0  # optimizer steps handed out
    epoch: int = 0
    pack: int = 0  # packs of this epoch already handed out


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step as planned."""

    at: Position
    after: Position
    dealt: list[list[np.ndarray]]  # packs of each data-parallel rank, as sample numbers
    metrics: dict[str, float]

    def digest(self) -> int:
        """CRC-32 of the packs and their deal."""
        value = zlib.crc32(repr((self.at, self.after)).encode())
        for packs in self.dealt:
            for pack in packs:
                value = zlib.crc32(pack.astype("<i8").tobytes(), zlib.crc32(b"|", value))
            value = zlib.crc32(b"||", value)
        return value


class Sampler:
    """The steps of a run. Thread-safe: nothing but a cache of plans changes.

    Args:
        index: the samples.
        spec: the model's shape; its sizes are the prices of the cost model.
        policy: how samples are packed.
        pack_length, global_batch, seed: a pack's most tokens, packs of a step, seed of the shuffle.
        ranks: data-parallel ranks.
        once: one epoch, each sample once (weights do not count); the last step is filled with empty
            packs.
    """

    def __init__(
        self,
        index: SampleIndex,
        spec: ModelSpec,
        policy: Policy,
        *,
        pack_length: int,
        global_batch: int,
        seed: int,
        ranks: int,
        once: bool = False,
    ) -> None:
        self.index, self.spec, self.policy = index, spec, policy
        self.seed, self.ranks = seed, ranks
        self.pack_length, self.global_batch, self.once = pack_length, global_batch, once
        costs = sample_costs(
            index.lengths, index.target_tokens, index.media_start, index.grids, spec
        ).sum(1)
        self.costs = np.maximum(np.rint(costs * _COST_UNIT), 1).astype(np.int64)
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def epoch_plan(self, epoch: int) -> Plan:
        """The packs of an epoch."""
        with self._lock:
            if epoch not in self._plans:
                index = self.index
                weights = [1.0 if self.once else source.weight for source in index.sources]
                self._plans[epoch] = plan_epoch(
                    index.lengths,
                    self.pack_length,
                    self.seed,
                    epoch,
                    index.content_hash,
                    costs=self.costs,
                    policy=self.policy,
                    entries=epoch_entries(
                        index.source, weights, self.seed, epoch, index.content_hash
                    ),
                )
                while len(self._plans) > 4:
                    self._plans.popitem(last=False)
            return self._plans[epoch]

    def epochs_done(self, position: Position) -> float:
        """Epochs before a position, with the fraction of the current one."""
        return position.epoch + position.pack / max(len(self.epoch_plan(position.epoch)), 1)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample of the first epoch."""
        return math.ceil(len(self.epoch_plan(0)) / self.global_batch)

    def steps_for_epochs(self, epochs: float, position: Position) -> int:
        """The least number of steps from the start of the run that covers `epochs` epochs: those
        made until `position`, perhaps with another global_batch, and those that are left. Where a
        step's packs more were made than that, the steps that would have done, of as many packs as
        those made have had on average."""
        whole = int(epochs)
        packs = float(sum(len(self.epoch_plan(epoch)) for epoch in range(whole)))
        if epochs > whole:
            packs += (epochs - whole) * len(self.epoch_plan(whole))
        made = sum(len(self.epoch_plan(epoch)) for epoch in range(position.epoch)) + position.pack
        if made - packs >= self.global_batch:
            return math.ceil(packs * position.step / made - 1e-9)
        return position.step + math.ceil((packs - made) / self.global_batch - 1e-9)

    def take(self, position: Position) -> PlannedStep:
        """The step at `position`."""
        packs: list[np.ndarray] = []
        costs: list[int] = []
        tokens = 0
        epoch, pack = position.epoch, position.pack
        while len(packs) < self.global_batch:
            if self.once and epoch > 0:
                packs.append(np.empty(0, dtype=np.int64))
                costs.append(0)
                continue
            plan = self.epoch_plan(epoch)
            if not len(plan):  # small weights: not every epoch has a sample
                epoch += 1
                continue
            packs.append(plan.packs[pack])
            costs.append(int(plan.costs[pack]))
            tokens += int(plan.tokens[pack])
            pack += 1
            if pack == len(plan):
                epoch, pack = epoch + 1, 0
        dealt = deal(np.array(costs), self.ranks, self.policy)
        heaviest = max(sum(costs[i] for i in share) for share in dealt)
        metrics = {
            "fill": tokens / (self.global_batch * self.pack_length),
            "rank_balance": heaviest * self.ranks / max(sum(costs), 1),
            "microbatch_balance": max(costs) * len(costs) / max(sum(costs), 1),
        }
        shares = [[packs[i] for i in share] for share in dealt]
        return PlannedStep(position, Position(position.step + 1, epoch, pack), shares, metrics)

    def steps(self, position: Position, until: int) -> Iterator[PlannedStep]:
        """The steps from `position` to step `until`, or as far as is looked ahead."""
        last = min(until, position.step + max(1, _AHEAD // self.global_batch))
        while position.step < last:
            step = self.take(position)
            yield step
            position = step.after
