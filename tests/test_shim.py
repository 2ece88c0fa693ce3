"""The CPU's stand-in for torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")
def test_megatrons_backward_is_out_of_its_reach() -> None:
    from megatron.core.pipeline_parallel import schedules

    shim.install()
    disabled = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            disabled.append(torch._C._is_torch_function_all_disabled())
            return grad

    config = SimpleNamespace(timers=None, grad_scale_func=None, deallocate_pipeline_outputs=False)
    x = torch.ones(2, requires_grad=True)
    schedules.backward_step(x, Look.apply(x).sum(), None, None, config)
    assert disabled == [True] and torch.equal(x.grad, torch.ones(2))
    assert torch.ones(2, device="cuda").device.type == "cpu"
