"""What the data looks like to the planner: packs, each with its tokens, pairs and patches.

A length histogram is a JSON file in one of three forms:

    [812, 1530, ...]                                  tokens of each sample
    [{"tokens": 812, "grids": [[1, 38, 52]]}, ...]    with its images; "image_tokens": 494 will do
    {"lengths": [512, 1024], "counts": [100, 40], "image_share": 0.7}

An entry may have its "target_tokens", else TARGET_SHARE of what is not an image counts in the loss.
"""

from __future__ import annotations

import difflib
import json
import math
import random
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmtrain.core.config import LoaderSection, MediaSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.flops import IMAGE_SHARE, TARGET_SHARE, Work
from vlmtrain.plan.hardware import PlanError

if TYPE_CHECKING:
    from vlmtrain.data.index import SampleIndex
    from vlmtrain.data.packing.plan import Policy

_SAMPLES = 20_000  # more samples than this are thinned: packs to simulate come from these
COLUMNS = len(fields(Work))
TOKENS, _PAIRS, PATCHES, _FRAMES, _WINDOWS, TARGETS = range(COLUMNS)

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Lengths:
    """Samples: tokens of each, those with a target, and the grids of its images and videos."""

    tokens: list[int]
    targets: list[int]
    grids: list[list[Grid]]
    origin: str  # for people: where it comes from
    epoch: bool = False  # all samples of one, whose packs are those of a run

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Packs:
    """Packs of at most `pack_length` tokens; `work` is float64 [packs, COLUMNS] in the order of
    Work's fields. Their padding, less than the tensor-parallel size, is left out."""

    work: np.ndarray
    pack_length: int
    origin: str
    policy: Policy = "balanced"

    @property
    def fill(self) -> float:
        """Tokens as a share of full packs."""
        return float(self.work[:, TOKENS].mean() / self.pack_length)

    @property
    def image_share(self) -> float:
        return float(self.work[:, PATCHES].sum() / 4 / self.work[:, TOKENS].sum())

    @property
    def mean(self) -> np.ndarray:
        return self.work.mean(0)

    @property
    def large(self) -> np.ndarray:
        """A pack that 99 of 100 don't exceed, column by column: what memory is planned for."""
        return np.quantile(self.work, 0.99, axis=0)


def make_packs(
    lengths: Lengths, spec: ModelSpec, pack_length: int, policy: Policy = "balanced"
) -> Packs:
    """Pack the samples as training does and total the work of each pack.

    Raises:
        PlanError: a sample is longer than a pack.
    """
    from vlmtrain.data.packing.plan import plan_epoch

    max_tokens = max(lengths.tokens)
    if max_tokens > pack_length:
        raise PlanError(
            f"{lengths.origin} has a sample of {max_tokens} tokens and a pack holds {pack_length}; "
            f"raise --pack_length to {max_tokens} or more"
        )
    chosen = range(len(lengths))
    if len(lengths) > _SAMPLES:
        chosen = sorted(random.Random(0).sample(chosen, _SAMPLES))  # type: ignore[assignment]
    tokens = np.array([lengths.tokens[i] for i in chosen], dtype=np.int64)
    rows: np.ndarray = np.zeros((len(tokens), COLUMNS))
    for place, i in enumerate(chosen):
        sample = [lengths.tokens[i]], lengths.grids[i]
        rows[place] = Work.of(*sample, spec.vision, targets=lengths.targets[i]).values()
    copies = 1
    # A handful of samples tells of many: repeat them to fill some packs.
    if tokens.sum() < 64 * pack_length and not lengths.epoch:
        copies = math.ceil(64 * pack_length / int(tokens.sum()))
        tokens, rows = np.tile(tokens, copies), np.tile(rows, (copies, 1))
    packs = plan_epoch(tokens, pack_length, 0, 0, "plan", policy=policy)
    work = np.array([rows[pack].sum(0) for pack in packs])
    return Packs(work, pack_length, lengths.origin, policy)


# --- sources ----------------------------------------------------------------------------------


def typical(spec: ModelSpec, pack_length: int = 8192) -> Lengths:
    """A mix of 35% natural images, 15% documents, 10% charts, 8% OCR, 7% diagrams, 5% with several
    images and 20% text: mean about 1,300 tokens, median about 900, 1% above 6,200, 72% of all
    tokens from images. Used where no data is given.

    Raises:
        PlanError: packs too short for any of its images.
    """
    rng = random.Random(0)

    def image(mean: float, spread: float, most: int) -> Grid:
        """Log-normal number of tokens around a median, of a random shape."""
        units = min(most, max(16.0, mean * math.exp(spread * rng.gauss(0, 1))))
        ratio = math.exp(0.3 * rng.gauss(0, 1))
        rows = max(2, round(math.sqrt(units * ratio)))
        columns = max(2, round(units / rows))
        return 1, rows * spec.vision.spatial_merge_size, columns * spec.vision.spatial_merge_size

    #        share, images, median tokens, spread, most, median text
    kinds = (
        (0.35, (1, 1), 560, 0.45, 1600, 190),
        (0.15, (1, 1), 1900, 0.35, 3600, 280),
        (0.10, (1, 1), 560, 0.40, 1600, 150),
        (0.08, (1, 1), 1400, 0.50, 3600, 240),
        (0.07, (1, 1), 520, 0.40, 1600, 150),
        (0.05, (3, 12), 700, 0.35, 1600, 380),
        (0.20, (0, 0), 0, 0.0, 0, 420),
    )
    tokens, targets, grids = [], [], []
    for _ in range(6000):
        kind = rng.choices(kinds, [k[0] for k in kinds])[0]
        _, number, median, spread, most, text = kind
        count = rng.randint(*number)
        images = [image(median, spread, most) for _ in range(count)]
        visual = sum(t * h * w for t, h, w in images) // spec.vision.merge_unit
        words = int(min(2000, text * math.exp(0.8 * rng.gauss(0, 1)))) + 12
        if visual + words > min(pack_length, 8000):
            continue
        tokens.append(visual + words)
        targets.append(round(TARGET_SHARE * words))
        grids.append(images)
    if not any(grids):
        raise PlanError(
            f"--pack_length {pack_length} is too short for a typical mix of images and text; pass "
            "--length_histogram, or 512 tokens or more"
        )
    return Lengths(tokens, targets, grids, "a typical mix of images and text (no data was given)")


def read_histogram(path: Path, spec: ModelSpec) -> Lengths:
    """Read a JSON file of lengths.

    Raises:
        PlanError: missing file (naming the most similar one there), or contents of another form.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = _similar(path)
        hint = f"; did you mean {near}?" if near else ""
        raise PlanError(
            f"--length_histogram {path} can't be read: {error.strerror}{hint}"
        ) from error
    except ValueError as error:
        raise PlanError(f"--length_histogram {path} is not valid JSON: {error}") from error
    share = IMAGE_SHARE
    if isinstance(value, dict):
        value, share = _expand(value, path)
    if not isinstance(value, list) or not value:
        raise PlanError(
            f"--length_histogram {path} must be a list of token counts, or an object with "
            f'"lengths" and "counts"; it is {_show(value)}'
        )
    where = f"--length_histogram {path}: entry"
    samples = [_entry(x, share, f"{where} {i}", spec) for i, x in enumerate(value)]
    tokens, targets, grids = (list(column) for column in zip(*samples, strict=True))
    return Lengths(tokens, targets, grids, f"{path} ({len(tokens):,} samples)")


def _expand(value: dict[str, Any], path: Path) -> tuple[list[int], float]:
    lengths, counts = value.get("lengths"), value.get("counts")
    share = value.get("image_share", IMAGE_SHARE)
    where = f"--length_histogram {path}"
    if not isinstance(lengths, list) or not lengths:
        raise PlanError(f'{where} needs "lengths", a list of token counts')
    _check_keys(value, ("lengths", "counts", "image_share"), where)
    if not all(_is_int(n) and n > 0 for n in lengths):
        raise PlanError(
            f'{where}: "lengths" must be integers of at least 1; it is {_show(lengths)}'
        )
    counts = [1] * len(lengths) if counts is None else counts
    if not isinstance(counts, list) or len(counts) != len(lengths):
        raise PlanError(
            f'{where}: "counts" must be a list as long as "lengths" ({len(lengths)}); it is '
            f"{_show(counts)}"
        )
    if any(not _is_int(c) or c < 0 for c in counts) or not sum(counts):
        raise PlanError(f'{where}: "counts" must be integers of at least 0, not all 0')
    if not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise PlanError(f'{where}: "image_share" is {share!r}; it must be at least 0 and below 1')
    # Thinned in proportion, so that a histogram of millions stays small: every so many-th sample.
    every = max(1.0, sum(counts) / _SAMPLES)
    places = np.ceil(np.cumsum([0, *counts], dtype=np.float64) / every - 0.5)
    repeats = np.diff(places).astype(np.int64).tolist()
    thinned = [n for n, r in zip(lengths, repeats, strict=True) for _ in range(r)]
    longest = max(n for n, c in zip(lengths, counts, strict=True) if c)
    return thinned if longest in thinned else [*thinned, longest], float(share)


def _entry(entry: Any, share: float, where: str, spec: ModelSpec) -> tuple[int, int, list[Grid]]:
    """Tokens, those with a target, and grids."""
    if _is_int(entry):
        entry = {"tokens": entry, "image_tokens": int(entry * share)}
    if not isinstance(entry, dict) or not _is_int(entry.get("tokens")) or entry["tokens"] < 1:
        raise PlanError(f"{where} must have tokens of at least 1; it is {_show(entry)}")
    _check_keys(entry, ("tokens", "grids", "image_tokens", "target_tokens"), where)
    merge, tokens = spec.vision.spatial_merge_size, entry["tokens"]
    grids = entry.get("grids")
    for name in ("image_tokens", "target_tokens"):
        number = entry.get(name, 0)
        if not _is_int(number) or not 0 <= number <= tokens:
            raise PlanError(f"{where}: {name} must be from 0 to tokens; it is {number!r}")
    if grids is None:
        visual = entry.get("image_tokens", 0)
        return tokens, _targets(entry, visual), _grids_of(visual, merge)
    checked: list[Grid] = []
    for grid in grids if isinstance(grids, list) else [grids]:
        ok = isinstance(grid, list) and len(grid) == 3 and all(_is_int(x) and x > 0 for x in grid)
        if not ok or grid[1] % merge or grid[2] % merge:
            raise PlanError(
                f"{where}: a grid is [frames, rows, columns] of patches, rows and columns multiples"
                f" of {merge}; it is {_show(grid)}"
            )
        checked.append((grid[0], grid[1], grid[2]))
    visual = sum(t * h * w for t, h, w in checked) // merge**2
    if visual > tokens:
        raise PlanError(f"{where}: its grids are {visual} tokens, more than its tokens, {tokens}")
    if entry.get("image_tokens", visual) != visual:
        raise PlanError(
            f"{where}: its grids are {visual} tokens and image_tokens is {entry['image_tokens']}; "
            "leave image_tokens out"
        )
    return tokens, _targets(entry, visual), checked


def _check_keys(value: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in value.keys() - set(known):
        near = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise PlanError(f"{where} has the key {key!r}, which is not read; {hint}")


def _targets(entry: dict[str, Any], visual: int) -> int:
    return entry.get("target_tokens", round(TARGET_SHARE * (entry["tokens"] - visual)))


def _grids_of(visual: int, merge: int) -> list[Grid]:
    """Nearly square images of at most 4,096 tokens that make up `visual` tokens."""
    grids: list[Grid] = []
    while visual > 0:
        part = min(visual, 4096)
        rows = max(1, math.isqrt(part))
        grids.append((1, rows * merge, part // rows * merge))
        visual -= rows * (part // rows)
        if visual < 4:
            break
    return grids


def read_index(
    data: str,
    model: Path,
    spec: ModelSpec,
    pack_length: int,
    loader: LoaderSection,
    media: MediaSection,
) -> SampleIndex:
    """Scan conversation files or shards, as training would, but for the decoding of all media.

    Raises:
        UserError: unreadable data, or a model folder without a tokenizer.
    """
    from vlmtrain.data.index import scan_data
    from vlmtrain.data.processor import Processor

    processor = Processor.from_folder(
        model,
        spec,
        section=media,
        pack_length=pack_length,
        template=loader.template or None,
        system=loader.system,
    )
    return scan_data(data, replace(loader, verify=False), processor, pack_length)


def from_index(index: SampleIndex, origin: str) -> Lengths:
    """The lengths of a `SampleIndex`, of as many samples of its first epoch, in which sources have
    their weights, as are used (the longest too)."""
    from vlmtrain.data.packing.plan import epoch_entries

    weights = [source.weight for source in index.sources]
    chosen = epoch_entries(index.source, weights, 0, 0, index.content_hash)
    if not len(chosen):  # weights so small that not every epoch has a sample
        scale = len(index) / np.asarray(weights)[index.source].sum()
        chosen = epoch_entries(index.source, [scale * w for w in weights], 0, 0, "")
    if len(chosen) > _SAMPLES:
        longest = chosen[int(index.lengths[chosen].argmax())]
        chosen = np.random.default_rng(0).choice(chosen, _SAMPLES, replace=False)
        chosen = np.sort(np.append(chosen, longest) if longest not in chosen else chosen)
    grids: list[list[Grid]] = []
    for sample in chosen.tolist():
        media = index.grids[index.media_start[sample] : index.media_start[sample + 1]]
        grids.append([(int(t), int(h), int(w)) for t, h, w in media.tolist()])
    lengths, targets = index.lengths[chosen].tolist(), index.target_tokens[chosen].tolist()
    origin += f" ({len(index):,} samples{', weighted' if set(weights) != {1} else ''})"
    return Lengths(lengths, targets, grids, origin, epoch=True)


def _similar(path: Path) -> Path | None:
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix == ".json"]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, 1, 0.3)
    return path.parent / near[0] if near else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
