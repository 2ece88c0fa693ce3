"""Peak memory of training steps in the shapes of a released size, random weights, on this host.

python -m tests.train.full_size FOLDER [LAYERS [STEPS]]   Qwen2-VL-2B with so many language and
vision layers (28 and 32 by default) learns adapters from the demo's photographs through
`vlmtrain train`: packs of 2,048 tokens, bf16. Prints what metrics.jsonl says of each step.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.checkpoint.full_size import make
from tests.released import released_config
from vlmtrain.demo import command, photographs, tiny_model


def main() -> None:
    folder = Path(sys.argv[1])
    given = sys.argv[2:4]
    layers, steps = (int(x) for x in given + ["28", "2"][len(given) :])
    tiny = tiny_model.write_folder(folder / "tiny", command.training_texts())
    ids = json.loads((tiny / "config.json").read_text())
    config = released_config("qwen2_vl-2b")
    config |= {name: ids[name] for name in config if name.endswith("token_id")}
    config |= {"num_hidden_layers": layers, "bos_token_id": 0, "eos_token_id": ids["eos_token_id"]}
    config["vision_config"]["depth"] = 32 if layers == 28 else layers
    try:
        make(folder / "model", config)
        for file in tiny.glob("*.json"):
            if file.name != "config.json":
                shutil.copy(file, folder / "model")
        data = photographs.export(folder / "photographs")
        subprocess.run(
            [sys.executable, "-m", "vlmtrain.cli", "train", "--model", f"{folder / 'model'}"]
            + ["--data", f"{data}", "--output", f"{folder / 'run'}", "--lora.rank", "16"]
            + [f"--train.steps={steps}", "--train.pack_length=2048", "--train.global_batch=1"]
            + ["--train.precision=bf16"],
            check=True,
        )
        for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            print(
                f"step {row['step']}: loss {row['loss']:.4f}, {row['target_tokens']} of "
                f"{row['tokens']} tokens are targets, {row['step_seconds']:.1f} s, "
                f"peak {row['peak_memory_gb']:.2f} GB"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
