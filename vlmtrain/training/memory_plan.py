"""What the steps of a run need: planned and made to fit before the model is built, measured before
step 1, and what the plan had wrong kept for the next one."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from vlmtrain.core.collectives import on_first_rank
from vlmtrain.core.config import TrainConfig
from vlmtrain.core.device import Backend
from vlmtrain.core.errors import shown
from vlmtrain.core.files import exists
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.loader import PackedLoader
from vlmtrain.data.packing.sampler import Position, Sampler
from vlmtrain.plan.hardware import Gpu, PlanError, find_gpu
from vlmtrain.plan.heaviest import Loads, Peak, peak_models
from vlmtrain.telemetry.drift import TOLERANCE, keep_gpu
from vlmtrain.training.engine import Engine
from vlmtrain.training.fit import advice, find_remedy, fit, nothing_fits
from vlmtrain.training.optimizer import offload_fraction
from vlmtrain.training.rehearsal import (
    RankPeak,
    capacity_here,
    check_fits,
    correction,
    describe,
    rehearse,
)
from vlmtrain.training.setup import say
from vlmtrain.training.watchdog import Watchdog


class MemoryPlan:
    """Of one run; every method is collective.

    Args:
        position: in the stream of packs, from where the run goes on.
        before: bytes in use before the model is built; on a CPU the program itself.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        layout: Layout,
        backend: Backend,
        index: SampleIndex,
        position: Position,
        before: int,
    ) -> None:
        self.config, self.spec, self.layout, self.index = config, spec, layout, index
        self.backend, self.position, self.before = backend, position, before
        self.file = config.output / "gpu.toml"
        self.gpu = on_first_rank(self._kept)
        self.factor = 1.0 if self.gpu is None else self.gpu.step_memory
        self._known: dict[int, tuple[Sampler, Loads]] = {}

    def fit(self) -> TrainConfig:
        """The configuration, changed where it did not fit and `--train.fit auto` says so."""
        if self.config.train.fit == "ignore" or not self._of(self.layout)[1].places:
            return self.config
        room, cuda = self._room(), self.backend.is_cuda
        chosen, changed = on_first_rank(
            lambda: fit(
                self.config, self.spec, self.layout, self._loads, room, self._ids, cuda, self.factor
            )
        )
        # Not what may differ from rank to rank, as the place of the model's folder.
        self.config = replace(
            self.config,
            recompute=chosen.recompute,
            optimizer=chosen.optimizer,
            parallel=chosen.parallel,
        )
        if changed and dist.get_rank() == 0:
            say(changed)
        return self.config

    def rehearse(self, engine: Engine, loader: PackedLoader, gpu: Gpu | None) -> list[RankPeak]:
        """Measure the heaviest steps; gpu: the device as the planner sees it.

        Raises:
            UserError: as `rehearse`, or a rank has measured more than it has; on all ranks.
        """
        if not self.config.train.rehearse or not self._loads(self.layout).places:
            return []
        start = time.perf_counter()
        with Watchdog(engine.clock.place, self.config.train.timeout):
            loads = self._loads(self.layout)
            peaks = rehearse(self._now(), engine, loader, loads, self.before, self.factor)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - start
            say(f"rehearsed the heaviest steps in {seconds:.1f} s; nothing was changed")
            say("\n".join(describe(peaks)) or "  peaks of memory can't be measured on this system")
        if not peaks:
            return []
        off = correction(peaks)
        self.factor *= off
        if abs(off - 1) > TOLERANCE:
            on_first_rank(partial(self._keep, gpu))
        if self.config.train.fit != "ignore":
            room = self._room()
            comes = self._comes_back()
            later = [replace(p, measured=p.measured + comes[p.stage]) for p in peaks]
            check_fits(later, partial(self._advice, room))
        return peaks

    def _now(self) -> TrainConfig:
        """The configuration with the share of the optimizer that its next step offloads."""
        section = self.config.optimizer
        share = offload_fraction(section, self.position.step)
        return replace(
            self.config, optimizer=replace(section, offload_fraction=share, offload_schedule=())
        )

    def _comes_back(self) -> list[float]:
        """Bytes of the optimizer's state that its schedule takes from the host later; of each rank
        of a pipeline."""
        now, later = (
            peak_models(config, self.spec, self.layout, cuda=self.backend.is_cuda)
            for config in (self._now(), self.config)
        )
        return [b.states() - a.states() for a, b in zip(now, later, strict=True)]

    def _kept(self) -> Gpu | None:
        """On rank 0: the device as an earlier start has measured it."""
        if not exists(self.file):
            return None
        try:
            return find_gpu(str(self.file))
        except PlanError as error:
            say(f"{error}; memory is planned without it")
            return None

    def _keep(self, gpu: Gpu | None) -> None:
        """On rank 0: the factor, for `--train.fit` and for `vlmtrain plan --gpu`."""
        said = f"beside the model's states a step needs {self.factor:.2f} times the planned memory"
        if gpu is None:  # what is in no table has no file
            return say(said)
        if keep_gpu(self.file, replace(self.gpu or gpu, step_memory=self.factor)):
            said += f"; {self.file} tells the next --train.fit and vlmtrain plan --gpu"
        say(said)

    def _advice(self, room: float) -> str:
        remedy = find_remedy(
            self.config,
            self.spec,
            self.layout,
            self._loads,
            room,
            self.backend.is_cuda,
            self.factor,
        )
        return nothing_fits(self.layout) if remedy is None else advice(remedy)

    def _room(self) -> float:
        """Bytes for the run on its smallest rank."""
        rooms: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(rooms, capacity_here(self.backend) - self.before)
        return min(rooms)

    def _loads(self, layout: Layout) -> Loads:
        return self._of(layout)[1]

    def _of(self, layout: Layout) -> tuple[Sampler, Loads]:
        """What each step holds, dealt to a layout's replicas."""
        train = self.config.train
        if layout.data not in self._known:
            sampler = Sampler(
                self.index,
                self.spec,
                self.config.loader.packing,
                pack_length=train.pack_length,
                global_batch=train.global_batch_packs,
                seed=train.seed,
                ranks=layout.data,
            )
            total = train.steps or sampler.steps_for_epochs(train.epochs, self.position)
            steps = sampler.steps(self.position, total)
            self._known[layout.data] = sampler, Loads.of(steps, self.index, self.spec, layout)
        return self._known[layout.data]

    def _ids(self, layout: Layout, peak: Peak) -> str:
        sampler, loads = self._of(layout)
        return shown(peak.ids(sampler, loads))
