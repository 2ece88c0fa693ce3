"""Checks of what optimizers are given: what a step takes from it must be what kernels take for
granted, which get addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import check_allocated, describe, overlap

from .multi_tensor import GRADIENTS, are_gradients, are_held, forms, hold

# ---- settings ------------------------------------------------------------------------------------


def hyperparameters(group: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """What a step takes from a parameter group, by value.

    Args:
        group: settings by their names.
        where: what the group is, for error texts.

    Raises:
        ValueError: a setting is missing, is one that no Adam can use, or asks for a form of Adam
            that is not offered.
    """
    behind = f" of {where}" if where else ""
    for flag in ("amsgrad", "maximize"):
        if group.get(flag):
            raise ValueError(f"{where} has {flag}=True, which is not offered here; set it to False")
    for key in ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"):
        if key not in group:
            raise ValueError(f"{where} has no {key!r}; every group of Adam's has it")
    settings: dict[str, Any] = {}
    for key in ("lr", "eps", "weight_decay"):
        settings[key] = to_number(key + behind, group[key])
        if not settings[key] >= 0:
            raise ValueError(f"{key}{behind} is {group[key]}; it must be at least 0")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas{behind} is {betas}; it must be two numbers")
    settings["betas"] = tuple(
        to_number(f"betas[{i}]{behind}", beta) for i, beta in enumerate(betas)
    )
    for i, beta in enumerate(settings["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}]{behind} is {betas[i]}; it must be in [0, 1)")
    settings["decoupled_weight_decay"] = bool(group["decoupled_weight_decay"])
    return settings


def to_number(name: str, value: Any) -> float:
    """Raises ValueError for what isn't one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} is {value}; it must be one number") from None


def check_nonfinite(nonfinite: str) -> None:
    """Raises ValueError for a policy that doesn't exist."""
    if nonfinite not in ("propagate", "skip"):
        raise ValueError(f"nonfinite is {nonfinite!r}; it must be 'propagate' or 'skip'")


# ---- tensors -------------------------------------------------------------------------------------


def check_gradient(param: Tensor, grad: Tensor) -> None:
    """Raises ValueError unless `grad` can be a gradient of `param`."""
    check_memory("a gradient", grad)
    if (
        grad.dtype not in GRADIENTS
        or grad.shape != param.shape
        or grad.layout != torch.strided
        or grad.device != param.device
    ):
        raise ValueError(
            f"a gradient is {describe(grad)}, {grad.layout}; it must be dense float32 or "
            f"bfloat16 {list(param.shape)} on {param.device}"
        )
    check_allocated(lambda: "a gradient", grad)


def check_gradients(params: list[Tensor], grads: list[Tensor]) -> None:
    """As `check_gradient`, of thousands at once."""
    if not are_gradients(params, grads):
        for param, grad in zip(params, grads, strict=True):
            check_gradient(param, grad)


def check_memory(name: str, x: Tensor) -> None:
    """Raises ValueError for a tensor that is made of others, such as FSDP2's DTensor: it has no
    memory whose address a kernel could be given."""
    if hasattr(type(x), "__tensor_flatten__"):
        raise ValueError(
            f"{name} is a {type(x).__name__}, which has no memory of its own; pass plain tensors, "
            "such as parameters that share the memory of its to_local()"
        )


def is_sharded(kind: type) -> bool:
    """Whether tensors of this class are DTensors, as FSDP2 makes parameters."""
    return hasattr(kind, "to_local")


def local(x: Any) -> Any:
    """This rank's shard of a DTensor; anything else itself."""
    return x.to_local() if is_sharded(type(x)) else x


def local_as(name: str, x: Any, param: Any) -> Any:
    """As `local`, of what belongs to a parameter.

    Raises:
        ValueError: they are two DTensors that are spread in different ways.
    """
    if is_sharded(type(x)) and is_sharded(type(param)):
        if x.placements != param.placements or x.device_mesh != param.device_mesh:
            raise ValueError(
                f"{name} is spread as {x.placements} over {x.device_mesh}, its parameter as "
                f"{param.placements} over {param.device_mesh}; redistribute it"
            )
        return x.to_local()
    return x


def gradient_as(grad: Any, param: Any) -> Any:
    """As `local_as`, of a gradient. One of which each rank has all, as transformers' tensor
    parallelism leaves an embedding's, is spread as its parameter is first. In no other case: ranks
    would send each other their shares, and wait for one that is refused something else.

    Raises:
        ValueError: it is spread in another way than its parameter.
    """
    if is_sharded(type(grad)) and is_sharded(type(param)):
        whole = len(grad.placements) == 1 and grad.placements[0].is_replicate()
        if whole and grad.device_mesh == param.device_mesh and grad.shape == param.shape:
            grad = grad.redistribute(placements=param.placements)
    return local_as("a gradient", grad, param)


def is_dense(x: Tensor) -> bool:
    """Its elements fill one piece of memory without gaps or overlaps, in any order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_host(x: Tensor) -> bool:
    return x.layout == torch.strided and x.device.type == "cpu"


def is_step(step: object) -> bool:
    scalar = isinstance(step, Tensor) and step.dtype == torch.float32 and step.dim() == 0
    return scalar and is_host(step)


def check_separate(params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
    """Raises ValueError where two dense parameters share memory, which threads would step at
    once."""
    shards = [(p, x) for p in params if (x := local(p)).numel() and is_dense(x)]
    shards.sort(key=lambda item: item[1].data_ptr())
    for (one, x), (other, y) in itertools.pairwise(shards):
        if overlap(x, y):
            raise ValueError(
                f"{name(one)} and {name(other)} lie in the same memory; make them one parameter, "
                "head.weight = embedding.weight, and pass it once"
            )


# ---- what was checked ----------------------------------------------------------------------------


class Snapshot:
    """Parameters and the tensors in their states, as they were when they were checked.

    With thousands of small tensors a loop in Python takes longer than the arithmetic; these run in
    C, and keep nothing that would wake the garbage collector.
    """

    def __init__(
        self, states: Mapping[Tensor, dict], params: list[Tensor], others: list[Tensor]
    ) -> None:
        self._owners, self._states = list(states), list(states.values())
        held: list[tuple[dict | None, Any, Tensor]] = []  # the dict that holds a tensor, its key
        for param in params:  # with its state, which is close to it in memory
            held.append((None, None, param))
            state = states[param]
            held += [(state, key, x) for key, x in state.items() if isinstance(x, Tensor)]
        held += [(None, None, x) for x in others]
        self._holders = [holder for holder, _, _ in held]
        self._keys = [key for _, key, _ in held]
        self._tensors = [tensor for _, _, tensor in held]
        self._sharded = any(is_sharded(type(x)) for x in self._tensors)
        self._forms = forms(list(map(local, self._tensors)))

    def holds(self, states: Mapping[Tensor, dict]) -> bool:
        """Whether these are the same tensors, and lie where and as they did."""
        if (
            len(states) != len(self._owners)
            or not all(map(is_, states, self._owners))  # not looked up: a tensor's hash is slow
            or not all(map(is_, states.values(), self._states))
        ):
            return False
        held = self._holders, self._keys, self._tensors
        if not self._sharded:
            return are_held(*held, self._forms)
        return hold(*held) and forms(list(map(local, self._tensors))) == self._forms
