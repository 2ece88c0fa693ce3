"""Questions from a JSONL file, one a line, for `vlmtrain generate --input` and `evaluate --tasks`.

A line is an object in one of two forms:

    {"prompt": "What is this?", "image": "cup.jpg"}
    {"messages": [{"role": "user", "content": "<image>What is this?"}], "images": ["cup.jpg"]}

Media (`image`, `images`, `video`, `videos`) are written as in training data. Where the prompt has
no <image> or <video> marks they stand before it, images first; `system` sets the system prompt.
As in training data, a key that is not read is an error; `answer` may be there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.entries import listed_media
from vlmtrain.data.formats.fields import RecordContext, is_empty, loads
from vlmtrain.data.formats.record import parse_record
from vlmtrain.data.media.videos import probe_media
from vlmtrain.data.sample import MARK_PATTERN, MARKS, Sample, Turn

_MEDIA = ("image", "images", "video", "videos")
ANSWER = "answer"  # of a question: carried along, not asked
REFERENCE = "reference"  # what it becomes beside the model's answer


def question(
    prompt: str,
    media: dict[str, Any] | None = None,
    *,
    system: str | None = None,
    source: str = "--prompt",
    name: str = "1",
    media_root: Path = Path(),
    ignored: Collection[str] = (),
) -> Sample:
    """One question as a sample.

    Args:
        prompt: text, with a mark for each medium, or with none: then the media go before it.
        media: `image`, `images`, `video`, `videos`, as in training data.
        system: system prompt, instead of the chat template's.
        source, name: what messages call the question.
        media_root: folder that relative paths start from.
        ignored: marks that are kept as text; keys among them say nothing.

    Raises:
        DataError: marks that do not match the media, a URL, an empty prompt.
    """
    record = {key: value for key, value in (media or {}).items() if key in _MEDIA}
    bare = Sample(name, (), (), source)
    if not MARK_PATTERN.sub("", prompt).strip():
        raise bare.fail("the prompt is empty; say what to answer")
    if not MARK_PATTERN.search(prompt):
        fields = RecordContext(bare, media_root).fields(record, "it")
        for mark, kind in reversed(MARKS.items()):
            prompt = mark * len(listed_media(fields, kind)) + prompt
    record |= {"id": name, "messages": [{"role": "user", "content": prompt}]}
    if system:
        record["system"] = system
    marks = [mark for mark in ignored if not mark.isidentifier()]  # our own keys are all read
    return parse_record(record, source, 0, media_root, question=True, ignored=marks)


def then(sample: Sample, more: Sample) -> Sample:
    """The conversation `sample`, which ends with an answer, and the next question."""
    turns = tuple(turn for turn in more.turns if turn.role != "system")
    return replace(sample, turns=(*sample.turns, *turns), media=(*sample.media, *more.media))


def answered(sample: Sample, answer: str) -> Sample:
    """The conversation with the answer given. Marks in it are not media: they are taken apart."""
    text = MARK_PATTERN.sub(lambda mark: mark[0][:-1] + " >", answer)
    return replace(sample, turns=(*sample.turns, Turn("assistant", text)))


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank.

    Raises:
        DataError: the file can't be read or is empty, or a line is no JSON object; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    any_line = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        any_line = True
        try:
            value = loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not valid JSON ({error})") from None
        if not isinstance(value, dict):
            raise DataError(
                f"{path}: line {number} is a {type(value).__name__}; each line must be an object"
            )
        yield number, value
    if not any_line:
        raise DataError(f"{path}: the file is empty; it must hold at least one line")


def from_record(
    path: Path,
    number: int,
    record: dict[str, Any],
    prompt: str | None = None,
    *,
    ignored: Collection[str] = (),
    media_root: str | Path = "",
) -> Sample:
    """The question of one line.

    Args:
        prompt: replaces the line's own text.
        ignored: keys and marks that are not looked at, or that the caller reads.
        media_root: folder that relative media paths start from; default: the file's own.

    Raises:
        DataError: names file and line.
    """
    name = str(number if is_empty(record.get("id")) else record["id"])
    source = f"{path}: line {number}"
    ignored, root = {ANSWER, *ignored}, Path(media_root or path.parent)
    own = None if "prompt" in ignored else record.get("prompt")
    talk = {"messages", "conversations"} & record.keys()
    if prompt is None and is_empty(own) and (talk or own is None):
        if not talk:
            raise DataError(f"{source} has neither 'prompt' nor 'messages'")
        record = {**record, "id": name}
        return parse_record(record, source, number, root, question=True, ignored=ignored)
    fields = RecordContext(Sample(name, (), (), source), root, ignored).fields(record, "it")
    own, system = fields.take("prompt"), fields.take("system")
    media = {key: fields.take(key) for key in _MEDIA}
    fields.finish()
    text = own if prompt is None else prompt
    for key, value in (("prompt", text), ("system", system or "")):
        if not isinstance(value, str):
            raise DataError(f"{source}: '{key}' must be a string, it is {str(value)[:80]!r}")
    return question(
        text, media, system=system, source=source, name=name, media_root=root, ignored=ignored
    )


def check_media(sample: Sample) -> Sample:
    """The question whose media carry what is known of them. Raises DataError unless every medium is
    there and looks like what it is."""
    return sample.with_infos([probe_media(media, sample, verify=False) for media in sample.media])


def read_questions(
    path: Path, ignored: Collection[str] = ()
) -> list[tuple[dict[str, Any], Sample]]:
    """Every line and its question, all of them checked before the first is asked.

    Raises:
        DataError: the first line at fault, by its number.
    """
    questions = []
    for number, record in read_lines(path):
        if ANSWER in record and REFERENCE in record:
            raise DataError(
                f"{path}: line {number} has '{ANSWER}' and '{REFERENCE}', as which the first would "
                "be written; drop one"
            )
        sample = from_record(path, number, record, ignored=ignored)
        questions.append((record, check_media(sample)))
    return questions
