"""Reading conversation files: accepted forms and every refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import conversation, save_image, write_json
from vlmtrain.data.check import check
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.json_source import JsonSource
from vlmtrain.data.formats.sources import SourceSpec
from vlmtrain.data.sample import Sample, Turn


def read(path: Path, **options: Any) -> list[Sample]:
    source = JsonSource(path, **options)
    samples = []
    for record in source.records():
        if isinstance(record, DataError):
            raise record
        # The recorded byte range must give the record again.
        assert path.read_bytes()[record.offset :][: len(record.data)] == record.data
        samples.append(source.parse(record))
    return samples


def one(tmp_path: Path, record: Any) -> Sample:
    return read(write_json(tmp_path / "c.json", [record]))[0]


def test_llava_record(tmp_path: Path) -> None:
    record = conversation("<image>\nWhat?", "A cup.", "Sure?", "Yes.", id=7, image="a/b.jpg")
    sample = one(tmp_path, record)
    assert sample.id == "7"
    assert sample.turns == (
        Turn("user", "<image>\nWhat?"),
        Turn("assistant", "A cup."),
        Turn("user", "Sure?"),
        Turn("assistant", "Yes."),
    )
    [media] = sample.media
    assert (media.kind, media.name) == ("image", "a/b.jpg")
    assert media.parts[0].path == str(tmp_path / "a/b.jpg")


def test_openai_messages_and_marks_anywhere(tmp_path: Path) -> None:
    record = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "first <video> then <image>"},
            {"role": "assistant", "content": "ok <image>"},
        ],
        "images": ["1.png", "2.png"],
        "videos": ["v.mp4"],
    }
    sample = one(tmp_path, record)
    assert sample.id == "c.json:0"
    assert sample.turns[0] == Turn("system", "Be brief.")
    assert [(media.kind, media.name) for media in sample.media] == [
        ("video", "v.mp4"),
        ("image", "1.png"),
        ("image", "2.png"),
    ]


def test_media_inside_the_content_list(tmp_path: Path) -> None:
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " and "},
        {"type": "video", "video": ["f0.png", "f1.png"], "fps": 3},
    ]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
    sample = one(tmp_path, {"messages": turns})
    assert sample.turns[0].text == "<image> and <video>"
    image, video = sample.media
    assert image.name == "a.png"
    assert video.frame_list and len(video.parts) == 2 and video.fps == 3


def test_video_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in (1, 0):
        save_image(tmp_path / f"f{i}.png", 30, 30)
    (tmp_path / "notes.txt").write_text("not a frame")
    turns = ("<video>?", "x")
    for value in (
        ["f0.png", "f1.png"],
        ".",
        f"file://{tmp_path}",
        {"frames": ["f0.png", "f1.png"], "fps": 4},
    ):
        [media] = one(tmp_path, conversation(*turns, video=value)).media
        assert [Path(part.path).name for part in media.parts] == ["f0.png", "f1.png"]
        assert media.frame_list and media.fps == (4 if isinstance(value, dict) else None)
    for i in (1, 2, 10, 11):
        (tmp_path / "many").mkdir(exist_ok=True)
        save_image(tmp_path / "many" / f"f{i}.png", 30, 30)
    (tmp_path / "many" / "._f1.png").write_bytes(b"what macOS writes beside f1.png")
    save_image(tmp_path / "many" / ".preview.png", 30, 30)
    [media] = one(tmp_path, conversation(*turns, video="many")).media
    assert [Path(part.path).stem for part in media.parts] == ["f1", "f2", "f10", "f11"]
    # Relative all the way: the data file, and the folder of frames beside it.
    (tmp_path / "in" / "frames").mkdir(parents=True)
    save_image(tmp_path / "in" / "frames" / "f0.png", 30, 30)
    write_json(tmp_path / "in" / "c.json", [conversation(*turns, video="frames")])
    monkeypatch.chdir(tmp_path)
    [media] = read(Path("in/c.json"))[0].media
    assert media.parts[0].path == "in/frames/f0.png"
    [media] = one(tmp_path, conversation(*turns, video="v.mp4")).media
    assert not media.frame_list
    two = one(tmp_path, conversation("<video><video>", "x", video=["a.mp4", "b.mp4"])).media
    assert [media.name for media in two] == ["a.mp4", "b.mp4"]
    [media] = one(tmp_path, conversation(*turns, videos=[["f0.png", "f1.png"]])).media
    assert media.frame_list


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (
            {"type": "image", "image": "a.png", "max_pixels": 50176},
            "a part of turn 0 has the key 'max_pixels', a setting of its own",
        ),
        (
            {"type": "video", "video": "v.mp4", "video_start": 2.5},
            "a part of turn 0 has the key 'video_start', a part of a video, which is not cut out",
        ),
        ({"type": "image", "image": {"path": "a.png", "resized_height": 56}}, "'resized_height'"),
        (
            {"type": "image", "image": "data:image/png;base64,A"},
            "data URI data:image/png;base64,A... that cannot be decoded",
        ),
        ({"type": "video", "video": "x" * 5000}, "is no file path but 5000 characters"),
        ({"type": "video", "video": "v.mp4", "fps": 1.0}, "fps 1 was given for the video file"),
    ],
)
def test_what_other_readers_take_is_refused(entry: Any, named: str, tmp_path: Path) -> None:
    """qwen-vl-utils reads settings of single media, which would be ignored here, and content."""
    turns = [{"role": "user", "content": [entry]}, {"role": "assistant", "content": "x"}]
    with pytest.raises(DataError, match=f"sample 's': .*{named}"):
        one(tmp_path, {"id": "s", "messages": turns})


def test_array_lines_bom_and_unicode_give_the_same(tmp_path: Path) -> None:
    records = [
        conversation("Größe 日本 🚀", f"Antwort {i}", id=f"ü{i}", system="Sys ü") for i in range(4)
    ]
    expected = read(write_json(tmp_path / "a.json", records))
    assert [sample.id for sample in expected] == ["ü0", "ü1", "ü2", "ü3"]
    assert expected[0].turns[0] == Turn("system", "Sys ü")
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    forms = {
        "pretty.json": json.dumps(records, ensure_ascii=False, indent=2).encode(),
        "ascii.json": json.dumps(records).encode(),
        "bom.json": b"\xef\xbb\xbf" + json.dumps(records, ensure_ascii=False).encode(),
        "lines.jsonl": "\n".join(lines).encode(),
        "lines.json": ("\n".join(lines) + "\n\n").encode(),  # named .json, as many are
        "bom.jsonl": b"\xef\xbb\xbf" + "\r\n \r\n".join(lines).encode(),
    }
    for name, data in forms.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert [s.turns for s in read(path)] == [s.turns for s in expected], name
    path = tmp_path / "single.jsonl"
    pretty = json.dumps(records[0], indent=2)
    for text in (lines[0], pretty, "\ufeff" + lines[0], "\ufeff\n " + pretty):
        path.write_text(f"\n {text}\n" if text[0] == "{" else text, encoding="utf-8")
        assert [s.turns for s in read(path)] == [expected[0].turns], text


BAD_RECORDS: list[tuple[Any, str]] = [
    (["x"], "record 0 is a list; it must be an object"),
    ({"id": "s"}, "sample 's': it has no 'conversations'"),
    ({"id": "s", "conversations": []}, "sample 's': its list of turns must be a list with"),
    ({"id": "s", "conversations": ["x"]}, "sample 's': turn 0 is not an object"),
    (
        {"id": "s", "conversations": [{"from": "bot", "value": "x"}]},
        "sample 's': turn 0 has the unknown role 'bot'; use one of human, user, gpt",
    ),
    ({"id": "s", "messages": [{"role": "user"}]}, "sample 's': turn 0 has no text"),
    (
        {"id": "s", "messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "sample 's': turn 0 holds a content part that is no text, image or video",
    ),
    (
        {"id": "s", "messages": [{"role": r, "content": "x"} for r in ("assistant", "user")]},
        "sample 's': the first turn is the assistant's; begin with a human turn",
    ),
    (conversation("x", id="s"), "sample 's': it has no assistant turn"),
    (
        {
            "id": "s",
            "system": "a",
            "messages": [{"role": "system", "content": "b"}],
        },
        "sample 's': turn 0 is a second or late system prompt",
    ),
    (
        conversation("<image>", "x", id="s"),
        "sample 's': it has 1 <image> mark but 0 images; put one <image> in the text for each",
    ),
    (
        conversation("<image>", "x", id="s", image=["a.png", "b.png"]),
        "sample 's': it has 1 <image> mark but 2 images",
    ),
    (conversation("hi", "x", id="s", video="v.mp4"), "has 0 <video> marks but 1 video;"),
    (conversation("<image>", "x", id="s", image=3), "sample 's': an image must be a file path"),
    (
        conversation("<image>", "x", id="s", image="https://a.b/c.png"),
        "sample 's': https://a.b/c.png is a URL; download it",
    ),
    (conversation("<image>", "x", id="s", image="a\0.png"), "'a\\x00.png' holds a zero byte"),
    (
        conversation("<image>", "x", id="s", image="data:image/png,YWJj"),
        "that cannot be decoded: it must begin with data:TYPE;base64,",
    ),
    (conversation("<video>", "x", id="s", video={"fps": 2}), "a video must be a file, a folder"),
    (
        conversation("<video>", "x", id="s", video={"video": "v.mp4", "fps": 0}),
        "fps must be a number above 0, got 0",
    ),
    (conversation("<video>", "x", id="s", video="empty"), "the video folder empty holds no images"),
    (
        conversation("<video>", "x", id="s", videos=[["v.mp4"]]),
        "v.mp4 stands where a video's frames are listed; write a video file as its path",
    ),
    (
        conversation("<video></video> What?", "x", id="s", video="v.mp4"),
        "turn 0 holds the mark </video>, which is not read",
    ),
]


@pytest.mark.parametrize("case", range(len(BAD_RECORDS)))
def test_bad_record(case: int, tmp_path: Path) -> None:
    record, message = BAD_RECORDS[case]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        one(tmp_path, record)
    assert str(caught.value).startswith(str(tmp_path / "c.json"))


BAD_FILES: list[tuple[bytes, str]] = [
    (b"", "the file is empty"),
    (b" \n", "the file is empty"),
    (b"[]", "the list is empty"),
    (b"hello", "line 1 is not valid JSON"),
    (b'[{"id": 1}', "expected ',' or ']' after record 0; is the file cut short?"),
    (b'[{"id": 1}, {"id"', r"not valid JSON at line 1, column 18 (record 1)"),
    (b"[{}] x", "text after the closing ']'"),
    ('[{"id": 1}]'.encode("utf-16"), "the file is UTF-16; write it as UTF-8"),
    (b'["\xff"]', "byte 2 is not UTF-8"),
    (b'{"data": []}', "the file holds one object with keys ['data']"),
    (b'{"messages": 1}\n{"messages"\n', "line 2 is not valid JSON"),
    (b'{"messages": 1}\n"\xff"\n', "line 2 is not valid JSON"),
]


@pytest.mark.parametrize("case", range(len(BAD_FILES)))
def test_bad_file(case: int, tmp_path: Path) -> None:
    data, message = BAD_FILES[case]
    path = tmp_path / "c.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        # Only the file's form matters here, not what the records hold.
        for record in JsonSource(path).records():
            if isinstance(record, DataError):
                raise record
    assert str(caught.value).startswith(f"{path}: ")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; name a .json, .jsonl or .parquet file"):
        read(tmp_path / "none.json")


def test_tables_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,response\n")
    with pytest.raises(DataError, match="a.csv: tables of this form are not read; write it as"):
        list(JsonSource(tmp_path / "a.csv").records())


def test_good_records_are_written(tmp_path: Path) -> None:
    records = [conversation("q", "größe", id="a"), conversation("q", id="b"), {"c": 1}]
    source, target = write_json(tmp_path / "c.json", records), tmp_path / "good.jsonl"
    report = check([source], write_good=target)
    assert len(report.problems) == 2
    assert [json.loads(line) for line in target.read_text().splitlines()] == records[:1]
    assert check([target]).ok
    (tmp_path / "other").mkdir()
    for bad, said in ((source, "is a source"), (tmp_path / "other" / "x.jsonl", "paths of media")):
        with pytest.raises(DataError, match=said):
            check([source], write_good=bad)
    roots = [tmp_path / "other", tmp_path]  # a name without a folder would be looked for in one
    listed = [SourceSpec(str(source), media_root=str(root)) for root in roots]
    with pytest.raises(DataError, match="start from 2 folders"):
        check(listed, write_good=tmp_path / "good2.jsonl")
