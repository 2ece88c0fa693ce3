"""Shards: what is written, read by webdataset itself and by offset; damage is noticed."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import webdataset
from PIL import Image

from tests.data.helpers import conversation, write_json
from vlmtrain.data import cli
from vlmtrain.data.errors import DataError
from vlmtrain.data.index import scan_sources
from vlmtrain.data.processor import Processor
from vlmtrain.data.sharegpt import JsonSource
from vlmtrain.data.webdataset import ShardSource, ShardSummary, build_shards
from vlmtrain.models.spec import ModelSpec


@pytest.fixture
def source(tmp_path: Path, pictures: Path) -> Path:
    records = [
        conversation("<image> ä?", "one", id="a", image=str(pictures / "p0.jpg")),
        conversation("text", "two", id="b"),
        conversation(
            "<image><image>",
            "three",
            id="c",
            images=[str(pictures / "p4.png"), str(pictures / "p1.jpg")],
        ),
        conversation(
            "<video>",
            "four",
            id="d",
            video={"frames": [str(pictures / "p0.jpg"), str(pictures / "p0.jpg")], "fps": 4},
        ),
        conversation("<image>", "five", id="e/../x", image=str(pictures / "p3.jpg")),
    ]
    return write_json(tmp_path / "c.json", records)


def test_webdataset_itself_reads_the_shards(source: Path, pictures: Path, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    counts: list[int] = []
    summary = build_shards(source, target, samples_per_shard=2, progress=counts.append)
    names = sorted(path.name for path in target.iterdir())
    assert names == ["index.jsonl", *(f"shard-{i:06d}.tar" for i in range(3))]
    size = sum(path.stat().st_size for path in target.glob("*.tar"))
    assert summary == ShardSummary(samples=5, images=4, videos=1, shards=3, bytes=size)
    assert counts == [1, 2, 3, 4, 5]
    paths = [str(target / name) for name in names[1:]]
    read = list(webdataset.WebDataset(paths, shardshuffle=False))
    assert [item["__key__"] for item in read] == [f"{i:09d}" for i in range(5)]
    assert [json.loads(item["json"])["id"] for item in read] == ["a", "b", "c", "d", "e/../x"]
    assert read[0]["0.jpg"] == (pictures / "p0.jpg").read_bytes()
    assert read[2]["0.png"] == (pictures / "p4.png").read_bytes()
    assert read[2]["1.jpg"] == (pictures / "p1.jpg").read_bytes()
    assert read[3]["0.00001.jpg"] == (pictures / "p0.jpg").read_bytes()


def test_shards_read_like_the_json(
    source: Path, tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    cli.build(source, tmp_path / "shards", samples_per_shard=2)
    json_source, shards = JsonSource(source), ShardSource(tmp_path / "shards")
    for a, b in zip(json_source.records(), shards.records(), strict=True):
        assert not isinstance(a, DataError)
        mine, theirs = shards.parse(b), json_source.parse(a)
        assert (mine.id, mine.turns) == (theirs.id, theirs.turns)
        for x, y in zip(mine.media, theirs.media, strict=True):
            assert (x.kind, x.frame_list, x.fps) == (y.kind, y.frame_list, y.fps)
            assert [part.read() for part in x.parts] == [part.read() for part in y.parts]
            assert x.info is not None and y.info is None
    one = scan_sources([source], processor, spec, 512)
    two = scan_sources([tmp_path / "shards"], processor, spec, 512)
    for name in ("lengths", "target_tokens", "image_tokens", "grids", "seconds", "kinds", "infos"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist(), name


def test_a_shard_closes_at_its_size(source: Path, tmp_path: Path) -> None:
    assert build_shards(source, tmp_path / "s", shard_bytes=1).shards == 5


def test_a_bad_sample_leaves_nothing(source: Path, tmp_path: Path) -> None:
    records = json.loads(source.read_text())
    records[3] = conversation("<image>", "x", id="bad", image="none.jpg")
    write_json(source, records)
    with pytest.raises(DataError, match="sample 'bad': the file .*none.jpg is missing"):
        build_shards(source, tmp_path / "new", samples_per_shard=2)
    assert not (tmp_path / "new").exists()
    with pytest.raises(DataError, match="no such file"):
        build_shards(tmp_path / "none.json", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_target_rules(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    build_shards(source, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(DataError, match="holds a finished build"):
        build_shards(source, target)
    build_shards(source, target, samples_per_shard=1, overwrite=True)
    build_shards(source, target, overwrite=True)
    # Same input, same bytes: nothing of the time or the machine is written.
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    # An interrupted build has no index: it is refused by the reader and built anew.
    (target / "index.jsonl").unlink()
    (target / "shard-000001.tar.tmp").write_bytes(b"half")
    with pytest.raises(DataError, match="its build was interrupted; run 'vlmtrain data build'"):
        list(ShardSource(target).records())
    build_shards(source, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"holds other files \(thesis.tex, ...\)"):
        build_shards(source, tmp_path / "other", overwrite=True)
    with pytest.raises(DataError, match="is a file; --target must be a folder"):
        build_shards(source, source)


def test_damaged_shards_are_noticed(
    source: Path, tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    target = tmp_path / "shards"

    def scan() -> None:
        scan_sources([target], processor, spec, 512)

    build_shards(source, target, samples_per_shard=2)
    shard = target / "shard-000001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-600])
    with pytest.raises(DataError, match=rf"shard-000001.tar has {len(whole) - 600} bytes where"):
        scan()
    shard.unlink()
    with pytest.raises(DataError, match="shard-000001.tar is missing where"):
        scan()
    position = whole.index(b'"three"')
    shard.write_bytes(whole[:position] + b'"threE"' + whole[position + 7 :])
    with pytest.raises(DataError, match="index.jsonl: entry 2 is damaged"):
        scan()
    (target / "index.jsonl").write_text('{"format": "other"}\n')
    with pytest.raises(DataError, match="is no index of shards that this version reads"):
        scan()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "shard-000000.tar/../x"])
def test_no_path_leads_out_of_the_folder(name: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    build_shards(source, target)
    lines = (target / "index.jsonl").read_bytes().split(b"\n")
    header = json.loads(lines[0])
    header["shards"][0]["name"] = name
    (target / "index.jsonl").write_bytes(b"\n".join([json.dumps(header).encode(), *lines[1:]]))
    with pytest.raises(DataError, match="shard name"):
        list(ShardSource(target).records())


def test_ranges_outside_the_shard_and_member_names_are_harmless(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "shards"
    build_shards(source, target)
    shards = ShardSource(target)
    record = next(shards.records())
    line = json.loads(record.data)
    for part in ([0, 1 << 40], [-1, 10], [1 << 40, 1]):
        line["media"][0]["parts"] = [part]
        bad = type(record)(0, 0, json.dumps(line).encode())
        with pytest.raises(DataError, match="entry 0 is damaged .*outside the shard"):
            shards.parse(bad)
    with tarfile.open(target / "shard-000000.tar") as tar:
        assert all("/" not in member.name for member in tar)


def test_original_bytes_are_kept(source: Path, tmp_path: Path) -> None:
    build_shards(source, tmp_path / "s")
    shards = ShardSource(tmp_path / "s")
    media = shards.parse(next(shards.records())).media[0]
    assert Image.open(io.BytesIO(media.parts[0].read())).size == (80, 60)
