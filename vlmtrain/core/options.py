"""How options may be spelled: without their section, by a former name, and what is said to a name
of another trainer."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from vlmtrain.core import coming_from
from vlmtrain.core.errors import UsageError
from vlmtrain.core.launch import say_once

# Sections of `train` whose options other commands have without one.
_SHARED = ("train.", "loader.")


def option_names(target: Callable[..., Any]) -> list[str]:
    """The options that tyro makes of a dataclass or a function, without the two dashes."""
    return list(_types(target))


def _types(target: Callable[..., Any]) -> dict[str, Any]:
    """The same with their types."""
    hints = get_type_hints(target)
    types: dict[str, Any] = {}
    for name in inspect.signature(target).parameters:
        if dataclasses.is_dataclass(hints[name]):
            types |= {f"{name}.{one}": x for one, x in _types(hints[name]).items()}
        else:
            types[name] = hints[name]
    return types


def spelled(
    arguments: Sequence[str], target: Callable[..., Any], renamed: Mapping[str, str] | None = None
) -> list[str]:
    """The arguments with every option by its full name of today.

    Args:
        arguments: of a command whose options are those of `target`.
        renamed: former names and those of today; said once where one is used.

    Raises:
        UsageError: names of other trainers, each with what it is called here; or a name without
            its section that several options have; or an --output that is empty; or sources or names
            in two options, of which tyro would take the last.
    """
    types, renamed = _types(target), renamed or {}
    valid = list(types)
    refused, result = [], []
    if "--output=" in arguments or ("--output", "") in itertools.pairwise(arguments):
        raise UsageError("--output is empty, as an unset variable is; name a folder")  # not "."
    for argument in arguments:
        name, equals, value = argument[2:].replace("-", "_").partition("=")
        if not argument.startswith("--") or _known(name, valid):
            result.append(argument)
            continue
        value = argument.partition("=")[2]
        if len(former := options_called(name, renamed)) == 1:
            name = renamed[former[0]]
            say_renamed(argument.partition("=")[0], f"--{name}")
        answer = answer_to(name, valid)
        ends = options_called(name, valid)
        if answer:
            refused.append(f"--{argument[2:].partition('=')[0]}: {answer}")
        elif len(ends) > 1 and name not in valid:
            refused.append(f"--{name}: write one of --{', --'.join(ends)}")
        result.append(f"--{ends[0] if len(ends) == 1 else name}{equals}{value}")
    if refused:
        raise UsageError("\n  ".join(["not options of this command:", *refused]))
    _check_once(result, types)
    return result


def _check_once(arguments: Iterable[str], types: Mapping[str, Any]) -> None:
    given = [one[2:].replace("-", "_").partition("=")[0] for one in arguments if one[:2] == "--"]
    for name in (name for name in given if given.count(name) > 1):
        if types.get(name) in (tuple[str, ...], tuple[Path, ...]):
            raise UsageError(f"--{name} is given twice; name all of them behind one --{name}")
        if name.rpartition(".")[2] == "data":
            one = types.get(name) is Path
            how = "it takes one file" if one else "name all sources in one, between commas"
            raise UsageError(f"--{name} is given twice; {how}")


def answer_to(name: str, valid: Iterable[str]) -> str | None:
    """What is said to an option of another trainer; None: it is none, or it is understood."""
    valid = list(valid)
    entry = coming_from.BY_NAME.get(name.lower())
    if entry is None:
        return None
    here = [one for wanted in entry.here for one in options_called(wanted, valid)]
    if entry.here and not here or not entry.says and [here] == [options_called(name, valid)]:
        return None
    return entry.answer(here)


def options_called(name: str, valid: Iterable[str]) -> list[str]:
    """The option of this name; else all whose name without the section it is. `no_` stays."""
    valid = list(valid)
    if _known(name, valid):
        return [name]
    for section in _SHARED:
        if name.startswith(section) and _known(name[len(section) :], valid):
            return [name[len(section) :]]
    ends = []
    for one in valid:
        section, dot, last = one.rpartition(".")
        if name in (last, f"no_{last}"):
            ends.append(f"{section}{dot}{name}")
    return ends


def _known(name: str, valid: Iterable[str]) -> bool:
    section, dot, last = name.rpartition(".")
    return name in valid or f"{section}{dot}{last.removeprefix('no_')}" in valid


def say_renamed(before: str, now: str) -> None:
    say_once(f"{before} is called {now} now")
