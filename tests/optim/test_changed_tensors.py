"""Tensors that were changed behind an optimizer's back: a step follows them or refuses in a
sentence that names the parameter, and never touches memory that isn't theirs."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numeric import assert_bitwise
from vlmkernels.optim import CPUAdam, HybridDeviceOptimizer, multi_tensor

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "cpu": CPUAdam,
    "hybrid": HybridDeviceOptimizer,
    "hybrid on the device": lambda p, **k: HybridDeviceOptimizer(p, offload_fraction=0.0, **k),
}


OLDER = "cpu, an older torch"  # which can't read many tensors in one call


@pytest.fixture(params=[*OPTIMIZERS, OLDER])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    if request.param != OLDER:
        return OPTIMIZERS[request.param]
    monkeypatch.setattr(multi_tensor, "_EXCHANGE", None)
    return CPUAdam


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(8, 6).to(dtype)) for _ in range(3)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def data_of(base: Tensor) -> Callable[[Tensor], None]:
    def change(param: Tensor) -> None:
        param.data = base

    return change


# Of another type, shape or order of elements; in memory of their own or in the same.
CHANGES: dict[str, Callable[[Tensor], None]] = {
    "type": lambda p: data_of(p.detach().to(torch.float16))(p),
    "gaps": lambda p: data_of(torch.randn(8, 60)[:, :6])(p),
    "gaps in the same memory": lambda p: data_of(torch.as_strided(p.detach(), (2, 6), (12, 1)))(p),
    "smaller": lambda p: data_of(torch.randn(2, 6))(p),
    "shape in the same memory": lambda p: data_of(p.detach().view(6, 8))(p),
    "larger": lambda p: data_of(torch.randn(80, 60))(p),
}


@pytest.mark.parametrize("moments", [torch.float32, torch.uint8])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_parameter_is_named(
    make: Callable[..., Any], change: str, moments: torch.dtype
) -> None:
    params = weights()
    optimizer = make(params, moments=moments)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    CHANGES[change](params[1])
    # As zero_grad and another backward pass leave it.
    params[1].grad = None
    params[1].grad = torch.zeros_like(params[1])
    with pytest.raises(ValueError, match="parameter 1 "):
        optimizer.step()
    for number in (0, 2):
        assert_bitwise("others", params[number].detach(), before[number])


@pytest.mark.parametrize("of", ["parameter", "gradient", "exp_avg", "step"])
def test_what_was_freed_is_not_touched(make: Callable[..., Any], of: str) -> None:
    """As FSDP frees storages. Kernels are given addresses, and torch copies from none."""
    for steps_before in (1, 0) if of in ("parameter", "gradient") else (1,):
        params = weights()
        optimizer = make(params)
        for _ in range(steps_before):
            optimizer.step()
        freed = {"parameter": params[1].data, "gradient": params[1].grad}
        x = freed[of] if of in freed else optimizer.state[params[1]][of]
        before = [p.detach().clone() for p in params]
        x.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="has no memory: its storage was freed"):
            optimizer.step()
        for number in (0, 2):
            assert_bitwise("others", params[number].detach(), before[number])


def test_a_negated_gradient_counts_with_its_sign(make: Callable[..., Any]) -> None:
    p, q = (nn.Parameter(torch.ones(8, 6)) for _ in range(2))
    q.grad = torch.randn(8, 6)
    p.grad = torch._neg_view(-q.grad)
    for param in (p, q):
        make([param]).step()
    assert_bitwise("parameter", p.detach(), q.detach())


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
def test_moments_of_another_shape_are_named(
    make: Callable[..., Any], moments: torch.dtype, key: str
) -> None:
    key += "_codes" if moments == torch.uint8 else ""
    for replace in (True, False):
        params = weights()
        optimizer = make(params, moments=moments)
        optimizer.step()
        state = optimizer.state[params[2]]
        small = torch.zeros(3, dtype=state[key].dtype)
        if replace:
            state[key] = small
        else:
            state[key].data = small
        with pytest.raises(ValueError, match=re.escape(f"{key} of parameter 2 is ")):
            optimizer.step()
        del state[key]
        with pytest.raises(ValueError, match=re.escape(f"{key} of parameter 2 is missing")):
            optimizer.step()


@pytest.mark.parametrize("whole", [False, True])
def test_a_replaced_state_is_stepped_not_the_old_one(make: Callable[..., Any], whole: bool) -> None:
    """Another state for a parameter, or other memory for its step count."""
    params = weights()
    optimizer = make(params)
    optimizer.step()
    state = optimizer.state[params[1]]
    old = {key: x.detach() for key, x in state.items()}  # the same memory
    before = {key: x.clone() for key, x in old.items()}
    if whole:
        state = {**old, "exp_avg": torch.zeros(8, 6), "exp_avg_sq": torch.zeros(8, 6)}
        state["step"] = torch.tensor(41.0)
        optimizer.state[params[1]] = state
    else:
        state["step"].data = torch.tensor(41.0)
    optimizer.step()
    assert float(state["step"]) == 42
    assert_bitwise("the old step", old["step"], before["step"])
    if whole:
        expected = torch.zeros(8, 6).lerp(params[1].grad, 0.1)
        torch.testing.assert_close(state["exp_avg"], expected)
        for key in ("exp_avg", "exp_avg_sq"):
            assert_bitwise(key, old[key], before[key])


def test_moments_of_another_order_in_the_same_memory() -> None:
    for transposed in (False, True):
        actual = []
        for change in (False, True):
            torch.manual_seed(5)
            param = nn.Parameter(torch.randn(6, 6).t() if transposed else torch.randn(6, 6))
            optimizer = CPUAdam([param])
            param.grad = torch.randn(6, 6)
            optimizer.step()
            if change:  # the same numbers, but not where they were
                moment = optimizer.state[param]["exp_avg"]
                values = moment.clone()
                moment.data = moment.data.t()
                moment.copy_(values)
            optimizer.step()
            actual.append(param.detach())
        assert_bitwise("weights", actual[1], actual[0])


def test_scales_of_another_size_are_named(make: Callable[..., Any]) -> None:
    params = weights()
    optimizer = make(params, moments=torch.uint8)
    optimizer.step()
    optimizer.state[params[0]]["exp_avg_scales"].data = torch.zeros(0)
    with pytest.raises(ValueError, match="exp_avg_scales of parameter 0 is float32"):
        optimizer.step()


def test_a_master_that_was_left_out_is_put_back() -> None:
    for fraction in (0.0, 1.0):
        params = weights(torch.bfloat16)
        optimizer = HybridDeviceOptimizer(params, offload_fraction=fraction)
        optimizer.step()
        master = optimizer.state[params[1]].pop("master")
        optimizer.step()
        assert optimizer.state_dict()["state"][1]["master"] is master


def test_a_master_of_another_shape_is_named() -> None:
    for fraction in (0.0, 1.0):
        params = weights(torch.bfloat16)
        optimizer = HybridDeviceOptimizer(params, offload_fraction=fraction)
        optimizer.step()
        optimizer.state[params[1]]["master"].data = torch.zeros(3)
        with pytest.raises(ValueError, match="master of parameter 1 is float32"):
            optimizer.step()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_that_moved_in_memory_are_followed(
    make: Callable[..., Any], moments: torch.dtype
) -> None:
    """share_memory_, and clones where the originals are freed and overwritten."""
    actual = []
    for moving in (False, True):
        torch.manual_seed(3)
        params = weights()
        optimizer = make(params, moments=moments)
        for _ in range(3):
            optimizer.step()
            if not moving:
                continue
            for state in optimizer.state.values():
                for value in state.values():
                    value.share_memory_()
            for param in params:
                old, param.data = param.data, param.data.clone()
                old.fill_(float("nan"))
                assert param.grad is not None
                old, param.grad.data = param.grad.data, param.grad.data.clone()
                old.fill_(float("nan"))
            for state in optimizer.state.values():
                for value in state.values():
                    value.data = value.data.clone()
        actual.append([p.detach() for p in params])
    for plain, moved in zip(*actual, strict=True):
        assert_bitwise("moved", moved, plain)


def test_the_low_precision_copy_is_followed() -> None:
    master = nn.Parameter(torch.randn(64))
    optimizer = CPUAdam([master])
    low = torch.empty(64, dtype=torch.bfloat16)
    optimizer.set_low_precision(master, low)
    for _ in range(2):
        master.grad = torch.randn(64)
        optimizer.step()
        assert_bitwise("copy", low, master.detach().bfloat16())
        old, low.data = low.data, low.data.clone()
        old.zero_()
        optimizer.step()
        assert_bitwise("copy", low, master.detach().bfloat16())
        assert not old.any()
        low.share_memory_()
    for bad in (torch.empty(8, dtype=torch.bfloat16), torch.empty(64)):
        low.data = bad
        with pytest.raises(ValueError, match="low-precision copy of parameter 0 is "):
            optimizer.step()


def test_a_model_whose_memory_was_replaced_counts() -> None:
    """A new storage of the same form is another value of the model, as a write in place is."""
    for fraction in (0.0, 1.0):
        params = weights(torch.bfloat16)
        optimizer = HybridDeviceOptimizer(params, offload_fraction=fraction, lr=0.0)
        optimizer.step()
        new = torch.randn(8, 6).bfloat16()
        params[0].data = new.clone()
        optimizer.step()
        assert_bitwise("model", params[0].detach(), new)
        optimizer.check_masters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_model_replaced_by_one_at_the_same_address_counts(
    dtype: torch.dtype, fraction: float
) -> None:
    memory = np.zeros(40 * dtype.itemsize, dtype=np.uint8)
    param = nn.Parameter(torch.from_numpy(memory).view(dtype))
    address = param.data_ptr()
    optimizer = HybridDeviceOptimizer([param], lr=1e-3, offload_fraction=fraction, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    version = param._version
    torch.from_numpy(memory).view(dtype).fill_(7.0)
    param.data = torch.from_numpy(memory).view(dtype)
    assert (param.data_ptr(), param._version) == (address, version)
    optimizer.step()
    expected = torch.full((40,), 7.0) - 1e-3
    torch.testing.assert_close(param.detach(), expected.to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_default_device_is_not_where_host_memory_is(
    make: Callable[..., Any], moments: torch.dtype
) -> None:
    """Counters, page-locked slabs and tables of codes say where they are."""
    actual = []
    for device in ("cpu", "meta"):
        torch.manual_seed(4)
        params = weights()
        with torch.device(device):
            optimizer = make(params, moments=moments)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            if isinstance(optimizer, HybridDeviceOptimizer):
                optimizer.set_offload_fraction(0.5)
                optimizer.step()
        actual.append([p.detach() for p in params])
    for plain, other in zip(*actual, strict=True):
        assert_bitwise("weights", other, plain)


def test_parameters_in_the_same_memory_are_refused(make: Callable[..., Any]) -> None:
    """Tied by `.data`: threads would step an element twice at once. Neighbours may be apart by
    nothing, and views of one another by columns."""
    memory = torch.randn(3, 8, 6)
    params = [nn.Parameter(x) for x in memory]
    optimizer = make(params)
    params[0].grad, params[1].grad = torch.randn(2, 8, 6)
    optimizer.step()
    params[2].data = memory[0]
    optimizer.step()  # the third has no gradient: only one of the two is stepped
    params[2].grad = torch.randn(8, 6)
    before = memory.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="parameter 0 and parameter 2 lie in the same memory"):
            optimizer.step()
    assert torch.equal(memory, before)
    params[2].data = memory[2]
    optimizer.step()
    assert not (memory == before).all((1, 2)).any()


def test_columns_of_one_matrix_may_be_parameters() -> None:
    matrix = torch.randn(8, 6)
    columns = [nn.Parameter(part) for part in matrix.split(3, 1)]
    optimizer = HybridDeviceOptimizer(columns)
    for column in columns:
        column.grad = torch.ones_like(column)
    before = matrix.clone()
    optimizer.step()
    assert (matrix < before).all()


@pytest.mark.parametrize("step", [torch.zeros(0), torch.ones(2)])
def test_a_step_that_is_no_number_is_refused(make: Callable[..., Any], step: Tensor) -> None:
    """The native call reads one number at its address."""
    params = weights()
    optimizer = make(params)
    optimizer.step()
    optimizer.state[params[1]]["step"] = step
    with pytest.raises(ValueError, match="step is .*; it must be one number"):
        optimizer.step()
    optimizer.state[params[1]]["step"] = torch.ones(1)
    optimizer.step()
    assert optimizer.state[params[1]]["step"].shape == ()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_kept_of_parameters_that_were_replaced(
    fraction: float, dtype: torch.dtype, in_backward: bool
) -> None:
    """As pruning and densification do it, and of a group that was taken out."""
    params = [nn.Parameter(torch.randn(1000).to(dtype)) for _ in range(2)]
    optimizer = HybridDeviceOptimizer(
        [{"params": [p]} for p in params], offload_fraction=fraction, in_backward=in_backward
    )
    gone = []

    def step() -> dict[str, int]:
        total = sum(p.float().sum() for group in optimizer.param_groups for p in group["params"])
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.memory()

    before = step()
    del params
    for _ in range(3):
        (old,) = optimizer.param_groups[0]["params"]
        new = nn.Parameter(old.detach().clone())
        optimizer.state[new] = optimizer.state.pop(old)
        optimizer.param_groups[0]["params"] = [new]
        optimizer.set_offload_fraction(fraction)
        gone.append(weakref.ref(old))
        del old
        assert step() == before
    last = optimizer.param_groups.pop(0)["params"]
    optimizer.state.pop(last[0])
    gone.append(weakref.ref(last[0]))
    del last, new
    after = step()
    gc.collect()
    assert all(ref() is None for ref in gone)
    for key in ("host_state", "device_state"):
        assert after[key] == before[key] // 2


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_parameter_may_leave_its_group_and_come_back(in_backward: bool) -> None:
    """Frozen so, it keeps its state, and others, that are new, get no memory of it."""
    results = []
    for make in (torch.optim.AdamW, HybridDeviceOptimizer):
        torch.manual_seed(8)
        params = [nn.Parameter(torch.randn(64)) for _ in range(3)]
        options = {"in_backward": True} if in_backward and make is HybridDeviceOptimizer else {}
        optimizer: Any = make(params, lr=0.1, **options)
        for step in range(6):
            active = {1: params[:2], 2: params[1:]}.get(step, params)
            optimizer.param_groups[0]["params"] = list(active)
            sum(p.square().sum() for p in (params[:2] if step == 0 else active)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in params])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", ["freed", "exchanged"])
def test_a_state_is_saved_while_the_model_has_no_memory(way: str) -> None:
    """As where weights are offloaded meanwhile."""
    params = weights(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if way == "freed":
        params[0].untyped_storage().resize_(0)
    else:
        params[0].data = torch.empty(0, dtype=torch.bfloat16)
    state = optimizer.state_dict()["state"]
    for number, held in saved["state"].items():
        assert torch.equal(held["master"], state[number]["master"])


def test_a_parameter_that_was_replaced_in_its_memory_counts_no_more(
    make: Callable[..., Any],
) -> None:
    params = weights()
    optimizer = make(params)
    optimizer.step()
    new = nn.Parameter(params[0].data)
    new.grad = torch.ones_like(new)
    before = new.detach().clone()
    optimizer.param_groups[0]["params"][0] = new
    optimizer.step()
    assert (new < before).all()


def test_what_is_no_leaf_may_be_stepped() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    x.retain_grad()
    optimizer = HybridDeviceOptimizer([x])
    x.sum().backward()
    optimizer.step()
    assert (x < 1).all()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_float32_gradients_of_a_bfloat16_parameter_are_not_rounded() -> None:
    value = 1.003  # bfloat16 has 1 and 1.0078
    moments = []
    for fraction in (0.0, 1.0):
        param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        param.grad_dtype = torch.float32
        param.grad = torch.full((4,), value)
        optimizer = HybridDeviceOptimizer([param], offload_fraction=fraction)
        optimizer.step()
        moments.append(optimizer.state[param]["exp_avg_sq"])
    assert torch.equal(*moments) and moments[0][0] == torch.tensor(value) ** 2 * (1 - 0.999)
    late = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    late.grad = torch.ones_like(late)
    optimizer = HybridDeviceOptimizer([late])
    optimizer.step()
    late.grad = None
    late.grad_dtype = torch.float32
    late.grad = torch.full((4,), value)
    with pytest.raises(ValueError, match="would be rounded to bfloat16: set the parameter's grad"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_resume_where_weights_are_written_after_each_step(fraction: float):
    """As by clamp_, averaging or normalisation: what the model holds is saved."""

    def train(resumed: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(8, 8).bfloat16()
        optimizer = HybridDeviceOptimizer(model.parameters(), lr=0.1, offload_fraction=fraction)
        for step in range(4):
            if resumed and step == 2:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = nn.Linear(8, 8).bfloat16()
                model.load_state_dict(saved[0])
                optimizer = HybridDeviceOptimizer(
                    model.parameters(), lr=0.1, offload_fraction=fraction
                )
                optimizer.load_state_dict(saved[1])
            model(torch.ones(2, 8).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.2, 0.2)
        return [p.detach() for p in model.parameters()]

    for whole, resumed in zip(train(False), train(True), strict=True):
        assert_bitwise("weights", resumed, whole)
