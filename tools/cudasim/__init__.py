"""Two simulated GPUs: see README.md."""

from pathlib import Path

#: The sources whose kernels are run.
CSRC = Path(__file__).resolve().parents[2] / "csrc"
