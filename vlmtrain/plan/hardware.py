"""GPUs and links: four built-in kinds, a TOML file for others, and measured efficiencies.

Peak rates are the vendors' dense bf16 figures; bandwidths are one direction, per GPU. The
efficiencies of matrix work are what good trainers reach on 8K packs. They are guesses until a run
has been measured: write the measured ones into a TOML file

    base = "h100"                      # start from a built-in kind
    measured = true                    # narrows the stated uncertainty
    [efficiency]
    language = 0.47
    vision = 0.41
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmtrain.core.errors import UserError
from vlmtrain.core.files import is_file
from vlmtrain.core.toml import read_toml
from vlmtrain.data.packing.costs import LANGUAGE_EFFICIENCY, VISION_EFFICIENCY


class PlanError(UserError):
    """A question the planner can't answer; the message names a valid choice."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a peak that a training run reaches."""

    language: float = LANGUAGE_EFFICIENCY  # of peak_tflops, in the language model
    vision: float = VISION_EFFICIENCY  # of peak_tflops, in the vision tower
    link: float = 0.75  # of nvlink_gbs and network_gbs
    memory: float = 0.80  # of memory_gbs, in the optimizer


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU and the machine it sits in; GB are 1e9 bytes."""

    name: str
    peak_tflops: float  # dense bf16
    memory_gb: float
    memory_gbs: float  # GB/s
    nvlink_gbs: float  # between GPUs of a node
    network_gbs: float  # to other nodes
    pcie_gbs: float = 25.0  # to and from the host
    host_gbs: float = 25.0  # host memory traffic of the CPU optimizer, per GPU
    host_memory_gb: float = 128.0  # per GPU
    gpus_per_node: int = 8
    reserved_gb: float = 6.0  # CUDA context, NCCL buffers, fragmentation
    latency_us: float = 15.0  # of one message
    overhead_us: float = 300.0  # of the host between two pieces of work of a pipeline
    # Measured over planned memory of a step, beside parameters, gradients and optimizer state.
    step_memory: float = 1.0
    measured: bool = False
    efficiency: Efficiency = Efficiency()

    @property
    def peak(self) -> float:
        """FLOP/s."""
        return self.peak_tflops * 1e12

    @property
    def usable_bytes(self) -> float:
        return (self.memory_gb - self.reserved_gb) * 1e9


BUILT_IN = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80", 312, 85.0, 2039, 300, 25),
        Gpu("h100", 989, 85.0, 3350, 450, 50, pcie_gbs=50, host_gbs=40),
        Gpu("h200", 989, 150.0, 4800, 450, 50, pcie_gbs=50, host_gbs=40),
        Gpu("b200", 2250, 191.0, 8000, 900, 50, pcie_gbs=50, host_gbs=50, host_memory_gb=256),
    )
}


def find_gpu(name: str) -> Gpu:
    """A built-in kind by name, or the one that a `.toml` file describes.

    Raises:
        PlanError: unknown name (with the nearest one), or a file that doesn't describe a GPU.
    """
    if name.endswith(".toml") or is_file(name):
        return _from_toml(Path(name))
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = {"a100": "a100-80", "a100-80gb": "a100-80"}.get(key, key)
    if key in BUILT_IN:
        return BUILT_IN[key]
    near = difflib.get_close_matches(key, BUILT_IN, 1, 0.0)[0]
    raise PlanError(
        f"--gpu {name!r} is not known; the nearest is {near} (known: {', '.join(BUILT_IN)}; for "
        "another one write a TOML file and pass its path)"
    )


def _from_toml(path: Path) -> Gpu:
    table = read_toml(path, f"--gpu {path}", PlanError)
    base = table.pop("base", None)
    if base is not None and (not isinstance(base, str) or base.lower() not in BUILT_IN):
        raise PlanError(f"--gpu {path}: base {base!r} is none of {', '.join(BUILT_IN)}")
    efficiency = table.pop("efficiency", {})
    if not isinstance(efficiency, dict):
        raise PlanError(f"--gpu {path}: efficiency must be a table, it is {efficiency!r}")
    start = BUILT_IN[base.lower()] if base else None
    values: dict[str, Any] = {"name": path.stem}
    values |= _typed(table, Gpu, f"--gpu {path}: ")
    values["efficiency"] = dataclasses.replace(
        start.efficiency if start else Efficiency(),
        **_typed(efficiency, Efficiency, f"--gpu {path}: efficiency."),
    )
    for name, share in dataclasses.asdict(values["efficiency"]).items():
        if not 0 < share <= 1:
            raise PlanError(f"--gpu {path}: efficiency.{name} is {share}; it must be in (0, 1]")
    if start:
        return dataclasses.replace(start, **values)
    needed = [
        f.name
        for f in dataclasses.fields(Gpu)
        if f.default is dataclasses.MISSING and f.name not in values
    ]
    if needed:
        raise PlanError(
            f"--gpu {path} lacks {', '.join(needed)}; set them, or start from a built-in kind "
            f'with base = "h100"'
        )
    return Gpu(**values)


def _typed(table: dict[str, Any], kind: type, where: str) -> dict[str, Any]:
    """Check a table's keys and values against a dataclass of numbers."""
    known = {f.name: f.type for f in dataclasses.fields(kind) if f.name != "efficiency"}
    result: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.0)[0]
            raise PlanError(f"{where}{key} is no setting of a GPU; the nearest is {near}")
        wanted = known[key]
        ok = {
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "int": isinstance(value, int) and not isinstance(value, bool) and value > 0,
            "float": isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0,
        }[str(wanted)]
        if not ok:
            sign = " above 0" if wanted in ("int", "float") else ""
            raise PlanError(f"{where}{key} is {value!r}; it must be a {wanted}{sign}")
        result[key] = float(value) if wanted == "float" else value
    return result


def calibrated(gpu: Gpu, predicted_seconds: float, measured_seconds: float) -> Gpu:
    """The same GPU with compute efficiencies scaled so that a predicted step takes as long as it
    was measured to take; use it where only whole steps were timed."""
    factor = predicted_seconds / measured_seconds
    old = gpu.efficiency
    new = dataclasses.replace(
        old,
        language=min(1.0, old.language * factor),
        vision=min(1.0, old.vision * factor),
    )
    return dataclasses.replace(gpu, efficiency=new, measured=True)


@dataclass(frozen=True)
class Peak:
    """What utilization is measured against."""

    flops: float | None  # FLOP/s of one process; None: not known
    source: str  # for people
