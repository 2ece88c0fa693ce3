"""docs/data.md is followed to the letter: its JSON, its TOML and its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from tests.data.helpers import conversation, save_image, write_json
from vlmtrain import cli
from vlmtrain.data.check import check
from vlmtrain.data.formats.sources import parse_sources
from vlmtrain.data.stats import plot_stats, render_stats, stats

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conversations.json").write_text(blocks("json")[0], encoding="utf-8")
    save_image(tmp_path / "cup.jpg", 90, 70, 1)
    save_image(tmp_path / "cat.jpg", 70, 90, 2)
    return tmp_path


def test_the_commands(desk: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert [command[1] for command in commands] == ["data", "data", "data", "train"]
    said = []
    for command in commands[:3]:
        arguments = [str(model_folder) if word == "MODEL" else word for word in command[1:]]
        assert cli.main(arguments) == 0
        said.append(capsys.readouterr().out)
    assert re.search(r"3 samples, 3 images, 0 videos, \d+ tokens: 0 problems\n$", said[0])
    assert "3 samples" in said[1] and "1 packs of 4,096 tokens an epoch" in said[1]
    assert all(f"{name} " in said[1] for name in ("text tokens", "image tokens", "cost (tokens)"))
    with Image.open(desk / "stats.png") as plot:
        assert plot.width > 1000
    assert said[2].startswith("3 samples, 3 images, 0 videos in 1 shards")
    # The train command's options exist; tests/train runs the command.
    with pytest.raises(SystemExit) as end:
        cli.main([*commands[3][1:], "--help"])
    assert end.value.code == 0
    (desk / "mix.toml").write_text(blocks("toml")[0])
    listed = parse_sources("mix.toml")
    assert [(source.path, source.weight, source.max_samples) for source in listed] == [
        ("conversations.json", 2.0, None),
        ("shards", 1.0, 1000),
    ]
    assert check("mix.toml").samples == 6
    for option in re.findall(r"--loader\.\w+", PAGE.read_text()):
        with pytest.raises(SystemExit):
            cli.main(["train", "--help"])
        assert option in capsys.readouterr().out


def test_duplicates_are_warnings(desk: Path) -> None:
    records = [conversation("q", "r", id="a"), conversation("q", "r", id="b")]
    records += [conversation("other", "r", id="a")]
    report = check([write_json(desk / "c.json", records)])
    assert report.ok and report.warnings == [
        "2 samples have the id 'a'",
        "2 samples are the same but for their id: a, b",
    ]
    assert report.render().splitlines()[0] == "warning: 2 samples have the id 'a'"


def test_stats_by_hand(desk: Path, model_folder: Path) -> None:
    found = stats("conversations.json", model_folder, pack_length=512)
    # 90x70 -> 84x56 pixels (2.5 units round to 2): 6 tokens; 70x90 -> 56x84: 6.
    assert found.image_tokens.tolist() == [6, 12, 0]
    assert found.packs == 1 and found.spread == 0
    tokens = (found.text_tokens + found.image_tokens).sum()
    assert found.fill == tokens / 512
    assert (found.costs > found.text_tokens).all()
    assert f"{tokens:,}" in render_stats(found)
    assert plot_stats(found, desk / "plot") == desk / "plot.png"
    assert (desk / "plot.png").is_file()
