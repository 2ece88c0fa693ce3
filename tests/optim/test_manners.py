"""What an optimizer is asked for and cannot give is refused; what it was given is kept."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.numeric import assert_bitwise
from vlmkernels.optim import CPUAdam, HybridDeviceOptimizer

BOTH = pytest.mark.parametrize("make", [CPUAdam, HybridDeviceOptimizer])


def weight() -> nn.Parameter:
    param = nn.Parameter(torch.randn(300))
    param.grad = torch.randn(300)
    return param


@BOTH
@pytest.mark.parametrize("flag", ["maximize", "amsgrad"])
def test_forms_of_adam_that_are_not_offered(make: Callable[..., Any], flag: str) -> None:
    with pytest.raises(ValueError, match=f"a parameter group has {flag}=True"):
        make([{"params": [weight()], flag: True}])
    optimizer = make([{"params": [weight()], flag: False}])
    with pytest.raises(ValueError, match=f"a parameter group has {flag}=True"):
        optimizer.add_param_group({"params": [weight()], flag: True})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][flag] = True
    with pytest.raises(ValueError, match=f"a parameter group has {flag}=True"):
        optimizer.step()


@BOTH
@pytest.mark.parametrize("decoupled", [True, False])
def test_loading_keeps_the_kind_of_weight_decay(make: Callable[..., Any], decoupled: bool) -> None:
    """As torch.optim.AdamW does with a state of torch.optim.Adam, and the other way round."""
    other = torch.optim.Adam if decoupled else torch.optim.AdamW
    theirs = other([weight()], lr=0.5)
    theirs.step()
    optimizer = make([weight()], decoupled=decoupled)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is decoupled
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_optimizer_is_the_same(way: str) -> None:
    param, low = weight(), torch.empty(300, dtype=torch.bfloat16)
    optimizer = CPUAdam([param], moments=torch.uint8, nonfinite="skip")
    optimizer.set_low_precision(param, low)
    optimizer.step()
    pair = (optimizer, low)
    twin, twin_low = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    (twin_param,) = twin.param_groups[0]["params"]
    assert (twin.moments, twin.nonfinite) == (torch.uint8, "skip")
    for x in (param, twin_param):
        x.grad = torch.ones(300)
    optimizer.step()
    twin.step()
    assert_bitwise("weights", twin_param.detach(), param.detach())
    assert_bitwise("copies", twin_low, low)
    for key, value in optimizer.state[param].items():
        assert_bitwise(key, twin.state[twin_param][key], value)
    twin_param.grad[0] = float("nan")
    twin.step()
    assert (twin.skipped_steps, optimizer.skipped_steps) == (1, 0)


@BOTH
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_half_a_loaded_state_is_named(make: Callable[..., Any], key: str) -> None:
    optimizer = make([weight()])
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0][key]
    with pytest.raises(ValueError, match=f"the loaded {key} is missing"):
        optimizer.load_state_dict(state)
    optimizer.step()


def test_zero_grad_drops_decoupled_gradients() -> None:
    param = weight()
    optimizer = CPUAdam([param])
    param.decoupled_grad = torch.ones(300, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=False)
    assert not param.grad.any() and not param.decoupled_grad.any()
    optimizer.zero_grad()
    assert param.grad is None and param.decoupled_grad is None
    before = param.detach().clone()
    optimizer.step()
    assert_bitwise("weights", param.detach(), before)


def test_a_rate_that_changes_after_part_of_the_step_was_made() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = HybridDeviceOptimizer([param], in_backward=True, lr=0.1)
    param.sum().backward()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(RuntimeError, match="lr was 0.1 in the backward pass .* is 0.2 at the step"):
        optimizer.step()


def test_a_deleted_optimizer_leaves_no_hooks() -> None:
    param = weight()
    optimizer = HybridDeviceOptimizer([param], overlap=True)
    assert param._post_accumulate_grad_hooks
    del optimizer
    gc.collect()
    assert not param._post_accumulate_grad_hooks


@BOTH
def test_numbers_that_are_not_one_number(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="lr is .*; it must be one number"):
        make([weight()], lr=torch.tensor([0.1, 0.2]))
    make([weight()], lr=torch.tensor(0.1)).step()
