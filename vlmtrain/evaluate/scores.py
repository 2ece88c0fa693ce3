"""How right an answer is: exact match, ANLS, relaxed accuracy, multiple choice.

Each score takes the answer given and the right ones and returns a number from 0 to 1; of several
right answers the best counts. The rules are those by which the published figures of these models
were made: VLMEvalKit's (https://github.com/open-compass/VLMEvalKit), which for ANLS and relaxed
accuracy are the ones of the benchmarks' own papers and scripts, as each function says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

ANLS_THRESHOLD = 0.5
RELAXED_TOLERANCE = 0.05
# Separators around an option's letter: "(B)", "B.", "**B**".
_SEPARATORS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is a right one but for case and blanks around it.

    VLMEvalKit's `accuracy` (dataset/utils/vqa_eval.py), which scores OCRVQA.
    """
    return float(
        any(answer.strip().lower() == reference.strip().lower() for reference in references)
    )


def anls(answer: str, references: Sequence[str]) -> float:
    """Average normalised Levenshtein similarity of one question.

        1 - d / max(length),  0 below the threshold of 0.5

    with d the edit distance of the lower-cased texts, runs of blanks as one. Biten et al., Scene
    Text Visual Question Answering, ICCV 2019 (arXiv 1905.13648), eq. 1, and DocVQA (arXiv
    2007.00398). The paper gives 0 where the distance is exactly half, the benchmark's scoring
    script and VLMEvalKit give 0.5: so does this.
    """
    best = max(_similarity(answer, reference) for reference in references)
    return best if best >= ANLS_THRESHOLD else 0.0


def _similarity(one: str, other: str) -> float:
    one, other = (" ".join(text.lower().split()) for text in (one, other))
    length = max(len(one), len(other))
    return 1.0 - levenshtein(one, other) / length if length else 1.0


def levenshtein(one: str, other: str) -> int:
    """Fewest insertions, deletions and replacements of characters that turn one into the other."""
    previous = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (a != b)))
        previous = row
    return previous[-1]


def relaxed_accuracy(answer: str, references: Sequence[str]) -> float:
    """1 if a number is within 5% of a right one, or a text is a right one but for its case.

    ChartQA (Masry et al., ACL 2022, arXiv 2203.10244, section 5.1), by the code of pix2struct,
    which VLMEvalKit uses too: "12%" is the number 0.12; a right answer of 0 is compared as text.
    """
    return float(any(_relaxed(answer.strip(), reference) for reference in references))


def _relaxed(answer: str, reference: str) -> bool:
    number, target = _number(answer), _number(reference)
    if number is not None and target:
        return abs(number - target) / abs(target) <= RELAXED_TOLERANCE
    return answer.lower() == reference.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def multiple_choice(answer: str, references: Sequence[str], options: Mapping[str, str]) -> float:
    """1 if the option that the answer chooses is the right letter (`chosen_option`)."""
    return float(chosen_option(answer, options) in references)


def chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer chooses, None where it can't be told.

    VLMEvalKit's `can_infer` (utils/matching_util.py), which its `exact_matching` uses without a
    judge: the one letter that stands alone in the answer; else the one option whose text is in
    it, unless the answer is more than twice as long as all options together.
    """
    words = answer.translate(_SEPARATORS).split()
    letters = [letter for letter in options if letter in words]
    if len(letters) == 1:
        return letters[0]
    text = answer.lower()
    if len(text) > 2 * sum(len(option) for option in options.values()):
        return None
    named = [letter for letter, option in options.items() if option.lower() in text]
    return named[0] if len(named) == 1 else None


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "anls": anls,
    "relaxed_accuracy": relaxed_accuracy,
}
METRIC_NAMES = (*METRICS, "multiple_choice")


def score(metric: str, answer: str, references: Sequence[str], options: Mapping[str, str]) -> float:
    """The score of one answer by the metric of that name."""
    if metric == "multiple_choice":
        return multiple_choice(answer, references, options)
    return METRICS[metric](answer, references)


def is_chinese(text: str) -> bool:
    """Whether a text holds a Chinese character."""
    return re.search("[\u4e00-\u9fff]", text) is not None
