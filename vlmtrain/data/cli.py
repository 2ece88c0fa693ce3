"""What `vlmtrain data build` and `vlmtrain data check` do, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlmtrain.data.errors import DataError
from vlmtrain.data.index import scan
from vlmtrain.data.processor import Processor
from vlmtrain.data.webdataset import ShardSummary, build_shards
from vlmtrain.models.spec import ModelSpec


@dataclass
class CheckReport:
    """What `check` found."""

    samples: int = 0  # good and bad
    images: int = 0  # of good samples
    videos: int = 0
    tokens: int = 0  # of good samples; 0 without a model
    problems: list[str] = field(default_factory=list)  # one sentence each, in file order

    @property
    def ok(self) -> bool:
        return not self.problems

    def render(self) -> str:
        """The report as text: one line a problem, then the counts."""
        parts = [
            _counted(self.samples, "sample"),
            _counted(self.images, "image"),
            _counted(self.videos, "video"),
        ]
        if self.tokens:
            parts.append(_counted(self.tokens, "token"))
        counts = ", ".join(parts)
        return "\n".join([*self.problems, f"{counts}: {_counted(len(self.problems), 'problem')}"])


def build(
    source: str | Path,
    target: str | Path,
    *,
    samples_per_shard: int = 1000,
    overwrite: bool = False,
) -> ShardSummary:
    """Write a conversation file and its media as WebDataset shards.

    Raises:
        DataError: as `build_shards`; nothing half-written is left.
    """
    return build_shards(source, target, samples_per_shard=samples_per_shard, overwrite=overwrite)


def check(
    sources: Sequence[str | Path],
    *,
    model: str | Path | None = None,
    pack_length: int | None = None,
) -> CheckReport:
    """Read all the data and collect every problem instead of stopping at the first.

    Args:
        sources: .json or .jsonl files, or folders of shards.
        model: a Hugging Face folder; with it, texts are tokenized and lengths checked.
        pack_length: with a model: the longest sample allowed.

    Raises:
        DataError: the model folder cannot be used, or pack_length comes without a model.
    """
    if pack_length is not None and model is None:
        raise DataError("pack_length can only be checked with a model, whose tokenizer counts")
    processor = None
    if model is not None:
        processor = Processor.from_folder(model, ModelSpec.from_folder(model))
    report = CheckReport()
    for outcome in scan(sources, processor, pack_length):
        report.samples += 1
        if isinstance(outcome, DataError):
            report.problems.append(str(outcome))
            continue
        report.tokens += outcome.length
        for media in outcome.sample.media:
            if media.kind == "image":
                report.images += 1
            else:
                report.videos += 1
    return report


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
