"""The families of models that can be trained: one folder each, and one line here.

A family (`common/family.py`) reads its config.json, lists its weights, and says what else differs:
the class of its tower, M-RoPE positions, how pixels become patches. What has no family's name in
it works from the ModelSpec and the table of weights that it makes.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlmtrain.core.files import is_dir, is_file
from vlmtrain.core.spec import ModelConfigError, ModelSpec
from vlmtrain.models import qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe
from vlmtrain.models.common.family import Family
from vlmtrain.models.common.table import Table

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        qwen2_vl.FAMILY,
        qwen2_5_vl.FAMILY,
        qwen3_vl.FAMILY,
        qwen3_vl_moe.FAMILY,
    )
}


def family_of(spec: ModelSpec) -> Family:
    return FAMILIES[spec.family]


@lru_cache(maxsize=64)
def table_of(spec: ModelSpec) -> Table:
    return family_of(spec).table(spec)


def parse_spec(config: dict[str, Any]) -> ModelSpec:
    """The model that a parsed config.json describes.

    Raises:
        ModelConfigError: it describes another architecture; the message says what to change.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        *names, last = map(repr, FAMILIES)
        raise ModelConfigError(
            f"model_type is {name!r}; this project trains {', '.join(names)} and {last}"
        )
    for section in (config, config.get("text_config") or {}):
        if section.get("quantization_config"):  # fp8, awq, gptq, bitsandbytes: other tensors
            method = section["quantization_config"].get("quant_method")
            raise ModelConfigError(
                f"quantization_config says that the weights are quantized ({method}); take the "
                "folder of this model whose weights are not"
            )
    return FAMILIES[name].read(config)


def read_spec(folder: str | Path) -> ModelSpec:
    """The model that `folder/config.json` describes.

    Raises:
        ModelConfigError: the folder or the file is missing, is not JSON, or describes another
            architecture; the message names the file and what to change.
    """
    path = Path(folder) / "config.json"
    if not is_dir(folder):
        raise ModelConfigError(
            f"{folder}: no such folder; a model is a Hugging Face folder "
            "(config.json, *.safetensors, tokenizer.json)"
        )
    if not is_file(path):
        raise ModelConfigError(
            f"{path} is missing; a model is a folder with config.json and weights"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} holds a {type(config).__name__}; it must be an object")
    try:
        return parse_spec(config)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        # A value of another type than every release writes there.
        raise ModelConfigError(f"{path} does not describe a model: {error}") from error
