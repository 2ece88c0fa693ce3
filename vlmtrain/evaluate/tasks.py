"""Questions with known answers, from a JSONL file: one object a line.

    {"task": "docs", "image": "page.jpg", "question": "Which year?", "answer": ["2019", "in 2019"],
     "metric": "anls"}
    {"image": "cup.jpg", "question": "What is it?", "A": "a cup", "B": "a cat", "answer": "A",
     "metric": "multiple_choice"}

The prompts are those that VLMEvalKit gives Qwen2-VL (vlm/qwen2_vl/prompt.py): media first, then
the question in the form of its kind. `prompt` chooses another form than the metric's own.
"""

from __future__ import annotations

import itertools
import string
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmtrain.core.config import LoaderSection
from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.fields import is_empty
from vlmtrain.data.sample import Sample
from vlmtrain.evaluate.scores import METRIC_NAMES, is_chinese, score
from vlmtrain.generate.questions import check_media, from_record, read_lines

VQA = "\nPlease try to answer the question with short words or phrases if possible."
YES_NO = " Please answer yes or no."
CHOICE = "Please select the correct answer from the options above."
CHOICE_CHINESE = "请直接回答选项字母。"
_READ = ("task", "metric", "question", "prompt")  # keys of any line that are read here


@dataclass(frozen=True)
class Task:
    """One question with its right answers."""

    name: str  # of the task; questions of one name are scored together
    metric: str
    id: str
    sample: Sample
    question: str
    right: tuple[str, ...]
    options: dict[str, str]  # multiple choice: letter -> text


@dataclass(frozen=True)
class Scored:
    """A task with the answer given."""

    task: Task
    answer: str

    @property
    def score(self) -> float:
        return score(self.task.metric, self.answer, self.task.right, self.task.options)

    def to_dict(self) -> dict[str, Any]:
        task = self.task
        return {
            "task": task.name,
            "id": task.id,
            "question": task.question,
            "right": list(task.right),
            "metric": task.metric,
            "answer": self.answer,
            "score": self.score,
        }


def vqa_prompt(question: str) -> str:
    """For answers of a few words."""
    return question + VQA


def yes_no_prompt(question: str) -> str:
    """For yes and no."""
    return question + YES_NO


def choice_prompt(question: str, options: dict[str, str], hint: str | None = None) -> str:
    """For the letter of an option."""
    prompt = f"Hint: {hint}\n" if hint else ""
    prompt += f"Question: {question}\nOptions:\n"
    prompt += "".join(f"{letter}. {text}\n" for letter, text in options.items())
    return prompt + (CHOICE_CHINESE if is_chinese(prompt) else CHOICE)


def _form(record: dict[str, Any], metric: str, fail: Callable[[str], DataError]) -> str:
    form = record.get("prompt", "choice" if metric == "multiple_choice" else "vqa")
    if form not in ("vqa", "yes_no", "choice", "plain"):
        raise fail(f"'prompt' is {form!r}; it must be vqa, yes_no, choice or plain")
    if form == "choice" and metric != "multiple_choice":
        raise fail(f"'prompt' is 'choice' but the metric {metric} compares texts, not letters")
    return form


def _is_answer(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def read_tasks(path: Path, section: LoaderSection | None = None) -> list[Task]:
    """Every question, all of them checked before the first is asked.

    Args:
        section: its ignore_keys, media_root and max_samples hold here too.

    Raises:
        DataError: the first line at fault, by its number.
    """
    section = section or LoaderSection()
    tasks = []
    for number, record in itertools.islice(read_lines(path), section.max_samples or None):
        task = _task(path, number, record, section)
        tasks.append(replace(task, sample=check_media(task.sample)))
    return tasks


def _task(path: Path, number: int, record: dict[str, Any], section: LoaderSection) -> Task:
    def fail(problem: str) -> DataError:
        return DataError(f"{path}: line {number}: {problem}")

    # As in training data, null says nothing.
    record = {k: v for k, v in record.items() if k not in section.ignore_keys and not is_empty(v)}
    metric = record.get("metric")
    if metric not in METRIC_NAMES:
        raise fail(f"'metric' is {metric!r}; it must be one of {', '.join(METRIC_NAMES)}")
    text, hint = record.get("question"), record.get("hint")
    if not isinstance(text, str) or not text.strip():
        raise fail("'question' must be a text")
    answer = record.get("answer")
    right = [answer] if isinstance(answer, (str, int, float)) else answer
    if not isinstance(right, list) or not right or not all(map(_is_answer, right)):
        raise fail(
            "'answer' must be the right answer, a text or a number, or a list of right answers"
        )
    options = {letter: str(record[letter]) for letter in string.ascii_uppercase if letter in record}
    answers = tuple(str(one) for one in right)
    if metric == "multiple_choice":
        wrong = [answer for answer in answers if answer not in options]
        if len(options) < 2 or wrong:
            raise fail(
                f"the options are {', '.join(options) or 'missing'} and the answer is "
                f"{', '.join(answers)}; give two options or more as A, B, ... and one of the "
                "letters as the answer"
            )
    form = _form(record, metric, fail)
    prompt = {
        "vqa": lambda: vqa_prompt(text),
        "yes_no": lambda: yes_no_prompt(text),
        "choice": lambda: choice_prompt(text, options, hint),
        "plain": lambda: text,
    }[form]()
    ignored = {*_READ, *section.ignore_keys}
    if form == "choice":
        ignored |= {"hint", *options}
    elif metric == "multiple_choice":  # whose score asks for them
        ignored |= {*options}
    root = section.media_root
    return Task(
        name=str(record.get("task", path.stem)),
        metric=metric,
        id=str(record.get("id", number)),
        sample=from_record(path, number, record, prompt, ignored=ignored, media_root=root),
        question=text,
        right=answers,
        options=options,
    )


def summary(scored: Iterable[Scored]) -> list[dict[str, Any]]:
    """Of each task and metric the number of questions and the mean score, in file order."""
    counts: Counter[tuple[str, str]] = Counter()
    totals: dict[tuple[str, str], float] = {}
    for one in scored:
        key = (one.task.name, one.task.metric)
        counts[key] += 1
        totals[key] = totals.get(key, 0.0) + one.score
    return [
        {"task": name, "metric": metric, "questions": n, "score": totals[name, metric] / n}
        for (name, metric), n in counts.items()
    ]
