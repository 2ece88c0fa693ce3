"""What is wrong with conversations and their media: every problem, not the first alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlmtrain.core.config import MediaSection
from vlmtrain.core.files import exists, is_dir, write_bytes, writing
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.json_source import Record
from vlmtrain.data.formats.sources import SourceSpec, parse_sources
from vlmtrain.data.index import counted, scan
from vlmtrain.data.processor import Measure, Processor
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
    # Of good samples the largest by what sets the peak of memory: name -> (size, sample id).
    largest: dict[str, tuple[int, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one sentence each, in file order
    kinds: Counter[str] = field(default_factory=Counter)  # of the problems
    warnings: list[str] = field(default_factory=list)  # duplicates: allowed, seldom meant

    @property
    def ok(self) -> bool:
        return not self.problems

    def note_size(self, measure: Measure) -> None:
        """A good sample, measured with a model."""
        patches = [math.prod(layout.grid) for layout in measure.layouts]
        sizes = {
            "patches in a sample": sum(patches),
            "patches in an image or video": max(patches, default=0),
            "tokens in a sample": measure.length,
        }
        for what, size in sizes.items():
            self.largest[what] = max(self.largest.get(what, (0, "")), (size, measure.id))

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
        if self.largest:
            sizes = ((what, *most) for what, most in self.largest.items())
            named = ", ".join(f"{size:,} {what} ({name})" for what, size, name in sizes if size)
            lines.append(f"what sets the peak of memory: {named}")
        return "\n".join([*lines, f"{', '.join(parts)}: {total}"])


def check(
    sources: str | Sequence[str | Path],
    *,
    model: str | Path | None = None,
    pack_length: int | None = None,
    media_root: str | Path | None = None,
    ignored: Sequence[str] = (),
    media: MediaSection | None = None,
    template: str | Path | None = None,
    system: str = "",
    write_good: Path | None = None,
) -> CheckReport:
    """Read all the data and collect every problem instead of stopping at the first.

    Args:
        sources: what `parse_sources` takes.
        model: a Hugging Face folder; with it, texts are tokenized and lengths checked.
        pack_length: with a model: the longest sample allowed.
        media_root: folder that relative media paths start from.
        ignored: keys and marks of records that are not looked at.
        media: sizes of images and videos instead of the model's.
        template, system: as `Processor.from_folder`.
        write_good: JSONL file to write with the records that have no problem.

    Raises:
        DataError: the model folder cannot be used, pack_length comes without a model, or
            write_good is given for what is no JSON, or for a folder where media would not be found.
    """
    if pack_length is not None and model is None:
        raise DataError("pack_length can only be checked with a model, whose tokenizer counts")
    processor = None
    if model is not None:
        processor = Processor.from_folder(
            model,
            read_spec(model),
            section=media,
            pack_length=pack_length,
            template=template,
            system=system,
        )
    report = CheckReport()
    ids: dict[str, list[str]] = {}
    contents: dict[bytes, list[str]] = {}
    listed = parse_sources(sources, media_root=media_root, ignored=ignored)
    good: list[bytes] = []
    if write_good is not None:
        _check_target(write_good, listed)
    for outcome in counted(scan(listed, processor, pack_length), listed):
        report.samples += 1
        if isinstance(outcome, DataError):
            report.problems.append(str(outcome))
            report.kinds[outcome.kind] += 1
            continue
        if write_good is not None:
            value = json.loads(outcome.record.data)
            good.append(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        measure = outcome.measure
        report.tokens += measure.length
        report.images += measure.kinds.count("image")
        report.videos += measure.kinds.count("video")
        if processor is not None:
            report.note_size(measure)
        ids.setdefault(measure.id, []).append(str(outcome.record.number))
        contents.setdefault(_content(outcome.record), []).append(measure.id)
    for name, records in ids.items():
        if len(records) > 1:
            report.warnings.append(f"{len(records)} samples have the id {name!r}")
    for same in contents.values():
        if len(same) > 1:
            named = ", ".join(same[:_NAMED]) + (", ..." if len(same) > _NAMED else "")
            report.warnings.append(f"{len(same)} samples are the same but for their id: {named}")
    if write_good is not None:
        with writing(f"--write_good {write_good}"):
            write_bytes(write_good, b"".join(good))
    return report


def _check_target(target: Path, sources: Sequence[SourceSpec]) -> None:
    """Raise DataError where the good records could not be read again from `target`."""
    roots = {Path(s.media_root or Path(s.path).parent).resolve() for s in sources}
    if len(roots) > 1:
        raise DataError(
            f"--write_good {target}: paths of media start from {len(roots)} folders, of which a "
            "file has one; check the sources one by one"
        )
    for source in sources:
        path = Path(source.path)
        if is_dir(path) or path.suffix.lower() in (".parquet", ".tar"):
            raise DataError(f"--write_good takes records of .json and .jsonl files, not of {path}")
        if exists(target) and target.samefile(path):
            raise DataError(f"--write_good {target} is a source; name another file")
        if source.media_root is None and path.resolve().parent != target.resolve().parent:
            raise DataError(
                f"--write_good {target}: paths of media start from the folder of {path}; write the "
                "file there, or pass --media_root"
            )


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


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
