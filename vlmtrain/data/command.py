"""What `vlmtrain data build`, `check` and `stats` do, as functions."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.sharegpt import Record
from vlmtrain.data.formats.sources import parse_sources
from vlmtrain.data.formats.webdataset import ShardSummary, build_shards
from vlmtrain.data.index import SampleIndex, scan, scan_sources
from vlmtrain.data.packing.costs import sample_costs
from vlmtrain.data.packing.plan import epoch_entries, plan_epoch
from vlmtrain.data.processor import Processor
from vlmtrain.models.family import read_spec

_KINDS = {
    "unreadable": "with broken or missing media",
    "marks": "whose marks do not match the media",
    "too_long": "too long",
    "format": "otherwise wrong",
}
_NAMED = 5  # ids given of each set of duplicates


@dataclass
class CheckReport:
    """What `check` found."""

    samples: int = 0  # good and bad
    images: int = 0  # of good samples
    videos: int = 0
    tokens: int = 0  # of good samples; 0 without a model
    problems: list[str] = field(default_factory=list)  # one sentence each, in file order
    kinds: Counter[str] = field(default_factory=Counter)  # of the problems
    warnings: list[str] = field(default_factory=list)  # duplicates: allowed, seldom meant

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
        kinds = [f"{self.kinds[kind]} {text}" for kind, text in _KINDS.items() if self.kinds[kind]]
        total = _counted(len(self.problems), "problem") + (
            f" ({', '.join(kinds)})" if kinds else ""
        )
        lines = [*self.problems, *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join([*lines, f"{', '.join(parts)}: {total}"])


def build(
    source: str | Path,
    target: str | Path,
    *,
    model: str | Path | None = None,
    samples_per_shard: int = 1000,
    media_root: str | Path | None = None,
    overwrite: bool = False,
    verify: bool = True,
    workers: int = 4,
    progress: bool = False,
) -> ShardSummary:
    """Write a conversation file and its media as WebDataset shards.

    Args:
        model: Hugging Face folder; with it the index holds tokens and grids.
        progress: show a bar on stderr.

    Raises:
        DataError: as `build_shards`.
    """
    processor = None
    if model is not None:
        processor = Processor.from_folder(model, read_spec(model))
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    with Progress(console=console, disable=not progress, transient=not console.is_terminal) as bar:
        task = bar.add_task("samples", total=None)
        return build_shards(
            source,
            target,
            samples_per_shard=samples_per_shard,
            verify=verify,
            media_root=media_root,
            overwrite=overwrite,
            processor=processor,
            workers=workers,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def check(
    sources: str | Sequence[str | Path],
    *,
    model: str | Path | None = None,
    pack_length: int | None = None,
    media_root: str | Path | None = None,
) -> CheckReport:
    """Read all the data and collect every problem instead of stopping at the first.

    Args:
        sources: what `parse_sources` takes.
        model: a Hugging Face folder; with it, texts are tokenized and lengths checked.
        pack_length: with a model: the longest sample allowed.
        media_root: folder that relative media paths start from.

    Raises:
        DataError: the model folder cannot be used, or pack_length comes without a model.
    """
    if pack_length is not None and model is None:
        raise DataError("pack_length can only be checked with a model, whose tokenizer counts")
    if pack_length is not None and pack_length < 1:
        raise DataError(f"pack_length must be at least 1, got {pack_length}")
    processor = None
    if model is not None:
        processor = Processor.from_folder(model, read_spec(model))
    report = CheckReport()
    ids: dict[str, list[str]] = {}
    contents: dict[bytes, list[str]] = {}
    for outcome in scan(parse_sources(sources, media_root=media_root), processor, pack_length):
        report.samples += 1
        if isinstance(outcome, DataError):
            report.problems.append(str(outcome))
            report.kinds[outcome.kind] += 1
            continue
        measure = outcome.measure
        report.tokens += measure.length
        report.images += measure.kinds.count("image")
        report.videos += measure.kinds.count("video")
        ids.setdefault(measure.id, []).append(str(outcome.record.number))
        contents.setdefault(_content(outcome.record), []).append(measure.id)
    for name, records in ids.items():
        if len(records) > 1:
            report.warnings.append(f"{len(records)} samples have the id {name!r}")
    for same in contents.values():
        if len(same) > 1:
            named = ", ".join(same[:_NAMED]) + (", ..." if len(same) > _NAMED else "")
            report.warnings.append(f"{len(same)} samples are the same but for their id: {named}")
    return report


def _content(record: Record) -> bytes:
    """A hash of a record without its id; a shard's line tells where, not what: it is its own."""
    try:
        value = json.loads(record.data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return hashlib.sha256(record.data).digest()
    value = {key: item for key, item in value.items() if key != "id"}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


@dataclass
class Stats:
    """How samples are distributed; arrays are [n] over samples."""

    text_tokens: np.ndarray
    image_tokens: np.ndarray
    costs: np.ndarray  # in tokens of plain text
    target_tokens: np.ndarray
    pack_length: int
    packs: int  # of one epoch
    fill: float  # share of these packs that is no padding
    spread: float  # standard deviation of the packs' costs over their mean

    def quantities(self) -> dict[str, np.ndarray]:
        return {
            "text tokens": self.text_tokens,
            "image tokens": self.image_tokens,
            "all tokens": self.text_tokens + self.image_tokens,
            "target tokens": self.target_tokens,
            "cost (tokens)": self.costs,
        }


def stats(
    sources: str | Sequence[str | Path],
    model: str | Path,
    *,
    pack_length: int = 8192,
    media_root: str | Path | None = None,
) -> Stats:
    """Measure the data: tokens, and what the samples cost to train on.

    Raises:
        DataError: as `scan_sources`; media are not decoded.
    """
    spec = read_spec(model)
    processor = Processor.from_folder(model, spec)
    index = scan_sources(
        parse_sources(sources, media_root=media_root), processor, spec, pack_length, verify=False
    )
    return measure_index(index, spec)


def measure_index(index: SampleIndex, spec: ModelSpec) -> Stats:
    costs = sample_costs(index.lengths, index.media_start, index.grids, spec).sum(1)
    weights = [source.weight for source in index.sources]
    entries = epoch_entries(index.source, weights, 0, 0, index.content_hash)
    if not len(entries):
        raise DataError(f"the weights {weights} leave no sample in the first epoch; raise them")
    plan = plan_epoch(
        index.lengths,
        index.pack_length,
        0,
        0,
        index.content_hash,
        costs=np.rint(16 * costs).astype(np.int64),
        entries=entries,
    )
    return Stats(
        index.lengths - index.image_tokens,
        index.image_tokens,
        costs,
        index.target_tokens,
        index.pack_length,
        len(plan),
        float(plan.tokens.sum() / (len(plan) * index.pack_length)),
        float(plan.costs.std() / plan.costs.mean()),
    )


def render_stats(found: Stats) -> str:
    """A table of the distributions."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(found.costs):,} samples")
    table.add_column("")
    for name in ("sum", "mean", "5%", "50%", "95%", "99%", "max"):
        table.add_column(name, justify="right")
    for name, values in found.quantities().items():
        cells = [values.sum(), values.mean(), *np.percentile(values, (5, 50, 95, 99)), values.max()]
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get() + (
        f"{found.packs:,} packs of {found.pack_length:,} tokens an epoch, {found.fill:.1%} full, "
        f"costs within {found.spread:.1%} (standard deviation)"
    )


def plot_stats(found: Stats, path: str | Path) -> Path:
    """Histograms of the quantities, as an image file: PNG where the name has no suffix. Returns its
    path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    quantities = found.quantities()
    figure, axes = pyplot.subplots(1, len(quantities), figsize=(4 * len(quantities), 3.2))
    for axis, (name, values) in zip(axes, quantities.items(), strict=True):
        axis.hist(values, bins=50, color="#4c72b0")
        axis.set_xlabel(name)
        axis.set_yscale("log", nonpositive="clip")
    axes[0].set_ylabel("samples")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--target {path}: the plot cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
    return path


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
