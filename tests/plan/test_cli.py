"""`vlmtrain plan` as a user meets it: files, refusals, and the documented examples."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.helpers import save_image
from tests.released import released_config, released_spec
from vlmtrain import cli
from vlmtrain.core import config as configuration
from vlmtrain.core.config import FreezeSection, LoaderSection, LoraSection, MediaSection
from vlmtrain.core.errors import UserError, shown
from vlmtrain.data.index import scan_data
from vlmtrain.data.packing.sampler import Position, Sampler
from vlmtrain.data.processor import Processor
from vlmtrain.models import flops
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import make_layout, section_layout
from vlmtrain.plan import hardware, schedule, workload
from vlmtrain.plan.command import compact, plan, to_toml
from vlmtrain.plan.heaviest import Loads, fullest
from vlmtrain.plan.search import search


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2-vl-72b")
    (folder / "config.json").write_text(json.dumps(released_config("qwen2_vl-72b")))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2-vl-2b")
    (folder / "config.json").write_text(json.dumps(released_config("qwen2_vl-2b")))
    return folder


@pytest.mark.slow
def test_72b_on_256_h100(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    assert plan(large, 256, "h100", output=tmp_path) == 0
    assert time.process_time() - start < 60  # no search that explodes
    text = capsys.readouterr().out
    assert "Qwen2-VL (73.4B) on 256 x h100" in text
    rows = re.findall(r"^\d[ *] +([\d.]+) +([\d,]+) +([\d.]+)% +(\d+)%", text, re.M)
    assert len(rows) == 5
    seconds = [float(row[0]) for row in rows]
    assert seconds == sorted(seconds)
    assert text.count("*") >= 2  # the fastest row, and the note about it

    # the recipe is one that training accepts
    blank = configuration.TrainConfig(model=Path(), data="d.json", output=Path("out"))
    recipe = configuration.from_toml(tmp_path / "plan.toml", blank)
    recipe.validate()
    assert recipe.model == large
    parallel = recipe.parallel
    layout = section_layout(
        read_spec(large),
        parallel,
        256,
        microbatches=recipe.train.global_batch_packs * parallel.tensor * parallel.pipeline // 256,
    )
    assert recipe.train.global_batch_packs % layout.data == 0

    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["best"][0]["step_seconds"] == pytest.approx(
        float(re.search(r"step ([\d.]+) s", (tmp_path / "plan.toml").read_text()).group(1)),  # type: ignore[union-attr]
        abs=0.006,
    )
    assert len(figures["best"][0]["memory_bytes"]) == parallel.pipeline

    with Image.open(tmp_path / "plan.png") as image:
        assert image.width > 1500 and image.height > 500
        colours = {c for _, c in image.convert("RGB").getcolors(1 << 20)}  # type: ignore[union-attr]
    for wanted in ("8fc1f0", "1f6fc0", "dde2e8", "3d4f66"):  # text, waiting, memory
        assert tuple(bytes.fromhex(wanted)) in colours

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in work} == set(range(parallel.pipeline))
    for rank in range(parallel.pipeline):
        spans = sorted((e["ts"], e["dur"]) for e in work if e["tid"] == rank)
        assert all(a + d <= b + 0.01 for (a, d), (b, _) in zip(spans, spans[1:], strict=False))


def test_lengths_of_real_data(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "talk.json"
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A cat, I think."}]
    samples = [{"id": str(i), "conversations": turns * (i + 1)} for i in range(5)]
    save_image(tmp_path / "photo.png", 420, 420)
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
    samples.append({"id": "photo", "image": "photo.png", "conversations": turns})
    data.write_text(json.dumps(samples))
    asked: Any = {"data": str(data), "output": tmp_path / "out", "pack_length": 300}
    media, loader = (
        MediaSection(max_pixels=112 * 112),
        LoaderSection(system="Sée 😀", max_samples=9),
    )
    blank = configuration.TrainConfig(model=Path(), data="", output=Path("o"))
    images = []
    for sections in ({}, {"media": media, "loader": loader}):
        plan(tiny_folder, 2, "h100", **asked, global_batch_packs=2, **sections)
        printed = capsys.readouterr().out
        assert f"{data} (6 samples)" in printed
        (fullest,) = (line for line in printed.splitlines() if line.startswith("Fullest"))
        assert "photo" in fullest.partition(" by ")[2]
        images.append(int(re.search(r"(\d+)% image tokens", printed).group(1)))  # type: ignore[union-attr]
        recipe = configuration.from_toml(tmp_path / "out" / "plan.toml", blank)
        assert recipe.data == str(data)
    assert 0 < 2 * images[1] < images[0]
    # The training reads what the plan has read.
    assert (recipe.media, recipe.loader) == (media, loader)
    processor = Processor.from_folder(
        tiny_folder, read_spec(tiny_folder), section=media, pack_length=300, system=loader.system
    )
    trained = scan_data(str(data), loader, processor, 300)
    planned = workload.read_index(
        str(data), tiny_folder, processor.spec, 300, recipe.loader, recipe.media
    )
    assert planned.lengths.tolist() == trained.lengths.tolist()
    assert planned.grids.tolist() == trained.grids.tolist() == [[1, 8, 8]]


def test_the_fullest_step_is_that_of_the_recipe(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that fits with a part of its optimizer offloaded, on two GPUs, where steps need
    three times the planned memory."""
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"head_dim": 32, "hidden_size": 2048, "intermediate_size": 2**18}
    config |= {"num_hidden_layers": 1}
    config["vision_config"]["out_hidden_size"] = 2048
    (model / "config.json").write_text(json.dumps(config))
    gpu = tmp_path / "gpu.toml"
    gpu.write_text('base = "h100"\nstep_memory = 3.0\nmemory_gb = 24.0\ngpus_per_node = 1\n')
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A cat, I think."}]
    samples = [{"id": f"s{i}", "conversations": turns * (i % 5 + 1)} for i in range(60)]
    samples[21]["conversations"] = turns * 9  # type: ignore[assignment]
    data = tmp_path / "talk.json"
    data.write_text(json.dumps(samples))
    asked: Any = {"data": str(data), "output": tmp_path / "out", "pack_length": 300}
    loader = LoaderSection(packing="none")
    plan(model, 2, str(gpu), **asked, global_batch_packs=8, loader=loader)
    (said,) = re.findall("^Fullest in .*$", capsys.readouterr().out, re.M)

    blank = configuration.TrainConfig(model=Path(), data="", output=Path("o"))
    recipe = configuration.from_toml(tmp_path / "out" / "plan.toml", blank)
    spec = read_spec(model)
    layout = section_layout(spec, recipe.parallel, 2)
    assert recipe.optimizer.offload_fraction > 0 and layout.data > 1
    index = workload.read_index(str(data), model, spec, 300, recipe.loader, recipe.media)
    options = {"pack_length": 300, "global_batch": 8, "seed": recipe.train.seed}
    sampler = Sampler(index, spec, "none", **options, ranks=layout.data)  # type: ignore[arg-type]
    steps = [*sampler.steps(Position(), sampler.steps_per_epoch)]
    loads = Loads.of(steps, index, spec, layout)
    peak = fullest(recipe, spec, layout, loads, True, 3.0)
    assert said == (
        f"Fullest in the first epoch of seed 0: step {peak.step} of {len(steps)}, "
        f"{peak.bytes / 1e9:.0f} GB on pipeline rank {peak.stage}, by "
        f"{shown(peak.ids(sampler, loads))}"
    )
    assert said.endswith("by s21")
    assert peak.bytes > 1e9 + fullest(recipe, spec, layout, loads, True).bytes


def test_all_that_was_chosen_reaches_the_recipe(small: Path, tmp_path: Path) -> None:
    spec, gpu = read_spec(small), hardware.find_gpu("h100")
    packs = workload.make_packs(workload.typical(spec), spec, 8192)
    ranking = search(spec, gpu, 8, packs, 16)
    layout = make_layout(
        spec, world_size=8, tensor=2, pipeline=2, virtual_pipeline=2, sequence=True
    )
    blank = configuration.TrainConfig(model=Path(), data="d.json", output=Path("out"))
    for expert in (1, 2):
        option = dataclasses.replace(
            ranking.best.option,
            layout=dataclasses.replace(layout, expert=expert),
            recompute_vision="full",
            recompute_text="selective",
            offload=0.5,
        )
        chosen = dataclasses.replace(ranking.best, option=option)
        path = tmp_path / "plan.toml"
        path.write_text(to_toml(ranking, chosen, path, small, None, {}, "a model"))
        read = configuration.from_toml(path, blank)
        assert section_layout(spec, dataclasses.replace(read.parallel, expert=1), 8) == layout
        assert read.parallel.expert == expert
        assert read.recompute == configuration.RecomputeSection("full", "selective")
        assert read.optimizer.offload_fraction == 0.5
        assert (read.train.pack_length, read.train.global_batch_packs) == (8192, 16)


def test_the_table_says_what_the_figures_say(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(small, 4, "h100", output=tmp_path, global_batch_packs=16)
    printed = capsys.readouterr().out
    best = json.loads((tmp_path / "plan.json").read_text())["best"]
    rows = re.findall(r"^\d[ *] +(.*)$", printed, re.M)
    kinds = set()
    for row, p in zip(rows, best, strict=True):
        memory = [rank["total"] / 1e9 for rank in p["memory_bytes"]]
        imbalance = p["stage_imbalance"] + p["data_imbalance"]
        imbalance += p["stage_imbalance"] * p["data_imbalance"]
        assert row.split()[:8] == [
            f"{p['step_seconds']:.2f}",
            f"{p['tokens_per_second_per_gpu']:,.0f}",
            f"{p['mfu']:.1%}",
            f"{p['uncertainty']:.0%}",
            f"{p['bubble']:.1%}",
            f"{imbalance:.1%}",
            f"{p['communication']:.1%}",
            f"{min(memory):.0f}-{max(memory):.0f}",
        ]
        layout = p["layout"]
        kinds.add((layout["tensor"], layout["pipeline"], layout["multiplexed"]))
    assert len(kinds) == len(rows) > 2
    assert any(p["stage_imbalance"] > 0.01 for p in best)


def test_recipe_of_a_folder_with_any_name(small: Path, tmp_path: Path) -> None:
    model = tmp_path / 'Modèle 😀 "1"'
    shutil.copytree(small, model)
    plan(model, 2, "h100", output=tmp_path / "out", global_batch_packs=8)
    blank = configuration.TrainConfig(model=Path(), data="d.json", output=Path("out"))
    assert configuration.from_toml(tmp_path / "out" / "plan.toml", blank).model == model


def test_one_stage_does_not_wait_less_than_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate = schedule.simulate

    def rounded_up(*arguments: Any, **more: Any) -> Any:
        timeline = simulate(*arguments, **more)
        return dataclasses.replace(timeline, busy=[x * (1 + 1e-15) for x in timeline.busy])

    monkeypatch.setattr(schedule, "simulate", rounded_up)
    plan(small, 1, "h100", output=tmp_path, global_batch_packs=8)
    assert "-0.0%" not in capsys.readouterr().out


def test_adapters_and_frozen_parts_reach_the_recipe(small: Path, tmp_path: Path) -> None:
    blank = configuration.TrainConfig(model=Path(), data="d.json", output=Path("out"))
    chosen = {
        "freeze": {"freeze": FreezeSection(vision=True)},
        "lora": {"lora": LoraSection(rank=8, vision=True, targets=("q_proj", "fc1"))},
        "all": {},
    }
    seconds, memory = {}, {}
    for name, what in chosen.items():
        plan(small, 2, "h100", output=tmp_path / name, global_batch_packs=8, **what)  # type: ignore[arg-type]
        recipe = configuration.from_toml(tmp_path / name / "plan.toml", blank)
        recipe.validate()
        assert recipe.freeze == what.get("freeze", FreezeSection())
        assert recipe.lora == what.get("lora", LoraSection())
        best = json.loads((tmp_path / name / "plan.json").read_text())["best"][0]
        seconds[name] = best["step_seconds"]
        memory[name] = max(rank["states"] for rank in best["memory_bytes"])
    assert seconds["freeze"] < seconds["all"] and seconds["lora"] < seconds["all"]
    assert memory["lora"] < 0.5 * memory["all"]


def test_sources_have_their_weights(tiny_folder: Path, tmp_path: Path) -> None:
    """The planner's mean sample is that of the epoch that training makes."""
    save_image(tmp_path / "photo.png", 420, 420)
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
    seen = [{"id": str(i), "image": "photo.png", "conversations": turns} for i in range(8)]
    (tmp_path / "seen.json").write_text(json.dumps(seen))
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A cat."}]
    said = [{"id": f"t{i}", "conversations": turns} for i in range(5)]
    (tmp_path / "said.json").write_text(json.dumps(said))
    data = f"{tmp_path}/seen.json:0.25,{tmp_path}/said.json:6"
    spec, read = read_spec(tiny_folder), (LoaderSection(), MediaSection())
    index = workload.read_index(data, tiny_folder, spec, 300, *read)
    planned = workload.from_index(index, "d")
    sampler = Sampler(index, spec, "balanced", pack_length=300, global_batch=1, seed=3, ranks=1)
    steps = sampler.steps(Position(), sampler.steps_per_epoch)
    epoch = np.concatenate([pack for step in steps for rank in step.dealt for pack in rank])
    assert sorted(planned.tokens) == sorted(index.lengths[epoch].tolist())
    assert len(planned) == 2 + 30 and "weighted" in planned.origin
    # a run of so few samples has these very packs
    packs = workload.make_packs(planned, spec, 300)
    made = sorted(
        int(index.lengths[pack].sum())
        for step in sampler.steps(Position(), sampler.steps_per_epoch)
        for rank in step.dealt
        for pack in rank
    )
    assert sorted(packs.work[:, 0]) == made
    # in proportion too where an epoch is less than a sample
    data = f"{tmp_path}/seen.json:0.002,{tmp_path}/said.json:0.008"
    index = workload.read_index(data, tiny_folder, spec, 300, *read)
    images = sum(map(bool, workload.from_index(index, "d").grids))
    assert images == int(13 * 16 / 56)
    arguments = ["--gpus=1", "--gpu=h100", "--pack_length=300", f"--output={tmp_path / 'plan'}"]
    arguments += [f"--model={tiny_folder}", "--data", data, "--global_batch_packs=4"]
    assert cli.main(["plan", *arguments]) == 0  # where the first epoch has no sample


def test_histograms_are_thinned_in_proportion(tmp_path: Path, seed: int) -> None:
    rng, path = np.random.default_rng(seed), tmp_path / "h.json"
    lengths = np.arange(20, 8000)
    counts = rng.poisson(3e9 * np.exp(-(np.log(lengths / 600) ** 2) / 2) / lengths**2)
    counts[-1] = 1
    path.write_text(json.dumps({"lengths": lengths.tolist(), "counts": counts.tolist()}))
    thinned = np.array(workload.read_histogram(path, released_spec("qwen2_vl-7b")).tokens)
    assert 19_990 < len(thinned) < 20_010 < counts.sum() and thinned.max() == 7999
    thinned = thinned[thinned < 7999]  # that one is kept whatever its share
    for power in (1, 2):
        mean = np.average(lengths.astype(float) ** power, weights=counts)
        assert (thinned.astype(float) ** power).mean() == pytest.approx(mean, rel=0.003)


@pytest.mark.parametrize(
    "gpus,processes", [(4, "--nproc 4"), (16, "--nnodes 2 --nproc-per-node 8"),
                       (12, "--nnodes 2 --nproc-per-node 6"),
                       (20, "--nnodes 3 --nproc-per-node GPUS_OF_THE_NODE (20 in all)")]
)  # fmt: skip
def test_as_many_processes_as_planned(
    gpus: int, processes: str, small: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a plan"
    assert plan(small, gpus, "h100", output=output, global_batch_packs=4 * gpus) == 0
    (start,) = re.findall("^# Start.*$", (output / "plan.toml").read_text(), re.M)
    assert processes in start and f"train --config '{output}/plan.toml' " in start


REFUSALS = [
    ({"gpus": 0}, "--gpus is 0; it must be at least 1"),
    ({"gpus": -4}, "--gpus is -4; it must be at least 1"),
    ({"gpu": "h1000"}, "--gpu 'h1000' is not known; the nearest is h100"),
    ({"gpu": "A100-40"}, "the nearest is a100-80"),
    ({"gpu": "missing.toml"}, "--gpu missing.toml can't be read: No such file"),
    ({"pack_length": 0}, "--pack_length is 0; it must be at least 1"),
    ({"pack_length": 40}, "--pack_length 40 is too short for a typical mix"),
    ({"global_batch_packs": 0}, "--global_batch_packs is 0; it must be at least 1"),
    ({"model": Path("nowhere")}, "nowhere: no such folder"),
    (
        {"freeze": FreezeSection(True, True, True)},
        "every part is frozen, there is nothing to train",
    ),
    ({"lora": LoraSection(rank=-1)}, "--lora.rank is -1; it must be at least 0"),
    (
        {"lora": LoraSection(rank=8, targets=("q_prj",))},
        "has q_prj, which no linear of this model is called; the nearest is q_proj",
    ),
    ({"lora": LoraSection(rank=8, targets=("fc1",))}, "no linear of this model is called"),
    (
        {"lora": LoraSection(alpha=64, vision=True)},
        "--lora.alpha and --lora.vision need --lora.rank",
    ),
    (
        {"lora": LoraSection(rank=8, vision=True), "freeze": FreezeSection(vision=True)},
        "--freeze.vision and --lora.vision: one keeps the vision tower's weights",
    ),
    (
        {"lora": LoraSection(rank=8), "freeze": FreezeSection(language=True)},
        "--freeze.language keeps the language model's weights, and --lora.targets has q_proj",
    ),
    ({"data": "a", "length_histogram": Path("b")}, "pass one of them"),
    ({"media": MediaSection(fps=1)}, "--media.fps says how --data is read; pass --data too"),
    ({"media": MediaSection(max_frames=-1)}, "--media.max_frames is -1; it must be at least 0"),
]


@pytest.mark.parametrize("change,message", REFUSALS)
def test_refusals_are_one_line(
    change: dict[str, object], message: str, small: Path, tmp_path: Path
) -> None:
    arguments = {"model": small, "gpus": 8, "gpu": "h100", "output": tmp_path / "out", **change}
    with pytest.raises(UserError) as error:
        plan(**arguments)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


HISTOGRAMS = [
    ("[", "is not valid JSON"),
    ("[]", "must be a list of token counts"),
    ("3", "must be a list of token counts"),
    ("[5, -1]", "entry 1 must have tokens of at least 1"),
    ('[{"tokens": 5, "image_tokens": 6}]', "image_tokens must be from 0 to tokens; it is 6"),
    ('[{"tokens": 5, "grids": [[1, 3, 4]]}]', "multiples of 2; it is [1, 3, 4]"),
    ('[{"tokens": 5, "grids": [[1, 4, 6]]}]', "its grids are 6 tokens, more than its tokens, 5"),
    ('{"counts": [1]}', 'needs "lengths"'),
    ('{"lengths": [5, 6], "counts": [1]}', 'as long as "lengths" (2)'),
    ('{"lengths": [5], "counts": [0]}', "not all 0"),
    ('{"lengths": [5], "image_share": 1.5}', '"image_share" is 1.5'),
    ('{"lengths": [5, 0], "counts": [1, 1]}', '"lengths" must be integers of at least 1'),
    (
        '{"lengths": [5], "image_shar": 0.1}',
        "'image_shar', which is not read; did you mean image_s",
    ),
    ('[{"tokens": 9, "target_token": 1}]', "not read; did you mean target_tokens?"),
    (
        '[{"tokens": 9, "grids": [[1, 4, 4]], "image_tokens": 8}]',
        "its grids are 4 tokens and image_tokens is 8; leave image_tokens out",
    ),
    ("[9000]", "has a sample of 9000 tokens and a pack holds 8192"),
]


@pytest.mark.parametrize("text,message", HISTOGRAMS)
def test_bad_histograms(text: str, message: str, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        plan(small, 8, "h100", length_histogram=path, output=tmp_path / "out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_forms_of_a_histogram(small: Path, tmp_path: Path) -> None:
    """Three samples of 100 tokens: with grids and targets, with 40 of images, with the usual share;
    then one of half images. What is not said to be a target is a share of what is no image."""
    spec, path = read_spec(small), tmp_path / "h.json"
    grids = {"tokens": 100, "grids": [[1, 8, 8], [2, 4, 4]], "target_tokens": 7}
    path.write_text(json.dumps([grids, {"tokens": 100, "image_tokens": 40}, 100]))
    read = workload.read_histogram(path, spec)
    usual = int(100 * flops.IMAGE_SHARE)
    assert read.tokens == [100] * 3
    assert read.targets == [7, *(round(flops.TARGET_SHARE * n) for n in (60, 100 - usual))]
    assert read.grids[0] == [(1, 8, 8), (2, 4, 4)]
    visual = [sum(t * h * w for t, h, w in one) // 4 for one in read.grids]
    assert visual[0] == 24 and 36 < visual[1] <= 40 and usual - 4 < visual[2] <= usual
    path.write_text('{"lengths": [100], "image_share": 0.5}')
    half = workload.read_histogram(path, spec)
    assert half.targets == [round(flops.TARGET_SHARE * 50)]
    assert 46 < sum(t * h * w for t, h, w in half.grids[0]) // 4 <= 50


def test_missing_histogram_names_the_nearest(small: Path, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[100]")
    with pytest.raises(UserError, match=r"did you mean .*lengths\.json\?"):
        plan(small, 8, "h100", length_histogram=tmp_path / "lenghts.json", output=tmp_path / "o")


GPU_FILES = [
    ("peak_tflops = 100", "lacks memory_gb, memory_gbs, nvlink_gbs, network_gbs"),
    ('base = "h1"', "base 'h1' is none of"),
    ('base = "h100"\npeak_tflop = 3', "peak_tflop is no setting of a GPU; the nearest is peak_tf"),
    ('base = "h100"\npeak_tflops = -3', "peak_tflops is -3; it must be a float above 0"),
    ('base = "h100"\n[efficiency]\nlanguage = 1.4', "efficiency.language is 1.4"),
    ('base = "h100"\n[efficiency]\ntext = 0.4', "efficiency.text is no setting"),
    ("= 3", "is not valid TOML"),
]


@pytest.mark.parametrize("text,message", GPU_FILES)
def test_bad_gpu_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        hardware.find_gpu(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_documented_files_are_read(tmp_path: Path) -> None:
    """The JSON and TOML examples of docs/planning.md."""
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    spec = released_spec("qwen2_vl-7b")
    examples = re.findall(r"```(json|toml)\n(.*?)```", text, re.S)
    assert {kind for kind, _ in examples} == {"json", "toml"}
    for number, (kind, content) in enumerate(examples):
        path = tmp_path / f"{number}.{kind}"
        path.write_text(content)
        if kind == "json":
            assert len(workload.read_histogram(path, spec)) > 0
        else:
            assert hardware.find_gpu(str(path)).peak > 0


def test_grids_make_up_the_image_tokens() -> None:
    spec = released_spec("qwen2_vl-7b")
    for visual in (0, 1, 5, 100, 777, 5000, 20000):
        grids = workload._grids_of(visual, 2)
        tokens = sum(t * h * w for t, h, w in grids) // spec.vision.merge_unit
        assert visual - 4 <= tokens <= visual


def test_compact_lists() -> None:
    assert compact((3, 3, 3, 1)) == "3x3 1"
    assert compact((2,)) == "2"
