"""Which data to train on: `--data` as typed, or a TOML file that lists the sources."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmtrain.core.files import exists, is_dir
from vlmtrain.core.toml import read_toml
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.entries import natural_order
from vlmtrain.data.formats.shards import INDEX_NAME
from vlmtrain.data.formats.tars import to_train_on

_SUFFIXES = (".json", ".jsonl", ".parquet", ".tar")
_MOST_WEIGHT = 10_000.0  # an epoch is planned sample by sample
_WEIGHTED = re.compile(r"(?P<path>.+):(?P<weight>\d+(\.\d*)?|\.\d+)")


@dataclass(frozen=True)
class SourceSpec:
    """One file or folder of samples."""

    path: str
    weight: float = 1.0  # how often an epoch sees each of its samples; 0.25: a quarter of them
    max_samples: int | None = None  # only the first so many
    media_root: str | None = None  # where relative media paths start; default: the file's folder
    ignored: tuple[str, ...] = ()  # keys and marks of records that are not looked at


def parse_sources(
    text: str | Path | Sequence[str | Path | SourceSpec],
    *,
    max_samples: int | None = None,
    media_root: str | Path | None = None,
    ignored: Sequence[str] = (),
) -> list[SourceSpec]:
    """Read `a.json,b.jsonl:0.5,shards,parts/*.parquet,mix.toml`, or the same as a list.

    A number after the last colon is the source's weight, unless a file of that whole name exists.
    A .toml file holds tables `[[source]]` with `path`, and if wanted `weight`, `max_samples`,
    `media_root`; its paths start from its own folder.

    Args:
        max_samples, media_root: for the sources that do not set their own.
        ignored: keys and marks of records that are not looked at.

    Raises:
        DataError: nothing given, a weight that is not above 0 and at most 10,000, or an unreadable
            list.
    """
    items: Sequence[str | Path | SourceSpec]
    items = text.split(",") if isinstance(text, str) else [text] if isinstance(text, Path) else text
    sources: list[SourceSpec] = []
    for item in items:
        if isinstance(item, SourceSpec):
            sources.append(item)
            continue
        name = str(item).strip()
        weight = 1.0
        match = _WEIGHTED.fullmatch(name)
        if match and not exists(name):
            name, weight = match["path"], float(match["weight"])
        if not name:
            continue
        if name.endswith(".toml"):
            listed = _read_list(Path(name))
            sources += [replace(source, weight=source.weight * weight) for source in listed]
        else:
            sources.append(SourceSpec(name, weight))
    sources = [one for source in sources for one in _files(source)]
    if not sources:
        raise DataError(
            f"no data given; --data takes {', '.join(_SUFFIXES)} files, folders of these or of "
            "shards, patterns (data/*.parquet), or a .toml list of them"
        )
    for source in sources:
        if not 0 < source.weight <= _MOST_WEIGHT:
            raise DataError(
                f"{source.path}: its weight is {source.weight:g}; it must be above 0 and at most "
                f"{_MOST_WEIGHT:,.0f}: so often an epoch sees each of its samples"
            )
    root = None if media_root in (None, "") else str(media_root)
    return [
        replace(
            source,
            max_samples=source.max_samples or max_samples or None,
            media_root=source.media_root or root,
            ignored=source.ignored or tuple(ignored),
        )
        for source in sources
    ]


def _files(source: SourceSpec) -> list[SourceSpec]:
    """The source; of a pattern each file, and of a folder each source in it, 2 before 10."""
    path = Path(source.path)
    if is_dir(path):
        names = [str(one) for one in _in_folder(path, set())] or [source.path]
    elif exists(path) or not glob.has_magic(source.path):
        return [source]
    else:
        names = glob.glob(source.path, recursive=True)
        if not names:
            raise DataError(f"{source.path}: no file has such a name")
    return [replace(source, path=name) for name in sorted(names, key=natural_order)]


def _in_folder(folder: Path, seen: set[Path]) -> list[Path]:
    """All files to train on in a folder and in those below it, hidden ones left out; a folder of
    shards stands for itself."""
    if folder.resolve() in seen:  # a link leads back
        return []
    seen.add(folder.resolve())
    if exists(folder / INDEX_NAME):
        return [folder]
    found: list[Path] = []
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                found += _in_folder(Path(entry), seen)
            elif Path(entry).suffix.lower() in _SUFFIXES:
                found.append(Path(entry))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    return to_train_on(folder, found)


def _read_list(path: Path) -> list[SourceSpec]:
    table = read_toml(path, str(path), DataError)
    entries = table.get("source")
    if not isinstance(entries, list) or not entries or set(table) != {"source"}:
        raise DataError(f"{path}: it must hold [[source]] tables and nothing else")
    return [_entry(entry, path, number) for number, entry in enumerate(entries)]


def _entry(entry: Any, path: Path, number: int) -> SourceSpec:
    kinds = {"path": (str,), "weight": (int, float), "max_samples": (int,), "media_root": (str,)}
    where = f"{path}: source {number}"
    if not isinstance(entry, dict) or "path" not in entry:
        raise DataError(f"{where} has no path")
    for key, value in entry.items():
        if key not in kinds:
            raise DataError(f"{where} has the unknown key {key!r}; known are {', '.join(kinds)}")
        if not isinstance(value, kinds[key]) or isinstance(value, bool):
            wanted = kinds[key][-1].__name__
            raise DataError(f"{where}: {key} is {value!r}; it must be of type {wanted}")
    if entry.get("max_samples", 1) < 1:
        raise DataError(f"{where}: max_samples is {entry['max_samples']}; it must be at least 1")
    root = entry.get("media_root")
    return SourceSpec(
        str(path.parent / entry["path"]),
        float(entry.get("weight", 1.0)),
        entry.get("max_samples"),
        None if root is None else str(path.parent / root),
    )
