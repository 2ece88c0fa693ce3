"""What an optimizer is asked for and cannot give is refused; what it was given is kept."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.kernels.numeric import assert_bitwise
from tests.optim.test_hybrid import FMA
from vlmkernels.optim import CPUAdam, HybridDeviceOptimizer, blockwise, host_step, multi_tensor

BOTH = pytest.mark.parametrize("make", [CPUAdam, HybridDeviceOptimizer])


def weight() -> nn.Parameter:
    param = nn.Parameter(torch.randn(300))
    param.grad = torch.randn(300)
    return param


@BOTH
@pytest.mark.parametrize("flag", ["maximize", "amsgrad"])
def test_forms_of_adam_that_are_not_offered(make: Callable[..., Any], flag: str) -> None:
    with pytest.raises(ValueError, match=f"parameter group 0 has {flag}=True"):
        make([{"params": [weight()], flag: True}])
    optimizer = make([{"params": [weight()], flag: False}])
    with pytest.raises(ValueError, match=f"parameter group 1 has {flag}=True"):
        optimizer.add_param_group({"params": [weight()], flag: True})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][flag] = True
    with pytest.raises(ValueError, match=f"parameter group 0 has {flag}=True"):
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


@pytest.mark.skipif(
    "decoupled_weight_decay" not in torch.optim.Adam([torch.empty(0)]).defaults,
    reason="groups of torch before 2.7 do not say how weights decay, and its checkpoint asks",
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"flat": True}], ids=str)
@pytest.mark.parametrize("source", [torch.optim.AdamW, CPUAdam, HybridDeviceOptimizer])
@pytest.mark.parametrize("target", [torch.optim.Adam, CPUAdam, HybridDeviceOptimizer])
def test_states_by_torch_distributed_checkpoint(
    source: Callable[..., Any], target: Callable[..., Any], options: dict[str, bool], tmp_path: Path
) -> None:
    """By files, whose planner takes the keys of the target, and by set_optimizer_state_dict."""
    kind = StateDictOptions(
        full_state_dict=options.get("full_state_dict", False),
        flatten_optimizer_state_dict=options.get("flat", False),
    )

    def made(make: Callable[..., Any], lr: float) -> tuple[nn.Module, Any]:
        model = nn.Linear(5, 3)
        optimizer = make(model.parameters(), lr=lr)
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(source, 0.25)
    saved = get_optimizer_state_dict(model, optimizer, options=kind)
    other, loaded = made(target, 0.5)
    if options:
        set_optimizer_state_dict(other, loaded, saved, options=kind)
    else:
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
        found = {"optimizer": get_optimizer_state_dict(other, loaded, options=kind)}
        dcp.load(found, checkpoint_id=tmp_path)
        set_optimizer_state_dict(other, loaded, found["optimizer"], options=kind)
    assert loaded.param_groups[0]["lr"] == 0.25
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert_bitwise(key, loaded.state[twin][key], optimizer.state[param][key])


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
    with pytest.raises(ValueError, match=f"the loaded {key} of parameter 0 is missing"):
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
@pytest.mark.parametrize(
    "key, value, message",
    [
        ("lr", torch.tensor([0.1, 0.2]), "lr{} is .*; it must be one number"),
        ("lr", "fast", "lr{} is fast; it must be one number"),
        ("eps", None, "eps{} is None; it must be one number"),
        ("weight_decay", -1.0, "weight_decay{} is -1.0; it must be at least 0"),
        ("betas", (0.9, 1.0), r"betas\[1\]{} is 1.0; it must be in"),
        ("betas", 0.9, "betas{} is 0.9; it must be two numbers"),
    ],
)
def test_settings_that_no_adam_can_use(
    make: Callable[..., Any], key: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message.format("")):
        make([weight()], **{key: value})
    optimizer = make([weight()])
    of_group = message.format(" of parameter group 1")
    with pytest.raises(ValueError, match=of_group):
        optimizer.add_param_group({"params": [weight()], key: value})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [weight()]})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1][key] = value
    with pytest.raises(
        ValueError, match=message.format(" of parameter group 1 of the loaded state")
    ):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[1][key] = value
    with pytest.raises(ValueError, match=of_group):
        optimizer.step()


@BOTH
def test_a_rate_that_is_a_tensor(make: Callable[..., Any]) -> None:
    """Schedulers fill it in place."""
    results = []
    for lr in (0.1, torch.tensor(0.1)):
        torch.manual_seed(7)
        param = weight()
        optimizer = make([param], lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)  # 0.1 rounded to float32


@BOTH
def test_a_parameter_that_is_there_twice(make: Callable[..., Any]) -> None:
    param = weight()
    with pytest.raises(ValueError, match="parameter group 0 has a parameter twice"):
        make([param, param])


@BOTH
@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
def test_a_setting_that_is_missing(make: Callable[..., Any], key: str) -> None:
    optimizer = make([weight()])
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0][key]
    message = f"parameter group 0 of the loaded state has no '{key}'"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    del optimizer.param_groups[0][key]
    with pytest.raises(ValueError, match=f"parameter group 0 has no '{key}'"):
        optimizer.step()


@BOTH
def test_what_is_no_state_of_adam(make: Callable[..., Any]) -> None:
    optimizer = make([weight()])
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.SGD([weight()], lr=0.1, momentum=0.9)
    other.step()
    bad: dict[str, tuple[Any, str]] = {
        "SGD's": (other.state_dict(), "has no 'betas'"),
        "no groups": ({"state": {}}, "the loaded state has no 'param_groups'"),
        "no states": ({"param_groups": []}, "the loaded state has no 'state'"),
        "two groups": (
            {"state": {}, "param_groups": before["param_groups"] * 2},
            r"has parameter groups of \[1, 1\] parameters; this optimizer's are of \[1\]",
        ),
        "a list": (
            {**before, "state": {0: {**before["state"][0], "exp_avg": [1.0]}}},
            "the loaded exp_avg of parameter 0 is a list",
        ),
        "no dict": ({**before, "state": {0: [1.0]}}, "the loaded state of parameter 0 is a list"),
        "negative squares": (
            {**before, "state": {0: {**before["state"][0], "exp_avg_sq": -torch.ones(300)}}},
            "the loaded exp_avg_sq of parameter 0 has negative elements",
        ),
        "steps": ({**before, "state": {0: {**before["state"][0], "step": "ten"}}}, "step is ten"),
    }
    moment = before["state"][0]["exp_avg"]
    for kind, x in (
        ("on meta", moment.to("meta")),
        ("sparse", moment.to_sparse()),
        ("complex", moment.to(torch.complex64)),
    ):
        values = {**before["state"][0], "exp_avg_sq": moment.abs() + 1, "exp_avg": x}
        groups = [{**before["param_groups"][0], "lr": 9.0}]
        bad[kind] = ({"state": {0: values}, "param_groups": groups}, "must be dense real numbers")
    for name, (state, message) in bad.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"], name
        for key, value in before["state"][0].items():
            assert_bitwise(key, after["state"][0][key], value)


@BOTH
def test_a_state_that_was_put_there_is_taken(make: Callable[..., Any]) -> None:
    """Instead of load_state_dict, as some trainers do; also in the place of another."""
    param = weight()
    theirs = torch.optim.AdamW([nn.Parameter(param.detach().clone())], lr=0.1, fused=True)
    optimizer = make([param], lr=0.1)
    (twin,) = theirs.param_groups[0]["params"]
    for steps in (10.0, 20.0):
        moments = torch.randn(300), torch.rand(300)
        for o, p in ((optimizer, param), (theirs, twin)):
            o.state[p] = {
                "step": torch.tensor(steps),
                "exp_avg": moments[0].clone(),
                "exp_avg_sq": moments[1].clone(),
            }
        for _ in range(2):
            twin.grad = param.grad.clone()
            optimizer.step()
            theirs.step()
        torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-6, atol=1e-6)
        assert float(optimizer.state[param]["step"]) == steps + 2
    optimizer = make([param])
    optimizer.state[param] = {"step": 1.0, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    with pytest.raises(ValueError, match="exp_avg of parameter 0 is"):
        optimizer.step()


@BOTH
def test_hooks_run_as_those_of_torch(make: Callable[..., Any]) -> None:
    """Each sees what torch's sees, and what it returns counts."""
    seen: list[list[Any]] = []
    for kind in (torch.optim.AdamW, make):
        events: list[Any] = []
        optimizer = kind([weight()])

        def renamed(o: Any, state: dict[str, Any], events: Any = events) -> dict[str, Any]:
            events.append(("saved", sorted(state), sorted(state["state"][0])))
            return {"theirs": state}

        def back(o: Any, state: dict[str, Any], events: Any = events) -> dict[str, Any]:
            events.append(("loading", sorted(state), float(o.state_dict_count)))
            return state["theirs"]

        def loaded(o: Any, events: Any = events) -> None:
            (state,) = o.state.values()
            group = o.param_groups[0]
            events.append(("loaded", float(state["step"]), group["decoupled_weight_decay"]))

        def saving(o: Any, events: Any = events) -> None:
            events.append("saving")
            o.state_dict_count = getattr(o, "state_dict_count", 0) + 1

        optimizer.register_state_dict_pre_hook(saving)
        optimizer.register_state_dict_post_hook(renamed)
        optimizer.register_load_state_dict_pre_hook(back)
        optimizer.register_load_state_dict_post_hook(loaded)
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.step()
        optimizer.load_state_dict(state)
        seen.append(events)
    assert seen[1] == seen[0]


@BOTH
def test_8_bit_moments_are_refused_by_torch_in_a_sentence(make: Callable[..., Any]) -> None:
    param = weight()
    optimizer = make([param], moments=torch.uint8)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = make([weight()], moments=torch.uint8)
    twin.load_state_dict(saved)
    for key, value in optimizer.state[param].items():
        (state,) = twin.state.values()
        assert_bitwise(key, state[key], value)
    for other in (torch.optim.AdamW, torch.optim.Adam):
        with pytest.raises(ValueError, match="8-bit moments; load them into a CPUAdam"):
            other([weight()]).load_state_dict(saved)
    wide = CPUAdam([weight()], moments=torch.float32)
    wide.load_state_dict(saved)
    theirs = torch.optim.AdamW([weight()])
    theirs.load_state_dict(wide.state_dict())
    (state,) = theirs.state.values()
    assert float(state["step"]) == 1
    codes, scales = (optimizer.state[param][f"exp_avg_sq_{x}"] for x in ("codes", "scales"))
    expected = blockwise.dequantize(codes, scales, signed=False)
    assert_bitwise("exp_avg_sq", state["exp_avg_sq"], expected)


@BOTH
def test_compiled_programs_call_a_step_and_do_not_trace_it(make: Callable[..., Any]) -> None:
    params = [weight(), weight()]
    params[1].data, params[1].grad = params[0].detach().clone(), params[0].grad.clone()
    ours, compiled = (make([param]) for param in params)

    def program() -> None:
        compiled.step()

    for _ in range(3):
        ours.step()
        torch.compile(program, backend="eager")()
    assert_bitwise("weights", params[1].detach(), params[0].detach())
    assert float(compiled.state[params[1]]["step"]) == 3
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(program, backend="eager", fullgraph=True)()
    torch._dynamo.reset()


@BOTH
@pytest.mark.parametrize("older", [False, True], ids=["native", "an older torch"])
def test_thousands_of_parameters_are_checked_in_c(
    make: Callable[..., Any], older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without changes runs no Python function for each parameter."""
    if older:
        monkeypatch.setattr(multi_tensor, "_EXCHANGE", None)
    params = [nn.Parameter(torch.ones(2)) for _ in range(2000)]
    for param in params:
        param.grad = torch.ones(2)
    optimizer = make(params, offload_fraction=0.0) if make is not CPUAdam else make(params)
    optimizer.step()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and "_hash_" not in frame.f_code.co_name

    sys.setprofile(count)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert calls < len(params) / 2, calls


@pytest.mark.parametrize(("processes", "warns"), [("1", True), ("", True), ("100000", False)])
def test_one_thread_of_several_cores_is_warned_of(
    processes: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: torchrun and accelerate leave each of several processes one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        host_step._warn_of_one_thread.__wrapped__()
    assert [("OMP_NUM_THREADS=8" in str(one.message)) for one in caught] == [True] * warns


@pytest.mark.skipif(not FMA, reason="torch's bits need FMA instructions")
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_grad_scale_is_torchs_step_with_scaled_gradients(fraction: float) -> None:
    params = [nn.Parameter(torch.randn(n)) for n in (300, 40, 7)]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    ours = HybridDeviceOptimizer(params, lr=0.1, weight_decay=0.1, offload_fraction=fraction)
    theirs = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(3):
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad * 0.25
        ours.step(grad_scale=0.25)
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        assert_bitwise("weights", param.detach(), twin.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            assert_bitwise(key, ours.state[param][key], theirs.state[twin][key])


@pytest.mark.parametrize("scale", [0.01, 0.1])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_norm_is_of_scaled_gradients(fraction: float, scale: float) -> None:
    """About 0.17, which is not clipped, and 1.7."""
    param = weight()
    optimizer = HybridDeviceOptimizer([param], max_norm=0.3, offload_fraction=fraction)
    grad = param.grad.double()
    optimizer.step(grad_scale=scale)
    norm = scale * float(grad.norm())
    assert optimizer.last_grad_norm == pytest.approx(norm, rel=1e-5)
    expected = (1 - 0.9) * grad * scale * min(0.3 / norm, 1.0)
    first = optimizer.state[param]["exp_avg"].double()
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-12)
