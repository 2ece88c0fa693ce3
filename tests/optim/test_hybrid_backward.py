"""HybridDeviceOptimizer(in_backward=True): the step begins while the backward pass goes on."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numeric import assert_bitwise
from tests.optim.delayed import DelayedTransfers
from tests.optim.test_hybrid import FMA, Model, Reference, assert_same_model, batches, hybrid
from vlmkernels.optim import HybridDeviceOptimizer


@pytest.mark.skipif(not FMA, reason="torch's bits need FMA instructions")
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_steps_in_backward_have_the_bits_of_plain_adamw(fraction: float):
    """By another thread, with late copies in random order; fractions change, weights are loaded in
    between, every second pass is added to."""
    model, data = Model(), batches(8)
    plain = copy.deepcopy(model)
    optimizer = hybrid(
        model, offload_fraction=fraction, in_backward=True, transfers=DelayedTransfers()
    )
    reference = Reference(plain)
    for step, ids in enumerate(data):
        for params in (optimizer.param_groups, reference.param_groups):
            for group in params:
                group["lr"] = 3e-2 * 0.9**step
        if step == 4:
            optimizer.set_offload_fraction(1.0 - fraction)
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(state)
        if step == 6:
            with torch.no_grad():
                for param in (*model.parameters(), *plain.parameters()):
                    param.mul_(0.75)
            reference.read_model()
        if step % 2:
            with optimizer.accumulating():
                model(ids, 1).backward()
            plain(ids, 1).backward()
        model(ids, step).backward()
        plain(ids, step).backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    assert_same_model(model, plain)
    optimizer.check_masters()
    for param, master in zip(optimizer._params(), reference.masters, strict=True):
        if master in reference.adam.state and param.numel():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                ours, theirs = optimizer.state[param][key], reference.adam.state[master][key]
                assert_bitwise(key, ours, theirs)


def test_a_state_replaced_before_the_backward_pass_is_stepped():
    """After a step outside of it, for which addresses of the old state were kept."""
    param = nn.Parameter(torch.randn(7, 9))
    optimizer = HybridDeviceOptimizer([param], in_backward=True, lr=0.1)
    with optimizer.accumulating():
        param.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    old = optimizer.state[param]
    before = {key: x.clone() for key, x in old.items()}
    new = optimizer.state[param] = {key: torch.zeros_like(x) for key, x in old.items()}
    param.square().sum().backward()
    optimizer.step()
    assert float(new["step"]) == 1
    for key, value in before.items():
        assert_bitwise(key, old[key], value)


def test_buckets_are_stepped_while_the_backward_pass_goes_on():
    """The pass is held up before its last gradient until new weights of an earlier one go up."""
    layers = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(4)]
    model = nn.Sequential(*layers)
    transfers = DelayedTransfers()
    optimizer = HybridDeviceOptimizer(
        model.parameters(), in_backward=True, bucket_bytes=8192, transfers=transfers
    )
    seen = []

    def hold(gradient: Tensor) -> None:
        end = time.monotonic() + 30
        while transfers.h2d_copies < 3 and time.monotonic() < end:
            time.sleep(0.001)
        seen.append((transfers.d2h_copies, transfers.h2d_copies))

    layers[0].weight.register_hook(hold)
    model(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
    assert seen == [(3, 3)]
    optimizer.step()
    assert (transfers.d2h_copies, transfers.h2d_copies) == (4, 4)


@pytest.mark.parametrize(
    "change", ["clip", "drop", "again", "zero_grad", "state_dict", "fraction", "scale"]
)
def test_a_step_that_began_in_backward_must_be_finished(change: str):
    model, ids = Model(), batches(1)[0]
    optimizer = hybrid(model, in_backward=True, transfers=DelayedTransfers())
    model(ids, 1).backward()
    plain = {
        "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        "drop": lambda: model.zero_grad(),
        "scale": lambda: None,
    }
    options = {"grad_scale": 0.5} if change == "scale" else {}
    if change in plain:
        plain[change]()
        kind = ValueError if change == "scale" else RuntimeError
        with pytest.raises(kind, match="in the backward pass"):
            optimizer.step(**options)
        return
    if change == "again":
        # Unless new weights go up between the second forward pass and its backward pass, which
        # autograd notices.
        expected = "a second backward pass adds to a gradient|modified by an inplace operation"
        with pytest.raises(RuntimeError, match=expected):
            model(ids, 1).backward()
    elif change == "fraction":
        with pytest.raises(RuntimeError, match="set_offload_fraction can't come between"):
            optimizer.set_offload_fraction(0.5)
    else:
        with pytest.raises(RuntimeError, match=f"{change} can't come between a backward pass"):
            getattr(optimizer, change)()
    if change != "again":  # nothing is lost
        optimizer.step()
        optimizer.zero_grad()
        assert float(optimizer.state[model.norm.weight]["step"]) == 1


@pytest.mark.parametrize("way", ["reverse", "move", "pop"])
def test_groups_may_change_between_steps(way: str) -> None:
    """Each parameter has the settings of the group that it is in now."""
    results = []
    for make in (torch.optim.AdamW, partial(HybridDeviceOptimizer, in_backward=True)):
        torch.manual_seed(6)
        params = [nn.Parameter(torch.randn(16)) for _ in range(3)]
        rates = zip(params, (0.1, 0.01, 1.0), strict=True)
        optimizer: Any = make([{"params": [p], "lr": lr} for p, lr in rates])
        for step in range(3):
            if step == 1 and way == "reverse":
                optimizer.param_groups.reverse()
            elif step == 1 and way == "move":
                optimizer.param_groups[2]["params"].append(
                    optimizer.param_groups[1]["params"].pop()
                )
            elif step == 1:
                optimizer.state.pop(optimizer.param_groups.pop(0)["params"][0])
            sum(p.square().sum() for p in params).backward()
            optimizer.step()
            for param in params:
                param.grad = None
        results.append([p.detach() for p in params])
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs)


class Fails(torch.autograd.Function):
    """A backward pass that ends in the middle, as one that is out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError


@pytest.mark.parametrize("changed_rate", [False, True])
def test_an_abandoned_backward_pass_is_said_once(changed_rate: bool) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, last)
    optimizer = hybrid(model, in_backward=True)
    with pytest.raises(MemoryError):
        last(Fails.apply(first(torch.ones(1, 4)))).sum().backward()
    last.weight.grad = None
    if changed_rate:
        optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match="what that gave has its step, nothing else"):
        optimizer.step()
    optimizer.step()  # nothing twice
    assert [float(optimizer.state[p]["step"]) for p in last.parameters()] == [1, 1]
    optimizer.zero_grad()
    assert optimizer.state_dict()["state"]
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    assert steps == [1, 1, 2, 2]
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_compiled_program_calls_the_hooks_and_does_not_trace_them() -> None:
    """Forward, backward and step in one compiled function."""
    models = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = torch.randn(4, 3, 16)
    for model, compiled in zip(models, (False, True), strict=True):
        optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-2, in_backward=True)

        def train(
            x: Tensor, model: Any = model, optimizer: HybridDeviceOptimizer = optimizer
        ) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(train, backend="eager") if compiled else train
        for x in inputs:
            step(x)
    torch._dynamo.reset()
    assert_same_model(models[1], models[0])
