"""AdamW whose state is partly on the parameters' device and partly in host memory."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from vlmkernels._native import describe, not_traced

from .base import AdamBase
from .checks import check_gradient, check_gradients, check_memory, is_step
from .device_step import host_pointers, norm, step_on_device, step_on_host
from .host_step import HostStep, Shard, Work
from .masters import Masters, is_own_master
from .native import Pointers
from .placement import Policy, check_fraction, check_policy, preference, relocate
from .state import (
    ALL_MOMENTS,
    check_shapes,
    copy_moments,
    ensure_moments,
    fit_moments,
    is_finite_norm,
    loaded_steps,
    state_bytes,
    step_count,
)
from .transfer import Transfers


class HybridDeviceOptimizer(AdamBase):
    """AdamW that keeps a share of its state, 12 bytes a bfloat16 parameter, in host memory.

    Can be used wherever a torch.optim.Optimizer can. Gradients of offloaded parameters are copied
    to the host, all at once, and stepped by the processor in buckets as they arrive; a bucket's new
    values are copied back while the next is stepped. Parameters left on the device are stepped
    there in the meantime. On a machine without a GPU the same happens with copies in host memory,
    and any `offload_fraction` gives the same bits.

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
            pass first, whose gradients come first and have the longest time for their copies; the
            order is observed in the first backward pass, the reverse of registration before. Or a
            function from the list of parameters to their numbers in order of preference.
        max_norm: clip gradients to this global L2 norm; None: don't. They are not written.
        nonfinite: "propagate", or "skip" steps in which a gradient is not finite; see CPUAdam.
        moments: torch.float32, torch.bfloat16 or torch.uint8; see CPUAdam.
        overlap: start the gradients' copies by hooks during backward, not in `step()`. For those
            who know all that happens to gradients in between: a change that bumps their version
            is seen, and they are sent again; one that doesn't is not, and the step takes what they
            were (`.data`, numpy, `torch.amp.GradScaler`, `dist.all_reduce(p.grad)`,
            DistributedDataParallel's buckets). With gradient accumulation wrap all backward
            passes but the last in `accumulating()`, else each sends its gradients.
        in_backward: step an offloaded parameter as soon as its gradient is there, in a thread of
            its own, while the backward pass goes on; `step()` does the rest. Each backward pass
            outside `accumulating()` then belongs to one step, with the learning rate of that
            moment; gradients can't be changed in between, clipped or skipped. Implies `overlap`,
            with what is said there.
        bucket_bytes: of gradients stepped at a time.
        transfers: the copies; None: CUDA streams or plain copies, as the device needs.

    State keys are step, those of the moments (see CPUAdam), and master for bfloat16 parameters. A
    state_dict loads into one with any other fraction or type of moments; unless they are 8-bit,
    also into torch.optim.AdamW, which ignores masters.

    Raises:
        ValueError: a setting, parameter, gradient or loaded state that doesn't fit.
    """

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
        overlap: bool = False,
        in_backward: bool = False,
        bucket_bytes: int = 32 << 20,
        transfers: Transfers | None = None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be above 0, or None")
        check_policy(policy)
        if in_backward and (max_norm is not None or nonfinite != "propagate"):
            raise ValueError(
                f"in_backward is True with max_norm {max_norm} and nonfinite {nonfinite!r}; to "
                "step before all gradients are known it needs max_norm None and nonfinite "
                "'propagate'"
            )
        self.max_norm, self.policy = max_norm, policy
        #: Global L2 norm of the gradients of the last step, where max_norm or "skip" asks for it.
        self.last_grad_norm: float | None = None
        self._fraction = check_fraction("offload_fraction", offload_fraction)
        self._overlap, self._in_backward = overlap or in_backward, in_backward
        self._group_of: dict[int, int] = {}  # by the parameter's id, since the last step
        self._changed = False  # parameters or states are others than at the last step
        self._count = 0  # of parameters in groups, then
        self._host = HostStep(transfers, bucket_bytes)
        self._masters = Masters(self._host)
        self._offloaded: set[Tensor] = set()
        self._arrival: dict[Tensor, None] = {}  # parameters in the order their gradients came
        self._hooks: dict[Tensor, Any] = {}
        weakref.finalize(self, _remove_hooks, self._hooks).atexit = False
        self._early_settings: dict[int, dict[str, Any]] = {}  # by group, of early steps
        super().__init__(params, lr, betas, eps, weight_decay, decoupled, moments, nonfinite)

    # ---- placement -------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        params = self._params()  # groups may be empty
        if params:
            self._host.connect(params[0].device)
        self.set_offload_fraction(self._fraction)

    def _check_param(self, param: Tensor) -> None:
        check_memory("a parameter", param)
        device = next(p for group in self.param_groups for p in group["params"]).device
        known = param.dtype in (torch.float32, torch.bfloat16) and param.layout == torch.strided
        if not known or param.device != device:
            raise ValueError(
                f"a parameter is {describe(param)}, {param.layout}; it must be float32 or bfloat16 "
                f"on {device}, torch.strided"
            )

    def __getstate__(self) -> dict[str, Any]:
        """torch pickles groups and state only: not what is on its way between the memories."""
        raise TypeError(
            "a HybridDeviceOptimizer can't be copied or pickled: make another one for the copied "
            "parameters and give it this one's state_dict()"
        )

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
        fraction = check_fraction("offload_fraction", fraction)
        self._check_whole("set_offload_fraction")
        self._forget_checks()
        self._let_go()
        params = self._params()
        order = preference(params, self.policy, self._arrival)
        self._fraction = fraction
        relocate(params, fraction, order, self._offloaded, lambda i, to: self._move(params[i], to))
        self._host.trim()

    def _move(self, param: Tensor, to_host: bool) -> None:
        state = self.state.get(param)
        if state:
            self._fit_state(param)
            old = self._host.shards.get(param)
            if old is not None:
                self._host.forget([old])
            device = torch.device("cpu") if to_host else param.device
            moments = copy_moments(state, self.moments, param.shape, device)
            master, shard = self._make_master(param, state, to_host, self._masters.of(param))
            # All memory is there: nothing fails from here on.
            state.update(moments)
            self._put_master(param, state, master, shard)
        hook = self._hooks.pop(param, None)
        if hook is not None:
            hook.remove()
        if not to_host:
            self._offloaded.discard(param)
            return
        self._offloaded.add(param)
        wanted = self._overlap or self.policy == "last_used"
        if wanted and param.requires_grad and param.is_leaf:
            me = weakref.ref(self)

            def start(param: Tensor) -> None:
                optimizer = me()
                if optimizer is not None:
                    optimizer._accumulated(param)

            self._hooks[param] = param.register_post_accumulate_grad_hook(start)

    def _make_master(
        self, param: Tensor, state: dict[str, Any], to_host: bool, value: Tensor
    ) -> tuple[Tensor | None, Shard | None]:
        """A master with this value in its own memory, None for the parameter itself."""
        if to_host:
            own = getattr(param, "grad_dtype", None) if param.is_leaf else None  # torch 2.11
            grad_type = own or param.dtype
            shard = self._host.make_shard(param, state, grad_type, value)
            return shard.master, shard
        if is_own_master(param):
            return None, None
        return torch.empty(param.shape, dtype=torch.float32, device=param.device).copy_(value), None

    def _put_master(
        self, param: Tensor, state: dict[str, Any], master: Tensor | None, shard: Shard | None
    ) -> None:
        self._host.drop(param)
        state.pop("master", None)
        if shard is not None:
            self._host.shards[param] = shard
        if master is not None and param.dtype != torch.float32:  # whose values the model has
            state["master"] = master
        self._masters.put(param, master)

    def _fit_state(self, param: Tensor) -> None:
        state = self.state.get(param) or {}
        if "step" not in state or not self._masters.knows(param):
            self._prepare(param)
            return
        changed = self._masters.changed(param, state.get("master"))
        if changed is not None:
            raise ValueError(changed.format(self._name(param)))
        # Of the parameter's strides where it is its own master, which is contiguous.
        like = self._masters.copies.get(param, param)
        ensure_moments(state, self.moments, like, like.device, lambda: self._name(param))
        if not is_step(state["step"]):
            state["step"] = step_count(state["step"])
        if param in self._host.shards:
            shard = self._host.shards[param]
            shard.state, shard.whole = state, None  # it may be another one
        if like is not param and param.dtype != torch.float32:
            state["master"] = like

    def _check_unknown(self, unknown: list[Tensor]) -> None:
        self._changed = True
        super()._check_unknown(unknown)

    def _let_go(self) -> None:
        """Keeps nothing of parameters that are in no group and have no state any more."""
        kept = set(map(id, self._params()))
        self._changed, self._count = False, len(kept)
        for param in {*self._offloaded, *self._masters.params}:
            if id(param) in kept or self.state.get(param):
                continue
            self._known.pop(id(param), None)
            self._host.drop(param)
            self._masters.forget(param)
            self._offloaded.discard(param)
            self._arrival.pop(param, None)
            if (hook := self._hooks.pop(param, None)) is not None:
                hook.remove()

    def _pointers(self, param: Tensor) -> Pointers | None:
        """For step_on_host, or for the shard's step."""
        if param in self._offloaded:
            shard = self._host.shards[param]
            shard.whole = shard.pointers()
            return shard.whole
        if param.device.type != "cpu":
            return None
        return host_pointers(param, self._masters.of(param), self.state[param])

    def _prepare(self, param: Tensor) -> dict[str, Any]:
        """A state from the model's value; steps and moments that are there already are kept."""
        self._changed = True
        state = self.state[param]
        check_shapes(state, param, "{} of " + self._name(param))
        to_host = param in self._offloaded
        device = torch.device("cpu") if to_host else param.device
        state["step"] = step_count(state.get("step", 0))
        fit_moments(state, self.moments, partial(torch.empty, param.shape, device=device))
        self._put_master(param, state, *self._make_master(param, state, to_host, param.detach()))
        self._masters.written([param])
        return state

    def memory(self) -> dict[str, int]:
        """Bytes: host_state (moments and masters in host memory), pinned (page-locked, of them in
        use), pinned_peak (most that was reserved), device_state."""
        kept = [p for p in self._params() if p in self.state and p not in self._offloaded]
        masters = self._masters.copies
        device = sum(state_bytes(self.state[p]) for p in kept)
        device += sum(4 * p.numel() for p in kept if p in masters and "master" not in self.state[p])
        return {**self._host.memory(), "device_state": device}

    # ---- masters ---------------------------------------------------------------------------------

    def sync_from_model(self, params: Iterable[Tensor] | None = None) -> None:
        """Take the model's values (of all parameters, or these) as the masters: after its weights
        were changed by other means than this optimizer."""
        if params is None:
            self._masters.sync_all(self._params())
        else:
            self._masters.sync(params)

    def check_masters(self) -> None:
        """Compare every master, rounded, with the model: one copy of the parameters to the host.

        Raises:
            RuntimeError: they differ; names the parameters.
        """
        self._masters.check(self._params())

    # ---- the step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """For backward passes whose gradients will be added to: nothing is copied yet."""
        before, self._overlap = self._overlap, False
        try:
            yield
        finally:
            self._overlap = before

    @not_traced
    def _accumulated(self, param: Tensor) -> None:
        """A backward pass has the parameter's gradient."""
        self._arrival.setdefault(param)
        if param.grad is None or not self._overlap:
            return
        if not self._group_of:  # groups may have changed since the last step
            groups = enumerate(self.param_groups)
            self._group_of = {id(p): number for number, group in groups for p in group["params"]}
        number = self._group_of.get(id(param))
        if number is None:  # it is in none any more
            return
        self._fit_state(param)
        check_gradient(param, param.grad)
        shard = self._host.shards[param]
        _check_copy(shard, param.grad)
        with torch.no_grad():
            if not self._in_backward:
                self._host.begin(shard, param.grad)
                return
            if shard in self._host.early:
                raise RuntimeError(
                    "a second backward pass adds to a gradient that was stepped in the first: call "
                    "step() after each, or wrap all but the last in accumulating()"
                )
            self._masters.check_after_load(self._params())
            self._masters.follow([param])
            self._host.begin(shard, param.grad)
            if number not in self._early_settings:
                self._early_settings[number] = self._settings()[number]
            self._host.step_soon(self._early_settings[number], shard)

    def _check_whole(self, what: str) -> None:
        if self._host.early:
            raise RuntimeError(
                f"{what} can't come between a backward pass that made part of the step "
                "(in_backward=True) and step(): call step() first"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients that were sent to the host are dropped."""
        self._check_whole("zero_grad")
        self._group_of = {}
        self._host.forget(self._host.shards.values())
        super().zero_grad(set_to_none)

    @not_traced
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
        loss = self._loss(closure)
        settings = self._settings()
        early = self._check_early(settings, grad_scale, found_inf)
        self._group_of = {}
        if not early:
            self._masters.check_after_load(self._params())
        active = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if early:  # a tensor's hash is slow
            active = [[p for p in params if p not in early] for params in active]
        params = list(chain.from_iterable(active))
        grads = [p.grad for p in params if p.grad is not None]
        if params:
            self._check_states(params)
            check_gradients(params, grads)
            self._masters.follow(params)
        shards, in_place = self._host.shards, []
        on_host: Work = {}
        for group, params_of_group in zip(settings, active, strict=True):
            stay = params_of_group
            if shards:  # looked up once: a tensor's hash is slow
                found = list(map(shards.get, params_of_group))
                on_host |= dict.fromkeys([shard for shard in found if shard is not None], group)
                stay = [p for p, s in zip(params_of_group, found, strict=True) if s is None]
            in_place.append((group, stay))
        late, late_grads = [], []
        for shard in on_host:
            grad = shard.target.grad
            if grad is not None and not shard.has(grad):
                if grad.dtype is not shard.slot.dtype:
                    _check_copy(shard, grad)
                late.append(shard)
                late_grads.append(grad)
        self._host.begin_all(late, late_grads)
        scale = self._scale(grads, grad_scale, found_inf)
        if scale is None:
            self._host.forget(on_host)
            self.skipped_steps += 1
            return loss
        for group, params_of_group in in_place:
            self._step_in_place(group, params_of_group, scale)
        self._host.step(on_host, scale)
        self._host.finish()
        self._masters.written([*params, *early])
        if self._changed or self._count != sum(len(g["params"]) for g in self.param_groups):
            self._let_go()
        return loss

    def _step_in_place(self, settings: dict[str, Any], params: list[Tensor], scale: float) -> None:
        """Parameters whose state is on their own device."""
        if not params:
            return
        on_device = params[0].device.type != "cpu"
        # Those that the step itself does not write.
        left = [] if on_device else [p for p in params if not p.is_contiguous()]
        try:
            if on_device:
                masters = [self._masters.of(p) for p in params]
                step_on_device(settings, params, masters, [self.state[p] for p in params], scale)
            else:
                pointers = [self._known[id(p)][1] for p in params]
                step_on_host(settings, params, pointers, self.moments, scale)
        except BaseException:  # Ctrl-C may leave any of them behind its master
            left = params
            raise
        finally:
            for param in left:
                param.copy_(self._masters.of(param))

    def _check_early(
        self, settings: list[dict[str, Any]], grad_scale: float, found_inf: bool | Tensor | None
    ) -> set[Tensor]:
        """Parameters that the backward pass has given to be stepped."""
        shards = self._host.early
        if self._in_backward and (grad_scale != 1.0 or found_inf is not None):
            raise ValueError(
                f"grad_scale is {grad_scale} and found_inf {found_inf} in a step that began in the "
                "backward pass (in_backward=True); they must be 1.0 and None"
            )
        for shard in shards:
            grad = shard.target.grad
            if grad is None or not shard.has(grad):
                self._early_settings = {}
                done = [shard.target for shard in self._host.finish()]
                self._masters.written(done)
                for param in done:  # or another step would take them again
                    param.grad = None
                raise RuntimeError(
                    f"the gradient of a parameter, {describe(shard.target)}, was changed or "
                    "dropped after it had been stepped in the backward pass: what that gave has "
                    "its step, nothing else, and the next backward pass begins another; leave "
                    "gradients as they are, or pass in_backward=False"
                )
        for number, before in self._early_settings.items():
            for key, now in settings[number].items():
                if now != before[key]:
                    raise RuntimeError(
                        f"{key} was {before[key]} in the backward pass that made part of the step "
                        f"(in_backward=True), and is {now} at the step; set it before the backward "
                        "pass"
                    )
        self._early_settings = {}
        return {shard.target for shard in shards}

    def _scale(
        self, grads: list[Tensor], grad_scale: float, found_inf: bool | Tensor | None
    ) -> float | None:
        """What gradients are multiplied by; None: skip the step."""
        look = found_inf is None and self.nonfinite == "skip"
        if self.max_norm is not None or look:
            self.last_grad_norm = norm(grads) * grad_scale
        if found_inf or (look and not is_finite_norm(self.last_grad_norm or 0.0, self.moments)):
            return None
        if self.max_norm is None or self.last_grad_norm is None:
            return grad_scale
        # As torch.nn.utils.clip_grad_norm_ has it, which also never makes gradients larger.
        # A norm that is NaN makes all of them NaN: min returns its first argument then.
        return grad_scale * min(self.max_norm / (self.last_grad_norm + 1e-6), 1.0)

    # ---- saving and loading ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with a float32 `master` for each bfloat16 parameter; tensors are
        where the state is, on the device or in host memory. torch's AdamW takes it, and ignores
        masters, unless moments are in 8 bits."""
        self._check_whole("state_dict")
        self._masters.follow_all(self._params())
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state_dict of this class, with any fraction, of CPUAdam or of torch.optim.AdamW.

        The model's weights may be loaded before or after; where the state holds masters, the first
        step checks that they are the model's.

        Raises:
            ValueError: a state that doesn't fit; then nothing is loaded.
        """
        self._check_whole("load_state_dict")
        super().load_state_dict(state_dict)

    def _load_one(self, param: Tensor, values: dict[str, Any]) -> None:
        self._host.drop(param)
        self._masters.put(param, None)
        self.state.pop(param, None)
        if not values:
            return
        for key in ALL_MOMENTS:
            if key in values:
                self.state[param][key] = values[key].detach().clone()
        state = self._prepare(param)
        state["step"] = loaded_steps(values)
        for key, value in values.items():  # of other optimizers or the caller's own
            if key not in ("step", "steps", "master", *ALL_MOMENTS):
                state[key] = copy.deepcopy(value)
        self._masters.loaded(param, values.get("master") if "master" in state else None)


def _check_copy(shard: Shard, grad: Tensor) -> None:
    if grad.dtype == torch.float32 and shard.slot.dtype != torch.float32:
        raise ValueError(
            f"a gradient is {describe(grad)}, and its copy would be rounded to "
            f"{str(shard.slot.dtype)[6:]}: set the parameter's grad_dtype before the first step, "
            "or load the optimizer's own state_dict() after it"
        )


def _remove_hooks(hooks: dict[Tensor, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
