"""How options may be spelled: without their section, by a former name, and what is said to a name
of another trainer."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from vlmtrain.core import coming_from
from vlmtrain.core.errors import UsageError

# Sections of `train` whose options other commands have without one.
_SHARED = ("train.", "loader.")


def option_names(target: Callable[..., Any]) -> list[str]:
    """The options that tyro makes of a dataclass or a function, without the two dashes."""
    hints = get_type_hints(target)
    names = []
    for name in inspect.signature(target).parameters:
        nested = dataclasses.is_dataclass(hints[name])
        names += [f"{name}.{one}" for one in option_names(hints[name])] if nested else [name]
    return names


def spelled(
    arguments: Sequence[str], target: Callable[..., Any], renamed: Mapping[str, str] | None = None
) -> list[str]:
    """The arguments with every option by its full name of today.

    Args:
        arguments: of a command whose options are those of `target`.
        renamed: former names and those of today; said once where one is used.

    Raises:
        UsageError: names of other trainers, each with what it is called here; or a name without
            its section that several options have; or an --output that is empty.
    """
    valid, renamed = option_names(target), renamed or {}
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
    return result


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
    """Say a new name once: not on every rank, and not again where `--nproc` has started it."""
    ranks = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    first = all(os.environ.get(rank, "0") == "0" for rank in ranks)
    if first and "VLMTRAIN_LAUNCHER" not in os.environ:
        print(f"vlmtrain: {before} is called {now} now", file=sys.stderr, flush=True)
