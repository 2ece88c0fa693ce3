"""LoRA adapters merged into the weights under them, tensor by tensor; no model is built.

    W + scale * B A    in float32, rounded to W's type: what `vlmtrain train` writes to OUTPUT/hf

Adapters come from a `peft` folder (OUTPUT/adapter, or anybody's) or lie in a training checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vlmtrain.checkpoint.mapping import Row, WeightError, canonical_name, checkpoint_key, rows
from vlmtrain.checkpoint.megatron.source import MegatronSource
from vlmtrain.checkpoint.megatron.torch_dist import read_common
from vlmtrain.checkpoint.weights import Source, open_weights
from vlmtrain.core.config import LoraSection
from vlmtrain.core.files import is_dir, is_file
from vlmtrain.models.common.table import Linear
from vlmtrain.models.family import read_spec, table_of

ADAPTER_CONFIG = "adapter_config.json"
# What peft can do beside W + scale B A, and the value that means it does not.
_PLAIN: dict[str, Any] = {
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "bias": "none",
    "lora_bias": False,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
}
# Initialisations of adapters that change the weights under them: merged into the folder that the
# adapter names they would give another model.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Of a Hugging Face weight: A [rank, in] and B [out, rank]; None where it has no adapter.
Adapters = Callable[[str], "tuple[Tensor, Tensor] | None"]


class MergedSource:
    """A model's weights with adapters added; asked like the sources of weights.py."""

    def __init__(self, base: Source, adapters: Adapters, scale: float) -> None:
        self.base, self.adapters, self.scale = base, adapters, scale
        self.folder, self.spec = base.folder, base.spec

    def check(self) -> None:
        """As `Source.check`."""
        self.base.check()

    def dtypes(self, row: Row) -> list[torch.dtype]:
        """Of each of its Hugging Face tensors."""
        return self.base.dtypes(row)

    def hf_shapes(self, row: Row) -> list[list[int]]:
        return self.base.hf_shapes(row)

    def hf(self, row: Row) -> list[Tensor]:
        """The Hugging Face tensors of a row, whole, with what the adapters add.

        Raises:
            WeightError: an adapter that does not fit its weight.
        """
        tensors = self.base.hf(row)
        for i, name in enumerate(row.hf):
            pair = self.adapters(name)
            if pair is None:
                continue
            a, b = pair
            shape = tensors[i].shape
            if a.dim() > 2 and a.shape[1:] == shape[1:]:  # of a convolution without overlap
                a, b = a.flatten(1), b.flatten(1)
            fits = [len(b), a.shape[1]] == [shape[0], shape[1:].numel()]
            if not fits or a.shape[0] != b.shape[1]:
                raise WeightError(
                    f"the adapter of {name} is {list(b.shape)} times {list(a.shape)}, the weight "
                    f"is {list(tensors[i].shape)}; it belongs to another model"
                )
            delta = (b.float() @ a.float()).view(shape) * self.scale
            tensors[i] = (tensors[i].float() + delta).to(tensors[i].dtype)
        return tensors


def is_adapter(folder: Path) -> bool:
    """Whether a folder is a `peft` adapter."""
    return is_file(folder / ADAPTER_CONFIG)


def base_of(folder: Path) -> Path:
    """The model folder that an adapter was trained on.

    Raises:
        WeightError: its config can't be read, or names no folder of this machine.
    """
    name = _config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not is_dir(name):
        raise WeightError(
            f"{folder / ADAPTER_CONFIG} names the base model {name!r}, which is no folder here; "
            "set base_model_name_or_path to the folder the adapter was trained on"
        )
    return Path(name)


def from_peft(folder: Path, base: Path) -> MergedSource:
    """The weights in `base` (either kind of folder) with a peft folder's adapters.

    Raises:
        WeightError: not readable, not plain LoRA on linears, or not of this model.
    """
    config = _config(folder)
    if config.get("peft_type") != "LORA":
        raise WeightError(
            f"{folder / ADAPTER_CONFIG}: peft_type is {config.get('peft_type')!r}; only LORA is "
            "read here"
        )
    for key, plain in _PLAIN.items():
        if config.get(key) not in (plain, None):
            raise WeightError(
                f"{folder / ADAPTER_CONFIG}: {key} is {config[key]!r}, which is not merged here; "
                "merge the adapter with peft and pass the merged folder"
            )
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGE_THE_BASE):
        raise WeightError(
            f"{folder / ADAPTER_CONFIG}: init_lora_weights is {start!r}, which has changed the "
            "base weights too; merge the adapter with peft and pass the merged folder"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise WeightError(
            f"{folder / ADAPTER_CONFIG}: r is {rank!r} and lora_alpha {alpha!r}; they must be the "
            "numbers that the adapter was trained with"
        )
    path = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{path} can't be read: {error}") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    copies: dict[str, Tensor] = {}  # of base weights, which peft stores with those of an embedding
    for name, tensor in tensors.items():
        if name.endswith(".base_layer.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".base_layer.weight")
            copies[canonical_name(module + ".weight")] = tensor
            continue
        module, _, rest = name.removeprefix("base_model.model.").rpartition(".lora_")
        letter = rest.split(".")[0]
        if not module or letter not in ("A", "B"):
            raise WeightError(f"{path}: {name} is no tensor of a LoRA adapter on a linear")
        pairs.setdefault(canonical_name(module + ".weight"), {})[letter] = tensor
    spec = read_spec(base)
    known = {canonical_name(name) for row in rows(spec) for name in row.hf}
    for name, pair in pairs.items():
        if name not in known or len(pair) != 2:
            raise WeightError(
                f"{path}: the adapter of {name} "
                + ("has no such weight in the model" if name not in known else "lacks A or B")
            )
        if pair["A"].shape[:1] != (rank,):
            raise WeightError(
                f"{path}: A of {name} is {list(pair['A'].shape)}, {ADAPTER_CONFIG} says that r is "
                f"{rank}"
            )
    source = open_weights(base, spec)
    for row in rows(spec):
        names = [canonical_name(name) for name in row.hf]
        if copies.keys().isdisjoint(names):
            continue
        for name, weight in zip(names, source.hf(row), strict=True):
            copy = copies.pop(name, None)
            if copy is not None and not torch.equal(weight.to(copy.dtype), copy):
                raise WeightError(
                    f"{path} holds another {name} than {base}; merge the adapter with peft and "
                    "pass the merged folder"
                )
    if copies:
        raise WeightError(f"{path}: {min(copies)} is no weight of the model")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)

    def adapters(name: str) -> tuple[Tensor, Tensor] | None:
        pair = pairs.get(canonical_name(name))
        return None if pair is None else (pair["A"], pair["B"])

    return MergedSource(source, adapters, scale)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightError(f"{path} must hold an object")
    return config


def from_checkpoint(source: MegatronSource) -> MergedSource:
    """The weights of a training checkpoint with the adapters that lie in it.

    Raises:
        WeightError: the checkpoint does not say how they were trained.
    """

    folder, reader, spec = source.folder, source.reader, source.spec
    config = read_common(folder).get("config", {})
    if not config.get("lora", {}).get("rank"):
        raise WeightError(f"{folder} holds LoRA adapters but not their rank and alpha")
    lora = LoraSection(**config["lora"])
    table: dict[str, tuple[str, int, Linear]] = {}  # HF name -> key, layer
    for row in rows(spec):
        key, layer = checkpoint_key(row.megatron)
        key = key.removesuffix(".weight") + ".adapters."
        if layer is None or key + "0.a" not in reader.keys():
            continue
        vision = row.megatron.startswith("vision.")
        path = row.megatron.split(".layers.")[1].split(".", 1)[1].removesuffix(".weight")
        linear = next(x for x in table_of(spec).layer(vision).linears if x.name == path)
        for number, module in enumerate(linear.adapted(lora.targets)):
            name = next(n for n in row.hf if n.endswith(f".{module}.weight"))
            table[name] = (f"{key}{number}.", layer, linear)

    def adapters(name: str) -> tuple[Tensor, Tensor] | None:
        if name not in table:
            return None
        key, layer, linear = table[name]

        def read(letter: str) -> Tensor:
            shape = reader.shape(key + letter)
            box = ((layer, layer + 1), *((0, n) for n in shape[1:]))
            return reader.read(key + letter, box)[0]

        return read("a"), linear.hf_rows(read("b"))

    source.merging = True
    return MergedSource(source, adapters, lora.alpha / lora.rank)
