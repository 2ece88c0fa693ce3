"""Options by other names: without their section, their former ones, those of other trainers."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import TrainingArguments

from tests.docs.pages import DOCS
from tests.test_cli import names
from vlmtrain import cli
from vlmtrain.core import coming_from
from vlmtrain.core.config import RENAMED, ConfigError, TrainConfig, from_toml
from vlmtrain.core.errors import UsageError
from vlmtrain.core.options import option_names, spelled
from vlmtrain.core.run_folder import model_of
from vlmtrain.data.command import build_command
from vlmtrain.evaluate.config import EvaluateConfig
from vlmtrain.generate.command import GenerateConfig
from vlmtrain.plan.command import plan

# Options that transformers 4 alone has, or late releases of 5 alone.
SOME = {"group_by_length", "overwrite_output_dir"}
SOME |= {"train_sampling_strategy", "activation_checkpointing", "warmup_ratio", "logging_dir"}
SWIFT = "--model Q --dataset d.jsonl --train_type full --learning_rate 1e-5 --freeze_vit=true"
ANSWERS = {
    "--dataset": "here --data; files, not names of a hub",
    "--train_type": "here --lora.rank; all weights, unless it is above 0",
    "--learning_rate": "here --optimizer.lr",
    "--freeze_vit": "here --freeze.vision; frozen there unless told otherwise, not here",
    "--micro-batch-size": "here --train.pack_length; a microbatch is one pack",
    "--global-batch-size": "here --train.global_batch_packs; packs, not samples",
    "--tensor-model-parallel-size": "here --parallel.tensor",
    "--freeze-LM": "here --freeze.language",
    "--cutoff_len": "here --train.pack_length --loader.too_long",
    "--gradient_accumulation_steps": "here --train.global_batch_packs; of all processes together",
    "--packing": "here --loader.packing; always on; samples never see each other",
    "--use_distributed_optimizer": "always: replicas share the optimizer state",
}


def test_every_entry_leads_to_options_that_exist():
    options = names(TrainConfig)
    assert option_names(TrainConfig) == options
    entries = [entry for group in coming_from.SECTIONS.values() for entry in group]
    listed = [name for entry in entries for name in entry.names]
    assert len(set(listed)) == len(listed) > 130
    for entry in entries:
        assert entry.here or entry.says, entry
        assert set(entry.here) <= set(options), entry
        assert set("".join(entry.names.values())) <= set(coming_from.TRAINERS), entry


def test_names_of_the_trainer_are_those_of_the_class_installed():
    there = {field.name for field in dataclasses.fields(TrainingArguments)} | SOME
    entries = [entry for group in coming_from.SECTIONS.values() for entry in group]
    listed = {name for one in entries for name, whose in one.names.items() if "T" in whose}
    assert len(listed) > 50 and listed <= there, listed - there


def test_the_page_is_made_from_the_table():
    _, mark, after = (
        (DOCS / "coming-from.md").read_text(encoding="utf-8").partition(coming_from.MARK)
    )
    command = "python -m vlmtrain.core.coming_from docs/coming-from.md"
    assert mark and after == coming_from.tables(), command


@pytest.mark.parametrize(
    "line",
    [
        SWIFT,
        "--micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 --freeze-LM",
        "--cutoff_len 2048 --gradient_accumulation_steps 8 --packing true",
        "--use_distributed_optimizer true",
    ],
    ids=["ms-swift", "megatron", "llama-factory", "by design"],
)
def test_a_command_line_of_another_trainer_is_answered_whole(line, capsys):
    assert cli.main(["train", *line.split(), "--output", "run"]) == 2
    said = capsys.readouterr().err.splitlines()
    theirs = [word.partition("=")[0] for word in line.split() if word.startswith("--")]
    wanted = [f"  {name}: {ANSWERS[name]}" for name in theirs if name != "--model"]
    assert said == ["vlmtrain: not options of this command:", *wanted]


@pytest.mark.parametrize("given", [["--output", "", "--lr", "1"], ["--output="]])
def test_an_output_that_is_empty_is_not_this_folder(given):
    with pytest.raises(UsageError, match="--output is empty"):
        spelled(given, TrainConfig)


@pytest.mark.parametrize(
    ("given", "target", "full"),
    [
        ("--lr 1 --weight-decay=0", TrainConfig, "--optimizer.lr 1 --optimizer.weight_decay=0"),
        ("--no_rehearse", TrainConfig, "--train.no_rehearse"),
        ("--train.no_rehearse", TrainConfig, "--train.no_rehearse"),
        (
            "--pack_length 8 --media_root m",
            TrainConfig,
            "--train.pack_length 8 --loader.media_root m",
        ),
        (
            "--train.pack_length=8 --global_batch_packs 2",
            EvaluateConfig,
            "--pack_length=8 --global_batch_packs 2",
        ),
        ("--train.pack_length 8", plan, "--pack_length 8"),
        ("--loader.media_root m --loader.no_verify", build_command, "--media_root m --no_verify"),
        ("--max_pixels 9 --prompt lr", GenerateConfig, "--media.max_pixels 9 --prompt lr"),
        ("--unknown 3 -1 --help", TrainConfig, "--unknown 3 -1 --help"),
        ("--lr 1 --optimizer.lr 2", TrainConfig, "--optimizer.lr 1 --optimizer.lr 2"),  # the last
    ],
)
def test_a_section_may_be_left_out_or_given(given, target, full):
    assert spelled(given.split(), target) == full.split()


@pytest.mark.parametrize(
    ("given", "target", "said"),
    [
        ("--image a --prompt p --image b", GenerateConfig, "--image is given twice; name all of"),
        ("--targets q --lora.targets=v", TrainConfig, "--lora.targets is given twice; name all"),
        ("--data a --data=b", TrainConfig, "--data is given twice; name all sources in one"),
        ("--evaluate.data a --evaluate.data b", TrainConfig, "--evaluate.data is given twice"),
        ("--data a --data b", build_command, "--data is given twice; it takes one file"),
    ],
)
def test_what_would_be_lost_of_two_options_is_refused(given, target, said):
    with pytest.raises(UsageError, match=said):
        spelled(given.split(), target)


def test_a_name_that_several_options_have_is_refused():
    with pytest.raises(
        UsageError, match="--every: write one of --checkpoint.every, --evaluate.every"
    ):
        spelled(["--every", "3"], TrainConfig)


@pytest.mark.parametrize(
    "before", ["--train.global_batch", "--train.global-batch", "--global_batch"]
)
def test_a_former_name_says_the_new_one_once(before, capsys, monkeypatch):
    now = spelled([f"{before}=4", "--lr=1"], TrainConfig, RENAMED)
    assert now == ["--train.global_batch_packs=4", "--optimizer.lr=1"]
    said = f"vlmtrain: {before} is called --train.global_batch_packs now\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "1")
    assert spelled([f"{before}=4", "--lr=1"], TrainConfig, RENAMED) == now
    assert capsys.readouterr().err == ""


def test_data_takes_what_train_calls_data_and_output(tmp_path, capsys):
    (tmp_path / "a.json").write_text('[{"text": "one"}]')
    for name in ("--data", "--source"):
        assert cli.main(["data", "check", name, str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("1 sample, ") == 2
    assert printed.err == "vlmtrain: --source is called --data now\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "learning_rate = 1e-5\npacking = true\n",
            [
                "recipe.toml: learning_rate: here --optimizer.lr",
                "recipe.toml: packing: here --loader.packing; always on",
            ],
        ),
        ("[train]\nmicro_batch_size = 1\n", ["train.micro_batch_size: here --train.pack_length"]),
        ("[train]\nlr = 1\n", ["train.lr stands elsewhere: optimizer.lr"]),
        ("every = 1\n", ["every stands elsewhere: checkpoint.every or evaluate.every"]),
    ],
)
def test_keys_of_a_recipe_are_answered_too(text, said, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        from_toml(path, TrainConfig(model=tmp_path, data="a", output=tmp_path))
    for words in said:
        assert words in str(error.value)


def test_a_recipe_with_a_former_key_is_read(tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nglobal_batch = 6\nsteps = 2\n")
    config = from_toml(path, TrainConfig(model=tmp_path, data="a", output=tmp_path))
    assert config.train.global_batch_packs == 6 and config.train.steps == 2
    assert capsys.readouterr().err.endswith(
        "train.global_batch is called train.global_batch_packs now\n"
    )


def test_a_recipe_in_yaml_says_what_a_recipe_is(tmp_path):
    (tmp_path / "sft.yaml").write_text("learning_rate: 1.0e-4\n")
    with pytest.raises(ConfigError, match="sft.yaml: a recipe is a TOML file; docs/coming-from.md"):
        from_toml(tmp_path / "sft.yaml", TrainConfig(model=tmp_path, data="a", output=tmp_path))


def test_a_run_is_the_model_that_it_wrote(tiny_folder, tmp_path, capsys):
    run, data = tmp_path / "run", tmp_path / "a.json"
    data.write_text('[{"text": "one"}]')
    check = ["data", "check", "--data", str(data), "--model", str(run), "--pack_length", "512"]
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert cli.main(check) == 1
    said = "a run that has no hf/ yet; name the model that it began from, or let it end first\n"
    assert capsys.readouterr().err.endswith(said)
    (run / "checkpoints" / "step-00000002").mkdir()
    (run / "checkpoints" / "latest").write_text("step-00000003\n")  # removed by hand
    assert cli.main(["plan", "--model", str(run), "--gpus", "8", "--gpu", "h100"]) == 1
    said = f"it began from, take {run / 'checkpoints' / 'step-00000002'}, or let it end first\n"
    assert capsys.readouterr().err.endswith(said)
    (run / "hf").symlink_to(tiny_folder)
    assert cli.main(check) == 0 and model_of(run) == run / "hf"
    assert model_of(tiny_folder) == tiny_folder and model_of(tmp_path / "no") == tmp_path / "no"
