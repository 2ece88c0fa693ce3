"""kill -9 at random moments of saves and conversions.

python -m tests.checkpoint.crash [MOMENTS]   (50 in `make test-crash`, a few in `make test`)

Each trial forks a process that trains and saves, or converts, with every write slowed down so
that most of its time is spent writing, and kills it. Then the newest complete checkpoint must be
whole, and the next trial goes on from it: the loss of every step, whoever computes it and however
often, must have the same bits as in a run without a break.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.filterwarnings("ignore")

SEED = int(os.environ.get("VLMKERNELS_TEST_SEED", random.SystemRandom().randrange(10**6)))


def slow_writes(seconds: float) -> None:
    from vlmtrain.core import files

    original = files.SummedFile.write

    def write(self, data):
        time.sleep(seconds)
        return original(self, data)

    files.SummedFile.write = write


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def train(model: Path, folder: Path, log: Path, steps: int, delay: float) -> None:
    """Resume from the newest checkpoint and go on, saving every second step."""
    import torch

    from tests.parity import reference as ref
    from tests.parity.worker import build
    from vlmkernels.integrations.megatron import offload
    from vlmtrain.checkpoint.hf.files import ModelFiles
    from vlmtrain.checkpoint.training import checkpoint
    from vlmtrain.core import device, launch

    torch.set_num_threads(1)
    backend = device.setup(0)
    launch.connect(launch.Process(0, 1, 0), backend.process_group)
    engine, length = build(dict(model=model, layout={}), backend)
    path = checkpoint.find(folder, "latest")
    done = 0
    if path is not None:
        done = checkpoint.load(path, engine.parts, engine.optimizer)["step"]
    slow_writes(delay)
    saver = checkpoint.Saver(folder, ModelFiles(model), keep=2, resume=path)
    with open(log, "a") as out:
        for step in range(done, steps):
            offload(engine.optimizer, random.choice((0.0, 0.4, 1.0)))  # changes no number
            packs = [ref.pack(p, length) for p in ref.make_samples(SEED + step)[1:3]]
            result = engine.step(packs, ref.LR)
            out.write(f"{step + 1} {result.loss.hex()} {result.grad_norm.hex()}\n")
            out.flush()
            saver.poll()
            if (step + 1) % 2 == 0:
                saver.start(step + 1, engine.parts, engine.optimizer, {})
    saver.finish()


def losses(log: Path) -> dict[int, str]:
    """Loss and norm of each step; the same for a step that was computed again."""
    actual: dict[int, str] = {}
    for line in log.read_text().splitlines() if log.is_file() else []:
        if len(line.split()) == 3:  # a kill may cut the last line
            step, rest = line.split(" ", 1)
            assert actual.setdefault(int(step), rest) == rest, f"step {step} differs (seed {SEED})"
    return actual


def crash_training(moments: int, model: Path, work: Path) -> None:
    from vlmtrain.core.files import verify_manifest
    from vlmtrain.core.run_folder import complete

    folder, log = work / "checkpoints", work / "log"
    chance = random.Random(SEED)
    for trial in range(moments):
        before = len(log.read_text()) if log.is_file() else 0
        child = forked(lambda: train(model, folder, log, 10**6, 0.0001))
        end = time.monotonic() + 120
        while time.monotonic() < end and (not log.is_file() or len(log.read_text()) == before):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 2.5))
        while trial == moments - 1 and not complete(folder) and time.monotonic() < end:
            time.sleep(0.01)  # a slow machine: the last run is to leave one at least
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps = complete(folder)
        for step in steps:
            verify_manifest(folder / f"step-{step:08d}")
        print(f"trial {trial + 1}: checkpoints {steps}, {len(losses(log))} steps", flush=True)
    reached = losses(log)
    assert moments < 4 or complete(folder), "no checkpoint was ever completed"
    straight = work / "straight"
    last = max(reached)
    child = forked(lambda: train(model, work / "other", straight, last, 0.0))
    assert os.waitpid(child, 0)[1] == 0
    assert losses(straight) == reached, f"not the numbers of a run without a break (seed {SEED})"


def crash_conversion(moments: int, model: Path, work: Path) -> None:
    from vlmtrain.checkpoint import convert
    from vlmtrain.convert.verify import compare
    from vlmtrain.core.config import ParallelSection
    from vlmtrain.models.family import read_spec

    spec = read_spec(model)
    layout = convert.layout_for(spec, ParallelSection(tensor=2))
    megatron, back = work / "megatron", work / "back"

    def both() -> None:
        slow_writes(0.00005)
        for _ in range(100):
            convert.to_megatron(model, megatron, layout, overwrite=True)
            convert.to_hf(megatron, back, overwrite=True)

    chance = random.Random(SEED + 1)
    actual = 0
    for _ in range(moments):
        child = forked(both)
        time.sleep(chance.uniform(0.05, 3.0))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for target in (megatron, back):
            if target.exists():
                actual += 1
                assert compare(model, target).equal, f"{target} is not whole (seed {SEED})"
    assert moments < 20 or actual, "no conversion ever ended: nothing was shown"
    convert.to_megatron(model, megatron, layout, overwrite=True)
    convert.to_hf(megatron, back, overwrite=True)
    left = sorted(p.name for p in work.iterdir())
    assert left == ["back", "megatron"], left
    print(f"{moments} conversions killed; {actual} complete folders met, all whole", flush=True)


def main() -> None:
    moments = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    print(f"seed {SEED}", flush=True)
    from tests.parity import reference as ref

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = forked(
            lambda: (
                ref.save_model(
                    ref.make_model("qwen2_5_vl", vision_heads=4, seed=1), folder / "model"
                )
                and None
            )
        )
        assert os.waitpid(maker, 0)[1] == 0
        for crash in (crash_conversion, crash_training):
            work = folder / crash.__name__
            work.mkdir()
            crash(moments, folder / "model", work)


if __name__ == "__main__":
    main()
