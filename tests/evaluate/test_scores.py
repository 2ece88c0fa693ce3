"""Scores against values worked out by hand, with the source of each rule."""

from __future__ import annotations

import random

import pytest

from vlmtrain.evaluate.scores import (
    anls,
    chosen_option,
    exact_match,
    levenshtein,
    multiple_choice,
    relaxed_accuracy,
)


@pytest.mark.parametrize(
    ("given", "right", "value"),
    [
        ("Paris", ["paris"], 1.0),
        ("  New York\n", ["new york"], 1.0),
        ("New  York", ["new york"], 0.0),  # blanks inside count (VLMEvalKit, 'accuracy')
        ("a cat", ["a dog", "A CAT "], 1.0),
        ("cat.", ["cat"], 0.0),
        ("", ["cat"], 0.0),
    ],
)
def test_exact_match(given: str, right: list[str], value: float) -> None:
    assert exact_match(given, right) == value


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("kitten", "sitting", 3),  # k->s, e->i, +g: the textbook example
        ("intention", "execution", 5),  # Jurafsky & Martin, Speech and Language Processing, 2.5
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("flaw", "lawn", 2),
    ],
)
def test_levenshtein(one: str, other: str, distance: int) -> None:
    assert levenshtein(one, other) == levenshtein(other, one) == distance


def test_levenshtein_by_definition() -> None:
    """The recursion of the definition, on random short words."""

    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        changed = slow(a[1:], b[1:]) + (a[0] != b[0])
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, changed)

    for _ in range(60):
        a, b = ("".join(random.choices("abc", k=random.randrange(6))) for _ in range(2))
        assert levenshtein(a, b) == slow(a, b), (a, b)


@pytest.mark.parametrize(
    ("given", "right", "value"),
    [
        ("2019", ["2019"], 1.0),
        ("HELLO   world ", ["hello world"], 1.0),  # case and runs of blanks (RRC's script)
        ("sitting", ["kitten"], 1 - 3 / 7),  # distance 3, longer text 7
        ("hallo", ["world", "hello"], 0.8),  # the best answer counts
        ("abcd", ["abxy"], 0.5),  # exactly half: RRC's script and VLMEvalKit let it pass
        ("abc", ["axy"], 0.0),  # similarity 1/3 is below 0.5
        ("", ["yes"], 0.0),
        ("", [""], 1.0),
    ],
)
def test_anls(given: str, right: list[str], value: float) -> None:
    """Biten et al. 2019, eq. 1; DocVQA's evaluation script."""
    assert anls(given, right) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("given", "right", "value"),
    [
        ("100", ["105"], 1.0),  # 5/105 = 4.76%
        ("99.75", ["105"], 1.0),  # exactly 5%
        ("99.7", ["105"], 0.0),  # 5.05%
        ("105", ["100"], 1.0),
        ("105.1", ["100"], 0.0),
        ("-95", ["-100"], 1.0),
        ("95", ["-100"], 0.0),
        ("12%", ["0.12"], 1.0),  # a percentage is a hundredth (pix2struct)
        ("12", ["12%"], 0.0),
        ("0", ["0"], 1.0),  # a right answer of 0 is compared as text
        ("0.0", ["0"], 0.0),
        ("Blue", ["blue"], 1.0),
        ("light blue", ["blue"], 0.0),
        (" 7 ", ["7"], 1.0),
        ("about 7", ["7"], 0.0),
        ("8", ["3", "8.1"], 1.0),
    ],
)
def test_relaxed_accuracy(given: str, right: list[str], value: float) -> None:
    """ChartQA, section 5.1; pix2struct's metrics.py."""
    assert relaxed_accuracy(given, right) == value


OPTIONS = {"A": "a red cup", "B": "a cat", "C": "two cats"}


@pytest.mark.parametrize(
    ("given", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("**C**.", "C"),
        ("B. a cat", "B"),
        ("The answer is A", "A"),
        ("A or B", None),  # two letters, and no option's text
        ("It is a red cup.", "A"),  # by its text
        ("a cat", "B"),
        ("a cat on a red cup", None),  # two options' texts
        ("b", None),  # letters are upper case
        ("I think that there is a cat somewhere in this picture, but not sure", None),  # too long
        ("", None),
        ("D", None),
    ],
)
def test_chosen_option(given: str, letter: str | None) -> None:
    """VLMEvalKit's can_infer_option and can_infer_text."""
    assert chosen_option(given, OPTIONS) == letter
    assert multiple_choice(given, ["B"], OPTIONS) == float(letter == "B")


def test_long_answers_are_not_searched_for_options() -> None:
    """Twice the length of all options together, 9 + 5 + 8 = 22 characters, is the bound."""
    assert chosen_option("a cat" + "." * 39, OPTIONS) == "B"
    assert chosen_option("a cat" + "." * 40, OPTIONS) is None
