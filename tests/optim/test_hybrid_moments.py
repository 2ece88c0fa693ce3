"""HybridDeviceOptimizer with moments in bfloat16 and in 8 bits."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numeric import assert_bitwise
from tests.optim.delayed import DelayedTransfers
from tests.optim.test_hybrid import Model, Reference, assert_same_model, batches, hybrid, train
from vlmkernels.optim import CPUAdam, HybridDeviceOptimizer, blockwise, device_step
from vlmkernels.optim.state import fit_moments, moment_keys, moment_tensors


@pytest.mark.parametrize("moments", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("fraction", [0.0, 0.6, 1.0])
def test_short_moments_are_those_of_cpu_adam(fraction: float, moments: torch.dtype):
    """To the last bit, codes and scales too: what tests/kernels/test_cpu_adam_*.py say of their
    convergence holds here."""
    model, data = Model(), batches(6)
    plain = copy.deepcopy(model)
    optimizer = hybrid(
        model, moments=moments, offload_fraction=fraction, transfers=DelayedTransfers()
    )
    reference = Reference(plain, moments)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_model(model, plain)
    for param, master in zip(optimizer._params(), reference.masters, strict=True):
        for key, value in reference.adam.state[master].items():
            assert_bitwise(key, optimizer.state[param][key], value)


def test_everything_moves():
    """Nothing of a state stays where it was, which on a GPU would be the wrong memory."""
    model = Model()
    optimizer = hybrid(model, moments=torch.uint8)
    train(model, optimizer, batches(2))
    for fraction in (0.0, 1.0):
        before = {p: dict(s) for p, s in optimizer.state.items()}
        optimizer.set_offload_fraction(fraction)
        for param, state in before.items():
            for key in moment_keys(torch.uint8) if param.numel() else ():
                assert_bitwise(key, optimizer.state[param][key], state[key])
                assert optimizer.state[param][key].data_ptr() != state[key].data_ptr(), key


def test_codes_in_another_memory_order():
    """CPUAdam's blocks of a transposed parameter are other elements than ours."""
    start = torch.randn(40, 30).t()
    theirs, ours = (nn.Parameter(start.clone()) for _ in range(2))
    assert not theirs.is_contiguous()
    adam = CPUAdam([theirs], moments=torch.uint8)
    theirs.grad = torch.randn(40, 30).t()
    adam.step()
    optimizer = HybridDeviceOptimizer([ours], moments=torch.uint8)
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    state = adam.state[theirs]
    values = blockwise.dequantize(state["exp_avg_codes"], state["exp_avg_scales"], signed=True)
    codes, scales = blockwise.quantize(values.contiguous(), signed=True)
    assert_bitwise("codes", optimizer.state[ours]["exp_avg_codes"], codes)
    assert_bitwise("scales", optimizer.state[ours]["exp_avg_scales"], scales)


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_state_of_other_moments_is_taken(other: torch.dtype):
    """8-bit codes become the numbers they stand for; those become the same codes again."""
    model, data = Model(), batches(3)
    first = hybrid(model, moments=torch.uint8)
    train(model, first, data)
    saved = copy.deepcopy(first.state_dict())
    wide = hybrid(model, moments=torch.float32, offload_fraction=0.5)
    wide.load_state_dict(saved)
    for param in first._params():
        if param in first.state:
            codes, scales = (first.state[param][f"exp_avg_sq_{x}"] for x in ("codes", "scales"))
            expected = blockwise.dequantize(codes, scales, signed=False)
            assert_bitwise("exp_avg_sq", wide.state[param]["exp_avg_sq"], expected)
    again = hybrid(model, moments=torch.uint8, offload_fraction=0.3)
    again.load_state_dict(copy.deepcopy(wide.state_dict()))
    for param, state in first.state.items():
        for key, value in state.items():
            assert_bitwise(key, again.state[param][key], value)
    again.check_masters()
    # From elements, the nearest codes.
    elements = hybrid(model, moments=other)
    train(model, elements, data)
    again.load_state_dict(copy.deepcopy(elements.state_dict()))
    for param, state in elements.state.items():
        codes, scales = blockwise.quantize(state["exp_avg"].float(), signed=True)
        assert_bitwise("codes", again.state[param]["exp_avg_codes"], codes)
        assert_bitwise("scales", again.state[param]["exp_avg_scales"], scales)
    broken = copy.deepcopy(saved)
    number = next(n for n, s in broken["state"].items() if s["exp_avg_scales"].numel() > 1)
    broken["state"][number]["exp_avg_scales"] = torch.ones(1)
    with pytest.raises(ValueError, match="exp_avg_scales of parameter . is float32 .* it needs"):
        again.load_state_dict(broken)


def on_host(
    settings: dict[str, Any],
    params: list[nn.Parameter],
    masters: list[Tensor],
    states: list[dict[str, Any]],
    scale: float,
) -> None:
    pointers = [device_step.host_pointers(*x) for x in zip(params, masters, states, strict=True)]
    moments = moment_tensors(states[0])[0].dtype
    device_step.step_on_host(settings, params, pointers, moments, scale)


@pytest.mark.parametrize("moments", [torch.float32, torch.uint8])
def test_the_device_s_own_step(moments: torch.dtype):
    """What a GPU does with parameters that stay there, in plain torch, against the native step:
    moments to 4 roundings, codes to one neighbour."""
    grads = [torch.randn(n) * 10.0 ** torch.randint(-6, 1, (n,)) for n in (1000, 256, 7)]
    start = [torch.randn(g.shape) for g in grads]
    actual = []
    for step in (on_host, device_step.step_on_device):
        params = [nn.Parameter(x.bfloat16()) for x in start]
        masters, states = [x.clone() for x in start], []
        for param in params:
            state: dict[str, Any] = {"step": torch.tensor(0.0)}
            fit_moments(state, moments, partial(torch.empty, param.shape))
            states.append(state)
        group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        with torch.no_grad():
            for _ in range(3):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad.bfloat16()
                step({**group, "decoupled_weight_decay": True}, params, masters, states, 0.5)
        actual.append((params, masters, states))
    for ours, theirs in zip(*(x[1] for x in actual), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*(x[2] for x in actual), strict=True):
        assert float(ours["step"]) == float(theirs["step"]) == 3
        for key in moment_keys(moments):
            a, b = ours[key], theirs[key]
            if a.dtype == torch.uint8:
                magnitude = 255 if "sq" in key else 127
                assert ((a.int() & magnitude) - (b.int() & magnitude)).abs().max() <= 1, key
            else:
                torch.testing.assert_close(a, b, rtol=2**-21, atol=0)


@pytest.mark.parametrize("moments", [torch.bfloat16, torch.uint8])
def test_a_large_tensor_goes_in_pieces(moments: torch.dtype):
    """Cut at multiples of 4,096: the same bits, moments rounded with the same random numbers."""
    results = []
    weight, grads = torch.randn(20_001).bfloat16(), [torch.randn(20_001).bfloat16() for _ in "123"]
    for bucket_bytes in (100, 10_000, 1 << 20):
        param = nn.Parameter(weight.clone())
        transfers = DelayedTransfers()
        optimizer = HybridDeviceOptimizer(
            [param], moments=moments, bucket_bytes=bucket_bytes, transfers=transfers
        )
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        state = optimizer.state[param]
        assert float(state["step"]) == 3
        results.append([param.detach(), *(state[k] for k in (*moment_keys(moments), "master"))])
        assert transfers.h2d_copies == 3 * {100: 5, 10_000: 5, 1 << 20: 1}[bucket_bytes]
        assert transfers.bytes == 3 * 4 * 20_001  # 2 bytes D2H, 2 H2D
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_bitwise("cut", a, b)
