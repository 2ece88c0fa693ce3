"""HybridDeviceOptimizer on a real GPU: streams, page-locked slabs, memory as theory has it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.optim.test_hybrid import Model, batches, hybrid
from vlmkernels.optim import HybridDeviceOptimizer, PinnedArena

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)


def test_slabs_are_page_locked() -> None:
    arena = PinnedArena(slab_bytes=1 << 20)
    tensor = arena.empty((1000,), torch.bfloat16)
    assert tensor.is_pinned()
    source = torch.randn(1000, device="cuda").bfloat16()
    tensor.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(tensor, source.cpu())
    del tensor
    assert arena.reserved_bytes == 0


def test_optimizers_dropped_right_after_a_step() -> None:
    """Each page-locks what the one before freed, while its uploads may be under way."""
    start = torch.randn(20_000_000, device="cuda").bfloat16()
    grad = torch.randn(20_000_000, device="cuda").bfloat16()
    actual = []
    for _ in range(5):
        param = nn.Parameter(start.clone())
        param.grad = grad
        optimizer = HybridDeviceOptimizer([param], lr=1e-2)
        optimizer.step()
        del optimizer
        actual.append(param.detach())
    assert not torch.equal(actual[0], start)
    for other in actual[1:]:
        assert torch.equal(other, actual[0])


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_every_fraction_trains_as_the_cpu_does(fraction: float) -> None:
    """One step from the same gradients: both are exact to the last bits, so that weights agree
    to one bfloat16 rounding."""
    model = Model()
    other = copy.deepcopy(model).cuda()
    optimizers = [hybrid(model), hybrid(other, offload_fraction=fraction)]
    model(batches(1)[0], 1).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.cuda()
    for optimizer in optimizers:
        optimizer.step()
    torch.cuda.synchronize()
    optimizers[1].check_masters()
    for p, q in zip(*(o._params() for o in optimizers), strict=True):
        if p.numel() and p.requires_grad:
            a, b = (o._masters.of(x).cpu() for o, x in zip(optimizers, (p, q), strict=True))
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
            torch.testing.assert_close(p, q.cpu(), rtol=2**-7, atol=1e-6)


def test_the_same_bits_whatever_overlaps() -> None:
    """Twenty steps with hooks and small buckets, nothing waited for; and with neither."""
    sizes = [1 << 20, 3, 70_001, 1 << 18]
    start = [torch.randn(n, device="cuda").bfloat16() for n in sizes]
    gradients = [[torch.randn(n, device="cuda") for n in sizes] for _ in range(20)]
    actual = []
    for overlap in (True, False):
        params = [nn.Parameter(x.clone()) for x in start]
        optimizer = HybridDeviceOptimizer(
            params,
            overlap=overlap,
            bucket_bytes=8192 if overlap else 1 << 30,
            max_norm=0.5,
            policy="last_used",
        )
        for grads in gradients:
            loss = sum((p.float() * g).sum() for p, g in zip(params, grads, strict=True))
            loss.backward()
            if not overlap:
                torch.cuda.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.check_masters()
        actual.append([p.detach() for p in params])
    for x, y in zip(*actual, strict=True):
        assert torch.equal(x, y)


def test_steps_in_backward_have_the_same_bits() -> None:
    """A deep stack of small layers, so that new weights go up while the pass goes on."""
    torch.manual_seed(0)
    start = [torch.randn(512, 512, device="cuda").bfloat16() * 0.04 for _ in range(24)]
    data = [torch.randn(256, 512, device="cuda").bfloat16() for _ in range(10)]
    actual = []
    for in_backward in (True, False):
        params = [nn.Parameter(x.clone()) for x in start]
        optimizer = HybridDeviceOptimizer(
            params, lr=1e-2, in_backward=in_backward, bucket_bytes=1 << 20
        )
        for x in data:
            for param in params:
                x = x + torch.tanh(x @ param)
            x.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.check_masters()
        actual.append([p.detach() for p in params])
    for x, y in zip(*actual, strict=True):
        assert torch.equal(x, y)


def test_8_bit_moments_move_and_train() -> None:
    """Codes and scales keep their bits on the way; a step on either side agrees to the codes'
    neighbours."""
    torch.manual_seed(0)
    start = torch.randn(10_001, device="cuda").bfloat16()
    grads = [torch.randn(10_001, device="cuda").bfloat16() for _ in range(3)]
    actual = []
    for fraction in (0.0, 1.0):
        param = nn.Parameter(start.clone())
        optimizer = HybridDeviceOptimizer(
            [param], lr=1e-2, moments=torch.uint8, offload_fraction=fraction
        )
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        before = {k: v.cpu().clone() for k, v in optimizer.state[param].items()}
        optimizer.set_offload_fraction(1.0 - fraction)
        for key, value in optimizer.state[param].items():
            assert key == "step" or value.device.type == ("cpu" if fraction == 0 else "cuda"), key
            assert torch.equal(value.cpu(), before[key]), key
        actual.append(before)
    for key, magnitude in (("exp_avg_codes", 127), ("exp_avg_sq_codes", 255)):
        a, b = (x[key].int() & magnitude for x in actual)
        assert (a - b).abs().max() <= 1, key
    torch.testing.assert_close(actual[0]["master"], actual[1]["master"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_device_memory_is_what_theory_says(fraction: float) -> None:
    """2 bytes of weight, 2 of gradient, 12 of state that stayed: within 5%."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    n, number = 4 << 20, 16
    params = [nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for _ in range(number)]
    optimizer = HybridDeviceOptimizer(params, offload_fraction=fraction)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    expected = n * number * (2 + 2 + 12 * (1 - fraction))
    assert held == pytest.approx(expected, rel=0.05)
