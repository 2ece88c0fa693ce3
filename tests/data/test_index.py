"""The scan: layouts, hash, reading again, and every refusal before training starts."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import conversation, save_image, write_json
from vlmtrain.core.config import MediaSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.check import check
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.sources import SourceSpec
from vlmtrain.data.formats.webdataset import build_shards
from vlmtrain.data.index import scan, scan_sources
from vlmtrain.data.processor import Processor


@pytest.fixture
def data(tmp_path: Path, pictures: Path) -> Path:
    records = [
        conversation("<image>?", "one", id="a", image=str(pictures / "p0.jpg")),
        conversation("only text here", "two words", id="b"),
        conversation(
            "<image> <image>",
            "three",
            images=[str(pictures / "p2.jpg"), str(pictures / "p0.jpg")],
        ),
    ]
    return write_json(tmp_path / "c.json", records)


def test_layouts(data: Path, processor: Processor, spec: ModelSpec) -> None:
    messages: list[str] = []
    index = scan_sources([data], processor, spec, 256, log=messages.append)
    assert len(index) == 3
    assert index.ids == ["a", "b", "c.json:2"]
    # 80x60 -> 84x56 (nearest multiples of 28); 200x90 -> 196x84.
    assert index.grids.tolist() == [[1, 4, 6], [1, 6, 14], [1, 4, 6]]
    assert index.media_start.tolist() == [0, 1, 1, 3]
    assert index.image_tokens.tolist() == [6, 0, 27]
    for i in range(3):
        sample = index.load(i)
        encoded = processor.encode(sample, processor.layouts(sample))
        assert len(encoded.input_ids) == index.lengths[i]
        assert encoded.target_tokens == index.target_tokens[i]
        assert encoded.id == index.ids[i]
    assert messages and messages[-1].startswith("3 samples, 3 images and videos")
    copy = pickle.loads(pickle.dumps(index))
    assert copy.load(2) == index.load(2) and copy.content_hash == index.content_hash


def test_hash_follows_content_and_settings_not_the_place(
    data: Path, model_folder: Path, processor: Processor, spec: ModelSpec, tmp_path: Path
) -> None:
    def content_hash(path: Path, used: Processor = processor) -> str:
        return scan_sources([path], used, spec, 512).content_hash

    original = content_hash(data)
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "c.json").write_bytes(data.read_bytes())
    assert content_hash(other / "c.json") == original
    larger = Processor.from_folder(
        model_folder, spec, section=MediaSection(max_pixels=40 * 784, min_pixels=30 * 784)
    )
    assert content_hash(data, larger) != original
    data.write_text(data.read_text().replace("three", "threw"))
    assert content_hash(data) != original


def test_what_a_scan_says_and_refuses(
    pictures: Path, tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Its counts; other keys that are ignored are other data; a file that is not there is no bad
    sample."""
    three = {"images": [str(pictures / "p0.jpg")] * 3}
    records = [conversation("<image>" * 3, "a", **three), conversation("q", "b"), {"x": 1}]
    path = write_json(tmp_path / "c.json", records)
    said: list[str] = []
    index = scan_sources([path], processor, spec, 512, skip_limit=1, log=said.append)
    assert said[-1] == (
        f"2 samples, 3 images and videos, {index.lengths.sum()} tokens, "
        f"{index.target_tokens.sum()} of them targets; 1 bad samples left out"
    )
    write_json(path, records[:2])
    hashes = {
        scan_sources([SourceSpec(str(path), ignored=keys)], processor, spec, 512).content_hash
        for keys in ((), ("note",), ("<audio>",))
    }
    assert len(hashes) == 3
    with pytest.raises(DataError, match="none.json: no such file"):
        scan_sources([path, tmp_path / "none.json"], processor, spec, 512, skip_limit=9)


def test_a_split_is_of_the_records_alone(
    pictures: Path, tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Against checksums of the records as this test wrote them; in another order, with some twice,
    the same ones are held out. Each part reads its samples as the whole does."""
    records = [
        conversation("<image>" * (i % 3) + "?", f"answer {i}", id=str(i))
        | {"images": [str(pictures / "p0.jpg"), str(pictures / "p2.jpg")][: i % 3]}
        for i in range(20)
    ]
    path = tmp_path / "c.jsonl"
    for order in (records, records[::-1], records + records[:5]):
        lines = [json.dumps(record) for record in order]
        path.write_text("".join(line + "\n" for line in lines))
        index = scan_sources([path], processor, spec, 256)
        training, held_out = index.split(0.3)
        lowest = sorted(zlib.crc32(line.encode()) for line in lines)[round(0.3 * len(lines)) - 1]
        chosen = [zlib.crc32(line.encode()) <= lowest for line in lines]
        assert not set(training.ids) & set(held_out.ids)
        assert training.content_hash != held_out.content_hash != index.content_hash
        for part, which in ((training, False), (held_out, True)):
            places = [i for i, held in enumerate(chosen) if held == which]
            assert part.ids == [index.ids[i] for i in places]
            assert part.lengths.tolist() == index.lengths[places].tolist()
            for i, place in enumerate(places):
                assert part.load(i) == index.load(place)
                assert (
                    part.grids[part.media(i)].tolist() == index.grids[index.media(place)].tolist()
                )
        assert held_out.ids == scan_sources([path], processor, spec, 256).split(0.3)[1].ids
    path.write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(DataError, match="--evaluate.split_ratio 0.3 of 1 samples leaves none"):
        scan_sources([path], processor, spec, 256).split(0.3)


def test_progress_of_a_scan(
    tmp_path: Path, processor: Processor, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of samples is known from the bytes of the files; with limits it is not."""
    said: list[tuple[int, int]] = []

    @contextmanager
    def recorded(what: str, unit: str, *, shown: bool) -> Iterator[Any]:
        yield lambda done, total: said.append((done, total)) if shown else None

    monkeypatch.setattr("vlmtrain.data.index.progress", recorded)
    paths = [
        write_json(
            tmp_path / f"{i}.jsonl", [conversation("q", "r", id=f"{i}{j}") for j in range(9)]
        )
        for i in range(2)
    ]
    scan_sources(paths, processor, spec, 256)
    assert said == []
    scan_sources(paths, processor, spec, 256, log=lambda line: None)
    assert [done for done, _ in said] == list(range(1, 19))
    assert all(abs(total - 18) <= 2 for _, total in said) and said[-1] == (18, 18), said
    said.clear()
    scan_sources(paths, processor, spec, 256, max_samples=2, log=lambda line: None)
    assert said == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_scan_given_up_waits_for_no_thread(
    data: Path, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close it within an import that its threads wait for."""
    goes_on, measure = threading.Event(), processor.measure

    def waits(sample: Any, *rest: Any) -> Any:
        assert sample.id == "a" or goes_on.wait(60)
        return measure(sample, *rest)

    monkeypatch.setattr(processor, "measure", waits)
    outcomes = scan([SourceSpec(str(data))], processor, 256, workers=2)
    assert not isinstance(next(outcomes), DataError)
    closing = threading.Thread(target=outcomes.close)
    closing.start()
    closing.join(10)
    is_stuck = closing.is_alive()
    goes_on.set()
    closing.join()
    assert not is_stuck


def test_several_sources(data: Path, tmp_path: Path, processor: Processor, spec: ModelSpec) -> None:
    more = write_json(tmp_path / "more.json", [conversation("q", "r", id="z")])
    index = scan_sources([data, more], processor, spec, 256)
    assert index.ids == ["a", "b", "c.json:2", "z"]
    assert index.source.tolist() == [0, 0, 0, 1]
    assert index.load(3).turns[1].text == "r"


def test_media_root(tmp_path: Path, pictures: Path, processor: Processor, spec: ModelSpec) -> None:
    path = write_json(tmp_path / "c.json", [conversation("<image>", "x", image="p0.jpg")])
    with pytest.raises(DataError, match="p0.jpg is missing"):
        scan_sources([path], processor, spec, 256)
    index = scan_sources([path], processor, spec, 256, media_root=pictures)
    assert index.load(0).media[0].parts[0].path == str(pictures / "p0.jpg")


def test_a_file_changed_after_the_scan(data: Path, processor: Processor, spec: ModelSpec) -> None:
    index = scan_sources([data], processor, spec, 256)
    data.write_text(data.read_text().replace("three", "threw"))
    assert index.load(0).id == "a"
    with pytest.raises(DataError, match="sample 'c.json:2' has changed since the file was scanned"):
        index.load(2)
    data.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        index.load(0)


def test_too_long_a_sample(data: Path, processor: Processor, spec: ModelSpec) -> None:
    lengths = scan_sources([data], processor, spec, 256).lengths.tolist()
    longest = max(lengths)
    scan_sources([data], processor, spec, longest)
    with pytest.raises(DataError) as caught:
        scan_sources([data], processor, spec, longest - 1)
    assert str(caught.value) == (
        f"{data}: sample 'c.json:2': it has {longest} tokens, 27 of them image tokens, and a pack "
        f"holds {longest - 1}; raise --train.pack_length (outside of training --pack_length) to "
        f"{longest} or more, lower --media.max_pixels, or choose --loader.too_long drop or truncate"
    )


def test_the_first_problem_in_file_order_is_raised(
    tmp_path: Path, pictures: Path, processor: Processor, spec: ModelSpec
) -> None:
    whole = (pictures / "p2.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "fake.jpg").write_text("GIF?")
    records = [
        conversation("fine", "x", id="ok"),
        conversation("<image>", "x", id="cut", image="cut.jpg"),
        conversation("<image>", "x", id="fake", image="fake.jpg"),
        conversation("<image>", "x", id="gone", image="gone.jpg"),
        conversation("<image>", "x", id="marks"),
        {"id": "role", "conversations": [{"from": "robot", "value": "x"}]},
    ]
    path = write_json(tmp_path / "c.json", records)
    for workers in (1, 4):
        with pytest.raises(DataError, match="sample 'cut': cut.jpg is not an image or is cut"):
            scan_sources([path], processor, spec, 256, workers=workers)
    # Without verification the cut file is found only when it is decoded.
    with pytest.raises(DataError, match="sample 'fake': fake.jpg is not an image"):
        scan_sources([path], processor, spec, 256, verify=False)


def test_arguments(data: Path, processor: Processor, spec: ModelSpec) -> None:
    with pytest.raises(DataError, match="no data given"):
        scan_sources([], processor, spec, 256)
    with pytest.raises(DataError, match="pack_length must be at least 1, got 0"):
        scan_sources([data], processor, spec, 0)
    with pytest.raises(DataError, match="no such file"):
        scan_sources([data.parent / "none.json"], processor, spec, 256)
    (data.parent / "empty").mkdir()
    with pytest.raises(DataError, match="has no index.jsonl"):
        scan_sources([data.parent / "empty"], processor, spec, 256)


def test_aspect_ratio(tmp_path: Path, processor: Processor, spec: ModelSpec) -> None:
    save_image(tmp_path / "thin.png", 3000, 10)
    path = write_json(tmp_path / "c.json", [conversation("<image>", "x", id="t", image="thin.png")])
    with pytest.raises(DataError, match=r"sample 't': thin.png: the image is 3000x10 pixels"):
        scan_sources([path], processor, spec, 256)


def test_check_collects_every_problem(tmp_path: Path, pictures: Path, model_folder: Path) -> None:
    records = [
        conversation("fine", "x", id="ok"),
        conversation("<image>", "x", id="image", image=str(pictures / "p0.jpg")),
        conversation("<image>", "x", id="gone", image="gone.jpg"),
        conversation("<image>", "x", id="marks"),
        conversation("word " * 500, "x", id="long"),
    ]
    lines = tmp_path / "c.jsonl"
    lines.write_text("\n".join([json.dumps(record) for record in records] + ["{broken"]))
    report = check([lines, tmp_path / "none.json"])
    assert not report.ok
    assert (report.samples, report.images, report.videos) == (7, 1, 0)
    starts = ["sample 'gone'", "sample 'marks'", "line 6 is not valid JSON", "no such file"]
    assert len(report.problems) == 4
    for problem, start in zip(report.problems, starts, strict=True):
        assert start in problem
    assert report.render().splitlines()[-1] == (
        "7 samples, 1 image, 0 videos: 4 problems (1 with broken or missing media, 1 whose marks "
        "do not match the media, 2 otherwise wrong)"
    )
    report = check([lines], model=model_folder, pack_length=256)
    assert [p for p in report.problems if "sample 'long'" in p and "a pack holds 256" in p]
    assert report.tokens > 0
    good = write_json(tmp_path / "good.json", records[:2])
    assert check([good]).ok
    with pytest.raises(DataError, match="only be checked with a model"):
        check([good], pack_length=3)
    with pytest.raises(DataError, match="pack_length must be at least 1, got 0"):
        check([good], model=model_folder, pack_length=0)


def test_shards_and_tars_are_split_as_their_file(
    tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Records twice each, wherever they lie, are on one side; a file and its shards agree."""
    records = [conversation(f"{i}?", f"answer {i}", id=str(i)) for i in range(20)] * 2
    write_json(tmp_path / "a.json", records)
    build_shards(tmp_path / "a.json", tmp_path / "shards")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, record in enumerate(records):
            data = json.dumps(record).encode()
            member = tarfile.TarInfo(f"{number}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    held = {}
    for name in ("a.json", "shards", "a.tar"):
        training, held_out = scan_sources([tmp_path / name], processor, spec, 256).split(0.3)
        assert not set(training.ids) & set(held_out.ids)
        assert len(held_out) == 2 * len(set(held_out.ids)) == 12
        held[name] = set(held_out.ids)
    assert held["a.json"] == held["shards"]
