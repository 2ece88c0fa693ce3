"""CPUAdam beside torch's AdamW, DeepSpeed's CPU Adam and the traffic that no Adam can avoid."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import ceilings
from benchmarks.harness import Comparison, Context, Row, compare, say, torch_threads
from vlmkernels import CPUAdam, HybridDeviceOptimizer

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def model_sizes() -> list[int]:
    """Sizes of the parameter tensors of a 12-layer language model of about 100 million: matrices,
    and biases and norms between them."""
    width, inner, layers = 768, 2048, 12
    layer = [width, width * width, width, width * 256, 256, width * 256, 256, width * width]
    layer += [width, width * inner, width * inner, inner * width]
    return [24576 * width] + layer * layers + [width]


def cut(flat: Tensor, sizes: list[int]) -> list[Tensor]:
    """Pieces of the first sum(sizes) elements, each in memory of its own, as a model's are."""
    if len(sizes) == 1:
        return [flat[: sizes[0]]]
    return [piece.clone() for piece in flat[: sum(sizes)].split(sizes)]


class Problem:
    """Parameters, gradients and moments that all contestants step, each in its turn."""

    def __init__(self, sizes: list[int]) -> None:
        total = sum(sizes)
        generator = torch.Generator().manual_seed(0)
        values = [torch.empty(total).normal_(0, s, generator=generator) for s in (1, 1e-2, 1e-2)]
        second = values[2].square()
        self.params = [torch.nn.Parameter(p) for p in cut(values[0], sizes)]
        self.grads = cut(values[1], sizes)
        self.moments = list(zip(cut(values[2], sizes), cut(second, sizes), strict=True))
        self.total = total
        #: Four flat arrays of that many elements, for the stream that is the ceiling.
        self.flat = (values[0], values[1], values[2], second)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def fill(self, optimizer: torch.optim.Optimizer, step: Any) -> None:
        """Gives the optimizer the shared moments, ten steps in."""
        for param, (first, second) in zip(self.params, self.moments, strict=True):
            state = {"step": step(), "exp_avg": first, "exp_avg_sq": second}
            optimizer.state[param] = state


def torch_step(problem: Problem, **flags: bool) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(problem.params, **SETTINGS, **flags)
    problem.fill(optimizer, lambda: torch.tensor(10.0))
    return optimizer.step


def our_step(problem: Problem) -> Callable[[], Any]:
    optimizer = CPUAdam(problem.params, **SETTINGS)
    problem.fill(optimizer, lambda: torch.tensor(10.0))
    return optimizer.step


def hybrid_step(fraction: float, problem: Problem) -> Callable[[], Any]:
    optimizer = HybridDeviceOptimizer(problem.params, **SETTINGS, offload_fraction=fraction)
    optimizer.step()
    return optimizer.step


def deepspeed_step(problem: Problem) -> Callable[[], Any]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(problem.params, **SETTINGS, adamw_mode=True)
    problem.fill(optimizer, lambda: 10)
    return optimizer.step


def with_deepspeed(problem: Problem, peers: dict[str, Callable], skipped: dict[str, str]) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        skipped["DeepSpeed CPUAdam"] = "not installed: pip install -e '.[bench]'"
        return
    try:
        peers["DeepSpeed CPUAdam"] = deepspeed_step(problem)
    except Exception as error:  # its own compiler run failed
        first = (str(error).strip().splitlines() or [""])[0]
        skipped["DeepSpeed CPUAdam"] = f"{type(error).__name__}: {first[:100]}"


def float32(
    shape: str,
    sizes: list[int],
    context: Context,
    bar: float | None,
    op: str = "Adam step",
    ours: Callable[[Problem], Callable[[], Any]] = our_step,
) -> Comparison:
    problem = Problem(sizes)
    peers: dict[str, Callable] = {
        "torch AdamW fused": torch_step(problem, fused=True),
        "torch AdamW foreach": torch_step(problem, foreach=True),
    }
    skipped: dict[str, str] = {}
    with_deepspeed(problem, peers, skipped)
    one = len(sizes) == 1
    return Comparison(
        op=op,
        shape=shape,
        dtype="float32",
        ours=ours(problem),
        peers=peers,
        ceilings=ceilings.adam(problem.flat, 28.0 * problem.total, context),
        skipped=skipped,
        bar=bar,
        ceiling_bar=97.0 if one and bar else None,
    )


def composite(
    shape: str, sizes: list[int], context: Context, moments: torch.dtype, bar: float | None
) -> Comparison:
    """bf16 gradients -> float32 masters -> bf16 parameters, for which torch takes three passes."""
    problem = Problem(sizes)
    halves = [g.bfloat16() for g in problem.grads]
    lows = [p.detach().bfloat16() for p in problem.params]
    plain = torch_step(problem, fused=True)
    optimizer = CPUAdam(problem.params, **SETTINGS, moments=moments)
    problem.fill(optimizer, lambda: torch.tensor(10.0))
    for param, low in zip(problem.params, lows, strict=True):
        optimizer.set_low_precision(param, low)

    def ours() -> None:
        for param, half in zip(problem.params, halves, strict=True):
            param.decoupled_grad = half  # type: ignore[attr-defined]
        optimizer.step()
        for param in problem.params:
            del param.decoupled_grad  # type: ignore[attr-defined]

    def converted() -> None:
        for grad, half in zip(problem.grads, halves, strict=True):
            grad.copy_(half)
        plain()
        for param, low in zip(problem.params, lows, strict=True):
            low.copy_(param.detach())

    name, per_element = {
        torch.float32: ("float32", 28.0),
        torch.bfloat16: ("bfloat16", 20.0),
        torch.uint8: ("8-bit", 16.0),
    }[moments]
    return Comparison(
        op="Adam step, bfloat16 in and out",
        shape=shape,
        dtype=f"float32, {name} moments",
        ours=ours,
        peers={"torch copy, AdamW fused, copy": converted},
        ceilings=ceilings.adam(problem.flat, per_element * problem.total, context),
        bar=bar,
    )


def rows(context: Context) -> Iterator[Row]:
    """On one thread and on all."""
    if context.device != "cpu":
        say("Adam skipped: CPUAdam works in host memory, run it with --device cpu")
        return
    big = 2**20 if context.quick else 100_000_000
    small = [4096] * (128 if context.quick else 8192)
    tiny = [64] * (128 if context.quick else 10_000)
    mixed = [n // (64 if context.quick else 1) for n in model_sizes()]
    for threads in sorted({1, context.threads}):
        here = Context(**{**vars(context), "threads": threads})
        bars = (1.05 if threads == 1 else 0.98, 1.3) if context.has_bars else (None, None)
        with torch_threads(threads):
            yield compare(float32(f"1 tensor of {big:,}", [big], here, bars[0]), here)
            shape = f"{len(mixed)} mixed tensors, {sum(mixed):,} in all"
            yield compare(float32(shape, mixed, here, bars[1]), here)
            yield compare(float32(f"{len(small):,} tensors of 4,096", small, here, bars[1]), here)
            shape = f"{len(tiny):,} tensors of 64"
            yield compare(float32(shape, tiny, here, None), here)
            for fraction in (0.0, 1.0):
                op = f"hybrid Adam step, {fraction:.0%} offloaded"
                step = partial(hybrid_step, fraction)
                yield compare(float32(shape, tiny, here, None, op, step), here)
            for moments, bar in ((torch.float32, 1.5), (torch.bfloat16, 2.0), (torch.uint8, None)):
                limit = bar if context.has_bars else None
                one = composite(f"1 tensor of {big:,}", [big], here, moments, limit)
                yield compare(one, here)
