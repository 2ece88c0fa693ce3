"""torch's own table of optimizers (torch.testing._internal.common_optimizers): with its inputs,
errors and schedulers, and in the situations that torch's tests put an optimizer into, ours do what
torch.optim.Adam and AdamW do, to the same bits."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.kernels.numeric import assert_bitwise
from vlmkernels import CPUAdam, HybridDeviceOptimizer, _native

table = pytest.importorskip(
    "torch.testing._internal.common_optimizers",
    reason="torch's table of optimizers needs the package expecttest",
    exc_type=ImportError,
)
if _native._C.isa() == "generic":
    pytest.skip("torch's bits need FMA instructions", allow_module_level=True)

OURS: dict[str, Callable[..., Any]] = {
    "CPUAdam": CPUAdam,
    "hybrid": HybridDeviceOptimizer,
    "hybrid on the device": partial(HybridDeviceOptimizer, offload_fraction=0.0),
}
INFOS = {info.name: info for info in table.optim_db if info.name in ("Adam", "AdamW")}
Make = Callable[..., Any]  # of parameters and settings, an optimizer


def makers(ours: str, name: str) -> tuple[Make, Make]:
    """torch's class and ours, with torch's defaults."""
    info = INFOS[name]
    decay = 0.01 if name == "AdamW" else 0

    def theirs(params: Any, **settings: Any) -> Any:
        return info.optim_cls(params, **{"fused": True, **settings})

    def our_class(params: Any, **settings: Any) -> Any:
        settings = {"weight_decay": decay, **settings}
        return OURS[ours](params, decoupled=name == "AdamW", **settings)

    return theirs, our_class


every = pytest.mark.parametrize("name", list(INFOS))
each = pytest.mark.parametrize("ours", list(OURS))


def same(ours: Any, theirs: Any, name: str = "result") -> None:
    if isinstance(theirs, Tensor):
        assert_bitwise(name, ours, theirs)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), name
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{name}[{i}]")
    else:
        assert ours == theirs, name


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))


def train(model: nn.Module, optimizer: Any, steps: int = 4, scheduler: Any = None) -> list[Tensor]:
    x = torch.linspace(-1, 1, 35).view(5, 7)
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x * (step + 1)) - 1).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        elif scheduler is not None:
            scheduler.step()
    return [p.detach() for p in model.parameters()]


# ---- the table -----------------------------------------------------------------------------------

INPUTS = {info: info.optim_inputs_func("cpu", torch.float32) for info in INFOS.values()}
DESCRIPTIONS = [x.desc for x in INPUTS[INFOS["AdamW"]]]
ERRORS = {info: info.optim_error_inputs_func("cpu", torch.float32) for info in INFOS.values()}


@each
@every
@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_inputs(ours: str, name: str, description: str) -> None:
    (settings,) = (x.kwargs for x in INPUTS[INFOS[name]] if x.desc == description)
    results = []
    for make in makers(ours, name):
        model = network()
        optimizer = make(model.parameters(), **copy.deepcopy(settings))
        results.append(train(model, optimizer, 10))
    same(*results[::-1])


@each
@every
@pytest.mark.parametrize("flag", INFOS["AdamW"].supported_impls)
def test_flags(ours: str, name: str, flag: str) -> None:
    for make in makers(ours, name):
        make(network().parameters(), **{"fused": False, flag: True})


@each
@every
@pytest.mark.parametrize(
    "description", [x.optimizer_error_input.desc for x in ERRORS[INFOS["Adam"]]]
)
def test_errors(ours: str, name: str, description: str) -> None:
    """Of the same kind; what they say is ours."""
    entry = next(x for x in ERRORS[INFOS[name]] if x.optimizer_error_input.desc == description)
    given = entry.optimizer_error_input
    params = [nn.Parameter(torch.ones(1))] if given.params is None else given.params
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(entry.error_type):
            makers(ours, name)[1](params, **given.kwargs)


@each
@every
@pytest.mark.parametrize("number", range(len(INFOS["Adam"].scheduler_inputs)))
def test_schedulers(ours: str, name: str, number: int) -> None:
    results = []
    for make in makers(ours, name):
        model = network()
        optimizer = make(model.parameters(), lr=0.1)
        inputs = INFOS["Adam"].scheduler_inputs[number]
        schedulers = [scheduler(optimizer) for scheduler in inputs]
        rates = []
        for _ in range(12):
            train(model, optimizer, 1)
            for scheduler in schedulers:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(1.0) if plateau else scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        results.append((rates, [p.detach() for p in model.parameters()]))
    same(*results[::-1])


# ---- situations ----------------------------------------------------------------------------------


def groups(make: Make) -> Any:
    model = network()
    some = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "weight_decay": 0.3, "betas": (0.5, 0.9)},
    ]
    optimizer = make(some, lr=0.01)
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": model[3].parameters(), "eps": 1e-3})
    return train(model, optimizer)


def names(make: Make) -> Any:
    model = network()
    optimizer = make(model.named_parameters())
    values = train(model, optimizer)
    saved = optimizer.state_dict()
    fresh = make(network().named_parameters())
    fresh.load_state_dict(saved)
    return values, [o.param_groups[0]["param_names"] for o in (optimizer, fresh)]


def resumed(make: Make, through: Callable[[Any], Any] = copy.deepcopy) -> Any:
    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    train(model, optimizer)
    other = copy.deepcopy(model)
    fresh = make(other.parameters())
    fresh.load_state_dict(through(optimizer.state_dict()))
    return train(model, optimizer), train(other, fresh)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def with_plain_steps(state: Any) -> Any:
    state = copy.deepcopy(state)
    for values in state["state"].values():
        values["step"] = float(values["step"])
    return state


def copied(make: Make, through: Callable[[Any], Any]) -> Any:
    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    train(model, optimizer)
    model, optimizer = through((model, optimizer))
    return train(model, optimizer)


def no_gradients(make: Make) -> Any:
    model = network()
    optimizer = make(model.parameters())
    optimizer.step()
    return [p.detach() for p in model.parameters()], len(optimizer.state)


def zero_gradients(make: Make) -> Any:
    model = network()
    optimizer = make(model.parameters(), weight_decay=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    for _ in range(3):
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def printed(make: Make) -> Any:
    lines = repr(make(network().parameters(), lr=0.5)).splitlines()
    shown = ("lr", "eps", "betas", "weight_decay", "decoupled_weight_decay", "Parameter")
    return sorted(line for line in lines if line.split()[0].rstrip(":") in shown)


def step_hooks(make: Make) -> Any:
    model, events = network(), []
    optimizer = make(model.parameters())
    optimizer.register_step_pre_hook(lambda o, args, kwargs: events.append(("pre", len(args))))
    optimizer.register_step_post_hook(lambda o, args, kwargs: events.append("post"))
    general = register_optimizer_step_pre_hook(lambda o, args, kwargs: events.append("every"))
    try:
        return train(model, optimizer), events
    finally:
        general.remove()


def scaled(make: Make) -> Any:
    model = network()
    optimizer, scaler = make(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 256.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(
            model(torch.ones(2, 7)).square().mean() * (1e39 if step == 2 else 1)
        ).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach() for p in model.parameters()], scaler.get_scale()


def averaged(make: Make) -> Any:
    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    mean = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for _ in range(3):
        train(model, optimizer, 1, scheduler)
        mean.update_parameters(model)
    return [p.detach() for p in mean.module.parameters()]


def sharded_states(make: Make) -> Any:
    """ZeroRedundancyOptimizer, of one rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = network()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), make, lr=0.1)
        values = train(model, optimizer)
        optimizer.consolidate_state_dict()
        return values, sorted(optimizer.state_dict()["state"])
    finally:
        dist.destroy_process_group()


def distributed_checkpoint(make: Make) -> Any:
    """torch.distributed.checkpoint's way to a state by names, and back."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    train(model, optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    other = network()
    fresh = make(other.parameters(), lr=0.1)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    return sorted(state["state"]), train(model, optimizer), train(other, fresh)


def of_type(make: Make, dtype: torch.dtype) -> Any:
    param = nn.Parameter(torch.linspace(-1, 1, 9).to(dtype))
    optimizer = make([param], lr=0.1)
    for step in range(3):
        param.grad = torch.full_like(param, 0.1 + step)
        optimizer.step()
    return [param.detach()]


def odd_shapes(make: Make) -> Any:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((), (0, 3), (1, 1, 1), (2, 0), (5, 3))]
    params.append(nn.Parameter(torch.arange(6.0).view(2, 3).t()))
    optimizer = make(params)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    return [p.detach() for p in params], [float(s["step"]) for s in optimizer.state.values()]


SCENARIOS: dict[str, Callable[[Make], Any]] = {
    "groups": groups,
    "names": names,
    "state_dict": resumed,
    "weights_only": partial(resumed, through=through_a_file),
    "plain steps": partial(resumed, through=with_plain_steps),
    "deepcopy": partial(copied, through=copy.deepcopy),
    "pickle": partial(copied, through=lambda x: pickle.loads(pickle.dumps(x))),
    "no gradients": no_gradients,
    "zero gradients": zero_gradients,
    "printed": printed,
    "step hooks": step_hooks,
    "GradScaler": scaled,
    "averaged weights": averaged,
    "ZeroRedundancyOptimizer": sharded_states,
    "distributed checkpoint": distributed_checkpoint,
    "float64": partial(of_type, dtype=torch.float64),
    "bfloat16": partial(of_type, dtype=torch.bfloat16),
    "odd shapes": odd_shapes,
}


@each
@every
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_scenarios(ours: str, name: str, scenario: str) -> None:
    theirs, our_class = makers(ours, name)
    expected = SCENARIOS[scenario](theirs)
    same(SCENARIOS[scenario](our_class), expected)
