"""`vlmtrain evaluate` and `--evaluate.every`: losses against transformers (tests/parity
has every layout), training undisturbed bit for bit, the same scores after conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import free_port, run_workers
from tests.train.conftest import losses, options
from vlmtrain import cli
from vlmtrain.checkpoint import convert
from vlmtrain.checkpoint.hf.files import HFWeights
from vlmtrain.checkpoint.mapping import WeightError
from vlmtrain.checkpoint.model_folder import as_hf
from vlmtrain.core.batch import IGNORE
from vlmtrain.core.config import MediaSection, ParallelSection
from vlmtrain.data.formats.json_source import JsonSource
from vlmtrain.data.media.videos import probe_media
from vlmtrain.data.processor import Processor
from vlmtrain.evaluate.tasks import Scored, read_tasks, summary
from vlmtrain.generate.model import Answerer, Sampling, load_transformers
from vlmtrain.models.family import read_spec

# Two tensor-parallel ranks; dropout draws random numbers; adapters on the vision tower too, whose
# qkv rows lie in a checkpoint in the order of the ranks.
LORA = (
    "--train.steps=3 --loader.workers=0 --parallel.tensor=2 --lora.rank=2 --lora.dropout=0.2 "
    "--lora.vision --media.max_frames=10 --lora.targets q_proj o_proj qkv proj"
).split()
LAYOUTS = {
    "data": [],
    "multiplexed": [
        "--parallel.pipeline=2",
        "--parallel.vision=multiplexed",
        "--global_batch_packs=3",
    ],
}


@pytest.fixture(
    scope="module",
    params=[
        "qwen2_5_vl",
        pytest.param("qwen3_vl", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.slow),
    ],
)
def model(request, tiny_folders) -> Path:
    return tiny_folders(request.param)


def reference(folder: Path, data: Path) -> tuple[float, int]:
    """Loss and target tokens by a plain transformers loop, one sample at a time, in float32."""
    spec = read_spec(folder)
    processor = Processor.from_folder(folder, spec)
    plain = load_transformers(folder, torch.float32)
    total, count = 0.0, 0
    source = JsonSource(data)
    for record in source.records():
        sample = source.parse(record)
        sample = sample.with_infos([probe_media(media, sample, False) for media in sample.media])
        layouts = processor.layouts(sample)
        encoded = processor.encode(sample, layouts)
        inputs: dict[str, Any] = {}
        if layouts:
            width = spec.vision.patch_dim
            rows = [torch.empty(t * h * w, width) for t, h, w in (one.grid for one in layouts)]
            for media, out in zip(sample.media, rows, strict=True):
                processor.pixels(media, processor.frames(media, sample), out)
            inputs["pixel_values"] = torch.cat(rows)
            inputs["image_grid_thw"] = torch.tensor([one.grid for one in layouts])
        with torch.no_grad():
            logits = plain(
                input_ids=encoded.input_ids[None],
                position_ids=encoded.position_ids[:, None],
                use_cache=False,
                **inputs,
            ).logits[0]
        loss = torch.nn.functional.cross_entropy(
            logits.double(), encoded.labels, reduction="sum", ignore_index=IGNORE
        )
        total += loss.item()
        count += int((encoded.labels != IGNORE).sum())
    return total / count, count


def scores(output: Path) -> dict[str, Any]:
    """scores.json without what may differ: names and times."""
    actual = json.loads((output / "scores.json").read_text())
    actual.pop("model")
    actual.get("heldout", {}).pop("seconds", None)
    return actual


@pytest.fixture(scope="module")
def questions(conversations, tmp_path_factory) -> Path:
    """The conversations as tasks of every metric."""
    samples = json.loads(conversations.read_text())
    rows = []
    for number, sample in enumerate(samples):
        asked, right = (turn["value"] for turn in sample["conversations"])
        row = {
            "images": sample.get("image", []),
            "question": asked.replace("<image>", "").strip(),
            "answer": right,
            "metric": ("exact_match", "anls", "relaxed_accuracy", "multiple_choice")[number % 4],
            "task": f"t{number % 2}",
        }
        if row["metric"] == "multiple_choice":
            row |= {"A": right, "B": "something else", "answer": "A"}
        rows.append(row)
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def two_ranks(model, conversations, questions, tmp_path_factory) -> Path:
    """Everything that needs two processes, in one start of them."""
    folder = tmp_path_factory.mktemp("two")
    spec = read_spec(model)
    lora = [*LORA, *([] if spec.num_experts else ["up_proj", "down_proj"])]
    commands = [
        options(model, conversations, folder / "plain", *lora),
        options(
            model,
            conversations,
            folder / "watched",
            *lora,
            "--evaluate.every=2",
            f"--evaluate.data={conversations}",
        ),
    ]
    measure = ["evaluate", "--pack_length=100", "--loader.workers=0"]
    weighted = json.loads(conversations.read_text())
    for sample in weighted[::2]:  # weights of turns, which change no held-out loss
        sample["conversations"][-1]["weight"] = 2.5
    (folder / "weighted.json").write_text(json.dumps(weighted))
    for name, layout in LAYOUTS.items():
        layout = [f"--data={folder}/weighted.json", *layout]
        commands.append([*measure, f"--model={model}", f"--output={folder / name}", *layout])
    split = convert.layout_for(spec, ParallelSection(tensor=2, pipeline=2))
    convert.to_megatron(model, folder / "megatron", split)
    convert.to_hf(folder / "megatron", folder / "back")
    measure += [f"--data={conversations}"]
    newest = [f"--model={folder / 'watched' / 'checkpoints'}", f"--output={folder / 'newest'}"]
    commands.append([*measure, *newest])
    measure += [f"--tasks={questions}", "--max_new_tokens=5"]
    for number, source in enumerate((model, folder / "megatron", folder / "back")):
        output = folder / f"scores-{number}"
        commands.append([*measure, f"--model={source}", f"--output={output}"])
    ports: list[int] = []
    while len(ports) < len(commands):
        ports += {free_port()} - set(ports)
    path = folder / "commands.json"
    path.write_text(json.dumps(list(zip(ports, commands, strict=True))))
    run_workers(["-m", "tests.train.commands", str(path)], 2)
    return folder


@pytest.mark.slow
def test_sizes_of_media_go_with_the_model(two_ranks):
    """Into the checkpoint, the Hugging Face folder and the adapters, and from there on."""
    run = two_ranks / "plain"
    with as_hf(run / "adapter") as converted:
        for folder in (
            run / "checkpoints" / "step-00000003",
            run / "hf",
            run / "adapter",
            converted,
        ):
            config = json.loads((folder / "video_preprocessor_config.json").read_text())
            assert config["max_frames"] == 10, folder


@pytest.mark.slow
def test_training_goes_on_as_if_unwatched(two_ranks) -> None:
    plain, watched = two_ranks / "plain", two_ranks / "watched"
    rows = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    unwatched = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    assert losses(watched) == losses(plain)
    assert [r["grad_norm"] for r in rows] == [r["grad_norm"] for r in unwatched]
    after = load_file(watched / "hf" / "model.safetensors")
    for name, tensor in load_file(plain / "hf" / "model.safetensors").items():
        assert torch.equal(tensor, after[name]), name
    assert ["heldout_loss" in row for row in rows] == [False, True, True]  # every 2, and the end
    assert not any("heldout_loss" in row for row in unwatched)
    board = next((watched / "tensorboard").glob("events.*")).read_bytes()
    assert b"heldout/loss" in board


@pytest.mark.slow
def test_held_out_loss_is_that_of_transformers(two_ranks, model, conversations) -> None:
    """During training (merged adapters at the end) and on its own."""
    loss, targets = reference(model, conversations)
    for name in LAYOUTS:
        actual = scores(two_ranks / name)["heldout"]
        assert actual["loss"] == pytest.approx(loss, rel=1e-6), name
        assert actual["perplexity"] == pytest.approx(torch.tensor(loss).double().exp().item())
        assert (actual["target_tokens"], actual["samples"], actual["skipped"]) == (targets, 12, 0)
    watched = two_ranks / "watched"
    last = json.loads((watched / "metrics.jsonl").read_text().splitlines()[-1])
    trained, _ = reference(watched / "hf", conversations)
    assert last["heldout_loss"] == pytest.approx(trained, rel=1e-5)
    newest = json.loads((two_ranks / "newest" / "scores.json").read_text())
    assert newest["model"] == str(watched / "checkpoints" / "step-00000003")
    assert newest["heldout"]["loss"] == pytest.approx(trained, rel=1e-5)
    assert abs(trained - loss) > 1e-3


@pytest.mark.slow
def test_adapters_merge_to_what_training_wrote(two_ranks, model, tmp_path) -> None:
    """A LoRA checkpoint and an adapter folder become OUTPUT/hf, and nothing is left behind."""
    run = two_ranks / "watched"
    wanted, base = HFWeights(run / "hf"), HFWeights(model)
    for source in (run / "checkpoints", run / "adapter"):
        with as_hf(source, tmp_path) as folder:
            merged = HFWeights(folder)
            assert merged.names() == wanted.names()
            for name in merged.names():
                want, got = wanted.read(name), merged.read(name)
                # Sums of two products in another order: a few units in the last place.
                assert (got - want).abs().max() <= 1e-6 * want.abs().max(), (source, name)
                if name.endswith(("attn.qkv.weight", "self_attn.q_proj.weight", "up_proj.weight")):
                    before = base.read(name)
                    moved = (want - before).abs().max()
                    assert moved > 1e-3 * before.abs().max() or "mlp.up" in name, name
            assert (folder / "tokenizer.json").is_file()
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightError, match="LoRA adapters"):
        convert.to_megatron(
            run / "checkpoints" / "step-00000003",
            tmp_path / "m",
            convert.layout_for(read_spec(model), ParallelSection()),
        )


@pytest.mark.slow
def test_scores_survive_conversion(two_ranks, model, questions) -> None:
    """Hugging Face folder -> Megatron checkpoint -> Hugging Face folder: the same scores, bit for
    bit, and answers that do not depend on how many processes share the questions."""
    actual = []
    for number in range(3):
        output = two_ranks / f"scores-{number}"
        assert sorted(path.name for path in output.iterdir()) == ["answers.jsonl", "scores.json"]
        actual.append((scores(output), (output / "answers.jsonl").read_text()))
    assert actual[0] == actual[1] == actual[2]
    result, text = actual[0]
    assert result["heldout"] == scores(two_ranks / "data")["heldout"]
    answers = [json.loads(line)["answer"] for line in text.splitlines()]
    answerer = Answerer(model, kernels=False)
    tasks = read_tasks(questions)
    assert answers == [answerer.answer(task.sample, Sampling(5)).text for task in tasks]
    assert len(set(answers)) > 1
    assert result["tasks"] == summary(
        [Scored(task, answer) for task, answer in zip(tasks, answers, strict=True)]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--data", "--tasks"]),
        (["--tasks=none.jsonl"], ["none.jsonl"]),
        (["--tasks=<tasks>", "--loader.template=none.jinja"], ["none.jinja"]),
        (["--tasks=<tasks>", "--loader.workers=0"], ["--loader.workers is 0"]),
        (["--data=none.json"], ["none.json"]),
        (["--data=x.json", "--pack_length=0"], ["--pack_length is 0"]),
        (["--data=x.json", "--parallel.tensor=3"], ["tensor"]),
        (["--data=<data>", "--pack_length=20"], ["20", "tokens"]),
        (["--data=<data>", "--output=<data>"], ["--output", "is a file"]),
    ],
)
def test_mistakes(
    arguments, words, model, conversations, questions, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"<data>": str(conversations), "<tasks>": str(questions)}
    for name, path in names.items():
        arguments = [a.replace(name, path) for a in arguments]
    earlier = tmp_path / "evaluate_out" / "scores.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    assert cli.main(["evaluate", f"--model={model}", *arguments]) == 1
    assert earlier.read_text() == "{}"  # a run that fails takes nothing away
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    for word in words:
        assert word in error[0]


def test_samples_that_can_not_be_read_do_not_count(model, conversations, tmp_path) -> None:
    """One is missing when the data are scanned, another turns out to be cut short."""
    samples = json.loads(conversations.read_text())
    bad = [sample for sample in samples if len(sample.get("image", ())) == 1][:2]
    good = tmp_path / "good.json"
    good.write_text(json.dumps([sample for sample in samples if sample not in bad]))
    whole = Path(bad[1]["image"][0]).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) * 6 // 10])
    bad[0]["image"], bad[1]["image"] = ["missing.jpg"], [str(tmp_path / "cut.jpg")]
    data, output = tmp_path / "c.json", tmp_path / "out"
    data.write_text(json.dumps(samples))
    arguments = ["evaluate", f"--model={model}", f"--data={data}", f"--output={output}"]
    arguments += ["--pack_length=160", "--loader.workers=0", "--loader.no_verify"]
    assert cli.main([*arguments, "--loader.unreadable=skip"]) == 0
    loss, targets = reference(model, good)
    actual = scores(output)["heldout"]
    assert (actual["samples"], actual["skipped"]) == (10, 2)
    assert actual["target_tokens"] == targets
    assert actual["loss"] == pytest.approx(loss, rel=1e-6)


def test_options_of_both_kinds(model, conversations, questions, tmp_path, monkeypatch) -> None:
    """Held-out data and questions are seen with the template, system prompt and sizes asked for."""
    seen: list[dict[str, Any]] = []

    def recorded(real: Any) -> Any:
        def make(*arguments: Any, **options: Any) -> Any:
            seen.append(options)
            return real(*arguments, **options)

        return make

    from_folder = recorded(Processor.from_folder)
    monkeypatch.setattr("vlmtrain.data.processor.Processor.from_folder", from_folder)
    monkeypatch.setattr("vlmtrain.generate.model.Answerer", recorded(Answerer))
    template = tmp_path / "template.jinja"
    template.write_text((model / "chat_template.jinja").read_text() + "{# ours #}")
    asked = ["--media.max_pixels=12544", "--loader.system=Be brief.", "--precision=bf16"]
    asked += [f"--loader.template={template}", "--no_kernels"]
    asked += ["--pack_length=512", "--max_new_tokens=1", f"--output={tmp_path / 'out'}"]
    one = ["evaluate", f"--model={model}", f"--data={conversations}", f"--tasks={questions}"]
    assert cli.main([*one, *asked]) == 0
    wanted = dict(
        section=MediaSection(max_pixels=12544), system="Be brief.", template=str(template)
    )
    held_out, answerer, *_ = seen
    assert {n: held_out[n] for n in wanted} == wanted and held_out["pack_length"] == 512
    assert answerer == dict(wanted, precision="bf16", kernels=False)


def test_evaluation_needs_its_data(model, conversations, tmp_path, capsys) -> None:
    arguments = options(model, conversations, tmp_path / "run", "--evaluate.every=2")
    assert cli.main(arguments) == 1
    assert "--evaluate.data" in capsys.readouterr().err
    missing = options(model, conversations, tmp_path / "run", "--evaluate.data=none.json")
    assert cli.main(missing) == 1
    assert "none.json" in capsys.readouterr().err
