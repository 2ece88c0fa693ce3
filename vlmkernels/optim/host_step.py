"""Adam in host memory for tensors that live on a device: gradients D2H, new values H2D.

Where the bytes go, for a bfloat16 tensor of n elements: 2n D2H over PCIe, n times the 28 bytes of
the CPU's step through host memory, 2n H2D. Page-locked memory is 2n: one slot, in which the
gradient arrives and which the same pass of the step overwrites with the new value for the device.

With clipping, all gradients are in host memory before the first step is made, since the factor is
known only when the last gradient is: so their slots can't be a small ring, and nothing ever has to
be rolled back. The alternative, to step into shadow copies and commit when the norm is known, takes
12n more host memory and as much more traffic on what limits the step, the host's memory bandwidth;
see docs/optimizer.md. Where nothing needs the whole gradient, `step_soon` steps a bucket as soon as
it has arrived, in a thread of its own, while the backward pass goes on.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .arena import PinnedArena
from .native import AdamBatch, Pointers, pointers_of
from .state import moment_tensors, state_bytes
from .transfer import Ticket, Transfers, Waitable, transfers_for


@dataclass(eq=False)
class Shard:
    """A tensor of the model whose optimizer state is in host memory.

    `state` holds step and moments (state.py) and belongs to the optimizer, which may replace what
    is in it; `master` is the one float32 copy. Host tensors are contiguous in the target's shape.
    """

    target: Tensor  # on the device, what the model reads: float32 or bfloat16
    master: Tensor  # host, float32
    state: dict[str, Any]
    slot: Tensor  # page-locked, the type in which gradients arrive
    value: Tensor  # page-locked, the target's type: slot or master where that fits
    grad: Tensor | None = None  # on the device: whose copy `slot` is or will be
    version: int = 0  # of `grad`, when its copy began
    factor: float = 1.0  # by which the gradient was multiplied in place since, see AdamBatch.step
    d2h: Ticket = None
    h2d: list[Ticket] = field(default_factory=list)
    #: `pointers` of all elements, kept by an owner that resets them when a tensor may be another.
    whole: Pointers | None = None

    def has(self, grad: Tensor) -> bool:
        """Whether the slot gets this gradient as it is now, as far as its version tells."""
        same = self.grad is grad or (
            self.grad is not None
            and self.grad.data_ptr() == grad.data_ptr()
            and self.grad.dtype == grad.dtype
            and self.grad.shape == grad.shape
            and self.grad.stride() == grad.stride()
        )
        return same and self.version == grad._version

    @property
    def rounds(self) -> bool:
        return self.value is not self.master

    @property
    def moments(self) -> torch.dtype:
        return moment_tensors(self.state)[0].dtype

    def pointers(
        self, first: int = 0, last: int | None = None, step: Tensor | None = None
    ) -> Pointers:
        """Of elements [first, last); all by default, as `step` is the state's."""
        m, v, scales = moment_tensors(self.state)
        low = self.value if self.rounds else None
        count = (self.master.numel() if last is None else last) - first
        step = self.state["step"] if step is None else step
        return pointers_of(self.master, m, v, step, low, first, scales, count)


#: Shards to step and their groups' settings. No tuples: thousands wake the garbage collector.
Work = dict[Shard, dict[str, Any]]


@functools.cache
def _warn_of_one_thread() -> None:
    """torchrun and accelerate set OMP_NUM_THREADS=1 for several processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    if torch.get_num_threads() == 1 and share > 1:
        warnings.warn(
            f"Adam on the host runs on one thread, where this process has {share} cores: set "
            f"OMP_NUM_THREADS={share}, or call torch.set_num_threads",
            stacklevel=2,
        )


def _begin_thread(threads: int, device: torch.device) -> None:
    """A new thread has the system's number of threads, and the first GPU."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


class HostStep:
    """Steps shards; one for a device.

    Args:
        transfers: the copies; None: as the device needs.
        bucket_bytes: of gradients stepped at a time, before their new values go to the device:
            small enough that little is left to copy after the last, large enough to be worth the
            calls.
    """

    def __init__(self, transfers: Transfers | None, bucket_bytes: int) -> None:
        self._transfers, self._bucket_bytes = transfers, bucket_bytes
        self._arena: PinnedArena | None = None
        self._device = torch.device("cpu")
        #: By the caller's key: the parameter, or a master.
        self.shards: dict[Tensor, Shard] = {}
        self._begun: dict[Shard, None] = {}  # in the order in which gradients came
        #: Given to `step_soon` and not to `finish` yet.
        self.early: dict[Shard, None] = {}
        self._bucket: Work = {}  # of them, not with the thread yet
        self._filled = 0  # bytes of its gradients
        self._running: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    def connect(self, device: torch.device) -> None:
        """Before the first shard: targets will be on this device.

        Raises:
            ValueError: offloading doesn't know it.
        """
        self._device = device
        if device.type == "cuda":
            _warn_of_one_thread()
        if self._transfers is None:
            self._transfers = transfers_for(device)
        if self._arena is None:
            self._arena = PinnedArena(device=device)

    @property
    def transfers(self) -> Transfers:
        assert self._transfers is not None
        return self._transfers

    @property
    def arena(self) -> PinnedArena:
        """Memory that the device copies to and from."""
        assert self._arena is not None
        return self._arena

    def memory(self) -> dict[str, int]:
        """Bytes: host_state (moments and masters), pinned (page-locked, in use), pinned_peak (most
        that was reserved)."""
        found = 0
        for shard in self.shards.values():
            found += state_bytes(shard.state)
            found += 0 if "master" in shard.state else 4 * shard.master.numel()
        if self._arena is None:  # no parameter yet
            return {"host_state": 0, "pinned": 0, "pinned_peak": 0}
        pinned = {"pinned": self._arena.used_bytes, "pinned_peak": self._arena.peak_bytes}
        return {"host_state": found, **pinned}

    def trim(self) -> None:
        """Give memory that nothing uses any more back to the system."""
        if self._arena is not None:
            self._arena.trim()

    def make_shard(
        self,
        target: Tensor,
        state: dict[str, Any],
        grad_type: torch.dtype,
        master: Tensor | None = None,
    ) -> Shard:
        """A shard, not in `shards` yet, with a copy of this master or, to full precision what the
        model has, of the target. Gradients are copied as `grad_type`."""
        shape = target.shape
        if target.dtype == torch.float32:
            copy = value = self.arena.empty(shape, torch.float32)
        else:
            copy = torch.empty(shape, dtype=torch.float32, device="cpu")
        slot = self.arena.empty(shape, grad_type)
        if target.dtype != torch.float32:
            same = grad_type == target.dtype
            value = slot if same else self.arena.empty(shape, target.dtype)
        with torch.no_grad():
            copy.copy_(target if master is None else master)
        return Shard(target, copy, state, slot, value)

    def begin(self, shard: Shard, grad: Tensor, after: Waitable | None = None) -> None:
        """Start this gradient's copy D2H; a later call replaces an earlier one's gradient. `after`
        is what writes the gradient, if that was only started."""
        self._begin([shard], [grad], after)

    def begin_all(self, shards: list[Shard], grads: list[Tensor]) -> None:
        """As `begin` for each, with a copy for each bucket."""
        first = filled = 0
        for last, shard in enumerate(shards, 1):
            filled += shard.slot.nbytes
            if filled >= self._bucket_bytes or last == len(shards):
                self._begin(shards[first:last], grads[first:last], None)
                first, filled = last, 0

    def _begin(self, shards: list[Shard], grads: list[Tensor], after: Waitable | None) -> None:
        for shard in shards:
            shard.grad = None  # where Ctrl-C comes before the end, it is begun again
            if shard.d2h is not None or shard.h2d:
                self._settle(shard)
        full = [shard for shard in shards if shard.slot.numel()]
        if full:
            sources = [grad for grad in grads if grad.numel()]
            ticket = self.transfers.d2h(sources, [shard.slot for shard in full], after)
            for shard in full:
                shard.d2h = ticket
        for shard, grad in zip(shards, grads, strict=True):
            self._begun.pop(shard, None)
            self._begun[shard] = None
            shard.version, shard.factor = grad._version, 1.0
            shard.grad = grad

    def before_change(self) -> None:
        """The device is about to change gradients in place: it waits until those that were begun
        have been copied."""
        for shard in self.shards.values():
            if shard.d2h is not None:
                self.transfers.device_wait(shard.d2h)

    def settle(self, key: Tensor | None = None) -> None:
        """Return when no copy of this shard, or of any, is under way: the slot may be written, the
        master read or moved."""
        for shard in self.shards.values() if key is None else [self.shards.get(key)]:
            if shard is not None:
                self._settle(shard)

    def _settle(self, shard: Shard) -> None:
        if shard.d2h is not None:
            self.transfers.wait(shard.d2h)
        for ticket in shard.h2d:
            self.transfers.wait(ticket)
        shard.d2h, shard.h2d = None, []

    def forget(self, shards: Iterable[Shard]) -> None:
        """Drop gradients that were begun and won't be stepped."""
        for shard in shards:
            self._settle(shard)
            shard.grad = None
            self._begun.pop(shard, None)

    def drop(self, key: Tensor) -> None:
        """The state of this shard, if there is one, is no longer in host memory."""
        shard = self.shards.pop(key, None)
        if shard is not None:
            self.forget([shard])

    @torch.no_grad()
    def step(self, work: Work, grad_scale: float = 1.0) -> None:
        """One Adam step for each shard, whose gradients were begun.

        The device is told to wait for the new values with its next work. Returns when all steps
        are made; the last new values may still be on their way H2D. What interrupts it (Ctrl-C)
        leaves each target as its master, and gradients to be begun again.
        """
        order = [shard for shard in self._begun if shard in work]
        assert len(order) == len(work)
        try:
            self._step_buckets({shard: work[shard] for shard in order}, grad_scale)
            self._stepped(order)
        except BaseException:
            self.forget(order)  # a slot may hold a new value where its gradient was
            for shard in order:
                shard.target.copy_(shard.master)
            raise

    def step_soon(self, settings: dict[str, Any], shard: Shard) -> None:
        """One Adam step for a shard whose gradient was begun and is final, as soon as it arrives.

        The device's work up to now must be the last that reads the target's old value. `finish`
        must be called before anything else is done with the shard.
        """
        self.early[shard] = None
        self._bucket[shard] = settings
        self._filled += shard.slot.nbytes
        if self._filled >= self._bucket_bytes:
            self._start_bucket()

    def _start_bucket(self) -> None:
        if self._thread is None:
            inherited = torch.get_num_threads(), self._device
            self._thread = ThreadPoolExecutor(1, "optimizer", _begin_thread, inherited)
        work, self._bucket, self._filled = self._bucket, {}, 0
        self._running.append(self._thread.submit(self._step_buckets, work, 1.0, True))

    def finish(self) -> list[Shard]:
        """Return when all steps of `step_soon` are made: those shards. Else as `step`."""
        if self._bucket:
            self._start_bucket()
        while self._running:
            wait(self._running[:1])  # where Ctrl-C ends it, the next call goes on
            self._running.pop(0).result()
        shards, self.early = list(self.early), {}
        with torch.no_grad():
            self._stepped(shards)
        return shards

    @torch.no_grad()
    def _step_buckets(self, work: Work, grad_scale: float, unread: bool = False) -> None:
        bucket: Work = {}
        filled = 0
        for shard, settings in work.items():
            size = shard.slot.nbytes
            cuts = self._cuts(shard)
            if not cuts:
                bucket[shard] = settings
                filled += size
            if cuts or filled >= self._bucket_bytes:
                self._step_bucket(bucket, grad_scale, unread)
                bucket, filled = {}, 0
            for first, last in cuts:
                self._step_piece(shard, settings, first, last, grad_scale, unread)
        self._step_bucket(bucket, grad_scale, unread)

    def _stepped(self, shards: Iterable[Shard]) -> None:
        tickets = {}
        for shard in shards:
            shard.grad = None
            self._begun.pop(shard, None)
            for ticket in shard.h2d:
                tickets[id(ticket)] = ticket
        for ticket in tickets.values():
            self.transfers.device_wait(ticket)

    def _cuts(self, shard: Shard) -> list[tuple[int, int]]:
        """Ranges of a bucket, so that a large tensor's first part is copied while the next is
        stepped; at multiples of 4,096 elements, which no vector, random number or block crosses.
        Empty where it stays whole."""
        if shard.slot.nbytes <= self._bucket_bytes:
            return []
        numel = shard.master.numel()
        length = max(self._bucket_bytes // shard.slot.itemsize // 4096, 1) * 4096
        if numel <= length or not shard.target.is_contiguous():
            return []
        return [(first, min(first + length, numel)) for first in range(0, numel, length)]

    def _step_bucket(self, bucket: Work, grad_scale: float, unread: bool) -> None:
        groups: dict[tuple[int, float], list[Shard]] = {}
        for shard, settings in bucket.items():
            self._arrived(shard)
            groups.setdefault((id(settings), shard.factor), []).append(shard)
        for (_, factor), shards in groups.items():
            batch = AdamBatch(shards[0].moments)
            slots = [shard.slot for shard in shards]
            batch.add(slots, slots, [shard.whole or shard.pointers() for shard in shards])
            batch.step(bucket[shards[0]], grad_scale, factor)
        full = [shard for shard in bucket if shard.slot.numel()]
        self._send(full, [s.value for s in full], [s.target for s in full], unread)

    def _step_piece(
        self,
        shard: Shard,
        settings: dict[str, Any],
        first: int,
        last: int,
        grad_scale: float,
        unread: bool,
    ) -> None:
        self._arrived(shard)
        slot, value, target = (
            x.view(-1)[first:last] for x in (shard.slot, shard.value, shard.target)
        )
        # The native call counts up the step of the last piece, a copy for the others.
        step = shard.state["step"]
        if last < shard.slot.numel():
            step = step.clone()
        batch = AdamBatch(shard.moments)
        batch.add([slot], [slot], [shard.pointers(first, last, step)])
        batch.step(settings, grad_scale, shard.factor)
        self._send([shard], [value], [target], unread)

    def _arrived(self, shard: Shard) -> None:
        if shard.d2h is not None:
            self.transfers.wait(shard.d2h)
            shard.d2h = None

    def _send(
        self, shards: list[Shard], values: list[Tensor], targets: list[Tensor], unread: bool
    ) -> None:
        ticket = self.transfers.h2d(values, targets, unread) if shards else None
        if ticket is not None:
            for shard in shards:
                shard.h2d.append(ticket)
