"""A transformers model with and without the kernels: the same loss and the same gradients."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.conftest import RUN_SEED
from tests.kernels.numeric import assert_accurate, assert_bitwise
from tests.parity import reference as ref
from vlmkernels.integrations import transformers as hf

FAMILIES = (pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen2_5_vl", "qwen3_vl")
KINDS = {
    "image": [5, ("image", (1, 6, 10)), 9],
    "two images": [3, ("image", (1, 4, 6)), 4, ("image", (1, 12, 18)), 7],
    "video": [4, ("video", (3, 4, 10)), 8],
    "image, video, image": [
        *(2, ("image", (1, 4, 4)), 3, ("video", (2, 6, 2)), 3, ("image", (1, 8, 4)), 6)
    ],
    "text": [17],
}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """(plain, enabled, float64), with the same weights."""
    plain = ref.make_model(request.param, seed=RUN_SEED)
    plain.set_attn_implementation("sdpa")
    # What a training run has: dropout off by config, training mode on.
    plain.train()
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    return plain, hf.enable(ours), exact


def batch(samples: list[ref.Sample], side: str = "right", dtype: Any = torch.float32) -> dict:
    """Inputs of a padded batch as transformers' processor and trainer make them."""
    longest = max(len(s.input_ids) for s in samples)
    ids = torch.full((len(samples), longest), ref.PAD)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    positions = torch.zeros(3, *ids.shape, dtype=torch.int64)
    for i, sample in enumerate(samples):
        n = len(sample.input_ids)
        here = slice(0, n) if side == "right" else slice(longest - n, longest)
        ids[i, here], mask[i, here], positions[:, i, here] = (
            sample.input_ids,
            1,
            sample.position_ids,
        )
        labels[i, here] = sample.labels.roll(1)  # transformers shifts them itself
    inputs = dict(input_ids=ids, labels=labels, position_ids=positions, attention_mask=mask)
    return {**inputs, **media(samples, dtype)}


def media(samples: list[ref.Sample], dtype: Any = torch.float32) -> dict[str, Tensor]:
    inputs = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [m for s in samples for m in s.media if m[0] == kind]
        if chosen:
            inputs[pixels] = torch.cat([m[2] for m in chosen]).to(dtype)
            inputs[grid] = torch.tensor([m[1] for m in chosen])
    return inputs


def packed(samples: list[ref.Sample], dtype: Any = torch.float32) -> dict[str, Any]:
    """One row; text positions that start again tell transformers where a sample begins."""
    text = torch.cat([torch.arange(len(s.input_ids)) for s in samples])[None, None]
    positions = torch.cat([s.position_ids for s in samples], 1)[:, None]
    labels = torch.cat([s.labels.roll(1) for s in samples])[None]
    return dict(
        input_ids=torch.cat([s.input_ids for s in samples])[None],
        position_ids=torch.cat([text, positions]),
        labels=labels,
        use_cache=False,
        **media(samples, dtype),
    )


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Loss and gradients of one step; of frozen and unused parameters nothing."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def check(models: tuple[Any, Any, Any], make: Any, samples: list[ref.Sample]) -> None:
    """Our error against float64 is at most twice that of plain transformers, for each gradient."""
    plain, ours, exact = models
    want = step(exact, make(samples, dtype=torch.float64))
    got, theirs = step(ours, make(samples)), step(plain, make(samples))
    assert got.keys() == theirs.keys() == want.keys()
    sizes = layer_sizes(want)
    for name, local in got.items():
        # Gradients behind a softmax or a norm are differences of larger terms (that of a key's bias
        # is 0), whose size those of the same layer without a difference stand for; and they are
        # sums over tens of tokens, whose roundings add up to about four.
        noise = torch.full_like(want[name], 4 * sizes[layer(name)] * 2**-23)
        assert_accurate(name, local, theirs[name], want[name], noise)


def assert_same_step(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The loss and every gradient, up to a thousandth of the largest one of its layer."""
    assert got.keys() == want.keys()
    sizes = layer_sizes(want)
    for name, value in want.items():
        local, atol = got[name], 1e-3 * sizes[layer(name)]
        local = local.full_tensor() if hasattr(local, "full_tensor") else local
        torch.testing.assert_close(local, value, rtol=1e-3, atol=atol, msg=name)


def layer_sizes(gradients: dict[str, Tensor]) -> dict[str, float]:
    """Of the largest gradient of each layer, root mean square."""
    sizes: dict[str, float] = {}
    for name, value in gradients.items():
        sizes[layer(name)] = max(sizes.get(layer(name), 0.0), float(value.square().mean().sqrt()))
    return sizes


def layer(name: str) -> str:
    actual = re.match(r".*\.\d+\.", name)
    return actual.group() if actual else name


def sample(kind: str, learn: int = 5) -> ref.Sample:
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, (1,))))
    return ref.make_sample(KINDS[kind], generator, learn)


@pytest.mark.parametrize("kind", KINDS)
def test_step(models: tuple[Any, Any, Any], kind: str) -> None:
    check(models, batch, [sample(kind)])


def test_mixture_of_experts() -> None:
    """Qwen3-VL's; every expert takes part, so that no rounding chooses another."""
    config = ref.make_model("qwen3_vl").config.to_dict()
    for name in ("text_config", "vision_config"):
        config[name].pop("model_type")
    config.pop("model_type")
    config["text_config"] |= dict(num_experts=3, num_experts_per_tok=3, moe_intermediate_size=20)
    config["text_config"] |= dict(decoder_sparse_step=1, mlp_only_layers=[1])
    made = transformers.Qwen3VLMoeConfig(**config)
    made._attn_implementation, made._experts_implementation = "sdpa", "eager"
    plain = transformers.Qwen3VLMoeForConditionalGeneration(made).train()
    ours, exact = hf.enable(copy.deepcopy(plain)), copy.deepcopy(plain).double()
    check((plain, ours, exact), batch, [sample("image, video, image"), sample("text")])

    def balanced(samples: list[ref.Sample], dtype: Any = torch.float32) -> dict[str, Any]:
        return batch(samples, dtype=dtype) | {"output_router_logits": True}

    check((plain, ours, exact), balanced, [sample("image")])


@pytest.mark.parametrize("asked", ["config", "argument"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_loss_of_the_routers(side: str, asked: str) -> None:
    """Three of eight experts a token, padding that does not count, a coefficient that shows."""
    plain = ref.make_model("qwen3_vl_moe balanced", seed=RUN_SEED).train()
    plain.set_attn_implementation("sdpa")
    plain.config.text_config.router_aux_loss_coef = 20.0
    inputs = batch([sample("image"), sample("text")], side)
    if asked == "argument":
        plain.config.text_config.output_router_logits = False
        inputs["output_router_logits"] = True
    ours = hf.enable(copy.deepcopy(plain))
    want, got = plain(**inputs), ours(**inputs)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    torch.testing.assert_close(got.loss, want.loss)
    assert_same_step(step(ours, inputs), step(plain, inputs))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch(models: tuple[Any, Any, Any], side: str) -> None:
    samples = [sample(kind) for kind in ("image", "text", "image, video, image", "video")]

    def make(samples: list[ref.Sample], dtype: Any = torch.float32) -> dict[str, Any]:
        return batch(samples, side, dtype)

    check(models, make, samples)


def test_packed_batch(models: tuple[Any, Any, Any]) -> None:
    """Three samples in one row, by position ids: nobody sees another's tokens."""
    check(models, packed, [sample(kind) for kind in ("image", "text", "two images")])


def test_each_part_by_itself(models: tuple[Any, Any, Any]) -> None:
    plain, _, exact = models
    for part in ("vision", "embedding", "language"):
        others = {name: name == part for name in ("vision", "embedding", "language")}
        one = hf.enable(copy.deepcopy(plain), **others)
        check((plain, one, exact), batch, [sample("image, video, image")])


def test_the_kernels_run(models: tuple[Any, Any, Any]) -> None:
    """Not transformers' own code: the ops that run, and that it is one call per layer, for padded
    and packed batches too."""
    from tests.kernels.test_embedding import _Calls

    plain, ours, _ = models
    both = [sample("two images"), sample("text")]
    for inputs in (batch(both[:1]), batch(both), batch(both, "left"), packed(both)):
        for model, expected in ((plain, {}), (ours, kernels_of(plain))):
            with _Calls() as calls, torch.no_grad():
                model(**inputs)
            names = set(calls.names) - {"linear_cross_entropy"}
            assert {n: calls.names.count(n) for n in names} == expected


def kernels_of(model: Any) -> dict[str, int]:
    """How often each op runs in a forward of the enabled model, with images."""
    calls = {"vision_attention": 4, "varlen_attention": 4, "visual_embedding": 1}
    if levels := len(getattr(model.config.vision_config, "deepstack_visual_indexes", ())):
        calls["add_visual_"] = levels
    return calls


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_disable(models: tuple[Any, Any, Any]) -> None:
    plain, ours, _ = models
    inputs = batch([sample("image, video, image"), sample("text")])
    with torch.no_grad():
        before = plain(**inputs).logits
        model = copy.deepcopy(ours)
        assert hf.disable(model) is model
        assert_bitwise("logits", model(**inputs).logits, before)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert classes(model) == classes(plain) != classes(ours)
    hf.enable(hf.enable(model))  # twice is once
    assert classes(model) == classes(ours)
    assert classes(hf.disable(model)) == classes(plain)
    assert set(model.state_dict()) == set(ours.state_dict()) == set(plain.state_dict())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(models: tuple[Any, Any, Any], cache: str) -> None:
    """Greedy answers to a left-padded batch: prefill by the kernels, decoding with a cache."""
    plain, ours, _ = models
    inputs = batch([sample("image"), sample("two images")], "left")
    inputs.pop("labels")
    inputs.pop("position_ids")
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == ref.IMAGE).int()
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=ref.PAD)
    options |= dict(output_logits=True, return_dict_in_generate=True, cache_implementation=cache)
    theirs, local = plain.generate(**inputs, **options), ours.generate(**inputs, **options)
    assert local.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(torch.stack(local.logits), torch.stack(theirs.logits))


def test_padding_token_gets_no_gradient(models: tuple[Any, Any, Any]) -> None:
    """transformers' embedding has a padding_idx: its row is not trained, wherever the id stands."""
    plain, ours, _ = models
    one = sample("image")
    one.input_ids[-3] = ref.PAD
    table = "model.language_model.embed_tokens.weight"
    for model in (plain, ours):
        gradient = step(model, batch([one]))[table]
        assert gradient[ref.PAD].abs().max() == 0 and gradient.abs().max() > 0


def test_hooks_and_checkpointing(models: tuple[Any, Any, Any]) -> None:
    """Gradient checkpointing with frozen embeddings, as peft sets it up, rests on a hook of the
    embedding module."""
    plain, ours, _ = models
    results = []
    for model in (plain, ours):
        model = copy.deepcopy(model)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        model.get_input_embeddings().requires_grad_(False)
        model.model.visual.requires_grad_(False)
        results.append(step(model, batch([one := sample("image")] if not results else [one])))
    assert results[0].keys() == results[1].keys() and len(results[0]) > 10
    for name, theirs in results[0].items():
        torch.testing.assert_close(results[1][name], theirs, rtol=1e-3, atol=1e-5, msg=name)


def test_peft(models: tuple[Any, Any, Any]) -> None:
    """Adapters on the attention of both towers; enabled before and after wrapping."""
    peft = pytest.importorskip("peft")
    plain, _, _ = models
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False
    )
    inputs = batch([sample("image")])
    results = []
    for order in ("never", "before", "after"):
        model = copy.deepcopy(plain)
        if order == "before":
            hf.enable(model)
        torch.manual_seed(5)
        model = peft.get_peft_model(model, config)
        if order == "after":
            hf.enable(model)
        results.append(step(model, inputs))
    assert len(results[0]) > 8
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for name, theirs in results[0].items():
            torch.testing.assert_close(other[name], theirs, rtol=1e-3, atol=1e-5, msg=name)


def test_wrapped_embedding(models: tuple[Any, Any, Any]) -> None:
    """Adapters on the embedding itself: its rows are taken, visual rows put over them."""
    peft = pytest.importorskip("peft")
    plain, _, _ = models
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False)
    inputs = batch([sample("image, video, image")])
    torch.manual_seed(5)
    model = peft.get_peft_model(copy.deepcopy(plain), config)
    theirs = step(model, inputs)
    local = step(hf.enable(model), inputs)
    assert local.keys() == theirs.keys()
    for name, want in theirs.items():
        torch.testing.assert_close(local[name], want, rtol=1e-3, atol=1e-5, msg=name)


def test_accelerate_hooks(models: tuple[Any, Any, Any]) -> None:
    """device_map puts hooks around every forward; they go on working."""
    accelerate = pytest.importorskip("accelerate")
    plain, _, _ = models
    seen = []

    class Note(accelerate.hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            return args, kwargs

    model = copy.deepcopy(plain)
    for module in (model.model, model.get_input_embeddings(), model.model.visual.blocks[0].attn):
        accelerate.hooks.add_hook_to_module(module, Note())
    hf.enable(model)
    inputs = batch([sample("image")])
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss)
        assert len(seen) == 3
        hf.disable(model)
        assert_bitwise("loss", model(**inputs).loss, plain(**inputs).loss)
    assert len(seen) == 6


def test_mixed_dtypes(models: tuple[Any, Any, Any]) -> None:
    """bfloat16 autocast over float32 weights: visual rows come in another dtype than the table."""
    plain, ours, exact = models
    one = [sample("image, video, image")]
    with torch.no_grad():
        want = exact(**batch(one, dtype=torch.float64)).logits
        for dtype in (torch.bfloat16, torch.float16):
            for cache in (True, False):  # a cache gives values the type of rotated keys
                with torch.autocast("cpu", dtype):
                    theirs = plain(**batch(one), use_cache=cache).logits
                    local = ours(**batch(one), use_cache=cache, skip_logits=False).logits
                assert_accurate(f"logits, {dtype}, {cache}", local, theirs, want)


def test_counts_are_compared(models: tuple[Any, Any, Any]) -> None:
    _, ours, _ = models
    inputs = batch([sample("image")])
    inputs["input_ids"][0, 6] = 11  # a placeholder less
    with pytest.raises(ValueError, match=r"holds 14 placeholders of token_ids \[5\].* 15 visual"):
        ours(**inputs)


def test_embeddings_of_the_callers(models: tuple[Any, Any, Any]) -> None:
    """With inputs_embeds transformers' own code runs, and finds what it finds."""
    plain, ours, _ = models
    inputs = batch([sample("image")])
    ids = inputs.pop("input_ids")
    inputs["inputs_embeds"] = plain.get_input_embeddings()(ids).detach()
    torch.testing.assert_close(ours(**inputs).loss, plain(**inputs).loss)


def test_other_masks_go_to_sdpa(models: tuple[Any, Any, Any]) -> None:
    """Holes in the padding mask, a mask of four dimensions."""
    plain, ours, _ = models
    inputs = batch([sample("text"), sample("image")])
    inputs["attention_mask"][1, 3] = 0
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).loss, plain(**inputs).loss)
        length = inputs["input_ids"].shape[1]
        inputs["attention_mask"] = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        torch.testing.assert_close(ours(**inputs).loss, plain(**inputs).loss)


def test_refusals(models: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours, _ = models
    module = sys.modules[type(plain.model.visual.blocks[0].attn).__module__]
    with monkeypatch.context() as other:
        other.setattr(module, "apply_rotary_pos_emb_vision", lambda q, k, cos, sin: (q, 2 * k))
        with pytest.raises(ValueError, match="rotates queries and keys in another way"):
            hf.enable(copy.deepcopy(plain))
    with pytest.raises(ValueError, match="model is a Linear; it must be, or contain, one of"):
        hf.enable(nn.Linear(2, 2))
    if hasattr(plain.model.visual, "deepstack_merger_list"):
        model = copy.deepcopy(plain)
        for other_version in (  # transformers 5.2's, and one that takes more than we give
            lambda input_ids: None,
            lambda input_ids, mm_token_type_ids, more: None,
        ):
            model.model.compute_3d_position_ids = other_version
            with pytest.raises(ValueError, match="puts visual rows in in another way"):
                hf.enable(model)
        assert hf.enable(model, embedding=False) is model
        with monkeypatch.context() as patch:  # whose head does not hand on what the loss takes
            patch.setattr("transformers.__version__", "5.17.0")
            with pytest.raises(ValueError, match="before transformers 5.18 a Qwen3-VL's loss"):
                hf.enable(copy.deepcopy(plain))
            assert hf.enable(copy.deepcopy(plain), loss=False)
    model = copy.deepcopy(plain)
    model.model.visual.blocks[1].attn.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="Attention was replaced by something else"):
        hf.enable(model)
    assert classes(model) == classes(plain)  # nothing was left half done
    assert model.config.text_config._attn_implementation == "sdpa"


def test_on_the_meta_device(models: tuple[Any, Any, Any]) -> None:
    """Shapes without numbers, as transformers gives them."""
    ids = torch.zeros(1, 9, dtype=torch.long, device="meta")
    plain, ours = (copy.deepcopy(model).to("meta") for model in models[:2])
    if plain.config.model_type == "qwen3_vl":  # whose masks ask tensors for their numbers
        for model in (plain, ours):
            with pytest.raises(RuntimeError, match="called on meta tensors"):
                model(input_ids=ids, use_cache=False)
        return
    assert ours(input_ids=ids, labels=ids, use_cache=False).loss.shape == ()
    assert ours(input_ids=ids, use_cache=False).logits.shape[:2] == (1, 9)


def test_compile(models: tuple[Any, Any, Any]) -> None:
    """A layer of each tower in one graph."""
    plain, ours, _ = models
    hidden = torch.randn(2, 12, 96)
    angles = plain.model.language_model.rotary_emb(hidden, torch.arange(12).expand(3, 2, -1))
    patches = torch.randn(24, 48)
    rotations = torch.randn(24, 8).repeat(1, 2)  # both halves alike, as the tower makes them
    cos, sin = rotations.cos(), rotations.sin()
    cu_seqlens = torch.tensor([0, 8, 24], dtype=torch.int32)
    for of, args in (
        (lambda m: m.language_model.layers[1], dict(position_embeddings=angles)),
        (lambda m: m.visual.blocks[0], dict(cu_seqlens=cu_seqlens, position_embeddings=(cos, sin))),
    ):
        x = patches if "cu_seqlens" in args else hidden
        got = torch.compile(of(ours.model), fullgraph=True, backend="eager")(x, **args)
        torch.testing.assert_close(got, of(plain.model)(x, **args))


def test_compile_with_a_loss(models: tuple[Any, Any, Any]) -> None:
    """A text model in one graph, its last layer and loss too."""
    plain, ours, _ = models
    inputs = batch([sample("text")] * 2)
    del inputs["attention_mask"]  # which transformers looks into
    inputs["use_cache"] = False
    for more in ({}, {"num_items_in_batch": torch.tensor(11)}):
        got = torch.compile(ours, fullgraph=True, backend="eager")(**inputs, **more)
        want = plain(**inputs, **more)
        assert got.logits is None
        torch.testing.assert_close(got.loss, want.loss)
    torch._dynamo.reset()


def test_a_recorded_tower_takes_other_segments(models: tuple[Any, Any, Any]) -> None:
    """make_fx records no longest segment of the example's."""
    block, plain = models[1].model.visual.blocks[0], models[0].model.visual.blocks[0]
    patches, angles = torch.randn(24, 48, requires_grad=True), torch.randn(24, 8).repeat(1, 2)
    tables = angles.cos(), angles.sin()
    short, long = (torch.tensor(x, dtype=torch.int32) for x in ([0, 8, 24], [0, 4, 24]))
    graph = make_fx(lambda x, cu: block(x, cu_seqlens=cu, position_embeddings=tables))(
        patches, short
    )
    for cu_seqlens in (short, long):
        expected = plain(patches, cu_seqlens=cu_seqlens, position_embeddings=tables)
        torch.testing.assert_close(graph(patches, cu_seqlens), expected)
