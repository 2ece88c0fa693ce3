"""The demo's parts, without its training: photographs, conversations, tokenizer, model, picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmtrain.core.config import ParallelSection
from vlmtrain.core.errors import UserError
from vlmtrain.data.template import ChatTemplate
from vlmtrain.demo import command, photographs, picture, tiny_model
from vlmtrain.demo.ask import MARK, Answer, Model
from vlmtrain.models.family import read_spec

SAMPLES = photographs.read_conversations()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    photographs.export(folder)
    return folder


# --- photographs and conversations -------------------------------------------------------------


def test_photographs_are_small_and_show_what_the_wheel_has(exported: Path) -> None:
    assert len(photographs.PHOTOGRAPHS) >= 12
    for photograph in photographs.PHOTOGRAPHS:
        with Image.open(exported / f"{photograph.name}.jpg") as small:
            assert small.mode == "RGB"
            assert max(small.size) == photographs.LONG_SIDE
            colors = small.resize((4, 4), Image.Resampling.BOX).tobytes()
        with Image.open(photograph.path()) as original:
            reference = original.convert("RGB").resize((4, 4), Image.Resampling.BOX).tobytes()
        # JPEG and Lanczos move the mean of a sixteenth of the picture by little.
        assert max(abs(a - b) for a, b in zip(colors, reference, strict=True)) <= 8


def test_missing_package_is_named() -> None:
    photograph = photographs.Photograph("x", "no_such_package_here", "no-such-wheel", "x.png")
    with pytest.raises(UserError, match="pip install no-such-wheel"):
        photograph.path()
    photograph = replace(photographs.PHOTOGRAPHS[0], file="data/no_such_file.png")
    with pytest.raises(UserError, match=r"no_such_file\.png is missing"):
        photograph.path()


def test_conversations_are_complete() -> None:
    known = {f"{photograph.name}.jpg" for photograph in photographs.PHOTOGRAPHS}
    questions: dict[str, set[str]] = {name: set() for name in known}
    for sample in SAMPLES:
        human, gpt = sample["conversations"]
        assert (human["from"], gpt["from"]) == ("human", "gpt")
        names = photographs.image_names(sample)
        assert set(names) <= known
        assert human["value"].count(MARK) == len(names)
        assert MARK not in gpt["value"]
        assert 3 <= len(gpt["value"].split()) <= 12
        if len(names) == 1:
            questions[names[0]].add(human["value"])
    assert all(len(asked) == 2 for asked in questions.values()), questions
    assert any(len(photographs.image_names(sample)) == 2 for sample in SAMPLES)
    assert any(not photographs.image_names(sample) for sample in SAMPLES)
    assert len({sample["id"] for sample in SAMPLES}) == len(SAMPLES)


def test_most_questions_can_be_answered_only_by_looking() -> None:
    """Every answer is its own, and the same question is asked about several photographs."""
    answers = [sample["conversations"][1]["value"] for sample in SAMPLES]
    asked = [sample["conversations"][0]["value"] for sample in SAMPLES]
    assert len(set(answers)) == len(answers)
    shared = sum(asked.count(question) > 1 for question in asked)
    assert shared > 0.75 * len(SAMPLES)


# --- tokenizer and model -----------------------------------------------------------------------


def test_tokenizer_round_trips_and_agrees_with_config(tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    texts = [turn["value"] for sample in SAMPLES for turn in sample["conversations"]]
    for text in [*texts, "Grüße, 你好 \U0001f600 3.14\n\n  x"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((tiny_folder / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    for key, token in {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "eos_token_id": "<|im_end|>",
    }.items():
        assert tokenizer.convert_tokens_to_ids(token) == config[key]
        assert tokenizer.encode(token) == [config[key]]
    # The file itself, without transformers, cuts text in the same way.
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    assert [plain.encode(text).ids for text in texts] == [tokenizer.encode(text) for text in texts]


def test_chat_template_is_qwens(tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    text = AutoTokenizer.from_pretrained(tiny_folder).apply_chat_template(
        [{"role": "user", "content": content}, {"role": "assistant", "content": "This."}],
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\nThis.<|im_end|>\n"
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_one_chat_template_for_all_readers(
    family: str, tiny_folders: Callable[[str], Path]
) -> None:
    """transformers' processor, its tokenizer, and our own training."""
    from transformers import AutoTokenizer, ProcessorMixin

    folder = tiny_folders(family)
    processor, _ = ProcessorMixin.get_processor_dict(folder)
    ours = ChatTemplate.from_folder(folder, read_spec(folder)).template
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert processor["chat_template"] == config["chat_template"] == ours
    assert AutoTokenizer.from_pretrained(folder).chat_template == ours


def test_too_little_text_for_the_tokenizer() -> None:
    with pytest.raises(ValueError, match=rf"{tiny_model.VOCAB_SIZE} are needed"):
        tiny_model.train_tokenizer(["a b"])


def test_model_folder_is_what_the_demo_promises(tiny_folder: Path) -> None:
    spec = read_spec(tiny_folder)
    assert spec.family == "qwen2_5_vl"
    windowed = set(range(spec.vision.depth)) - set(spec.vision.full_attention_layers)
    assert windowed and spec.vision.full_attention_layers
    assert spec.vision.window_size is not None
    assert photographs.LONG_SIDE > spec.vision.window_size
    assert spec.num_kv_heads < spec.num_heads


def test_folder_of_qwen3_vl(tiny_folders: Callable[[str], Path], exported: Path) -> None:
    folder = tiny_folders("qwen3_vl")
    spec = read_spec(folder)
    assert spec.family == "qwen3_vl" and spec.vision.deepstack_layers == (0, 1, 2)
    assert (spec.vision.patch_size, spec.qk_norm, spec.interleaved_mrope) == (16, True, True)
    model = Model(folder)
    assert tuple(model.images.image_mean) == (0.5,) * 3
    assert "helpful" not in model.tokenizer.chat_template
    assert isinstance(model.answer("<image>What?", [exported / "coffee.jpg"], 2), str)


def test_seed_decides_the_weights(tiny_folder: Path, tmp_path: Path) -> None:
    texts = command.training_texts()
    weights = [
        (tiny_model.write_folder(tmp_path / name, texts, seed) / "model.safetensors").read_bytes()
        for name, seed in (("again", 0), ("other", 1))
    ]
    assert weights[0] == (tiny_folder / "model.safetensors").read_bytes()
    assert weights[1] != weights[0]


# --- asking, the picture, the verdict ----------------------------------------------------------


def test_model_answers_with_all_kinds_of_questions(tiny_folder: Path, exported: Path) -> None:
    """Random weights: what is checked is that photographs and marks reach the model."""
    model = Model(tiny_folder)
    one = model.answer("<image>\nWhat?", [exported / "coffee.jpg"], max_new_tokens=4)
    two = model.answer(
        "<image>\n<image>\nWhat?",
        [exported / "coffee.jpg", exported / "rocket.jpg"],
        max_new_tokens=4,
    )
    none = model.answer("What?", [], max_new_tokens=4)
    assert all(isinstance(text, str) for text in (one, two, none))
    with pytest.raises(ValueError, match="zip"):
        model.answer("<image>What?", [exported / "coffee.jpg", exported / "rocket.jpg"])


def test_weights_with_a_missing_key_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop(next(key for key in weights if "visual" in key))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing_keys"):
        Model(tmp_path)


def _answers(wrong: int) -> list[Answer]:
    answers = []
    for number, sample in enumerate(SAMPLES):
        question, expected = (turn["value"] for turn in sample["conversations"])
        question = question.replace(MARK, "").strip()
        given = "" if number < wrong else expected
        names = tuple(photographs.image_names(sample))
        answers.append(Answer(sample["id"], names, question, expected, given))
    return answers


def test_picture_is_drawn_with_right_and_wrong_answers(exported: Path, tmp_path: Path) -> None:
    metrics = [{"step": float(step), "loss": 6.0 * 0.9**step} for step in range(1, 50)]
    path = picture.draw(
        tmp_path / "demo.png",
        exported,
        _answers(3),
        metrics,
        model="Qwen3-VL",
        parameters=3_000_000,
        processes=2,
        training_seconds=60.0,
    )
    with Image.open(path) as drawn:
        pixels = np.asarray(drawn.convert("RGB"))
    assert pixels.shape[0] > 1000 and pixels.shape[1] > 1500
    for color in (picture.RIGHT, picture.WRONG, picture.ACCENT):
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(-1).sum() > 20, color


def test_lines_fit_into_their_room() -> None:
    text = "What colour is the most striking thing here, and which extraordinarily long word?"
    lines = picture._wrap(text, 2.0, 12.0, "bold")
    assert " ".join(lines) == text and len(lines) > 3
    assert picture._wrap(text, 100.0, 12.0, "bold") == [text]


def test_verdict_needs_ninety_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allowed = len(SAMPLES) // 10
    assert command._verdict(_answers(allowed), tmp_path, 1.0) == 0
    assert command._verdict(_answers(allowed + 1), tmp_path, 1.0) == 1
    assert "90% are needed" in capsys.readouterr().err


def test_demo_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    keep = tmp_path / "photographs" / "mine.jpg"
    keep.parent.mkdir()
    keep.write_bytes(b"mine")
    with pytest.raises(UserError, match="no demo has left there"):
        command.demo(tmp_path)
    assert keep.read_bytes() == b"mine"
    with pytest.raises(UserError, match="is a file"):
        command.demo(keep)
    with pytest.raises(UserError, match="mine.jpg/demo can't be written: Not a directory"):
        command.demo(keep / "demo")


def test_training_command_is_the_documented_one(tmp_path: Path) -> None:
    layout = command.layout_options(2, ParallelSection())
    arguments = command.train_command(tmp_path / "m", tmp_path / "d", tmp_path / "o", 2, layout)
    options = dict(zip(arguments[4::2], arguments[5::2], strict=True))
    assert arguments[1:4] == ["-m", "vlmtrain.cli", "train"]
    assert options["--nproc"] == options["--parallel.pipeline"] == "2"
    assert options["--train.steps"] == "150"


def test_layout_of_the_demo() -> None:
    assert command.layout_options(2, ParallelSection()) == ["--parallel.pipeline", "2"]
    assert command.layout_options(2, ParallelSection(vision="multiplexed")) == [
        *("--parallel.pipeline", "2"),
        *("--parallel.vision", "multiplexed"),
    ]
    given = ParallelSection(tensor=2, sequence=True, text_layers=(1, 3), vision_layers="auto")
    assert command.layout_options(4, given) == [
        *("--parallel.tensor", "2", "--parallel.sequence"),
        *("--parallel.vision_layers", "auto", "--parallel.text_layers", "1", "3"),
    ]


def test_failing_training_is_a_sentence() -> None:
    import sys

    with pytest.raises(UserError, match="exit status 3"):
        command._train([sys.executable, "-c", "raise SystemExit(3)"])
