"""Loss and perplexity on held-out conversations, through the model that is trained.

Every sample counts once, on any layout: the packs of one pass are dealt to the data-parallel
ranks as in training, and what is left of the last step is filled with empty packs.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vlmtrain.core.config import LoaderSection
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


class HeldOut:
    """Held-out conversations, measured as often as wanted. Every method is collective.

    Args:
        index: of `scan`; the same on every rank.
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
    ) -> None:
        self.index, self.processor, self.section = index, processor, section
        self.pack_length, self.global_batch = pack_length, global_batch

    def measure(self, engine: Engine) -> HeldOutScore:
        """One pass over the data.

        Raises:
            DataError: a file has gone or changed since the scan; on all ranks.
        """
        start = time.perf_counter()
        total = 0.0
        tokens = targets = images = 0
        loader = open_loader(
            self.index,
            self.processor,
            self.section,
            engine,
            pack_length=self.pack_length,
            global_batch=self.global_batch,
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
