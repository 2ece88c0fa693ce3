"""Plants a fault in one rank of a training run; Python imports this file by itself where its folder
is on PYTHONPATH. FAULT names the fault, FAULT_RANK the rank; it happens in the third step."""

import os
import signal
import sys


def _plant(fault: str) -> None:
    from vlmtrain.data import builder, loader
    from vlmtrain.models import stage
    from vlmtrain.training import engine

    steps = 0
    original = engine.Engine.step

    def step(self, *arguments):
        nonlocal steps
        steps += 1
        if steps == 3 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    engine.Engine.step = step
    if fault == "moving":
        from vlmkernels.integrations.megatron import OffloadedOptimizer

        move, moves = OffloadedOptimizer._move, 0

        def dying(self, place, to_host):
            nonlocal moves
            moves += 1
            if steps == 2 and not to_host and moves % 7 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return move(self, place, to_host)

        OffloadedOptimizer._move = dying
    if fault == "forward":
        forward = stage.QwenVLStage.forward

        def raising(self, batch, **options):
            if steps == 3:
                raise RuntimeError("a planted fault in the forward pass")
            return forward(self, batch, **options)

        stage.QwenVLStage.forward = raising
    if fault == "sample":
        build, pixels = loader.PackedLoader._build, builder.PackBuilder._pixels
        bad = False

        def third(self, position):
            nonlocal bad
            bad = position.step >= 2
            return build(self, position)

        def unreadable(self, media, sample, out):
            if bad:
                raise sample.fail(f"{media.name} went bad while training", "unreadable")
            return pixels(self, media, sample, out)

        loader.PackedLoader._build = third
        builder.PackBuilder._pixels = unreadable


if os.environ.get("FAULT") and os.environ.get("RANK") == os.environ["FAULT_RANK"]:
    if any(argument == "train" for argument in sys.orig_argv):
        _plant(os.environ["FAULT"])
