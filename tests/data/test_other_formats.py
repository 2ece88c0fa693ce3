"""Records as LLaMA-Factory, ms-swift, Qwen, TRL and OpenAI write them: read for what they mean, or
refused in a sentence; nothing in them is left out in silence."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.helpers import conversation, save_image
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.fields import _REASON_OF, HARMLESS, is_empty
from vlmtrain.data.formats.record import parse_record
from vlmtrain.data.sample import Box, Objects, Sample, Turn

ROOT = Path("/data")


def parse(record: Any, **options: Any) -> Sample:
    return parse_record(record, "c.json", 0, ROOT, **options)


def chat(*contents: Any, **record: Any) -> dict[str, Any]:
    """OpenAI's form: user and assistant in turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": turns, **record}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # LLaMA-Factory's mllm_audio_demo.json, kto_en_demo.json, dpo_en_demo.json
    ("audio", chat("<audio>A sound?", "Glass.", audios=["1.mp3"]), "'audios', and audio is"),
    ("audio mark", chat("<audio>A sound?", "Glass."), "the mark <audio>, .* audio is not"),
    ("kto", chat("How?", "Thus.", label=False), "'label', and preferences"),
    ("kto, good", chat("How?", "Thus.", label=True), "'label', and preferences"),
    (
        "dpo",
        conversation("q", "a", "q")
        | {"chosen": {"from": "gpt", "value": "+"}, "rejected": {"from": "gpt", "value": "-"}},
        "'chosen', and preferences",
    ),
    ("alpaca kto", {"instruction": "q", "output": "a", "kto_tag": True}, "'kto_tag', and pref"),
    ("swift dpo", chat("q", "a", rejected_response="no"), "'rejected_response', and preferences"),
    ("trl dpo", {"prompt": "q", "chosen": "a", "rejected": "b"}, "'chosen', and preferences"),
    # Settings beside the media, and misspelt keys
    ("max_pixels", chat("<image>?", "a", images=["a.jpg"], max_pixels=50176), "key 'max_pix"),
    ("fps", conversation("<video>?", "a", video="v.mp4", fps=2), "'fps', a setting of its own"),
    ("kwargs", chat("q", "a", chat_template_kwargs={"enable_thinking": False}), "not passed on"),
    ("Images", chat("q", "a", Images=["a.jpg"]), "'Images', which is not read; did you mean"),
    ("image_path", chat("q", "a", image_path="a.jpg"), "'image_path', .* did you mean 'image'"),
    ("turn's", {"messages": [{"role": "user", "content": "q", "image": "a.jpg"}]},
     "turn 0 has the key 'image'"),
    # The same said twice
    ("both", {"conversations": [], **chat("q", "a"), "conversation": [1]}, "has both 'messages"),
    ("text twice", {"messages": [{"role": "user", "content": "q", "value": "r"}]}, "both 'value'"),
    # Marks
    ("mark", chat("<image_1> What?", "a"), "the mark <image_1>, which is not read"),
    ("case", chat("<Image> What?", "a"), "the mark <Image>"),
    ("escaped", chat("\\<image\\> What?", "a", images=["a.jpg"]), r"the mark \\<image\\>"),
    ("html", chat("&lt;image&gt; What?", "a", images=["a.jpg"]), "the mark &lt;image&gt;"),
    ("bbox", chat("q", "It is at <bbox>."), "1 <bbox> mark and 0 in 'objects'"),
    ("objects", chat("q", "a", objects={"ref": ["dog"], "bbox": []}), "0 <ref-object> mark"),
    ("norm", chat("q", "<bbox>", objects={"bbox": [[1, 2, 3, 4]], "bbox_type": "n"}), "real"),
    ("xywh", chat("q", "<bbox>", objects={"bbox": [[50, 60, 20, 10]]}), "is it x, y, width"),
    ("bottom first", chat("q", "<bbox>", objects={"bbox": [[1, 9, 2, 3]]}), "is it x, y, width"),
    ("image_id", chat("q", "<bbox>", objects={"bbox": [[1, 2]], "image_id": [0, 0]}),
     "'image_id' has 2 entries and 'bbox' 1"),
    ("old swift", chat("q", "<bbox>", objects='[{"caption": "a"}]'), "'objects' must be an object"),
    # Turns
    ("learned user", {"messages": [{"role": "user", "content": "q", "weight": 1.0}]}, "shall be"),
    ("weight", chat("q", "a") | {"messages": [{"role": "assistant", "content": "a", "weight": -1}]},
     "weight -1; it must be"),
    ("no end", {"messages": [{"role": "assistant", "content": "a", "weight": math.inf}]},
     "weight inf; it must be"),
    ("loss", {"messages": [{"role": "assistant", "content": "a", "loss": 2}]}, "'loss' 2; it must"),
    ("not and half", {"messages": [
        {"role": "assistant", "content": "a", "loss": False, "weight": 0.5}]},
     "'loss' false and the weight 0.5; keep one"),
    ("two weights", {"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5},
        {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}]},
     "turn 2 has another weight than the answer"),
    ("loss text", {"messages": [{"role": "assistant", "content": "a", "loss": "0"}]}, "'loss' '0'"),
    ("empty answer", chat("q", " "), "turn 1, an answer to learn, is empty"),
    ("no call", {"conversations": [{"from": "function_call", "value": "x"}]}, "no JSON: x"),
    ("name alone", {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
     "without a 'name' and an object of 'arguments'"),
    ("arguments", {"conversations": [{"from": "function_call", "value": '{"name": "f"}'}]}, "'arg"),
    ("custom", {"messages": [{"role": "assistant", "tool_calls": [
        {"type": "custom", "name": "f", "arguments": {}}]}]}, "turn 0 calls what is no function"),
    # Media
    ("fps alone", chat([{"type": "video", "fps": 2.0}], "a", video="v.mp4"), "fps and no frames"),
    ("url", chat([{"type": "image_url", "image_url": {"url": "http://a/c"}}], "a"), "is a URL"),
    ("part", chat([{"type": "input_audio", "input_audio": {"data": "x"}}], "a"), "audio is not"),
    ("two", chat([{"type": "image", "image": "a", "path": "b"}], "a"), "two files"),
    ("windows", conversation("<image>?", "a", image="images\\a.jpg"), "write images/a.jpg"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "said"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^c.json: sample 's1': .*{said}"):
        parse({"id": "s1", **record})


CALL = {"name": "aqi", "arguments": {"city": "Beijing"}}
CALLED = ({"type": "function", "function": CALL},)
TOOL = {"name": "aqi", "description": "air", "parameters": {"type": "object"}}
PLAIN = [("user", "q"), ("assistant", "a")]
READ: list[tuple[str, dict[str, Any], list[tuple[Any, ...]], list[str]]] = [
    ("llama-factory", chat("<image>Who?", "They.", images=["mllm_demo_data/1.jpg"]),
     [("user", "<image>Who?"), ("assistant", "They.")], ["mllm_demo_data/1.jpg"]),
    ("v1", chat([{"type": "image_url", "value": "1.jpg"}, {"type": "text", "value": "Who?"}],
                [{"type": "text", "value": "They."}]),
     [("user", "<image>Who?"), ("assistant", "They.")], ["1.jpg"]),
    ("v1 weights", {"messages": [
        {"role": "user", "content": [{"type": "video_url", "value": "v.gif"}], "loss_weight": 0.0},
        {"role": "assistant", "content": [{"type": "text", "value": "a"}], "loss_weight": 0.5}]},
     [("user", "<video>"), ("assistant", "a", 0.5)], ["v.gif"]),
    ("swift loss", {"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": False},
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": True}]},
     [("user", "q"), ("assistant", "a", 0.0), *PLAIN], []),
    ("loss of a table", {"messages": [
        {"role": "user", "content": "q", "loss": 0},
        {"role": "assistant", "content": "a", "loss": 0},
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": 0.0},
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": 1}]},
     [("user", "q"), ("assistant", "a", 0.0), ("user", "q"), ("assistant", "a", 0.0), *PLAIN], []),
    ("openai weight", {"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]},
     [("user", "q"), ("assistant", "a", 0.0)], []),
    ("openai image", chat([{"type": "text", "text": "q"},
                           {"type": "image_url", "image_url": {"url": "a.png"}}], "a"),
     [("user", "q<image>"), ("assistant", "a")], ["a.png"]),
    ("qwen-vl-utils", chat([{"image": "a.png"}, {"text": "q"},
                            {"type": "video", "video": ["0.png", "1.png"], "fps": "2.0"}], "a"),
     [("user", "<image>q<video>"), ("assistant", "a")], ["a.png", "0.png ... (2 frames)"]),
    ("trl vision", chat([{"type": "image", "text": None, "index": 0},
                         {"type": "text", "text": "q", "index": None}], "a", images=["a.png"]),
     [("user", "<image>q"), ("assistant", "a")], ["a.png"]),
    ("query", {"query": "q", "response": "a", "history": [["x", "y"]], "system": "s"},
     [("system", "s"), ("user", "x"), ("assistant", "y"), *PLAIN], []),
    ("swift sharegpt", {"system": "s", "conversation": [{"human": "q", "assistant": "a"}] * 2},
     [("system", "s"), *PLAIN, *PLAIN], []),
    ("the cauldron", {"texts": [{"user": "<image>q", "assistant": "a", "source": "AI2D"}],
                      "images": ["a.png"]},
     [("user", "<image>q"), ("assistant", "a")], ["a.png"]),
    ("prompt", {"prompt": "q", "completion": "a"}, PLAIN, []),
    ("trl prompt", {"prompt": chat("x", "y", "q")["messages"],
                    "completion": [{"role": "assistant", "content": "a"}]},
     [("user", "x"), ("assistant", "y", 0.0), *PLAIN], []),
    ("trl prompt with weights", {"prompt": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5},
        {"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
     [("user", "x"), ("assistant", "y", 0.5), *PLAIN], []),
    ("alpaca", {"instruction": "q", "input": "", "output": "a", "history": []}, PLAIN, []),
    ("string", {"conversations": json.dumps(conversation("q", "a")["conversations"])}, PLAIN, []),
    ("text", {"text": "a document"}, [("assistant", "a document")], []),
    ("swift pt", {"messages": [{"role": "assistant", "content": "<image>is a puppy"}],
                  "images": ["x.jpg"]}, [("assistant", "<image>is a puppy")], ["x.jpg"]),
    ("glaive", {"conversations": [
        {"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"aqi": 10}'}, {"from": "gpt", "value": "a"}],
        "tools": json.dumps([TOOL])},
     [("user", "q"), ("assistant", "", 1.0, CALLED), ("tool", '{"aqi": 10}'), ("assistant", "a")],
     []),
    ("swift agent", {"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\n</think>\n"},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "tool_response", "content": "10"}, {"role": "assistant", "content": "a"}],
        "tools": json.dumps([{"type": "function", "function": TOOL}])},
     [("user", "q"), ("assistant", "<think>\n</think>\n", 1.0, CALLED * 2), ("tool", "10"),
      ("assistant", "a")], []),
    ("openai tools", {"messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "aqi", "arguments": '{"city": "Beijing"}'}}]},
        {"role": "tool", "tool_call_id": "1", "name": "aqi", "content": "10"},
        {"role": "assistant", "content": "a"}], "tools": [{"type": "function", "function": TOOL}]},
     [("user", "q"), ("assistant", "", 1.0, CALLED), ("tool", "10"), ("assistant", "a")], []),
    ("swift grounding", chat("<image>Find the <ref-object>", "<bbox><bbox>", images=["x.jpg"],
        objects={"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8], [1, 2]]}),
     [("user", "<image>Find the <ref-object>"), ("assistant", "<bbox><bbox>")], ["x.jpg"]),
]  # fmt: skip
RECORDS = [record for _, record, _, _ in READ]


@pytest.mark.parametrize(
    ("record", "turns", "media"), [c[1:] for c in READ], ids=[c[0] for c in READ]
)
def test_read(record: dict[str, Any], turns: list[Any], media: list[str]) -> None:
    sample = parse(record)
    assert sample.turns == tuple(Turn(*turn) for turn in turns)
    assert [medium.name for medium in sample.media] == media
    assert bool(sample.tools) == ("tools" in record)
    if sample.tools:
        assert sample.tools == ({"type": "function", "function": TOOL},)
    if "objects" in record:
        boxes = (Box((90.9, 160.8, 135.0, 212.8)), Box((1.0, 2.0)))
        assert sample.objects == Objects(("sheep",), boxes)


def test_a_part_keeps_its_file_beside_a_list() -> None:
    """A list of images and a path in the content: each mark gets what was meant for it."""
    parts = [{"type": "image", "image": "own.png"}, {"type": "text", "text": "<image>?"}]
    sample = parse(chat(parts, "a", images=["listed.png"]))
    assert [media.name for media in sample.media] == ["own.png", "listed.png"]


def test_bytes_in_records(tmp_path: Path) -> None:
    data = save_image(tmp_path / "a.png", 30, 30).read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    part = {"type": "image_url", "image_url": {"url": uri}}
    for record in (chat([part], "a"), conversation("<image>", "a", image=uri)):
        [media] = parse(record).media
        assert media.parts[0].read() == data and media.name == "image.png"
    clip = b"\0\0\0\x20ftypisom"
    for value in (clip, {"bytes": clip, "path": None}):
        [media] = parse(conversation("<video>", "a", video=value)).media
        assert media.parts[0].read() == clip and media.name == "video.mp4"


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object of a record whose keys are read here: not those of a tool's schema or call."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            if key not in ("tools", "arguments"):
                yield from objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner)


@pytest.mark.parametrize("number", range(len(RECORDS)), ids=[c[0] for c in READ])
def test_unknown_keys_everywhere(number: int) -> None:
    """A key that nobody reads is an error, wherever it stands; harmless ones change nothing."""
    record = {"id": "s1", **RECORDS[number]}
    whole = parse(record)
    for place in range(len(list(objects(record)))):
        for key, value in [
            ("foo", 0),
            ("foo", False),
            ("foo", "x"),
            *((k, [1]) for k in _REASON_OF),
        ]:
            changed = copy.deepcopy(record)
            target = list(objects(changed))[place]
            if key in target or (key == "fps" and "video" in target):
                continue
            target[key] = value
            with pytest.raises(DataError, match="sample 's1'") as caught:
                parse(changed)
            assert key in str(caught.value)
            if f'"{key}"' not in json.dumps(record):
                assert parse(changed, ignored=(key,)) == whole
        changed = copy.deepcopy(record)
        list(objects(changed))[place] |= {"license": "MIT", "foo": None, "audios": []}
        assert parse(changed) == whole


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(RECORDS),
    st.integers(0, 1 << 30),
    st.text(max_size=8) | st.sampled_from(["role", "from", "type", "text", "loss", "weight", "fps",
        "images", "video", "path", "bytes", "system", "history", "tools", "ref", "image_id"]),
    st.sampled_from([True, 0, 2.5, "text", ["x"], {"a": 1}, [{"role": "user", "content": "x"}]]),
)  # fmt: skip
def test_no_key_is_left_out_in_silence(record: Any, at: int, key: str, value: Any) -> None:
    """Whatever key is added: an error, another sample, or a key that is known to say nothing."""
    whole, changed = parse(record), copy.deepcopy(record)
    places = list(objects(changed))
    target = places[at % len(places)]
    if key in target:
        return
    target[key] = value
    try:
        sample = parse(changed)
    except DataError:
        return
    unsaid = (key, value) in [("loss", True), ("loss", 0), ("weight", 0)]  # what holds anyway
    unsaid = unsaid or (key, value) == ("type", "text") and "text" in target
    assert sample != whole or key in HARMLESS or is_empty(value) or unsaid


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (chat("q", HALF), "it holds half a character"),
        (chat("q", "a", note=HALF), "it holds half a character"),
        (chat("q", "a", **{HALF: 1}), "it holds half a character"),
        (chat("q", "a", images=[f"http://{HALF}"]), "it holds half a character"),
        (chat("q", "a", tools=[{**TOOL, "name": HALF}]), "it holds half a character"),
        (chat("q", "a", tools=json.dumps([{**TOOL, "name": HALF}])), "'tools' must be"),
        (chat("q", "a", objects=json.dumps({"ref": [HALF]})), "'objects' must be"),
        ({"conversations": json.dumps(chat("q", HALF)["messages"])}, "its list of turns must be"),
    ],
)
def test_half_a_character_anywhere(record: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^c.json: sample 's1': {said}"):
        parse({"id": "s1", **record})


def test_half_a_character_in_the_id() -> None:
    with pytest.raises(DataError, match=r"sample '.*ud83d': it holds half a character") as caught:
        parse({**chat("q", "a"), "id": HALF})
    str(caught.value).encode()


def test_marks_can_be_kept_as_text() -> None:
    sample = parse(chat("write <audio> in HTML", "<audio>"), ignored=("<audio>",))
    assert sample.turns[1].text == "<audio>"
