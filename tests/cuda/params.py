"""ctypes twins of the structs of csrc/common/params.h."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from typing import Any

from tools.cudasim import CSRC


@lru_cache
def params_struct(name: str) -> type[ctypes.Structure]:
    """The ctypes twin of a struct of csrc/common/params.h, read from that file."""
    body = re.search(
        rf"struct {name} {{(.*?)\n}};", (CSRC / "common" / "params.h").read_text(), flags=re.S
    )
    assert body is not None, f"params.h has no struct {name}"
    kinds = {
        "int64_t": ctypes.c_int64,
        "bool": ctypes.c_bool,
        "DType": ctypes.c_int,
        "float": ctypes.c_float,
        "double": ctypes.c_double,
    }
    fields: list[Any] = []
    for line in body.group(1).splitlines():
        code = line.split("//")[0].strip()
        if not code:
            continue
        declared = re.fullmatch(r"(?:const )?(\w+)(\*?) (\w+);", code)
        assert declared is not None, f"{name}: cannot read {code!r}"
        kind, star, field = declared.groups()
        if not star and kind not in kinds:
            fields.append((field, params_struct(kind)))
        else:
            fields.append((field, ctypes.c_void_p if star else kinds[kind]))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def fill(name: str, **values: Any) -> ctypes.Structure:
    """A params struct with every field given."""
    struct = params_struct(name)
    fields = [field[0] for field in struct._fields_]
    assert set(fields) == set(values), f"{name} has {fields}, given {sorted(values)}"
    return struct(**values)
