"""Reads WebDataset shards that others wrote: tar files whose samples are members of one name.

A sample is `KEY.json` with a record, or a caption in `KEY.txt`, beside its media, `KEY.jpg`,
`KEY.0.png`, ... Media that the record does not name take its marks in order; a caption is a text to
learn after its media. Folders that Megatron-Energon prepared say in .nv-meta/dataset.yaml what
their members are: CaptioningSample, VQASample, VidQASample and TextSample are read. Nothing is
unpacked to disk.
"""

from __future__ import annotations

import itertools
import json
import re
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmtrain.core.files import exists
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.entries import IMAGE_SUFFIXES, natural_order
from vlmtrain.data.formats.json_source import Record
from vlmtrain.data.formats.record import TURN_KEYS, parse_record
from vlmtrain.data.sample import FileRange, Sample

if TYPE_CHECKING:
    from vlmtrain.data.processor import Measure

_VIDEO_SUFFIXES = {".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v"}
_META = ".nv-meta"
# What img2dataset writes beside a caption.
_HARMLESS = set(
    "url status error_message original_width original_height exif sha256 similarity".split()
)
_STEP = re.compile(r"\[(\w+)\]")
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
_READ_TYPES = ("CaptioningSample", "VQASample", "VidQASample", "TextSample")
# Energon's types that say less than a training text needs, and what to convert them to.
_SEQUENCE = (
    'where the images stand in the text only code says; write KEY.json with {"text": '
    '"one <image> two <image>"} beside KEY.0.jpg, KEY.1.jpg, ..., and drop .nv-meta'
)
_NO_QUESTION = "what is asked they do not say; write it into the context of a VQASample"
_UNREAD_TYPES = {
    "InterleavedSample": _SEQUENCE,
    "SimilarityInterleavedSample": _SEQUENCE,
    "MultiChoiceVQASample": "how the choices are asked for and answered they do not say; write the "
    "choices into the context of a VQASample and the answer to learn into its answers",
    "OCRSample": _NO_QUESTION,
    "ImageClassificationSample": _NO_QUESTION,
    "ImageSample": "they hold no text; write a caption (CaptioningSample)",
    "VQAOCRSample": "they hold two tasks; write a VQASample for each",
}


class TarSource:
    """One tar file; same interface as `JsonSource`. A record's bytes say where its members lie, and
    what is written in them by a checksum; of images and videos by their sizes."""

    def __init__(self, path: str | Path, ignored: Collection[str] = ()) -> None:
        self.path, self.ignored = str(path), {*ignored, *_HARMLESS}
        self._records: list[Record] | None = None
        self._map = field_map(Path(path).parent)
        self._left_out = excluded(Path(path).parent)

    def records(self) -> Iterator[Record]:
        """Every sample in order.

        Raises:
            DataError: no readable tar file, or one without samples.
        """
        if self._records is None:
            self._records = list(self._scan())
        if not self._records:
            raise DataError(f"{self.path}: the tar file holds no samples")
        yield from self._records

    def read(self, number: int, offset: int, size: int) -> Record:
        """One sample again. Its record differs from the scan's where the file has changed."""
        if self._records is None:
            self._records = list(self._scan())
        return self._records[number]

    def measured(self, record: Record, fingerprint: str) -> Measure | None:
        return None

    def parse(self, record: Record) -> Sample:
        """The sample of a record. Raises DataError as `parse_record`, and for a member that is
        neither a record, a caption nor a medium."""
        line = json.loads(record.data)
        key, parts = line["key"], {n: FileRange(self.path, *at) for n, at in line["parts"].items()}
        try:
            value = self._value(key, parts)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise self._fail(key, f"its members cannot be read: {error!r}") from None
        return parse_record(
            value, self.path, record.number, Path(self.path).parent, ignored=self.ignored
        )

    def _value(self, key: str, parts: dict[str, FileRange]) -> dict[str, Any]:
        """The record that a sample's members make up."""
        if self._map is not None:
            return {"id": key, **_mapped(self._map, parts)}
        value = json.loads(parts.pop("json").read()) if "json" in parts else {}
        if not isinstance(value, dict):
            raise ValueError("KEY.json holds no object")
        caption = parts.pop("txt").read().decode() if "txt" in parts else value.pop("caption", None)
        if "caption" in value and value.pop("caption") not in (caption, None):
            raise ValueError("KEY.txt and 'caption' in KEY.json differ")
        images = [n for n in parts if Path(f"x.{n}").suffix.lower() in IMAGE_SUFFIXES]
        videos = [n for n in parts if Path(f"x.{n}").suffix.lower() in _VIDEO_SUFFIXES]
        for name in parts:
            if name not in (*images, *videos) and name not in self.ignored:
                raise ValueError(
                    f"KEY.{name} is not read; name {name} in ignore_keys if it says nothing"
                )
        if caption is not None:
            if value.keys() & set(TURN_KEYS):
                raise ValueError("it has a caption and a conversation; keep one")
            value["text"] = "<image>" * len(images) + "<video>" * len(videos) + caption
        for kind, names in (("image", images), ("video", videos)):
            listed = value.pop(kind, None), value.pop(f"{kind}s", None)
            entries = [e for one in listed for e in (one if isinstance(one, list) else [one]) if e]
            if entries:  # by their names, whole or without the key
                entries = [parts[str(entry).removeprefix(f"{key}.")] for entry in entries]
                if {part.offset for part in entries} != {parts[n].offset for n in names}:
                    raise ValueError(f"it names other {kind}s than its {len(names)} members")
            value[f"{kind}s"] = entries or [parts[n] for n in sorted(names, key=natural_order)]
        return {"id": key, **value}

    def _scan(self) -> Iterator[Record]:
        try:
            with tarfile.open(self.path, "r:") as tar:
                members: list[tuple[str, str, list[int], int]] = []
                for member in tar:
                    if member.issym() or member.islnk() or member.issparse():
                        raise DataError(
                            f"{self.path}: the member {member.name} is a link or sparse, and only "
                            "whole files are read; write it with tar --dereference "
                            "--hard-dereference, without --sparse"
                        )
                    if member.isfile():
                        folder, _, name = member.name.rpartition("/")
                        stem, _, kind = name.partition(".")
                        key = f"{folder}/{stem}" if folder else stem
                        at = [member.offset_data, member.size]
                        members.append((key, kind, at, _checksum(tar, member)))
        except FileNotFoundError:
            raise DataError(f"{self.path}: no such file") from None
        except (OSError, tarfile.TarError) as error:
            raise DataError(
                f"{self.path}: no readable tar file ({error}); is it compressed?"
            ) from None
        name = Path(self.path).name
        members = [member for member in members if f"{name}/{member[0]}" not in self._left_out]
        for number, (key, group) in enumerate(itertools.groupby(members, key=lambda m: m[0])):
            parts: dict[str, list[int]] = {}
            said = {}
            for _, kind, at, checksum in group:
                if kind in parts:
                    raise self._fail(key, f"the tar file holds its member {kind} twice")
                parts[kind], said[kind] = at, (at[1], checksum)
            content = zlib.crc32(repr(sorted(said.items())).encode())
            line = {"key": key, "parts": parts, "content": content}
            yield Record(number, number, json.dumps(line).encode(), content)

    def _fail(self, key: str, problem: str) -> DataError:
        return Sample(key, (), (), self.path).fail(problem)


def _checksum(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """Of a member's bytes; 0 of images and videos, which are large."""
    if Path(member.name).suffix.lower() in IMAGE_SUFFIXES | _VIDEO_SUFFIXES:
        return 0
    file = tar.extractfile(member)
    return zlib.crc32(file.read()) if file is not None else 0


def to_train_on(folder: Path, files: list[Path]) -> list[Path]:
    """Of the files in a folder those to train on: all, or where energon's split says which tar
    files these are, those.

    Raises:
        DataError: the split cannot be read, or leaves a sample out of a shard in a folder below.
    """
    path, split = _split(folder)
    if path is None:
        return files
    names = _expanded(path, (split.get("split_parts") or {}).get("train"))
    left_out = excluded(folder)
    for name in left_out:
        if ".tar/" in name and "/" in name.partition(".tar/")[0]:
            raise DataError(
                f"{path}: exclude names the sample {name}, and samples are left out of shards "
                "beside .nv-meta only; move the shard there"
            )
    others = [file for file in files if file.suffix.lower() != ".tar"]
    return others + [folder / name for name in names if name not in left_out]


def excluded(folder: Path) -> set[str]:
    """What energon's split leaves out of a folder: `shard.tar` and, of samples, `shard.tar/KEY`.

    Raises:
        DataError: the split cannot be read.
    """
    path, split = _split(folder)
    return set() if path is None else set(_expanded(path, split.get("exclude")))


def _split(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Energon's split.yaml, or where there is none its split.json."""
    for name in ("split.yaml", "split.json"):
        path = folder / _META / name
        if exists(path):
            return path, _yaml(path)
    return None, {}


def _expanded(path: Path, patterns: Any) -> list[str]:
    """The names that patterns of a split stand for."""
    try:
        return [name for pattern in patterns or [] for name in _braces(str(pattern))]
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _braces(pattern: str) -> list[str]:
    """`a-{000..002}.tar` as three names, `{a,b}.tar` as two."""
    match = _BRACES.search(pattern)
    head = pattern[: match.start()] if match else pattern
    if "\\" in pattern or set("{}") & set(head):
        raise ValueError(f"{pattern} is not read; write ranges {{000..002}} and lists {{a,b}}")
    if match is None:
        return [pattern]
    first, last, listed = match.groups()
    if listed is None:
        padded = any(len(end) > 1 and end[0] == "0" for end in (first, last))
        width = max(len(first), len(last)) if padded else 0
        step = 1 if int(first) <= int(last) else -1
        middles = [f"{i:0{width}d}" for i in range(int(first), int(last) + step, step)]
    else:
        middles = listed.split(",")
    tails = _braces(pattern[match.end() :])
    return [f"{head}{middle}{tail}" for middle in middles for tail in tails]


def field_map(folder: Path) -> dict[str, str] | None:
    """What energon's dataset.yaml says of a folder's members: the type of sample under "", and of
    each of its fields the member (`json[question]`); None where there is no such file.

    Raises:
        DataError: another type of sample, or one made by code.
    """
    path = folder / _META / "dataset.yaml"
    if not exists(path):
        return None
    config = _yaml(path)
    kind = str((config.get("sample_type") or {}).get("__class__") or config.get("__class__"))
    kind = kind.replace("Webdataset", "Sample")
    if kind == "CrudeSample":
        return None
    if kind in _UNREAD_TYPES:
        raise DataError(f"{path}: samples of the type {kind} are not read: {_UNREAD_TYPES[kind]}")
    if kind not in _READ_TYPES or not config.get("field_map"):
        raise DataError(
            f"{path}: samples of the type {kind}, or read by code (sample_loader), are not read; "
            f"read are {', '.join(_READ_TYPES)} with a field_map, and CrudeSample"
        )
    return {"": kind, **{str(name): str(at) for name, at in config["field_map"].items()}}


def _mapped(fields: dict[str, str], parts: dict[str, FileRange]) -> dict[str, Any]:
    """The record of a sample of one of energon's types."""

    def field(name: str) -> Any:
        ways = fields[name].split(",")  # `jpg,png`: the first that is there
        at = next((way for way in ways if _STEP.sub("", way) in parts), ways[-1])
        member = _STEP.sub("", at)
        suffix = f".{member.rpartition('.')[2]}".lower()
        if suffix in IMAGE_SUFFIXES or suffix in _VIDEO_SUFFIXES:
            return parts[member]
        text = parts[member].read().decode()
        value = json.loads(text) if suffix == ".json" else text
        for step in _STEP.findall(at):
            value = value[int(step) if isinstance(value, list) else step]
        return value

    if fields[""] == "TextSample":
        return {"text": field("text")}
    if fields[""] == "CaptioningSample":
        return {"text": f"<image>{field('caption')}", "images": [field("image")]}
    answers = field("answers")
    if isinstance(answers, list):  # the heaviest, as energon's users draw it
        weights = field("answer_weights") if "answer_weights" in fields else [1] * len(answers)
        answers = answers[max(range(len(answers)), key=lambda i: weights[i])]
    medium = "video" if fields[""] == "VidQASample" else "image"
    question = f"<{medium}>{field('context')}"
    return {"query": question, "response": answers, medium: field(medium)}


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return config if isinstance(config, dict) else {}
