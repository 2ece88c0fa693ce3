"""What people do with a model: copy, send, save, hook, offload; enabled or not, the same."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from tests.conftest import RUN_SEED
from tests.integrations.test_transformers import (
    FAMILIES,
    assert_same_step,
    batch,
    kernels_of,
    packed,
    sample,
    step,
)
from tests.kernels.numeric import assert_bitwise
from tests.kernels.test_embedding import _Calls
from tests.parity import reference as ref
from vlmkernels.integrations import transformers as hf


@pytest.fixture(params=FAMILIES)
def plain(request: pytest.FixtureRequest) -> Any:
    model = ref.make_model(request.param, seed=RUN_SEED)
    model.set_attn_implementation("sdpa")
    return model


def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def ops(model: Any, inputs: dict[str, Any]) -> dict[str, int]:
    """How often each of our ops runs in a forward."""
    with _Calls() as calls:
        logits(model, inputs)
    return {name: calls.names.count(name) for name in set(calls.names)}


def _child(pipe: Any) -> None:
    """Of a spawned process: nothing of vlmkernels was imported before the model came."""
    torch.set_num_threads(1)
    model, inputs = pickle.loads(pipe.recv_bytes())
    pipe.send((logits(model, inputs).numpy(), ops(model, inputs)))


def test_copies(plain: Any) -> None:
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("image"), sample("text")])
    expected = logits(ours, inputs)
    for model in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), torch_load(ours)):
        assert_bitwise("logits", logits(model, inputs), expected)
        assert ops(model, inputs) == kernels_of(plain)
        hf.disable(model)
        assert_bitwise("disabled", logits(model, inputs), logits(plain, inputs))


@pytest.mark.slow
def test_spawned_process() -> None:
    ours = hf.enable(ref.make_model("qwen2_5_vl", seed=RUN_SEED))
    inputs = batch([sample("image"), sample("text")])
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(there,), daemon=True)
    process.start()
    here.send_bytes(pickle.dumps((ours, inputs)))
    got, names = here.recv()
    process.join()
    assert_bitwise("of the process", torch.from_numpy(got), logits(ours, inputs))
    assert names == kernels_of(ours)


def torch_load(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_replicas_use_their_own_weights(plain: Any) -> None:
    """As torch.nn.DataParallel makes them: a copy of the module's dictionary, then other
    parameters."""
    attention = hf.enable(copy.deepcopy(plain)).model.visual.blocks[0].attn
    replica = attention._replicate_for_data_parallel()
    replica._modules = {name: copy.deepcopy(m) for name, m in attention._modules.items()}
    nn.init.zeros_(replica._modules["proj"].weight)
    nn.init.ones_(replica._modules["proj"].bias)
    x, angles = torch.randn(16, 48), torch.randn(16, 8).repeat(1, 2)
    cu_seqlens = torch.tensor([0, 16], dtype=torch.int32)
    with torch.no_grad():
        out = replica(x, cu_seqlens=cu_seqlens, position_embeddings=(angles.cos(), angles.sin()))
    assert_bitwise("out", out, torch.ones_like(x))


def test_classes_look_as_before(plain: Any) -> None:
    """Names and signatures, which transformers, peft and trainers ask for."""
    ours = hf.enable(copy.deepcopy(plain))
    for (name, a), (_, b) in zip(plain.named_modules(), ours.named_modules(), strict=True):
        assert str(type(a)) == str(type(b)) and isinstance(b, type(a)), name
        assert inspect.signature(a.forward) == inspect.signature(b.forward), name
    assert "inputs_embeds" in inspect.signature(ours.model.forward).parameters


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_saved_config_and_disable(plain: Any, attention: str, tmp_path: Path) -> None:
    plain.set_attn_implementation(attention)
    plain.save_pretrained(tmp_path / "plain")
    ours = hf.enable(copy.deepcopy(plain))
    ours.save_pretrained(tmp_path / "ours")
    saved = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "ours")
    ]
    assert saved[0] == saved[1]
    again = type(plain).from_pretrained(tmp_path / "ours", attn_implementation=attention)
    inputs = batch([sample("image"), sample("text")])
    assert_bitwise("logits", logits(again, inputs), logits(plain, inputs))
    hf.disable(hf.enable(ours))
    assert ours.config.text_config._attn_implementation == attention
    assert_bitwise("disabled", logits(ours, inputs), logits(plain, inputs))
    assert vars(ours).keys() == vars(plain).keys()
    # What is set after enable stays.
    hf.enable(ours).set_attn_implementation("eager")
    assert "varlen_attention" not in ops(ours, inputs)
    assert hf.disable(ours).config.text_config._attn_implementation == "eager"


def test_models_that_share_a_config(plain: Any) -> None:
    one, other = (type(plain)(plain.config).eval() for _ in range(2))
    assert one.config is other.config is plain.config
    inputs = packed([sample("image"), sample("text")])
    hf.enable(one)
    assert "varlen_attention" not in ops(other, inputs) and ops(one, inputs) == kernels_of(plain)
    hf.enable(other)
    hf.disable(one)
    assert ops(other, inputs) == kernels_of(plain) and ops(one, inputs) == ops(plain, inputs) == {}
    assert one.config.text_config is one.model.language_model.config is one.model.config.text_config


def test_samples_numbered_as_trl_does(plain: Any) -> None:
    """Its collator sends seq_idx beside position ids, and transformers hands it to all towers."""
    ours = hf.enable(copy.deepcopy(plain))
    for samples in ([sample("image"), sample("text")], [sample("image")]):
        inputs = packed(samples)
        numbers = [torch.full((len(s.input_ids),), n) for n, s in enumerate(samples)]
        numbered = {**inputs, "seq_idx": torch.cat(numbers).to(torch.int32)[None]}
        assert_same_step(step(ours, numbered), step(plain, inputs))


def test_a_table_that_is_not_contiguous(plain: Any) -> None:
    table = plain.get_input_embeddings()
    table.weight = torch.nn.Parameter(table.weight.detach().T.contiguous().T)
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("image")])
    assert not ours.get_input_embeddings().weight.is_contiguous()
    assert_same_step(step(ours, inputs), step(plain, inputs))


@pytest.mark.parametrize(
    ("option", "value"), [("scale_grad_by_freq", True), ("max_norm", 0.5), ("sparse", True)]
)
def test_options_of_the_table(plain: Any, option: str, value: Any) -> None:
    """torch's embedding heeds them: by the count of each word, rows of a largest norm, sparse."""
    table = plain.get_input_embeddings()
    setattr(table, option, value)
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("image"), sample("text")])
    inputs["input_ids"][:, 1] = inputs["input_ids"][0, 0]  # one word three times
    steps = [step(model, inputs) for model in (ours, plain)]
    name = "model.language_model.embed_tokens.weight"
    assert [gradients[name].is_sparse for gradients in steps] == [option == "sparse"] * 2
    got, want = ({n: g.to_dense() for n, g in gradients.items()} for gradients in steps)
    assert_same_step(got, want)
    assert_bitwise("table", ours.get_input_embeddings().weight, table.weight)


def test_return_dict_false(plain: Any) -> None:
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("image")])
    inputs.pop("labels")
    for a, b in ((plain, ours), (plain.model, ours.model)):
        want, got = (model(**inputs, return_dict=False, use_cache=False) for model in (a, b))
        assert type(got) is type(want) is tuple and len(got) == len(want)
        torch.testing.assert_close(got[0], want[0])


def test_positional_arguments(plain: Any) -> None:
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("text")])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    torch.testing.assert_close(ours.model(ids, mask)[0], plain.model(ids, mask)[0])


def test_output_attentions_is_refused(plain: Any) -> None:
    inputs = batch([sample("image")])
    plain.set_attn_implementation("eager")
    message = "output_attentions is True, but .* never forms its weights; .*'eager'"
    with pytest.raises(ValueError, match=message):
        hf.enable(plain)(**inputs, output_attentions=True)
    plain.set_attn_implementation("eager")  # as it says
    assert len(plain(**inputs, output_attentions=True).attentions) == 4
    plain.config.text_config.output_attentions = True
    with pytest.raises(ValueError, match=message):
        hf.enable(plain)(**inputs)
    hf.enable(plain)(**inputs, output_attentions=False)


def test_attention_that_peft_has_copied(plain: Any) -> None:
    """Before enable it is refused in a sentence that says what to do, after it it is trained."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["attn"])
    inputs = batch([sample("image")])
    ours = peft.get_peft_model(hf.enable(copy.deepcopy(plain)), config)
    torch.testing.assert_close(ours(**inputs).loss, plain(**inputs).loss)
    wrapped = peft.get_peft_model(plain, config)
    with pytest.raises(ValueError, match="call enable before get_peft_model"):
        hf.enable(wrapped)
    hf.enable(wrapped, vision=False)
    torch.testing.assert_close(wrapped(**inputs).loss, ours(**inputs).loss)


def test_hidden_states(plain: Any) -> None:
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("image")])
    want, got = (m(**inputs, output_hidden_states=True).hidden_states for m in (plain, ours))
    torch.testing.assert_close(got, want)


def test_hooks_of_the_embedding_see_words(plain: Any) -> None:
    """NEFTune's hook adds noise to what the embedding gives: to words, not to visual rows."""
    inputs = batch([sample("image, video, image")])

    def noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        torch.manual_seed(3)
        return output + torch.zeros_like(output).uniform_(-1, 1)

    results = []
    for model in (copy.deepcopy(plain), hf.enable(copy.deepcopy(plain))):
        gradients: list[Tensor] = []
        table = model.get_input_embeddings()
        table.register_forward_hook(noise)
        table.register_full_backward_hook(lambda m, i, o: gradients.append(o[0]))  # noqa: B023
        results.append({**step(model, inputs), "of words": gradients[0]})
    assert_same_step(results[1], results[0])


@pytest.mark.parametrize("first", ["offload", "enable"])
def test_offloaded(plain: Any, first: str) -> None:
    """accelerate keeps weights elsewhere, on the meta device between calls."""
    accelerate = pytest.importorskip("accelerate")
    ours, inputs = copy.deepcopy(plain), batch([sample("image, video, image")])
    if first == "enable":
        hf.enable(ours)
    accelerate.cpu_offload(ours, torch.device("cpu"))
    if first == "offload":
        hf.enable(ours)
    assert ours.get_input_embeddings().weight.is_meta
    torch.testing.assert_close(logits(ours, inputs), logits(plain, inputs))
    assert ops(ours, inputs)["vision_attention"] == 8  # images, then videos


@pytest.mark.parametrize("first", ["shard", "enable"])
def test_fully_sharded(plain: Any, first: str) -> None:
    """fully_shard gives modules a class of its own; weights are there while a module runs."""
    from torch.distributed.fsdp import fully_shard

    ours, inputs = copy.deepcopy(plain), batch([sample("image"), sample("text")])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if first == "enable":
            hf.enable(ours)
        mesh = dist.init_device_mesh("cpu", (1,))
        attentions = [block.attn for block in ours.model.visual.blocks]
        for module in (*ours.model.language_model.layers, *attentions, ours.model, ours):
            fully_shard(module, mesh=mesh)
        if first == "shard":
            hf.enable(ours)
        assert ops(ours, inputs) == kernels_of(plain)
        assert_same_step(step(ours, inputs), step(plain, inputs))
        if first == "shard":
            assert_bitwise("logits", logits(hf.disable(ours), inputs), logits(plain, inputs))
        else:
            with pytest.raises(ValueError, match="was changed after enable"):
                hf.disable(ours)
    finally:
        dist.destroy_process_group()


def test_double(plain: Any) -> None:
    ours = hf.enable(copy.deepcopy(plain)).double()
    inputs = [batch([sample("image"), sample("video")], dtype=torch.float64)]
    inputs.append(packed([sample("image"), sample("text")], dtype=torch.float64))
    exact = copy.deepcopy(plain).double()
    for each in inputs:
        torch.testing.assert_close(ours(**each).loss, exact(**each).loss)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_positions(plain: Any, side: str) -> None:
    """Nobody reads them: their outputs are finite and no gradient comes from them."""
    ours = hf.enable(copy.deepcopy(plain))
    inputs = batch([sample("image"), sample("two images")], side)
    inputs.pop("labels")
    out = ours(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert out.isfinite().all()
    torch.testing.assert_close(out[real], plain(**inputs).logits[real])
    out[~real].square().sum().backward()
    tower = [p.grad for p in ours.model.visual.parameters()]
    assert all(grad is None or grad.abs().max() == 0 for grad in tower)


@pytest.mark.parametrize(
    "way",
    [
        dict(num_beams=3),
        dict(num_beams=2, cache_implementation="static"),
        dict(use_cache=False),
        dict(prompt_lookup_num_tokens=2),
        dict(prefill_chunk_size=4),
    ],
    ids=str,
)
def test_ways_to_generate(plain: Any, way: dict[str, Any]) -> None:
    """Beams, without a cache, by candidates that one forward checks, a prompt in parts."""
    ours = hf.enable(copy.deepcopy(plain))
    # candidates of a prompt may be its image tokens, which transformers refuses without an image
    one = "prompt_lookup_num_tokens" in way or "prefill_chunk_size" in way
    kinds = ["text"] if one else ["image", "text"]
    inputs = batch([sample(kind) for kind in kinds], "left")
    for name in ("labels", "position_ids"):
        inputs.pop(name)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == ref.IMAGE).int()
    options = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=ref.PAD)
    # without a cache transformers counts answers' image tokens, too, as images'
    options["suppress_tokens"] = [ref.IMAGE, ref.VIDEO]
    options |= dict(return_dict_in_generate=True, output_logits=True, **way)
    want, got = plain.generate(**inputs, **options), ours.generate(**inputs, **options)
    assert got.sequences.tolist() == want.sequences.tolist()
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_caches(plain: Any, cache: str, padded: bool) -> None:
    """Several tokens, some more after them, then one, through a cache of one's own."""
    ours = hf.enable(copy.deepcopy(plain))
    ids = torch.randint(10, ref.VOCAB, (2, 12))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = 0
    results = []
    for model in (plain, ours):
        kind = dict(config=model.config.get_text_config(), max_cache_len=16)
        past = StaticCache(**kind) if cache == "static" else DynamicCache()
        with torch.no_grad():
            steps = [
                model(
                    input_ids=ids[:, a:b],
                    attention_mask=mask[:, :b],
                    past_key_values=past,
                    position_ids=torch.arange(a, b).expand(3, 2, -1),
                    cache_position=torch.arange(a, b),
                ).logits
                for a, b in ((0, 7), (7, 11), (11, 12))
            ]
        results.append(torch.cat(steps, 1)[mask.bool()])
    torch.testing.assert_close(*results)


def test_mm_encoder_outputs(plain: Any) -> None:
    """Features that were encoded before; given twice they are refused, as by transformers."""
    if "mm_encoder_outputs" not in inspect.signature(plain.model.forward).parameters:
        pytest.skip("this version of transformers takes no mm_encoder_outputs")
    ours, inputs = hf.enable(copy.deepcopy(plain)), batch([sample("two images")])
    pixels, grid = inputs.pop("pixel_values"), inputs["image_grid_thw"]
    features = plain.model.get_image_features(pixels, grid, return_dict=True)
    got = ours(**inputs, mm_encoder_outputs={"image": features}).logits
    want = plain(**inputs, mm_encoder_outputs={"image": features}).logits
    torch.testing.assert_close(got, want)
    for model in (plain, ours):
        with pytest.raises(ValueError, match="both pixel_values/pixel_values_videos and"):
            model(**inputs, pixel_values=pixels, mm_encoder_outputs={"image": features})
