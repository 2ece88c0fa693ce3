"""Errors that one rank meets and all ranks must end by, said once.

Two collectives around work that reads input: what fails on one rank is raised on every rank,
marked so that only rank 0 prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from vlmtrain.errors import UserError

T = TypeVar("T")


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on rank 0; every rank returns its (picklable) value or raises its UserError."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except UserError as error:
            box[1] = str(error)
        except Exception:  # the others must hear of it too, then it goes its way
            dist.broadcast_object_list([None, "rank 0 failed while reading the input"], src=0)
            raise
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise shared_error(box[1])
    return box[0]


def on_every_rank(work: Callable[[], T]) -> T:
    """Run `work` on all ranks; a UserError on any is raised on all, the lowest rank's first.

    `work` must not wait for other ranks after the point where it can fail.
    """
    value: Any = None
    mine: str | None = None
    try:
        value = work()
    except UserError as error:
        mine = str(error)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    for message in errors:
        if message is not None:
            raise shared_error(message)
    return value


def shared_error(message: str) -> UserError:
    """An error that every rank raises at the same point: rank 0 prints it."""
    error = UserError(message)
    error.print_here = dist.get_rank() == 0
    return error
