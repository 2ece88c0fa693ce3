"""Whole runs of `vlmtrain train` on layouts: resumed LoRA, multiplexed vision beside pipelined."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.ranks import run_cli
from tests.train.conftest import losses, options
from vlmtrain import cli

LORA = (
    "--lora.rank=4 --lora.dropout=0.2 --lora.vision --lora.targets q_proj up_proj qkv proj".split()
)


def resume_lora(layout, model, conversations, folder):
    straight, resumed = folder / "straight", folder / "resumed"
    more = ["--train.steps=6", "--checkpoint.every=3", "--nproc=2", *layout, *LORA]
    more.append("--checkpoint.hf")
    done = run_cli(options(model, conversations, straight, *more))
    assert done.code == 0, done.output
    shutil.copytree(straight, resumed)
    for name in ("hf", "adapter"):
        shutil.rmtree(resumed / name)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    (resumed / "checkpoints" / "latest").write_text("step-00000003\n")
    done = run_cli(options(model, conversations, resumed, *more, "--checkpoint.resume=latest"))
    assert done.code == 0 and "at step 3" in done.output, done.output
    assert losses(resumed) == losses(straight)
    assert len(set(losses(straight))) == 6
    files = [*straight.glob("hf/*.safetensors"), *straight.glob("adapter/*.safetensors")]
    assert len(files) >= 2
    for file in files:
        last = straight / "checkpoints" / "step-00000006" / file.relative_to(straight)
        assert last.read_bytes() == file.read_bytes(), file
        assert (resumed / file.relative_to(straight)).read_bytes() == file.read_bytes(), file


@pytest.mark.slow
def test_resumed_lora_is_bitwise(model, conversations, tmp_path, capsys):
    """Adapters, their optimizer state and the state of dropout's random streams come back: of the
    process's own, for inputs that both ranks hold, and of Megatron's, for those that are split.
    With other adapters, another factor for them, or another config.json it would be another model:
    refused."""
    layout = ["--parallel.tensor=2", "--parallel.vision=multiplexed"]
    resume_lora(layout, model, conversations, tmp_path)
    output = tmp_path / "resumed"
    again = options(model, conversations, output, "--train.steps=7", "--checkpoint.resume=latest")
    before = (output / "metrics.jsonl").read_text()
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config.get("text_config", config)["rms_norm_eps"] = 1e-4
    (other / "config.json").write_text(json.dumps(config))
    exchanged = ["gate_proj" if option == "up_proj" else option for option in LORA]  # of one shape
    for more, named in (
        (LORA[:-1], "--lora.targets proj q_proj qkv up_proj; it is now q_proj qkv up_proj"),
        (exchanged, "it is now gate_proj proj q_proj qkv"),
        ([*LORA, "--lora.alpha=8"], "--lora.alpha 32.0"),
        ([*LORA, f"--model={other}"], "another model than --model: norm_eps is 1e-06 and 0.0001"),
    ):
        assert cli.main([*again, *more]) == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and named in message and "step-00000006" in message
    # The run's own model has the adapters in it already.
    done = run_cli([*again, *layout, *LORA, f"--model={output}", "--nproc=2"])
    assert done.code == 1 and "Traceback" not in done.output, done.output
    said = f"was trained on other base weights than --model {output / 'hf'} holds, the first is "
    assert done.output.count(said) == 1, done.output
    assert (output / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_vision_lora_goes_on_at_another_tensor_size(model, conversations, tmp_path):
    """B of the vision tower's qkv is split by heads, three ways inside each: one rank must read
    what two have written."""
    lora = "--lora.rank=4 --lora.vision --lora.targets qkv --optimizer.lr=1e-2".split()
    more = ["--train.steps=6", "--checkpoint.every=3", *lora]
    two = [*more, "--nproc=2", "--parallel.tensor=2"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    done = run_cli(options(model, conversations, straight, *two))
    assert done.code == 0, done.output
    shutil.copytree(straight, resumed)
    for name in ("hf", "adapter"):
        shutil.rmtree(resumed / name)
    done = run_cli(options(model, conversations, resumed, *more, "--checkpoint.resume=3"))
    assert done.code == 0 and "at step 3" in done.output, done.output
    assert losses(resumed) == pytest.approx(losses(straight), rel=1e-5)
    assert losses(straight)[0] != pytest.approx(losses(straight)[-1], rel=1e-3)
    # In other precisions the base weights are rounded, and still those of --model.
    for steps, precision in ((7, "bf16"), (8, "fp32"), (9, "fp32")):
        more = [f"--train.steps={steps}", f"--train.precision={precision}", *lora]
        done = run_cli(options(model, conversations, resumed, *more, "--checkpoint.resume=latest"))
        assert done.code == 0 and f"at step {steps - 1}" in done.output, done.output


@pytest.mark.slow
def test_multiplexed_vision_trains_as_pipelined(model, conversations, tmp_path):
    """From files on disk: each rank decodes the images dealt to it, the losses are the same. The
    pipeline splits both towers by itself."""
    trained = {}
    for vision in ("pipelined", "multiplexed"):
        output = tmp_path / vision
        more = ["--train.steps=4", "--nproc=2", "--parallel.pipeline=2"]
        more += ["--parallel.text_layers", "auto"]
        if vision == "pipelined":
            more += ["--parallel.vision_layers", "auto"]
        done = run_cli(options(model, conversations, output, *more, f"--parallel.vision={vision}"))
        assert done.code == 0, done.output
        trained[vision] = losses(output)
    assert trained["multiplexed"] == pytest.approx(trained["pipelined"], rel=1e-5)
