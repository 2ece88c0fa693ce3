"""A training step whose optimizer state is in host memory beside one whose state is on the GPU, and
beside Megatron's HybridDeviceOptimizer: the same model, the same microbatches.

On a CPU: what the host's part of the step costs if it waits for the clip factor, and if it doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Comparison, Context, Row, compare, say, torch_threads
from vlmkernels import HybridDeviceOptimizer
from vlmkernels.optim.native import AdamBatch, pointers_of

SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0


class Stack(nn.Module):
    """Square bfloat16 layers with residuals: a transformer's ratio of multiplications to weights,
    without its attention."""

    def __init__(self, width: int, layers: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.silu(x))
        return x.float().square().mean()


def ours(model: Stack, data: list[Tensor], fraction: float) -> Callable[[], None]:
    optimizer = HybridDeviceOptimizer(
        model.parameters(), **SETTINGS, offload_fraction=fraction, max_norm=CLIP, overlap=True
    )

    def step() -> None:
        with optimizer.accumulating():
            for x in data[:-1]:
                model(x).backward()
        model(data[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def megatron(model: Stack, data: list[Tensor]) -> Callable[[], None]:
    """Its own overlapped copies, all state on the CPU."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer as Theirs

    optimizer = Theirs(
        list(model.parameters()),
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        pin_cpu_grads=True,
        pin_cpu_params=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        fused=True,
        **SETTINGS,
    )

    def step() -> None:
        for x in data:
            model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        model.zero_grad()

    return step


def comparison(
    context: Context, width: int, layers: int, tokens: int, microbatches: int, fraction: float
) -> Comparison:
    device = context.device

    def model() -> Stack:
        return Stack(width, layers, device)

    data = [torch.randn(tokens, width, device=device).bfloat16() * 0.1 for _ in range(microbatches)]
    peers: dict[str, Callable[[], None]] = {
        "fused AdamW on the device, float32 masters": ours(model(), data, 0.0)
    }
    skipped = {}
    if device == "cuda":
        try:
            peers["Megatron's HybridDeviceOptimizer"] = megatron(model(), data)
        except Exception as error:  # not installed, or it can't
            skipped["Megatron's HybridDeviceOptimizer"] = f"{type(error).__name__}: {error}"[:120]
    # At most 1.05x the time of the device's own optimizer at 8 microbatches, 1.4x at 1.
    bar = 1 / 1.05 if microbatches >= 8 else 1 / 1.4
    return Comparison(
        op=f"training step, {fraction:.0%} of the optimizer offloaded",
        shape=f"{width * width * layers:,} parameters, {microbatches} x {tokens:,} tokens",
        dtype="bfloat16",
        ours=ours(model(), data, fraction),
        peers=peers,
        skipped=skipped,
        tokens=tokens * microbatches,
        bar=None if context.quick else bar,
    )


def clipping(context: Context) -> Comparison:
    """The host's step of bfloat16 gradients, with all of them at hand and their factor known; and
    before the factor is known, into copies of masters and moments that take the originals' place
    if it turns out to be 1 (else it was in vain)."""
    n = 2**20 if context.quick else 100_000_000
    piece = 2**18 if context.quick else 2**20  # what was copied is still in the caches
    state = [torch.randn(n), torch.zeros(n), torch.rand(n)]
    shadow = [torch.empty(n) for _ in state]
    grad, low = torch.randn(n).bfloat16(), torch.empty(n, dtype=torch.bfloat16)
    group = {**SETTINGS, "decoupled_weight_decay": True}
    cuts = [slice(first, min(first + piece, n)) for first in range(0, n, piece)]

    def step(tensors: list[Tensor], cut: slice) -> None:
        master, exp_avg, exp_avg_sq = (x[cut] for x in tensors)
        work, count = AdamBatch(torch.float32), torch.tensor(9.0)
        pointers = pointers_of(master, exp_avg, exp_avg_sq, count, low[cut])
        work.add([master], [grad[cut]], [pointers])
        work.step(group)

    def in_place() -> None:
        for cut in cuts:
            step(state, cut)

    def into_copies() -> None:
        for cut in cuts:
            for source, target in zip(state, shadow, strict=True):
                target[cut].copy_(source[cut])
            step(shadow, cut)

    return Comparison(
        op="offloaded step under clipping",
        shape=f"{n:,} parameters",
        dtype="bfloat16, float32 moments",
        ours=in_place,
        peers={"before the norm is known, into copies": into_copies},
    )


def rows(context: Context) -> Iterator[Row]:
    if context.device == "cpu":
        with torch_threads(context.threads):
            yield compare(clipping(context), context)
    if context.device == "cpu" and not context.quick:
        say("offload's other rows skipped: on a CPU device and host are one; run --device cuda")
        return
    width, layers, tokens = (256, 4, 64) if context.quick else (4096, 60, 8192)
    for microbatches in (1, 8):
        for fraction in (0.5, 1.0):
            yield compare(
                comparison(context, width, layers, tokens, microbatches, fraction), context
            )
            if context.device == "cuda":
                torch.cuda.empty_cache()
