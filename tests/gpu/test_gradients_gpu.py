"""All gradients of a model on a real GPU beside transformers' there, for `make gpu-check`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
def test_gradients_are_those_of_transformers(dtype: str, tmp_path: Path) -> None:
    """float32: within the bound of tests/parity. bfloat16: at most twice as far from float32's as
    transformers' are."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.gradients_worker", dtype]
    done = subprocess.run(
        [*command, str(tmp_path / "found.pt")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    assert found["ours"].keys() == found["exact"].keys()
    for name, exact in found["exact"].items():
        error, theirs = (float((found[of][name] - exact).norm()) for of in ("ours", "theirs"))
        allowed = 1e-4 * float(exact.norm()) if dtype == "float32" else 2 * theirs
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
