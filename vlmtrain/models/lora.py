"""Low-rank adapters on megatron-core's linears, split like them (Hu et al., arXiv 2106.09685).

Adapters are those of the Hugging Face modules, one (A, B) pair each, also where Megatron fuses
several of these into one linear: q, k and v, or gate and up. So a saved adapter is exactly what
`peft` makes of the same target modules.

    y = W x + (alpha / rank) B A dropout(x),   A [rank, in], B [out, rank], B starts at 0

Column-parallel linears (out split over the tensor-parallel group): A whole, B split by rows.
Row-parallel linears (in split): A split by columns, B whole. With sequence parallelism the small
[tokens, rank] product is what is gathered or scattered, never the tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from vlmtrain.core.config import LoraSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.layers import touch
from vlmtrain.models.common.table import Linear
from vlmtrain.models.family import table_of


class Adapter(nn.Module):
    """A and B of one Hugging Face module, this rank's part.

    Args:
        hf_name: the module's name in a Hugging Face model, which seeds A.
        module: its name in the fused linear.
    """

    def __init__(
        self,
        hf_name: str,
        module: str,
        rank: int,
        inputs: int,
        outputs: int,
        *,
        column: bool,
        sequence: bool,
        tp_rank: int,
        tp_size: int,
        seed: int,
        like: Tensor,
    ) -> None:
        super().__init__()
        self.hf_name, self.module, self.column = hf_name, module, column
        # Drawn whole on the CPU and cut, so that every layout starts from the same values.
        generator = torch.Generator().manual_seed(seed * 1000003 + zlib.crc32(hf_name.encode()))
        whole = torch.empty(rank, inputs)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        if column:
            a, rows = whole, outputs // tp_size
        else:
            a, rows = whole.chunk(tp_size, 1)[tp_rank].contiguous(), outputs
        self.a = nn.Parameter(a.to(like.device, like.dtype))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=like.device, dtype=like.dtype))
        split, whole_one = (self.b, self.a) if column else (self.a, self.b)
        tensor_parallel.set_tensor_model_parallel_attributes(split, tp_size > 1, int(not column), 1)
        tensor_parallel.set_tensor_model_parallel_attributes(whole_one, False, -1, 1)
        # The whole one sees only this rank's tokens: its gradient is summed over the group.
        whole_one.sequence_parallel = sequence  # type: ignore[attr-defined]


class _Lora:
    """What adapted column- and row-parallel linears share. Mixed into the linear's own class."""

    adapters: nn.ModuleList
    lora_fused: Linear
    lora_scale: float
    lora_dropout: float
    training: bool

    def _hidden(self, x: Tensor) -> list[Tensor]:
        """dropout(x) A^T of every adapter, in one product; [.., rank] each."""
        for adapter in self.adapters:
            touch(adapter)
        x = self._dropout(x)
        h = F.linear(x, torch.cat([adapter.a for adapter in self.adapters]))
        return self._exchange(h).split([adapter.a.shape[0] for adapter in self.adapters], -1)

    def _dropout(self, x: Tensor) -> Tensor:
        """Ranks that hold the same x drop the same values; those with parts of it, others."""
        rate = self.lora_dropout
        if not rate or not self.training:
            return x
        if not self._splits_input():
            return F.dropout(x, rate)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(x, rate)

    def _splits_input(self) -> bool:
        """Whether each rank of the tensor-parallel group has another part of the input."""
        raise NotImplementedError

    def _exchange(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def _delta(self, x: Tensor) -> Tensor:
        """What the adapters add to this rank's output."""
        outputs = {
            adapter.module: F.linear(h, adapter.b)
            for adapter, h in zip(self.adapters, self._hidden(x), strict=True)
        }
        return self._assemble(outputs) * self.lora_scale

    def weight_delta(self) -> Tensor:
        """The same as a float32 addition to this rank's weight [out, in]."""
        outputs = {
            adapter.module: (adapter.b.float() @ adapter.a.float()).t() for adapter in self.adapters
        }
        return self._assemble(outputs).t() * self.lora_scale

    def _assemble(self, outputs: dict[str, Tensor]) -> Tensor:
        """Outputs [.., rows] of the adapted modules in the order of Megatron's fused rows."""
        fused = self.lora_fused
        some = next(iter(outputs.values()))
        parts = [
            outputs[module]
            if module in outputs
            else some.new_zeros(*some.shape[:-1], rows // self._parts())
            for module, rows in fused.modules.items()
        ]
        if not fused.groups:
            return torch.cat(parts, -1)
        if fused.inner > 1:  # one module, whose B has Megatron's order: see Linear.hf_rows
            return parts[0]
        groups = fused.groups // self._parts()
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], -1).flatten(-2)

    def _parts(self) -> int:
        """Ranks that the output is split over."""
        raise NotImplementedError


class LoraColumnParallelLinear(_Lora, ColumnParallelLinear):
    """A ColumnParallelLinear with adapters; `add_adapters` turns one into it."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = ColumnParallelLinear.forward(self, input_, *args, **kwargs)
        return output + self._delta(input_), bias

    def _exchange(self, h: Tensor) -> Tensor:
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(h, group=self.tp_group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(h, group=self.tp_group)

    def _parts(self) -> int:
        return self.tp_group.size()

    def _splits_input(self) -> bool:
        return self.sequence_parallel

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return _sharded(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)


class LoraRowParallelLinear(_Lora, RowParallelLinear):
    """A RowParallelLinear with adapters; `add_adapters` turns one into it."""

    def forward(self, input_: Tensor) -> Any:
        output, bias = RowParallelLinear.forward(self, input_)
        return output + self._delta(input_), bias

    def _exchange(self, h: Tensor) -> Tensor:
        if self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(
                h, group=self.tp_group
            )
        return tensor_parallel.reduce_from_tensor_model_parallel_region(h, group=self.tp_group)

    def _parts(self) -> int:
        return 1

    def _splits_input(self) -> bool:
        return self.tp_group.size() > 1

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return _sharded(self, {"weight": 1}, prefix, sharded_offsets, metadata)


def _sharded(
    linear: Any, axes: dict[str, int], prefix: str, offsets: tuple, metadata: dict | None
) -> dict[str, Any]:
    state = linear.state_dict(prefix="", keep_vars=True)
    for i, adapter in enumerate(linear.adapters):
        axes[f"adapters.{i}." + ("b" if adapter.column else "a")] = 0 if adapter.column else 1
    return make_sharded_tensors_for_checkpoint(
        state,
        prefix,
        axes,
        offsets,
        tp_group=linear.tp_group,
        dp_cp_group=(metadata or {}).get("dp_cp_group"),
    )


def add_adapters(
    layers: Any, spec: ModelSpec, section: LoraSection, *, vision: bool, seed: int
) -> None:
    """Put adapters on the target modules of a tower's layers and freeze everything else in them."""
    table = table_of(spec).layer(vision)
    for layer in layers:
        prefix = table.hf.replace("{i}", str(layer.layer_number - 1))
        for fused in table.linears:
            chosen = fused.adapted(section.targets)
            if not chosen:
                continue
            linear = layer.get_submodule(fused.name)
            column = isinstance(linear, ColumnParallelLinear)
            group = linear.tp_group
            size, rank = group.size(), group.rank()
            inputs = linear.weight.shape[1] * (1 if column else size)
            linear.adapters = nn.ModuleList()
            for module, rows in chosen.items():
                adapter = Adapter(
                    prefix + module,
                    module,
                    section.rank,
                    inputs,
                    rows,
                    column=column,
                    sequence=linear.sequence_parallel,
                    tp_rank=rank,
                    tp_size=size,
                    seed=seed,
                    like=linear.weight,
                )
                linear.adapters.append(adapter)
            linear.lora_fused = fused
            linear.lora_scale = section.alpha / section.rank
            linear.lora_dropout = section.dropout
            linear.__class__ = LoraColumnParallelLinear if column else LoraRowParallelLinear


def adapted_linears(parts: list[Any]) -> Iterator[Any]:
    """Every linear with adapters in a rank's stages."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, _Lora):
                yield module
