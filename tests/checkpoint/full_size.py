"""Models in the shapes of released sizes, with random weights, written tensor by tensor.

python -m tests.checkpoint.full_size FOLDER [2B|7B]   makes a folder, converts it to Megatron and
back, compares, prints time and peak memory of each and stores them for benchmarks/RESULTS.md
(`make test-full`).
"""

from __future__ import annotations

import filecmp
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.harness import commit
from vlmtrain.checkpoint.hf.files import SHARD_BYTES, SafetensorsWriter, finish_hf_folder
from vlmtrain.checkpoint.mapping import rows
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.family import read_spec

# family, sizes, tied; from the released config.json files
SIZES: dict[str, dict[str, Any]] = {
    "2B": dict(
        family="qwen2_vl", vocab=151936, hidden=1536, layers=28, heads=12, groups=2, width=8960,
        depth=32, vision_hidden=1280, vision_heads=16, tied=True,
    ),
    "7B": dict(
        family="qwen2_5_vl", vocab=152064, hidden=3584, layers=28, heads=28, groups=4, width=18944,
        depth=32, vision_hidden=1280, vision_heads=16, vision_width=3420, tied=False,
    ),
}  # fmt: skip
RSS_LIMIT_GB = {"2B": 1.5, "7B": 3.0}


def config_of(
    family: str,
    *,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    groups: int,
    width: int,
    depth: int,
    vision_hidden: int = 256,
    vision_heads: int = 4,
    vision_width: int = 512,
    tied: bool = False,
) -> dict[str, Any]:
    """A config.json in the style of the released ones."""
    section = hidden // heads // 8
    vision: dict[str, Any] = dict(depth=depth, num_heads=vision_heads, in_chans=3, patch_size=14)
    if family == "qwen2_vl":
        vision.update(embed_dim=vision_hidden, hidden_size=hidden, mlp_ratio=4)
    else:
        vision.update(
            hidden_size=vision_hidden, out_hidden_size=hidden, intermediate_size=vision_width
        )
    return dict(
        model_type=family,
        architectures=[
            "Qwen2VLForConditionalGeneration"
            if family == "qwen2_vl"
            else "Qwen2_5_VLForConditionalGeneration"
        ],
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=width,
        rope_theta=1e6,
        rope_scaling=dict(
            type="mrope", mrope_section=[section, section * 3 // 2, section * 3 // 2]
        ),
        tie_word_embeddings=tied,
        torch_dtype="bfloat16",
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        vision_config=vision,
    )


def shapes(spec: ModelSpec) -> dict[str, list[int]]:
    """Hugging Face shapes of a model's tensors."""
    v, h, w = spec.vision, spec.hidden_size, spec.vision.hidden_size
    kv, n = spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    by_suffix: dict[str, list[int]] = {
        "embed_tokens.weight": [spec.vocab_size, h],
        "lm_head.weight": [spec.vocab_size, h],
        "patch_embed.proj.weight": [w, v.in_channels, 2, v.patch_size, v.patch_size],
        "merger.mlp.0.weight": [4 * w, 4 * w],
        "merger.mlp.0.bias": [4 * w],
        "merger.mlp.2.weight": [h, 4 * w],
        "merger.mlp.2.bias": [h],
        "attn.qkv.weight": [3 * w, w],
        "attn.qkv.bias": [3 * w],
        "attn.proj.weight": [w, w],
        "q_proj.weight": [h, h],
        "q_proj.bias": [h],
        "k_proj.weight": [kv, h],
        "k_proj.bias": [kv],
        "v_proj.weight": [kv, h],
        "v_proj.bias": [kv],
        "o_proj.weight": [h, h],
        "mlp.fc1.weight": [v.intermediate_size, w],
        "mlp.fc1.bias": [v.intermediate_size],
        "mlp.fc2.weight": [w, v.intermediate_size],
    }
    found = {}
    for row in rows(spec):
        for name in row.hf:
            vision = name.startswith("visual.")
            inner, outer = (v.intermediate_size, w) if vision else (n, h)
            if "gate_proj" in name or "up_proj" in name:
                found[name] = [inner, outer] if name.endswith("weight") else [inner]
            elif "down_proj.weight" in name:
                found[name] = [outer, inner]
            else:
                hits = [s for suffix, s in by_suffix.items() if name.endswith(suffix)]
                found[name] = hits[0] if hits else [w if vision else h]
    return found


def make(folder: Path, size: str) -> None:
    """A folder with random bf16 weights of a released size."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(**SIZES[size]), indent=2))
    spec = read_spec(folder)
    table = shapes(spec)
    plan: list[list[str]] = [[]]
    filled = 0
    for name, shape in table.items():
        count = 2 * torch.Size(shape).numel()
        if filled + count > SHARD_BYTES:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += count
    files = []
    noise = torch.randn(1 << 24).mul_(0.02).bfloat16()
    for number, names in enumerate(plan):
        path = folder / f"part-{number}.safetensors"
        writer = SafetensorsWriter(path, [(n, torch.bfloat16, table[n]) for n in names])
        for i, name in enumerate(names):
            count = torch.Size(table[name]).numel()
            rolled = noise.roll(7919 * (i + 1))
            writer.add(name, rolled.repeat(-(-count // len(noise)))[:count].view(table[name]))
        writer.close()
        files.append((path.name, {n: 2 * torch.Size(table[n]).numel() for n in names}))
    finish_hf_folder(folder, files)


def timed(arguments: list[str]) -> tuple[float, float]:
    """Seconds and peak resident GB of `vlmtrain convert ARGUMENTS`."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "vlmtrain.cli", "convert", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, arguments
    return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    folder, size = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "2B"
    hf, megatron, other, back = (folder / n for n in ("hf", "megatron", "resharded", "back"))
    try:
        make(hf, size)
        jobs = [
            ["hf-to-megatron", "--source", f"{hf}", "--target", f"{megatron}",
             "--parallel.tensor", "2", "--parallel.pipeline", "2"],
            ["reshard", "--source", f"{megatron}", "--target", f"{other}"],
            ["megatron-to-hf", "--source", f"{other}", "--target", f"{back}"],
            ["verify", "--source", f"{hf}", "--target", f"{back}", "--logits", "no"],
        ]  # fmt: skip
        found: list[dict[str, Any]] = []
        total = sum(p.stat().st_size for p in hf.glob("*.safetensors")) / 1e9
        for arguments in jobs:
            seconds, rss = timed(arguments)
            print(
                f"{size} {arguments[0]}: {total:.2f} GB, {seconds:.1f} s "
                f"({1e3 * total / seconds:.0f} MB/s), peak RSS {rss:.2f} GB",
                flush=True,
            )
            assert rss < RSS_LIMIT_GB[size], f"{rss:.2f} GB is above {RSS_LIMIT_GB[size]} GB"
            found.append(
                dict(
                    size=size, job=arguments[0], gigabytes=total, seconds=seconds, rss=rss,
                    limit=RSS_LIMIT_GB[size], date=date.today().isoformat(), commit=commit(),
                )
            )  # fmt: skip
            if arguments[0] == "reshard":
                shutil.rmtree(megatron)  # 2B needs 13 GB of disk, not 18
        assert filecmp.cmp(hf / "config.json", back / "config.json", shallow=False) or json.loads(
            (hf / "config.json").read_text()
        ) == json.loads((back / "config.json").read_text())
        report.store_conversions(report.describe_machine("cpu"), size, found)
        report.write()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"whole test: {resource.getrusage(resource.RUSAGE_SELF).ru_utime:.0f} s user")


if __name__ == "__main__":
    main()
