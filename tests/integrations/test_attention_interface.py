"""attn_implementation="vlmkernels" by itself: the models that it is tested with, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import RUN_SEED
from tests.integrations.test_transformers import (
    assert_same_step,
    batch,
    sample,
    step,
)
from tests.kernels.numeric import assert_accurate, assert_bitwise
from tests.kernels.test_embedding import _Calls
from tests.parity import reference as ref
from vlmkernels.integrations import transformers as hf
from vlmkernels.integrations.transformers import attention as api

SMALL = dict(vocab_size=64, hidden_size=48, intermediate_size=32, num_hidden_layers=2)
SMALL |= dict(num_attention_heads=6, num_key_value_heads=2, head_dim=8, pad_token_id=0)
SMALL |= dict(bos_token_id=1, eos_token_id=2)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
EXPERTS |= dict(shared_expert_intermediate_size=16)
#: Those with a vision tower are in test_transformers.py.
TEXT = [t for t in hf.MODEL_TYPES if "_vl" not in t]


def make(model_type: str, attention: str, **options: Any) -> Any:
    hf.register()
    experts = EXPERTS if "mixtral" in model_type or "moe" in model_type else {}
    config = AutoConfig.for_model(model_type, **{**SMALL, **experts, **options})
    config._experts_implementation = "eager"  # takes float64
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def pair(model_type: str, **options: Any) -> tuple[Any, Any]:
    """The same weights with transformers' sdpa and with the kernels."""
    plain = make(model_type, "sdpa", **options).train()
    ours = make(model_type, hf.NAME, **options).train()
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def batches() -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """Inputs, and the tokens whose outputs count."""
    ids = torch.randint(3, 64, (2, 14))
    every = torch.ones(2, 14, dtype=torch.bool)
    right, left = every.clone(), every.clone()
    right[1, 9:], left[0, :5] = False, False
    positions = torch.cat([torch.arange(6), torch.arange(8)]).repeat(2, 1)
    return {
        "plain": (dict(input_ids=ids), every),
        "right": (dict(input_ids=ids, attention_mask=right.long()), right),
        "left": (dict(input_ids=ids, attention_mask=left.long()), left),
        "packed": (dict(input_ids=ids, position_ids=positions), every),
    }


def run(model: Any, inputs: dict[str, Tensor], real: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of real tokens, and the gradient of the first query projection."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    assert logits.isfinite().all()  # at padding positions too
    logits[real].square().mean().backward()
    first = next(p for n, p in model.named_parameters() if "q_proj.weight" in n)
    return logits[real].detach(), first.grad


@pytest.mark.parametrize("model_type", TEXT)
def test_values(model_type: str) -> None:
    plain, ours = pair(model_type)
    exact = pair(model_type)[0].double()
    exact.load_state_dict(plain.state_dict())
    for name, (inputs, real) in batches().items():
        with _Calls() as calls:
            got = run(ours, inputs, real)
        assert calls.names.count("varlen_attention") == 2, name
        want, theirs = run(exact, inputs, real), run(plain, inputs, real)
        for what, a, b, c in zip(("logits", "gradient"), got, theirs, want, strict=True):
            noise = torch.full_like(c, 4 * float(c.square().mean().sqrt())) * 2.0**-23
            assert_accurate(f"{what}, {name}", a, b, c, noise)


#: Sinks, capped scores, a mask of its own, position biases, unequal head sizes, own attention.
REFUSED = ("gpt_oss", "gemma2", "doge", "bloom", "xglm", "deepseek_v2", "mpt", "codegen", "gpt2")


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_models_are_refused(model_type: str) -> None:
    hf.register()
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):  # they are large
        model = AutoModelForCausalLM.from_config(config, attn_implementation=hf.NAME)
        ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=f"is tested with .* and not with '{model_type}'"):
        model(input_ids=ids)


@pytest.mark.parametrize("model_type", ["falcon"])
def test_transformers_refuses_some_itself(model_type: str) -> None:
    hf.register()
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"), pytest.raises(KeyError, match="vlmkernels"):
        AutoModelForCausalLM.from_config(config, attn_implementation=hf.NAME)


def test_arguments_that_are_not_known_are_refused() -> None:
    plain, ours = pair("llama")
    inputs = dict(input_ids=torch.randint(3, 64, (1, 6)))
    for name, value in (
        ("softcap", 30.0),
        ("s_aux", torch.zeros(6)),
        ("position_bias", torch.zeros(1, 6, 6, 6)),
        ("anything", torch.ones(2)),
    ):
        with pytest.raises(ValueError, match=f"LlamaAttention passes {name} .* 'vlmkernels' does"):
            ours(**inputs, **{name: value})
        ours(**inputs, **{name: None})
    with pytest.raises(ValueError, match="output_attentions is True, but .* never forms"):
        ours(**inputs, output_attentions=True)
    with pytest.raises(ValueError, match="`output_attentions` .* not supported"):
        ours.config.output_attentions = True


def test_samples_by_cu_seqlens_alone_are_refused() -> None:
    """As flash-attention's collators give them: transformers' sdpa would mix the samples."""
    plain, ours = pair("llama")
    ids = torch.randint(3, 64, (1, 10))
    cu = dict(cu_seq_lens_q=torch.tensor([0, 4, 10]), cu_seq_lens_k=torch.tensor([0, 4, 10]))
    with pytest.raises(ValueError, match="position_ids don't tell the samples of a row apart"):
        ours(input_ids=ids, **cu)
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    out = ours(input_ids=ids, position_ids=positions, use_cache=False, **cu).logits
    want = torch.cat([plain(input_ids=part).logits for part in ids.split([4, 6], 1)], 1)
    torch.testing.assert_close(out, want)
    one, want = torch.tensor([0, 10]), plain(input_ids=ids).logits
    for alone in (dict(cu_seq_lens_q=one, cu_seq_lens_k=one), dict(seq_idx=torch.ones(1, 10))):
        torch.testing.assert_close(ours(input_ids=ids, **alone).logits, want)
    with pytest.raises(ValueError, match="seq_idx is given, but position_ids don't tell"):
        ours(input_ids=ids, seq_idx=torch.tensor([[0] * 4 + [1] * 6]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Rotated queries and keys are float32 there, values are not."""
    plain, ours = pair("llama")
    exact = pair("llama")[0].double()
    exact.load_state_dict(plain.state_dict())
    for name, (inputs, real) in batches().items():
        want = run(exact, inputs, real)
        with torch.autocast("cpu", dtype):
            with _Calls() as calls:
                got = run(ours, inputs, real)
            theirs = run(plain, inputs, real)
        assert calls.names.count("varlen_attention") == 2, name
        for what, a, b, c in zip(("logits", "gradient"), got, theirs, want, strict=True):
            assert a.dtype == b.dtype
            noise = torch.full_like(c, float(c.square().mean().sqrt())) * torch.finfo(dtype).eps
            assert_accurate(f"{what}, {name}", a, b, c, noise)


def test_masks_that_are_not_causal() -> None:
    """transformers' sdpa computes them: of four dimensions, bidirectional, a sliding window."""
    plain, ours = pair("llama")
    inputs = dict(input_ids=torch.randint(3, 64, (2, 9)))
    mask = (torch.rand(2, 1, 9, 9) < 0.5) | torch.eye(9, dtype=torch.bool)
    for more in (dict(attention_mask=mask), dict(is_causal=False)):
        torch.testing.assert_close(ours(**inputs, **more).logits, plain(**inputs, **more).logits)
    plain, ours = pair("mistral", sliding_window=4)
    for padding in (torch.ones(2, 9), torch.ones(2, 9).index_fill(1, torch.tensor([0, 1]), 0)):
        inputs["attention_mask"] = padding
        real = padding.bool()
        got, want = ours(**inputs).logits[real], plain(**inputs).logits[real]
        torch.testing.assert_close(got, want)


def test_a_mask_with_a_hole() -> None:
    """A user's mask function may have any; its first and last tokens are as of causal attention."""
    config = pair("llama")[1].config
    options: dict[str, Any] = dict(config=config, batch_size=1, q_length=8, kv_length=8)
    options |= dict(use_vmap=True, allow_is_causal_skip=False)  # as transformers then has them
    options |= dict(mask_function=lambda b, h, q, k: (k <= q) & ((q != 6) | (k != 3)))
    expected = torch.ones(8, 8, dtype=torch.bool).tril()
    expected[6, 3] = False
    assert_bitwise("mask", api.mask(**options), expected[None, None])


def test_attention_dropout(seed: int) -> None:
    """transformers' sdpa drops, from the same seed; in evaluation the kernels run."""
    plain, ours = pair("llama", attention_dropout=0.5)
    for name, (inputs, real) in batches().items():
        results = []
        for model in (plain, ours):
            torch.manual_seed(seed)
            results.append([run(model.train(), inputs, real) for _ in range(2)])
        torch.testing.assert_close(results[1], results[0])
        assert not torch.equal(results[1][0][0], results[1][1][0])
        with _Calls() as calls:
            run(ours.eval(), inputs, real)
        assert calls.names.count("varlen_attention") == 2, name


def test_large_heads() -> None:
    """Of more elements than the 256 of the kernels: transformers' sdpa."""
    plain, ours = pair("llama", head_dim=288)
    for inputs, real in batches().values():
        torch.testing.assert_close(run(ours, inputs, real), run(plain, inputs, real))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_language_models(family: str) -> None:
    """Without `enable`: the language model by the kernels, the tower by transformers' sdpa."""
    hf.register()
    plain = ref.make_model(family, seed=RUN_SEED)
    ours = copy.deepcopy(plain)
    plain.set_attn_implementation("sdpa")
    ours.set_attn_implementation(hf.NAME)
    inputs = batch([sample("image"), sample("text")])
    with _Calls() as calls:
        got = step(ours, inputs)
    assert calls.names.count("varlen_attention") == 4
    assert_same_step(got, step(plain, inputs))


def test_double() -> None:
    plain, ours = (model.double() for model in pair("qwen2"))
    for inputs, real in batches().values():
        got = ours(**inputs, use_cache=False).logits[real]
        torch.testing.assert_close(got, plain(**inputs, use_cache=False).logits[real])
