"""What a sample that cannot be read means for all ranks.

Ranks of one replica hold the same packs, but only those with the vision tower decode images, and
a file system may fail on one machine alone. So what one rank meets, all must hear of before they
compute, or some would wait for ever: one all-reduce of a single number a step where all is well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from vlmtrain.core.collectives import check_same


@dataclass(frozen=True)
class Failure:
    """A sample of this step that could not be read, and where it stands."""

    dp_rank: int
    microbatch: int
    segment: int
    message: str


@dataclass
class Report:
    """What one rank met while it built a step."""

    failures: list[Failure] = field(default_factory=list)
    error: str | None = None  # what ends the run
    digest: int = 0  # of the step as planned, the same on every rank


Agree = Callable[[Report], list[Report]]


def across_ranks(device: torch.device | str) -> Agree:
    """All ranks' reports, for `PackedLoader(agree=...)`; an empty list where none has anything.

    Every rank of the default process group must call it once a step. `device` is where the
    group's backend takes tensors. Ranks that have planned another step are named.
    """

    def agree(report: Report) -> list[Report]:
        bad = bool(report.failures or report.error)
        flags = torch.tensor([bad, report.digest, -report.digest], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        anything, most, least = flags.tolist()
        if most != -least:
            planned = {"the plan of this step": f"{report.digest:08x}"}
            check_same(planned, "its memory or its numpy is not to be trusted")
        if not anything:
            return []
        reports: list[Report | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        return [one for one in reports if one is not None]

    return agree
