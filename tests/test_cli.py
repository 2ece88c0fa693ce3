"""The command line does not grow or change by accident."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from tests.ranks import ROOT, run_cli
from vlmtrain import cli
from vlmtrain.core import config, launch
from vlmtrain.core.config import ConfigError, TrainConfig, from_toml
from vlmtrain.core.errors import UserError
from vlmtrain.evaluate.config import EvaluateConfig
from vlmtrain.generate.command import GenerateConfig
from vlmtrain.telemetry import command as report_command

OPTIONS = """
model data output nproc
train.steps train.epochs train.pack_length train.global_batch_packs train.precision train.seed
train.log_every train.tensorboard train.wandb train.rehearse train.fit
train.on_spike train.timeout
optimizer.lr optimizer.vision_lr optimizer.merger_lr optimizer.vision_layer_decay
optimizer.lr_scheduler_type optimizer.min_lr optimizer.warmup_steps optimizer.warmup_ratio
optimizer.decay_ratio optimizer.decay_type optimizer.weight_decay optimizer.beta1
optimizer.beta2 optimizer.eps optimizer.clip optimizer.offload_fraction optimizer.offload_schedule
parallel.tensor parallel.pipeline parallel.virtual_pipeline parallel.sequence parallel.expert
parallel.vision_layers parallel.text_layers parallel.vision parallel.vision_piece
parallel.overlap_grad_reduce parallel.overlap_param_gather parallel.tensor_overlap
freeze.vision freeze.merger freeze.language
lora.rank lora.alpha lora.dropout lora.targets lora.vision
recompute.vision recompute.language
checkpoint.every checkpoint.keep checkpoint.keep_every checkpoint.keep_best
checkpoint.hf checkpoint.resume
evaluate.every evaluate.data evaluate.split_ratio
loader.packing loader.unreadable loader.too_long loader.skip_limit loader.workers loader.verify
loader.max_samples loader.media_root loader.template loader.system loader.ignore_keys
media.max_pixels media.min_pixels media.video_max_pixels media.fps media.max_frames
""".split()

GENERATE = """
model prompt image video system input output ignore_keys max_new_tokens temperature top_p
repetition_penalty seed precision kernels
media.max_pixels media.min_pixels media.video_max_pixels media.fps media.max_frames
""".split()

EVALUATE = """
model tasks data output nproc pack_length global_batch_packs precision max_new_tokens kernels
parallel.tensor parallel.pipeline parallel.virtual_pipeline parallel.sequence parallel.expert
parallel.vision_layers parallel.text_layers parallel.vision parallel.vision_piece
parallel.overlap_grad_reduce parallel.overlap_param_gather parallel.tensor_overlap
loader.packing loader.unreadable loader.too_long loader.skip_limit loader.workers loader.verify
loader.max_samples loader.media_root loader.template loader.system loader.ignore_keys
media.max_pixels media.min_pixels media.video_max_pixels media.fps media.max_frames
""".split()


def names(cls: type, prefix: str = "") -> list[str]:
    hints = typing.get_type_hints(cls)
    actual = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            actual += names(kind, f"{prefix}{field.name}.")
        else:
            actual.append(prefix + field.name)
    return actual


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


@pytest.mark.parametrize("command", ["plan", "convert", "demo"])
def test_a_package_that_is_not_installed_is_named(command, capsys, monkeypatch):
    """`pip install .` without [train] leaves it out."""
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main([command, "verify"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"vlmtrain: {command} needs the package tyro, which is not installed")
    assert said.endswith('pip install ".[train]"\n') and said.count("\n") == 1


def test_instructions_that_the_machine_has_not_are_refused_in_one_line():
    ended = run_cli(["train", "--model", "x"], env={"VLMKERNELS_ISA": "avx1024"})
    assert ended.code == 1 and ended.output.count("\n") == 1
    assert ended.output.startswith("vlmtrain: VLMKERNELS_ISA is 'avx1024', but this machine runs")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is new in Python 3.11")
def test_processes_get_the_packages_of_the_command(tmp_path):
    """Not those of the current folder: a clone, say, beside an installed package."""
    (tmp_path / "vlmtrain").mkdir()
    (tmp_path / "vlmtrain" / "__init__.py").write_text("raise ImportError('of another folder')")
    script = f"import sys; sys.path[0] = {str(ROOT)!r}; from vlmtrain import cli; cli.run()"
    arguments = ["--nproc", "2", "--model", "x", "--data", "y", "--output", "z"]
    ended = subprocess.run(
        [sys.executable, "-c", script, "train", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "of another folder" not in ended.stderr
    assert "vlmtrain: x: no such folder" in ended.stderr  # torch for CUDA may warn first


def test_a_reader_that_leaves_is_no_fault_of_the_program(capsys, monkeypatch, tmp_path):
    def report(_):
        raise BrokenPipeError

    monkeypatch.setattr(report_command, "main", report)
    with open(tmp_path / "stdout", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["report", "x"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_ends_without_what_python_does_last(ranks):
    """Threads of a group that something holds could abort it there."""
    script = "import atexit; from vlmtrain import cli; atexit.register(print, 'last'); cli.run()"
    ended = subprocess.run(
        [sys.executable, "-c", script, "--help"],
        env={**os.environ, "WORLD_SIZE": str(ranks)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("usage: vlmtrain")  # through a pipe: it was flushed
    assert ended.stdout.endswith("last\n") == (ranks == 1)


def test_rank_0_says_first_what_all_ranks_find(capsys, monkeypatch):
    said = []
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: said.append(capsys.readouterr().err))
    monkeypatch.setattr(launch, "leave", lambda code: code)

    def fails(process):
        raise UserError(f"found by rank {process.rank}")

    for rank in range(2):
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")
        assert launch.run_on_ranks(fails, [], 0) == 1
    assert said == ["vlmtrain: found by rank 0\n"]  # before rank 1 spoke
    assert capsys.readouterr().err == "vlmtrain: found by rank 1\n"


def test_modules_that_may_be_missing_are_those_of_pyproject():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    names = {"megatron-core": "megatron", "pillow": "PIL"}
    packages = re.findall(r'^  "([\w-]+)[>=]=', text, re.MULTILINE)  # one a line: [train] only
    assert {names.get(package, package) for package in packages} == set(cli._EXTRA)


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
    """A mark of UTF-8 in front, as editors on Windows write, is none of it."""
    path = tmp_path / "recipe.toml"
    path.write_text("\ufeffnproc = 4\n[parallel]\ntext_layers = [1, 3]\n[optimizer]\nlr = 1\n")
    read = from_toml(path, TrainConfig(model=tmp_path, data="a", output=tmp_path))
    assert read.nproc == 4 and read.parallel.text_layers == (1, 3)
    assert read.optimizer.lr == 1.0 and isinstance(read.optimizer.lr, float)
    assert config.to_dict(read)["parallel"]["text_layers"] == [1, 3]
