"""Which parameters' optimizer state is in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from torch import Tensor

#: Chooses what goes to the host: of these parameters, in the order returned, as many as fit.
Policy = Literal["largest", "last_used"] | Callable[[Sequence[Tensor]], Iterable[int]]


def check_fraction(name: str, fraction: float) -> float:
    if not 0 <= fraction <= 1:
        raise ValueError(f"{name} is {fraction}; it must be from 0 to 1")
    return float(fraction)


def check_policy(policy: Policy) -> None:
    if not callable(policy) and policy not in ("largest", "last_used"):
        raise ValueError(f"policy is {policy!r}; it must be 'largest', 'last_used' or callable")


def preference(
    params: Sequence[Tensor], policy: Policy, arrival: Iterable[Tensor] = ()
) -> Iterable[int]:
    """Numbers of the parameters, those that the policy offloads first in front. `arrival` is the
    order in which gradients came, as far as it was observed."""
    if callable(policy):
        return policy(params)
    numbers = range(len(params))
    if policy == "largest":
        return sorted(numbers, key=lambda i: -params[i].numel())
    came = {p: i for i, p in enumerate(arrival)}
    return sorted(numbers, key=lambda i: (came.get(params[i], len(came)), -i))


def choose(params: Sequence[Tensor], fraction: float, order: Iterable[int]) -> set[int]:
    """Numbers of the parameters to offload: taken in `order` as long as they fit in `fraction` of
    all elements, so that at most that much is offloaded, and all of it for 1."""
    budget = round(fraction * sum(p.numel() for p in params))
    chosen = set()
    for i in order:
        if params[i].numel() <= budget:
            chosen.add(i)
            budget -= params[i].numel()
    return chosen


def relocate(
    params: Sequence[Tensor],
    fraction: float,
    order: Iterable[int],
    on_host: Collection[Tensor],
    move: Callable[[int, bool], None],
) -> None:
    """`move(number, to_host)` for each parameter that is not where `choose` wants it.

    A parameter moves as a whole or not at all: when memory is short on the way (RuntimeError), all
    state is where it was or at its new place.
    """
    chosen = choose(params, fraction, order)
    for i, param in enumerate(params):
        if (i in chosen) != (param in on_host):
            move(i, i in chosen)
