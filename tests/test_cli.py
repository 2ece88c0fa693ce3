"""The command line does not grow or change by accident."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from vlmtrain import cli, config
from vlmtrain.config import ConfigError, TrainConfig, from_toml
from vlmtrain.evaluate.command import EvaluateConfig
from vlmtrain.generate.command import GenerateConfig

OPTIONS = """
model data output nproc
train.steps train.epochs train.pack_length train.global_batch train.precision train.seed
train.log_every train.wandb
optimizer.lr optimizer.min_lr optimizer.warmup_steps optimizer.weight_decay optimizer.beta1
optimizer.beta2 optimizer.eps optimizer.clip optimizer.offload_fraction optimizer.offload_schedule
parallel.tensor parallel.pipeline parallel.virtual_pipeline parallel.sequence
parallel.vision_layers parallel.text_layers parallel.vision
parallel.overlap_grad_reduce parallel.overlap_param_gather parallel.tensor_overlap
freeze.vision freeze.merger freeze.language
lora.rank lora.alpha lora.dropout lora.targets lora.vision
recompute.vision recompute.language
checkpoint.every checkpoint.keep checkpoint.keep_every checkpoint.resume
evaluate.every evaluate.data
loader.packing loader.unreadable loader.skip_limit loader.workers loader.verify loader.max_samples
loader.media_root loader.template
""".split()

GENERATE = """
model prompt image video system input output max_new_tokens temperature top_p repetition_penalty
seed precision kernels
""".split()

EVALUATE = """
model tasks data output nproc pack_length global_batch precision max_new_tokens kernels
parallel.tensor parallel.pipeline parallel.virtual_pipeline parallel.sequence
parallel.vision_layers parallel.text_layers parallel.vision
parallel.overlap_grad_reduce parallel.overlap_param_gather parallel.tensor_overlap
loader.packing loader.unreadable loader.skip_limit loader.workers loader.verify loader.max_samples
loader.media_root loader.template
""".split()


def names(cls: type, prefix: str = "") -> list[str]:
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found += names(kind, f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


def test_options_of_train():
    assert names(TrainConfig) == OPTIONS


def test_options_of_generate_and_evaluate():
    assert names(GenerateConfig) == GENERATE
    assert names(EvaluateConfig) == EVALUATE


@pytest.mark.parametrize(
    ("command", "options"),
    [("train", OPTIONS), ("generate", GENERATE), ("evaluate", EVALUATE)],
    ids=["train", "generate", "evaluate"],
)
def test_help_names_every_option(command, options, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in options:
        assert f"--{name}" in text, name


def test_usage(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[train]\nstepz = 3\n", ["train.", "stepz", "steps"]),
        ("[train]\nsteps = 'many'\n", ["train.steps", "int", "many"]),
        ("train = 3\n", ["train", "table"]),
        ("[train\n", ["TOML"]),
        ("[train]\nprecision = 'fp16'\n", ["train.precision", "'bf16' or 'fp32'", "fp16"]),
        ("[parallel]\nvision = 'spread'\n", ["parallel.vision", "'multiplexed'", "spread"]),
        ("[parallel]\ntext_layers = ['1']\n", ["parallel.text_layers[0]", "int"]),
        ("[parallel]\ntext_layers = [[true, 1]]\n", ["parallel.text_layers[0]", "int"]),
        ("[lora]\ntargets = [1]\n", ["lora.targets[0]", "str", "1"]),
        ("[optimizer]\noffload_schedule = [5]\n", ["optimizer.offload_schedule[0]", "str"]),
        ("[train]\nsteps = true\n", ["train.steps", "int", "True"]),
    ],
)
def test_bad_recipe(text, names, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    base = TrainConfig(model=tmp_path, data="a", output=tmp_path)
    with pytest.raises(ConfigError) as error:
        from_toml(path, base)
    for name in ["recipe.toml", *names]:
        assert name in str(error.value)


def test_recipe_fills_the_same_fields(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("nproc = 4\n[parallel]\ntext_layers = [1, 3]\n[optimizer]\nlr = 1\n")
    read = from_toml(path, TrainConfig(model=tmp_path, data="a", output=tmp_path))
    assert read.nproc == 4 and read.parallel.text_layers == (1, 3)
    assert read.optimizer.lr == 1.0 and isinstance(read.optimizer.lr, float)
    assert config.to_dict(read)["parallel"]["text_layers"] == [1, 3]
