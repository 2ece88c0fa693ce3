"""TOML files read, and sections of a recipe written: tomllib only reads, and tomli-w, one more
dependency, would write each number of a list on a line of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmtrain.core.errors import UserError


def read_toml(path: Path, what: str, raises: type[UserError]) -> dict[str, Any]:
    """The tables of a file, which an error calls `what`.

    Raises:
        UserError: of the class `raises`; no such file, or not TOML.
    """
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise raises(f"{what} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise raises(f"{what} is not valid TOML: {error}") from error


def toml_value(value: Any) -> str:
    """A plain value or list as TOML."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    # As it is written: of JSON's escapes TOML lacks those of two halves.
    return json.dumps(value, ensure_ascii=False)


def toml_tables(tables: dict[str, dict[str, Any]]) -> str:
    """Sections of a recipe, each after an empty line."""
    lines = []
    for name, values in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml_value(v)}" for key, v in values.items())]
    return "\n".join(lines) + "\n"
