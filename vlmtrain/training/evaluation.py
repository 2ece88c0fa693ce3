"""Loss and perplexity on held-out conversations, through the model that is trained.

Every sample counts once, on any layout: the packs of one pass are dealt to the data-parallel
ranks as in training, and what is left of the last step is filled with empty packs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from vlmtrain.core.config import LoaderSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.collective_errors import across_ranks
from vlmtrain.data.formats.sources import parse_sources
from vlmtrain.data.index import SampleIndex, scan_sources
from vlmtrain.data.loader import LoaderRank, PackedLoader
from vlmtrain.data.processor import Processor

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


def scan(
    data: str,
    section: LoaderSection,
    processor: Processor,
    spec: ModelSpec,
    pack_length: int,
    log: Callable[[str], None] | None = None,
) -> SampleIndex:
    """Read and check held-out data, in the formats and by the rules of training data.

    Raises:
        DataError: as `scan_sources`.
    """
    sources = parse_sources(data, max_samples=section.max_samples, media_root=section.media_root)
    return scan_sources(
        sources,
        processor,
        spec,
        pack_length,
        verify=section.verify,
        skip_limit=section.skip_limit if section.unreadable == "skip" else 0,
        log=log,
    )


class HeldOut:
    """Held-out conversations, measured as often as wanted. Every method is collective.

    Args:
        index: what `scan` has found; the same on every rank.
        section: how the data is read and packed.
        pack_length, global_batch: as in training; the loss does not depend on them.
    """

    def __init__(
        self,
        index: SampleIndex,
        processor: Processor,
        section: LoaderSection,
        *,
        pack_length: int,
        global_batch: int,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.index, self.processor, self.section = index, processor, section
        self.pack_length, self.global_batch, self.log = pack_length, global_batch, log

    def measure(self, engine: Engine) -> HeldOutScore:
        """One pass over the data.

        Raises:
            DataError: a file has gone or changed since the scan; on all ranks.
        """
        start = time.perf_counter()
        section = self.section
        total = 0.0
        tokens = targets = images = 0
        loader = PackedLoader(
            self.index,
            self.processor,
            engine.spec,
            section,
            LoaderRank(
                engine.data_rank,
                engine.layout.data,
                engine.decodes,
                engine.dtype,
                engine.backend.is_cuda,
            ),
            pack_length=self.pack_length,
            global_batch=self.global_batch,
            agree=across_ranks(engine.backend.device) if dist.get_world_size() > 1 else None,
            log=self.log,
            once=True,
        )
        with loader:
            for _ in range(loader.steps_per_epoch):
                result = engine.evaluate(loader.next_step())
                total += result.loss * result.target_tokens
                targets += result.target_tokens
                tokens += result.tokens
                images += result.image_tokens
        loss = total / max(targets, 1)
        return HeldOutScore(
            loss=loss,
            perplexity=math.exp(loss) if loss < 700 else math.inf,
            samples=len(self.index) - loader.skipped,
            skipped=loader.skipped + len(self.index.skipped),
            tokens=tokens,
            target_tokens=targets,
            image_tokens=images,
            seconds=time.perf_counter() - start,
        )
