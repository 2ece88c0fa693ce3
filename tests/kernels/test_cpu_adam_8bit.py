"""CPUAdam with 8-bit block-wise moments: the codes, a step, state that is loaded, convergence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric import assert_bitwise, isa
from tests.kernels.test_cpu_adam import ISAS, SHAPES, clones, gradient, parameters
from vlmkernels import CPUAdam
from vlmkernels.optim import HybridDeviceOptimizer
from vlmkernels.optim.blockwise import BLOCK, dequantize, num_blocks, quantize
from vlmkernels.optim.native import adam_reference

EIGHT_BIT = torch.uint8
MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


def brute_force(signed: bool) -> Tensor:
    """All values a code can stand for, from the definition in words: float64, sorted by code."""
    bits = 7 if signed else 8
    values = [0.0]
    for decade in range(bits):
        low, high = 10.0 ** (decade - bits), 10.0 ** (decade - bits + 1)
        parts = 2**decade
        values += [low + (high - low) * (j + 0.5) / parts for j in range(parts)]
    values[-1] = 1.0
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("signed", [True, False])
def test_each_code_stands_for_its_value(signed: bool) -> None:
    values = brute_force(signed)
    codes = torch.arange(len(values), dtype=torch.uint8)
    codes[-1] = len(values) - 1
    got = dequantize(codes, torch.ones(num_blocks(len(values))), signed=signed)
    torch.testing.assert_close(got.double(), values, rtol=1e-6, atol=0)
    again, scales = quantize(got, signed=signed)
    if len(values) <= BLOCK:
        assert_bitwise("codes", again, codes)
        assert scales.tolist() == [1.0]


@pytest.mark.parametrize("signed", [True, False])
def test_error_is_at_most_half_a_bin(signed: bool) -> None:
    """Relative to the block's largest: a bin of decade d is 0.9 x 10^d / 2^i wide."""
    x = torch.randn(7 * BLOCK + 33) * 10.0 ** torch.randint(-9, 4, (7 * BLOCK + 33,))
    x = x if signed else x.abs()
    codes, scales = quantize(x, signed=signed)
    got = dequantize(codes, scales, signed=signed).double()
    scale = scales.double().repeat_interleave(BLOCK)[: len(x)]
    y = x.double().abs() / scale
    bits = 7 if signed else 8
    decade = (y.clamp_min(10.0**-bits).log10() + 1e-9).floor().clamp(-bits, -1)
    half = 0.45 * 10.0 ** (decade + 1) / 2.0 ** (decade + bits)
    half[y >= 1 - 0.9 / 2 ** (bits - 1)] *= 2  # the largest code stands for its bin's upper end
    half[y < 10.0**-bits] = 0.55 * 10.0 ** (1 - bits)  # 0, or unsigned the smallest code
    assert ((got - x.double()).abs() / scale <= half * (1 + 1e-5) + 1e-12).all()
    assert (got.abs().view(-1)[x == 0] == 0).all()
    largest = x.abs().double() == scale
    assert largest.sum() >= num_blocks(len(x)) and torch.equal(got[largest], x.double()[largest])
    if not signed:
        assert (got[x > 0] > 0).all()


def reference_step(param: Tensor, grad: Tensor, state: dict, step: int, **options) -> dict:
    """Decode, plain Adam, encode."""
    held = {}
    for key, signed in MOMENTS:
        codes, scales = state[f"{key}_codes"], state[f"{key}_scales"]
        held[key] = dequantize(codes, scales, signed=signed).double()
    adam_reference(param, grad, held["exp_avg"], held["exp_avg_sq"], step, **options)
    return held


@pytest.mark.parametrize("name", ISAS)
def test_a_step_against_the_reference(name: str) -> None:
    """From arbitrary moments; the codes are those of the exact moments up to one bin, as float32
    rounding may cross an edge."""
    torch.set_num_threads(2)
    shapes = [*SHAPES, (70_001,), (255,), (256,), (257,)]
    params = parameters(shapes)
    ours = CPUAdam(params, lr=0.01, weight_decay=0.1, moments=EIGHT_BIT)
    for p in params:
        start = torch.randn_like(p)
        codes, scales = quantize(start, signed=True)
        second, second_scales = quantize(start.square() * torch.rand_like(p), signed=False)
        ours.state[p] = {
            "step": torch.tensor(4.0),
            "exp_avg_codes": codes,
            "exp_avg_scales": scales,
            "exp_avg_sq_codes": second,
            "exp_avg_sq_scales": second_scales,
        }
        p.grad = gradient(p)
    before = [p.detach().clone() for p in params]
    states = [{k: v.clone() for k, v in ours.state[p].items()} for p in params]
    with isa(name):
        ours.step(grad_scale=0.5)
    for i, p in enumerate(params):
        exact = before[i].double()
        assert p.grad is not None
        held = reference_step(
            exact, p.grad.double(), states[i], 5,
            lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True, grad_scale=0.5,
        )  # fmt: skip
        torch.testing.assert_close(p.detach().double(), exact, rtol=1e-5, atol=1e-7)
        state = ours.state[p]
        assert state["step"].item() == 5
        for key, signed in MOMENTS:
            want, scales = quantize(held[key].float(), signed=signed)
            torch.testing.assert_close(state[f"{key}_scales"], scales, rtol=1e-5, atol=0)
            got = state[f"{key}_codes"]
            same = got == want
            assert same.float().mean() > 0.99 if got.numel() > 1000 else True
            gap = (got.int() & 127) - (want.int() & 127) if signed else got.int() - want.int()
            assert gap.abs().max() <= 1 if gap.numel() else True


@pytest.mark.parametrize("name", [n for n in ISAS if n != ISAS[-1]])
def test_every_instruction_set_makes_the_same_codes(name: str) -> None:
    params = parameters([(1000,), (31, 33)])
    others = clones(params)
    ours = CPUAdam(params, lr=0.01, moments=EIGHT_BIT)
    best = CPUAdam(others, lr=0.01, moments=EIGHT_BIT)
    same = [torch.ones_like(p, dtype=torch.bool) for p in params]  # the steps before had one code
    for _ in range(3):
        for p, q in zip(params, others, strict=True):
            p.grad = gradient(p)
            q.grad = p.grad.clone()
        with isa(name):
            ours.step()
        best.step()
        for p, q, one in zip(params, others, same, strict=True):
            torch.testing.assert_close(p[one], q[one], rtol=1e-3, atol=1e-5)
            for key, _ in MOMENTS:
                a, b = ours.state[p][f"{key}_codes"], best.state[q][f"{key}_codes"]
                assert (a.int() - b.int()).abs().max() <= 1 and (a == b).float().mean() > 0.95
                one &= a == b


def test_threads_do_not_change_a_bit() -> None:
    params = parameters([(100_003,), (5,), (40_000,)])
    others = clones(params)
    one, two = (CPUAdam(ps, lr=0.01, moments=EIGHT_BIT) for ps in (params, others))
    for _ in range(2):
        for p, q in zip(params, others, strict=True):
            p.grad = gradient(p)
            q.grad = p.grad.clone()
        torch.set_num_threads(1)
        one.step()
        torch.set_num_threads(2)
        two.step()
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        assert_bitwise(f"parameter {i}", p.detach(), q.detach())
        for key in one.state[p]:
            assert_bitwise(key, one.state[p][key], two.state[q][key])


def test_bfloat16_copy_and_gradient() -> None:
    params = parameters([(1003,), (16, 16)])
    ours = CPUAdam(params, lr=0.01, moments=EIGHT_BIT)
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in params]
    for p, c in zip(params, copies, strict=True):
        ours.set_low_precision(p, c)
        p.decoupled_grad = gradient(p).bfloat16()  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in params]
    ours.step()
    for p, c, b in zip(params, copies, before, strict=True):
        assert_bitwise("copy", c, p.detach().bfloat16())
        assert (p.detach() != b).float().mean() > 0.9


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, EIGHT_BIT])
def test_state_loads_from_and_into_the_other_types(other: torch.dtype) -> None:
    params = parameters([(600,), (20, 30)])
    ours = CPUAdam(params, lr=0.01, moments=EIGHT_BIT)
    for _ in range(3):
        for p in params:
            p.grad = gradient(p)
        ours.step()
    copies = clones(params)
    second = CPUAdam(copies, lr=0.01, moments=other)
    second.load_state_dict(copy.deepcopy(ours.state_dict()))
    third_params = clones(params)
    third = CPUAdam(third_params, lr=0.01, moments=EIGHT_BIT)
    for q, p in zip(copies, params, strict=True):
        assert p.grad is not None
        q.grad = torch.zeros_like(p)  # lets step() bring the state into its type
    # A step with no gradient and no decay only ages the moments: exactly, by beta.
    for group in second.param_groups:
        group["weight_decay"] = 0.0
    second.step()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6, EIGHT_BIT: 2**-6}[other]
    for p, q in zip(params, copies, strict=True):
        for (key, signed), beta in zip(MOMENTS, (0.9, 0.999), strict=True):
            want = beta * dequantize(
                ours.state[p][f"{key}_codes"], ours.state[p][f"{key}_scales"], signed=signed
            )
            state = second.state[q]
            got = (
                dequantize(state[f"{key}_codes"], state[f"{key}_scales"], signed=signed)
                if other == EIGHT_BIT
                else state[key].float()
            )
            assert (got - want).norm() <= tolerance * want.norm(), key
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    for p in third_params:
        p.grad = torch.zeros_like(p)
    third.step()
    assert all(third.state[p]["step"].item() == 5 for p in third_params)


def test_a_nan_stays_in_its_block() -> None:
    params = parameters([(600,)])
    ours = CPUAdam(params, lr=0.01, moments=EIGHT_BIT)
    params[0].grad = gradient(params[0])
    params[0].grad[300] = torch.nan
    ours.step()
    moments = dequantize(
        ours.state[params[0]]["exp_avg_codes"], ours.state[params[0]]["exp_avg_scales"], signed=True
    )
    assert moments[:256].isfinite().all() and moments[512:].isfinite().all()
    assert moments[256:512].isnan().all()
    skipping = CPUAdam(parameters([(600,)]), moments=EIGHT_BIT, nonfinite="skip")
    parameter = skipping.param_groups[0]["params"][0]
    parameter.grad = params[0].grad
    before = parameter.detach().clone()
    skipping.step()
    assert skipping.skipped_steps == 1 and torch.equal(parameter.detach(), before)


@pytest.mark.parametrize("make", [CPUAdam, HybridDeviceOptimizer])
def test_a_square_that_no_moment_holds_is_skipped(make: Callable[..., Any]) -> None:
    """A finite gradient whose square is infinite would make the moments of its block NaN."""
    (param,) = params = parameters([(600,)])
    for moments in (EIGHT_BIT, torch.float32):
        optimizer = make(params, moments=moments, nonfinite="skip")
        for largest, skipped in ((1.0, 0), (1e25, 1), (1.0, 1)):
            param.grad = torch.ones(600)
            param.grad[7] = largest
            optimizer.step()
            assert optimizer.skipped_steps == (skipped if moments == EIGHT_BIT else 0)
        assert param.isfinite().all()
    optimizer = make(params, moments=EIGHT_BIT, nonfinite="skip")
    param.grad[7] = torch.inf
    for scale in (1.0, -1.0):
        optimizer.step(grad_scale=scale)
    assert optimizer.skipped_steps == 2 and param.isfinite().all()
    for largest, scale in ((2.0**63, 4.0), (2.0**65, 2.0**-10)):  # what counts is their product
        param.grad[7] = largest
        optimizer.step(grad_scale=scale)
        assert optimizer.skipped_steps == 3 and param.isfinite().all()
    assert float(optimizer.state[param]["step"]) == 1


def test_convergence() -> None:
    """A small network reaches the loss that it reaches with float32 moments."""

    def final_loss(moments: torch.dtype) -> tuple[float, float]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 128), torch.nn.GELU(),
            torch.nn.Linear(128, 8),
        )  # fmt: skip
        teacher = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)
        )
        optimizer = CPUAdam(model.parameters(), lr=3e-3, weight_decay=0.0, moments=moments)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        actual = []
        for _ in range(400):
            x = torch.randn(128, 32)
            loss = (model(x) - teacher(x).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            actual.append(float(loss.detach()))
        return actual[0], sum(actual[-20:]) / 20

    seed = int(torch.randint(2**31, ()))
    first, exact = final_loss(torch.float32)
    _, coarse = final_loss(EIGHT_BIT)
    assert exact < 0.1 * first
    assert coarse < 1.25 * exact, (first, exact, coarse)


def test_errors() -> None:
    with pytest.raises(ValueError, match="moments is torch.int8; it must be torch.float32, torch"):
        CPUAdam(parameters([(4,)]), moments=torch.int8)
    with pytest.raises(ValueError, match="x has negative elements; unsigned codes hold none"):
        quantize(torch.tensor([1.0, -1.0]), signed=False)
