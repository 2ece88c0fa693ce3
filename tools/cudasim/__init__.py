"""Two simulated GPUs: see README.md."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

#: The sources whose kernels are run.
CSRC = Path(__file__).resolve().parents[2] / "csrc"


def run(command: Sequence[str]) -> str:
    """Runs a tool; its output, or AssertionError with it."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
