"""Engines of one rank, built in the process of the tests."""

from __future__ import annotations

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
