"""The kernels on fibers, as the cases run them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from tools.cudasim.fibers.build import Library
from tools.cudasim.fibers.device import Device

#: The launchers of a family of mutants and the GPU that they run on.
FAMILIES = {
    "window": ("window", 80),
    "window-vision": ("window_vision", 80),
    "sm80": ("sm80", 80),
    "sm80-vision": ("sm80_vision", 80),
    "sm90-forward": ("sm90", 90),
    "sm90-backward": ("sm90", 90),
    "sm90-fused": ("sm90", 90),
    "sm90-vision": ("sm90_vision", 90),
    "embedding": ("embedding", 80),
    "loss": ("loss", 80),
    "layer": ("layer", 80),
}
#: Launchers whose names follow no family's.
ALONE = {"tiles": "list_tiles", "loss": "cross_entropy"} | {
    name: name
    for name in ("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotate_heads")
}


@dataclass
class Emulated:
    """The launchers of a library."""

    library: Library
    rng: np.random.Generator  # of the schedule
    mutant: int  # the number of the one that is on, or 0
    prefix: str  # of the launchers' names
    capability: int  # of the GPU

    def device(self) -> Device:
        seed = int(self.rng.integers(1 << 62))
        return Device(self.library, seed, self.mutant, self.capability)

    def run(self, device: Device, launcher: str, params: ctypes.Structure) -> int:
        name = ALONE.get(launcher, f"{self.prefix}_{launcher}")
        if name == "sm90_backward" and params.dq_sum:
            name = "sm90_fused_backward"
        function = self.library.function(f"{name}_cuda")
        return device.call(function, ctypes.byref(params), ctypes.c_void_p(None))


def kernels_of(
    library: Library, rng: np.random.Generator, family: str, mutant: int = 0
) -> Emulated:
    """What the cases of a family run."""
    return Emulated(library, rng, mutant, *FAMILIES[family])
