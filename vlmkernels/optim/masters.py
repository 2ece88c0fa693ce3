"""The float32 values that Adam steps, and whether they still are the model's.

A contiguous float32 parameter on its own device is its own master. Any other has a float32 copy,
which the model's value overrides: what the model holds is the truth.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter, ne, not_, or_

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vlmkernels._native import describe

from .host_step import HostStep

_VERSION = attrgetter("_version")
_STORAGE = attrgetter("_cdata")  # of an untyped storage


def is_own_master(param: Tensor) -> bool:
    return param.dtype == torch.float32 and param.is_contiguous()


def differs(master: Tensor, model: Tensor) -> bool:
    """Whether a master, rounded to the model's type, is another value than the model's."""
    rounded = master.detach().to(model.dtype)
    model = model.detach().to(rounded.device)
    return not bool(((model == rounded) | (model.isnan() & rounded.isnan())).all())


def _has_memory(param: Tensor) -> bool:
    return param.untyped_storage().nbytes() >= param.nbytes


def _form(param: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]:
    return param.dtype, param.shape, param.stride(), param.device


class Masters:
    """One master for each parameter that was stepped or loaded."""

    def __init__(self, host: HostStep) -> None:
        self._host = host
        #: Masters of the parameters that are not their own.
        self.copies: dict[Tensor, Tensor] = {}
        self._forms: dict[Tensor, tuple] = {}  # of each parameter, when its state was made
        # Address and version of each parameter as the last step left it, by its id: a tensor's
        # hash is slow, and thousands of tuples would wake the garbage collector. And its storage,
        # since `.data =` counts no version, and a second one may bring the first one's address.
        self._addresses: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # held, so no other one has its place
        self._compare = False  # loaded masters were not compared with the model yet
        self._read: set[Tensor] = set()  # masters to be taken from the model at the next step

    def knows(self, param: Tensor) -> bool:
        """Whether the parameter was stepped or loaded."""
        return param in self._forms

    @property
    def params(self) -> list[Tensor]:
        """Those that were stepped or loaded."""
        return list(self._forms)

    def forget(self, param: Tensor) -> None:
        for by_param in (self._forms, self.copies):
            by_param.pop(param, None)
        for by_id in (self._addresses, self._versions, self._storages):
            by_id.pop(id(param), None)
        self._read.discard(param)

    def of(self, param: Tensor) -> Tensor:
        """float32, contiguous: the parameter's memory or another."""
        master = self.copies.get(param)
        return param.detach() if master is None else master

    def put(self, param: Tensor, master: Tensor | None) -> None:
        """From now on this is the parameter's master; None: the parameter itself."""
        self._forms[param] = _form(param)
        self.copies.pop(param, None)
        if master is not None:
            self.copies[param] = master

    def loaded(self, param: Tensor, master: Tensor | None) -> None:
        """The parameter's state was loaded with this master, or without one: then it is taken from
        the model, whose weights may be loaded later."""
        if master is not None and param in self.copies:
            self.copies[param].copy_(master)
            self._compare = True
        else:
            self._read.add(param)

    def written(self, params: list[Tensor]) -> None:
        """These parameters have their masters' values."""
        if not self.copies:  # all are their own
            return
        self._addresses.update(zip(map(id, params), map(Tensor.data_ptr, params), strict=True))
        self._versions.update(zip(map(id, params), map(_VERSION, params), strict=True))
        known = map(self._storages.__contains__, map(id, params))
        for param in compress(params, map(not_, known)):
            self._storages[id(param)] = StorageWeakRef(param.untyped_storage())

    @torch.no_grad()
    def sync(self, params: Iterable[Tensor]) -> None:
        """Take the model's values of these parameters."""
        for param in params:
            if param in self.copies:
                self._host.settle(param)
                self.copies[param].copy_(param)
            self.written([param])

    def sync_all(self, params: Iterable[Tensor]) -> None:
        self.sync(params)
        self._compare = False

    def follow(self, params: list[Tensor]) -> None:
        """Take the model's values where parameters were written in place, or got other memory,
        since the last step."""
        if not self.copies:
            return
        moved = map(ne, map(Tensor.data_ptr, params), map(self._addresses.get, map(id, params)))
        written = map(ne, map(_VERSION, params), map(self._versions.get, map(id, params)))
        storages = map(_STORAGE, map(Tensor.untyped_storage, params))
        known = map(self._storages.get, map(id, params))
        replaced = map(ne, storages, (reference and reference.cdata for reference in known))
        for param in list(compress(params, map(or_, map(or_, moved, written), replaced))):
            self._storages[id(param)] = StorageWeakRef(param.untyped_storage())
            if self._stale(param):
                self.sync([param])

    @torch.no_grad()
    def follow_all(self, params: Iterable[Tensor]) -> None:
        """As `follow`, of all that have a copy; not of loaded ones before their first step: the
        model's weights may be loaded later."""
        if self._compare:
            return
        held = [p for p in params if p in self.copies and p not in self._read]
        # Not of one whose memory a trainer has released while it saves.
        self.follow([p for p in held if p.shape == self.copies[p].shape and _has_memory(p)])

    def changed(self, param: Tensor, saved: Tensor | None) -> str | None:
        """What of a parameter with state is not as it was made, as a sentence to be filled in with
        the parameter's name; `saved` is the state's master."""
        dtype, shape, stride, device = self._forms[param]
        if (
            param.dtype is not dtype
            or param.shape != shape
            or param.stride() != stride
            or param.device != device
        ):
            before, now = (
                f"{x[0]} {list(x[1])} {x[2]} on {x[3]}" for x in (self._forms[param], _form(param))
            )
            return (
                f"{{}} was {before} (type, shape, strides) when its state was made; it is {now} now"
            )
        master = self.copies.get(param)
        if master is None:
            return None
        if saved is not None and saved is not master:
            return (
                "master of {} is not the tensor that is stepped; write into that, don't replace it"
            )
        good = master.dtype == torch.float32 and master.is_contiguous()
        if not good or master.shape != param.shape:
            return f"master of {{}} is {describe(master)}; it must be float32 {list(param.shape)}"
        return None

    def check(self, params: Iterable[Tensor]) -> None:
        """Compare every master, rounded, with the model.

        Raises:
            RuntimeError: they differ; names the parameters by their numbers.
        """
        self._read_model()
        numbers = [str(i) for i, p in enumerate(params) if self._stale(p)]
        if numbers:
            raise RuntimeError(
                f"{len(numbers)} parameters differ from the optimizer's master copies (numbers "
                f"{', '.join(numbers[:8])}): load the weights that were saved with this optimizer "
                "state, or call sync_from_model() to go on from the model's"
            )
        self._compare = False

    def check_after_load(self, params: Iterable[Tensor]) -> None:
        """At the first step after a load."""
        self._read_model()
        if self._compare:
            self.check(params)

    def _read_model(self) -> None:
        if self._read:
            self.sync(self._read)
            self._read = set()

    def _stale(self, param: Tensor) -> bool:
        master = self.copies.get(param)
        return master is not None and differs(master, param)
