"""The rule of all records: a key or mark that is not read is an error that names it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmtrain.data.errors import DataError, Kind
from vlmtrain.data.sample import MARKS, Sample

# Keys that say where a sample comes from or what people think of it, not what is learned.
HARMLESS = frozenset(
    """
    id _id uid uuid guid hash md5 idx index key number question_id image_id video_id sample_id
    conversation_id data_id annotation_id source data_source dataset dataset_name subset split
    origin license author annotator generator model model_name version date timestamp created_at
    language lang category topic domain subject task task_type task_name question_type answer_type
    difficulty score scores rating quality tags meta metadata num_turns num_tokens n_tokens length
    note notes comment comments width height image_width image_height image_size duration
    """.split()
)

_AUDIO = "and audio is not supported; drop the samples that have any"
_PREFERENCE = (
    "and preferences (good answers beside bad ones) are not learned here; keep the good answers "
    "alone, in the form of a conversation"
)
_SETTING = (
    "a setting of its own, which is not supported; drop it, and where all samples shall have it "
    "pass --media.max_pixels, min_pixels, video_max_pixels, fps or max_frames"
)
_PART = (
    "a part of a video, which is not cut out here; write the part to a file of its own (ffmpeg -ss "
    "START -to END -i FILE PART)"
)
_TEMPLATE = "which is not passed on to the chat template; give another one with --loader.template"
_REASONS = {
    reason: keys.split()
    for reason, keys in {
        _AUDIO: "audio audios audio_url input_audio speech",
        _PREFERENCE: "chosen rejected rejected_response rejected_responses rejected_messages "
        "rejected_images kto_tag label chosen_score rejected_score margin",
        _SETTING: "min_pixels max_pixels total_pixels resized_height resized_width nframes "
        "num_frames min_frames max_frames fps detail mm_processor_kwargs",
        _PART: "video_start video_end",
        _TEMPLATE: "chat_template_kwargs chat_template enable_thinking",
    }.items()
}
_REASON_OF = {key: reason for reason, keys in _REASONS.items() for key in keys}
IGNORE_OPTION = "--loader.ignore_keys (vlmtrain data, generate: --ignore_keys)"

_UNREAD_MARKS = re.compile(
    r"<\|?(?:image|img|video|audio|speech)[ _-]?\d*\|?/?>|<cot-process>"
    r"|(?<=<image>)</image>|(?<=<video>)</video>"
    r"|\\<(?:image|video)\\?>|&lt;(?:image|video)&gt;",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RecordContext:
    """What reading a record needs to know of it."""

    bare: Sample  # its id and file, for messages
    root: Path  # folder that relative media paths start from
    ignored: Collection[str] = ()  # keys and marks that are not to be looked at

    def fields(self, value: dict[str, Any], what: str) -> Fields:
        return Fields(value, what, self)

    def fail(self, problem: str, kind: Kind = "format") -> DataError:
        return self.bare.fail(problem, kind)

    def text(self, text: str, where: str) -> str:
        """`text`, unless it holds a mark that nothing would be put for."""
        for mark in _UNREAD_MARKS.findall(text):
            if mark not in MARKS and mark not in self.ignored:
                raise self.fail(
                    f"{where} holds the mark {mark}, which is not read"
                    + (f", {_AUDIO}" if "audio" in mark.lower() else "")
                    + "; media are marked <image> and <video>; to keep it as text name it in "
                    + IGNORE_OPTION
                )
        return text


class Fields:
    """An object of a record that knows which of its keys have been read.

    Args:
        value: the object.
        what: it, in messages: "it" (the record), "turn 0", ...
        context: the record.
    """

    def __init__(self, value: dict[str, Any], what: str, context: RecordContext) -> None:
        self.what, self.context = what, context
        self._left = {key: item for key, item in value.items() if key not in context.ignored}
        self._asked: set[str] = set()

    def take(self, *names: str) -> Any:
        """What stands under one of several names for the same; None: nothing.

        Raises:
            DataError: under two of them, so that one would be ignored.
        """
        self._asked.update(names)
        given = {name: self._left.pop(name) for name in names if name in self._left}
        said = {name: value for name, value in given.items() if not is_empty(value)}
        if len(said) > 1:
            both = " and ".join(repr(name) for name in said)
            raise self.context.fail(f"{self.what} has both {both}, which mean the same; keep one")
        return next(iter((said or given).values()), None)

    def finish(self, known: bool = False) -> None:
        """Raise DataError where a key has not been read that says something.

        Args:
            known: look only for keys of which it is known why they are not read.
        """
        for key, value in self._left.items():
            reason = _REASON_OF.get(key)
            if key in HARMLESS or is_empty(value) or (known and reason is None):
                continue
            if reason is None:
                near = difflib.get_close_matches(key.lower(), sorted(self._asked), 1)
                reason = f"which is not read; {f'did you mean {near[0]!r}? ' if near else ''}"
                reason += f"correct it, drop it, or name it in {IGNORE_OPTION}"
            raise self.context.fail(f"{self.what} has the key {key!r}, {reason}")


def check_utf8(value: Any) -> None:
    """Every text in what JSON or a command line gave can be written as UTF-8.

    Raises:
        UnicodeEncodeError: one holds half a character ("\\ud83d").
        RecursionError: it is nested too deeply.
    """
    json.dumps(value, ensure_ascii=False, default=lambda other: None).encode()


def loads(text: str) -> Any:
    """`json.loads`, and `check_utf8`. Raises ValueError or RecursionError."""
    value = json.loads(text)
    check_utf8(value)
    return value


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, "", [] or {}; not 0 and false."""
    return value is None or (isinstance(value, (str, bytes, list, tuple, dict)) and not value)
