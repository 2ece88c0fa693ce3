"""Other people's trainers (transformers with accelerate and peft, trl) on the same model with and
without the kernels: the same losses and weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import RUN_SEED
from tests.integrations.test_transformers import FAMILIES, batch, sample
from tests.parity import reference as ref
from vlmkernels.integrations import transformers as hf

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")


@pytest.fixture(params=FAMILIES)
def plain(request: pytest.FixtureRequest) -> Any:
    model = ref.make_model(request.param, seed=RUN_SEED)
    model.set_attn_implementation("sdpa")
    return model


def compare(trainers: list[Any]) -> None:
    results = []
    for trainer in trainers:
        torch.manual_seed(RUN_SEED)  # NEFTune draws
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((losses, dict(trainer.model.named_parameters())))
    (theirs, before), (local, after) = results
    assert len(local) == 3 and local != [local[0]] * 3
    torch.testing.assert_close(local, theirs, rtol=1e-4, atol=1e-4)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-3, atol=1e-4, msg=name)


STEPS = dict(max_steps=3, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no")
STEPS |= dict(per_device_train_batch_size=2, optim="sgd", learning_rate=0.1)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"neftune_noise_alpha": 5.0},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=lambda s: next(iter(s), "plain"),
)
def test_trainer(plain: Any, settings: Any, lora: bool, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    if lora and "torch_compile" in settings:
        pytest.skip("a minute each: compiled without adapters")
    if lora:
        peft = pytest.importorskip("peft", reason="adapters need peft")
        torch.manual_seed(1)
        options = dict(r=4, target_modules=["q_proj", "qkv"], init_lora_weights=False)
        plain = peft.get_peft_model(plain, peft.LoraConfig(**options))
        plain.enable_input_require_grads()
    samples = [sample(kind) for kind in ("image", "text", "two images", "video", "image", "text")]
    arguments = TrainingArguments(
        output_dir=tmp_path, remove_unused_columns=False, **STEPS, **settings
    )
    trainers = [
        Trainer(model, arguments, data_collator=batch, train_dataset=samples)  # type: ignore
        for model in (copy.deepcopy(plain), hf.enable(copy.deepcopy(plain)))
    ]
    compare(trainers)


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("packing", [dict(), dict(packing=True, max_length=24)])
def test_trl(plain: Any, tmp_path: Path, packing: dict[str, Any], loss: bool) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="trl needs datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": ref.PAD, "<end>": 2, **{f"w{i}": i for i in range(10, ref.VOCAB)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<end>",
    )
    lengths = (5, 9, 12, 7, 4, 11)
    ids = [torch.randint(10, ref.VOCAB, (n,)).tolist() for n in lengths]
    config = trl.SFTConfig(output_dir=str(tmp_path), bf16=False, **packing, **STEPS)
    trainers = [
        trl.SFTTrainer(
            model,
            config,
            train_dataset=datasets.Dataset.from_dict({"input_ids": ids}),
            processing_class=tokenizer,
        )
        for model in (copy.deepcopy(plain), hf.enable(copy.deepcopy(plain), loss=loss))
    ]
    if packing and "qwen2" in plain.config.model_type:
        # transformers doesn't read trl's position ids there, and would mix a row's samples
        with pytest.raises(ValueError, match="to Qwen2-VL and Qwen2.5-VL as"):
            trainers[1].train()
        return
    compare(trainers)
