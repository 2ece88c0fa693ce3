"""Engines of one rank, built in the process of the tests; folders that are on disk before they get
their name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.parity.worker import build
from vlmtrain.core import device


@pytest.fixture
def alone() -> Iterator[Callable[..., Any]]:
    """Builds the engine of a model folder and a case's other settings."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def engine(model: Path, **settings: Any) -> Any:
        parallel_state.destroy_model_parallel()
        return build({"model": model, "layout": {}, **settings}, device.setup(0))[0]

    yield engine
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Checks of a folder that all in it was flushed to disk before it got its name, and the folder
    that it lies in afterwards."""
    flushed: set[int] = set()
    at_rename: dict[str, set[int]] = {}
    fsync, rename = os.fsync, os.rename

    def noted(handle: int) -> None:
        fsync(handle)
        flushed.add(os.fstat(handle).st_ino)

    def renamed(old: Any, new: Any) -> None:
        at_rename[str(new)] = set(flushed)
        flushed.discard(os.stat(Path(new).parent).st_ino)
        rename(old, new)

    def check(folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            assert path.stat().st_ino in at_rename[str(folder)], path
        assert folder.parent.stat().st_ino in flushed

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    return check
