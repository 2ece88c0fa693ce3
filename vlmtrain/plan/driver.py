"""What this version of `vlmtrain train` accepts: asked of its configuration, not written down."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from vlmtrain import config
from vlmtrain.errors import UserError

FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "multiplexed vision": {"parallel": {"vision": "multiplexed"}},
    "recomputation": {"recompute": {"vision": "full", "language": "selective"}},
    "optimizer offload": {"optimizer": {"offload_fraction": 0.5}},
}


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


@cache
def accepts(feature: str) -> bool:
    """Whether a recipe with one of FEATURES is valid."""
    blank = config.TrainConfig(model=Path("model"), data="data.json", output=Path("output"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(toml_tables(FEATURES[feature]), encoding="utf-8")
        try:
            config.from_toml(path, blank).validate()
        except UserError:
            return False
    return True


@cache
def deals_by_cost() -> bool:
    """Whether packs are dealt to the data-parallel ranks by cost, not at random."""
    blank = config.TrainConfig(model=Path("model"), data="data.json", output=Path("output"))
    return getattr(getattr(blank, "loader", None), "packing", "") == "balanced"
