"""Loss and perplexity on held-out conversations, through the model that is trained.

Every sample counts once, on any layout: the packs of one pass are dealt to the data-parallel
ranks as in training, and what is left of the last step is filled with empty packs.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from vlmtrain.core.config import LoaderSection
from vlmtrain.core.progress import progress
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.processor import Processor
from vlmtrain.training.setup import open_loader

if TYPE_CHECKING:
    from vlmtrain.training.engine import Engine


@dataclass(frozen=True)
class HeldOutScore:
    """What held-out conversations say about a model; the same on every rank."""

    loss: float  # mean over the target tokens, nats
    perplexity: float  # exp(loss)
    samples: int
    skipped: int  # could not be read; with --loader.unreadable skip
    tokens: int  # without padding
    target_tokens: int
    image_tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    engine: Engine,
    index: SampleIndex,
    processor: Processor,
    section: LoaderSection,
    *,
    pack_length: int,
    global_batch: int,
) -> HeldOutScore:
    """One pass over held-out conversations, as `scan` has found them. Collective.

    Weights of turns count as 1: with others exp(loss) would be no perplexity.

    The loss does not depend on pack_length and global_batch.

    Raises:
        DataError: a file has gone or changed since the scan; on all ranks.
    """
    start = time.perf_counter()
    total = 0.0
    tokens = targets = images = 0
    shown = dist.get_rank() == 0
    with (
        open_loader(
            index,
            processor,
            section,
            engine,
            pack_length=pack_length,
            global_batch=global_batch,
            once=True,
        ) as loader,
        progress("evaluate", "steps", shown=shown) as update,
    ):
        for step in range(loader.steps_per_epoch):
            update(step, loader.steps_per_epoch)
            packs = [replace(pack, loss_weights=None) for pack in loader.next_step()]
            result = engine.evaluate(packs)
            total += result.loss * result.target_tokens
            targets += result.target_tokens
            tokens += result.tokens
            images += result.image_tokens
    loss = total / max(targets, 1)
    return HeldOutScore(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        samples=len(index) - loader.skipped,
        skipped=loader.skipped + len(index.skipped),
        tokens=tokens,
        target_tokens=targets,
        image_tokens=images,
        seconds=time.perf_counter() - start,
    )
