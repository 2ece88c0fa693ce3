"""Libraries that are handed an optimizer: with ours they get what they get with torch's AdamW, to
the same bits. And DeepSpeed's CPUAdam beside ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.numeric import assert_bitwise
from vlmkernels import CPUAdam, HybridDeviceOptimizer, _native
from vlmkernels.optim.native import adam_reference

OURS: dict[str, Callable[..., Any]] = {
    "CPUAdam": CPUAdam,
    "hybrid": HybridDeviceOptimizer,
    "hybrid on the device": partial(HybridDeviceOptimizer, offload_fraction=0.0),
}
each = pytest.mark.parametrize("ours", list(OURS))
FMA = pytest.mark.skipif(_native._C.isa() == "generic", reason="torch's bits need FMA instructions")
plain = partial(torch.optim.AdamW, fused=True)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for i, pair in enumerate(zip(ours, theirs, strict=True)):
        assert_bitwise(f"tensor {i}", *pair)


@FMA
@each
def test_accelerate(ours: str, tmp_path: Path) -> None:
    """Accumulated gradients, clipping, a schedule, and a run that is saved and loaded."""
    accelerate = pytest.importorskip("accelerate")
    results = []
    for make in (plain, OURS[ours]):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network()
        optimizer = make(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

        def train(
            first: int,
            parts: Any = (accelerator, model, optimizer, scheduler),
        ) -> None:
            accelerator, model, optimizer, scheduler = parts
            for step in range(first, first + 4):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.full((3, 6), step / 4)).square().sum())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        train(0)
        folder = tmp_path / make.func.__name__ if isinstance(make, partial) else tmp_path / "ours"
        accelerator.save_state(str(folder))
        train(4)
        once = [p.detach().clone() for p in model.parameters()]
        accelerator.load_state(str(folder))
        train(4)
        results.append([*once, *(p.detach() for p in model.parameters())])
    same(*results[::-1])
    same(results[1][:4], results[1][4:])


@FMA
@each
def test_peft(ours: str) -> None:
    """Adapters alone have gradients; all parameters are handed over."""
    peft = pytest.importorskip("peft")
    results = []
    for make in (plain, OURS[ours]):
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
        model = peft.get_peft_model(network(), config)
        optimizer = make(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((3, 6), step / 4)).square().sum().backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    same(*results[::-1])


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.network(x) - labels).square().mean()}


@FMA
@each
def test_transformers_trainer(ours: str, tmp_path: Path) -> None:
    """Trained in one go, and from a checkpoint in the middle."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    data = [{"x": torch.full((6,), i / 8), "labels": torch.ones(2)} for i in range(8)]
    results = []
    for number, make in enumerate((plain, OURS[ours])):
        settings = transformers.TrainingArguments(
            str(tmp_path / str(number)),
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            use_cpu=True,
            report_to="none",
        )
        for resume in (None, str(tmp_path / str(number) / "checkpoint-3")):
            model = WithLoss()
            optimizer = make(model.parameters(), lr=0.1)
            trainer = transformers.Trainer(
                model, settings, train_dataset=data, optimizers=(optimizer, None)
            )
            trainer.train(resume_from_checkpoint=resume)
            results.append([p.detach() for p in model.parameters()])
    for other in results[1:]:
        same(other, results[0])


@pytest.mark.parametrize("decoupled", [True, False])
def test_deepspeed(decoupled: bool) -> None:
    """Ours is at most as far from float64 as theirs, or as one rounding of each value."""
    ops = pytest.importorskip("deepspeed.ops.adam", reason="deepspeed is not installed")
    torch.manual_seed(5)
    start = torch.randn(5003)
    grads = [torch.randn(5003) * 10.0 ** -(i + 1) for i in range(6)]
    settings: dict[str, Any] = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    exact = [start.double(), torch.zeros(5003).double(), torch.zeros(5003).double()]
    theirs, ours = (nn.Parameter(start.clone()) for _ in range(2))
    try:
        peer = ops.DeepSpeedCPUAdam([theirs], adamw_mode=decoupled, **settings)
    except Exception as error:  # its own compiler run failed
        pytest.skip(f"DeepSpeed's op can't be built: {str(error).strip().splitlines()[0][:100]}")
    optimizer = CPUAdam([ours], decoupled=decoupled, **settings)
    for step, grad in enumerate(grads, 1):
        theirs.grad, ours.grad = grad.clone(), grad.clone()
        peer.step()
        optimizer.step()
        adam_reference(*[exact[0], grad, *exact[1:]], step, decoupled=decoupled, **settings)
    error, peers = ((x.double() - exact[0]).norm() for x in (ours.detach(), theirs.detach()))
    assert error <= peers + 2**-24 * exact[0].norm(), (error, peers)
    # States go both ways.
    state = copy.deepcopy(peer.state_dict())
    optimizer.load_state_dict(state)
    assert_bitwise("exp_avg", optimizer.state[ours]["exp_avg"], state["state"][0]["exp_avg"])
    assert float(optimizer.state[ours]["step"]) == len(grads)
    peer.load_state_dict(optimizer.state_dict())
    peer.step()
