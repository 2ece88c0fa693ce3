"""HybridDeviceOptimizer: every fraction, every order of copies gives the bits of plain AdamW."""

from __future__ import annotations

import copy
import gc
import random
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numeric import assert_bitwise
from tests.optim.delayed import DelayedTransfers
from tests.ranks import run_ranks
from vlmkernels import _native
from vlmkernels.optim import CPUAdam, HybridDeviceOptimizer
from vlmkernels.optim.placement import choose

FMA = _native._C.isa() != "generic"  # torch's bits need FMA instructions


class Model(nn.Module):
    """What a trainer may have: two types, tied and frozen parameters, one without elements, one
    that is transposed in memory, one that gets a gradient only in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(50, 16).bfloat16())
        self.first = nn.Linear(16, 33, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(33)
        self.second = nn.Parameter(torch.randn(16, 33).t() * 0.2)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.sometimes = nn.Parameter(torch.randn(16).bfloat16())
        self.head = self.embedding

    def forward(self, ids: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.first(self.embedding[ids]).float())
        x = self.frozen(self.norm(x) @ self.second) + self.empty.sum()
        if step % 2:
            x = x + self.sometimes
        logits = x.bfloat16() @ self.head.t()
        return nn.functional.cross_entropy(logits.float(), ids.roll(1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    vectors = [p for p in named.values() if p.dim() < 2]
    matrices = [p for p in named.values() if p.dim() >= 2]
    return [
        {"params": matrices, "lr": 3e-2, "weight_decay": 0.1},
        {"params": vectors, "betas": (0.8, 0.95), "weight_decay": 0.0},
    ]


class Reference:
    """Plain torch: float32 copies, AdamW(fused=True) on widened gradients, rounded afterwards."""

    def __init__(self, model: nn.Module, moments: torch.dtype = torch.float32) -> None:
        self.params = [p for g in groups(model) for p in g["params"]]
        self.masters = [nn.Parameter(p.detach().float().contiguous()) for p in self.params]
        fresh, at = groups(model), 0
        for group in fresh:
            number = len(group["params"])
            group["params"] = self.masters[at : at + number]
            at += number
        if moments == torch.float32:
            self.adam: Any = torch.optim.AdamW(fresh, lr=1e-2, fused=True)
        else:  # torch has no others
            self.adam = CPUAdam(fresh, lr=1e-2, moments=moments)
        self.param_groups = self.adam.param_groups

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float().contiguous()
        self.adam.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def read_model(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.copy_(param)


def batches(number: int) -> list[Tensor]:
    return [torch.randint(50, (24,)) for _ in range(number)]


def train(model: nn.Module, optimizer: Any, data: list[Tensor], first: int = 0) -> None:
    for step, ids in enumerate(data, start=first):
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 * 0.9**step
        optimizer.zero_grad()
        model(ids, step).backward()
        optimizer.step()


def hybrid(model: nn.Module, **keywords: Any) -> HybridDeviceOptimizer:
    keywords = {"lr": 1e-2, "bucket_bytes": 4096, "overlap": True, **keywords}
    return HybridDeviceOptimizer(groups(model), **keywords)


def assert_same_model(ours: nn.Module, expected: nn.Module) -> None:
    others = dict(expected.named_parameters())
    for name, param in ours.named_parameters():
        assert_bitwise(name, param.detach(), others[name].detach())


@pytest.mark.skipif(not FMA, reason="torch's bits need FMA instructions")
@pytest.mark.parametrize("delayed", [False, True], ids=["host", "delayed"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_bits_of_plain_adamw(fraction: float, delayed: bool):
    model, data = Model(), batches(8)
    plain = copy.deepcopy(model)
    optimizer = hybrid(
        model,
        offload_fraction=fraction,
        transfers=DelayedTransfers() if delayed else None,
        policy=random.choice(["largest", "last_used"]),
        overlap=random.choice([True, False]),
    )
    reference = Reference(plain)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_model(model, plain)
    optimizer.check_masters()
    for param, master in zip(optimizer._params(), reference.masters, strict=True):
        if master in reference.adam.state and param.numel():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                ours, theirs = optimizer.state[param][key], reference.adam.state[master][key]
                assert_bitwise(key, ours, theirs)


@pytest.mark.parametrize("delayed", [False, True], ids=["host", "delayed"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
def test_fraction_changes_while_training(moments: torch.dtype, delayed: bool):
    model, data = Model(), batches(10)
    other = copy.deepcopy(model)
    optimizer = hybrid(model, moments=moments, transfers=DelayedTransfers() if delayed else None)
    for step, ids in enumerate(data):
        optimizer.set_offload_fraction(random.choice([0.0, 0.2, 0.5, 0.9, 1.0]))
        train(model, optimizer, [ids], step)
        optimizer.check_masters()
    train(other, hybrid(other, moments=moments, offload_fraction=0.0), data)
    assert_same_model(model, other)


def test_small_tensors_go_by_the_bucket():
    params = [nn.Parameter(torch.randn(8).bfloat16()) for _ in range(300)]
    for param in params:
        param.grad = torch.randn(8).bfloat16()
    transfers = DelayedTransfers()
    optimizer = HybridDeviceOptimizer(params, bucket_bytes=1024, transfers=transfers)
    optimizer.step()
    assert (transfers.d2h_copies, transfers.h2d_copies) == (300, 300)
    assert transfers.calls == 2 * 5  # 64 of 16 bytes a bucket
    optimizer.check_masters()


def test_gradients_are_copied_during_backward():
    model = Model()
    transfers = DelayedTransfers()
    optimizer = hybrid(model, transfers=transfers)
    model(batches(1)[0], 1).backward()
    began = transfers.d2h_copies
    assert began == sum(p.grad is not None and p.numel() > 0 for p in optimizer._params())
    optimizer.step()
    assert transfers.d2h_copies == began


@pytest.mark.parametrize("wrapped", [False, True])
def test_gradient_accumulation(wrapped: bool):
    model, data = Model(), batches(3)
    other = copy.deepcopy(model)
    transfers = DelayedTransfers()
    optimizer = hybrid(model, transfers=transfers)
    for ids in data[:-1]:
        if wrapped:
            with optimizer.accumulating():
                model(ids, 1).backward()
        else:
            model(ids, 1).backward()
    model(data[-1], 1).backward()
    optimizer.step()
    params = sum(p.requires_grad and p.numel() > 0 for p in optimizer._params())
    assert transfers.d2h_copies == params * (1 if wrapped else 3)
    plain = hybrid(other, offload_fraction=0.0)
    for ids in data:
        other(ids, 1).backward()
    plain.step()
    assert_same_model(model, other)


@pytest.mark.parametrize("change", ["clip", "replace", "zero", "drop"])
def test_gradients_changed_after_backward(change: str):
    """In place by clipping, replaced, zeroed and computed again, or dropped: what counts is what
    the parameter holds at the step."""
    ids = batches(1)[0]
    model = Model()
    other = copy.deepcopy(model)
    for m, optimizer in (
        (model, hybrid(model, transfers=DelayedTransfers())),
        (other, hybrid(other, offload_fraction=0.0)),
    ):
        m(ids, 1).backward()
        if change == "clip":
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        elif change == "replace":
            m.norm.weight.grad = m.norm.weight.grad * 3
        elif change == "zero":
            m.zero_grad(set_to_none=False)
            m(ids, 1).backward()
        else:
            m.first.weight.grad = None
        optimizer.step()
        m(ids, 0).backward()
        optimizer.step()
    assert_same_model(model, other)


@pytest.mark.parametrize("change", ["scaler", "data", "numpy", "transposed"])
def test_changes_of_gradients_that_autograd_does_not_see(change: str):
    """GradScaler divides without a new version of the gradient, `.data` and numpy write as well."""
    results = []
    for make in (HybridDeviceOptimizer, CPUAdam):
        param = nn.Parameter(torch.ones(2, 2))
        optimizer = make([param])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=change == "scaler")
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale((param * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum()).backward()
            assert param.grad is not None
            if change == "data":
                param.grad.data.mul_(3.0)
            elif change == "numpy":
                param.grad.numpy()[:] *= 3.0
            elif change == "transposed":
                param.grad = param.grad.t()
            scaler.step(optimizer)
            scaler.update()
        results.append((param.detach(), optimizer.state[param]["exp_avg"]))
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise(change, ours, theirs)


def test_gradients_reduced_over_ranks_without_a_new_version_and_dtensors():
    ranks = run_ranks(["-m", "tests.optim.distributed_worker"], 2)
    assert all(r.code == 0 for r in ranks), "\n\n".join(r.output[-3000:] for r in ranks)


def test_clipping():
    model, data = Model(), batches(4)
    copies = [copy.deepcopy(model) for _ in range(2)]
    optimizers = [
        hybrid(model, max_norm=0.3, transfers=DelayedTransfers()),
        hybrid(copies[0], max_norm=0.3, offload_fraction=0.0),
    ]
    for m, optimizer in zip((model, copies[0]), optimizers, strict=True):
        train(m, optimizer, data)
    assert_same_model(model, copies[0])
    # One step against the plain formula in float64.
    plain = copies[1]
    ours = copy.deepcopy(plain)
    optimizer = hybrid(ours, max_norm=0.3, transfers=DelayedTransfers())
    train(ours, optimizer, data[:1])
    plain(data[0], 0).backward()
    grads = [p.grad.double().flatten() for p in plain.parameters() if p.grad is not None]
    norm = float(torch.cat(grads).norm())
    assert norm > 0.3 and optimizer.last_grad_norm == pytest.approx(norm, rel=1e-5)
    first = optimizer.state[ours.norm.weight]["exp_avg"].double()
    expected = plain.norm.weight.grad.double() * (0.3 / norm) * (1 - 0.8)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-12)


def test_a_norm_that_is_nan_clips_as_torchs_does():
    """Gradients of 100 beside a NaN do not go through unclipped."""
    results = []
    for kind in (HybridDeviceOptimizer, torch.optim.AdamW):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        params[0].grad, params[1].grad = torch.full((4,), 100.0), torch.tensor([float("nan")] * 4)
        clips = kind is HybridDeviceOptimizer
        optimizer = kind(params, lr=0.1, **({"max_norm": 1.0} if clips else {}))
        if not clips:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        results.append([optimizer.state[p]["exp_avg"] for p in params])
    torch.testing.assert_close(*results, equal_nan=True)


def test_small_gradients_are_not_made_larger():
    model, data = Model(), batches(2)
    other = copy.deepcopy(model)
    train(model, hybrid(model, max_norm=1e6), data)
    train(other, hybrid(other), data)
    assert_same_model(model, other)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_gradients_are_let_go(fraction: float):
    """By zero_grad, also before they were stepped, and by the step itself."""
    model = Model()
    optimizer = hybrid(model, offload_fraction=fraction, transfers=DelayedTransfers())
    for stepped in (False, True):
        model(batches(1)[0], 1).backward()
        grads = [weakref.ref(p.grad) for p in optimizer._params() if p.grad is not None]
        if stepped:
            optimizer.step()
            model.zero_grad()
        else:
            optimizer.zero_grad()
        gc.collect()
        assert [x for x in grads if x() is not None] == []


@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_nonfinite_gradients(policy: Any):
    model = Model()
    before = copy.deepcopy(model)
    optimizer = hybrid(model, nonfinite=policy, transfers=DelayedTransfers())
    model(batches(1)[0], 0).backward()
    model.norm.weight.grad[3] = float("nan")
    optimizer.step()
    if policy == "skip":
        assert_same_model(model, before)
        assert optimizer.skipped_steps == 1
        optimizer.zero_grad()
        train(model, optimizer, batches(1))
        train(before, hybrid(before), [])
        assert float(optimizer.state[model.norm.weight]["step"]) == 1
        assert all(p.isfinite().all() for p in model.parameters())
    else:
        assert model.norm.weight[3].isnan() and not model.norm.weight[4].isnan()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("fractions", [(0.0, 1.0), (1.0, 0.0), (0.4, 0.8)])
def test_resume_with_another_fraction_is_bitwise(
    fractions: tuple[float, float], moments: torch.dtype
):
    model, data = Model(), batches(8)
    kind = dict(moments=moments, transfers=DelayedTransfers())
    first = hybrid(model, offload_fraction=fractions[0], **kind)
    train(model, first, data[:4])
    saved_model = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(first.state_dict())
    train(model, first, data[4:], 4)
    resumed = Model()
    second = hybrid(resumed, offload_fraction=fractions[1], **kind)
    train(resumed, second, batches(1))  # state to be replaced
    order = [lambda: second.load_state_dict(saved), lambda: resumed.load_state_dict(saved_model)]
    for load in random.sample(order, 2):
        load()
    second.check_masters()
    train(resumed, second, data[4:], 4)
    assert_same_model(resumed, model)


@pytest.mark.skipif(not FMA, reason="torch's bits need FMA instructions")
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("other", [torch.optim.AdamW, CPUAdam])
def test_state_to_and_from_plain_adamw(other: type, fraction: float):
    ours = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    theirs = copy.deepcopy(ours)
    keywords = {"fused": True} if other is torch.optim.AdamW else {}
    a = HybridDeviceOptimizer(ours.parameters(), lr=0.1, offload_fraction=fraction)
    b = other(theirs.parameters(), lr=0.1, weight_decay=0.01, **keywords)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    data = [torch.randn(5, 7) for _ in range(4)]
    step(ours, a, data[0])
    theirs.load_state_dict(ours.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for group in b.param_groups:
        group.update(keywords)
    step(theirs, b, data[1])
    ours.load_state_dict(theirs.state_dict())
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    for x in data[2:]:
        step(ours, a, x)
        step(theirs, b, x)
    assert_same_model(ours, theirs)
    assert a.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("how", ["in place", "state dict", "data"])
def test_weights_loaded_after_construction_are_not_reverted(how: str):
    """Also between two steps, where the change can be seen; `.data` hides it, hence sync."""
    model, source, data = Model(), Model(), batches(3)
    optimizer = hybrid(model)
    for step in range(2):
        if how == "state dict":
            model.load_state_dict(source.state_dict())
        else:
            for p, q in zip(model.parameters(), source.parameters(), strict=True):
                (p.data if how == "data" else p.detach()).copy_(q.detach())
        if how == "data" and step:
            with pytest.raises(RuntimeError, match="differ from the optimizer's master copies"):
                optimizer.check_masters()
            optimizer.sync_from_model()
        before = copy.deepcopy(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.zero_grad()
        model(data[step], 1).backward()
        optimizer.step()
        optimizer.check_masters()
        assert_same_model(model, before)
        source = Model()


def test_state_of_another_model_is_refused():
    model, data = Model(), batches(2)
    optimizer = hybrid(model)
    train(model, optimizer, data)
    saved = copy.deepcopy(optimizer.state_dict())
    other = Model()
    fresh = hybrid(other)
    fresh.load_state_dict(saved)
    other(data[0], 0).backward()
    with pytest.raises(RuntimeError, match="load the weights that were saved with this optimizer"):
        fresh.step()
    before = copy.deepcopy(other)
    fresh.sync_from_model()
    for group in fresh.param_groups:
        group["lr"] = 0.0
    fresh.step()
    assert_same_model(other, before)


def test_a_failed_move_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    model, data = Model(), batches(6)
    other = copy.deepcopy(model)
    optimizer = hybrid(model, offload_fraction=0.0)
    train(model, optimizer, data[:3])
    arena = optimizer._host.arena
    real, calls = arena.empty, 0

    def short(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no memory")
        return real(*arguments)

    monkeypatch.setattr(arena, "empty", short)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.set_offload_fraction(1.0)
    monkeypatch.undo()
    assert 0 < len(optimizer._offloaded) < len(optimizer._params())
    optimizer.check_masters()
    train(model, optimizer, data[3:], 3)
    train(other, hybrid(other, offload_fraction=0.0), data)
    assert_same_model(model, other)


def test_scheduler_closure_hooks_and_new_groups():
    weights = [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([3.0]))]
    optimizer = HybridDeviceOptimizer(weights[:1], lr=0.1, weight_decay=0.0)
    optimizer.add_param_group({"params": weights[1:], "lr": 0.2})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    seen = []
    optimizer.register_step_pre_hook(lambda *a: seen.append("before"))
    optimizer.register_step_post_hook(lambda *a: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((w**2).sum() for w in weights)
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 14.0
    # Adam's first step is lr * sign(gradient), up to eps.
    torch.testing.assert_close(weights[0].detach(), torch.tensor([0.9, -1.9]))
    torch.testing.assert_close(weights[1].detach(), torch.tensor([2.8]))
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.1])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "saved", "loading", "loaded"]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.1])


def test_memory_is_what_theory_says():
    n = 1 << 16
    params = [nn.Parameter(torch.randn(n).bfloat16()) for _ in range(8)]
    optimizer = HybridDeviceOptimizer(params, offload_fraction=0.5)
    sum(p.float().square().sum() for p in params).backward()
    optimizer.step()
    memory = optimizer.memory()
    assert memory["host_state"] == memory["device_state"] == 4 * 12 * n
    assert memory["pinned"] == 4 * 2 * n  # the slots
    optimizer.set_offload_fraction(0.0)
    memory = optimizer.memory()
    assert (memory["host_state"], memory["device_state"], memory["pinned"]) == (0, 8 * 12 * n, 0)


def test_which_parameters_are_offloaded():
    params = [torch.empty(n) for n in (10, 40, 30, 20)]
    assert choose(params, 0.0, range(4)) == set()
    assert choose(params, 1.0, range(4)) == {0, 1, 2, 3}
    assert choose(params, 0.5, [1, 2, 3, 0]) == {1, 0}  # 40, then what still fits
    assert choose(params, 0.3, [3, 2, 1, 0]) == {3, 0}
    weights = [nn.Parameter(torch.ones(n)) for n in (4, 3, 2)]
    optimizer = HybridDeviceOptimizer(weights, offload_fraction=0.7, policy="last_used")
    assert optimizer._offloaded == set(weights[1:])  # the reverse of registration
    ((weights[2].sum() * weights[1].sum()) * weights[0].sum()).backward()
    optimizer = HybridDeviceOptimizer(weights, offload_fraction=0.5, policy=lambda p: [2, 0])
    assert optimizer._offloaded == {weights[2]}


def test_observed_order_of_gradients():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    weights = [model[1].weight, model[0].weight]  # registered in the other order
    optimizer = HybridDeviceOptimizer(weights, offload_fraction=1.0, policy="last_used")
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.set_offload_fraction(0.5)
    assert optimizer._offloaded == {model[1].weight}


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ({"betas": (0.9,)}, "betas is (0.9,); it must be two numbers"),
        ({"offload_fraction": 1.5}, "offload_fraction is 1.5; it must be from 0 to 1"),
        ({"offload_fraction": float("nan")}, "offload_fraction is nan; it must be from 0 to 1"),
        ({"policy": "smallest"}, "policy is 'smallest'; it must be"),
        ({"max_norm": 0.0}, "max_norm is 0.0; it must be above 0"),
        ({"in_backward": True, "max_norm": 1.0}, "in_backward is True with max_norm 1.0"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'; it must be"),
        ({"moments": torch.float16}, "moments is torch.float16; it must be"),
    ],
)
def test_bad_settings_are_named(keywords: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        HybridDeviceOptimizer([nn.Parameter(torch.ones(2))], **keywords)


def test_bad_parameters_and_states_are_named():
    good = nn.Parameter(torch.ones(2))
    optimizer = HybridDeviceOptimizer([good])
    for bad in (torch.ones(2).half(), torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="it must be float32 or bfloat16 on cpu"):
            optimizer.add_param_group({"params": [nn.Parameter(bad)]})
        assert len(optimizer.param_groups) == 1
    good.grad = torch.ones(2)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.ones(3)
    before = optimizer.state[good]["exp_avg"].clone()
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 is float32 \[3\] on cpu"):
        optimizer.load_state_dict(state)
    assert_bitwise("exp_avg", optimizer.state[good]["exp_avg"], before)


def test_groups_may_be_empty():
    """A trainer makes its groups before it knows what is in them."""
    optimizer = HybridDeviceOptimizer([{"params": []}])
    assert optimizer.step(lambda: 3.0) == 3.0
    optimizer.zero_grad()
    assert set(optimizer.memory().values()) == {0}
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    optimizer.add_param_group({"params": [ours], "lr": 0.1})
    ours.grad, theirs.grad = torch.ones(5), torch.ones(5)
    optimizer.step()
    CPUAdam([theirs], lr=0.1).step()
    assert_bitwise("parameter", ours.detach(), theirs.detach())


def test_what_can_not_be_is_said():
    parameter = nn.Parameter(torch.ones(3, 3).to_sparse())
    with pytest.raises(ValueError, match="torch.sparse_coo; it must be float32 or bfloat16 on cpu"):
        HybridDeviceOptimizer([parameter])
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = HybridDeviceOptimizer(table.parameters(), overlap=True)
    with pytest.raises(ValueError, match="torch.sparse_coo; it must be dense float32"):
        table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="make another one .* give it this one's state_dict"):
        copy.deepcopy(optimizer)
