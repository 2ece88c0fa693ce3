"""What CPUAdam and HybridDeviceOptimizer share: settings, groups, and states that were checked."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import check_allocated

from .checks import Snapshot, check_nonfinite, check_separate, hyperparameters, local
from .state import check_moments, mark_codes, read_state_dict


def _torch_settings() -> dict[str, Any]:
    """Of a group of torch's Adam, by whose names torch.distributed.checkpoint asks for them; a step
    reads none but those that this class replaces."""
    return torch.optim.Adam([torch.empty(0, device="cpu")]).defaults


class AdamBase(torch.optim.Optimizer):
    """See CPUAdam for the arguments."""

    state: defaultdict[Any, dict[str, Any]]
    _optimizer_load_state_dict_post_hooks: OrderedDict[int, Any]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
        moments: torch.dtype,
        nonfinite: str,
    ) -> None:
        defaults = {
            **_torch_settings(),
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            # The name under which torch.optim.Adam and AdamW keep this flag.
            "decoupled_weight_decay": decoupled,
        }
        hyperparameters(defaults)
        check_moments(moments)
        check_nonfinite(nonfinite)
        self.moments, self.nonfinite = moments, nonfinite
        #: Steps that changed nothing, because of a gradient that was not finite or `found_inf`.
        self.skipped_steps = 0
        self._forget_checks()
        super().__init__(params, defaults)
        self.register_state_dict_post_hook(mark_codes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, where = self.param_groups[-1], f"parameter group {len(self.param_groups) - 1}"
        try:
            hyperparameters(group, where)
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError(f"{where} has a parameter twice; pass each once")
            for param in group["params"]:
                self._check_param(param)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_param(self, param: Tensor) -> None:
        """Raises ValueError for a parameter that can't be stepped."""
        raise NotImplementedError

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _name(self, param: Tensor) -> str:
        """In error texts."""
        return f"parameter {next(i for i, p in enumerate(self._params()) if p is param)}"

    def _settings(self) -> list[dict[str, Any]]:
        """Of each group, what a step takes from it."""
        return [
            hyperparameters(group, f"parameter group {number}")
            for number, group in enumerate(self.param_groups)
        ]

    @staticmethod
    def _loss(closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    # ---- saving and loading ----------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state_dict of CPUAdam, HybridDeviceOptimizer or torch.optim.Adam or AdamW.
        Whether weight decay is decoupled stays as it was, as with torch's AdamW.

        Raises:
            ValueError: a state that doesn't fit; then nothing is loaded.
        """
        groups, loaded = read_state_dict(self, state_dict)
        self._forget_checks()
        self.param_groups = groups
        self.state = defaultdict(dict, {k: self.state[k] for k in self.state.keys() & loaded})
        with torch.no_grad():
            for key, values in loaded.items():
                if isinstance(key, Tensor):
                    self._load_one(key, values)
                else:
                    self.state[key] = copy.deepcopy(values)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load_one(self, param: Tensor, values: dict[str, Any]) -> None:
        """Takes a parameter's state, which fits it; an empty one: there is none."""
        raise NotImplementedError

    # ---- states that were checked ----------------------------------------------------------------

    def _forget_checks(self) -> None:
        self._snapshot: Snapshot | None = None
        #: By the id of each parameter in the snapshot: itself, and what `_pointers` made of it.
        self._known: dict[int, tuple[Tensor, Any]] = {}

    def _fit_state(self, param: Tensor) -> None:
        """Checks a parameter and its state, which is made where there is none.

        Raises:
            ValueError: a tensor is not what it was when the state was made.
        """
        raise NotImplementedError

    def _pointers(self, param: Tensor) -> Any:
        """What is kept of a parameter while its tensors stay what and where they are."""
        raise NotImplementedError

    def _check_states(self, params: list[Tensor]) -> list[Any]:
        """Before a step: states are there and fit, one by one only where something has changed;
        what `_pointers` made of each."""
        if self._snapshot is None or not self._snapshot.holds(self.state):
            self._forget_checks()
        try:
            return [self._known[id(p)][1] for p in params]
        except KeyError:
            self._check_unknown([p for p in params if id(p) not in self._known])
        return [self._known[id(p)][1] for p in params]

    def _check_unknown(self, unknown: list[Tensor]) -> None:
        self._snapshot = None
        states, known = self.state, self._known
        steps = {states[p]["step"].data_ptr() for p, _ in known.values()}
        for param in unknown:
            check_allocated(partial(self._name, param), local(param))
            self._fit_state(param)
            # A loader may have given several parameters one tensor, which each would count up.
            step = states[param]["step"]
            if step.data_ptr() in steps:
                step = states[param]["step"] = step.clone()
            steps.add(step.data_ptr())
            known[id(param)] = param, self._pointers(param)
        everything = [p for p, _ in known.values()]
        held = set(map(id, self._params()))
        check_separate([p for p in everything if id(p) in held], self._name)
        self._snapshot = Snapshot(states, everything, self._more_to_check())

    def _more_to_check(self) -> list[Tensor]:
        """Tensors beside parameters and states whose addresses are kept."""
        return []
