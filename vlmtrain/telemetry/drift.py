"""Predicted and measured step time: a run's plan, a cost model fitted to its steps, a warning when
they differ.

The fit is seconds = c0 + c1 T + c2 sum t^2 + c3 P + c4 sum p^2 + c5 N with no negative coefficient:
T tokens, P patches (padding included) and N target tokens of a step per replica, t and p the
lengths that attention sees. It is made to the run's last steps, robustly: outliers (a slow disk, a
neighbour on the machine) do not count.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from vlmtrain.core.config import TrainConfig, to_dict
from vlmtrain.core.errors import UserError
from vlmtrain.core.files import write_text, writing
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.core.toml import toml_tables, toml_value
from vlmtrain.models.flops import Work
from vlmtrain.plan import workload
from vlmtrain.plan.costs import CostModel, Option
from vlmtrain.plan.hardware import Gpu, Peak, calibrated
from vlmtrain.plan.search import Prediction, predict
from vlmtrain.telemetry.ledger import ROWS, StepResult

TOLERANCE = 0.10  # of the prediction; more is reported
WARMUP = 2  # first steps, in which libraries warm up
FEW = 8  # steps that a median or a fit needs
_WINDOW = 256  # steps that the fit looks back
COEFFICIENTS = ("constant", "tokens", "token pairs", "patches", "patch pairs", "targets")


# --- the plan of a run ------------------------------------------------------------------------


def plan_of_run(
    config: TrainConfig, spec: ModelSpec, layout: Layout, gpu: Gpu, lengths: workload.Lengths
) -> Prediction:
    """What the planner expects of a run's layout on data of such lengths."""
    train, again = config.train, config.recompute
    packs = workload.make_packs(lengths, spec, train.pack_length, config.loader.packing)
    element = 2 if train.precision == "bf16" else 4
    cuda = gpu.name != "cpu"
    model = CostModel(spec, gpu, packs, config.freeze, config.lora, element=element, cuda=cuda)
    option = Option(
        layout,
        train.global_batch_packs // layout.data,
        again.vision,
        again.language,
        config.optimizer.offload_fraction,
    )
    return predict(model, option, layout.tensor * layout.pipeline * layout.data)


def describe(plan: Prediction, gpu: Gpu) -> str:
    """The plan in two lines."""
    low, high = (f(rank.total for rank in plan.memory) / 1e9 for f in (min, max))
    size = f"{high:.2f}" if high < 10 else f"{high:.0f}"
    if high - low > 0.05 * high:
        size = f"{low:.2f} to {size}" if high < 10 else f"{low:.0f} to {size}"
    return (
        f"plan for {gpu.name}: step {plan.step_seconds:.3g} s ± {plan.uncertainty:.0%}, "
        f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s per process, MFU {plan.mfu:.1%}, bubble "
        f"{plan.bubble:.1%}, {size} GB per process (efficiencies "
        f"{'measured' if gpu.measured else 'assumed'})"
    )


# --- the fit ----------------------------------------------------------------------------------


def features(work: Work, spec: ModelSpec, replicas: int) -> np.ndarray:
    """[6] of a step, per replica: 1, T, pairs of tokens, P, a mean layer's pairs of patches, N."""
    vision = spec.vision
    depth = max(vision.depth, 1)
    full_layers = depth if vision.window_size is None else len(vision.full_attention_layers)
    pairs = (full_layers * work.frame_pairs + (depth - full_layers) * work.window_pairs) / depth
    values = [replicas, work.tokens, work.causal_pairs, work.patches, pairs, work.targets]
    return np.array(values) / replicas


def fit(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients [6] for rows [steps, 6]; relative least squares in three rounds, each without
    the outliers of the one before: steps off by more than 4 times the median deviation.
    """
    keep = np.ones(len(seconds), dtype=bool)
    coefficients = np.zeros(rows.shape[1])
    for _ in range(3):
        weight = 1 / seconds[keep]
        matrix = rows[keep] * weight[:, None]
        scale = np.linalg.norm(matrix, axis=0)
        scale[scale == 0] = 1
        coefficients = nnls(matrix / scale, np.ones(keep.sum()))[0] / scale
        off = np.abs(rows @ coefficients / seconds - 1)
        near = off <= max(4 * float(np.median(off)), 1e-9)
        if near.sum() < FEW // 2 or (near == keep).all():
            break
        keep = near
    return coefficients


# --- the monitor ---------------------------------------------------------------------------------


class DriftMonitor:
    """Watches a run's steps on rank 0: prints the plan, fits, and reports a difference.

    Args:
        config, spec, layout: the run.
        gpu: its devices as the planner sees them; None: no plan, but the fit all the same.
        peak: what utilization is measured against.
        index: the run's `SampleIndex`.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        layout: Layout,
        gpu: Gpu | None,
        peak: Peak,
        index: Any,
    ) -> None:
        self.config, self.spec, self.layout, self.gpu, self.peak = config, spec, layout, gpu, peak
        self.plan: Prediction | None = None
        print(f"MFU is measured against {peak.source}" if peak.flops else peak.source, flush=True)
        if gpu is not None:
            lengths = workload.from_index(index, "data")
            self.plan = plan_of_run(config, spec, layout, gpu, lengths)
            print(describe(self.plan, gpu), flush=True)
        self.coefficients: np.ndarray | None = None
        self.measured: Gpu | None = None  # with efficiencies as this run reaches them
        self._rows: deque[np.ndarray] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._parts: deque[dict[str, float]] = deque(maxlen=_WINDOW)
        self._recent: deque[float] = deque(maxlen=FEW)
        self._steps = 0
        self._drifted = False

    def facts(self) -> dict[str, Any]:
        """What run.json says of this run."""
        layout = self.layout
        facts: dict[str, Any] = {
            "family": self.spec.family,
            "config": to_dict(self.config),
            "device": "cpu" if self.gpu is not None and self.gpu.name == "cpu" else "gpu",
            "processes": layout.tensor * layout.pipeline * layout.data,
            "layout": layout.describe(),
            "pipeline": layout.pipeline,
            "replicas": layout.data,
            "peak_flops": self.peak.flops,
            "peak": self.peak.source,
            "plan": None,
            "fit": None,
        }
        if self.plan is not None and self.gpu is not None:
            facts["plan"] = {
                "gpu": self.gpu.name,
                "step_seconds": self.plan.step_seconds,
                "uncertainty": self.plan.uncertainty,
                "tokens_per_second_per_gpu": self.plan.tokens_per_second_per_gpu,
                "mfu": self.plan.mfu,
                "bubble": self.plan.bubble,
                "memory_bytes": [
                    {**dataclasses.asdict(rank), "total": rank.total} for rank in self.plan.memory
                ],
                "waterfall": self.plan.waterfall(),
            }
        if self.coefficients is not None:
            facts["fit"] = dict(zip(COEFFICIENTS, self.coefficients.tolist(), strict=True))
        return facts

    def step(
        self, step: int, result: StepResult, seconds: float, row: dict[str, Any]
    ) -> dict[str, float]:
        """Take note of a step; what the fit expected of it is `predicted_seconds` of its row."""
        expected, lines = self.note(result.padded_work, seconds, row["waterfall"])
        for line in lines:
            print(f"step {step}: {line}", flush=True)
        if lines and self.measured is not None:
            keep_gpu(self.config.output / "gpu.toml", self.measured)
        return {} if expected is None else {"predicted_seconds": expected}

    def note(
        self, work: Work, seconds: float, parts: dict[str, float]
    ) -> tuple[float | None, list[str]]:
        """What the fit expected of this step before it was seen (None: too few steps so far), and
        lines for people.

        `work` with padding; `seconds` of the step, `parts` its waterfall. The time of saving, of
        evaluating and of waiting for data is no work on the step and left out.
        """
        self._steps += 1
        if self._steps <= WARMUP:
            return None, []
        row = features(work, self.spec, self.layout.data)
        excluded = parts["data_wait"] + parts["checkpoint"] + parts["evaluation"]
        active = seconds - excluded
        expected = None if self.coefficients is None else float(row @ self.coefficients)
        lines = self._drift(expected, active)
        self._rows.append(row)
        self._seconds.append(active)
        self._parts.append(parts)
        count = self._steps - WARMUP
        if count >= FEW and (count == FEW or count % FEW == 0) and not self._drifted:
            self.coefficients = fit(np.array(self._rows), np.array(self._seconds))
        if count == FEW:
            lines += self._compare()
        if expected is not None:
            expected += excluded
        return expected, lines

    def _drift(self, expected: float | None, active: float) -> list[str]:
        if not expected:
            return []
        self._recent.append(active / expected)
        if len(self._recent) < FEW:
            return []
        ratio = float(np.median(self._recent))
        drifted = abs(ratio - 1) > TOLERANCE
        if drifted == self._drifted:
            return []
        self._drifted = drifted
        if not drifted:
            return [f"step time is back within {TOLERANCE:.0%} of the model"]
        return [
            f"the last {FEW} steps took {_more(ratio)} the model fitted to the steps before: "
            "is something else running on this machine, or is it throttled?"
        ]

    def _compare(self) -> list[str]:
        if self.plan is None or self.gpu is None:
            return []
        measured = float(np.median(self._seconds))
        planned = self.plan.step_seconds
        taken = {name: float(np.median([p[name] for p in self._parts])) for name in ROWS}
        compute = taken["compute"] + taken["padding"]
        expected = self.plan.waterfall()
        work = expected["compute"] + expected["tensor"]
        difference = f"{_more(measured / planned)} the planned {planned:.3g} s"
        if abs(measured / planned - 1) <= TOLERANCE:
            return [f"measured {measured:.3g} s a step, {difference}"]
        self.measured = as_measured(self.gpu, expected, taken, self.config.train.precision)
        return [
            f"measured {measured:.3g} s a step, {difference}; compute alone "
            f"{_more(compute / work)} planned: gpu.toml in the output folder tells the planner "
            "(vlmtrain plan --gpu OUTPUT/gpu.toml)"
        ]


def _more(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'} than"


def as_measured(
    gpu: Gpu, planned: dict[str, float], taken: dict[str, float], precision: str
) -> Gpu:
    """The GPU with the efficiencies that a run has reached: matrix work from its compute, the
    links from its reduction of gradients (4 of the 4 + e bytes that a parameter moves), memory
    from the rest of its optimizer. What it has not used keeps what was assumed."""
    work = planned["compute"] + planned["tensor"]
    compute = taken["compute"] + taken["padding"]
    result = calibrated(gpu, work, compute) if compute > 0 else gpu
    old, moved = result.efficiency, planned["gradients"]
    reduced = moved * 4 / (6 if precision == "bf16" else 8)
    link, optimizer = 1.0, taken["optimizer"]
    if reduced > 0 and taken["gradients"] > 0:
        link = min(reduced / taken["gradients"], 1 / old.link)
        optimizer -= (moved - reduced) / link
    memory = planned["optimizer"] / optimizer if optimizer > 0 else 1.0
    efficiency = dataclasses.replace(
        old, link=old.link * link, memory=min(1.0, old.memory * memory)
    )
    return dataclasses.replace(result, efficiency=efficiency)


def keep_gpu(path: Path, gpu: Gpu) -> bool:
    """As `write_gpu`; where it can't be written, which ends no run, a line says so."""
    try:
        with writing(path):
            write_gpu(path, gpu)
    except UserError as error:
        print(f"{error}; the run goes on without it", flush=True)
        return False
    return True


def write_gpu(path: Path, gpu: Gpu) -> None:
    """A GPU file for `vlmtrain plan --gpu` with the efficiencies that a run has reached."""
    values = dataclasses.asdict(gpu)
    efficiency = values.pop("efficiency")
    values.pop("name")
    values["step_memory"] = float(f"{gpu.step_memory:.4g}")
    rounded = {k: float(f"{v:.4g}") for k, v in efficiency.items()}
    lines = [f"# {gpu.name} as a run has measured it"]
    lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    write_text(path, "\n".join(lines) + "\n" + toml_tables({"efficiency": rounded}))
