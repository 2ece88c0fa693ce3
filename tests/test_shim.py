"""The CPU's stand-in for torch.cuda."""

from __future__ import annotations

import pytest
import torch

from vlmtrain.cpu import shim


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")
def test_suspended_it_redirects_nothing() -> None:
    shim.install()
    assert torch.ones(2, device="cuda").device.type == "cpu"
    shim.suspend()
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.ones(2, device="cuda")
    shim.install()
    assert torch.ones(2, device="cuda").device.type == "cpu"
