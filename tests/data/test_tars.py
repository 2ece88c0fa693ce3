"""Shards that webdataset and energon's users write: read for what they hold, or refused."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset
from braceexpand import braceexpand
from PIL import Image

from tests.data.helpers import conversation
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.check import check
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.sources import parse_sources
from vlmtrain.data.formats.tars import TarSource, _braces
from vlmtrain.data.formats.webdataset import build_shards
from vlmtrain.data.index import scan_sources
from vlmtrain.data.processor import Processor
from vlmtrain.data.sample import Sample, Turn


def write(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"sample{number:04d}", **sample})
    return path


def samples(path: Path) -> list[Sample]:
    source = TarSource(path)
    return [source.parse(record) for record in source.records()]


@pytest.fixture
def jpg(pictures: Path) -> bytes:
    return (pictures / "p0.jpg").read_bytes()


def test_records_and_captions(jpg: bytes, pictures: Path, tmp_path: Path) -> None:
    png = (pictures / "p4.png").read_bytes()
    two = conversation("<image> or <image>?", "a", id="two")
    named = conversation("<image> or <image>?", "a", images=["1.png", "sample0002.0.jpg"])
    crawled = {"caption": "a cat", "url": "http://x/y.jpg", "status": "success", "width": 80}
    path = write(tmp_path / "a.tar", [
        {"jpg": jpg, "txt": "a cat", "json": crawled},
        {"1.png": png, "0.jpg": jpg, "json": two},
        {"0.jpg": jpg, "1.png": png, "json": named},
        {"json": conversation("q", "a")},
    ])  # fmt: skip
    build_shards(path, tmp_path / "built")  # under names by which others know what they hold
    with tarfile.open(tmp_path / "built" / "shard-000000.tar") as tar:
        suffixes = Counter(name.rpartition(".")[2] for name in tar.getnames())
    assert suffixes == {"json": 4, "jpg": 3, "png": 2}
    caption, first, second, text = samples(path)
    assert caption.turns == (Turn("assistant", "<image>a cat"),)
    assert (caption.id, first.id, text.media) == ("sample0000", "two", ())
    for sample, expected in ((caption, [jpg]), (first, [jpg, png]), (second, [png, jpg])):
        assert [media.parts[0].read() for media in sample.media] == expected


def test_scanned_and_loaded_like_any_source(
    jpg: bytes, tmp_path: Path, processor: Processor
) -> None:
    for number in (10, 2):
        write(tmp_path / "s" / f"part-{number}.tar", [{"jpg": jpg, "txt": f"picture {number}"}] * 2)
    index = scan_sources([tmp_path / "s"], processor, processor.spec, 200)
    assert [Path(source.path).name for source in index.sources] == ["part-2.tar", "part-10.tar"]
    assert [index.load(i).turns[0].text for i in (0, 3)] == [
        "<image>picture 2",
        "<image>picture 10",
    ]
    assert index.load(3).media[0].info is not None
    assert check([tmp_path / "s" / "part-2.tar"]).ok


@pytest.mark.parametrize(
    ("kind", "fields", "turns"),
    [
        ("CaptioningSample", {"image": "jpg", "caption": "json[meta][caption]"},
         (Turn("assistant", "<image>a cat"),)),
        ("VQASample", {"image": "jpg", "context": "json[qa][0]", "answers": "json[answers]",
                       "answer_weights": "json[weights]"},
         (Turn("user", "<image>what?"), Turn("assistant", "a cat"))),
        ("VidQASample", {"video": "mp4", "context": "json[qa][0]", "answers": "json[answers][1]"},
         (Turn("user", "<video>what?"), Turn("assistant", "a cat"))),
        ("CaptioningSample", {"image": "png,jpg", "caption": "json[meta][caption]"},
         (Turn("assistant", "<image>a cat"),)),
        ("TextSample", {"text": "txt"}, (Turn("assistant", "only text"),)),
    ],
)  # fmt: skip
def test_energons_types(
    kind: str, fields: dict[str, str], turns: Any, jpg: bytes, tmp_path: Path
) -> None:
    values = {"meta": {"caption": "a cat"}, "qa": ["what?"], "answers": ["cat", "a cat"],
              "weights": [0.1, 0.9]}  # fmt: skip
    for number in range(4):
        write(tmp_path / f"shard_{number}.tar", [
            {"jpg": jpg, "json": values, "txt": "only text", "mp4": b"film"}
        ])  # fmt: skip
    meta = tmp_path / ".nv-meta"
    meta.mkdir()
    config = {"sample_type": {"__module__": "megatron.energon", "__class__": kind}}
    (meta / "dataset.yaml").write_text(json.dumps({**config, "field_map": fields}))
    (meta / "split.yaml").write_text(
        "split_parts:\n  train: ['shard_{0..2}.tar']\n  val: [shard_3.tar]\n"
    )
    (tmp_path / "more.jsonl").touch()
    names = [Path(source.path).name for source in parse_sources([tmp_path])]
    assert names == ["more.jsonl", "shard_0.tar", "shard_1.tar", "shard_2.tar"]  # none held out
    del names[0]
    [sample] = samples(tmp_path / names[0])
    assert sample.turns == turns
    film = ("video", b"film") if kind == "VidQASample" else ("image", jpg)
    actual = [(media.kind, media.parts[0].read()) for media in sample.media]
    assert actual == [film] * (kind != "TextSample")


@pytest.mark.parametrize("name", ["split.yaml", "split.json"])
def test_what_energons_split_leaves_out(name: str, tmp_path: Path) -> None:
    """Whole shards, and single samples, by energon's rule: `shard.tar/KEY`. JSON is YAML too."""
    for number in range(5):
        write(tmp_path / f"shard_{number}.tar", [{"txt": f"{number} {key}"} for key in range(3)])
    meta = tmp_path / ".nv-meta"
    meta.mkdir()
    exclude = ["shard_{1..2}.tar", "shard_0.tar/sample000{0,2}", "shard_4.tar/sample0000"]
    parts = {"train": ["shard_{0..3}.tar"], "val": ["shard_4.tar"]}
    (meta / name).write_text(json.dumps({"exclude": exclude, "split_parts": parts}))
    sources = [Path(source.path) for source in parse_sources([tmp_path])]
    read = {path.name: [one.turns[0].text for one in samples(path)] for path in sources}
    assert read == {"shard_0.tar": ["0 1"], "shard_3.tar": ["3 0", "3 1", "3 2"]}
    source = TarSource(tmp_path / "shard_0.tar")
    assert source.parse(source.read(0, 0, 0)).turns[0].text == "0 1"
    for pattern, said in (
        ("shard_{a..c}.tar", "shard_{a..c}.tar is not read; write ranges {000..002}"),
        ("more/shard.tar/sample0", "exclude names the sample more/shard.tar/sample0"),
    ):
        (meta / name).write_text(json.dumps({"exclude": [pattern], "split_parts": parts}))
        with pytest.raises(DataError, match=re.escape(f"{meta / name}: {said}")):
            parse_sources([tmp_path])


@pytest.mark.parametrize(
    "pattern",
    [
        "a-{000..002}.tar",
        "{a,b}.tar",
        "{8..10}",
        "{01..100}",
        "{3..1}",
        "x{1..2}y{a,,b}/{k,l}",
        "a",
    ],
)
def test_braces_are_the_references(pattern: str) -> None:
    assert _braces(pattern) == list(braceexpand(pattern))


def test_refusals(jpg: bytes, tmp_path: Path) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"jpg": jpg, "txt": "a", "cls": b"3"}, "KEY.cls is not read"),
        ({"jpg": jpg, "txt": "a", "json": {"caption": "b"}}, "'caption' in KEY.json differ"),
        ({"jpg": jpg, "json": conversation("<image>", "a", image="x.jpg")}, "KeyError"),
        ({"jpg": jpg, "json": conversation("q", "a")}, "0 <image> marks but 1 image"),
        ({"jpg": jpg, "json": conversation("<image>", "a", foo=1)}, "the key 'foo', which is not"),
        ({"txt": "a", "json": conversation("q", "a")}, "a caption and a conversation; keep one"),
    ]
    path = write(tmp_path / "a.tar", [sample for sample, _ in bad])
    report = check([path])
    for number, (problem, (_, said)) in enumerate(zip(report.problems, bad, strict=True)):
        assert f"sample 'sample{number:04d}'" in problem and said in problem
    (tmp_path / "1.jpg").write_bytes(jpg)
    (tmp_path / "hole.bmp").touch()
    with open(tmp_path / "hole.bmp", "r+b") as file:
        file.truncate(1 << 20)
    (tmp_path / "2.jpg").symlink_to("1.jpg")
    (tmp_path / "3.jpg").hardlink_to(tmp_path / "1.jpg")
    for name in ("1.txt", "2.txt"):
        (tmp_path / name).write_text("a")
    whole = "is a link or sparse, and only whole files are read"
    for names, said in (
        ("1.jpg 2.jpg", f"the member 2.jpg {whole}"),
        ("1.jpg 3.jpg", f"the member 3.jpg {whole}"),
        ("--sparse hole.bmp 1.txt", f"the member hole.bmp {whole}"),
    ):
        command = ["tar", "-cf", "odd.tar", *names.split()]
        subprocess.run(command, cwd=tmp_path, check=True)
        assert said in check([tmp_path / "odd.tar"]).problems[0]
    with tarfile.open(tmp_path / "odd.tar", "w") as tar:
        for _ in range(2):
            tar.addfile(tar.gettarinfo(tmp_path / "1.txt", "1.txt"), io.BytesIO(b"a"))
    said = "sample '1': the tar file holds its member txt twice"
    assert said in check([tmp_path / "odd.tar"]).problems[0]
    both = conversation("<image><image>", "a", images=["0.jpg", "0.jpg"])
    path_of_two = write(tmp_path / "two.tar", [{"0.jpg": jpg, "1.jpg": jpg, "json": both}])
    assert "it names other images than its 2 members" in check([path_of_two]).problems[0]
    tarfile.open(tmp_path / "none.tar", "w").close()
    assert "none.tar: the tar file holds no samples" in check([tmp_path / "none.tar"]).problems[0]
    (tmp_path / "b.tar").write_bytes(b"no tar")
    assert "no readable tar file" in check([tmp_path / "b.tar"]).problems[0]
    (tmp_path / ".nv-meta").mkdir()
    for kind, said in [
        ("InterleavedSample", 'only code says; write KEY.json with {"text": "one <image> two'),
        (
            "MultiChoiceVQASample",
            "choices into the context of a VQASample and the answer",
        ),
        ("OCRSample", "what is asked they do not say"),
        ("VQASample", "samples of the type VQASample, or read by code"),  # without a field_map
    ]:
        config = f"sample_type: {{__module__: megatron.energon, __class__: {kind}}}"
        (tmp_path / ".nv-meta" / "dataset.yaml").write_text(config)
        with pytest.raises(DataError, match=re.escape(said)):
            TarSource(path)


def test_members_by_number_and_keys_by_folder(pictures: Path, tmp_path: Path) -> None:
    files = [(pictures / name).read_bytes() for name in ("p0.jpg", "p2.jpg")]
    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as writer:
        writer.write({"__key__": "a/1", "10.jpg": files[1], "2.jpg": files[0], "txt": "cats"})
        writer.write({"__key__": "b/1", "txt": "dogs"})
    cats, dogs = samples(path)
    assert (cats.id, dogs.id) == ("a/1", "b/1")
    assert [media.parts[0].read() for media in cats.media] == files
    assert [one.turns[0].text for one in (cats, dogs)] == ["<image><image>cats", "dogs"]


def test_a_picture_of_another_size_is_another_record(
    jpg: bytes, pictures: Path, tmp_path: Path
) -> None:
    contents = []
    for picture in (jpg, jpg, (pictures / "p2.jpg").read_bytes()):
        path = write(tmp_path / "a.tar", [{"jpg": picture, "txt": "a"}])
        contents += [record.checksum for record in TarSource(path).records()]
    assert contents[0] == contents[1] != contents[2]


def test_a_text_changed_at_the_same_length(
    tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    path = write(tmp_path / "a.tar", [{"txt": "It is 123."}])
    index = scan_sources([path], processor, spec, 256)
    write(path, [{"txt": "It is 321."}])
    with pytest.raises(DataError, match="'sample0000' has changed since the file was scanned"):
        index.load(0)
    assert scan_sources([path], processor, spec, 256).content_hash != index.content_hash


def test_shards_of_a_tar(pictures: Path, tmp_path: Path) -> None:
    """A shard is closed by its own bytes, not by those of the tar; media keep their suffixes. A
    build that goes on takes what has been written since."""
    bmp, tif = (tmp_path / f"x.{suffix}" for suffix in ("bmp", "tif"))
    with Image.open(pictures / "p0.jpg") as picture:
        picture.save(bmp)
        picture.save(tif)
    rows = [{"bmp": bmp.read_bytes(), "txt": "a"}, {"tif": tif.read_bytes(), "txt": "b"}]
    path = write(tmp_path / "a.tar", rows)
    most = bmp.stat().st_size + tif.stat().st_size + 1000
    assert build_shards(path, tmp_path / "built", shard_bytes=most).shards == 1
    with tarfile.open(tmp_path / "built" / "shard-000000.tar") as tar:
        assert {name.rpartition(".")[2] for name in tar.getnames()} == {"json", "bmp", "tif"}
    write(path, [{"txt": "A teh cat."}, {"jpg": b"no image", "txt": "b"}])
    with pytest.raises(DataError, match="sample0001"):
        build_shards(path, tmp_path / "again", samples_per_shard=1, workers=1)
    write(path, [{"txt": "A the cat."}, {"jpg": (pictures / "p0.jpg").read_bytes(), "txt": "b"}])
    build_shards(path, tmp_path / "again", samples_per_shard=1, workers=1)
    with tarfile.open(tmp_path / "again" / "shard-000000.tar") as tar:
        first = tar.extractfile(tar.getnames()[0])
        assert first is not None and b"A the cat." in first.read()
