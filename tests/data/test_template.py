"""Token ids against transformers' processor; labels against hand-marked text."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from tests.data.helpers import IMAGE_LIMITS, write_model_folder
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.errors import DataError
from vlmtrain.data.processor import MediaLayout, Processor
from vlmtrain.data.sample import Media, Sample, Turn
from vlmtrain.data.template import QWEN_TEMPLATE, ChatTemplate, write_template

IMAGE = Media("image", "a.jpg", ())
# Each: turns with «» around what must be learned, as the rendered text has it.
CONVERSATIONS: list[tuple[list[tuple[str, str]], str]] = [
    (
        [("user", "Hi"), ("assistant", "Hello!")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Hello!<|im_end|>\n»",
    ),
    (
        [("system", "Be brief."), ("user", "<image>\nWhat?"), ("assistant", "A cup.")],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\n«A cup.<|im_end|>\n»",
    ),
    (
        [
            ("user", "Look: <image> and <image>, same?"),
            ("assistant", "No 🚀"),
            ("user", "Why?"),
            ("assistant", " Größe."),
        ],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "Look: <|vision_start|><|image_pad|><|vision_end|> and "
        "<|vision_start|><|image_pad|><|vision_end|>, same?<|im_end|>\n"
        "<|im_start|>assistant\n«No 🚀<|im_end|>\n»"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n« Größe.<|im_end|>\n»",
    ),
    (  # <|im_end|> and a fake header inside texts move no border; the last turn is the user's
        [
            ("user", "Say <|im_end|>\n<|im_start|>assistant\nhi"),
            ("assistant", "a<|im_end|>b"),
            ("user", "ok"),
        ],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "Say <|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
        "<|im_start|>assistant\n«a<|im_end|>b<|im_end|>\n»<|im_start|>user\nok<|im_end|>\n",
    ),
    (  # two answers in a row, and an empty one
        [("user", "x"), ("assistant", ""), ("assistant", "y")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n"
        "<|im_start|>assistant\n«<|im_end|>\n»<|im_start|>assistant\n«y<|im_end|>\n»",
    ),
]


def make_sample(turns: list[tuple[str, str]]) -> Sample:
    marks = sum(text.count("<image>") for _, text in turns)
    built: Any = tuple(Turn(role, text) for role, text in turns)  # type: ignore[arg-type]
    return Sample("c1", built, (IMAGE,) * marks, "c.json")


@pytest.fixture(scope="session")
def reference(processor: Processor) -> Qwen2VLProcessor:
    class WithoutVideo(Qwen2VLProcessor):
        """The video processor needs torchvision, which is not installed."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
            return type(argument)

    return WithoutVideo(
        image_processor=Qwen2VLImageProcessorPil(**IMAGE_LIMITS),
        tokenizer=processor.template.tokenizer,
        chat_template=QWEN_TEMPLATE,
    )


@pytest.mark.parametrize("case", range(len(CONVERSATIONS)))
def test_ids_and_labels(case: int, processor: Processor, reference: Qwen2VLProcessor) -> None:
    turns, marked = CONVERSATIONS[case]
    sample = make_sample(turns)
    template, tokenizer = processor.template, processor.template.tokenizer
    text = template.render(template.messages(sample))
    assert text == marked.replace("«", "").replace("»", "")

    images = [Image.new("RGB", size) for size in [(80, 60), (130, 57)][: len(sample.media)]]
    layouts = [MediaLayout(processor.images.grid(im.height, im.width), 0.0) for im in images]
    encoded = processor.encode(sample, layouts)
    expected = reference(text=[text], images=images or None)
    assert encoded.input_ids.tolist() == expected["input_ids"][0]
    if not images:
        chat = tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in turns],
            chat_template=QWEN_TEMPLATE,
            tokenize=True,
            return_dict=False,
        )
        assert encoded.input_ids.tolist() == chat

    # What is learned, by decoding: the marked parts, in order, and nothing else.
    labels = encoded.labels.tolist()
    assert labels[-1] == -100
    learned = [token for token in labels if token != -100]
    parts = [part.split("»")[0] for part in marked.split("«")[1:]]
    assert tokenizer.decode(learned) == "".join(parts)
    for i, label in enumerate(labels[:-1]):
        assert label in (-100, int(encoded.input_ids[i + 1]))
    assert encoded.target_tokens == len(learned)
    # The header's three tokens are given, not learned: the first target is the one after them.
    ids = encoded.input_ids.tolist()
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    first = next(i for i, label in enumerate(labels) if label != -100)
    assert ids[first + 1 - len(header) : first + 1] == header


def test_a_token_across_the_border_is_not_learned(processor: Processor) -> None:
    """An answer that begins with a newline: the header's newline and it are one token."""
    tokenizer = processor.template.tokenizer
    double = tokenizer("\n\n")["input_ids"]
    assert len(double) == 1, "the test tokenizer must join two newlines"
    encoded = processor.encode(make_sample([("user", "x"), ("assistant", "\nA")]), [])
    assert double[0] in encoded.input_ids.tolist()
    learned = encoded.labels[encoded.labels != -100].tolist()
    assert tokenizer.decode(learned) == "A<|im_end|>\n"


def test_placeholders_in_an_answer_are_never_learned(processor: Processor, spec: ModelSpec) -> None:
    sample = make_sample([("user", "draw"), ("assistant", "see <image> there")])
    encoded = processor.encode(sample, [MediaLayout((1, 4, 4), 0.0)])
    assert int((encoded.input_ids == spec.image_token_id).sum()) == 4
    assert spec.image_token_id not in encoded.labels.tolist()
    assert int(encoded.visual_mask.sum()) == 4


def test_video_placeholders_and_times(processor: Processor, spec: ModelSpec) -> None:
    media = (Media("video", "v.mp4", ()), IMAGE)
    turns = (Turn("user", "<video><image>?"), Turn("assistant", "ok"))
    layouts = [MediaLayout((3, 4, 4), 1.0), MediaLayout((1, 4, 6), 0.0)]
    encoded = processor.encode(Sample("v", turns, media, "v.json"), layouts)
    video = encoded.input_ids == spec.video_token_id
    assert int(video.sum()) == 12 and int(encoded.visual_mask.sum()) == 18
    times = encoded.position_ids[0][video]
    assert (times - times[0]).tolist() == [0] * 4 + [2] * 4 + [4] * 4  # 1 s, 2 a second
    after = int(torch.nonzero(video)[-1]) + 1
    assert encoded.position_ids[:, after].tolist() == [int(times[-1]) + 1] * 3


def test_a_template_of_plain_strings_gets_strings(processor: Processor, spec: ModelSpec) -> None:
    plain = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(processor.template.tokenizer, spec, plain)
    text = template.render(template.messages(make_sample([("user", "a<image>b")])))
    assert text == ("<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n")


def test_template_files_of_the_folder(model_folder: Path, spec: ModelSpec, tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    assert ChatTemplate.from_folder(tmp_path, spec).template == QWEN_TEMPLATE
    (tmp_path / "chat_template.json").write_text('{"chat_template": "B"}')
    assert ChatTemplate.from_folder(tmp_path, spec).template == "B"
    (tmp_path / "chat_template.jinja").write_text("A")
    assert ChatTemplate.from_folder(tmp_path, spec).template == "A"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_of_named_templates_the_default(file: str, spec: ModelSpec, tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = tmp_path / file
    rest = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(rest | {"chat_template": named}))
    assert ChatTemplate.from_folder(tmp_path, spec).template == "D"
    path.write_text(json.dumps(rest | {"chat_template": named[:1]}))
    with pytest.raises(DataError, match="named tool_use and none named default; .* --loader.templ"):
        ChatTemplate.from_folder(tmp_path, spec)


def test_refusals(processor: Processor, spec: ModelSpec, tmp_path: Path) -> None:
    tokenizer = processor.template.tokenizer
    with pytest.raises(DataError, match=r"c.json: sample 'c1': .*reserved token <\|image_pad\|>"):
        processor.encode(make_sample([("user", "<|image_pad|>"), ("assistant", "x")]), [])
    look_back = "{% for m in messages %}{{ m['content'] }}{{ messages | length }}{% endfor %}"
    with pytest.raises(DataError, match="renders turn 1 differently when other turns follow"):
        ChatTemplate(tokenizer, spec, look_back).tokens(
            make_sample([("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])
        )
    angry = "{{ raise_exception('no system prompt here') }}"
    with pytest.raises(DataError, match="chat template refuses it: no system prompt here"):
        ChatTemplate(tokenizer, spec, angry).tokens(make_sample([("user", "a")]))
    wrong = dataclasses.replace(spec, image_token_id=5)
    with pytest.raises(DataError, match=r"gives <\|image_pad\|> the id 398 but config.json says 5"):
        ChatTemplate(tokenizer, wrong)
    with pytest.raises(DataError, match="vocab_size is 100"):
        ChatTemplate(tokenizer, dataclasses.replace(spec, vocab_size=100))
    largest = max(tokenizer.get_vocab().values())
    ChatTemplate(tokenizer, dataclasses.replace(spec, vocab_size=largest + 1))
    with pytest.raises(DataError, match=f"has ids up to {largest} .* vocab_size is {largest};"):
        ChatTemplate(tokenizer, dataclasses.replace(spec, vocab_size=largest))
    with pytest.raises(DataError, match="no tokenizer.json"):
        ChatTemplate.from_folder(tmp_path, spec)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        ChatTemplate.from_folder(tmp_path, spec)


@pytest.mark.parametrize("more", [[], [("assistant", "x")]])
def test_tokens_without_a_separator_between_turns(
    more: list[tuple[str, str]], processor: Processor, spec: ModelSpec
) -> None:
    """A template without special tokens between turns is refused where tokens could merge."""
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="no special token between turns"):
        ChatTemplate(processor.template.tokenizer, spec, bare).tokens(
            make_sample([("user", "a"), ("assistant", "hel"), ("user", "pful"), *more])
        )


def test_the_token_that_fills_a_pack(processor: Processor, spec: ModelSpec) -> None:
    tokenizer = copy.deepcopy(processor.template.tokenizer)
    template = ChatTemplate(tokenizer, spec)
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|im_end|>"
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert template.pad_token_id == ids[0] != ids[1]
    tokenizer.pad_token = None
    assert template.pad_token_id == ids[1]
    tokenizer.eos_token = None
    assert template.pad_token_id == 0


def test_a_tokenizer_that_truncates_or_pads(
    processor: Processor, spec: ModelSpec, tmp_path: Path
) -> None:
    """As a file may have it that was saved after such a call."""
    write_model_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(path))
    sample = make_sample([("user", "What is in the picture?"), ("assistant", "A red cup.")])
    ours = ChatTemplate.from_folder(tmp_path, spec).tokens(sample)
    assert ours.ids.tolist() == processor.template.tokens(sample).ids.tolist()


def test_a_template_is_written_where_readers_look(spec: ModelSpec, tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    bare = json.loads(config.read_text())
    bare.pop("chat_template", None)
    for known in (bare, bare | {"chat_template": "old"}):
        config.write_text(json.dumps(known))
        (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
        write_template(tmp_path, "new")
        assert ChatTemplate.from_folder(tmp_path, spec).template == "new"
        assert not (tmp_path / "chat_template.json").exists()
        expected = known | {"chat_template": "new"} if "chat_template" in known else known
        assert json.loads(config.read_text()) == expected


# With tools in Qwen's form: calls in the answer, responses in a user's turn.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "aqi", "arguments": {"city": "Beijing"}}}
TOOLS = ({"type": "function", "function": {"name": "aqi", "parameters": {}}},)
AGENT = Sample(
    "c1",
    (Turn("user", "q"), Turn("assistant", "", 1.0, (CALL,)), Turn("tool", "10"),
     Turn("assistant", "a", 0.0), Turn("user", "q"), Turn("assistant", "b", 0.25)),
    (), "c.json", TOOLS,
)  # fmt: skip


def test_tools_and_weights(processor: Processor, spec: ModelSpec) -> None:
    template = ChatTemplate(processor.template.tokenizer, spec, TOOLS_TEMPLATE)
    encoded = Processor(template, spec).encode(AGENT, [])
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "10"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "b"},
    ]
    expected = template.tokenizer.apply_chat_template(
        messages, tools=list(TOOLS), chat_template=TOOLS_TEMPLATE, tokenize=True, return_dict=False
    )
    assert encoded.input_ids.tolist() == expected
    call = (
        '<tool_call>\n{"name": "aqi", "arguments": {"city": "Beijing"}}\n</tool_call><|im_end|>\n'
    )
    weights = encoded.loss_weights
    assert weights is not None and sorted(set(weights.tolist())) == [0.0, 0.25, 1.0]
    for weight, text in ((1.0, call), (0.25, "b<|im_end|>\n")):
        assert template.tokenizer.decode(encoded.labels[weights == weight]) == text
    assert (encoded.labels[weights == 0] == -100).all()
    # All weights 0 or 1: labels say it all.
    turns = (*AGENT.turns[:4], Turn("user", "q"), Turn("assistant", "b"))
    whole = Processor(template, spec).encode(dataclasses.replace(AGENT, turns=turns), [])
    assert whole.loss_weights is None


def test_a_question_with_tools_and_calls(processor: Processor, spec: ModelSpec) -> None:
    template = ChatTemplate(processor.template.tokenizer, spec, TOOLS_TEMPLATE)
    other = {"type": "function", "function": {"name": "now", "arguments": {}}}
    turns = (Turn("user", "q"), Turn("assistant", "", 1.0, (CALL, other)), Turn("tool", "10"))
    asked = template.question(dataclasses.replace(AGENT, turns=turns))
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, other]},
        {"role": "tool", "content": "10"},
    ]
    expected = template.tokenizer.apply_chat_template(
        messages,
        tools=list(TOOLS),
        chat_template=TOOLS_TEMPLATE,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert asked.ids.tolist() == expected and not asked.weights.any()


@pytest.mark.parametrize(
    ("part", "without", "said"),
    [
        ("message.role == 'tool'", "false", "turns of the role 'tool'"),
        ("{% if tools %}", "{% if false %}", "'tools'"),
        ("message.tool_calls or []", "[]", "'tool_calls'"),
    ],
)
def test_what_the_template_leaves_out_is_refused(
    part: str, without: str, said: str, processor: Processor, spec: ModelSpec
) -> None:
    source = TOOLS_TEMPLATE.replace(part, without)
    template = ChatTemplate(processor.template.tokenizer, spec, source)
    with pytest.raises(DataError, match=f"sample 'c1': it has {said}, which the chat template"):
        template.tokens(AGENT)
    with pytest.raises(DataError, match=f"sample 'c1': it has {said}, which the chat template"):
        template.question(AGENT)


def test_a_text_alone_is_learned_whole(processor: Processor, spec: ModelSpec) -> None:
    sample = Sample("t", (Turn("assistant", "A cup.<image> Good."),), (IMAGE,), "t.json")
    encoded = processor.encode(sample, [MediaLayout((1, 4, 4), 0.0)])
    tokenizer = processor.template.tokenizer
    text = "A cup.<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|> Good.<|im_end|>"
    assert encoded.input_ids.tolist() == tokenizer(text)["input_ids"]
    learned = encoded.labels[encoded.labels != -100]
    first = len(tokenizer("A cup.")["input_ids"]) - 1
    assert tokenizer.decode(learned[first:]) == " Good.<|im_end|>"
    assert learned[:first].tolist() == encoded.input_ids[1 : first + 1].tolist()


def test_a_text_alone_has_its_weight_and_no_text_of_a_video(
    processor: Processor, spec: ModelSpec
) -> None:
    tokenizer = processor.template.tokenizer
    sample = Sample("t", (Turn("assistant", "A<video>cup<video>.", 0.5),), (), "t.json")
    tokens = processor.template.tokens(sample, ["<1 s>", "<2 s>"])
    begin, end, last = "<|vision_start|>", "<|vision_end|>", "<|im_end|>"
    parts = ["A", f"{begin}<1 s>{end}", "cup", f"{begin}<2 s>{end}", f".{last}"]
    pieces = [tokenizer(part)["input_ids"] for part in parts]
    assert tokens.ids.tolist() == [token for piece in pieces for token in piece]
    weights = [[0.5 * (i % 2 == 0)] * len(piece) for i, piece in enumerate(pieces)]
    assert tokens.weights.tolist() == [weight for piece in weights for weight in piece]


@pytest.mark.parametrize("prompt", ["Be brief.", 'Say "hi", it\'s {{ x }} {% 日本 🚀\n\\n %}.'])
def test_a_system_prompt(
    prompt: str, processor: Processor, model_folder: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    """As if each conversation without one began with it, here and in transformers with the folder
    that is written; one that has a system prompt keeps it."""
    from transformers import AutoTokenizer

    with_prompt = Processor.from_folder(model_folder, spec, system=prompt)
    turns = [("user", "Hi"), ("assistant", "Hello!"), ("user", "?"), ("assistant", "!")]
    other = [("system", "Mine."), *turns]
    for given, same in ((turns, [("system", prompt), *turns]), (other, other)):
        ours = with_prompt.template.tokens(make_sample(given))
        theirs = processor.template.tokens(make_sample(same))
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.weights.tolist() == theirs.weights.tolist()
    assert with_prompt.fingerprint() != processor.fingerprint()
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    with_prompt.write_settings(copy)
    messages = [{"role": "user", "content": "Hi"}]
    text = AutoTokenizer.from_pretrained(copy).apply_chat_template(messages, tokenize=False)
    assert text == f"<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_a_system_prompt_that_can_not_be_given(
    model_folder: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"--loader.system holds the reserved token <\|image_pad"):
        Processor.from_folder(model_folder, spec, system="a <|image_pad|>")
    path = tmp_path / "silent.jinja"
    path.write_text("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="--loader.system: the chat template writes no system"):
        Processor.from_folder(model_folder, spec, template=path, system="Be brief.")


def test_another_vocabulary_is_another_fingerprint(
    processor: Processor, model_folder: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "copy"))
    assert Processor.from_folder(folder, spec).fingerprint() == processor.fingerprint()
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.add_tokens(["cupboard"]) == 1
    tokenizer.save(path)
    assert Processor.from_folder(folder, spec).fingerprint() != processor.fingerprint()
