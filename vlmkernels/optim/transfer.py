"""Copies between a device and host memory that run while both compute.

The interface is what ordering needs and no more, so that a test can put a device behind it that
delays copies and completes them in any order (tests/optim/delayed.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

#: What a copy returns, to be waited for: opaque, an event or the like.
Ticket = Any


class Waitable(Protocol):
    """Work that was started elsewhere, a collective for example."""

    def wait(self) -> Any:
        """On a GPU the current stream, else the host, goes on when it is done."""
        ...


class Transfers(Protocol):
    """Asynchronous copies. Between the call and `wait`, neither the source may be written by the
    host nor the target be read or written by it; on the device's side, `d2h` comes after all
    work asked for before, and only work asked for after `device_wait` sees an H2D copy's result."""

    def d2h(self, source: Tensor, target: Tensor, after: Waitable | None = None) -> Ticket:
        """Begin target (host) <- source (device), converted on the device where types differ. The
        source is the device's to keep until the copy is done. `after` writes it: then the copy
        comes after that, and the host doesn't wait for either."""
        ...

    def h2d(self, source: Tensor, target: Tensor, unread: bool = False) -> Ticket:
        """Begin target (device) <- source (host), of one type: after all work asked for before,
        unless that doesn't read the target (`unread`)."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Return when the copy is done."""
        ...

    def device_wait(self, ticket: Ticket) -> None:
        """What the device is asked to do from now on waits for the copy; the host goes on."""
        ...


class HostTransfers:
    """The device is the host: a copy is done when the call returns, or, where it comes after other
    work, when it is waited for."""

    def d2h(self, source: Tensor, target: Tensor, after: Waitable | None = None) -> Ticket:
        if after is not None:
            return _Later(source, target, after)
        target.copy_(source)
        return None

    def h2d(self, source: Tensor, target: Tensor, unread: bool = False) -> Ticket:
        target.copy_(source)
        return None

    def wait(self, ticket: Ticket) -> None:
        if ticket is not None:
            ticket.finish()

    device_wait = wait


class _Later:
    """A copy that is made when it is waited for: waiting in the middle of a backward pass for what
    another process does would hold this one up."""

    def __init__(self, source: Tensor, target: Tensor, after: Waitable) -> None:
        self._work: tuple[Tensor, Tensor, Waitable] | None = (source, target, after)

    def finish(self) -> None:
        if self._work is None:
            return
        source, target, after = self._work
        self._work = None
        after.wait()
        with torch.no_grad():
            target.copy_(source)


class CudaTransfers:
    """One stream for each way beside the computing one: PCIe carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._d2h = torch.cuda.Stream(device)
        self._h2d = torch.cuda.Stream(device)

    def d2h(self, source: Tensor, target: Tensor, after: Waitable | None = None) -> Ticket:
        self._d2h.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._d2h):
            if after is not None:
                after.wait()
            source.record_stream(self._d2h)  # zero_grad may free it while it is being read
            target.copy_(source.to(target.dtype), non_blocking=True)
            return self._d2h.record_event()

    def h2d(self, source: Tensor, target: Tensor, unread: bool = False) -> Ticket:
        # The device may still be reading the old value: in the norm, in the other parameters' step.
        if not unread:
            self._h2d.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._h2d):
            target.copy_(source, non_blocking=True)
            return self._h2d.record_event()

    def wait(self, ticket: Ticket) -> None:
        ticket.synchronize()

    def device_wait(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket)


def transfers_for(device: torch.device) -> Transfers:
    """The engine for parameters on this device.

    Raises:
        ValueError: neither CUDA nor the CPU.
    """
    if device.type == "cuda":
        return CudaTransfers(device)
    if device.type == "cpu":
        return HostTransfers()
    raise ValueError(f"parameters are on {device}; offloading knows cuda and cpu")
