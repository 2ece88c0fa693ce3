"""--data as typed, lists of sources, and the file formats beside ShareGPT."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import conversation, no_media, open_loader, write_json
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.json_source import JsonSource
from vlmtrain.data.formats.parquet import ParquetSource
from vlmtrain.data.formats.shards import ShardSource
from vlmtrain.data.formats.sources import SourceSpec, parse_sources
from vlmtrain.data.formats.webdataset import build_shards
from vlmtrain.data.index import scan_sources
from vlmtrain.data.processor import Processor
from vlmtrain.data.stats import stats
from vlmtrain.data.template import QWEN_TEMPLATE


def test_as_typed(tmp_path: Path) -> None:
    assert parse_sources("a.json, b.jsonl:0.5,dir:2,c:/x.json") == [
        SourceSpec("a.json"),
        SourceSpec("b.jsonl", 0.5),
        SourceSpec("dir", 2.0),
        SourceSpec("c:/x.json"),
    ]
    odd = tmp_path / "take:2"
    odd.mkdir()
    assert parse_sources(str(odd)) == [SourceSpec(str(odd))]  # there is such a folder
    assert parse_sources(["a.json"], max_samples=3, media_root="m") == [
        SourceSpec("a.json", 1.0, 3, "m")
    ]
    with pytest.raises(DataError, match="no data given; --data takes"):
        parse_sources(" ,")
    for weight in ("0", "10001", "1" + "0" * 100):
        with pytest.raises(DataError, match="a.json: its weight is .*; it must be above 0 and at"):
            parse_sources(f"a.json:{weight}")


def test_a_list(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(
        '[[source]]\npath = "a.json"\nweight = 2\n'
        '[[source]]\npath = "/abs/b"\nmax_samples = 9\nmedia_root = "m"\n'
    )
    assert parse_sources(f"{path}:0.5,z.json", max_samples=5) == [
        SourceSpec(str(tmp_path / "a.json"), 1.0, 5),
        SourceSpec("/abs/b", 0.5, 9, str(tmp_path / "m")),
        SourceSpec("z.json", 1.0, 5),
    ]
    assert [source.media_root for source in parse_sources(path, media_root="r")] == [
        "r",
        str(tmp_path / "m"),
    ]
    for text, message in [
        ("[source", "not valid TOML"),
        ("x = 1", r"it must hold \[\[source\]\] tables and nothing else"),
        ("[[source]]\nweight = 1", "source 0 has no path"),
        ('[[source]]\npath = "a"\nwieght = 1', "unknown key 'wieght'; known are path, weight"),
        ('[[source]]\npath = "a"\nweight = "x"', "weight is 'x'; it must be of type float"),
        ('[[source]]\npath = "a"\nmax_samples = 0', "max_samples is 0; it must be at least 1"),
    ]:
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            parse_sources(path)
    with pytest.raises(DataError, match="none.toml can't be read"):
        parse_sources("none.toml")


def test_weights_and_limits_while_training(
    tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Two epochs: a's samples twice each, b's four times, c's first four once."""
    for name, count in (("a", 3), ("b", 2), ("c", 9)):
        records = [conversation(f"q {i}", "r", id=f"{name}{i}") for i in range(count)]
        write_json(tmp_path / f"{name}.json", records)
    text = f"{tmp_path}/a.json,{tmp_path}/b.json:2,{tmp_path}/c.json:0.5"
    sources = parse_sources(text)
    sources[2] = SourceSpec(sources[2].path, 0.5, 4)
    index = scan_sources(sources, processor, spec, 64)
    assert len(index) == 3 + 2 + 4
    options: dict[str, Any] = {"pack_length": 64, "global_batch": 1, "decodes": no_media}
    with open_loader(index, processor, spec, **options) as loader:
        seen: Counter[str] = Counter()
        per_epoch = loader.steps_for_epochs(2)
        for _ in range(per_epoch):
            seen.update(loader.next_step()[0].sample_ids)
        assert loader.epoch == 2
        state = loader.state_dict()
    expected = {f"a{i}": 2 for i in range(3)} | {f"b{i}": 4 for i in range(2)}
    assert seen == Counter(expected | {f"c{i}": 1 for i in range(4)})
    other = scan_sources([*sources[:2], SourceSpec(sources[2].path, 1.0, 4)], processor, spec, 64)
    with (
        open_loader(other, processor, spec, **options) as loader,
        pytest.raises(DataError, match="other data"),
    ):
        loader.load_state_dict(state)


def test_weights_say_nothing_of_held_out_data(
    tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    for name in "ab":
        records = [conversation(f"q {i}", "r", id=f"{name}{i}") for i in range(4)]
        write_json(tmp_path / f"{name}.json", records)
    index = scan_sources(f"{tmp_path}/a.json:0.5,{tmp_path}/b.json:2", processor, spec, 64)
    options: dict[str, Any] = {"pack_length": 64, "global_batch": 1, "decodes": no_media}
    with open_loader(index, processor, spec, once=True, **options) as loader:
        seen = [loader.next_step()[0].sample_ids for _ in range(loader.steps_per_epoch)]
    assert sorted(id for ids in seen for id in ids) == sorted(index.ids)


def test_epochs_without_a_sample_are_passed_over(
    tmp_path: Path, model_folder: Path, processor: Processor, spec: ModelSpec
) -> None:
    """Weight 0.25 and two samples: epochs 1, 3, 5, ... have one."""
    path = write_json(tmp_path / "a.json", [conversation("q", "r", id=f"a{i}") for i in range(2)])
    index = scan_sources([SourceSpec(str(path), 0.25)], processor, spec, 64)
    options: dict[str, Any] = {"pack_length": 64, "global_batch": 1, "decodes": no_media}
    with open_loader(index, processor, spec, **options) as loader:
        assert [loader.steps_for_epochs(epochs) for epochs in (1, 2, 4)] == [0, 1, 2]
        assert loader.epoch == 0
        seen = [loader.next_step()[0].sample_ids for _ in range(4)]
        assert loader.epoch == 8
    assert Counter(id for ids in seen for id in ids) == Counter({"a0": 2, "a1": 2})
    with pytest.raises(DataError, match="leave no sample in the first epoch"):
        stats(f"{path}:0.25", model_folder, pack_length=64)
    assert [stats(f"{path}:{w}", model_folder, pack_length=30).packs for w in (1, 3)] == [
        2,
        6,
    ]


def test_weights_that_leave_hundreds_of_epochs_without_a_sample_are_refused(
    tmp_path: Path, processor: Processor, spec: ModelSpec
) -> None:
    path = write_json(tmp_path / "a.json", [conversation("q", "r")])
    scan_sources([SourceSpec(str(path), 0.01)], processor, spec, 64)
    with pytest.raises(DataError, match="a.json:0.009 give a sample in 111 epochs; raise the weig"):
        scan_sources([SourceSpec(str(path), 0.009)], processor, spec, 64)


def test_alpaca_and_llama_factory(tmp_path: Path) -> None:
    records = [
        {
            "instruction": "<image>Describe.",
            "input": "Be short.",
            "output": "A cup.",
            "system": "You see.",
            "history": [["Hi", "Hello"], ["Really?", "Yes"]],
            "images": ["a.jpg"],
        },
        {"instruction": "Add", "input": "", "output": "3"},
        {  # LLaMA-Factory's multimodal sharegpt
            "messages": [
                {"role": "user", "content": "<video>What?"},
                {"role": "assistant", "content": "A dog."},
            ],
            "videos": ["b.mp4"],
            "tools": "",
        },
    ]
    source = JsonSource(write_json(tmp_path / "c.json", records))
    samples = [source.parse(record) for record in source.records()]  # type: ignore[arg-type]
    assert [(turn.role, turn.text) for turn in samples[0].turns] == [
        ("system", "You see."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Really?"),
        ("assistant", "Yes"),
        ("user", "<image>Describe.\nBe short."),
        ("assistant", "A cup."),
    ]
    assert samples[0].media[0].parts[0].path == str(tmp_path / "a.jpg")
    assert [turn.text for turn in samples[1].turns] == ["Add", "3"]
    assert samples[2].media[0].kind == "video"


def test_parquet(tmp_path: Path, pictures: Path, processor: Processor, spec: ModelSpec) -> None:
    """As the same data in JSON, whether the images stand inside or beside; shards too."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = ["p0.jpg", "p1.jpg", "p4.png"]
    records = [
        conversation("<image>?" if i < 3 else "text", f"answer {i}", id=f"s{i}") for i in range(5)
    ]
    json_records = [
        {**record, **({"images": [names[i]]} if i < 3 else {})} for i, record in enumerate(records)
    ]
    beside = [{**record, "images": record.get("images")} for record in json_records]
    inside = [
        {
            **record,
            "images": [{"bytes": (pictures / names[i]).read_bytes(), "path": None}]
            if i < 3
            else None,
        }
        for i, record in enumerate(records)
    ]
    expected = scan_sources(
        [write_json(tmp_path / "c.json", json_records)], processor, spec, 256, media_root=pictures
    )
    options: dict[str, Any] = {"pack_length": 256, "global_batch": 1, "prefetch": False}
    for rows in (beside, inside):
        path = tmp_path / "c.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
        index = scan_sources([path], processor, spec, 256, media_root=pictures)
        assert index.ids == expected.ids
        for name in ("lengths", "target_tokens", "image_tokens", "grids"):
            assert getattr(index, name).tolist() == getattr(expected, name).tolist(), name
        with open_loader(index, processor, spec, **options) as loader:
            batches = [b for _ in range(loader.steps_per_epoch) for b in loader.next_step()]
        assert sum(len(batch.pixel_values) for batch in batches) == index.grids.prod(1).sum()
    build_shards(path, tmp_path / "shards", samples_per_shard=2)
    shards = ShardSource(tmp_path / "shards")
    kept = [shards.parse(record).media for record in shards.records()]
    for media, name in zip(kept, names, strict=False):
        assert media[0].parts[0].read() == (pictures / name).read_bytes()
        assert media[0].name.endswith(Path(name).suffix)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="bad.parquet: no readable parquet file"):
        scan_sources([tmp_path / "bad.parquet"], processor, spec, 256)


def test_keys_that_a_parquet_row_has_not(tmp_path: Path) -> None:
    """A column's structs have the keys of all rows, with null: samples are those of JSON."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def asked(tool: str, key: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": tool, "arguments": {key: "x"}}}
        schema = {"type": "object", "properties": {key: {"type": "string"}}}
        return {
            "id": tool,
            "messages": [
                {"role": "user", "content": [{"text": "What?"}]},
                {"role": "assistant", "content": [{"text": ""}], "tool_calls": [call]},
            ],
            "tools": [{"type": "function", "function": {"name": tool, "parameters": schema}}],
        }

    image = {"role": "user", "content": [{"image": "a.png"}, {"text": "?"}]}
    shown = {"id": "i", "messages": [image, {"role": "assistant", "content": [{"text": "A"}]}]}
    rows = [asked("weather", "city"), asked("time", "zone"), shown]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    sources = (
        ParquetSource(tmp_path / "c.parquet"),
        JsonSource(write_json(tmp_path / "c.json", rows)),
    )
    got, want = ([source.parse(record) for record in source.records()] for source in sources)
    for one, other in zip(got, want, strict=True):
        assert (one.turns, one.tools, one.media) == (other.turns, other.tools, other.media)


def test_a_template_of_ones_own(
    tmp_path: Path, model_folder: Path, processor: Processor, spec: ModelSpec
) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(QWEN_TEMPLATE.replace("You are a helpful assistant.", "Hello."))
    other = Processor.from_folder(model_folder, spec, template=path)
    assert other.fingerprint() != processor.fingerprint()
    data = write_json(tmp_path / "c.json", [conversation("q", "r", id="z")])
    index = scan_sources([data], other, spec, 64)
    text = other.template.tokenizer.decode(other.encode(index.load(0), []).input_ids)
    assert text.startswith("<|im_start|>system\nHello.<|im_end|>\n<|im_start|>user\nq<|im_end|>")
    with pytest.raises(DataError, match="none.jinja: the chat template cannot be read"):
        Processor.from_folder(model_folder, spec, template=tmp_path / "none.jinja")
    assert json.loads(json.dumps(index.content_hash)) == index.content_hash


def test_patterns_and_folders_of_files(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for number in (1, 2, 10):
        (tmp_path / "p" / f"train-{number}.parquet").write_bytes(b"")
    names = [str(tmp_path / "p" / f"train-{number}.parquet") for number in (1, 2, 10)]
    for text in (f"{tmp_path}/p:0.5", f"{tmp_path}/p/train-*.parquet:0.5"):
        sources = parse_sources(text)
        assert [source.path for source in sources] == names
        assert {source.weight for source in sources} == {0.5}
    (tmp_path / "p" / "index.jsonl").write_bytes(b"")  # shards
    assert [source.path for source in parse_sources([tmp_path / "p"])] == [str(tmp_path / "p")]
    (tmp_path / "p" / "shard-000000.tar").write_bytes(b"")
    # Nothing in a folder is left out: every kind, at any depth.
    (tmp_path / "p" / "index.jsonl").rename(tmp_path / "p" / "more.jsonl")
    below = tmp_path / "p" / "below" / "deep"
    below.mkdir(parents=True)
    (below / "c.JSON").write_bytes(b"")
    (below / "photo.jpg").write_bytes(b"")
    (below / ".info.json").write_bytes(b"")
    (below / "up").symlink_to(tmp_path / "p")
    (below.parent / "shards").mkdir()
    (below.parent / "shards" / "index.jsonl").write_bytes(b"")
    (below.parent / "shards" / "shard-000000.tar").write_bytes(b"")
    found = [
        str(Path(source.path).relative_to(tmp_path / "p"))
        for source in parse_sources(f"{tmp_path}/p")
    ]
    assert found == [
        "below/deep/c.JSON",
        "below/shards",
        "more.jsonl",
        "shard-000000.tar",
        "train-1.parquet",
        "train-2.parquet",
        "train-10.parquet",
    ]
    with pytest.raises(DataError, match=r"none-\*.json: no file has such a name"):
        parse_sources(f"{tmp_path}/none-*.json")
