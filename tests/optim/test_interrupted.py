"""Ctrl-C in HybridDeviceOptimizer.step(), of a trainer that then saves, or makes the step again."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numeric import assert_bitwise
from vlmkernels.optim import HybridDeviceOptimizer, host_step, hybrid
from vlmkernels.optim.transfer import HostTransfers


class Interrupted(HostTransfers):
    """Ctrl-C where the `last`-th copy in one direction is asked for, before it is made or after."""

    def __init__(self, last: int, after: bool, way: str = "h2d") -> None:
        self.left, self.after, self.way = last, after, way

    def copy(self, way: str, *tensors: Any) -> Any:
        self.left -= way == self.way
        stops = way == self.way and self.left == 0
        if self.after or not stops:
            getattr(HostTransfers, way)(self, *tensors)
        if stops:
            raise KeyboardInterrupt

    def h2d(self, sources: list[Tensor], targets: list[Tensor], unread: bool = False) -> Any:
        return self.copy("h2d", sources, targets)

    def d2h(self, sources: list[Tensor], targets: list[Tensor], after: Any = None) -> Any:
        return self.copy("d2h", sources, targets)


def params_of(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (9, 4096, 700)]


def fill(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.full_like(param, -1e-3)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("last", [1, 2, 3])
@pytest.mark.parametrize("way", ["h2d", "d2h"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_step_can_be_saved_and_repeated(
    dtype: torch.dtype, way: str, last: int, after: bool
) -> None:
    """A copy for each tensor; the gradient, always the same, says what a moment is after k steps:
    the weight that lies in a gradient's slot after a step is a thousand times as large."""
    params = params_of(dtype)
    transfers = Interrupted(0, after, way)
    optimizer = HybridDeviceOptimizer(params, lr=1e-2, bucket_bytes=8, transfers=transfers)
    fill(params)
    optimizer.step()  # slots hold weights from here on
    transfers.left = last
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    made = last if way == "h2d" else 0
    assert [float(optimizer.state[p]["step"]) for p in params] == [2] * made + [1] * (3 - made)

    twins = params_of(dtype)
    with torch.no_grad():
        for twin, param in zip(twins, params, strict=True):
            twin.copy_(param)
    other = HybridDeviceOptimizer(twins, lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fill(twins)
    for each in (other, optimizer):
        each.step()  # of other, the first since its load, it compares the masters
    for twin, param in zip(twins, params, strict=True):
        assert_bitwise("weight", twin.detach(), param.detach())
        state, gradient = optimizer.state[param], float(param.grad[0])
        expected = torch.full(param.shape, gradient * (1 - 0.9 ** float(state["step"])))
        torch.testing.assert_close(state["exp_avg"], expected)


def test_an_interrupted_large_tensor_is_as_its_master() -> None:
    """Stepped in two parts; the interrupt comes before the second is made."""
    param = nn.Parameter(torch.ones(8192, dtype=torch.bfloat16))
    transfers = Interrupted(1, False)
    optimizer = HybridDeviceOptimizer([param], lr=0.1, bucket_bytes=8192, transfers=transfers)
    fill([param])
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.check_masters()
    assert (param[:4096] > 1).all() and (param[4096:] == 1).all()


def test_a_parameter_that_stays_on_the_device_is_as_its_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA, where one is written after the other."""
    params = params_of(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(params, offload_fraction=0.0)

    def half(*_: Any) -> None:
        for param in params:
            optimizer.state[param]["master"].add_(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(hybrid, "step_on_host", half)
    fill(params)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.check_masters()
    assert all((param == 2).all() for param in params)


def test_a_step_that_was_interrupted_waits_when_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """in_backward=True, whose thread goes on meanwhile."""
    ready = threading.Event()

    class Held(HostTransfers):
        def h2d(self, sources: list[Tensor], targets: list[Tensor], unread: bool = False) -> Any:
            assert ready.wait(60)
            return super().h2d(sources, targets)

    params = params_of(torch.float32)
    optimizer = HybridDeviceOptimizer(
        params, lr=1e-2, in_backward=True, bucket_bytes=8, transfers=Held()
    )
    sum((p.sum() for p in params), torch.zeros(())).backward()

    def interrupt(futures: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(host_step, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(RuntimeError, match="state_dict can't come between .*: call step"):
        optimizer.state_dict()
    threading.Timer(0.3, ready.set).start()
    optimizer.step()
    assert all(float(optimizer.state[p]["step"]) == 1 and (p < 1).all() for p in params)
    optimizer.state_dict()
