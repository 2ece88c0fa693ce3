"""How text, images and costs are distributed over samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlmtrain.core.config import MediaSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.sources import parse_sources
from vlmtrain.data.index import SampleIndex, scan_sources
from vlmtrain.data.packing.costs import sample_costs
from vlmtrain.data.packing.plan import epoch_entries, plan_epoch
from vlmtrain.data.processor import Processor
from vlmtrain.models.family import read_spec


@dataclass
class Stats:
    """How samples are distributed; arrays are [n] over samples."""

    text_tokens: np.ndarray
    image_tokens: np.ndarray
    costs: np.ndarray  # in tokens of plain text
    target_tokens: np.ndarray
    pack_length: int
    too_long: int  # samples longer than a pack
    packs: int  # of one epoch, of the others
    fill: float  # their tokens as a share of full packs
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
    ignored: Sequence[str] = (),
    media: MediaSection | None = None,
    template: str | Path | None = None,
    system: str = "",
) -> Stats:
    """Measure the data: tokens, and what the samples cost to train on. Samples longer than a pack
    are counted, and in no pack.

    Args:
        sources: what `parse_sources` takes, with `media_root` and `ignored`.
        model, media, pack_length, template, system: as `Processor.from_folder`.

    Raises:
        DataError: as `scan_sources`; media are not decoded.
    """
    spec = read_spec(model)
    processor = Processor.from_folder(
        model, spec, section=media, pack_length=pack_length, template=template, system=system
    )
    listed = parse_sources(sources, media_root=media_root, ignored=ignored)
    index = scan_sources(listed, processor, spec, sys.maxsize, verify=False)
    return _measure(index, spec, pack_length)


def _measure(index: SampleIndex, spec: ModelSpec, pack_length: int) -> Stats:
    costs = sample_costs(
        index.lengths, index.target_tokens, index.media_start, index.grids, spec
    ).sum(1)
    weights = [source.weight for source in index.sources]
    entries = epoch_entries(index.source, weights, 0, 0, index.content_hash)
    if not len(entries):
        raise DataError(f"the weights {weights} leave no sample in the first epoch; raise them")
    fitting = index.lengths <= pack_length
    number = np.cumsum(fitting) - 1  # of each among those that fit
    plan = plan_epoch(
        index.lengths[fitting],
        pack_length,
        0,
        0,
        index.content_hash,
        costs=np.rint(16 * costs[fitting]).astype(np.int64),
        entries=number[entries[fitting[entries]]],
    )
    return Stats(
        index.lengths - index.image_tokens,
        index.image_tokens,
        costs,
        index.target_tokens,
        pack_length,
        int((~fitting).sum()),
        len(plan),
        float(plan.tokens.mean() / pack_length) if len(plan) else 0.0,
        float(plan.costs.std() / plan.costs.mean()) if len(plan) else 0.0,
    )


def render_stats(figures: Stats) -> str:
    """A table of the distributions."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(figures.costs):,} samples")
    table.add_column("")
    for name in ("sum", "mean", "5%", "50%", "95%", "99%", "max"):
        table.add_column(name, justify="right")
    for name, values in figures.quantities().items():
        cells = [values.sum(), values.mean(), *np.percentile(values, (5, 50, 95, 99)), values.max()]
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    longer = (
        f"{figures.too_long:,} samples are longer than a pack of {figures.pack_length:,} tokens "
        "(--train.pack_length, --loader.too_long)\n"
    )
    return (
        capture.get()
        + (longer if figures.too_long else "")
        + (
            f"{figures.packs:,} packs of up to {figures.pack_length:,} tokens an epoch, "
            f"{figures.fill:.1%} full, costs within {figures.spread:.1%} (standard deviation)"
        )
    )


def plot_stats(figures: Stats, path: str | Path) -> Path:
    """Histograms of the quantities, as an image file: PNG where the name has no suffix. Returns its
    path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    quantities = figures.quantities()
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
        raise DataError(f"--output {path}: the plot cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
    return path
