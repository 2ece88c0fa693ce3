"""Answers against transformers: the inputs it gets, and the text it would have made by itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlmtrain.core.errors import UserError
from vlmtrain.data.template import QWEN_TEMPLATE
from vlmtrain.demo.ask import Model as Plain
from vlmtrain.generate import model as generate
from vlmtrain.generate.model import Answerer, Sampling
from vlmtrain.generate.questions import answered, question, then
from vlmtrain.models.family import family_of

TOKENS = Sampling(max_new_tokens=12)


def ask(pictures: Path, prompt: str, **media: list[str]):
    return question(prompt, dict(media), media_root=pictures)


def system(answerer: Answerer) -> str:
    """The turn that the family's template puts first."""
    usual = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    return "" if answerer.spec.family.startswith("qwen3_vl") else usual


MIXED = {"images": ["a.jpg", "b.png"], "videos": ["film"]}


def test_inputs_are_transformers_own(answerer, folder, pictures) -> None:
    """Ids, pixels, grids and positions of two images, as transformers' processor makes them."""
    plain = Plain(folder)
    inputs = answerer.prepare(ask(pictures, "One <image> two <image>?", images=MIXED["images"]))
    opened = [Image.open(pictures / name) for name in MIXED["images"]]
    theirs = plain.images(images=opened, return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], theirs["pixel_values"])
    assert torch.equal(inputs["image_grid_thw"], theirs["image_grid_thw"])
    pads = [int(n) // 4 for n in theirs["image_grid_thw"].prod(1)]
    text = (
        f"{system(answerer)}<|im_start|>user\nOne "
        f"<|vision_start|>{'<|image_pad|>' * pads[0]}<|vision_end|> two "
        f"<|vision_start|>{'<|image_pad|>' * pads[1]}<|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert inputs["input_ids"][0].tolist() == plain.tokenizer(text)["input_ids"]
    positions, delta = plain.model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
    )
    ours, our_delta = answerer._rope_index(inputs["input_ids"])
    assert torch.equal(ours, positions) and torch.equal(our_delta, delta)


@pytest.mark.parametrize("names", [[], ["a.jpg"], ["a.jpg", "b.png"]], ids=len)
def test_answers_are_those_of_transformers_alone(answerer, folder, pictures, names) -> None:
    plain = Plain(folder).answer(
        "<image>" * len(names) + "What?", [pictures / name for name in names], 12
    )
    sample = ask(pictures, "What?", images=names)
    ours = answerer.answer(sample, TOKENS)
    assert ours.text == plain
    without = Answerer(folder, kernels=False).answer(sample, TOKENS)
    assert (without.text, without.ids) == (ours.text, ours.ids)
    if names:
        other = answerer.answer(ask(pictures, "What?", images=["b.png"] + names[1:]), TOKENS)
        assert other.ids != ours.ids  # it looks


def test_videos_stand_where_training_put_them(answerer, folder, pictures) -> None:
    """Greedy decoding by hand, every token from a whole forward pass with training's positions.
    Those of Qwen3-VL are transformers' own, so its generate says the same by itself."""
    sample = ask(pictures, "A <image> film <video> and <image>.", **MIXED)
    inputs = answerer.prepare(sample)
    given = answerer.answer(sample, TOKENS).ids
    film = sample.media[1]
    assert film.kind == "video" and len(film.parts) == 12
    grids = [tuple(grid) for grid in inputs["image_grid_thw"].tolist()]
    (video,) = (tuple(grid) for grid in inputs["video_grid_thw"].tolist())
    assert video[0] == 6
    ids = inputs["input_ids"][0]
    settings = answerer.processor.videos
    seconds = settings.images.temporal_patch_size / settings.fps
    for number, token in enumerate(given):
        whole = torch.cat([ids, torch.tensor(given[:number], dtype=torch.int64)])
        positions = family_of(answerer.spec).positions(
            whole,
            [grids[0], video, grids[1]],
            ["image", "video", "image"],
            answerer.spec,
            [0.0, seconds, 0.0],
        )
        with torch.no_grad():
            logits = answerer.model(
                input_ids=whole[None],
                position_ids=positions[:, None],
                pixel_values=inputs["pixel_values"],
                image_grid_thw=inputs["image_grid_thw"],
                pixel_values_videos=inputs["pixel_values_videos"],
                video_grid_thw=inputs["video_grid_thw"],
                use_cache=False,
            ).logits[0, -1]
        assert logits[token] >= logits.max() - 1e-3 * logits.std(), (number, given)
    if answerer.spec.family.startswith("qwen3_vl"):
        alone = Plain(folder).model.generate(**inputs, do_sample=False, max_new_tokens=12)
        assert tuple(alone[0, len(ids) :].tolist()) == given


def test_a_conversation_goes_on(answerer, pictures) -> None:
    """The second turn sees the first with its answer, in the template's own words."""
    first = ask(pictures, "What?", images=["a.jpg"])
    text = "A cup. <image>"
    longer = then(answered(first, text), ask(pictures, "And this?", images=["b.png"]))
    ids = answerer.prepare(longer)["input_ids"][0]
    decoded = answerer.tokenizer.decode(ids[ids != answerer.spec.image_token_id])
    assert decoded == system(answerer) + (
        "<|im_start|>user\n<|vision_start|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\nA cup. <image ><|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|vision_end|>And this?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [Path(media.parts[0].path).name for media in longer.media] == ["a.jpg", "b.png"]


@contextmanager
def saying(answerer: Answerer, text: str) -> Iterator[None]:
    """The model says this, token by token."""
    ids = iter(answerer.tokenizer(text)["input_ids"])

    def choose(module, inputs, logits):
        return torch.zeros_like(logits).index_fill(-1, torch.tensor(next(ids)), 1.0)

    handle = answerer.model.lm_head.register_forward_hook(choose)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "form",
    [
        "<|object_ref_start|>cup<|object_ref_end|><|box_start|>({},{}),({},{})<|box_end|>",
        "A cup <|box_start|>({},{}),({},{})<|box_end|> and more.\n",
        "print({}, {})\n\nprint({}, {})\n\n",
        "{} {} {} {}\n",
    ],
)
def test_a_chat_goes_on_as_it_was_taught(answerer, pictures, form) -> None:
    """An answer that the model learned word for word: printed, and put before the next question,
    as training had it."""
    said = form.format(*torch.randint(0, 1000, (4,)).tolist())
    first, second = ask(pictures, "Where?", images=["a.jpg"]), ask(pictures, "And now?")
    talk = answered(then(answered(first, said), second), "ok")
    taught = answerer.processor.encode(*answerer._sized(talk))
    pieces: list[str] = []
    with saying(answerer, said + "<|im_end|>"):
        given = answerer.answer(first, Sampling(100), pieces.append)
    assert given.finished and given.text == "".join(pieces) == said
    asked = answerer.prepare(then(answered(first, given.text), second))["input_ids"][0]
    assert torch.equal(asked, taught.input_ids[: len(asked)])


def test_vision_tokens_of_an_answer_are_left_out(answerer, pictures) -> None:
    """Only media may bring them, so with them a chat could not go on."""
    first = ask(pictures, "What?", images=["a.jpg"])
    pieces: list[str] = []
    with saying(
        answerer, "A <|vision_start|><|image_pad|><|video_pad|><|vision_end|>cup<|im_end|>"
    ):
        given = answerer.answer(first, TOKENS, pieces.append)
    assert given.text == "".join(pieces) == "A cup" and len(given.ids) > 6
    answerer.prepare(then(answered(first, given.text), ask(pictures, "And?")))


def test_text_comes_as_it_is_decided(answerer) -> None:
    """Every piece before the last token, no end mark, the pieces are the text."""
    said = "One cup of coffee.\nTwo cats."
    pieces: list[str] = []
    streamer = generate._streamer(answerer.tokenizer, answerer._silent, pieces.append)
    streamer.put(torch.zeros(1, 3, dtype=torch.int64))  # the prompt
    ids = answerer.tokenizer(said + "<|im_end|>")["input_ids"]
    for number, token in enumerate(ids):
        streamer.put(torch.tensor([token]))
        if number == len(ids) // 2:
            assert pieces and said.startswith("".join(pieces))
    streamer.end()
    assert "".join(pieces) == said and len(pieces) >= 5


def test_streamed_text_is_the_answer(answerer, pictures) -> None:
    pieces: list[str] = []
    given = answerer.answer(ask(pictures, "What?", images=["a.jpg"]), TOKENS, pieces.append)
    assert "".join(pieces) == given.text
    assert not given.finished and len(given.ids) == 12


def test_settings_of_the_folder_are_not_taken(answerer, folder, pictures, tmp_path) -> None:
    """What the command has no option for: beams, strings that end an answer, a least length."""
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    path = copied / "generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings |= {"num_beams": 3, "stop_strings": ["a"], "min_new_tokens": 9, "do_sample": True}
    path.write_text(json.dumps(settings))
    pieces: list[str] = []
    sample = ask(pictures, "What?", images=["a.jpg"])
    given = Answerer(copied).answer(sample, TOKENS, pieces.append)
    assert given == answerer.answer(sample, TOKENS) and "".join(pieces) == given.text


def test_an_answer_ends_with_the_template(answerer, pictures) -> None:
    """The end mark of the chat template ends an answer even if the folder does not say so."""
    end = answerer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generate._ends(None, answerer.tokenizer) == [end]
    assert generate._ends([3, 5], answerer.tokenizer) == sorted({3, 5, end})
    head = answerer.model.lm_head.weight
    kept = head.detach().clone()
    with torch.no_grad():  # every word loses against the end mark
        head.zero_()
        bias = torch.zeros(head.shape[0])
        bias[end] = 1.0
    handle = answerer.model.lm_head.register_forward_hook(lambda m, i, out: out + bias)
    try:
        given = answerer.answer(ask(pictures, "What?"), TOKENS)
    finally:
        handle.remove()
        with torch.no_grad():
            head.copy_(kept)
    assert given.ids == (end,) and given.finished and given.text == ""


def test_drawing_depends_on_the_seed_alone(answerer, pictures) -> None:
    sample = ask(pictures, "What?", images=["a.jpg"])
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(answerer.answer(sample, Sampling(12, temperature=1.5, top_p=0.95)).ids)
    assert drawn[0] == drawn[1] != drawn[2]
    cold = answerer.answer(sample, Sampling(12, temperature=1e-4)).ids
    assert cold == answerer.answer(sample, TOKENS).ids


def test_what_tokens_are_drawn_from(answerer, monkeypatch) -> None:
    """All of the vocabulary by the softmax at the temperature, or the likeliest that hold top_p."""
    draw, drawn_from = torch.multinomial, []

    def record(chances, **options):
        drawn_from.append(chances)
        return draw(chances, **options)

    monkeypatch.setattr(torch, "multinomial", record)
    logits = 2 * torch.randn(answerer.model.lm_head.weight.shape[0])
    handle = answerer.model.lm_head.register_forward_hook(lambda m, i, out: logits.expand_as(out))
    temperature = 0.5 + float(torch.rand(()))
    try:
        for top_p in (1.0, 0.6):
            answerer.answer(question("Hi"), Sampling(1, temperature, top_p))
    finally:
        handle.remove()
    whole = (logits / temperature).softmax(0)
    likely, order = whole.sort(descending=True)
    before = likely.double().cumsum(0) - likely
    part = torch.zeros_like(whole).index_copy(0, order, torch.where(before < 0.6, likely, 0.0))
    for got, want in zip(drawn_from, (whole, part / part.sum()), strict=True):
        # logits below 32, rounded twice: their exponentials are off by 2 * 32 * 2^-24 at most
        torch.testing.assert_close(got[0], want, rtol=1e-5, atol=0)


def test_repetition_penalty(answerer, folder) -> None:
    """transformers' own; below 1 it repeats, which changes what is said."""
    sample = question("What?")
    given = answerer.answer(sample, Sampling(12, repetition_penalty=0.5)).ids
    options = dict(do_sample=False, max_new_tokens=12, repetition_penalty=0.5)
    inputs = answerer.prepare(sample)
    alone = Plain(folder).model.generate(**inputs, **options)
    assert given == tuple(alone[0, inputs["input_ids"].shape[1] :].tolist())
    assert given != answerer.answer(sample, TOKENS).ids


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (Sampling(max_new_tokens=0), "--max_new_tokens is 0"),
        (Sampling(temperature=-1.0), "--temperature is -1.0"),
        (Sampling(top_p=0.0), "--top_p is 0.0"),
        (Sampling(repetition_penalty=0.0), "--repetition_penalty is 0.0"),
    ],
)
def test_impossible_sampling(sampling, word) -> None:
    with pytest.raises(UserError, match=word):
        sampling.check()


def test_bf16_rounds_weights_and_nothing_else(answerer, folder, pictures) -> None:
    half = Answerer(folder, precision="bf16")
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    frequencies = dict(answerer.model.named_buffers())
    for name, buffer in half.model.named_buffers():
        assert torch.equal(buffer, frequencies[name]), name
    given = half.answer(ask(pictures, "What?", images=["a.jpg"]), TOKENS)
    assert len(given.ids) == 12


def test_a_template_and_a_system_prompt_of_ones_own(folder, tmp_path) -> None:
    """As training's: asked in the form that the options say."""
    file = tmp_path / "own.jinja"
    file.write_text(QWEN_TEMPLATE.replace("<|im_end|>", "!<|im_end|>"))
    own = Answerer(folder, template=file, system="Be brief.")
    ids = own.prepare(question("Hi"))["input_ids"][0]
    assert own.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.!<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_damaged_folder_is_one_sentence(folder, tmp_path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config.get("text_config", config)["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="missing_keys"):
        Answerer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="transformers can't load it"):
        Answerer(tmp_path)
