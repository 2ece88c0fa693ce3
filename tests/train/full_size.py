"""Peak memory of training steps in the shapes of a released size, random weights, on this host.

python -m tests.train.full_size FOLDER [LAYERS [STEPS]]   Qwen2-VL-2B with so many language and
vision layers (28 and 32 by default) learns adapters from the demo's photographs through
`vlmtrain train`: packs of 2,048 tokens, bf16. Prints the peak resident memory of each step alone:
what loading took before is forgotten by the kernel (clear_refs, Linux).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.checkpoint.full_size import make
from tests.released import released_config
from vlmtrain import cli
from vlmtrain.demo import command, photographs, tiny_model
from vlmtrain.training.engine import Engine


def resident(name: str) -> float:
    """GB of VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024 / 1e9


def watch_steps(step: Any = Engine.step) -> None:
    def watched(self: Engine, *arguments: Any, **options: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        result = step(self, *arguments, **options)
        print(
            f"loss {result.loss:.4f}, {result.target_tokens} of {result.tokens} tokens are targets:"
            f" {before:.2f} GB before the step, {resident('VmHWM'):.2f} GB at its peak"
        )
        return result

    Engine.step = watched  # type: ignore[method-assign]


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
        watch_steps()
        arguments = ["train", "--model", f"{folder / 'model'}", "--data", f"{data}"]
        arguments += ["--output", f"{folder / 'run'}", f"--train.steps={steps}", "--lora.rank=16"]
        arguments += [
            "--train.pack_length=2048",
            "--train.global_batch_packs=1",
            "--train.precision=bf16",
        ]
        sys.exit(cli.main(arguments))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
