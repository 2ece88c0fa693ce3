"""Task files: the prompts of VLMEvalKit, what a line means, and every mistake by its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import save_image
from vlmtrain.core.config import LoaderSection
from vlmtrain.core.errors import UserError
from vlmtrain.data.errors import DataError
from vlmtrain.evaluate.config import EvaluateConfig
from vlmtrain.evaluate.measure import _report
from vlmtrain.evaluate.tasks import Scored, read_tasks, summary

GOOD: dict[str, Any] = {"question": "Which year?", "answer": "2019", "metric": "anls"}
CHOICE: dict[str, Any] = {
    "question": "What is it?",
    "A": "a cup",
    "B": "a cat",
    "answer": "B",
    "metric": "multiple_choice",
}


@pytest.fixture
def file(tmp_path: Path):
    save_image(tmp_path / "cup.jpg", 90, 70)

    def write(*records: Any) -> Path:
        path = tmp_path / "questions.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
        return path

    return write


# The prompts of vlmeval/vlm/qwen2_vl/prompt.py, written out.
@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        (
            GOOD,
            "Which year?\nPlease try to answer the question with short words or phrases if "
            "possible.",
        ),
        ({**GOOD, "prompt": "yes_no"}, "Which year? Please answer yes or no."),
        ({**GOOD, "prompt": "plain"}, "Which year?"),
        (
            CHOICE,
            "Question: What is it?\nOptions:\nA. a cup\nB. a cat\n"
            "Please select the correct answer from the options above.",
        ),
        (
            {**CHOICE, "hint": "Look left.", "question": "是什么？"},
            "Hint: Look left.\nQuestion: 是什么？\nOptions:\nA. a cup\nB. a cat\n"
            "请直接回答选项字母。",
        ),
    ],
    ids=["vqa", "yes_no", "plain", "choice", "choice in Chinese"],
)
def test_prompts(file, record, prompt) -> None:
    (task,) = read_tasks(file({**record, "images": ["cup.jpg", "cup.jpg"]}))
    assert [turn.text for turn in task.sample.turns] == ["<image><image>" + prompt]
    assert [Path(media.parts[0].path).name for media in task.sample.media] == ["cup.jpg"] * 2
    (task,) = read_tasks(file(record))
    assert [turn.text for turn in task.sample.turns] == [prompt]


def test_what_a_line_means(file) -> None:
    records = [
        {**GOOD, "answer": ["2019", "in 2019"], "task": "docs", "id": "a"},
        {**GOOD, "answer": 7, "metric": "relaxed_accuracy"},
        CHOICE,
    ]
    first, second, third = read_tasks(file(*records))
    assert (first.name, first.id, first.right) == ("docs", "a", ("2019", "in 2019"))
    assert (second.name, second.id, second.right) == ("questions", "2", ("7",))
    assert third.options == {"A": "a cup", "B": "a cat"}
    scored = [Scored(first, "2018"), Scored(second, "7.2"), Scored(third, "(B)")]
    assert [one.score for one in scored] == [0.75, 1.0, 1.0]
    more = [*scored, Scored(second, "9")]
    assert summary(more) == [
        {"task": "docs", "metric": "anls", "questions": 1, "score": 0.75},
        {"task": "questions", "metric": "relaxed_accuracy", "questions": 2, "score": 0.5},
        {"task": "questions", "metric": "multiple_choice", "questions": 1, "score": 1.0},
    ]
    assert scored[2].to_dict() == {
        "task": "questions",
        "id": "3",
        "question": "What is it?",
        "right": ["B"],
        "metric": "multiple_choice",
        "answer": "(B)",
        "score": 1.0,
    }


def test_options_of_the_loader_hold(file, tmp_path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "cup.jpg").rename(tmp_path / "photos" / "cup.jpg")
    good = {**GOOD, "image": "cup.jpg", "topic": 3}
    path = file(good, good, {"metric": "bleu"})
    section = LoaderSection(
        media_root=str(tmp_path / "photos"), max_samples=2, ignore_keys=("topic",)
    )
    tasks = read_tasks(path, section)
    assert [task.id for task in tasks] == ["1", "2"]
    assert tasks[0].sample.media[0].parts[0].path == str(tmp_path / "photos" / "cup.jpg")
    with pytest.raises(DataError, match="line 1.* the file .*cup.jpg is missing"):
        read_tasks(path, replace(section, media_root=""))


def test_ignored_keys_and_nulls_say_nothing(file) -> None:
    record = {**CHOICE, "C": "a dog", "hint": "Look left.", "id": None, "task": None}
    (task,) = read_tasks(file({**record, "prompt": None}))
    assert (task.name, task.id, len(task.options)) == ("questions", "1", 3)
    assert "Hint: Look left." in task.sample.turns[0].text
    ignored = LoaderSection(ignore_keys=("hint", "C", "prompt"))
    (task,) = read_tasks(file({**record, "prompt": "v7"}), ignored)
    assert [*task.options] == ["A", "B"] and "Hint" not in task.sample.turns[0].text
    marked = file({**GOOD, "question": "What is <audio>?", "prompt": "plain"})
    with pytest.raises(DataError, match="line 1.* the mark <audio>"):
        read_tasks(marked)
    (task,) = read_tasks(marked, LoaderSection(ignore_keys=("<audio>",)))
    assert task.sample.turns[0].text == "What is <audio>?"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("packing", "none"),
        ("unreadable", "skip"),
        ("too_long", "drop"),
        ("skip_limit", 3),
        ("workers", 0),
        ("verify", False),
    ],
)
def test_options_of_data_alone_are_refused(name, value, tmp_path) -> None:
    loader = replace(LoaderSection(), **{name: value})
    config = EvaluateConfig(model=tmp_path, tasks=tmp_path / "q.jsonl", loader=loader)
    with pytest.raises(UserError, match=f"--loader.{name} is {value}, which says how --data"):
        config.validate()
    replace(config, data="c.json").validate()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({**GOOD, "metric": "bleu"}, ["'bleu'", "anls"]),
        ({**GOOD, "question": " "}, ["question"]),
        ({**GOOD, "answer": []}, ["answer"]),
        ({**GOOD, "answer": None}, ["answer"]),
        ({**GOOD, "answer": ["2019", ["2020"]]}, ["answer", "a text or a number"]),
        ({**GOOD, "answer": True}, ["answer"]),
        ({**CHOICE, "answer": "C"}, ["A, B", "C"]),
        ({**CHOICE, "B": None}, ["options are A"]),
        ({**GOOD, "prompt": "choice"}, ["choice", "anls"]),
        ({**GOOD, "A": "a cup", "B": "a cat"}, ["the key 'A', which is not read"]),
        ({**GOOD, "hint": "Look left."}, ["the key 'hint', which is not read"]),
        ({**CHOICE, "hint": "Look left.", "prompt": "vqa"}, ["the key 'hint'"]),
        ({**GOOD, "prompt": "chatty"}, ["chatty", "yes_no"]),
        ({**GOOD, "image": "none.jpg"}, ["none.jpg", "missing"]),
        ({**GOOD, "question": "<image> and <image>?", "image": "cup.jpg"}, ["2", "1"]),
        ([1], ["list", "object"]),
    ],
)
def test_mistakes_are_named_by_line(file, record, words) -> None:
    path = file(GOOD, record, GOOD)
    with pytest.raises(DataError) as error:
        read_tasks(path)
    for word in [f"{path}: line 2", *words]:
        assert word in str(error.value)


def test_lines_that_are_no_json(tmp_path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n{'question': 1}\n")
    with pytest.raises(DataError, match="line 3 is not valid JSON"):
        read_tasks(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_tasks(path)
    with pytest.raises(DataError, match="No such file"):
        read_tasks(tmp_path / "nowhere.jsonl")


def test_names_are_no_markup(tmp_path, capsys) -> None:
    row = {"task": "x[/y] mmmu [val]", "metric": "anls", "questions": 1, "score": 0.5}
    _report(tmp_path, {"model": "a [b]", "tasks": [row]}, [])
    printed = capsys.readouterr().out
    assert "a [b]" in printed and "x[/y] mmmu [val]" in printed
    assert json.loads((tmp_path / "scores.json").read_text())["tasks"] == [row]


def test_answers_are_those_of_this_run(file, tmp_path) -> None:
    """Where none were asked for, an earlier run's go."""
    results, answers = {"model": "a", "tasks": []}, tmp_path / "answers.jsonl"
    pairs = zip(read_tasks(file(GOOD, CHOICE)), ("2019", "A"), strict=True)
    scored = [Scored(task, answer) for task, answer in pairs]
    for given in (scored, scored[1:]):
        _report(tmp_path, results, given)
        lines = answers.read_text().splitlines()
        assert [json.loads(line) for line in lines] == [one.to_dict() for one in given]
    for _ in range(2):
        _report(tmp_path, results, [])
        assert not answers.exists() and (tmp_path / "scores.json").exists()
