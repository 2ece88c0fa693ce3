"""CPUAdam against torch.optim.AdamW(fused=True), bit for bit, and against float64."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.numeric import assert_bitwise, isa
from vlmkernels import CPUAdam, _native
from vlmkernels.optim.native import adam_reference

ISAS = [name for name in _native.available_isas() if "amx" not in name]
# Without FMA instructions torch's order of operations can't be had bit for bit.
FMA_ISAS = [name for name in ISAS if name != "generic"]
SHAPES = [(), (0,), (1,), (7,), (16,), (33,), (5, 31), (1003,), (129, 257)]


def parameters(shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]


def clones(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def gradient(p: Tensor) -> Tensor:
    """Sizes from 1e-7 to 1, as in training."""
    return torch.randn_like(p) * 10 ** (torch.rand_like(p) * 7 - 7)


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    pairs = zip(ours.param_groups, theirs.param_groups, strict=True)
    for i, (a, b) in enumerate(pairs):
        for j, (p, q) in enumerate(zip(a["params"], b["params"], strict=True)):
            assert_bitwise(f"group {i} parameter {j}", p.detach(), q.detach())
            assert set(ours.state[p]) == set(theirs.state[q])
            for key in ours.state[p]:
                assert_bitwise(f"{key} {i} {j}", ours.state[p][key], theirs.state[q][key])


@pytest.mark.parametrize("name", FMA_ISAS)
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"weight_decay": 0.0, "lr": 3e-4},
        {"decoupled": False, "weight_decay": 0.1},
        {"betas": (0.3, 0.95), "eps": 1e-6},  # beta1 below 1/2: lerp works from the other end
    ],
    ids=["default", "no-decay", "l2", "low-beta1"],
)
def test_bitwise_equal_to_torch_fused(name: str, keywords: dict[str, Any]):
    params = parameters()
    others = clones(params)
    torch_keywords = {"weight_decay": 0.01, **keywords}
    decoupled = torch_keywords.pop("decoupled", True)
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = torch_class(others, fused=True, **torch_keywords)
    ours = CPUAdam(params, **keywords)
    with isa(name):
        for _ in range(12):
            for p, q in zip(params, others, strict=True):
                p.grad = gradient(p)
                q.grad = p.grad.clone()
            ours.step()
            theirs.step()
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("name", ISAS)
@settings(max_examples=15)
@given(
    numel=st.integers(1, 70),
    decoupled=st.booleans(),
    lr=st.floats(1e-6, 0.1),
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.9, 0.9999),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    bf16=st.booleans(),
    number=st.integers(0, 2**31 - 1),
)
def test_error_is_that_of_plain_torch(
    name, numel, decoupled, lr, beta1, beta2, weight_decay, bf16, number
):
    torch.manual_seed(number)
    param = torch.nn.Parameter(torch.randn(numel))
    kw: dict[str, Any] = {"betas": (beta1, beta2), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = CPUAdam([param], lr=lr, decoupled=decoupled, **kw)
    results = {}
    for dtype in (torch.float32, torch.float64):
        results[dtype] = [
            param.detach().to(dtype).clone(),
            torch.zeros(numel, dtype=dtype),
            torch.zeros(numel, dtype=dtype),
        ]
    with isa(name):
        for step in range(1, 4):
            grad = gradient(param).detach()
            grad = grad.bfloat16() if bf16 else grad
            param.decoupled_grad = grad  # type: ignore[attr-defined]
            optimizer.step()
            for p, m, v in results.values():
                adam_reference(p, grad, m, v, step, lr=lr, decoupled=decoupled, **kw)
    state = optimizer.state[param]
    ours = (param.detach(), state["exp_avg"], state["exp_avg_sq"])
    names = ("param", "exp_avg", "exp_avg_sq")
    for label, x, plain, exact in zip(names, ours, *results.values(), strict=True):
        error = (x.double() - exact).norm()
        # One rounding a step and operation of the order of the values themselves.
        allowed = 2 * (plain.double() - exact).norm() + 3e-7 * (exact.norm() + 3 * lr)
        assert error <= allowed, f"{label}: error {error:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("name", ISAS)
def test_bfloat16_gradients_are_widened_exactly(name: str):
    params = parameters()
    others = clones(params)
    ours, theirs = CPUAdam(params), CPUAdam(others)
    with isa(name):
        for _ in range(3):
            for p, q in zip(params, others, strict=True):
                p.decoupled_grad = gradient(p).bfloat16()  # type: ignore[attr-defined]
                q.grad = p.decoupled_grad.float()  # type: ignore[attr-defined]
            ours.step()
            theirs.step()
    assert_same_state(ours, theirs)


def test_a_new_thread_takes_torchs_number_of_threads():
    """OpenMP keeps a number for each, and a new one has the machine's."""
    code = (
        "import os, sys, threading, torch, vlmkernels\n"
        "from vlmkernels.layer import rms_norm\n"
        "torch.set_num_threads(1)\n"
        "p = torch.nn.Parameter(torch.randn(1 << 20)); p.grad = torch.randn(1 << 20)\n"
        "optimizer = vlmkernels.CPUAdam([p])\n"
        "x, w = torch.randn(4096, 256), torch.randn(256)\n"
        "def work():\n"
        "    before = len(os.listdir('/proc/self/task'))\n"
        "    rms_norm(x, w, 1e-6) if sys.argv[1] == 'norm' else optimizer.step()\n"
        "    print(len(os.listdir('/proc/self/task')) - before)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    for what in ("norm", "adam"):
        command = [sys.executable, "-c", code, what]
        variables = {**os.environ, "OMP_NUM_THREADS": "4"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        assert done.stdout == "0\n", (what, done.stdout)


def test_same_bits_with_any_number_of_threads():
    shapes = [(40_000,), (3,), (200, 333), (16_384,), (5,)]
    params = parameters(shapes)
    grads = [gradient(p) for p in params]
    expected = None
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        local = clones(params)
        optimizer = CPUAdam(local)
        for p, g in zip(local, grads, strict=True):
            p.grad = g
        optimizer.step()
        expected = expected or optimizer
        assert_same_state(optimizer, expected)


def test_mixed_gradient_types_and_missing_gradients():
    params = parameters([(20,), (21,), (22,)])
    before = params[2].detach().clone()
    others = clones(params[:2])
    ours = CPUAdam(params)
    theirs = torch.optim.AdamW(others, weight_decay=0.01, fused=True)
    params[0].grad = gradient(params[0])
    params[1].decoupled_grad = gradient(params[1]).bfloat16()  # type: ignore[attr-defined]
    others[0].grad = params[0].grad.clone()
    others[1].grad = params[1].decoupled_grad.float()  # type: ignore[attr-defined]
    ours.step()
    theirs.step()
    assert_bitwise("float32", params[0].detach(), others[0].detach())
    assert_bitwise("bfloat16", params[1].detach(), others[1].detach())
    assert_bitwise("no gradient", params[2].detach(), before)
    assert params[2] not in ours.state


def test_transposed_parameters_and_gradients():
    dense = torch.randn(30, 20)
    p = torch.nn.Parameter(dense.t())  # [20, 30], dense but not contiguous
    q = torch.nn.Parameter(dense.t().contiguous())
    ours, theirs = CPUAdam([p]), torch.optim.AdamW([q], fused=True)
    for _ in range(3):
        p.grad = gradient(q.detach())  # row-major: another layout than p's
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert_bitwise("parameter", p.detach(), q.detach())
    assert_bitwise("exp_avg", ours.state[p]["exp_avg"], theirs.state[q]["exp_avg"])


@pytest.mark.parametrize("direction", ["ours to torch", "torch to ours"])
def test_state_dicts_are_interchangeable(direction: str):
    params = parameters()
    others = clones(params)
    pair: list[torch.optim.Optimizer] = [
        CPUAdam([{"params": params[:4], "lr": 2e-3}, {"params": params[4:]}], weight_decay=0.05),
        torch.optim.AdamW(others, fused=True, weight_decay=0.0),
    ]
    if direction == "torch to ours":
        pair = [
            torch.optim.AdamW(
                [{"params": params[:4], "lr": 2e-3}, {"params": params[4:]}],
                fused=True,
                weight_decay=0.05,
            ),
            CPUAdam(others),
        ]
    source, target = pair

    def steps(optimizer: torch.optim.Optimizer, grads: list[list[Tensor]]) -> None:
        for step in grads:
            ps = [p for group in optimizer.param_groups for p in group["params"]]
            for p, g in zip(ps, step, strict=True):
                p.grad = g.clone()
            optimizer.step()

    first, second = ([[gradient(p) for p in params] for _ in range(3)] for _ in range(2))
    steps(source, first)
    # The target's groups must be cut alike.
    target.param_groups.clear()
    target.add_param_group({"params": others[:4]})
    target.add_param_group({"params": others[4:]})
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    for group in target.param_groups:
        if isinstance(target, torch.optim.AdamW):
            group["fused"] = True  # an implementation, which our state doesn't choose
    steps(source, second)
    steps(target, second)
    assert_same_state(target, source)
    assert [g["lr"] for g in target.param_groups] == [2e-3, 1e-3]
    assert {float(s["step"]) for s in target.state.values()} == {6.0}
    steps_held = [s["step"] for s in target.state.values()]
    assert all(s.dtype == torch.float32 and s.dim() == 0 for s in steps_held)


def test_as_megatron_uses_it():
    """Extra group keys; moments made before the first step; a step that is shared, or a number."""
    params = parameters([(10,), (11,)])
    others = clones(params)
    groups = [
        {"params": [p], "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False} for p in params
    ]
    ours = CPUAdam(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    theirs = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for p in params:
        ours.state[p]["exp_avg"] = torch.zeros_like(p.data)
        ours.state[p]["exp_avg_sq"] = torch.zeros_like(p.data)
    for number in range(6):
        if number == 2:
            state = ours.state_dict()
            shared = torch.tensor(2.0)
            for values in state["state"].values():
                values["step"] = shared
            ours.load_state_dict(state)
        if number == 4:
            ours.state[params[0]]["step"] = ours.state[params[1]]["step"] = torch.tensor(4.0)
        if number == 5:
            ours.state[params[0]]["step"] = 5
        for p, q in zip(params, others, strict=True):
            p.grad = gradient(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(params, others, strict=True):
        assert_bitwise("parameter", p.detach(), q.detach())
        assert float(ours.state[p]["step"]) == 6
    assert ours.param_groups[0]["is_expert_parallel"] is False


def test_learning_rate_zero_changes_no_bit():
    params = parameters()
    before = clones(params)
    optimizer = CPUAdam(params, lr=0.0, weight_decay=0.0)
    for p in params:
        p.grad = gradient(p)
    optimizer.step()
    for p, q in zip(params, before, strict=True):
        assert_bitwise("parameter", p.detach(), q.detach())
        assert float(optimizer.state[p]["step"]) == 1


def test_closure_and_scheduler():
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = CPUAdam([param], lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 5.0
    # Adam's first step is lr * sign(gradient), up to eps.
    torch.testing.assert_close(param.detach(), torch.tensor([0.9, -1.9]))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ({"lr": float("nan")}, "lr is nan; it must be at least 0"),
        ({"eps": -1e-8}, "eps is -1e-08; it must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas[1] is 1.0; it must be in [0, 1)"),
    ],
)
def test_bad_hyperparameters_are_named(keywords: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        CPUAdam(parameters([(2,)]), **keywords)


@pytest.mark.parametrize(
    "param",
    [
        torch.randn(3).bfloat16(),
        torch.empty(3, device="meta"),
        torch.randn(4, 4)[:, :2],
        torch._neg_view(torch.randn(3)),
    ],
    ids=["bfloat16", "meta", "gaps", "negated view"],
)
def test_bad_parameters_are_named(param: Tensor):
    good = torch.nn.Parameter(torch.randn(3))
    optimizer = CPUAdam([good])
    with pytest.raises(ValueError, match="a parameter is .*CPUAdam needs float32 on cpu"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(param)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "grad",
    [torch.randn(4), torch.randn(3).half(), torch.randn(3).to_sparse()],
    ids=["shape", "float16", "sparse"],
)
def test_bad_gradients_are_named_and_change_nothing(grad: Tensor):
    params = parameters([(5,), (3,)])
    before = clones(params)
    params[0].grad = torch.ones(5)
    params[1].decoupled_grad = grad  # type: ignore[attr-defined]
    optimizer = CPUAdam(params)
    with pytest.raises(ValueError, match="a gradient is .*must be dense float32 or bfloat16"):
        optimizer.step()
    for p, q in zip(params, before, strict=True):
        assert_bitwise("parameter", p.detach(), q.detach())
        assert float(optimizer.state[p].get("step", 0)) == 0


def test_bad_states_are_named():
    params = parameters([(3,)])
    params[0].grad = torch.ones(3)
    other = torch.optim.AdamW(clones(params), amsgrad=True)
    with pytest.raises(ValueError, match="has amsgrad=True, which is not offered here"):
        CPUAdam(params).load_state_dict(other.state_dict())
    optimizer = CPUAdam(params)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 is float32 \[4\] on cpu"):
        CPUAdam(clones(params)).load_state_dict(state)
