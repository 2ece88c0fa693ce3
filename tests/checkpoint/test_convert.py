"""`vlmtrain convert`: round trips, both kinds of folder, what is refused, and memory."""

from __future__ import annotations

import errno
import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_mapping import shapes_of
from tests.parity import reference as ref
from tests.ranks import ROOT
from tests.released import released_config
from vlmtrain import cli
from vlmtrain.checkpoint import convert
from vlmtrain.checkpoint.hf.files import HFWeights, SafetensorsWriter
from vlmtrain.checkpoint.mapping import WeightError, canonical_name
from vlmtrain.checkpoint.megatron.torch_dist import ChunkReader
from vlmtrain.checkpoint.weights import check_weights
from vlmtrain.convert.verify import compare
from vlmtrain.core import files
from vlmtrain.core.config import ParallelSection
from vlmtrain.core.files import CheckpointError
from vlmtrain.models.family import parse_spec, read_spec

SEED = random.SystemRandom().randrange(10**6)
LAYOUTS = [
    ParallelSection(),
    ParallelSection(tensor=2),
    ParallelSection(tensor=2, pipeline=2, text_layers=(1, 3)),
    ParallelSection(pipeline=4, vision_layers=(3, 1, 0, 0), text_layers=(0, 1, 2, 1)),
    ParallelSection(
        pipeline=2, virtual_pipeline=2, vision_layers=(2, 2, 0, 0), text_layers=(0, 1, 2, 1)
    ),
    ParallelSection(tensor=2, pipeline=2, vision="multiplexed"),
]


PROCESSOR_FILES = "preprocessor_config", "video_preprocessor_config", "processor_config"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    print(f"seed {SEED}")
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": ref.save_model(
            ref.make_model("qwen3_vl", vision_heads=4, tied=True, seed=SEED), folder / "tied"
        ),
        "untied": ref.save_model(
            ref.make_model("qwen2_5_vl", vision_heads=4, seed=SEED), folder / "untied"
        ),
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What safetensors' own reader finds in a folder."""
    actual = {}
    for file in sorted(folder.glob("*.safetensors")):
        actual.update({canonical_name(n): t for n, t in load_file(file).items()})
    return actual


def variant(source: Path, target: Path, dtype: torch.dtype, shards: int, new_names: bool) -> Path:
    """The folder in another type, in several files, with the names of transformers >= 4.52."""
    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    table = {}
    for name, tensor in tensors(source).items():
        if new_names and name.startswith("visual."):
            name = "model." + name
        elif new_names and name.startswith("model."):
            name = "model.language_model." + name.removeprefix("model.")
        table[name] = tensor.to(dtype)
    names = sorted(table)
    if shards == 1:
        save_file(table, target / "model.safetensors", metadata={"format": "pt"})
        return target
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: table[n] for n in names[i::shards]}, target / file)
        weight_map.update(dict.fromkeys(names[i::shards], file))
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def layout_of(folder: Path, section: ParallelSection):
    return convert.layout_for(read_spec(folder), section)


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(
    ("dtype", "shards", "new_names"),
    [(torch.float32, 1, False), (torch.bfloat16, 3, True), (torch.float16, 2, False)],
    ids=["fp32", "bf16, 3 files, new names", "fp16, 2 files"],
)
def test_round_trip_is_bitwise(kind, dtype, shards, new_names, models, tmp_path):
    """HF -> A -> B -> HF over random layouts, then what transformers' own reader finds."""
    source = variant(models[kind], tmp_path / "source", dtype, shards, new_names)
    others = {f"{n}.json": json.dumps({n: [SEED]}).encode() for n in PROCESSOR_FILES}
    for name, content in others.items():
        (source / name).write_bytes(content)
    a, b = random.Random(SEED).sample(LAYOUTS, 2)
    where = f"{a} {b} (seed {SEED})"
    convert.to_megatron(source, tmp_path / "a", layout_of(source, a))
    convert.to_megatron(tmp_path / "a", tmp_path / "b", layout_of(source, b))
    check_weights(tmp_path / "b", read_spec(tmp_path / "b"))
    convert.to_hf(tmp_path / "b", tmp_path / "back", shard_bytes=10**6)
    assert {name: (tmp_path / "back" / name).read_bytes() for name in others} == others
    before, after = tensors(source), tensors(tmp_path / "back")
    assert after.keys() == before.keys(), where
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), (name, where)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    comparison = compare(source, tmp_path / "b")
    assert comparison.equal
    assert sum(g.tensors for g in comparison.groups.values()) == len(before)


@pytest.mark.parametrize("section", LAYOUTS[1:], ids=str)
def test_each_layout_has_its_files(section, models, tmp_path):
    """One file a rank, each tensor where that layout's rank looks for it."""
    source = models["untied"]
    convert.to_megatron(source, tmp_path / "a", layout_of(source, section))
    names = {p.name for p in (tmp_path / "a").glob("*.distcp")}
    assert names == {f"__{r}_0.distcp" for r in range(section.tensor * section.pipeline)}
    reader = ChunkReader(tmp_path / "a")
    rows = reader.shape("language_model.embedding.word_embeddings.weight")[0]
    assert rows == 256 and rows % (128 * section.tensor) == 0


def test_transformers_reads_what_is_written(models, tmp_path):
    import transformers

    source = models["untied"]
    convert.to_megatron(source, tmp_path / "a", layout_of(source, LAYOUTS[2]))
    convert.to_hf(tmp_path / "a", tmp_path / "back", dtype=torch.bfloat16)
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    table = tensors(source)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, table[canonical_name(name)].bfloat16()), name


def edit(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    table = load_file(target / "model.safetensors")
    change(table)
    save_file(table, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(next(n for n in t if n.endswith("norm2.weight"))), ["norm2", "missing"]),
        (lambda t: t.update(extra=torch.zeros(1)), ["extra", "no place"]),
        (lambda t: next(v for n, v in t.items() if "up_proj" in n)[3].fill_(math.inf), ["up_proj"]),
        (lambda t: next(v for n, v in t.items() if "q_proj.bias" in n)[0].fill_(math.nan), ["NaN"]),
        (
            lambda t: t["model.embed_tokens.weight"][-1].fill_(math.inf),
            ["embed_tokens", "infinite"],
        ),
        (lambda t: t["lm_head.weight"][:, -1].fill_(math.nan), ["lm_head.weight", "NaN"]),
        (
            lambda t: t.update(
                {n: v.flatten(1, 3) for n, v in t.items() if n.endswith("patch_embed.proj.weight")}
            ),
            ["patch_embed.proj.weight", "does not fit"],
        ),
        (
            lambda t: t.update(
                {n: v[:, :-1].clone() for n, v in t.items() if "layers.1.mlp.gate_proj" in n}
            ),
            ["gate_proj", "[108, 95]"],
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), ["model.norm.weight [7]", "96"]),
        (
            lambda t: t.update(
                {n: v[:, :-1].clone() for n, v in t.items() if n.endswith("mlp.down_proj.weight")}
            ),
            ["layers.0.mlp.down_proj.weight [96, 107]", "96 rows of 108 elements"],
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:, :7].clone()}),
            ["lm_head.weight", "rows of 96 elements"],
        ),
        (
            lambda t: t.update({n: v.int() for n, v in t.items() if "layers.3.mlp.down" in n}),
            ["down_proj", "I32"],
        ),
        (
            lambda t: t.update(
                {n: v.unflatten(1, (-1, 2)) for n, v in t.items() if "layers.1.self_attn.o" in n}
            ),
            ["layers.1.self_attn.o_proj.weight [96, 48, 2]", "96 rows of 96 elements"],
        ),
        (
            lambda t: t.update({n: v[:, None] for n, v in t.items() if n.endswith("proj.bias")}),
            ["q_proj.bias [96, 1]", "need 96"],
        ),
        (
            lambda t: t.update({n: v[:, None] for n, v in t.items() if "input_layernorm" in n}),
            ["layers.0.input_layernorm.weight [96, 1]", "need 96"],
        ),
        (
            lambda t: t.update({n: v.bfloat16() for n, v in t.items() if "layers.1.mlp.up" in n}),
            ["layers.0.mlp", "is float32", "layers.1.mlp.up_proj.weight bfloat16", "--dtype"],
        ),
        (
            lambda t: t.update({n: v.bfloat16() for n, v in t.items() if "0.self_attn.q" in n}),
            ["layers.0.self_attn", "bfloat16", "one Megatron tensor", "--dtype"],
        ),
    ],
    ids=[
        "missing",
        "unexpected",
        "inf",
        "nan",
        "embedding",
        "head's",
        "patches",
        "misshapen",
        "norm",
        "all layers",
        "head",
        "integers",
        "dimensions",
        "biases",
        "norms",
        "types of layers",
        "types of a layer",
    ],
)
def test_bad_weights_are_named(change, words, models, tmp_path):
    source = edit(models["untied"], tmp_path / "source", change)
    with pytest.raises(WeightError) as error:
        convert.to_megatron(source, tmp_path / "out", layout_of(source, LAYOUTS[1]))
    for word in words:
        assert word in str(error.value), str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]  # nothing looks finished


def test_ranks_that_share_experts_have_no_bearing_on_weights():
    spec = parse_spec(ref.make_model("qwen3_vl_moe").config.to_dict())
    layout = convert.layout_for(spec, ParallelSection(expert=2, pipeline=2))
    assert layout.tensor == 1 and layout.pipeline == 2


@pytest.mark.parametrize("shape", [(8, 96, 2, 24), (8, 192, 24), (8, 4608)])
def test_misshapen_experts_are_named(shape, tmp_path):
    folder = ref.save_model(ref.make_model("qwen3_vl_moe"), tmp_path / "model")

    def reshape(table):
        (name,) = (n for n in table if "layers.1.mlp" in n and n.endswith("gate_up_proj"))
        table[name] = table[name].reshape(shape)

    source = edit(folder, tmp_path / "source", reshape)
    with pytest.raises(WeightError, match=r"layers.1.mlp.experts.*does not fit the sizes"):
        check_weights(source, read_spec(source))


def test_types_that_differ_stay_as_they_are(models, tmp_path):
    """Where no Megatron tensor is made of them; transformers loads such a folder."""

    def half(table):
        table.update({n: v.bfloat16() for n, v in table.items() if "0.self_attn.q" in n})

    source = edit(models["untied"], tmp_path / "source", half)
    convert.to_hf(source, tmp_path / "copy")
    assert compare(source, tmp_path / "copy").equal
    written = HFWeights(tmp_path / "copy")
    kinds = {n: written.dtype(n) for n in written.names() if "layers.0.self_attn" in n}
    assert {k for n, k in kinds.items() if "q_proj" in n} == {torch.bfloat16}
    assert {k for n, k in kinds.items() if "q_proj" not in n} == {torch.float32}


@pytest.mark.parametrize("weight_map", [[], None, "model"])
def test_an_index_that_is_none_is_named(weight_map, models, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(models["untied"], source)
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightError, match="index.json is not a valid safetensors index"):
        HFWeights(source)


def test_two_weights_for_one_place_are_named(models, tmp_path):
    """What transformers would read of them is not what an index or the last name says."""
    both, twice = tmp_path / "both", tmp_path / "twice"
    variant(models["untied"], both, torch.float32, 2, True)
    shutil.copy(models["untied"] / "model.safetensors", both)
    with pytest.raises(WeightError, match="both has model.safetensors and model.safetensors.index"):
        HFWeights(both)
    shutil.copytree(models["untied"], twice)
    table = load_file(twice / "model.safetensors")
    old = "model.layers.0.mlp.down_proj.weight"
    new = old.replace("model.", "model.language_model.")
    kept = table[old] if old in table else table[new]
    save_file({**table, old: kept, new: kept.clone()}, twice / "model.safetensors")
    with pytest.raises(WeightError, match=f"{re.escape(old)}.*which are one weight"):
        HFWeights(twice)


def test_a_cast_that_overflows_is_named(models, tmp_path):
    def grow(table):
        next(v for n, v in table.items() if "o_proj" in n)[0, 0] = 1e6

    source = edit(models["untied"], tmp_path / "source", grow)
    with pytest.raises(WeightError, match="float16"):
        convert.to_megatron(
            source, tmp_path / "out", layout_of(source, LAYOUTS[0]), dtype=torch.float16
        )


def test_damage_is_found_before_use(models, tmp_path):
    source = models["untied"]
    convert.to_megatron(source, tmp_path / "a", layout_of(source, LAYOUTS[1]))
    spec = read_spec(tmp_path / "a")
    file = tmp_path / "a" / "__1_0.distcp"
    whole = file.read_bytes()
    for damaged, word in (
        (whole[:-10], "bytes"),
        (whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:], "checksum"),
        (None, "missing"),
    ):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(WeightError, match=word) as error:
            check_weights(tmp_path / "a", spec)
        assert "__1_0.distcp" in str(error.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("text_config", "num_hidden_layers", 3, "linear_qkv.* holds 4 layers, config.json says 3"),
        ("vision_config", "depth", 5, "vision.* holds 4 layers, config.json says 5"),
        ("text_config", "intermediate_size", 107, r"linear_fc1.weight \[216, 96\] .*need 20544"),
        ("text_config", "vocab_size", 257, r"word_embeddings.weight \[256, 96\] .*need 24672"),
        ("text_config", "tie_word_embeddings", False, "output_layer.weight is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_checkpoint_of_another_model_is_named(section, key, value, words, models, tmp_path):
    """Of the words a checkpoint holds more rows than the model has, never fewer."""
    source = models["tied" if key.startswith("tie") else "untied"]
    convert.to_megatron(source, tmp_path / "a", layout_of(source, LAYOUTS[0]))
    (tmp_path / "a" / "manifest.json").unlink()
    check_weights(tmp_path / "a", read_spec(tmp_path / "a"))
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config[section][key] = value
    if key in config:
        config[key] = value
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=words):
        check_weights(tmp_path / "a", read_spec(tmp_path / "a"))


def test_verify_tells_one_changed_bit(models, tmp_path, capsys):
    source = models["untied"]
    convert.to_megatron(source, tmp_path / "a", layout_of(source, LAYOUTS[1]))

    def flip(table):
        table["lm_head.weight"].view(torch.int32)[7, 7] ^= 1

    other = edit(source, tmp_path / "other", flip)
    arguments = ["convert", "verify", "--target", str(tmp_path / "a"), "--logits", "no"]
    assert cli.main([*arguments, "--source", str(source)]) == 0
    assert "bitwise equal" in capsys.readouterr().out
    assert cli.main([*arguments, "--source", str(other)]) == 1
    printed = capsys.readouterr().out
    assert "different: lm_head.weight" in printed and "not the same" in printed


def test_full_disk_leaves_what_was_there(models, tmp_path, monkeypatch):
    """ENOSPC after every possible number of writes is one sentence, and the old target stays."""
    source, target = models["untied"], tmp_path / "out"
    layout = layout_of(source, LAYOUTS[1])
    convert.to_megatron(source, target, layout)
    before = (target / "manifest.json").read_text()
    left = 0
    original = files.SummedFile.write

    def write(self, data):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, data)

    monkeypatch.setattr(files.SummedFile, "write", write)
    for left in (0, 1, 50, 300):  # noqa: B007
        with pytest.raises(CheckpointError, match="No space left on device"):
            convert.to_megatron(source, target, layout, overwrite=True)
        with pytest.raises(CheckpointError, match="No space left on device"):
            left = 0
            convert.to_hf(target, tmp_path / "hf")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert (target / "manifest.json").read_text() == before
    check_weights(target, read_spec(target))


def test_command_line(models, tmp_path, capsys):
    source, a, back = str(models["tied"]), str(tmp_path / "a"), str(tmp_path / "back")
    assert cli.main(["convert", "--help"]) == 0
    page = capsys.readouterr().out
    assert len(page.splitlines()) < 50
    for word in ("hf-to-megatron", "megatron-to-hf", "reshard", "verify", "--source", "--target",
                 "--dtype", "--overwrite", "--logits", "--parallel.text_layers",
                 "--parallel.expert"):  # fmt: skip
        assert word in page
    run = ["convert", "hf-to-megatron", "--source", source, "--target", a]
    assert cli.main([*run, "--parallel.tensor", "2"]) == 0
    assert cli.main(["convert", "megatron-to-hf", "--source", a, "--target", back]) == 0
    folders = ["--source", a, "--target", back]
    for code, arguments, words in (
        (1, run, ["exists", "--overwrite"]),
        (1, ["convert", "reshard", "--source", source, "--target", back], ["no Megatron check"]),
        (1, ["convert", "hf-to-megatron", *folders], ["reshard"]),
        (2, [*run, "--logits=no"], ["convert hf-to-megatron has no use for --logits"]),
        (
            2,
            ["convert", "megatron-to-hf", *folders, "--parallel.tensor=2"],
            ["convert megatron-to-hf has no use for --parallel"],
        ),
        (2, [*run, "--parallel.vision_piece=9"], ["no use for --parallel.vision_piece; leave"]),
        (2, [*run, "--parallel.tensor_overlap"], ["no use for --parallel.tensor_overlap"]),
        (2, ["convert", "verify", *folders, "--dtype=bf16"], ["for --dtype"]),
        (2, ["convert", "verify", *folders, "--overwrite"], ["--overwrite;"]),
        (2, ["convert", "upside-down"], ["upside-down", "hf-to-megatron"]),
        (1, [*run[:-1], back + "2", "--parallel.tensor", "3"], ["parallel.tensor 3"]),
    ):
        capsys.readouterr()
        assert cli.main(arguments) == code
        message = capsys.readouterr().err.strip()
        assert len(message.splitlines()) == 1
        for word in words:
            assert word in message, message


def test_a_target_is_replaced_and_nothing_beside_it(models, tmp_path):
    """Names that people give to copies are theirs."""
    source, layout = models["untied"], layout_of(models["untied"], LAYOUTS[0])
    for name in ("folder.old", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text(name)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to("elsewhere")
    for target in ("folder", "folder", "file", "link"):
        convert.to_megatron(source, tmp_path / target, layout, overwrite=True)
        assert (tmp_path / target / "manifest.json").is_file()
    left = {"folder", "folder.old", "file", "link", "elsewhere"}
    assert {path.name for path in tmp_path.iterdir()} == left
    for name in ("folder.old", "elsewhere"):
        assert (tmp_path / name / "mine.txt").read_text() == name


def test_the_newest_checkpoint_of_a_run_is_taken(models, tmp_path, capsys):
    run = tmp_path / "checkpoints"
    convert.to_megatron(
        models["untied"], run / "step-00000007", layout_of(models["untied"], LAYOUTS[1])
    )
    (run / "latest").write_text("step-00000008\n")  # removed by hand
    back = str(tmp_path / "back")
    assert cli.main(["convert", "megatron-to-hf", "--source", str(run), "--target", back]) == 0
    verify = ["convert", "verify", "--source", back, "--target", str(run), "--logits", "no"]
    assert cli.main(verify) == 0 and "the same model" in capsys.readouterr().out


def test_a_target_that_holds_the_source_is_refused(models, tmp_path, capsys):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000007"
    convert.to_megatron(models["untied"], checkpoint, layout_of(models["untied"], LAYOUTS[1]))
    (run / "checkpoints" / "latest").write_text("step-00000007\n")
    convert.to_hf(checkpoint, run / "hf")
    (run / "run.json").touch()
    for action, folder in (
        ("hf-to-megatron", run),
        ("hf-to-megatron", run / "hf"),
        ("reshard", run / "checkpoints"),
        ("megatron-to-hf", run / "checkpoints"),
    ):
        where = ["--source", str(folder), "--target", str(folder), "--overwrite"]
        assert cli.main(["convert", action, *where]) == 1
        assert "--target" in capsys.readouterr().err
    assert (checkpoint / "manifest.json").is_file() and (run / "hf" / "config.json").is_file()


def test_a_folder_of_transformers_beside_deepspeeds_latest(models, tmp_path, capsys):
    """As Trainer with DeepSpeed writes checkpoints."""
    folder = tmp_path / "checkpoint-500"
    shutil.copytree(models["untied"], folder)
    (folder / "latest").write_text("global_step500")
    (folder / "global_step500").mkdir()
    verify = ["convert", "verify", "--source", str(folder), "--target", str(models["untied"])]
    assert cli.main([*verify, "--logits", "no"]) == 0
    assert "the same model" in capsys.readouterr().out


@pytest.mark.parametrize("merge", [1, 3])
def test_verify_runs_with_any_merge_of_patches(merge, models, tmp_path, capsys):
    folder = tmp_path / "source"
    shutil.copytree(models["untied"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["spatial_merge_size"] = merge
    (folder / "config.json").write_text(json.dumps(config))
    width = config["vision_config"]["hidden_size"] * merge**2

    def widen(table):
        for name in [n for n in table if "merger.mlp" in n]:
            shape = [width if size == width // merge**2 * 4 else size for size in table[name].shape]
            table[name] = torch.randn(shape) / 10

    source = edit(folder, tmp_path / "edited", widen)
    convert.to_megatron(source, tmp_path / "a", layout_of(source, LAYOUTS[0]))
    verify = ["convert", "verify", "--source", str(source), "--target", str(tmp_path / "a")]
    assert cli.main([*verify, "--logits", "yes"]) == 0, capsys.readouterr()
    assert "the same model" in capsys.readouterr().out


def big_folder(folder: Path) -> int:
    """A model of about 0.4 GB with one large tensor, written tensor by tensor; its bytes."""
    config = released_config("qwen2_5_vl-7b") | dict(
        vocab_size=40960,
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2816,
    )
    config["vision_config"] |= dict(
        depth=4, hidden_size=256, num_heads=4, intermediate_size=512, out_hidden_size=1024
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    table = shapes_of(read_spec(folder))
    writer = SafetensorsWriter(
        folder / "model.safetensors", [(n, torch.bfloat16, table[n]) for n in table]
    )
    for name in table:
        writer.add(name, torch.full(table[name], 0.5, dtype=torch.bfloat16))
    writer.close()
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_memory_is_a_small_multiple_of_the_largest_tensor(tmp_path):
    total = big_folder(tmp_path / "hf")
    largest = max(
        math.prod(HFWeights(tmp_path / "hf").shape(n)) * 2
        for n in HFWeights(tmp_path / "hf").names()
    )
    assert total > 3.5 * largest
    script = (
        "import resource, sys\n"
        "from vlmtrain.checkpoint import convert\n"
        "from vlmtrain.convert import command\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "import torch, rich, tyro; torch.zeros(1).half()\n"
        "from torch.distributed.checkpoint import filesystem\n"
        "before = peak()\n"
        "assert command.main(sys.argv[1:]) == 0\n"
        "print(peak() - before)\n"
    )
    for arguments in (
        ["hf-to-megatron", "--source", "hf", "--target", "mg", "--parallel.tensor", "2"],
        ["megatron-to-hf", "--source", "mg", "--target", "back"],
    ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        grown = int(done.stdout.split()[-1])
        print(f"{arguments[0]}: {grown / largest:.2f} x the largest tensor")
        assert grown < 2.5 * largest, done.stdout
