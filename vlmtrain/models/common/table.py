"""The one table of a model's weights: every linear and norm under both of its names.

The mapping of checkpoints, LoRA's modules, FLOPs, numbers of parameters, memory and the balance of
pipeline stages all derive from it. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vlmtrain.core.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """A linear as Megatron holds it, made of one or several Hugging Face modules.

    name: Megatron's, below the prefix of its part.
    inputs: columns of the weight.
    modules: Hugging Face name below the part's prefix -> output rows, in Megatron's order.
    split: the dimension of the weight that tensor-parallel ranks divide: 0, its bias likewise; 1,
        and each holds the whole bias; None: each holds all of it.
    transform: how the modules become one, a name in `checkpoint.mapping.transforms`.
    groups: where Megatron orders rows by head groups, their number, else 0.
    inner: blocks of the one module's rows that Megatron has within each head group (3 for the
        vision tower's qkv: [3, heads, head_dim] there, [heads, 3, head_dim] here).
    """

    name: str
    inputs: int
    modules: dict[str, int]
    bias: bool = False
    split: int | None = None
    transform: str = "same"
    groups: int = 0
    inner: int = 1

    #: Whether LoRA can put adapters on it.
    adaptable: ClassVar[bool] = True

    @property
    def is_mlp(self) -> bool:
        return self.name.startswith("mlp.")

    @property
    def outputs(self) -> int:
        return sum(self.modules.values())

    @property
    def weights(self) -> int:
        """Those that a row is multiplied by."""
        return self.inputs * self.outputs

    def hf_rows(self, b: Tensor) -> Tensor:
        """A whole B of LoRA as the Hugging Face module has its rows: adapters keep Megatron's
        order, in which a rank's rows are contiguous whatever the size of its group."""
        if self.inner == 1:
            return b
        return b.unflatten(0, (self.groups, self.inner, -1)).transpose(0, 1).flatten(0, 2)

    def adapted(self, targets: Collection[str]) -> dict[str, int]:
        """Those of `modules` that LoRA's `targets` name."""
        modules = self.modules.items() if self.adaptable else ()
        return {m: rows for m, rows in modules if m.rpartition(".")[2] in targets}

    def sizes(self, tensor: int = 1) -> list[int]:
        """Elements of weight and bias on one of `tensor` ranks."""
        weight = self.weights // (1 if self.split is None else tensor)
        bias = self.outputs // (tensor if self.split == 0 else 1)
        return [weight, bias] if self.bias else [weight]


@dataclass(frozen=True)
class Router(Linear):
    """Scores of the experts; every rank holds it whole."""

    adaptable: ClassVar[bool] = False


@dataclass(frozen=True)
class Experts(Linear):
    """One linear of every expert: a tensor [experts, out, in] here, one [experts, in, out] without
    `.weight` to its name in Hugging Face's files. Expert-parallel ranks divide its dimension 0."""

    experts: int = 0
    active: int = 0  # experts that a row goes to
    adaptable: ClassVar[bool] = False

    @property
    def weights(self) -> int:
        return self.active * super().weights

    def sizes(self, tensor: int = 1) -> list[int]:
        return []

    def expert_sizes(self, expert: int = 1) -> list[int]:
        """Elements on one of `expert` ranks."""
        return [self.experts // expert * self.inputs * self.outputs]


@dataclass(frozen=True)
class Norm:
    """A LayerNorm (with a bias) or an RMSNorm, under both names as a Linear's."""

    name: str
    modules: dict[str, int]  # its one module -> its width
    bias: bool = False
    split: ClassVar[None] = None
    transform: ClassVar[str] = "same"

    def sizes(self, tensor: int = 1) -> list[int]:
        return list(self.modules.values()) * (1 + self.bias)


@dataclass(frozen=True)
class Lookup(Norm):
    """A table of vectors, `inputs` wide, that is looked up in: no product reads it."""

    inputs: int = 1

    def sizes(self, tensor: int = 1) -> list[int]:
        return [rows * self.inputs for rows in self.modules.values()]


# megatron-core's order of registration, where it is not that of the table.
_REGISTERED = (
    "input_layernorm",
    "linear_proj",
    "linear_qkv",
    "q_layernorm",
    "k_layernorm",
    "pre_mlp_layernorm",
)


@dataclass(frozen=True)
class Part:
    """A layer, or what stands before or after the layers. `{i}` in a prefix is the layer."""

    hf: str  # prefix of its Hugging Face names
    megatron: str  # prefix of its Megatron names
    items: tuple[Linear | Norm, ...]

    @property
    def linears(self) -> list[Linear]:
        """In the order in which they run."""
        return [item for item in self.items if isinstance(item, Linear)]

    @property
    def mlp_weights(self) -> int:
        return sum(linear.weights for linear in self.linears if linear.is_mlp)

    @property
    def weights(self) -> int:
        """Elements of the linears' weights: multiply-accumulates per row."""
        return sum(linear.weights for linear in self.linears)

    @property
    def behind_attention(self) -> list[Linear]:
        """A layer's linears behind its queries, keys and values."""
        return [linear for linear in self.linears if not linear.groups]

    @property
    def weights_behind_attention(self) -> int:
        return sum(linear.weights for linear in self.behind_attention)

    @property
    def norm_bias(self) -> bool:
        """Whether its norms are LayerNorms."""
        return any(item.bias for item in self.items if isinstance(item, Norm))

    @property
    def parameters(self) -> int:
        return sum(self.sizes()) + sum(self.expert_sizes())

    def registered(self) -> list[Linear | Norm]:
        """In megatron-core's order of registration."""

        def place(item: Linear | Norm) -> int:
            places = [i for i, end in enumerate(_REGISTERED) if item.name.endswith(end)]
            return places[0] if places else len(_REGISTERED)

        return sorted(self.items, key=place)

    def sizes(self, tensor: int = 1) -> list[int]:
        """Elements of each parameter on one of `tensor` ranks, in order of registration; experts
        left out."""
        return [size for item in self.registered() for size in item.sizes(tensor)]

    def expert_sizes(self, expert: int = 1) -> list[int]:
        """The same of the experts, on one of `expert` expert-parallel ranks."""
        experts = [item for item in self.items if isinstance(item, Experts)]
        return [size for item in experts for size in item.expert_sizes(expert)]


@dataclass(frozen=True)
class Table:
    """All weights of a model. `head` is there for tied embeddings too, which store it once."""

    embedding: Part
    final_norm: Part
    head: Part
    patch_embed: Part
    merger: Part
    text_layer: Part
    vision_layer: Part
    deepstack: tuple[Part, ...] = ()  # mergers of VisionSpec.deepstack_layers

    def layer(self, vision: bool) -> Part:
        return self.vision_layer if vision else self.text_layer

    @property
    def mergers(self) -> tuple[Part, ...]:
        return self.merger, *self.deepstack

    def targets(self, vision: bool) -> list[str]:
        """What LoRA's targets may be called, in the tower's layers too with `vision`; sorted."""
        layers = (self.text_layer, self.vision_layer) if vision else (self.text_layer,)
        linears = [linear for layer in layers for linear in layer.linears if linear.adaptable]
        modules = {m for linear in linears for m in linear.modules}
        return sorted({module.rpartition(".")[2] for module in modules})

    def parts(self, spec: ModelSpec) -> Iterator[tuple[Part, int]]:
        """Each part that has weights of its own, with its number of layers (0: it is no layer)."""
        yield self.embedding, 0
        yield self.final_norm, 0
        if not spec.tie_word_embeddings:
            yield self.head, 0
        yield self.patch_embed, 0
        for merger in self.mergers:
            yield merger, 0
        yield self.text_layer, spec.num_layers
        yield self.vision_layer, spec.vision.depth


# --- the parts of Qwen2-VL and its relatives ---------------------------------------------------
# Linear: name, inputs, modules, bias, split, transform, groups, inner. `hf`: a prefix of theirs.


def vocabulary(spec: ModelSpec, module: str, name: str) -> Part:
    """The word embeddings or the head."""
    table = Linear(name, spec.hidden_size, {module: spec.vocab_size}, False, 0, "vocab")
    return Part("", "language_model.", (table,))


def text_layer(spec: ModelSpec, hf: str) -> Part:
    h, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    heads = {"q_layernorm": "self_attn.q_norm", "k_layernorm": "self_attn.k_norm"}
    mlp = (
        Linear("mlp.linear_fc1", h, {"mlp.gate_proj": f, "mlp.up_proj": f}, False, 0, "gate_up"),
        Linear("mlp.linear_fc2", f, {"mlp.down_proj": h}, False, 1),
    )
    norms = tuple(
        Norm(f"self_attention.{name}", {module: spec.head_dim})
        for name, module in heads.items()
        if spec.qk_norm
    )
    items: tuple[Linear | Norm, ...] = (
        Norm("input_layernorm", {"input_layernorm": h}),
        Linear(
            "self_attention.linear_qkv",
            h,
            qkv,
            spec.qkv_bias,
            0,
            "text_qkv",
            spec.num_kv_heads,
        ),
        *norms,
        Linear("self_attention.linear_proj", q, {"self_attn.o_proj": h}, False, 1),
        Norm("pre_mlp_layernorm", {"post_attention_layernorm": h}),
        *(experts(spec) if spec.num_experts else mlp),
    )
    return Part(hf + "layers.{i}.", "language_model.decoder.layers.{i}.", items)


def experts(spec: ModelSpec) -> tuple[Linear, ...]:
    """What stands in place of a language layer's MLP in a mixture of experts."""
    h, f, count = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts
    sizes = {"experts": count, "active": spec.num_experts_per_tok}
    how: dict[str, Any] = {"split": 0, "transform": "experts", **sizes}
    return (
        Router("mlp.router", h, {"mlp.gate": count}),
        Experts("mlp.experts.linear_fc1", h, {"mlp.experts.gate_up_proj": 2 * f}, **how),
        Experts("mlp.experts.linear_fc2", f, {"mlp.experts.down_proj": h}, **how),
    )


def vision_layer(spec: ModelSpec, hf: str, fc1: tuple[str, ...], fc2: str) -> Part:
    """A layer of the tower. `fc1`, `fc2`: what Hugging Face calls the MLP's linears, a gate and
    an up projection where it is gated."""
    vision, layer_norm = spec.vision, spec.vision.normalization == "LayerNorm"
    wide, f, heads = vision.hidden_size, vision.intermediate_size, vision.num_heads
    qkv, into = {"attn.qkv": 3 * wide}, {f"mlp.{name}": f for name in fc1}
    items = (
        Linear("self_attention.linear_qkv", wide, qkv, True, 0, "vision_qkv", heads, 3),
        Linear("self_attention.linear_proj", wide, {"attn.proj": wide}, True, 1),
        Norm("input_layernorm", {"norm1": wide}, layer_norm),
        Norm("pre_mlp_layernorm", {"norm2": wide}, layer_norm),
        Linear("mlp.linear_fc1", wide, into, True, 0, "gate_up" if vision.gated else "same"),
        Linear("mlp.linear_fc2", f, {f"mlp.{fc2}": wide}, True, 1),
    )
    return Part(hf + "blocks.{i}.", "vision.blocks.layers.{i}.", items)


def patch_embed(spec: ModelSpec, hf: str) -> Part:
    """With the table of learned positions, where there is one."""
    vision, wide = spec.vision, spec.vision.hidden_size
    items: tuple[Linear | Norm, ...] = (
        Linear(
            "patch_embed",
            vision.patch_dim,
            {"patch_embed.proj": wide},
            vision.patch_bias,
            transform="patch_embed",
        ),
    )
    if vision.position_side:
        items += (Lookup("pos_embed", {"pos_embed": vision.position_side**2}, inputs=wide),)
    return Part(hf, "vision.", items)


def merger(
    spec: ModelSpec, hf: str, name: str, modules: tuple[str, str, str], *, joined: bool = False
) -> Part:
    """`modules`: what Hugging Face calls the norm and the linears; `joined`: the norm is of the
    four patches side by side."""
    vision, (norm, fc1, fc2) = spec.vision, modules
    merged = vision.merge_unit * vision.hidden_size
    width = merged if joined else vision.hidden_size
    items = (
        Norm("norm", {norm: width}, vision.normalization == "LayerNorm"),
        Linear("fc1", merged, {fc1: merged}, True, 0),
        Linear("fc2", merged, {fc2: vision.out_hidden_size}, True, 1),
    )
    return Part(hf, f"vision.{name}.", items)
