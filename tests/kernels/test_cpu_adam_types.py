"""CPUAdam's bfloat16 copies and moments, gradient scale, norm, and what it does about NaN."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import weakref

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric import assert_bitwise, isa
from tests.kernels.test_cpu_adam import FMA_ISAS, ISAS, SHAPES, clones, gradient, parameters
from vlmkernels import CPUAdam
from vlmkernels.optim.native import sum_of_squares

MASK = 0xFFFFFFFF


def half_round(x: Tensor) -> Tensor:
    """On the low 32 bits of int64, whose products wrap around as they should."""
    return (x ^ (x >> 16)) * 0x7FEB352D & MASK


def mix(x: Tensor) -> Tensor:
    """lowbias32."""
    x = half_round(x)
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK
    return x ^ (x >> 16)


def rounded_randomly(x: Tensor, random: Tensor) -> Tensor:
    bits = x.view(torch.int32).to(torch.int64) & MASK
    kept = (bits + random & 0xFFFF0000).to(torch.int32).view(torch.float32)
    return torch.where(x.isnan(), x, kept).bfloat16()


def with_grads(params: list[torch.nn.Parameter], *, bf16: bool) -> list[Tensor]:
    grads = [gradient(p) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.decoupled_grad = g.bfloat16() if bf16 else g  # type: ignore[attr-defined]
    return [p.decoupled_grad.float() for p in params]  # type: ignore[attr-defined]


@pytest.mark.parametrize("large", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("name", ISAS)
def test_the_copy_is_the_rounded_parameter(name: str, large: bool):
    """Past the caches where the step is large; there, too, the last elements and odd addresses."""
    torch.set_num_threads(2)
    shapes = [(2_100_003,), (2_100_003,)] if large else SHAPES
    params = parameters(shapes)
    others = clones(params)
    ours, plain = CPUAdam(params, lr=0.01), CPUAdam(others, lr=0.01)
    memory = [torch.full((p.numel() + 34,), 7.0, dtype=torch.bfloat16) for p in params]
    copies = []
    for i, (p, m) in enumerate(zip(params, memory, strict=True)):
        first = 16 + i % 2  # every second at an odd address
        copies.append(m[first : first + p.numel()].view(p.shape))
        ours.set_low_precision(p, copies[-1])
        assert_bitwise(f"bound {i}", copies[-1], p.detach().bfloat16())
    with isa(name):
        for _ in range(1 if large else 3):
            for q, g in zip(others, with_grads(params, bf16=True), strict=True):
                q.grad = g
            ours.step()
            plain.step()
    for i, (p, q, c) in enumerate(zip(params, others, copies, strict=True)):
        assert_bitwise(f"parameter {i}", p.detach(), q.detach())
        assert_bitwise(f"copy {i}", c, p.detach().bfloat16())
        first = 16 + i % 2
        assert (memory[i][:first] == 7).all() and (memory[i][first + p.numel() :] == 7).all()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("numel", [5_000, 4_200_007], ids=["stored", "streamed"])
@pytest.mark.parametrize("name", ISAS)
def test_copies_of_numbers_too_small_to_be_normal(name: str, numel: int, moments: torch.dtype):
    """AVX-512 BF16's own rounding makes them 0."""
    torch.set_num_threads(2)
    param = torch.nn.Parameter(torch.randn(numel))
    bits = torch.randint(0, 0x1000000, (numel,), dtype=torch.int32)  # up to 2^-125
    sign = torch.randint(0, 2, (numel,), dtype=torch.int32) << 31
    few = torch.rand(numel) < torch.rand(numel // 64 + 1).repeat_interleave(64)[:numel] / 8
    with torch.no_grad():
        param[few] = (bits | sign)[few].view(torch.float32)
    before = param.detach().clone()
    low = torch.empty(numel, dtype=torch.bfloat16)
    optimizer = CPUAdam([param], weight_decay=0.0, moments=moments)
    optimizer.set_low_precision(param, low)
    low.fill_(7)
    param.grad = torch.zeros(numel)
    with isa(name):
        optimizer.step()
    assert_bitwise("parameter", param.detach(), before)
    assert_bitwise("copy", low, before.bfloat16())


def test_no_copy_any_more():
    params = parameters([(40,)])
    optimizer = CPUAdam(params, lr=0.1)
    low = torch.zeros(40, dtype=torch.bfloat16)
    optimizer.set_low_precision(params[0], low)
    optimizer.set_low_precision(params[0], None)
    before = low.clone()
    params[0].grad = torch.ones(40)
    optimizer.step()
    assert_bitwise("copy", low, before)


@pytest.mark.parametrize("name", FMA_ISAS)
def test_bfloat16_moments_bit_for_bit(name: str):
    """One step from given moments is torch's, then rounded with the documented random bits."""
    params = parameters()
    others = clones(params)
    ours = CPUAdam(params, moments=torch.bfloat16)
    theirs = torch.optim.AdamW(others, fused=True, weight_decay=0.01)
    with isa(name):
        for step in range(1, 6):
            for p, q, g in zip(params, others, with_grads(params, bf16=True), strict=True):
                q.grad = g
                if step > 1:
                    q.data.copy_(p.data)
                    for key in ("exp_avg", "exp_avg_sq"):
                        theirs.state[q][key].copy_(ours.state[p][key])
            ours.step()
            theirs.step()
            for i, (p, q) in enumerate(zip(params, others, strict=True)):
                assert_bitwise(f"parameter {i}", p.detach(), q.detach())
                index = torch.arange(p.numel()) * 0x9E3779B1
                random_bits = half_round(index + mix(torch.tensor(step)) & MASK).view(p.shape)
                state, exact = ours.state[p], theirs.state[q]
                first = rounded_randomly(exact["exp_avg"], random_bits >> 16)
                second = rounded_randomly(exact["exp_avg_sq"], random_bits & 0xFFFF)
                assert_bitwise(f"exp_avg {i}", state["exp_avg"], first)
                assert_bitwise(f"exp_avg_sq {i}", state["exp_avg_sq"], second)


def test_bfloat16_moments_follow_falling_gradients():
    """Large gradients, then small ones: the true second moment falls by a factor of 20. Rounded
    randomly it does too; rounded to nearest it would not move at all."""
    n, steps = 4096, 3000
    param = torch.nn.Parameter(torch.zeros(n))
    optimizer = CPUAdam([param], lr=0.0, weight_decay=0.0, moments=torch.bfloat16)
    nearest = torch.zeros(n, dtype=torch.bfloat16)
    exact = torch.zeros(n, dtype=torch.float64)
    for step in range(steps):
        param.grad = torch.full((n,), 1.0 if step < 100 else 1e-3)
        optimizer.step()
        square = param.grad.double() ** 2
        exact.mul_(0.999).add_(square, alpha=0.001)
        nearest = (nearest.float() * 0.999 + square.float() * 0.001).bfloat16()
    ours = optimizer.state[param]["exp_avg_sq"].double()
    assert ours.mean() == pytest.approx(float(exact.mean()), rel=0.02)
    # A step leaves a rounding error of at most a bf16 unit; old ones fade with beta2.
    assert (ours / exact - 1).square().mean().sqrt() < 0.15
    assert nearest.double().mean() > 5 * exact.mean()


def test_bfloat16_moments_converge_as_float32_ones():
    """Noisy least squares, 600 steps with a falling rate: the excess loss is the same within 10%,
    over the same gradients' noise."""
    features, target = torch.randn(512, 64), torch.randn(512, 16)
    best = torch.linalg.lstsq(features, target).solution
    floor = float((features @ best - target).square().mean())

    def excess(moments: torch.dtype) -> float:
        generator = torch.Generator().manual_seed(1)
        weight = torch.nn.Parameter(torch.zeros(64, 16))
        optimizer = CPUAdam([weight], lr=0.02, weight_decay=0.0, moments=moments)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600, eta_min=2e-3)
        total = 0.0
        for step in range(600):
            rows = torch.randint(512, (32,), generator=generator)
            loss = (features[rows] @ weight - target[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step >= 400:
                total += float((features @ weight - target).square().mean().detach()) - floor
        return total / 200

    wide, narrow = excess(torch.float32), excess(torch.bfloat16)
    assert narrow == pytest.approx(wide, rel=0.10)
    assert wide < 0.3  # from about 1: it did train


def test_moments_change_type_on_load():
    params = parameters([(100,)])
    narrow = CPUAdam(params, moments=torch.bfloat16)
    with_grads(params, bf16=False)
    narrow.step()
    wide = CPUAdam(params)
    wide.load_state_dict(narrow.state_dict())
    back = CPUAdam(params, moments=torch.bfloat16)
    back.load_state_dict(copy.deepcopy(wide.state_dict()))
    back.param_groups[0]["lr"] = wide.param_groups[0]["lr"] = 0.0
    for optimizer in (wide, back):
        optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        assert wide.state[params[0]][key].dtype == torch.float32
        assert back.state[params[0]][key].dtype == torch.bfloat16
        a, b = wide.state[params[0]][key], back.state[params[0]][key].float()
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0)  # one bf16 unit


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ISAS)
def test_gradient_scale_is_that_of_scaled_gradients(name: str, bf16: bool):
    params = parameters()
    others = clones(params)
    ours, theirs = CPUAdam(params), CPUAdam(others)
    with isa(name):
        for scale in (0.37, 1.0, 1 / 65536):
            grads = with_grads(params, bf16=bf16)
            kept = [p.decoupled_grad.clone() for p in params]  # type: ignore[attr-defined]
            for q, g in zip(others, grads, strict=True):
                q.grad = g * torch.tensor(scale, dtype=torch.float32)
            ours.step(grad_scale=scale)
            theirs.step()
            for p, g in zip(params, kept, strict=True):
                assert_bitwise("gradient", p.decoupled_grad, g)  # type: ignore[attr-defined]
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        assert_bitwise(f"parameter {i}", p.detach(), q.detach())
        assert_bitwise(
            f"exp_avg_sq {i}", *(o.state[x]["exp_avg_sq"] for o, x in ((ours, p), (theirs, q)))
        )


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_norm(name: str, bf16: bool):
    params = parameters([*SHAPES, (300, 1000)])
    grads = with_grads(params, bf16=bf16)
    exact = torch.cat([g.double().flatten() for g in grads]).norm()
    optimizer = CPUAdam(params)
    results = set()
    with isa(name):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.add(optimizer.grad_norm())
    assert len(results) == 1
    # Sums of at most 1,024 squares in float32, the rest in float64.
    assert results.pop() == pytest.approx(float(exact), rel=1e-6)


def test_gradient_norm_neither_overflows_nor_hides_nan():
    big = torch.full((5000,), 3e30)
    assert sum_of_squares([big]) == pytest.approx(5000 * 9e60, rel=1e-6)
    for bad in (float("nan"), float("inf")):
        for position in (0, 17, 4999):
            grad = torch.ones(5000)
            grad[position] = bad
            assert not sum_of_squares([torch.ones(3), grad]) < float("inf")
            assert not sum_of_squares([grad.bfloat16()]) < float("inf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_gradients(bad: float):
    params = parameters([(50,), (60,)])
    before = clones(params)
    grads = with_grads(params, bf16=False)
    grads[1][7] = bad
    skipping = CPUAdam(params, nonfinite="skip")
    skipping.step()
    assert skipping.skipped_steps == 1
    for p, q in zip(params, before, strict=True):
        assert_bitwise("parameter", p.detach(), q.detach())
        assert float(skipping.state[p]["step"]) == 0
    grads[1][7] = 0.5
    skipping.step(found_inf=torch.tensor(1.0))
    assert skipping.skipped_steps == 2
    skipping.step()
    assert skipping.skipped_steps == 2 and float(skipping.state[params[0]]["step"]) == 1

    params = clones(before)
    grads = with_grads(params, bf16=False)
    grads[1][7] = bad
    propagating = CPUAdam(params)
    theirs = torch.optim.AdamW(before, weight_decay=0.01, fused=True)
    for q, g in zip(before, grads, strict=True):
        q.grad = g
    propagating.step()
    theirs.step()
    for p, q in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=0, equal_nan=True)
    assert params[1][7].isnan() and propagating.skipped_steps == 0


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], ids=hex)
@pytest.mark.parametrize("of", ["gradient", "bfloat16 gradient", "parameter", "moments"])
@pytest.mark.parametrize("name", ISAS)
def test_nan_survives_bfloat16_moments(name: str, of: str, bits: int):
    """Random bits added to the largest NaN must not carry into its sign and make it a number."""
    nan = torch.full((40,), bits, dtype=torch.int32).view(torch.float32)
    param = torch.nn.Parameter(torch.zeros(40))
    param.grad = torch.ones(40)
    # L2's penalty brings a parameter's NaN to the moments.
    optimizer = CPUAdam([param], moments=torch.bfloat16, decoupled=False)
    low = torch.empty(40, dtype=torch.bfloat16)
    optimizer.set_low_precision(param, low)
    optimizer.step()
    state = optimizer.state[param]
    targets = {"parameter": [param.data], "moments": [state["exp_avg"], state["exp_avg_sq"]]}
    if of == "bfloat16 gradient":
        param.decoupled_grad = param.grad.bfloat16()  # type: ignore[attr-defined]
        targets[of] = [param.decoupled_grad]  # type: ignore[attr-defined]
    for x in targets.get(of, [param.grad]):
        x[:20] = nan[:20].bfloat16() if x.dtype == torch.bfloat16 else nan[:20]
    with isa(name):
        optimizer.step()
    for x in (param, low, state["exp_avg"], state["exp_avg_sq"]):
        assert x.isnan().tolist() == [True] * 20 + [False] * 20


def test_pickled():
    params = parameters([(10,)])
    optimizer = pickle.loads(pickle.dumps(CPUAdam(params, lr=0.5)))
    (param,) = optimizer.param_groups[0]["params"]
    before = param.detach().clone()
    param.grad = torch.ones(10)
    optimizer.step()
    torch.testing.assert_close(param.detach(), before * (1 - 0.5 * 0.01) - 0.5)


@pytest.mark.parametrize(
    "copy_",
    [
        torch.zeros(3),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.bfloat16, device="meta"),
        torch.zeros(6, dtype=torch.bfloat16)[::2],
    ],
    ids=["float32", "shape", "meta", "strides"],
)
def test_bad_copies_are_named(copy_: Tensor):
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = CPUAdam([param])
    with pytest.raises(ValueError, match=r"copy is .*must be bfloat16 \[3\] on cpu"):
        optimizer.set_low_precision(param, copy_)
    with pytest.raises(ValueError, match="is not a parameter of this optimizer"):
        optimizer.set_low_precision(torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16))


def test_bad_choices_are_named():
    params = parameters([(3,)])
    with pytest.raises(
        ValueError, match="moments is torch.float16; it must be torch.float32, torch.b"
    ):
        CPUAdam(params, moments=torch.float16)
    with pytest.raises(ValueError, match=re.escape("nonfinite is 'ignore'; it must be")):
        CPUAdam(params, nonfinite="ignore")  # type: ignore[arg-type]
    memory = torch.zeros(3)
    param = torch.nn.Parameter(memory)
    param.grad = memory
    with pytest.raises(ValueError, match="lies in its parameter's memory"):
        CPUAdam([param]).step()


def test_what_changes_between_steps_is_noticed():
    """Gradients, moments, steps and memory are replaced at random; old gradients are let go."""
    params = parameters([(33,), (40, 7), (5,)])
    others = clones(params)
    ours = CPUAdam(params)
    theirs = torch.optim.AdamW(others, fused=True, weight_decay=0.01)
    for _ in range(25):
        for p, q in zip(params, others, strict=True):
            p.decoupled_grad = None  # type: ignore[attr-defined]
            kind = random.choice(["same", "new", "bf16", "none", "columns"])
            grad = gradient(p)
            if kind == "same" and p.grad is not None:
                p.grad.copy_(grad)
            elif kind == "bf16":
                grad = grad.bfloat16()
                p.decoupled_grad = grad  # type: ignore[attr-defined]
            elif kind == "none":
                p.grad = grad = None
            elif kind == "columns" and p.dim() == 2:
                p.grad = grad.t().contiguous().t()
            else:
                p.grad = grad
            q.grad = None if grad is None else grad.float().contiguous()
            state = ours.state[p]
            if state and random.random() < 0.3:
                key = random.choice(["exp_avg", "exp_avg_sq", "step"])
                state[key] = state[key].clone()
            if random.random() < 0.2:
                p.data = p.data.clone()
            if state and random.random() < 0.2:
                ours.state[p] = dict(state)
        ours.step()
        theirs.step()
        for i, (p, q) in enumerate(zip(params, others, strict=True)):
            assert_bitwise(f"parameter {i}", p.detach(), q.detach())
    params[0].grad = gradient(params[0])
    ours.step()
    old = weakref.ref(params[0].grad)
    ours.zero_grad()
    gc.collect()
    assert old() is None


def test_autograd_notices_the_step():
    """As with torch's optimizers: a backward pass over weights that were stepped is refused."""
    param = torch.nn.Parameter(torch.randn(5))
    low = torch.zeros(5, dtype=torch.bfloat16)
    optimizer = CPUAdam([param], nonfinite="skip")
    optimizer.set_low_precision(param, low)
    loss = (param**2).sum()
    param.grad = torch.full((5,), float("nan"))
    versions = param._version, low._version
    optimizer.step()
    assert (param._version, low._version) == versions  # skipped: nothing was written
    param.grad = torch.ones(5)
    optimizer.step()
    assert low._version > versions[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
