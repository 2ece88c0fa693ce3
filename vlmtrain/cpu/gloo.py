"""One network thread for all gloo groups of a process.

torch gives every group a device of its own, whose thread wakes 100 times a second, whether anything
is exchanged or not. Megatron makes about twenty groups: 21 such threads, stopped and let go in
turns beside products on two cores, cost 1.7 and 1.8% (a script that is not kept).
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@functools.cache
def _devices() -> list[dist.ProcessGroupGloo.Device]:
    """Those that torch would make: of the interfaces that GLOO_SOCKET_IFNAME names, or the one of
    this host's name."""
    names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    named = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
    return named or [dist.ProcessGroupGloo.create_default_device()]


class _Group(dist.ProcessGroupGloo):
    """A gloo group on the devices that all groups of this process share."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        for name, value in more.items():  # what a later torch gives: enable_reconfigure of 2.14
            setattr(options, name, value)
        options._devices, options._timeout = _devices(), timeout
        options._threads = 2 * len(options._devices)  # torch's number
        super().__init__(store, rank, size, options)


def install() -> None:
    """Let torch.distributed make its gloo groups so. Idempotent.

    By replacing the class: init_process_group and new_group hand no options on to gloo, and a
    backend registered by another name would not be what Megatron and torch ask for as "gloo".
    """
    distributed_c10d.ProcessGroupGloo = _Group  # type: ignore[misc]
