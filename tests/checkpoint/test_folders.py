"""Hugging Face folders: what is read of their weights, and the files that a run writes."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.parity import reference as ref
from tests.train.conftest import conversations, model, options  # noqa: F401
from vlmtrain import cli
from vlmtrain.checkpoint import convert
from vlmtrain.checkpoint.hf import files, save
from vlmtrain.checkpoint.hf.files import HFWeights, check_names
from vlmtrain.checkpoint.mapping import WeightError, canonical_name, rows
from vlmtrain.checkpoint.model_folder import as_hf
from vlmtrain.checkpoint.weights import check_weights, open_weights
from vlmtrain.core.config import ParallelSection
from vlmtrain.core.files import CheckpointError, exists, is_dir, is_file
from vlmtrain.models.family import read_spec


def test_a_tied_head_that_is_stored_too(tmp_path, monkeypatch) -> None:
    """As some folders have it: it must be the words' weights, to the last row."""
    tied = ref.make_model("qwen2_5_vl", tied=True, seed=torch.initial_seed() % 2**31)
    folder = ref.save_model(tied, tmp_path / "tied")
    spec, table = read_spec(folder), load_file(folder / "model.safetensors")
    (name,) = (n for n in table if n.endswith("embed_tokens.weight"))
    head = table[name].clone()
    monkeypatch.setattr(files, "PIECE_BYTES", 2 * head.shape[1] * 7)  # rows that are read at once
    for row, good in ((None, True), (0, False), (-1, False)):
        changed = head.clone()
        if row is not None:
            changed[row, -1] += 1
        save_file({**table, "lm_head.weight": changed}, folder / "model.safetensors")
        weights = HFWeights(folder)
        if good:
            check_names(weights, spec)
        else:
            with pytest.raises(WeightError, match="lm_head.weight differs from model.embed_tok"):
                check_names(weights, spec)
    save_file({**table, "lm_head.weight": head[:-1].clone()}, folder / "model.safetensors")
    with pytest.raises(WeightError, match="lm_head.weight differs from"):
        check_names(HFWeights(folder), spec)


def test_an_index_lists_what_is_there(tmp_path) -> None:
    table = {name: torch.zeros(2) for name in "abcd"}
    for number in (1, 2):
        part = {name: table[name] for name in "abcd"[2 * number - 2 : 2 * number]}
        save_file(part, tmp_path / f"{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"

    def listed(**weight_map: str) -> HFWeights:
        index.write_text(json.dumps({"weight_map": weight_map}))
        return HFWeights(tmp_path)

    one, two = "1.safetensors", "2.safetensors"
    assert listed(a=one, b=one, c=two, d=two).names() == set("abcd")
    with pytest.raises(WeightError, match=r"2.safetensors does not hold b, which model.*json list"):
        listed(a=one, b=two, c=two, d=two)
    with pytest.raises(
        WeightError, match="1 of 3 weight files .* the first is 3.safetensors; down"
    ):
        listed(a=one, b=one, c=two, d="3.safetensors")


def test_an_index_without_a_map_is_named(tmp_path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(WeightError, match="index.json is not a valid safetensors index: KeyErr"):
        HFWeights(tmp_path)


def test_what_a_model_folder_holds_beside_weights(tmp_path) -> None:
    """Read at once, written later: all of it, or what says how the model is asked."""
    processor = {"processor_config.json", "preprocessor_config.json"}
    processor |= {"video_preprocessor_config.json", "chat_template.jinja", "chat_template.json"}
    others = {"tokenizer.json", "merges.txt", "tokenizer.model", "README.md"}
    left = {"model.safetensors.index.json", "pytorch_model.bin.index.json", "metadata.json"}
    left |= {"manifest.json", "model.safetensors", "common.pt"}
    source = tmp_path / "source"
    source.mkdir()
    for name in processor | others | left:
        (source / name).write_text(f"of {name}")
    config = {"text_config": {"dtype": "float32"}, "vision_config": {"torch_dtype": "float32"}}
    (source / "config.json").write_text(json.dumps(config))
    held = files.ModelFiles(source)
    shutil.rmtree(source)
    for target in ("all", "asked", "kept"):
        (tmp_path / target).mkdir()
    held.write(tmp_path / "all", torch.bfloat16, lambda folder: (folder / "merges.txt").unlink())
    names = {path.name for path in (tmp_path / "all").iterdir()}
    assert names == (processor | others | {"config.json"}) - {"merges.txt"}
    assert all((tmp_path / "all" / n).read_text() == f"of {n}" for n in names if n != "config.json")
    assert json.loads((tmp_path / "all" / "config.json").read_text()) == {
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"torch_dtype": "bfloat16"},
        "torch_dtype": "bfloat16",
    }
    held.write(tmp_path / "kept", None)
    assert json.loads((tmp_path / "kept" / "config.json").read_text()) == config
    held.write_processor(tmp_path / "asked")
    assert {path.name for path in (tmp_path / "asked").iterdir()} == processor
    with pytest.raises(WeightError, match="source can't be read: No such file"):
        files.ModelFiles(source)


def test_a_file_is_as_safetensors_writes_it(tmp_path) -> None:
    """Of names of every length: what comes before the numbers is a multiple of 8 bytes."""
    for number in range(8):
        path, name = tmp_path / f"{number}.safetensors", "n" * (number + 1)
        tensors = {name: torch.randn(3, 5).bfloat16(), "scalar": torch.randn(())}
        writer = files.SafetensorsWriter(path, [(n, t.dtype, t.shape) for n, t in tensors.items()])
        for one, tensor in tensors.items():
            writer.add(one, tensor)
        entry = writer.close()
        assert entry["bytes"] == path.stat().st_size
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}  # transformers asks for it
        assert all(torch.equal(t, tensors[n]) for n, t in load_file(path).items())


def test_older_folders(tmp_path, synced) -> None:
    """With buffers that every release recomputes, and the pixels' convolution as a product."""
    folder = ref.save_model(ref.make_model("qwen2_5_vl", seed=3), tmp_path / "hf")
    table = load_file(folder / "model.safetensors")
    (pixels,) = (n for n in table if n.endswith("patch_embed.proj.weight"))
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    changed = {**table, pixels: table[pixels].flatten(1), **more}
    save_file(changed, old / "model.safetensors")
    convert.to_megatron(old, tmp_path / "a", convert.layout_for(read_spec(old), ParallelSection()))
    convert.to_hf(tmp_path / "a", tmp_path / "back")
    synced(tmp_path / "back")
    back = HFWeights(tmp_path / "back")
    assert len(back.names()) == len(table)
    assert all(torch.equal(back.read(name), tensor) for name, tensor in table.items())
    save_file({**changed, pixels: table[pixels].flatten(2)}, old / "model.safetensors")
    with pytest.raises(WeightError, match=r"patch_embed.proj.weight \[.*does not fit"):
        check_weights(old, read_spec(old))


def test_words_are_padded_with_zeros(tmp_path) -> None:
    """On any number of ranks, from both kinds of folder, whatever lies behind them in the file."""
    folder = ref.save_model(ref.make_model("qwen2_5_vl", vision_heads=4, seed=4), tmp_path / "hf")
    spec, table = read_spec(folder), load_file(folder / "model.safetensors")
    layout = convert.layout_for(spec, ParallelSection(tensor=2))
    convert.to_megatron(folder, tmp_path / "megatron", layout)
    found = [row for row in rows(spec) if row.transform == "vocab"]
    assert len(found) == 2
    for row in found:
        (words,) = (t for n, t in table.items() if canonical_name(n) == canonical_name(row.hf[0]))
        for size in (1, 2, 4, 8):
            padding = torch.zeros(-len(words) % (128 * size), words.shape[1])
            want = torch.cat([words, padding]).chunk(size)
            for place in (folder, tmp_path / "megatron"):
                source = open_weights(place, spec)
                got = [source.piece(row, 0, rank, size) for rank in range(size)]
                assert all(map(torch.equal, got, want)), (place, row.megatron, size)


def test_experts_are_written_as_released(tmp_path) -> None:
    """Also of a folder that has them the other way round."""
    folder = ref.save_model(ref.make_model("qwen3_vl_moe", seed=5), tmp_path / "hf")
    table = load_file(folder / "model.safetensors")
    turned = {
        name: t.transpose(1, 2).contiguous() if "mlp.experts." in name else t
        for name, t in table.items()
    }
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    save_file(turned, other / "model.safetensors")
    for name in ("hf", "other"):
        convert.to_hf(tmp_path / name, tmp_path / "back", overwrite=True)
        back = HFWeights(tmp_path / "back")
        assert all(torch.equal(back.read(n), tensor) for n, tensor in table.items()), name


def test_a_run_cuts_its_weights_into_files(
    model,  # noqa: F811
    conversations,  # noqa: F811
    tmp_path,
    monkeypatch,
) -> None:
    """Each as large as may be; they hold what the run's checkpoint holds."""
    most = 1_000_000
    monkeypatch.setattr(save, "SHARD_BYTES", most)
    run = tmp_path / "run"
    more = ["--train.steps=1", "--loader.workers=0", "--train.global_batch_packs=2"]
    assert cli.main(options(model, conversations, run, *more)) == 0
    index = json.loads((run / "hf" / "model.safetensors.index.json").read_text())
    sizes, tensors = [], {}
    for path in sorted((run / "hf").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.offset_keys())
        part = load_file(path)
        assert {index["weight_map"][name] for name in names} == {path.name}
        sizes.append([part[name].nbytes for name in names])
        tensors |= part
    assert len(sizes) > 3 and tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert all(sum(part) <= most or len(part) == 1 for part in sizes)
    assert all(sum(one) + other[0] > most for one, other in pairwise(sizes))
    convert.to_hf(run / "checkpoints" / "step-00000001", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    for name, base in (("first", tmp_path), ("second", tmp_path / "first")):
        (tmp_path / name).mkdir()
        config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    work = tmp_path / "work"
    work.mkdir()
    with (
        pytest.raises(CheckpointError, match="second: its base model .*first is an adapter itself"),
        as_hf(tmp_path / "second", work),
    ):
        pass
    assert not list(work.iterdir())
    shutil.rmtree(tmp_path / "first")
    with (
        pytest.raises(WeightError, match="names the base model .*first', which is no folder here"),
        as_hf(tmp_path / "second", work),
    ):
        pass


def test_what_can_not_be_looked_at_is_not_missing(tmp_path: Path) -> None:
    """As Path.exists says it before Python 3.14, also there."""
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    for name, found in {
        "file": (True, True, False),
        "link": (True, True, False),
        "folder": (True, False, True),
        "circle": (False, False, False),
        "gone": (False, False, False),
        "file/below": (False, False, False),
        "null\0byte": (False, False, False),
    }.items():
        assert tuple(ask(tmp_path / name) for ask in (exists, is_file, is_dir)) == found, name
    for ask in (exists, is_file, is_dir):  # a name that no file system looks up
        with pytest.raises(OSError, match="File name too long"):
            ask(tmp_path / ("long" * 1000))
