"""The mapping table and the splitting, without a process group: any config, any layout."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.released import released_spec
from vlmtrain.checkpoint import tensors
from vlmtrain.checkpoint.convert import layer_count, stage_of
from vlmtrain.checkpoint.mapping import (
    WeightError,
    canonical_name,
    checkpoint_key,
    join,
    pieces,
    rows,
    split,
    transforms,
)
from vlmtrain.checkpoint.tensors import check_finite, hf_shapes, read_box
from vlmtrain.core.errors import UserError
from vlmtrain.core.spec import ModelSpec, VisionSpec, padded_vocab_size
from vlmtrain.parallel.layout import make_layout


@st.composite
def specs(draw: Any, tensor: int = 1) -> ModelSpec:
    """A model of any family whose sizes `tensor` divides."""
    family = draw(st.sampled_from(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]))
    gated, third = family == "qwen2_5_vl", family.startswith("qwen3_vl")
    depth = draw(st.integers(1, 3))
    vision_heads = tensor * draw(st.integers(1, 3))
    vision_dim = 4 * draw(st.integers(1, 3))
    groups = tensor * draw(st.integers(1, 2))
    head_dim = 2 * draw(st.integers(1, 4))
    heads = groups * draw(st.integers(1, 3))
    hidden = heads * head_dim * (2 if third else 1)
    mixture = {}
    if family == "qwen3_vl_moe":  # as the family reads them, no expert is square
        width = draw(st.integers(1, 9).filter(lambda f: hidden not in (f, 2 * f)))
        mixture = {"num_experts": 2 * tensor, "num_experts_per_tok": 1}
        mixture["moe_intermediate_size"] = width
    return ModelSpec(
        family=family,
        vision=VisionSpec(
            depth=depth,
            hidden_size=vision_heads * vision_dim,
            num_heads=vision_heads,
            intermediate_size=tensor * draw(st.integers(1, 7)),
            out_hidden_size=hidden,
            in_channels=3,
            patch_size=2,
            temporal_patch_size=2,
            spatial_merge_size=2,
            hidden_act="silu" if gated else "quick_gelu",
            gated=gated,
            normalization="RMSNorm" if gated else "LayerNorm",
            window_size=112 if gated else None,
            full_attention_layers=(),
            tokens_per_second=None,
            patch_bias=third,
            position_side=3 if third else 0,
            deepstack_layers=(0, depth - 1)[:depth] if third else (),
        ),
        vocab_size=draw(st.integers(5, 300)),
        hidden_size=hidden,
        intermediate_size=tensor * draw(st.integers(1, 7)),
        num_layers=draw(st.integers(1, 4)),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        norm_eps=1e-6,
        rope_theta=1e6,
        mrope_section=(1, 0, 0),
        max_position_embeddings=100,
        tie_word_embeddings=draw(st.booleans()),
        image_token_id=0,
        video_token_id=1,
        vision_start_token_id=2,
        vision_end_token_id=3,
        qkv_bias=not third,
        qk_norm=third,
        **mixture,
    )


def shapes_of(spec: ModelSpec) -> dict[str, list[int]]:
    """Hugging Face shapes, from what the architectures say, not from the table."""
    v, h, w = spec.vision, spec.hidden_size, spec.vision.hidden_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    third = spec.family.startswith("qwen3_vl")
    actual: dict[str, list[int]] = {
        "model.embed_tokens.weight": [spec.vocab_size, h],
        "model.norm.weight": [h],
        "visual.patch_embed.proj.weight": [w, 3, 2, v.patch_size, v.patch_size],
    }
    mergers = {"visual.merger.": w}
    if third:
        actual["visual.patch_embed.proj.bias"] = [w]
        actual["visual.pos_embed.weight"] = [9, w]
        for n in range(len(v.deepstack_layers)):
            mergers[f"visual.deepstack_merger_list.{n}."] = 4 * w
    fc1, fc2, norm = ("linear_fc1", "linear_fc2", "norm") if third else ("mlp.0", "mlp.2", "ln_q")
    for name, width in mergers.items():
        actual |= {f"{name}{fc1}.weight": [4 * w, 4 * w], f"{name}{fc1}.bias": [4 * w]}
        actual |= {f"{name}{fc2}.weight": [h, 4 * w], f"{name}{fc2}.bias": [h]}
        actual[f"{name}{norm}.weight"] = [width]
        if spec.family != "qwen2_5_vl":
            actual[f"{name}{norm}.bias"] = [width]
    if not spec.tie_word_embeddings:
        actual["lm_head.weight"] = [spec.vocab_size, h]
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}."
        for name, n in (("q", q), ("k", kv), ("v", kv)):
            actual[f"{layer}self_attn.{name}_proj.weight"] = [n, h]
            if not third:
                actual[f"{layer}self_attn.{name}_proj.bias"] = [n]
        if third:
            actual[layer + "self_attn.q_norm.weight"] = [spec.head_dim]
            actual[layer + "self_attn.k_norm.weight"] = [spec.head_dim]
        actual[layer + "self_attn.o_proj.weight"] = [h, q]
        if spec.num_experts:
            experts, f = spec.num_experts, spec.moe_intermediate_size
            actual[layer + "mlp.gate.weight"] = [experts, h]
            actual[layer + "mlp.experts.gate_up_proj"] = [experts, h, 2 * f]
            actual[layer + "mlp.experts.down_proj"] = [experts, f, h]
        else:
            actual[layer + "mlp.gate_proj.weight"] = [spec.intermediate_size, h]
            actual[layer + "mlp.up_proj.weight"] = [spec.intermediate_size, h]
            actual[layer + "mlp.down_proj.weight"] = [h, spec.intermediate_size]
        actual[layer + "input_layernorm.weight"] = [h]
        actual[layer + "post_attention_layernorm.weight"] = [h]
    for i in range(v.depth):
        block, n = f"visual.blocks.{i}.", v.intermediate_size
        actual[block + "attn.qkv.weight"], actual[block + "attn.qkv.bias"] = [3 * w, w], [3 * w]
        actual[block + "attn.proj.weight"], actual[block + "attn.proj.bias"] = [w, w], [w]
        linears = {
            "qwen2_vl": {"fc1": (n, w), "fc2": (w, n)},
            "qwen2_5_vl": {"gate_proj": (n, w), "up_proj": (n, w), "down_proj": (w, n)},
            "qwen3_vl": {"linear_fc1": (n, w), "linear_fc2": (w, n)},
        }[spec.family.removesuffix("_moe")]
        for name, (out, into) in linears.items():
            actual[f"{block}mlp.{name}.weight"] = [out, into]
            actual[f"{block}mlp.{name}.bias"] = [out]
        for norm in ("norm1", "norm2"):
            actual[f"{block}{norm}.weight"] = [w]
            if spec.family != "qwen2_5_vl":
                actual[f"{block}{norm}.bias"] = [w]
    return actual


def test_experts_as_released_and_as_transformers_5_writes_them():
    spec = released_spec("qwen3_vl_moe-30b")
    released = torch.empty(2, 2048, 2 * 768).normal_()
    transform = transforms(spec)["experts"]
    for tensor in (released, released.transpose(1, 2)):
        ours = transform.to_megatron([tensor])
        assert ours.shape == (2, 2 * 768, 2048) and torch.equal(transform.to_hf(ours)[0], released)


tensor_sizes = st.sampled_from([1, 2, 4])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=tensor_sizes)
def test_split_join_and_slices(data, size):
    """HF -> whole -> pieces -> whole -> HF is bitwise; slices read alone make the same pieces."""
    spec = data.draw(specs(size))
    named = transforms(spec)
    shapes = shapes_of(spec)  # under canonical names
    seen = set()
    for row in rows(spec):
        transform = named[row.transform]
        whole_hf = [
            torch.arange(torch.Size(shapes[n]).numel()).view(shapes[n]) + 1000 * k
            for k, n in enumerate(map(canonical_name, row.hf))
        ]
        seen |= set(map(canonical_name, row.hf))
        whole = transform.to_megatron(whole_hf)
        assert hf_shapes(transform, whole.shape) == [list(t.shape) for t in whole_hf]
        if row.transform == "vocab":
            rows_ = padded_vocab_size(spec.vocab_size, size)
            whole = torch.cat([whole, whole.new_zeros(rows_ - spec.vocab_size, whole.shape[1])])
        dim = row.split
        shards = [split(whole, dim, transform.parts, r, size) for r in range(size)]
        assert torch.equal(join(shards, dim, transform.parts), whole), row
        if size > 1:
            assert (dim is None) == all(torch.equal(s, shards[0]) for s in shards), row
        back = transform.to_hf(join(shards, dim, transform.parts))
        for got, want in zip(back, whole_hf, strict=True):
            assert torch.equal(got, want), row
        if row.transform == "vocab":
            continue
        for rank in range(size):
            cut = []
            for tensor in whole_hf:
                boxes = pieces(tensor.shape, dim, transform.blocks, rank, size)
                cut.append(torch.cat([tensor[tuple(slice(*x) for x in b)] for b in boxes]))
            assert torch.equal(transform.to_megatron(cut), shards[rank]), (row, rank)
    assert seen == set(shapes)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_tensor_has_one_stage(data):
    """On any valid layout each row lies on the stage that the layers' counts say."""
    tensor = data.draw(tensor_sizes)
    spec = data.draw(specs(tensor))
    pipeline, virtual = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1)]))
    stages = pipeline * virtual
    cuts = sorted(data.draw(st.lists(st.integers(0, spec.num_layers), min_size=stages - 1,
                                     max_size=stages - 1)))  # fmt: skip
    text = [b - a for a, b in itertools.pairwise([0, *cuts, spec.num_layers])]
    try:
        layout = make_layout(
            spec,
            world_size=tensor * pipeline,
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            text_layers=text,
            multiplexed=data.draw(st.booleans()) if stages > 1 else False,
        )
    except UserError:
        return
    counts = {"vision": [0] * stages, "language_model": [0] * stages}
    for row in rows(spec):
        stage = stage_of(row.megatron, layout)
        key, layer = checkpoint_key(row.megatron)
        if layer is not None and "linear_qkv.weight" in key:
            counts[key.split(".")[0]][stage] += 1
            assert layer < layer_count(row.megatron, spec)
    assert counts["language_model"] == text
    if not layout.multiplexed:
        assert counts["vision"] == list(layout.vision_layers)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("model.language_model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_both_styles_of_names(name, canonical):
    assert canonical_name(name) == canonical


def test_sizes_that_can_not_be_split():
    with pytest.raises(UserError, match="can't be split"):
        pieces([3420, 4], 0, 1, 0, 8)


@pytest.mark.parametrize("piece", [64, 1 << 23])
def test_a_box_of_a_tensor_in_a_file(piece: int, tmp_path: Path, monkeypatch) -> None:
    """Of any shape, with rows of zeros behind it; a file that ends early is an error."""
    monkeypatch.setattr(tensors, "PIECE_BYTES", piece)
    path = tmp_path / "file"
    for shape in ((9,), (7, 5), (4, 3, 6), (3, 2, 4, 5), ()):
        dtype = random.choice((torch.float32, torch.bfloat16, torch.float64))
        whole, start = torch.randn(shape).to(dtype), random.randrange(20)
        path.write_bytes(bytes(start) + whole.view(-1).view(torch.uint8).numpy().tobytes())
        for _ in range(8):
            box = tuple(tuple(sorted(random.sample(range(n + 1), 2))) for n in shape)
            want = whole[tuple(slice(*side) for side in box)]
            more = random.randrange(4)
            with open(path, "rb", buffering=0) as file:
                assert torch.equal(read_box(file, start, shape, dtype, box), want)
                if not shape:
                    continue
                padded = read_box(file, start, shape, dtype, box, rows=len(want) + more)
            assert torch.equal(padded[: len(want)], want) and len(padded) == len(want) + more
            assert not padded[len(want) :].any()
        path.write_bytes(path.read_bytes()[:-1])
        with open(path, "rb", buffering=0) as file, pytest.raises(WeightError, match="cut short"):
            read_box(file, start, shape, dtype, tuple((0, n) for n in shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite(bad: float, monkeypatch) -> None:
    monkeypatch.setattr(tensors, "_FINITE_STEP", 4)
    for count in (1, 4, 5, 9, 12):
        tensor = torch.randn(count)
        check_finite(tensor, "x")
        tensor[random.randrange(count)] = bad
        with pytest.raises(WeightError, match="x holds NaN or infinite values"):
            check_finite(tensor, "x")
