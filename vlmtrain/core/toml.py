"""Sections of a recipe written as TOML: tomllib only reads, and tomli-w, one more dependency,
would write each number of a list on a line of its own."""

from __future__ import annotations

import json
from typing import Any


def toml_value(value: Any) -> str:
    """A plain value or list as TOML."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return json.dumps(value)


def toml_tables(tables: dict[str, dict[str, Any]]) -> str:
    """Sections of a recipe, each after an empty line."""
    lines = []
    for name, values in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml_value(v)}" for key, v in values.items())]
    return "\n".join(lines) + "\n"
