"""A mutant: one defect, planted at a marker of the sources, which a check must notice.

`// mutant: id` marks a statement of csrc: the one whose last line it stands on or, on a line of its
own, the one below. `/* mutant: id */` marks the expression or the string literal after it. Ids are
unique over csrc, and every one is used by a mutant. Several mutants may hang on one marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[3] / "csrc"
MARKER = re.compile(r"//\s*mutant: ([a-z0-9-]+)$|/\* mutant: ([a-z0-9-]+) \*/", re.M)
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
#: What starts at an opening bracket ends at its partner.
BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Args:
        family: the checks that look at it, see checks.py.
        name: what is wrong; unique in its family.
        marker: where.
        new: what stands there instead. A text that ends with ";" takes the place of the whole
            statement, and "" deletes it. Any other text is an expression that takes the place of
            the statement's value: the condition of an if, while or for, what is returned, what is
            assigned. "$" is what stood there, without a
            statement's ";".
        case: the check that shows it; none: the family's suite.
        engine: "fibers", where a mutant costs milliseconds, or "ptx" for what only the interpreter
            of nvcc's code sees.
        canary: planted on the interpreter too, one of its class.
        quick: on the interpreter in `make test`; without it in `make test-all`. On the fibers all
            are in `make test`, but for those of sm90-fused.
    """

    family: str
    name: str
    marker: str
    new: str = ""
    case: str = ""
    engine: str = "fibers"
    canary: bool = False
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


def markers(code: str) -> list[str]:
    """The ids of the markers of a source."""
    return [a or b for a, b in MARKER.findall(code)]


def plant(code: str, mutants: Iterable[tuple[str, Mutant]]) -> str:
    """Puts mutants whose markers are in a source there.

    Args:
        code: the source; the number of its lines stays.
        mutants: each with the C++ condition under which it is on; "true" alone is planted without
            one, and with it constants and declarations can change.
    """
    by_marker: dict[str, list[tuple[str, Mutant]]] = {}
    for condition, mutant in mutants:
        by_marker.setdefault(mutant.marker, []).append((condition, mutant))
    for actual in reversed(list(MARKER.finditer(code))):
        planted = by_marker.get(actual[1] or actual[2], [])
        if planted:
            start, end = _expression(code, actual) if actual[2] else _statement(code, actual)
            code = code[:start] + _changed(code[start:end], planted, bool(actual[2])) + code[end:]
    return code


def _changed(old: str, planted: list[tuple[str, Mutant]], expression: bool) -> str:
    statements = [(c, m) for c, m in planted if not expression and m.new[-1:] in ("", ";")]
    values = [(c, m.new) for c, m in planted if (c, m) not in statements]
    new = old
    if values:
        start, end = (0, len(old)) if expression else _value(old)
        new = old[:start] + _choice(old[start:end], values) + old[end:]
    for condition, mutant in statements:
        other = mutant.new.replace("$", old.rstrip(";"))
        if condition == "true":
            new = other or ";"
        else:
            new = f"if ({condition}) {{ {other} }} else {{ {new} }}"
    one_line = " ".join(re.sub(r"//[^\n]*", "", new).split("\n"))
    return one_line + "\n" * old.count("\n")


def _choice(old: str, values: list[tuple[str, str]]) -> str:
    """An expression, or the elements of a braced list, each under its condition."""
    if old.startswith("{") and values[0][0] != "true":
        lists = [(c, _elements(v)) for c, v in values]
        elements = [
            _choice(x, [(c, v[i]) for c, v in lists if v[i] != x]) for i, x in
            enumerate(_elements(old))
        ]  # fmt: skip
        return "{" + ", ".join(elements) + "}"
    new = old
    for condition, value in values:
        value = value.replace("$", old)
        new = value if condition == "true" else f"({condition} ? ({value}) : ({new}))"
    return new


def _elements(text: str) -> list[str]:
    """The elements of a braced list."""
    assert text[0] == "{" and text[-1] == "}", f"{text!r} is no braced list"
    parts, at = [], 1
    while at < len(text):
        end = _end(text, at, ",}")
        parts.append(text[at:end].strip())
        at = end + 1
    return parts


def _end(code: str, at: int, stops: str) -> int:
    """Where the first of `stops` is, from `at` on, outside of brackets and strings."""
    while at < len(code):
        c = code[at]
        if c in stops:
            return at
        if c == '"':
            at += len(LITERAL.match(code, at)[0])  # type: ignore[index]
        else:
            at = _end(code, at + 1, BRACKETS[c]) + 1 if c in BRACKETS else at + 1
    raise AssertionError(f"none of {stops!r} after {code[:80]!r}")


def _expression(code: str, marker: re.Match[str]) -> tuple[int, int]:
    start = marker.end() + len(code[marker.end() :]) - len(code[marker.end() :].lstrip())
    literal = LITERAL.match(code, start)
    return start, literal.end() if literal else _end(code, start, ",;)]}")


def _statement(code: str, marker: re.Match[str]) -> tuple[int, int]:
    """From its first character to its last, which is ; or {."""
    line = code.rfind("\n", 0, marker.start()) + 1
    before = code[line : marker.start()].rstrip()
    if before:  # the statement ends here, and begins after the line that ends the one before
        end = line + len(before)
        start = line
        while not _ends(code[code.rfind("\n", 0, start - 1) + 1 : start]):
            start = code.rfind("\n", 0, start - 1) + 1
    else:
        start = marker.end() + 1
        end = code.find("\n", start)
        while not re.search(r"[;{}]\s*(//.*)?$", code[start:end]):
            end = code.find("\n", end + 1)
        end = start + len(re.sub(r"\s*//.*$", "", code[start:end]).rstrip())
    return end - len(code[start:end].lstrip()), end


def _ends(line: str) -> bool:
    """Whether a statement ends with a line."""
    line = re.sub(r"\s*//.*$", "", line).strip()
    return not line or line[-1] in ";{}:\\" or line.startswith("#")


def _value(statement: str) -> tuple[int, int]:
    """Where a statement's value stands."""
    if actual := re.match(r"(?:\} )?(?:else )?(?:if|while) \((?:const \w+ \w+ =\s+)?", statement):
        return actual.end(), _end(statement, actual.end(), ")")
    if actual := re.match(r"for \(", statement):
        start = _end(statement, actual.end(), ";") + 2
        return start, _end(statement, start, ";")
    if actual := re.match(r"return\s", statement):
        return actual.end(), _end(statement, actual.end(), ";")
    actual = re.search(r" [-+*/|^]?=\s+", statement)
    assert actual is not None, f"{statement!r} has no value"
    return actual.end(), _end(statement, actual.end(), ";")
