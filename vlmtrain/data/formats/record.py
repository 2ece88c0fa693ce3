"""A record (a JSON object, a row of a table) as a `Sample`, whichever form it has.

Turns: `conversations` or `messages` of from/value or role/content; `conversation` of human and
assistant, `texts` of user and assistant; `instruction`, `input`, `output`; `query` or `prompt` and
`response` or `completion`; `text`. Media: `image`, `images`, `video`, `videos`, or parts of a
content list. Each `<image>` or `<video>` mark in the text takes the next image or video of the
record; a part brings its own.
Every key is read, known to be harmless, or an error (`fields.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.entries import from_part, listed_media, one_medium
from vlmtrain.data.formats.fields import Fields, RecordContext, check_utf8, is_empty, loads
from vlmtrain.data.formats.objects import parse_objects
from vlmtrain.data.sample import MARK_PATTERN, MARKS, Media, MediaKind, Role, Sample, Turn

ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")  # roles of an assistant's turn that calls tools
_LISTS = ("conversations", "messages", "conversation", "texts")
_QUESTION, _ANSWER = ("query", "prompt"), ("response", "completion")
TURN_KEYS = (*_LISTS, "instruction", *_QUESTION, "text")
_WEIGHTS = ("loss_weight", "loss_scale", "weight")
# A mark in the text, in order: its kind, and the medium where the mark is a part that brings one.
_Slot = tuple[MediaKind, Media | None]


def parse_record(
    record: Any,
    source: str,
    number: int,
    media_root: Path,
    *,
    question: bool = False,
    ignored: Collection[str] = (),
) -> Sample:
    """Read one record.

    Args:
        record: the parsed JSON value.
        source: the file's path, for messages.
        number: the record's position in the file, used as its id when it has none.
        media_root: folder that relative media paths start from.
        question: the record waits for an answer: its last turn must be the human's, and an
            assistant's turn is not needed.
        ignored: keys and marks that are not looked at.

    Raises:
        DataError: a key or mark that is not read, no turns, an unknown role, marks that do not
            match the media, no assistant's turn, text that is no UTF-8.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{source}: record {number} is a {type(record).__name__}; it must be an object with "
            "'conversations' or 'messages'"
        )
    identity = record.get("id")
    sample_id = str(identity) if identity not in (None, "") else f"{Path(source).name}:{number}"
    sample_id = sample_id.encode("utf-8", "backslashreplace").decode()
    bare = Sample(sample_id, (), (), source)
    context = RecordContext(bare, media_root, ignored)
    try:
        check_utf8(record)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise context.fail(f"it holds half a character ({half!r}); save it as UTF-8") from None
    except RecursionError:
        raise context.fail("it is nested too deeply") from None
    fields = context.fields(record, "it")
    fields.finish(known=True)  # the likeliest reason why the rest would not fit
    system = fields.take("system")
    if not isinstance(system, (str, type(None))):
        raise context.fail("'system' must be a string")
    listed: dict[MediaKind, list[Media]] = {
        "image": listed_media(fields, "image"),
        "video": listed_media(fields, "video"),
    }
    turns, slots = _turns(_raw_turns(fields, question), system, context)
    tools = _tools(fields, context)
    objects = parse_objects(fields.take("objects"), [turn.text for turn in turns], context)
    fields.finish()
    _check_turns(turns, question, context)
    return replace(
        bare, turns=turns, media=_match(slots, listed, bare), tools=tools, objects=objects
    )


def _raw_turns(fields: Fields, question: bool) -> list[Any]:
    """The turns as objects with role and content, from whichever keys the record has."""
    context = fields.context
    raw = fields.take(*_LISTS)
    if raw is not None:
        raw = _decoded(raw)
        if not isinstance(raw, list) or not raw:
            raise context.fail("its list of turns must be a list with at least one turn")
        return [turn for item in raw for turn in _pair(item)]
    instruction = fields.take("instruction")
    if instruction is not None:
        parts = [instruction, fields.take("input")]
        asked: Any = "\n".join(part for part in parts if _string(part, "instruction", context))
        answer = fields.take("output")
    else:
        asked, answer = (fields.take(*names) for names in (_QUESTION, _ANSWER))
        if asked is None and answer is None:
            text = fields.take("text")
            if text is None:
                fields.finish()
                raise context.fail(
                    "it has no 'conversations' (from/value), 'messages' (role/content), "
                    "'instruction' and 'output', 'query' and 'response', or 'text'"
                )
            return [{"role": "assistant", "content": text}]
    if isinstance(asked, list) and isinstance(answer, list):  # messages on either side
        given = [{"loss": False, **turn} if _is_context(turn) else turn for turn in asked]
        return [*given, *answer]
    turns = [{"role": "user", "content": asked}]
    if not (question and answer is None):
        turns.append({"role": "assistant", "content": answer})
    return [*_history(fields), *turns]


def _pair(item: Any) -> list[Any]:
    """A turn; where it holds a question with its answer, both."""
    asks = [key for key in ("human", "user") if isinstance(item, dict) and key in item]
    if len(asks) != 1 or "assistant" not in item:
        return [item]
    rest = {key: value for key, value in item.items() if key not in (*asks, "assistant")}
    if rest.keys() & {"role", "from", "content", "value"}:
        return [item]
    asked = {"role": "user", "content": item[asks[0]]}
    return [asked, {**rest, "role": "assistant", "content": item["assistant"]}]


def _is_context(turn: Any) -> bool:
    """Whether a turn of a prompt is an answer of which nothing is said: it is not learned."""
    if not isinstance(turn, dict) or turn.keys() & {"loss", *_WEIGHTS}:
        return False
    return ROLES.get(str(turn.get("role"))) == "assistant"


def _history(fields: Fields) -> list[dict[str, Any]]:
    history = fields.take("history")
    history = [] if is_empty(history) else history
    if not isinstance(history, list) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history
    ):
        raise fields.context.fail("'history' must be a list of [instruction, answer] pairs")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _string(value: Any, key: str, context: RecordContext) -> str | None:
    if not isinstance(value, (str, type(None))):
        raise context.fail(f"'{key}' must be a string")
    return value


def _decoded(value: Any) -> Any:
    """What a string of JSON stands for (tables hold lists as strings); the rest as it is."""
    try:
        return loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _turns(
    raw: list[Any], system: str | None, context: RecordContext
) -> tuple[tuple[Turn, ...], list[_Slot]]:
    turns: list[Turn] = []
    slots: list[_Slot] = []
    if system:
        turns.append(Turn("system", context.text(system, "'system'")))
        slots += _marks(system)
    for position, item in enumerate(raw):
        where = f"turn {position}"
        if not isinstance(item, dict):
            raise context.fail(f"{where} is not an object")
        fields = context.fields(item, where)
        turn = _turn(fields, slots)
        fields.finish()
        if turn.role == "system" and turns:
            raise context.fail(
                f"{where} is a second or late system prompt; only the first turn can be one"
            )
        before = turns[-1] if turns else turn
        if turn.calls and not turn.text and before.role == "assistant" == turn.role and turns:
            # What the assistant says and calls, or calls at once, is one answer.
            if before.weight != turn.weight:
                raise context.fail(f"{where} has another weight than the answer that it belongs to")
            turns[-1] = replace(before, calls=before.calls + turn.calls)
        else:
            turns.append(turn)
    return tuple(turns), slots


def _turn(fields: Fields, slots: list[_Slot]) -> Turn:
    context, where = fields.context, fields.what
    name = fields.take("from", "role")
    calls = _calls(fields.take("tool_calls"), fields)
    content = fields.take("value", "content")
    if name in _CALLS:
        role: Role | None = "assistant"
        calls, content = _calls(content, fields) + calls, None
        if not calls:
            raise context.fail(f"{where} calls no tool; it must hold name and arguments as JSON")
    else:
        role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        known = ", ".join((*ROLES, *_CALLS))
        raise context.fail(f"{where} has the unknown role {name!r}; use one of {known}")
    if calls and role != "assistant":
        raise context.fail(f"{where} is the {role}'s and has 'tool_calls'; only an assistant calls")
    if role == "tool":
        fields.take("tool_call_id")
        fields.take("name")
    weight = _weight(fields, role)
    if content is None and calls:
        content = ""
    if role == "tool" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    text = _text(content, fields, slots)
    if role == "assistant" and weight > 0 and not text.strip() and not calls:
        raise context.fail(f"{where}, an answer to learn, is empty; write it, or drop the sample")
    return Turn(role, text, weight, calls)


def _weight(fields: Fields, role: Role) -> float:
    """The factor of the loss of a turn's tokens."""
    context, where = fields.context, fields.what
    loss = fields.take("loss")
    if loss not in (None, True, False):
        raise context.fail(f"{where} has 'loss' {loss!r}; it must be true or false")
    loss = None if loss is None else bool(loss)  # tables hold 1 and 0
    weight = fields.take(*_WEIGHTS)
    if weight is not None and (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 <= weight < math.inf
    ):
        raise context.fail(f"{where} has the weight {weight!r}; it must be a number of at least 0")
    if loss is False and weight:
        raise context.fail(f"{where} has 'loss' false and the weight {weight:g}; keep one")
    if role != "assistant":
        if loss or weight:
            raise context.fail(
                f"{where} is the {role}'s and shall be learned; only the assistant's turns are"
            )
        return 1.0
    return 0.0 if loss is False else 1.0 if weight is None else float(weight)


def _calls(value: Any, fields: Fields) -> tuple[dict[str, Any], ...]:
    """The calls of tools of an assistant's turn: objects of name and arguments."""
    context, where = fields.context, fields.what
    try:
        value = loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        raise context.fail(
            f"{where} calls a tool with what is no JSON: {str(value)[:80]}"
        ) from None
    result = []
    for call in value if isinstance(value, list) else [] if is_empty(value) else [value]:
        outer = context.fields(call if isinstance(call, dict) else {}, f"a call of {where}")
        if outer.take("type") not in (None, "function"):
            raise context.fail(f"{where} calls what is no function")
        function = outer.take("function")
        inner = outer
        if function is not None:
            named = function if isinstance(function, dict) else {}
            inner = context.fields(named, f"a call of {where}")
        name, arguments = inner.take("name"), inner.take("arguments")
        for one in (outer, inner):
            one.finish()
        try:  # templates write objects; OpenAI's records hold them as strings
            arguments = loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise context.fail(
                f"{where} calls a tool without a 'name' and an object of 'arguments': "
                f"{str(call)[:80]}"
            )
        result.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return tuple(result)


def _tools(fields: Fields, context: RecordContext) -> tuple[dict[str, Any], ...]:
    """The tools that the assistant may call, as chat templates take them."""
    value = fields.take("tools")
    try:
        value = loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        value = 0
    if is_empty(value):
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise context.fail("'tools' must be a list of objects, or JSON of one")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in value
    )


def _text(content: Any, fields: Fields, slots: list[_Slot]) -> str:
    """A turn's text with marks, whose slots are appended."""
    context, where = fields.context, fields.what
    if isinstance(content, str):
        slots += _marks(content)
        return context.text(content, where)
    if not isinstance(content, list):
        raise context.fail(f"{where} has no text ('value' or 'content' must be a string)")
    text = ""
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = _part_kind(part)
        if kind is None:
            audio = "audio" in str(part)[:40]
            raise context.fail(
                f"{where} holds a content part that is no text, image or video"
                + (" (audio is not supported)" if audio else "")
                + f": {str(part)[:80]}"
            )
        inner = context.fields(part, f"a part of {where}")
        inner.take("type")
        if kind == "text":
            piece = inner.take("text", "value", "content")
            if not isinstance(piece, str):
                raise context.fail(f"{where} holds a part of text without 'text'")
            slots += _marks(piece)
            text += context.text(piece, where)
        else:
            text += f"<{kind}>"
            slots.append((kind, _medium_of(kind, inner)))
        inner.finish()
    return text


def _part_kind(part: Any) -> Any:
    """text, image or video; None: something else."""
    if not isinstance(part, dict):
        return None
    given = part.get("type")
    if given is None:
        given = next((key for key in ("image", "video", "image_url", "text") if key in part), None)
    kind = given.removesuffix("_url") if isinstance(given, str) else None
    return kind if kind in ("text", "image", "video") else None


def _medium_of(kind: MediaKind, part: Fields) -> Media | None:
    """The medium that a content part brings; None: it takes the next one of the record."""
    rate = {name: part.take(name) for name in ("fps", "sample_fps") if kind == "video"}
    entry = from_part(kind, part)
    if entry is None:
        if any(value is not None for value in rate.values()):
            raise part.context.fail(f"{part.what} has an fps and no frames")
        return None
    if isinstance(entry, tuple):
        entry = {"path": entry[0], "bytes": entry[1]}
    elif kind == "video":
        entry = {"video": entry}
    if kind == "video":
        entry = {**entry, **{name: value for name, value in rate.items() if value is not None}}
    return one_medium(kind, entry, part.context)


def _marks(text: str) -> list[_Slot]:
    return [(MARKS[mark], None) for mark in MARK_PATTERN.findall(text)]


def _check_turns(turns: tuple[Turn, ...], question: bool, context: RecordContext) -> None:
    roles = [turn.role for turn in turns if turn.role != "system"]
    if question:
        if roles[-1:] not in (["user"], ["tool"]):
            raise context.fail("its last turn is not a human's; end with the question to answer")
    elif "assistant" not in roles:
        raise context.fail(
            "it has no assistant turn, so there is nothing to learn; add one or drop it"
        )
    # An answer alone is a text to learn; before others it would be an answer to nothing.
    if roles[:1] == ["assistant"] and len(turns) > 1:
        raise context.fail("the first turn is the assistant's; begin with a human turn")


def _match(
    slots: list[_Slot], listed: dict[MediaKind, list[Media]], bare: Sample
) -> tuple[Media, ...]:
    """The media in the order of their marks; every mark and every medium used exactly once."""
    for kind, pool in listed.items():
        marks = sum(1 for slot, brought in slots if slot == kind and brought is None)
        if marks != len(pool):
            raise bare.fail(
                f"it has {marks} <{kind}> mark{'s' * (marks != 1)} but {len(pool)} "
                f"{kind}{'s' * (len(pool) != 1)}; put one <{kind}> in the text for each {kind}",
                "marks",
            )
    pools = {kind: iter(pool) for kind, pool in listed.items()}
    return tuple(next(pools[kind]) if brought is None else brought for kind, brought in slots)
