"""Adapters merged into their weights, against peft's own merge; other kinds are refused."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.parity import reference as ref
from vlmtrain.checkpoint.hf import adapters
from vlmtrain.checkpoint.hf.files import HFWeights, ModelFiles
from vlmtrain.checkpoint.mapping import WeightError, canonical_name
from vlmtrain.checkpoint.merge import base_of
from vlmtrain.checkpoint.model_folder import as_hf, described, needs_merging
from vlmtrain.checkpoint.weights import open_weights
from vlmtrain.core.config import LoraSection
from vlmtrain.core.errors import UserError
from vlmtrain.models.family import read_spec

peft = pytest.importorskip("peft", reason="peft, which writes the adapters, is not installed")

#: Of W + s B A in float32, whose three products and sums may be rounded in another order.
ROUNDING = 10 * 2.0**-23


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    model = ref.make_model("qwen2_5_vl", seed=torch.initial_seed() % 2**31)
    return ref.save_model(model, tmp_path_factory.mktemp("base"))


def adapter(base: Path, folder: Path, more=(), **options) -> dict[str, torch.Tensor]:
    """Write an adapter by peft, on `more` targets too; returns the weights that peft merges, by
    canonical name."""
    import transformers

    plain = transformers.AutoModelForImageTextToText.from_pretrained(base).float()
    targets = ["q_proj", "o_proj", "down_proj", "qkv", "attn.proj", "patch_embed.proj", *more]
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, **options)
    model = peft.get_peft_model(plain, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.3)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    merged = model.merge_and_unload()
    return {canonical_name(name): tensor.detach() for name, tensor in merged.named_parameters()}


@pytest.mark.parametrize("rslora", [False, True])
def test_as_peft_merges(rslora, base, tmp_path) -> None:
    wanted = adapter(base, tmp_path / "adapter", use_rslora=rslora)
    before = HFWeights(base)
    assert described(tmp_path / "adapter") == base and needs_merging(tmp_path / "adapter")
    moved = 0
    with as_hf(tmp_path / "adapter", tmp_path) as folder:
        merged = HFWeights(folder)
        assert merged.names() == before.names() == wanted.keys()
        for name, want in wanted.items():
            got = merged.read(name)
            # W + s B A in float32, by products of another order.
            assert (got - want).abs().max() <= ROUNDING * want.abs().max(), name
            moved += not torch.equal(want, before.read(name))
    # Every layer's targets in both towers and the pixels' convolution, and nothing else.
    assert moved == 4 * 3 + 4 * 3 + 1
    assert not list(tmp_path.glob("vlmtrain-*"))


def test_copies_of_base_weights_are_compared(base, tmp_path) -> None:
    """peft stores the words' weights with an adapter on them."""
    folder = tmp_path / "adapter"
    wanted = adapter(base, folder, more=["lm_head"])
    with as_hf(folder, tmp_path) as merged:
        got = HFWeights(merged).read("lm_head.weight")
    want = wanted["lm_head.weight"]
    assert (got - want).abs().max() <= ROUNDING * want.abs().max()
    assert not torch.equal(got, HFWeights(base).read("lm_head.weight"))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.lm_head.base_layer.weight"
    changed = tensors[name].clone()
    changed[3, 4] += 1
    save_file({**tensors, name: changed}, folder / "adapter_model.safetensors")
    words = "adapter_model.safetensors holds another lm_head.weight than"
    with pytest.raises(WeightError, match=words), as_hf(folder, tmp_path):
        pass
    extra = {"base_model.model.extra.base_layer.weight": torch.ones(2)}
    save_file({**tensors, **extra}, folder / "adapter_model.safetensors")
    with pytest.raises(WeightError, match="extra.weight is no weight"), as_hf(folder, tmp_path):
        pass
    # In another type than the base model, as one that was loaded in it has written them.
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    with as_hf(folder, tmp_path) as merged:
        assert not torch.equal(HFWeights(merged).read("lm_head.weight"), got)


def change(folder: Path, **values) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_dora": True}, ["use_dora"]),
        ({"rank_pattern": {"q_proj": 3}}, ["rank_pattern"]),
        ({"bias": "lora_only"}, ["bias", "lora_only"]),
        ({"alora_invocation_tokens": [628]}, ["alora_invocation_tokens"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights", "pissa_niter_4"]),
        ({"init_lora_weights": "lora_ga"}, ["init_lora_weights", "lora_ga"]),
        ({"init_lora_weights": "OLoRA"}, ["init_lora_weights", "olora"]),
        ({"init_lora_weights": "corda"}, ["init_lora_weights", "corda"]),
        ({"init_lora_weights": "loftq"}, ["init_lora_weights", "loftq"]),
        ({"r": None}, ["r is None", "lora_alpha 7"]),
        ({"r": 0}, ["r is 0"]),
        ({"lora_alpha": "7"}, ["lora_alpha '7'"]),
        ({"alpha_pattern": {"q_proj": 3}}, ["alpha_pattern"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"layer_replication": [[0, 2], [0, 2]]}, ["layer_replication"]),
        ({"kasa_config": {"beta": 1e-3}}, ["kasa_config"]),
        ({"peft_type": "IA3"}, ["IA3"]),
        ({"base_model_name_or_path": "Qwen/Qwen2.5-VL-3B"}, ["Qwen/Qwen2.5-VL-3B", "no folder"]),
        ({"base_model_name_or_path": None}, ["names the base model None", "no folder"]),
    ],
    ids=lambda value: next(iter(value), ""),
)
def test_what_can_not_be_merged_is_named(values, words, base, tmp_path) -> None:
    adapter(base, tmp_path / "adapter")
    change(tmp_path / "adapter", **values)
    with pytest.raises(WeightError) as error, as_hf(tmp_path / "adapter", tmp_path):
        pass
    for word in ["adapter_config.json", *words]:
        assert word in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_tensors_that_do_not_fit_are_named(base, tmp_path) -> None:
    adapter(base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    good = load_file(path)
    name = next(n for n in good if "layers.2" in n and "q_proj.lora_A" in n)
    other, out = good[name].clone(), name.replace("lora_A", "lora_B")
    pixels = next(n for n in good if "patch_embed.proj.lora_A" in n)
    for bad, word in (
        ({**good, name: good[name][:, :-1].contiguous()}, "another model"),
        ({**good, out: good[out][:, :-1].contiguous()}, "another model"),
        # As many elements of a kernel of another shape.
        ({**good, pixels: good[pixels].transpose(1, 2).contiguous()}, "another model"),
        (
            {**good, name: good[name][:-1].contiguous()},
            r"A of .*layers.2.* is \[2, 96\], .* r is 3",
        ),
        ({n: t for n, t in good.items() if n != name}, "lacks A or B"),
        ({**good, name.replace("layers.2", "layers.99"): other}, "no such weight"),
        ({**good, "extra.weight": other}, "extra.weight"),
    ):
        save_file(bad, path)
        with pytest.raises(WeightError, match=word), as_hf(tmp_path / "adapter", tmp_path):
            pass
    config = tmp_path / "adapter" / "adapter_config.json"
    for file, text, word in (
        (path, "{}", "adapter_model.safetensors can't be read"),
        (path, None, "adapter_model.safetensors can't be read"),
        (config, "[]", "adapter_config.json must hold an object"),
        (config, "{", "adapter_config.json can't be read"),
    ):
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(WeightError, match=word), as_hf(tmp_path / "adapter", tmp_path):
            pass


def test_what_older_releases_of_peft_do_not_write(base, tmp_path) -> None:
    """Of options that they lack, and a base that is damaged."""
    wanted = adapter(base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    old = ("peft_type", "r", "lora_alpha", "base_model_name_or_path", "bias")
    path.write_text(json.dumps({key: json.loads(path.read_text())[key] for key in old}))
    change(tmp_path / "adapter", rank_pattern=None)
    with as_hf(tmp_path / "adapter", tmp_path) as folder:
        for name, got in load_file(folder / "model.safetensors").items():
            want = wanted[canonical_name(name)]
            assert (got - want).abs().max() <= ROUNDING * want.abs().max(), name
    broken = shutil.copytree(base, tmp_path / "broken")
    save_file(
        {**load_file(base / "model.safetensors"), "extra": torch.ones(1)},
        broken / "model.safetensors",
    )
    change(tmp_path / "adapter", base_model_name_or_path=str(broken))
    with (
        pytest.raises(WeightError, match="broken: .* is extra"),
        as_hf(tmp_path / "adapter", tmp_path),
    ):
        pass


def test_half_precision_is_rounded_once(base, tmp_path) -> None:
    """Base and adapter in bfloat16: the product and the sum are float32."""
    folder, half = tmp_path / "adapter", shutil.copytree(base, tmp_path / "half")
    adapter(base, folder)
    for path in (half / "model.safetensors", folder / "adapter_model.safetensors"):
        table = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
        save_file(table, path, metadata={"format": "pt"})
    change(folder, base_model_name_or_path=str(half))
    pairs = load_file(folder / "adapter_model.safetensors")
    before, seen = HFWeights(half), 0
    with as_hf(folder, tmp_path) as merged:
        after = HFWeights(merged)
        for name, a in pairs.items():
            if "lora_B" in name:
                continue
            b = pairs[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            old, got = before.read(weight).double(), after.read(weight)
            want = old + 7 / 3 * (b.double().flatten(1) @ a.double().flatten(1)).view(old.shape)
            assert got.dtype == torch.bfloat16
            half = 2.0**-8 * want.abs()  # at most half a unit in bfloat16's last place
            error = (got.double() - want).abs() - half
            assert error.max() <= ROUNDING * want.abs().max(), weight
            seen += 1
    assert seen == 4 * 3 + 4 * 3 + 1


def test_a_checkpoints_adapters_are_merged_as_peft_merges_them(alone, base, tmp_path) -> None:
    """What a run saves in its checkpoint and in its adapter folder is one model."""
    import transformers

    from vlmtrain.checkpoint.training.checkpoint import Saver

    targets = ("q_proj", "o_proj", "up_proj", "qkv", "proj")
    options = {"rank": 3, "alpha": 7.0, "targets": targets, "vision": True}
    engine = alone(base, lora=options)
    for name, parameter in engine.parts[0].named_parameters():
        if ".adapters." in name:
            parameter.data.normal_(0.0, 0.3)
    files, folder = ModelFiles(base), tmp_path / "checkpoints"
    saver = Saver(folder, files, keep=9)
    for step, extra in ((1, {}), (2, {"config": {"lora": options}})):
        saver.start(step, engine.parts, engine.optimizer, extra)
    saver.finish()
    adapters.save_adapters(engine.exported, LoraSection(**options), files, tmp_path / "adapter")

    checkpoint = folder / "step-00000002"
    with pytest.raises(WeightError, match=r"holds LoRA adapters beside .* megatron-to-hf --source"):
        open_weights(checkpoint, read_spec(checkpoint)).check()
    with (
        pytest.raises(WeightError, match="step-00000001 holds LoRA adapters but not their rank"),
        as_hf(folder / "step-00000001", tmp_path),
    ):
        pass
    plain = transformers.AutoModelForImageTextToText.from_pretrained(base).float()
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    before, moved = HFWeights(base), 0
    with as_hf(folder, tmp_path) as merged:
        after = HFWeights(merged)
        for name, want in model.named_parameters():
            got = after.read(name)
            assert (got - want).abs().max() <= ROUNDING * want.abs().max(), name
            moved += not torch.equal(got, before.read(name))
    assert moved == 4 * 3 + 4 * 3  # both towers' layers; up_proj is of both


def test_an_adapter_folder_names_its_base_from_anywhere(base, tmp_path, monkeypatch) -> None:
    """Whatever the folder a run was started in; and a full disk is one sentence."""
    monkeypatch.setattr(adapters.parallel_state, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(adapters.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    section = LoraSection(rank=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.chdir(base.parent)
        adapters.save_adapters([], section, ModelFiles(base.name), tmp_path / "adapter")
        monkeypatch.chdir("/")
        assert base_of(tmp_path / "adapter") == base

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match="adapter can't be written: No space left on device"):
            adapters.save_adapters([], section, ModelFiles(base), tmp_path / "adapter")
        assert base_of(tmp_path / "adapter") == base  # the old one stays
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_converted_weights_go_where_a_signal_ends_the_process(tmp_path, number) -> None:
    script = f"""
import os, signal
from pathlib import Path
from vlmtrain.checkpoint.model_folder import _removed_at_the_end
signal.signal({int(number)}, signal.SIG_DFL)  # nohup ignores SIGHUP
folder = Path({str(tmp_path / "weights")!r})
folder.mkdir()
(folder / "model.safetensors").write_bytes(b"0")
with _removed_at_the_end(folder):
    os.kill(os.getpid(), {int(number)})
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -number and not (tmp_path / "weights").exists()
