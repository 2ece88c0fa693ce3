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
    """Asynchronous copies, of many tensors a call, as each call costs a GPU's driver microseconds.
    Between the call and `wait`, neither sources may be written by the host nor targets be read or
    written by it; on the device's side, `d2h` comes after all work asked for before, and only work
    asked for after `device_wait` sees an H2D copy's result."""

    def d2h(
        self, sources: list[Tensor], targets: list[Tensor], after: Waitable | None = None
    ) -> Ticket:
        """Begin targets (host) <- sources (device), converted on the device where types differ. The
        sources are the device's to keep until the copies are done. `after` writes them: then the
        copies come after that, and the host doesn't wait for either."""
        ...

    def h2d(self, sources: list[Tensor], targets: list[Tensor], unread: bool = False) -> Ticket:
        """Begin targets (device) <- sources (host), of one type each: after all work asked for
        before, unless that doesn't read the targets (`unread`)."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Return when the copies are done."""
        ...

    def device_wait(self, ticket: Ticket) -> None:
        """What the device is asked to do from now on waits for the copies; the host goes on."""
        ...


class HostTransfers:
    """The device is the host: copies are done when the call returns, or, where they come after
    other work, when they are waited for."""

    def d2h(
        self, sources: list[Tensor], targets: list[Tensor], after: Waitable | None = None
    ) -> Ticket:
        if after is not None:
            return _Later(sources, targets, after)
        torch._foreach_copy_(targets, sources)
        return None

    def h2d(self, sources: list[Tensor], targets: list[Tensor], unread: bool = False) -> Ticket:
        torch._foreach_copy_(targets, sources)
        return None

    def wait(self, ticket: Ticket) -> None:
        if ticket is not None:
            ticket.finish()

    device_wait = wait


class _Later:
    """Copies that are made when they are waited for: waiting in the middle of a backward pass for
    what another process does would hold this one up."""

    def __init__(self, sources: list[Tensor], targets: list[Tensor], after: Waitable) -> None:
        self._work: tuple[list[Tensor], list[Tensor], Waitable] | None = (sources, targets, after)

    def finish(self) -> None:
        if self._work is None:
            return
        sources, targets, after = self._work
        self._work = None
        after.wait()
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


class CudaTransfers:
    """One stream for each way beside the computing one: PCIe carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._d2h = torch.cuda.Stream(device)
        self._h2d = torch.cuda.Stream(device)

    def d2h(
        self, sources: list[Tensor], targets: list[Tensor], after: Waitable | None = None
    ) -> Ticket:
        self._d2h.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._d2h):
            if after is not None:
                after.wait()
            for source in sources:
                source.record_stream(self._d2h)  # zero_grad may free it while it is being read
            pairs = zip(sources, targets, strict=True)
            converted = [source.to(target.dtype) for source, target in pairs]
            torch._foreach_copy_(targets, converted, non_blocking=True)
            return self._d2h.record_event()

    def h2d(self, sources: list[Tensor], targets: list[Tensor], unread: bool = False) -> Ticket:
        # The device may still be reading the old value: in the norm, in the other parameters' step.
        if not unread:
            self._h2d.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._h2d):
            torch._foreach_copy_(targets, sources, non_blocking=True)
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
