"""What a module that runs as one of several ranks begins and ends with (started by ranks.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vlmtrain.core import device, launch


@contextmanager
def one_rank() -> Iterator[device.Backend]:
    """This process as a rank; all ranks leave together."""
    process = launch.joined() or launch.Process(0, 1, 0)
    torch.set_num_threads(1)
    backend = device.setup(process.local_rank)
    launch.connect(process, backend.process_group)
    yield backend
    dist.barrier()
    dist.destroy_process_group()


def serve(work: Callable[[Any, device.Backend], Any]) -> None:
    """`work` of the cases in the file that the command line names; rank 0 writes the result beside
    it, as `ranks.run_cases` reads it."""
    path = Path(sys.argv[1])
    with one_rank() as backend:
        result = work(torch.load(path, weights_only=False), backend)
        if dist.get_rank() == 0:
            torch.save(result, path.with_suffix(".out"))
