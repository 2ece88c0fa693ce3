"""AdamW whose state is partly on the parameters' device and partly in host memory."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from vlmkernels._native import describe

from . import moments as held
from .arena import PinnedArena
from .device_step import norm, step_on_device
from .native import check_gradient, check_hyperparameters, check_nonfinite, fill_groups
from .offload import Offload, Shard
from .transfer import Transfers, transfers_for

#: Chooses what goes to the host: of these parameters, in the order given, as many as fit.
Policy = Literal["largest", "last_used"] | Callable[[Sequence[Tensor]], Iterable[int]]


def choose(params: Sequence[Tensor], fraction: float, order: Iterable[int]) -> set[int]:
    """Numbers of the parameters to offload: taken in `order` as long as they fit in `fraction` of
    all bytes, so that at most that much is offloaded, and all of it for 1."""
    budget = round(fraction * sum(p.numel() for p in params))
    chosen = set()
    for i in order:
        if params[i].numel() <= budget:
            chosen.add(i)
            budget -= params[i].numel()
    return chosen


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """AdamW that keeps a share of its state, 12 bytes a bfloat16 parameter, in host memory.

    Everywhere a torch.optim.Optimizer can be used. Gradients of offloaded parameters start down
    during the backward pass, are stepped by the processor in buckets, and the new values of a
    bucket go up while the next is stepped; the parameters left on the device are stepped there in
    the meantime. On a machine without a GPU the same happens with copies in host memory, and any
    `offload_fraction` gives the same bits.

    Each bfloat16 parameter has one float32 master copy; a float32 parameter is its own (offloaded,
    it has a copy in host memory). Masters are taken from the model at the first step, never at
    construction, and again where a parameter was written in place between steps: what the model
    holds is the truth. `check_masters` compares every bit, and runs by itself at the first step
    after `load_state_dict`.

    Args:
        params: parameters or parameter groups: float32 or bfloat16, all on one device.
        lr, betas, eps, weight_decay, decoupled: as in CPUAdam; every group may have its own.
        offload_fraction: share of the parameters' elements whose state is in host memory.
        policy: which ones. "largest": largest first. "last_used": those used last in the forward
            pass first, whose gradients come first and have the longest time to come down; the order
            is observed in the first backward pass, the reverse of registration before. Or a
            function from the list of parameters to their numbers in order of preference.
        max_norm: clip gradients to this global L2 norm; None: don't. They are not written.
        nonfinite: "propagate", or "skip" steps in which a gradient is not finite; see CPUAdam.
        moments: torch.float32, torch.bfloat16 or torch.uint8; see CPUAdam.
        overlap: start gradients down by hooks during backward. With gradient accumulation wrap all
            backward passes but the last in `accumulating()`, else each sends its gradients.
        in_backward: step an offloaded parameter as soon as its gradient is down, in a thread of
            its own, while the backward pass goes on; `step()` does the rest. Each backward pass
            outside `accumulating()` then belongs to one step, with the learning rate of that
            moment; gradients can't be changed in between, clipped or skipped.
        bucket_bytes: of gradients stepped at a time.
        transfers: the copies; None: CUDA streams or plain copies, as the device needs.

    State keys are step, those of the moments (see CPUAdam), and master for bfloat16 parameters. A
    state_dict loads into one with any other fraction or type of moments; unless they are 8-bit,
    also into torch.optim.AdamW, which ignores masters.

    Raises:
        ValueError: a setting, parameter, gradient or loaded state that doesn't fit.
    """

    _optimizer_load_state_dict_pre_hooks: OrderedDict[int, Any]
    _optimizer_load_state_dict_post_hooks: OrderedDict[int, Any]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decoupled: bool = True,
        *,
        offload_fraction: float = 1.0,
        policy: Policy = "largest",
        max_norm: float | None = None,
        nonfinite: Literal["propagate", "skip"] = "propagate",
        moments: torch.dtype = torch.float32,
        overlap: bool = True,
        in_backward: bool = False,
        bucket_bytes: int = 32 << 20,
        transfers: Transfers | None = None,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        held.check_type(moments)
        check_nonfinite(nonfinite)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be above 0, or None")
        if not callable(policy) and policy not in ("largest", "last_used"):
            raise ValueError(f"policy is {policy!r}; it must be 'largest', 'last_used' or callable")
        if in_backward and (max_norm is not None or nonfinite != "propagate" or not overlap):
            raise ValueError(
                f"in_backward is True with max_norm {max_norm}, nonfinite {nonfinite!r} and "
                f"overlap {overlap}; to step before all gradients are known it needs max_norm "
                "None, nonfinite 'propagate' and overlap True"
            )
        self.max_norm, self.nonfinite, self.moments = max_norm, nonfinite, moments
        self.policy = policy
        #: Global L2 norm of the gradients of the last step, where max_norm or "skip" asks for it.
        self.last_grad_norm: float | None = None
        #: Steps that changed nothing because a gradient was not finite.
        self.skipped_steps = 0
        self._fraction = _checked_fraction(offload_fraction)
        self._overlap, self._in_backward = overlap, in_backward
        self._group_of: dict[Tensor, int] = {}
        self._bucket_bytes = bucket_bytes
        self._transfers = transfers
        self._offload: Offload | None = None
        self._offloaded: set[Tensor] = set()
        self._shards: dict[Tensor, Shard] = {}
        self._versions: dict[Tensor, int] = {}  # of each parameter, as the last step left it
        self._arrival: dict[Tensor, None] = {}
        self._hooks: dict[Tensor, Any] = {}
        self._unchecked = False  # loaded masters were not compared with the model yet
        self._unread: set[Tensor] = set()  # masters a load took from a model that may change yet
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled,
        }
        super().__init__(params, defaults)

    # ---- parameters and their places -------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        every = self._params()  # groups may be empty
        for param in self.param_groups[-1]["params"]:
            device = every[0].device
            if param.dtype not in (torch.float32, torch.bfloat16) or param.device != device:
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter is {describe(param)}; it must be float32 or bfloat16 on {device}"
                )
        last = len(self.param_groups) - 1
        self._group_of.update(dict.fromkeys(self.param_groups[-1]["params"], last))
        if self._offload is None and every:
            device = every[0].device
            transfers = self._transfers or transfers_for(device)
            arena = PinnedArena(pin=device.type == "cuda")
            self._offload = Offload(transfers, arena, self._bucket_bytes)
        self.set_offload_fraction(self._fraction)

    def __getstate__(self) -> dict[str, Any]:
        """torch pickles groups and state only: not what is on its way between the memories."""
        raise TypeError(
            "a HybridDeviceOptimizer can't be copied or pickled: make another one for the copied "
            "parameters and give it this one's state_dict()"
        )

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def offload_fraction(self) -> float:
        """As it was set; `memory` tells what it came to."""
        return self._fraction

    def set_offload_fraction(self, fraction: float) -> None:
        """Move state between device and host, at any time between steps; no value changes.

        A parameter moves as a whole or not at all: when memory is short on the way (RuntimeError),
        those already moved have moved, all state is where it was or at its new place, and training
        can go on.
        """
        fraction = _checked_fraction(fraction)
        self._check_whole("set_offload_fraction")
        params = self._params()
        if callable(self.policy):
            order: Iterable[int] = self.policy(params)
        elif self.policy == "largest":
            order = sorted(range(len(params)), key=lambda i: -params[i].numel())
        else:
            came = {p: i for i, p in enumerate(self._arrival)}
            order = sorted(range(len(params)), key=lambda i: (came.get(params[i], len(came)), -i))
        chosen = {params[i] for i in choose(params, fraction, order)}
        self._fraction = fraction
        for param in params:
            if (param in chosen) != (param in self._offloaded):
                self._move(param, to_host=param in chosen)

    def _move(self, param: Tensor, to_host: bool) -> None:
        state = self.state.get(param)
        moved: dict[str, Tensor] = {}
        shard = None
        if state:
            if param in self._shards:
                self._engine.forget([self._shards[param]])
            device = torch.device("cpu") if to_host else param.device
            keys = held.keys(self.moments)
            moved = {key: state[key].to(device, copy=True) for key in keys}
            if to_host:
                shard = self._engine.shard(param, state, param.dtype)
                shard.master.copy_(self._master(param))
                if shard.rounds:
                    moved["master"] = shard.master
            elif not _is_own_master(param):
                moved["master"] = self._master(param).to(device, copy=True)
        # All memory is there: nothing fails from here on.
        self._place(param, to_host)
        if state:
            state.pop("master", None)
            state.update(moved)
        if shard is not None:
            self._shards[param] = shard

    def _place(self, param: Tensor, to_host: bool) -> None:
        self._shards.pop(param, None)
        hook = self._hooks.pop(param, None)
        if hook is not None:
            hook.remove()
        if not to_host:
            self._offloaded.discard(param)
            return
        self._offloaded.add(param)
        if self._overlap and param.requires_grad and param.is_leaf:
            me = weakref.ref(self)

            def start(param: Tensor) -> None:
                optimizer = me()
                if optimizer is not None and optimizer._overlap:
                    optimizer._begin(param)

            self._hooks[param] = param.register_post_accumulate_grad_hook(start)

    @property
    def _engine(self) -> Offload:
        assert self._offload is not None
        return self._offload

    def memory(self) -> dict[str, int]:
        """Bytes: host_state (moments and masters in host memory), pinned (page-locked, of them in
        use), pinned_peak (most that was reserved), device_state."""
        found = {"host_state": 0, "device_state": 0}
        for param, state in self.state.items():
            place = "host_state" if param in self._offloaded else "device_state"
            kept = [state[k] for k in (*held.keys(self.moments), "master") if k in state]
            if param in self._shards and param.dtype == torch.float32:
                kept.append(self._shards[param].master)
            found[place] += sum(x.numel() * x.element_size() for x in kept)
        if self._offload is None:  # no parameter yet
            return {**found, "pinned": 0, "pinned_peak": 0}
        pinned = self._engine.pinned
        return {**found, "pinned": pinned.used_bytes, "pinned_peak": pinned.peak_bytes}

    # ---- masters ---------------------------------------------------------------------------------

    def _prepare(self, param: Tensor) -> dict[str, Any]:
        """The parameter's state, made from the model's value where there is none yet; moments that
        are there are kept."""
        state = self.state[param]
        if "step" in state:
            return state
        offloaded = param in self._offloaded
        device = torch.device("cpu") if offloaded else param.device
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        held.fit(state, self.moments, partial(torch.empty, param.shape, device=device))
        if offloaded:
            shard = self._shards[param] = self._engine.shard(param, state, param.dtype)
            if shard.rounds:
                state["master"] = shard.master
        elif not _is_own_master(param):
            state["master"] = param.detach().float().contiguous()
        self._versions[param] = param._version
        return state

    def _master(self, param: Tensor) -> Tensor:
        if param in self._shards:
            return self._shards[param].master
        return self.state[param].get("master", param.detach())

    def sync_from_model(self, params: Iterable[Tensor] | None = None) -> None:
        """Take the model's values (of all parameters, or these) as the masters: after its weights
        were changed by other means than this optimizer."""
        for param in self._params() if params is None else list(params):
            if param in self._shards:
                self._engine.read_master(self._shards[param])
            elif "master" in self.state.get(param, {}):
                self.state[param]["master"].copy_(param.detach())
            self._versions[param] = param._version
        if params is None:
            self._unchecked = False

    def _read_unread(self) -> None:
        if self._unread:
            self.sync_from_model(self._unread)
            self._unread = set()

    def _stale(self, param: Tensor) -> bool:
        """Whether the master, rounded to the parameter's type, is another value than its."""
        if not self.state.get(param):
            return False
        rounded = self._master(param).to(param.dtype)
        same = param.detach().to(rounded.device) == rounded
        return not bool((same | (rounded != rounded)).all())

    def check_masters(self) -> None:
        """Compare every master, rounded, with the model: one copy of the parameters to the host.

        Raises:
            RuntimeError: they differ; names the parameters.
        """
        self._read_unread()
        numbers = [str(i) for i, p in enumerate(self._params()) if self._stale(p)]
        if numbers:
            raise RuntimeError(
                f"{len(numbers)} parameters differ from the optimizer's master copies (numbers "
                f"{', '.join(numbers[:8])}): load the weights that were saved with this optimizer "
                "state, or call sync_from_model() to go on from the model's"
            )
        self._unchecked = False

    # ---- the step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """For backward passes whose gradients will be added to: nothing is sent down yet."""
        before, self._overlap = self._overlap, False
        try:
            yield
        finally:
            self._overlap = before

    def _begin(self, param: Tensor) -> None:
        if param.grad is None:
            return
        _check_gradient(param)
        self._prepare(param)
        self._arrival.setdefault(param)
        shard = self._shards[param]
        with torch.no_grad():
            if not self._in_backward:
                self._engine.begin(shard, param.grad)
                return
            if shard in self._engine.early:
                raise RuntimeError(
                    "a second backward pass adds to a gradient that was stepped in the first: call "
                    "step() after each, or wrap all but the last in accumulating()"
                )
            self._check_loaded()
            self._follow_model(param)
            self._engine.begin(shard, param.grad)
            self._engine.step_soon(self.param_groups[self._group_of[param]], shard)

    def _check_loaded(self) -> None:
        """At the first step after a load."""
        self._read_unread()
        if self._unchecked:
            self.check_masters()

    def _follow_model(self, param: Tensor) -> None:
        if param._version != self._versions[param] and self._stale(param):
            self.sync_from_model([param])

    def _check_whole(self, what: str) -> None:
        if self._offload is not None and self._engine.early:
            raise RuntimeError(
                f"{what} can't come between a backward pass that made part of the step "
                "(in_backward=True) and step(): call step() first"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients on their way down are dropped."""
        self._check_whole("zero_grad")
        if self._shards:
            self._engine.forget(list(self._shards.values()))
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float = 1.0,
        found_inf: bool | Tensor | None = None,
    ) -> Any:
        """Updates every parameter that has a gradient; returns the closure's result.

        Args:
            closure: computes loss and gradients first.
            grad_scale: multiplies every gradient as it is read, before `max_norm` is applied.
            found_inf: whether a gradient is not finite, where the caller knows.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._offload is None:  # no parameter yet
            return loss
        early = self._check_early(grad_scale, found_inf)
        if not early:
            self._check_loaded()
        on_device: list[tuple[dict[str, Any], list[Tensor]]] = []
        on_host: list[tuple[dict[str, Any], Shard]] = []
        grads: list[Tensor] = []
        for group in self.param_groups:
            active = [p for p in group["params"] if p.grad is not None and p not in early]
            for param in active:
                _check_gradient(param)
                grads.append(param.grad)
                self._prepare(param)
                self._follow_model(param)
            on_device.append((group, [p for p in active if p not in self._offloaded]))
            on_host += [(group, self._shards[p]) for p in active if p in self._offloaded]
        for _, shard in on_host:
            grad = shard.target.grad
            assert grad is not None
            if not shard.holds(grad):
                self._engine.begin(shard, grad)
        scale = self._scale(grads, grad_scale, found_inf)
        if scale is None:
            self._engine.forget(shard for _, shard in on_host)
            self.skipped_steps += 1
            return loss
        for group, params in on_device:
            masters = [self._master(p) for p in params]
            step_on_device(group, params, masters, [self.state[p] for p in params], scale)
        self._engine.step(on_host, scale)
        self._engine.finish()
        stepped = [p for _, params in on_device for p in params]
        for param in chain(stepped, (shard.target for _, shard in on_host), early):
            self._versions[param] = param._version
        return loss

    def _check_early(self, grad_scale: float, found_inf: bool | Tensor | None) -> set[Tensor]:
        """Parameters that the backward pass has given to be stepped."""
        shards = self._engine.early if self._offload is not None else {}
        if self._in_backward and (grad_scale != 1.0 or found_inf is not None):
            raise ValueError(
                f"grad_scale is {grad_scale} and found_inf {found_inf} in a step that began in the "
                "backward pass (in_backward=True); they must be 1.0 and None"
            )
        for shard in shards:
            grad = shard.target.grad
            if grad is None or not shard.holds(grad):
                raise RuntimeError(
                    f"the gradient of a parameter, {describe(shard.target)}, was changed or "
                    "dropped after it had been stepped in the backward pass; leave gradients as "
                    "they are, or pass in_backward=False"
                )
        return {shard.target for shard in shards}

    def _scale(
        self, grads: list[Tensor], grad_scale: float, found_inf: bool | Tensor | None
    ) -> float | None:
        """What gradients are multiplied by; None: skip the step."""
        look = found_inf is None and self.nonfinite == "skip"
        if self.max_norm is not None or look:
            self.last_grad_norm = norm(grads) * grad_scale
        if found_inf or (look and not math.isfinite(self.last_grad_norm or 0.0)):
            return None
        if self.max_norm is None or self.last_grad_norm is None:
            return grad_scale
        # As torch.nn.utils.clip_grad_norm_ has it, which also never makes gradients larger.
        return grad_scale * min(1.0, self.max_norm / (self.last_grad_norm + 1e-6))

    # ---- saving and loading ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with a float32 `master` for each bfloat16 parameter; tensors are
        where the state is, on the device or in host memory."""
        self._check_whole("state_dict")
        found = super().state_dict()
        params = self._params()
        for i, values in found["state"].items():
            if params[i].dtype == torch.float32:  # the model has it
                found["state"][i] = {k: v for k, v in values.items() if k != "master"}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of this class, with any fraction, of CPUAdam or of torch.optim.AdamW.

        The model's weights may be loaded before or after; where the state holds masters, the first
        step checks that they are the model's.
        """
        self._check_whole("load_state_dict")
        # The base class would round float32 state to a bfloat16 parameter's type: it gets groups.
        state_dict = state_dict.copy()
        pre = self._optimizer_load_state_dict_pre_hooks
        for pre_hook in pre.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups = copy.deepcopy(state_dict["param_groups"])
        fill_groups(groups, self.defaults)
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        loaded = {
            param: state_dict["state"].get(number)
            for number, param in zip(numbers, self._params(), strict=False)
        }
        for param, values in loaded.items():
            held.check_loaded(values or {}, param)
        post = self._optimizer_load_state_dict_post_hooks
        kept = dict(self.state)
        try:
            self._optimizer_load_state_dict_pre_hooks = OrderedDict()
            self._optimizer_load_state_dict_post_hooks = OrderedDict()
            super().load_state_dict({"state": {}, "param_groups": groups})
        finally:
            self._optimizer_load_state_dict_pre_hooks = pre
            self._optimizer_load_state_dict_post_hooks = post
            self.state.update(kept)
        with torch.no_grad():
            for param, values in loaded.items():
                self._load_one(param, values)
        for post_hook in post.values():
            post_hook(self)

    def _load_one(self, param: Tensor, values: dict[str, Any] | None) -> None:
        if param in self._shards:
            self._engine.forget([self._shards.pop(param)])
        self.state.pop(param, None)
        if not values:
            return
        for key in held.ALL_KEYS:
            if key in values:
                self.state[param][key] = values[key].detach().clone()
        state = self._prepare(param)
        state["step"].fill_(float(values.get("step", 0)))
        for key, value in values.items():  # of other optimizers or the caller's own
            if key not in ("step", "master", *held.ALL_KEYS):
                state[key] = copy.deepcopy(value)
        if "master" in values and "master" in state:
            self._master(param).copy_(values["master"])
            self._unchecked = True
        else:
            self._unread.add(param)


def _is_own_master(param: Tensor) -> bool:
    return param.dtype == torch.float32 and param.is_contiguous()


def _checked_fraction(fraction: float) -> float:
    if not 0 <= fraction <= 1:
        raise ValueError(f"offload_fraction is {fraction}; it must be from 0 to 1")
    return float(fraction)


def _check_gradient(param: Tensor) -> None:
    grad = param.grad
    assert grad is not None
    if param.device.type == "cpu":
        check_gradient(param, grad)
    elif grad.layout != torch.strided:
        raise ValueError(f"a gradient is {describe(grad)}, {grad.layout}; it must be dense")
