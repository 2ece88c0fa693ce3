"""One Adam step on the parameters' own device: the part of a hybrid optimizer that stays there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import blockwise
from .native import AdamBatch, Pointers, pointers_of, sum_of_squares
from .state import CODES, moment_tensors

# Elements whose gradients are widened to float32 at a time.
_WIDENED = 64 << 20


def step_on_device(
    settings: dict[str, Any],
    params: list[Tensor],
    masters: list[Tensor],
    states: list[dict[str, Any]],
    scale: float,
) -> None:
    """Steps float32 masters (contiguous) with the parameters' gradients and writes the parameters;
    a master may be its parameter. By torch's fused kernel; on a CPU see `step_on_host`."""
    # Coding takes several times the memory of the moments themselves.
    limit = _WIDENED // 8 if params and CODES[0] in states[0] else _WIDENED
    for part in _parts(params, limit):
        _fused(settings, params[part], masters[part], states[part], scale)


def host_pointers(param: Tensor, master: Tensor, state: dict[str, Any]) -> Pointers:
    """For `step_on_host`."""
    low = param if param.dtype == torch.bfloat16 and param.is_contiguous() else None
    exp_avg, exp_avg_sq, scales = moment_tensors(state)
    return pointers_of(master, exp_avg, exp_avg_sq, state["step"], low, scales=scales)


def step_on_host(
    settings: dict[str, Any],
    params: list[Tensor],
    pointers: list[Pointers],
    moments: torch.dtype,
    scale: float,
) -> None:
    """As `step_on_device`, on a CPU, with each parameter's `host_pointers`; contiguous ones
    are written in the same pass, the others are left to the caller."""
    grads, like = [grad for p in params if (grad := p.grad) is not None], params
    if not all(map(Tensor.is_contiguous, params)):  # as masters are
        grads = like = _gradients(params)
    batch = AdamBatch(moments)
    grads = batch.add(like, grads, pointers)  # which live until the step is made
    batch.step(settings, scale)
    torch.autograd.graph.increment_version(params)


def _gradients(params: list[Tensor]) -> list[Tensor]:
    """As they lie in memory, with their sign."""
    return [
        x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
        for p in params
        if (x := p.grad) is not None
    ]


def _parts(params: list[Tensor], limit: int) -> Iterator[slice]:
    first = 0
    while first < len(params):
        last, elements = first, 0
        while last < len(params) and (last == first or elements < limit):
            elements += params[last].numel()
            last += 1
        yield slice(first, last)
        first = last


def _fused(
    settings: dict[str, Any],
    params: list[Tensor],
    masters: list[Tensor],
    states: list[dict[str, Any]],
    scale: float,
) -> None:
    """torch's fused kernel."""
    grads = [grad.float() for grad in _gradients(params)]
    if scale != 1.0:
        grads = list(torch._foreach_mul(grads, scale))
    wide = [[_widened(s, n) for s in states] for n in range(2)]
    steps = [s["step"].add_(1).to(params[0].device, non_blocking=True) for s in states]
    kernel = torch._fused_adamw_ if settings["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        masters,
        grads,
        *wide,
        [],
        steps,
        lr=settings["lr"],
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
        amsgrad=False,
        maximize=False,
    )
    for n, moments in enumerate(wide):
        for state, moment in zip(states, moments, strict=True):
            _narrow(state, n, moment)
    for param, master in zip(params, masters, strict=True):
        if master.data_ptr() != param.data_ptr():
            param.copy_(master)


def _widened(state: dict[str, Any], n: int) -> Tensor:
    """exp_avg (n is 0) or exp_avg_sq in float32: the state's own memory where it is that."""
    *moments, scales = moment_tensors(state)
    if scales is None:
        return moments[n].float()
    return blockwise.dequantize(moments[n], scales[n], signed=n == 0)


def _narrow(state: dict[str, Any], n: int, moment: Tensor) -> None:
    *moments, scales = moment_tensors(state)
    if scales is not None:
        codes, scale = blockwise.quantize(moment, signed=n == 0)
        moments[n].copy_(codes)
        scales[n].copy_(scale)
    elif moments[n].dtype != torch.float32:
        moments[n].copy_(round_randomly(moment, int(state["step"]) * 2 + n))


def round_randomly(x: Tensor, seed: int) -> Tensor:
    """float32 to the bfloat16 value above or below in magnitude, in proportion; see CPUAdam."""
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randint(0x10000, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    rounded = ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def norm(grads: list[Tensor]) -> float:
    """L2 norm of all; not finite where an element isn't."""
    if not grads:
        return 0.0
    if grads[0].device.type == "cpu":
        return math.sqrt(sum_of_squares([g.contiguous() for g in grads]))
    norms = torch._foreach_norm([g.detach() for g in grads], 2, dtype=torch.float32)
    return float(torch.linalg.vector_norm(torch.stack(norms)))
