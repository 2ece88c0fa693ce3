"""`vlmtrain generate` as it is typed: a question, a file of questions, a chat, and mistakes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlmkernels.integrations.transformers.modules import Replacement
from vlmtrain import cli
from vlmtrain.data.sample import Sample, Turn
from vlmtrain.generate import command, questions
from vlmtrain.generate.model import Answerer, Sampling

LENGTH = 6


@pytest.fixture
def generate(folder, monkeypatch, answerer):
    """Run the command; the model is loaded once for all tests."""
    monkeypatch.setattr("vlmtrain.generate.model.Answerer", lambda path, **options: answerer)

    def run(*arguments: str) -> int:
        return cli.main(["generate", f"--model={folder}", f"--max_new_tokens={LENGTH}", *arguments])

    return run


@pytest.fixture
def said(answerer, pictures):
    """What the model says to a prompt and images."""

    def ask(prompt: str, *images: str, system: str = "") -> str:
        media = {"images": list(images)}
        sample = questions.question(prompt, media, system=system, media_root=pictures)
        return answerer.answer(sample, Sampling(LENGTH)).text

    return ask


def test_a_question(generate, said, pictures, capsys) -> None:
    a, b = str(pictures / "a.jpg"), str(pictures / "b.png")
    assert generate("--image", a, b, "--prompt", "Which? <image> or <image>?") == 0
    printed = capsys.readouterr()
    assert printed.out == said("Which? <image> or <image>?", "a.jpg", "b.png") + "\n"
    assert f"cut off after {LENGTH} tokens" in printed.err
    assert generate("--video", str(pictures / "film"), "--prompt", "What?") == 0
    assert capsys.readouterr().out.strip()
    assert generate("--prompt", "What?", "--system", "Be brief.") == 0
    briefly = said("What?", system="Be brief.")
    assert capsys.readouterr().out == briefly + "\n" != said("What?") + "\n"


def test_options_of_the_model(folder, pictures, monkeypatch, capsys) -> None:
    """Its type, kernels and media sizes are those that were asked for, by default the folder's."""
    made: list[Answerer] = []

    def make(path, **options):
        made.append(Answerer(path, **options))
        return made[-1]

    monkeypatch.setattr("vlmtrain.generate.model.Answerer", make)
    arguments = ["generate", f"--model={folder}", "--prompt=What?", "--max_new_tokens=1"]
    asked = ["--precision=bf16", "--no_kernels", "--media.max_pixels=12544"]
    assert cli.main(arguments) == cli.main([*arguments, *asked]) == 0
    usual, other = made
    assert other.model.dtype == torch.bfloat16 != usual.model.dtype
    assert other.processor.images.max_pixels == 12544 != usual.processor.images.max_pixels
    kernels = [any(isinstance(m, Replacement) for m in one.model.modules()) for one in made]
    assert kernels == [True, False]


def test_a_question_draws_by_the_seed(generate, capsys) -> None:
    """Whatever was drawn before."""
    printed = []
    for before, seed in ((1, 3), (2, 3), (2, 4)):
        torch.manual_seed(before)
        assert generate("--prompt", "What?", "--temperature=1.5", f"--seed={seed}") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


def test_a_file_of_questions(generate, said, pictures, capsys) -> None:
    rows = [
        {"prompt": "What?", "image": "a.jpg", "note": "größe"},
        {
            "id": 7,
            "messages": [{"role": "user", "content": "Say <image>"}],
            "images": ["b.png"],
            "prompt": None,
        },
        {"prompt": "And this?", "answer": ["that", 7]},
    ]
    source, target = pictures / "q.jsonl", pictures / "answers.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))
    target.unlink(missing_ok=True)
    assert generate("--input", str(source), "--output", str(target)) == 0
    assert "3 answers (3 cut off at --max_new_tokens 6)" in capsys.readouterr().out
    expected = [said("What?", "a.jpg"), said("Say <image>", "b.png"), said("And this?")]
    lines = target.read_text(encoding="utf-8").split("\n")[:-1]  # an answer may hold U+2028
    assert [json.loads(line) for line in lines] == [
        {**row, **({"reference": row["answer"]} if "answer" in row else {}), "answer": answer}
        for row, answer in zip(rows, expected, strict=True)
    ]
    assert generate("--input", str(source), "--output", str(target)) == 1
    assert "exists" in capsys.readouterr().err


def test_keys_and_marks_that_say_nothing(generate, answerer, folder, pictures, capsys) -> None:
    """They are named in --ignore_keys, in each form of a question."""
    text = "Say <audio>."
    asked = Sample("1", (Turn("user", text),), (), "here")
    answer = answerer.answer(asked, Sampling(LENGTH)).text
    messages = [{"role": "user", "content": text}]
    source, target = pictures / "ignored.jsonl", pictures / "ignored-answers.jsonl"
    for row in ({"prompt": text, "remark": 7}, {"messages": messages, "remark": 7}):
        source.write_text(json.dumps(row))
        target.unlink(missing_ok=True)
        arguments = ["--input", str(source), "--output", str(target)]
        assert generate(*arguments, "--ignore_keys", "<audio>") == 1
        assert "the key 'remark'" in capsys.readouterr().err
        assert generate(*arguments, "--ignore_keys", "remark") == 1
        assert "the mark <audio>" in capsys.readouterr().err
        assert generate(*arguments, "--ignore_keys", "remark", "<audio>") == 0
        assert json.loads(target.read_text())["answer"] == answer
    assert generate("--prompt", text) == 1
    capsys.readouterr()
    assert generate("--prompt", text, "--ignore_keys", "<audio>") == 0
    assert capsys.readouterr().out == answer + "\n"
    config = command.GenerateConfig(folder, max_new_tokens=LENGTH, ignore_keys=("<audio>",))
    assert command.run(config, io.StringIO(text + "\n")) == 0
    assert capsys.readouterr().out == answer + "\n"


def test_lines_draw_for_themselves(generate, answerer, pictures, monkeypatch) -> None:
    """However much those before them drew; the same question again is another draw, and so is
    another seed."""
    rows = [{"prompt": "What?"}, {"prompt": "Which?"}, {"prompt": "Which?"}]
    source, target = pictures / "drawn.jsonl", pictures / "drawn-answers.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))
    answer, answers = answerer.answer, []
    for more, seed in ((0, 0), (3, 0), (0, 1)):

        def draw(*arguments, more=more):
            said = answer(*arguments)
            torch.rand(more)
            return said

        monkeypatch.setattr(answerer, "answer", draw)
        target.unlink(missing_ok=True)
        arguments = ["--input", str(source), "--output", str(target), "--temperature=1.5"]
        assert generate(*arguments, f"--seed={seed}") == 0
        answers.append(target.read_text(encoding="utf-8").split("\n")[:-1])
    assert answers[0] == answers[1] != answers[2]
    assert json.loads(answers[0][1])["answer"] != json.loads(answers[0][2])["answer"]


def test_media_without_marks_come_first(pictures) -> None:
    media = {"videos": ["film"], "images": ["a.jpg", "b.png"]}
    sample = questions.question("What?", media, media_root=pictures)
    assert [turn.text for turn in sample.turns] == ["<image><image><video>What?"]
    assert [medium.name for medium in sample.media] == ["a.jpg", "b.png", "film"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not valid JSON"]),
        ('{"question": "x"}', ["'prompt'", "'messages'"]),
        ('{"prompt": "x", "image": "none.jpg"}', ["none.jpg", "missing"]),
        ('{"prompt": "<image> <image>?", "image": "a.jpg"}', ["2 <image> marks", "1 image"]),
        ('{"prompt": "x", "image": "http://a.b/c.jpg"}', ["URL"]),
        ('{"prompt": " "}', ["empty"]),
        ('{"prompt": "x", "answer": 1, "reference": 2}', ["'answer' and 'reference'"]),
        ('{"prompt": "<|image_pad|>"}', ["reserved token"]),
        ('{"prompt": "x", "image": "line.png"}', ["at most 200 times"]),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
            '"content": "b"}]}',
            ["last turn"],
        ),
    ],
)
def test_a_bad_line_is_named_before_anything_is_asked(
    generate, pictures, tmp_path, capsys, line, words
) -> None:
    source, target = pictures / "bad.jsonl", tmp_path / "answers.jsonl"
    Image.new("RGB", (1000, 2)).save(pictures / "line.png")
    source.write_text('{"prompt": "good"}\n' + line + "\n")
    assert generate("--input", str(source), "--output", str(target)) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    for word in [f"{source}: line 2", *words]:
        assert word in error[0], error
    assert not target.exists()


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_chat(answerer, folder, pictures, capsys, system) -> None:
    """Turns build on each other; a turn at fault is told, and the chat goes on."""
    typed = f"/image {pictures / 'a.jpg'}\nWhat?\n\n/image nowhere.jpg\nThis?\nAnd now?\n"
    typed += "<image>?\nSo?\n"
    config = command.GenerateConfig(model=folder, max_new_tokens=LENGTH, system=system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlmtrain.generate.model.Answerer", lambda path, **options: answerer)
        assert command.run(config, io.StringIO(typed)) == 0
    printed = capsys.readouterr()
    sampling = Sampling(LENGTH)
    media = {"images": [str(pictures / "a.jpg")]}
    first = questions.question("What?", media, system=system)
    one = answerer.answer(first, sampling).text
    longer = questions.then(questions.answered(first, one), questions.question("And now?"))
    two = answerer.answer(longer, sampling).text
    longer = questions.then(questions.answered(longer, two), questions.question("So?"))
    three = answerer.answer(longer, sampling).text
    assert printed.out == f"{one}\n{two}\n{three}\n"  # nothing else where nobody types
    missing, without = (line for line in printed.err.splitlines() if "cut off" not in line)
    assert "nowhere.jpg is missing" in missing and "add its images and videos again" in missing
    assert "1 <image> mark but 0 images" in without and "again" not in without


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt=x", "--image=none.jpg"], ["none.jpg", "missing"]),
        (["--prompt=x", "--output=a"], ["--output", "--input"]),
        (["--input=a.jsonl"], ["--output"]),
        (["--input=a.jsonl", "--output=b.jsonl", "--prompt=x"], ["--prompt", "--input"]),
        (["--input=none.jsonl", "--output=b.jsonl"], ["none.jsonl"]),
        (["--prompt=x", "--temperature=-1"], ["--temperature"]),
        (["--prompt=x", "--temperature=1e-300"], ["--temperature is 1e-300", "at least 1e-6"]),
        (["--prompt="], ["the prompt is empty"]),
        (["--prompt=x", f"--seed={10**20}"], ["--seed is 1000000"]),
        (["--prompt=x", "--image", "<folder>"], ["tokenizer.json"]),
    ],
)
def test_mistakes(generate, folder, capsys, monkeypatch, tmp_path, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [a.replace("<folder>", str(folder / "tokenizer.json")) for a in arguments]
    assert generate(*arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    for word in words:
        assert word in error[0]


def test_no_such_model(capsys, tmp_path) -> None:
    assert cli.main(["generate", f"--model={tmp_path / 'none'}", "--prompt=x"]) == 1
    assert "none: no such folder" in capsys.readouterr().err


def test_nothing_is_loaded_for_a_missing_file(folder, capsys) -> None:
    """Mistakes come before the minutes that loading takes."""
    assert cli.main(["generate", "--model=none", "--prompt=x", "--image=none.jpg"]) == 1
    assert "none.jpg" in capsys.readouterr().err
    assert Path(folder).is_dir()
