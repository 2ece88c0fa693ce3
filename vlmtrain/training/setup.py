"""What training and held-out evaluation make alike from their sections: layout, loader."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from vlmtrain.core.config import LoaderSection, ParallelSection
from vlmtrain.core.errors import UserError
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.collective_errors import across_ranks
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.loader import LoaderRank, PackedLoader
from vlmtrain.data.processor import Processor
from vlmtrain.parallel.layout import section_layout

if TYPE_CHECKING:
    from vlmtrain.training.engine import Engine

say = partial(print, flush=True)


def run_layout(
    spec: ModelSpec,
    parallel: ParallelSection,
    world_size: int,
    *,
    global_batch: int,
    option: str,
) -> Layout:
    """The layout of a run with `global_batch` packs a step; 0: as few as the layout needs.

    Raises:
        UserError: the layout can't run, or the packs can't be divided over its data-parallel ranks;
            `option` is then what gave their number.
    """
    replicas = max(1, world_size // max(1, parallel.tensor * parallel.pipeline))
    layout = section_layout(
        spec,
        parallel,
        world_size,
        microbatches=global_batch // replicas if global_batch else parallel.pipeline,
    )
    if global_batch % layout.data:
        nearest = global_batch - global_batch % layout.data + layout.data
        raise UserError(
            f"{option} {global_batch} packs can't be divided over {layout.data} data-parallel "
            f"ranks; use {nearest}"
        )
    return layout


def open_loader(
    index: SampleIndex,
    processor: Processor,
    section: LoaderSection,
    engine: Engine,
    *,
    pack_length: int,
    global_batch: int,
    seed: int = 0,
    once: bool = False,
) -> PackedLoader:
    """This rank's loader of what its engine computes; the arguments are those of PackedLoader."""
    return PackedLoader(
        index,
        processor,
        engine.spec,
        section,
        LoaderRank(
            engine.data_rank,
            engine.layout.data,
            engine.decodes,
            engine.dtype,
            engine.backend.is_cuda,
            engine.layout.tensor,
        ),
        pack_length=pack_length,
        global_batch=global_batch,
        seed=seed,
        once=once,
        agree=across_ranks("cpu") if dist.get_world_size() > 1 else None,
        log=say if dist.get_rank() == 0 else None,
    )
