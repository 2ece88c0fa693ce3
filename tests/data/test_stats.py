"""What `check` warns of and `stats` computes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import conversation, save_image, write_json
from vlmtrain import cli
from vlmtrain.data.check import check
from vlmtrain.data.stats import Stats, plot_stats, render_stats, stats


def test_duplicates_are_warnings(tmp_path: Path) -> None:
    records = [conversation("q", "r", id="a"), conversation("q", "r", id="b")]
    records += [conversation("other", "r", id="a")]
    report = check([write_json(tmp_path / "c.json", records)])
    assert report.ok and report.warnings == [
        "2 samples have the id 'a'",
        "2 samples are the same but for their id: a, b",
    ]
    assert report.render().splitlines()[0] == "warning: 2 samples have the id 'a'"
    records = [conversation("q", "r", id=name) for name in "abcdefg"]
    report = check([write_json(tmp_path / "c.json", records)])
    assert report.warnings == ["7 samples are the same but for their id: a, b, c, d, e, ..."]


def test_counts_of_samples_media_and_problems(tmp_path: Path, model_folder: Path) -> None:
    save_image(tmp_path / "cup.png", 56, 56)
    (tmp_path / "film").mkdir()
    for number in range(4):
        save_image(tmp_path / "film" / f"{number}.png", 56, 56)
    two, film = {"images": ["cup.png"] * 2}, {"video": "film"}
    good = [conversation("<image><image>", "r", **two), conversation("<video>", "r", **film)]
    good.append(conversation("<image>", "s", image="cup.png"))
    bad = [conversation("<image>", "r", image="none.png"), conversation("word " * 900, "r")]
    bad += [conversation("<image>", "r", **two), conversation("q", "r", image="cup.png")]
    bad += [conversation("q", id=name) for name in "ab"]
    source = write_json(tmp_path / "c.json", [*good, *bad])
    report = check([source], model=model_folder, pack_length=512)
    tokens = stats([write_json(tmp_path / "good.json", good)], model_folder)
    assert report.render().splitlines()[-1] == (
        f"9 samples, 3 images, 1 video, {tokens.text_tokens.sum() + tokens.image_tokens.sum()} "
        "tokens: 6 problems (1 with broken or missing media, 2 whose marks do not match the "
        "media, 1 too long, 2 otherwise wrong)"
    )


def test_the_largest_samples(tmp_path: Path, model_folder: Path) -> None:
    for name, side in (("small", 56), ("large", 112)):
        save_image(tmp_path / f"{name}.png", side, side)
    records = [
        conversation("word " * 500, "r", id="long"),
        conversation("<image>" * 5, "r", id="many", images=["small.png"] * 5),
        conversation("<image>", "r", id="one", image="large.png"),
    ]
    report = check([write_json(tmp_path / "c.json", records)], model=model_folder)
    assert report.ok, report.problems
    small, large = 4 * 4, 8 * 8  # patches of 14 pixels
    assert report.largest["patches in a sample"] == (5 * small, "many")
    assert report.largest["patches in an image or video"] == (large, "one")
    assert report.largest["tokens in a sample"][1] == "long"
    assert f"peak of memory: {5 * small} patches in a sample (many)" in report.render()


def test_stats_by_hand(tmp_path: Path, model_folder: Path) -> None:
    save_image(tmp_path / "cup.jpg", 90, 70)
    save_image(tmp_path / "cat.jpg", 70, 90)
    records = [
        conversation("<image>\nWhat is on the table?", "A red cup.", image="cup.jpg"),
        conversation(
            "Compare <image> with <image>.", "A cup, a cat.", images=["cup.jpg", "cat.jpg"]
        ),
        conversation("Say hello.", "Hello!"),
    ]
    source = write_json(tmp_path / "c.json", records)
    actual = stats([source], model_folder, pack_length=512)
    # 90x70 -> 84x56 pixels (2.5 units round to 2): 6 tokens; 70x90 -> 56x84: 6.
    assert actual.image_tokens.tolist() == [6, 12, 0]
    assert actual.packs == 1 and actual.spread == 0
    tokens = (actual.text_tokens + actual.image_tokens).sum()
    assert actual.fill == tokens / 512
    assert (actual.costs > actual.text_tokens).all()
    assert f"{tokens:,}" in render_stats(actual)
    assert plot_stats(actual, tmp_path / "plot") == tmp_path / "plot.png"
    assert (tmp_path / "plot.png").is_file()


def test_how_much_costs_of_packs_differ(tmp_path: Path, model_folder: Path) -> None:
    """Three packs of a sample of like length each; what is answered passes the head too."""
    words = "word " * 20
    records = [conversation(words, "r"), conversation("q", words), conversation(words, "r")]
    source = write_json(tmp_path / "c.json", records)
    lengths = stats([source], model_folder).text_tokens
    actual = stats([source], model_folder, pack_length=int(lengths.max()))
    assert actual.packs == 3 and lengths.max() < 1.1 * lengths.min()
    spread = actual.costs.std() / actual.costs.mean()
    assert actual.spread == pytest.approx(spread, rel=0.01) and spread > 0.2
    assert f"costs within {actual.spread:.1%} (standard deviation)" in render_stats(actual)


def test_the_table_of_quantities() -> None:
    """Of 0, 10, ... 1,000 each per cent is a value."""
    values = np.random.permutation(101) * 10
    table = render_stats(Stats(values, 2 * values, 3 * values, values, 1000, 0, 50, 1.0, 0.0))
    rows = dict(re.findall(r"(\w+ \w+) +│([\d ,│]+)│\n", table))
    cells = {name: [int(n) for n in re.findall(r"\d+", row.replace(",", ""))]
             for name, row in rows.items()}  # fmt: skip
    once = [50500, 500, 50, 500, 950, 990, 1000]
    assert cells["text tokens"] == cells["target tokens"] == once
    assert cells["image tokens"] == [2 * n for n in once]
    assert cells["all tokens"] == [3 * n for n in once]


def test_samples_longer_than_a_pack_are_counted(tmp_path: Path, model_folder: Path) -> None:
    records = [conversation("word " * n, "r") for n in (100, 5, 10)]
    source = write_json(tmp_path / "c.json", records)
    lengths = stats([source], model_folder).text_tokens
    actual = stats([source], model_folder, pack_length=int(lengths[2]))
    assert (actual.too_long, actual.packs) == (1, 2)
    assert actual.text_tokens.tolist() == lengths.tolist()
    assert actual.fill == (lengths[1] + lengths[2]) / (2 * lengths[2])
    assert f"1 samples are longer than a pack of {lengths[2]} tokens" in render_stats(actual)
    none = stats([source], model_folder, pack_length=1)
    assert (none.too_long, none.packs, none.fill) == (3, 0, 0)


@pytest.mark.parametrize("action", ["check", "stats", "build"])
def test_they_measure_by_the_templates_of_training(
    action: str, tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longer system prompt, and tools, which only a template of one's own writes."""
    record = conversation("q", "r") | {"tools": '[{"name": "f", "parameters": {}}]'}
    source = write_json(tmp_path / "c.json", [record])
    (tmp_path / "t.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    start = ["data", action, f"--data={source}", f"--model={model_folder}"]
    start += [f"--output={tmp_path / action}"] if action == "build" else []
    assert cli.main(start) == 1
    printed = capsys.readouterr()
    assert "--loader.template" in printed.out + printed.err
    start.append(f"--loader.template={tmp_path / 't.jinja'}")
    if action != "stats":
        arguments = [one for one in start if not one.startswith("--model")]
        assert cli.main(arguments) == 2
        assert "--template and --system are for counting tokens" in capsys.readouterr().err
    assert cli.main(start) == 0
    if action == "check":
        before = capsys.readouterr().out
        assert cli.main([*start, "--loader.system", "one two three"]) == 0
        after = capsys.readouterr().out
        tokens = [int(out.rsplit(" tokens:", 1)[0].rsplit(" ", 1)[1]) for out in (before, after)]
        assert tokens[1] > tokens[0]
