"""Whole training steps on a real GPU beside transformers' there, for `make gpu-check`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.ranks import ROOT
from vlmkernels import _native

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)
if not _native.has_cuda_kernels():
    pytest.skip("vlmkernels was built without CUDA kernels", allow_module_level=True)

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_are_those_of_transformers(dtype: str) -> None:
    """In bfloat16 at most twice as far from float32's as transformers' are, and a quarter of a
    rounding."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu.step_worker", dtype],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().split("\n")[-1])
    losses = {name: torch.tensor(x).double() for name, x in said.items()}
    exact = losses["float32"]
    assert exact[-1] < 0.9 * exact[0], f"nothing was learnt: {exact}"

    def worst(name: str) -> float:
        return float((losses[name] / exact - 1).abs().max())

    allowed = 1e-4 if dtype == "float32" else 2 * worst(dtype) + 2**-10
    assert worst("ours") <= allowed, f"{losses}: {worst('ours'):.1e}, allowed {allowed:.1e}"
