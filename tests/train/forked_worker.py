"""One rank that runs several `vlmtrain train`, each in a fork of this process, which has imported
everything once: python -m tests.train.forked_worker CASES.json

The file holds a list of {"port", "arguments", "fault", "rank", "output"}: the fault is planted in
that rank, or in all. What each rank has printed and how it ended stand in OUTPUT.RANK.json.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmtrain import cli
from vlmtrain.data import builder, index, loader
from vlmtrain.plan.peak import PeakModel
from vlmtrain.training import agreement, engine, memory_plan


def plant(fault: str, case: dict[str, Any]) -> None:
    steps, slow = 0, False
    peaks: dict[str, list[Any]] = {"rehearsal": [], "steps": []}
    original, build = engine.Engine.step, loader.PackedLoader._build
    load = index.SampleIndex.load

    def step(self, *arguments):
        nonlocal steps
        steps += 1
        if steps == 3 and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if steps == 3 and fault == "silent":
            os._exit(0)
        return original(self, *arguments)

    def third(self, position):
        nonlocal slow
        slow = position.step >= 2
        return build(self, position)

    def waiting(self, position):
        time.sleep(3600 * slow)
        return load(self, position)

    engine.Engine.step = step
    if fault == "peaks":  # no fault: the peak of each step (heap.c), in OUTPUT.peaks.RANK.json
        heap = ctypes.CDLL(None)
        heap.heap_peak.restype = ctypes.c_longlong

        def on_the_host(work):
            @functools.wraps(work)
            def ignored(*arguments):
                heap.heap_ignore(1)
                try:
                    return work(*arguments)
                finally:
                    heap.heap_ignore(-1)

            return ignored

        # Packs are decoded ahead into host memory.
        loader.PackedLoader._build = on_the_host(build)
        builder.PackBuilder._pixels = on_the_host(builder.PackBuilder._pixels)

        def measured(self, *arguments):
            heap.heap_reset()
            result = original(self, *arguments)
            peaks["rehearsal" if self._rehearsing else "steps"].append(heap.heap_peak())
            path = Path(f"{case['output']}.peaks.{os.environ['RANK']}.json")
            path.write_text(json.dumps(peaks))
            return result

        rehearse = memory_plan.rehearse

        def planned(config, of_run, packs, loads, before, factor):
            from megatron.core import parallel_state

            stage = parallel_state.get_pipeline_model_parallel_rank()
            model = PeakModel(config, of_run.spec, of_run.layout, stage, cuda=False)
            peaks["states"] = [before, model.states()]
            return rehearse(config, of_run, packs, loads, before, factor)

        engine.Engine.step, memory_plan.rehearse = measured, planned
    if fault == "slow disk":
        loader.PackedLoader._build = third
        index.SampleIndex.load = waiting
    if fault == "own output":
        agreement._FILE_SYSTEM = 1.0
        Path("machine").mkdir()
        os.chdir("machine")
    if fault == "other version":
        agreement._sources = lambda package: "0.0.9, checksum 0"
    if fault == "other file":  # as another machine has it, under the same name
        opened = index.open_source
        index.open_source = lambda spec: opened(replace(spec, path=case["other"]))


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    log = Path(f"{case['output']}.{rank}.log")
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ["MASTER_PORT"] = str(case["port"])
        os.chdir(Path(case["output"]).parent)
        arguments = list(case["arguments"])
        if rank == case["rank"] or case["rank"] is None:
            plant(case["fault"], case)
            arguments += case.get("more", [])
        os._exit(cli.main(arguments))
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "end": time.time(), "said": log.read_text()}


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    for case in json.loads(Path(sys.argv[1]).read_text()):
        result = run(case, rank)
        Path(f"{case['output']}.{rank}.json").write_text(json.dumps(result))
