"""Continuous batching, autocast, dropout and hooks: enabled or not, the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.conftest import RUN_SEED
from tests.integrations.test_enabled_model import logits
from tests.integrations.test_transformers import FAMILIES, batch, sample
from tests.kernels.numeric import assert_bitwise
from tests.parity import reference as ref
from vlmkernels.integrations import transformers as hf
from vlmkernels.integrations.transformers import attention as api
from vlmkernels.integrations.transformers import head, modules
from vlmkernels.integrations.transformers.modules import _together


@pytest.fixture(params=FAMILIES)
def models(request: pytest.FixtureRequest) -> list[Any]:
    """(plain, enabled)"""
    plain = ref.make_model(request.param, seed=RUN_SEED)
    plain.set_attn_implementation("sdpa")
    return [plain, hf.enable(copy.deepcopy(plain))]


def batched_answers(models: list[Any]) -> list[list[list[int]]]:
    """What each model says to sequences of several lengths, prefilled and decoded together."""
    config = getattr(transformers, "ContinuousBatchingConfig", None)
    if config is None or Version(transformers.__version__) < Version("5.24"):
        pytest.skip("enabled models take continuous batching from transformers 5.24 on")
    prompts = [torch.randint(10, 100, (n,)).tolist() for n in (12, 7, 30, 1)]
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)
    answers = []
    for model in models:
        results = model.eval().generate_batch(
            inputs=prompts,
            generation_config=options,
            continuous_batching_config=config(num_blocks=16, max_batch_tokens=64),
            progress_bar=False,
        )
        answers.append([result.generated_tokens for result in results.values()])
        assert all(answers[-1])
    return answers


def test_continuous_batching(models: list[Any]) -> None:
    plain, ours = batched_answers(models)
    assert plain == ours


def test_continuous_batching_of_an_older_transformers(models: list[Any]) -> None:
    """Before 5.24 the lengths of keys come for all layers, and keys without the cache's."""
    layer = models[1].model.language_model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    lengths = {"full_attention": torch.tensor([0, 3])}
    with pytest.raises(ValueError, match="from transformers 5.24 on: use that, or enable"):
        api.attention(layer, q, k, k, None, read_index=[], cu_seq_lens_k=lengths)


def test_sliding_windows_keep_their_attention() -> None:
    """Of the language model; continuous batching tells ours nothing of them."""
    like = ref.make_model("qwen2_5_vl", seed=RUN_SEED)
    config = copy.deepcopy(like.config)
    text = config.text_config
    text.use_sliding_window, text.sliding_window = True, 4
    text.layer_types = ["sliding_attention"] * text.num_hidden_layers
    plain = type(like)(config).eval()
    weights = like.state_dict()
    # Large weights: with small ones the last token alone says what comes.
    plain.load_state_dict({n: 3 * w if w.dim() == 2 else w for n, w in weights.items()})
    plain.set_attn_implementation("sdpa")
    ours = hf.enable(copy.deepcopy(plain))
    assert ours.config.text_config._attn_implementation == "sdpa"
    inputs = batch([sample("image"), sample("text")])
    real = inputs["attention_mask"].bool()
    got, want = (logits(model, inputs)[real] for model in (ours, plain))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.std()))
    theirs, local = batched_answers([plain, ours])
    assert theirs == local


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", ["all", "language model"])
def test_autocast_to_another_type_of_16_bits(
    models: list[Any], dtype: torch.dtype, parts: str
) -> None:
    if parts == "all" and any(isinstance(m, nn.LayerNorm) for m in models[0].modules()):
        pytest.skip("torch's layer_norm takes no other 16-bit type than autocast's")
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    inputs = batch([sample("image"), sample("text"), sample("two images")])
    losses = []
    for model in models:
        model.train()
        (model if parts == "all" else model.model.language_model).to(dtype)
        with torch.autocast("cpu", other):
            losses.append(model(**inputs).loss)
        losses[-1].backward()
    rounding = 2**-9  # half of bfloat16's last place
    torch.testing.assert_close(losses[1].float(), losses[0].float(), rtol=rounding, atol=0)


def test_rows_of_two_types_under_autocast() -> None:
    """As of images that were encoded before, beside videos."""
    rows = [torch.ones(2, 3).half(), torch.full((1, 3), 2.0).bfloat16()]
    with torch.autocast("cpu", torch.float16):
        got = _together(rows, torch.ones(1, dtype=torch.bfloat16))
    assert_bitwise("rows", got, torch.tensor([[1.0] * 3, [1.0] * 3, [2.0] * 3]).bfloat16())


def test_dropout_of_the_towers_attention(models: list[Any]) -> None:
    inputs = batch([sample("image"), sample("text")])
    losses: list[list[Tensor]] = []
    for model in models:
        model.train()
        for block in model.model.visual.blocks:
            block.attn.attention_dropout = 0.5
        torch.manual_seed(RUN_SEED)
        losses.append([model(**inputs).loss for _ in range(2)])
    for plain, ours in zip(*losses, strict=True):
        torch.testing.assert_close(ours, plain)
    assert losses[1][0] != losses[1][1]


def test_hooks_of_the_language_model_see_its_arguments(models: list[Any]) -> None:
    """Qwen3-VL's rows of DeepStack, and where they go."""
    inputs = batch([sample("image"), sample("text"), sample("two images")])
    seen: list[dict[str, Any]] = []
    got = []
    for model in models:
        handle = model.model.language_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
        )
        got.append(logits(model, inputs))
        handle.remove()
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[1][real], got[0][real], rtol=1e-4, atol=1e-5)
    theirs, ours = seen
    where = theirs.get("visual_pos_masks")
    if where is None:
        pytest.skip(f"{type(models[0]).__name__} has no DeepStack")
    assert_bitwise("where", ours["visual_pos_masks"], where)
    name = "deepstack_visual_embeds"
    for one, other in zip(ours[name], theirs[name], strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_kept_beside_a_tensor_goes_when_it_is_written() -> None:
    cu = torch.tensor([0, 3, 7, 7], dtype=torch.int32)
    assert [api.known_max_seqlen(cu) for _ in range(2)] == [4, 4]
    cu[1] = 1
    assert api.known_max_seqlen(cu) == 6
    cos, sin = torch.rand(5, 8), torch.rand(5, 8)
    table = modules.rotary_table(cos, sin)
    assert modules.rotary_table(cos, sin) is table
    for change in (lambda: cos.add_(1), lambda: sin.add_(1)):
        change()
        halves = torch.cat([cos[:, :4], sin[:, :4]], 1)
        assert_bitwise("table", modules.rotary_table(cos, sin), halves)
    assert modules.rotary_table(cos, sin.clone()) is not modules.rotary_table(cos, sin)
    with torch.inference_mode():
        still = torch.tensor([0, 2], dtype=torch.int32)
        assert [api.known_max_seqlen(still) for _ in range(2)] == [2, 2]


def test_a_replaced_attention_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's sequence parallelism wraps transformers' function, and each rank has a part."""
    model = hf.enable(ref.make_model("qwen2_5_vl"))
    inputs = dict(input_ids=torch.tensor([[5, 6, 7]]))
    model(**inputs)
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *a, **k: own(*a, **k))
    with pytest.raises(ValueError, match="has replaced transformers' 'sdpa' attention"):
        model(**inputs)
    hf.enable(model, language=False)
    model(**inputs)


def test_cuda_graphs_leave_out_what_waits_or_keeps_memory() -> None:
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    names = "linear_cross_entropy", "varlen_attention", "varlen_attention_backward"
    for name in names if unsafe else ():
        assert unsafe in getattr(torch.ops.vlmkernels, name).default.tags, name


def test_gpus_without_code_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the CPU, each part asks for code for its device."""
    model = ref.make_model("qwen3_vl")
    inputs = batch([sample("image")])
    wanted = model(**inputs).loss
    hf.enable(model)
    monkeypatch.setattr(modules, "runs_on", lambda device: False)
    monkeypatch.setattr(head, "runs_on", lambda device: False)
    for module, name in ((modules, "visual_embedding"), (modules, "add_visual_")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(head, "linear_cross_entropy", None)
    torch.testing.assert_close(model(**inputs).loss, wanted)
