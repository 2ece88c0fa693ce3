"""A Qwen2.5-VL or Qwen3-VL small enough to be trained in two minutes, as a complete Hugging Face
folder.

The architecture is the real one (windows, full attention in some layers, M-RoPE, GQA, QKV bias;
DeepStack, learned positions, norms of queries and keys, a mixture of experts); only the sizes are
small and the weights random. Its tokenizer is a byte-level BPE trained on the
demo's own text, with Qwen's pre-tokenizer, special tokens and chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from vlmtrain.core.errors import UserError
from vlmtrain.models.family import FAMILIES

Family = Literal["qwen2_5_vl", "qwen3_vl"]  # of the demo
IM_END = "<|im_end|>"
IMAGE_PAD = "<|image_pad|>"

# In the order of Qwen's own vocabulary.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    IM_END,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    IMAGE_PAD,
    "<|video_pad|>",
)

VOCAB_SIZE = 640  # 256 bytes, the merges, the special tokens

# The pre-tokenizer of Qwen2 and Qwen2.5: contractions, words with the blank before them, single
# digits, runs of punctuation, line ends, blanks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen2.5-VL's template: a default system turn, one turn a message, media between vision tokens.
# Qwen3-VL's has no default system turn.
_SYSTEM = (
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}" + _SYSTEM + "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEMPLATE_TEXT = "system\nYou are a helpful assistant.\nuser\nassistant\n"

VISION = {
    "depth": 4,
    "hidden_size": 128,
    "num_heads": 4,
    "intermediate_size": 256,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
}
QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "num_heads": 4,
    "intermediate_size": 384,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1, 2],
}
TEXT = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MROPE_SECTION = [4, 6, 6]  # sums to half of the head dimension, 192 / 6 / 2


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """A `tokenizers.Tokenizer` of exactly `vocab_size` tokens: byte-level BPE on `texts`, then
    SPECIAL_TOKENS as the last ids. Deterministic in `texts`.

    Raises:
        ValueError: `texts` are too short to learn that many merges from.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, _TEMPLATE_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"texts give a vocabulary of {tokenizer.get_vocab_size()} tokens, {vocab_size} are "
            "needed: pass more text"
        )
    return tokenizer


def _config(family: str, ids: dict[str, int]) -> dict[str, Any]:
    """config.json in the form of the released folders: Qwen2.5-VL's flat, Qwen3-VL's nested."""
    text: dict[str, Any] = {
        **TEXT,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": MROPE_SECTION},
        "initializer_range": 0.02,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids[IM_END],
    }
    if family.startswith("qwen3_vl"):
        rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text |= {"model_type": f"{family}_text", "head_dim": 32, "rope_scaling": rope}
        if family == "qwen3_vl_moe":
            text |= EXPERTS
        name = "Qwen3VLMoe" if family == "qwen3_vl_moe" else "Qwen3VL"
        text = {"text_config": text}
        vision = {**QWEN3_VISION, "hidden_act": "gelu_pytorch_tanh"}
    else:
        name, text = "Qwen2_5_VL", {**text, "use_sliding_window": False}
        vision = {**VISION, "hidden_act": "silu"}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": family,
        **text,
        "tie_word_embeddings": False,
        "image_token_id": ids[IMAGE_PAD],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "torch_dtype": "float32",
        "vision_config": {
            **vision,
            "model_type": family,
            "out_hidden_size": TEXT["hidden_size"],
        },
    }


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def write_folder(
    folder: Path,
    texts: Iterable[str],
    seed: int = 0,
    family: Family | Literal["qwen3_vl_moe"] = "qwen2_5_vl",
) -> Path:
    """Write the small model with random weights (float32) and its tokenizer, as the Hugging Face
    folder that `vlmtrain train --model` and transformers read; returns `folder`.

    Args:
        folder: made if missing; files of an earlier run are replaced.
        texts: what the tokenizer is trained on.
        seed: of the random weights; torch's global generator is left as it was.
        family: what kind of model.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    config, media = _config(family, ids), FAMILIES[family].media
    vision = config["vision_config"]
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = AutoConfig.for_model(family, **values)
        except ValueError as error:
            raise UserError(
                f"transformers {transformers.__version__} has no {family} ({str(error)[:60]}..); "
                "install a later one"
            ) from error
        model = AutoModelForImageTextToText.from_config(made).float()
    model.save_pretrained(folder)  # model.safetensors, under the keys of this transformers

    # The files below are those of the released folders, which every transformers reads.
    write_json(folder / "config.json", config)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = CHAT_TEMPLATE
    if not FAMILIES[family].system_prompt:
        template = template.replace(_SYSTEM, "")
    # Processors look there; in tokenizer_config.json only tokenizers do.
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "added_tokens_decoder": {
                str(ids[token]): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for token in SPECIAL_TOKENS
            },
            "clean_up_tokenization_spaces": False,
            "model_max_length": TEXT["max_position_embeddings"],
            "chat_template": template,
        },
    )
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": config["architectures"][0].replace(
                "ForConditionalGeneration", "Processor"
            ),
            "min_pixels": 56 * 56,
            "max_pixels": 28 * 28 * 1280,
            "patch_size": vision["patch_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "merge_size": vision["spatial_merge_size"],
            "image_mean": media.mean,
            "image_std": media.std,
        },
    )
    write_json(
        folder / "generation_config.json",
        {
            "do_sample": False,
            "eos_token_id": [ids[IM_END], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    return folder
