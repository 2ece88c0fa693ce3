"""`vlmtrain convert verify`: folders that are not the same model, and how equal logits must be."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.parity import reference as ref
from vlmtrain import cli
from vlmtrain.convert.verify import Comparison, Group


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ref.save_model(ref.make_model("qwen2_5_vl"), tmp_path_factory.mktemp("model") / "a")


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        ("text_config", "rms_norm_eps", 1e-4, "norm_eps is 1e-06 and 0.0001"),
        ("rope_parameters", "rope_theta", 5e5, "rope_theta is 1000000.0 and 500000.0"),
        ("", "image_token_id", 9, "image_token_id is 5 and 9"),
    ],
)
def test_configs_are_compared(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    where: str,
    name: str,
    value: float,
    words: str,
) -> None:
    """The same tensors are another model with another config."""
    other = tmp_path / "b"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    text = config["text_config"]
    {"": config, "text_config": text, "rope_parameters": text["rope_parameters"]}[where][name] = (
        value
    )
    (other / "config.json").write_text(json.dumps(config))
    arguments = ["convert", "verify", "--source", str(model), "--logits", "no", "--target"]
    assert cli.main([*arguments, str(model)]) == 0
    capsys.readouterr()
    assert cli.main([*arguments, str(other)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "describe different models: " in line and line.endswith(words)


@pytest.mark.parametrize("logits", [None, 0.0, 1e-4])
def test_logits_that_are_equal(logits: float | None) -> None:
    assert Comparison("a", "b", {"x": Group(1, 4)}, logits).equal


@pytest.mark.parametrize("logits", [1.1e-4, math.inf, math.nan])
def test_logits_that_differ(logits: float) -> None:
    assert not Comparison("a", "b", {"x": Group(1, 4)}, logits).equal
