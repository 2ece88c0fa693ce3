"""Files that are broken, hostile or odd: an error that names the sample, or the right pixels;
never a crash, a hang or a sample lost in silence."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.helpers import conversation, save_image, write_json
from tests.data.test_videos import write_video
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.check import check
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.json_source import JsonSource
from vlmtrain.data.index import scan_sources
from vlmtrain.data.media import images
from vlmtrain.data.media.videos import load_frames, probe_media
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import FileRange, Media, Sample

SAMPLE = Sample("s7", (), (), "c.json")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("originals")
    for name in ("a.jpg", "a.png", "a.webp", "a.gif", "a.bmp", "a.tif"):
        save_image(folder / name, 90, 60, 3)
    write_video(folder / "a.mp4", 6, size=(64, 48))
    return {path.suffix[1:]: path.read_bytes() for path in sorted(folder.iterdir())}


def media_of(path: Path) -> Media:
    kind: Any = "video" if path.suffix == ".mp4" else "image"
    return Media(kind, path.name, (FileRange(str(path)),))


def read(path: Path, processor: Processor) -> np.ndarray:
    media = media_of(path)
    probe_media(media, SAMPLE, verify=True)
    return load_frames(media, SAMPLE, processor.images, processor.videos)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "tif", "bmp", "mp4"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
def test_cut_files(
    suffix: str, share: float, originals: dict[str, bytes], processor: Processor, tmp_path: Path
) -> None:
    whole = originals[suffix]
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match="sample 's7': .*cut") as caught:
        read(path, processor)
    assert caught.value.kind == "unreadable" and caught.value.sample_id == "s7"


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_flipped_bytes(
    data: st.DataObject, originals: dict[str, bytes], processor: Processor, tmp_path_factory: Any
) -> None:
    """Any damage gives frames of the right kind or an error of ours; nothing else."""
    suffix = data.draw(st.sampled_from(sorted(originals)))
    damaged = bytearray(originals[suffix])
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / f"damaged.{suffix}"
    path.write_bytes(damaged)
    try:
        frames = read(path, processor)
    except DataError as error:
        assert "sample 's7'" in str(error)
    else:
        assert frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[3] == 3


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_8_bits_of_grey(mode: str, tmp_path: Path, processor: Processor) -> None:
    """PIL makes them white: every value above 255 is cut off."""
    values = np.full((40, 40), 30000, dtype={"I;16": "uint16", "I": "int32", "F": "float32"}[mode])
    path = tmp_path / ("a.png" if mode == "I;16" else "a.tif")
    Image.fromarray(values).save(path)
    assert Image.open(path).convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(DataError, match=f"a.(png|tif) has more than 8 bits .* .mode {mode}"):
        read(path, processor)


def test_extreme_shapes(tmp_path: Path, processor: Processor) -> None:
    frames = read(save_image(tmp_path / "one.png", 1, 1), processor)
    assert frames.shape == (1, 56, 56, 3)  # min_pixels: 4 tokens
    assert len(np.unique(frames.reshape(-1, 3), axis=0)) == 1
    with pytest.raises(DataError, match="thin.png: the image is 30000x10 pixels; one side may be"):
        read(save_image(tmp_path / "thin.png", 30000, 10), processor)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that claims that size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    png = b"\x89PNG\r\n\x1a\n"
    return png + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("own_limit", [True, False])
def test_decompression_bombs_are_refused(
    own_limit: bool, tmp_path: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where another library has switched PIL's check off."""
    (tmp_path / "bomb.png").write_bytes(bomb(60000, 60000))
    if not own_limit:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(DataError, match=f"bomb.png has more than {images.MAX_FILE_PIXELS} pixels"):
        read(tmp_path / "bomb.png", processor)


def test_what_is_no_file(tmp_path: Path, processor: Processor) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")  # opening it would wait for ever
    for path in (tmp_path / "pipe.jpg", tmp_path, Path("/dev/zero")):
        with pytest.raises(DataError, match="sample 's7': .* is not a file"):
            read(path, processor)


def test_hostile_records(tmp_path: Path) -> None:
    """Each bad line is reported in its place; the good ones around it are found."""
    good = json.dumps(conversation("q", "a", id="good")).encode()
    bad = {
        b"{": "line 2 is not valid JSON",
        b'{"id": "\xff\xfe", "conversations": []}': "line 3 is not valid JSON",
        b"[" * 100_000: "line 4 is not valid JSON",
        b"7": "record 4 is a int",
        b'{"id": "x1", "messages": [{"role": "user", "content": "\\ud83d"}]}': "half a character",
        json.dumps(conversation("<image>", "a", id="x2", image="a\0b")).encode(): "a zero byte",
        json.dumps(conversation("<image>", "a", id="x3", image="http://x/y.jpg")).encode(): "a URL",
        json.dumps(conversation("<image>", "a", id="x4", image={"a": 1})).encode(): "key 'a'",
        json.dumps(conversation("<video>", "a", id="x5", video="\0")).encode(): "a zero byte",
        b'{"id": "x6", "conversations": "text"}': "must be a list",
        b'{"id": "x7", "instruction": 3}': "'instruction' must be a string",
        b'{"id": "x8", "instruction": "a", "history": [1]}': "'history' must be a list",
        b'{"id": "x9", "instruction": "a", "output": null}': "turn 1 has no text",
        b'{"id": "y1", "instruction": "a", "output": "b", "tools": "[3]"}': "'tools'",
    }
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join([good, *bad, good]))
    report = check([path])
    assert report.samples == len(bad) + 2 and len(report.problems) == len(bad)
    for problem, expected in zip(report.problems, bad.values(), strict=True):
        assert expected in problem
    nested = tmp_path / "n.json"
    nested.write_bytes(b"[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply|not valid JSON"):
        list(JsonSource(nested).records())
    (tmp_path / "latin.json").write_bytes('[{"id": "ä"}]'.encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8"):
        list(JsonSource(tmp_path / "latin.json").records())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "id",
                        "conversations",
                        "messages",
                        "from",
                        "value",
                        "role",
                        "content",
                        "image",
                        "images",
                        "video",
                        "fps",
                        "frames",
                        "type",
                        "text",
                        "system",
                        "instruction",
                        "output",
                        "history",
                        "bytes",
                        "path",
                        *("prompt", "completion", "query", "texts", "conversation", "user"),
                        *("objects", "ref", "bbox", "tools", "tool_calls", "function"),
                        *("name", "arguments", "loss", "weight", "image_url", "url"),
                    ]
                )
                | st.text(max_size=3),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_sample_or_an_error(tmp_path_factory: Any, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps([value]))
    source = JsonSource(path)
    for record in source.records():
        assert not isinstance(record, DataError)
        try:
            sample = source.parse(record)
        except DataError as error:
            assert "any.json" in str(error)
        else:
            assert sample.turns


def test_bad_samples_are_left_out_with_a_report(
    tmp_path: Path, pictures: Path, processor: Processor, spec: ModelSpec
) -> None:
    whole = (pictures / "p2.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    records = [
        conversation("fine", "x", id="ok"),
        conversation("<image>", "x", id="cut", image="cut.jpg"),
        conversation("<video>", "x", id="gone", video="none.mp4"),
        conversation("<image>", "x", id="marks"),
        conversation("fine too", "x", id="ok2"),
    ]
    path = write_json(tmp_path / "c.json", records)
    said: list[str] = []
    index = scan_sources([path], processor, spec, 256, skip_limit=3, log=said.append)
    assert index.ids == ["ok", "ok2"] and len(index.skipped) == 3
    for name, line in zip(("cut", "gone", "marks"), said, strict=False):
        assert line.startswith("left out: ") and f"sample '{name}'" in line
    assert said[-1].endswith("3 bad samples left out")
    with pytest.raises(DataError, match="3 samples are bad, more than the 2 that --loader.skip_"):
        scan_sources([path], processor, spec, 256, skip_limit=2)
    with pytest.raises(DataError, match="no such file"):  # no policy skips a whole file
        scan_sources([tmp_path / "none.json"], processor, spec, 256, skip_limit=9)
    write_json(path, records[1:2])
    with pytest.raises(DataError, match="all 1 samples are bad; .*; the last: .*'cut'"):
        scan_sources([path], processor, spec, 256, skip_limit=9)


def test_animation_and_orientation_through_the_whole_path(
    tmp_path: Path, processor: Processor
) -> None:
    """An animated GIF is its first frame; a turned JPEG stands upright."""
    frames = [Image.open(save_image(tmp_path / f"{i}.png", 60, 50, i)) for i in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "first.gif")
    first = read(tmp_path / "a.gif", processor)
    buffer = io.BytesIO()
    Image.open(tmp_path / "a.gif").convert("RGB").save(buffer, "PNG")
    (tmp_path / "b.png").write_bytes(buffer.getvalue())
    np.testing.assert_array_equal(first, read(tmp_path / "b.png", processor))
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = Image.open(save_image(tmp_path / "w.png", 120, 56))
    wide.save(tmp_path / "turned.jpg", exif=exif)
    assert read(tmp_path / "turned.jpg", processor).shape == (1, 112, 56, 3)
