"""make gpu-check: what this project does on a real GPU, within the minutes there are.

    python -m tools.gpu_check [STEP...] [--results FOLDER] [--minutes 9.5]

Runs offline from the source tree with this Python's own torch. Every step has a time limit and none
ends the others. What is in the folder is valid whenever the run is cut off: log.txt, machine.json,
outcomes.jsonl (PASS, FAIL, HANG or SKIP), rows.jsonl (timings), a timeline, and the library, which
spares later runs the build, from there or from build/gpu-check. `make gpu-report FROM=FOLDER` makes
tables of it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .processes import ROOT, SKIP, Results, ask, run, run_each, step_of, text_of
from .tests import Runner, collect

#: Libraries that were brought back; ignored by git.
LIBRARIES = ROOT / "build" / "gpu-check"
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: Asked of a process, so that this one holds no part of the GPU.
LOOK = """
import json, sys, torch
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU on this machine, so there is nothing to check")
torch.ones(4, device="cuda").sum().item()
p = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": p.name, "capability": [p.major, p.minor], "torch": torch.__version__}))
"""
DESCRIBE = """
import json
from benchmarks import attention, report
from benchmarks.harness import Context
machine = report.describe_machine("cuda")
print(json.dumps([machine, attention.parts(Context(device="cuda"))]))
"""
#: For a small kernel, torch's import included; then it hangs.
KERNEL_SECONDS = 20
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Names of kernels that a tool can't judge, and why (docs/attention-cuda.md).
UNKNOWN = {
    "racecheck": ("sm90", "does not see that mbarriers order different warps"),
    "synccheck": ("sm90", "wants every thread that arrives at an mbarrier to wait there"),
    "initcheck": ("sm90-fused", "does not see what bulk copies write"),
}


def missing(*packages: str) -> str:
    """Those that this Python lacks, as a sentence, or nothing."""
    lacking = [p for p in packages if importlib.util.find_spec(p) is None and not shutil.which(p)]
    return f"{sys.executable} has no {', '.join(lacking)}; install them" if lacking else ""


class Check:
    """The steps, each a function of the moment at which it has to be done."""

    def __init__(self, results: Results, gpu: dict[str, Any]) -> None:
        self.results, self.gpu = results, gpu
        self.parts: list[str] = []  # of the attention benchmark
        self.steps: dict[str, tuple[float, Callable[[float], bool | str]]] = {
            "build": (240, self.build),
            "smoke": (90, self.smoke),
            "attention": (150, self.attention),
            "accuracy": (240, self.accuracy),
            "embedding": (80, partial(self.benchmark, "embedding")),
            "loss": (120, partial(self.benchmark, "loss")),
            "train": (240, partial(self.benchmark, "train_step", step="train")),
            "optimizer": (150, partial(self.benchmark, "offload", step="optimizer")),
            "timeline": (80, self.timeline),
            "sanitizer": (540, self.sanitizer),
        }

    # ---- the library -----------------------------------------------------------------------------

    def library_name(self) -> str:
        """Says what the library was made from, and for."""
        digest = hashlib.sha256()
        for path in sorted([*ROOT.glob("csrc/**/*.*"), ROOT / "CMakeLists.txt"]):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
        tag = sys.implementation.cache_tag
        return f"_C-{digest.hexdigest()[:12]}-sm_{self.architecture()}-{tag}.so"

    def architecture(self) -> str:
        """This GPU's alone: others take the compiler's time."""
        major, minor = self.gpu["capability"]
        return f"{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")

    def build(self, until: float) -> bool | str:
        target = ROOT / "vlmkernels" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        name = self.library_name()
        for folder in (self.results.folder, LIBRARIES):
            if (folder / name).is_file():
                copy(folder / name, target)
                if self.describe(until):
                    self.results.say(f"{folder / name} serves; nothing was built")
                    return True
        if lacking := missing("setuptools", "pybind11", "cmake", "ninja"):
            return f"{lacking}, or bring {name} in {LIBRARIES.relative_to(ROOT)}"
        status = run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            until - time.monotonic() - 20,
            self.results.log,
            VLMKERNELS_CUDA="ON",
            CMAKE_ARGS=f"-DVLMKERNELS_CUDA_ARCHS={self.architecture()}",
        )
        if status != 0:
            said = text_of(self.results.log).splitlines()[-30:]
            self.results.say("\n".join(["the log ends with:", *said]))
            return False
        for folder in (self.results.folder, LIBRARIES):
            copy(target, folder / name)
        return self.describe(until)

    def describe(self, until: float) -> bool:
        """Loads the library in a process: machine.json, and the benchmark's parts."""
        try:
            machine, self.parts = ask([sys.executable, "-c", DESCRIBE], until - time.monotonic())
        except RuntimeError as error:
            self.results.say(f"vlmkernels can't be imported: {error}")
            return False
        machine["library"] = self.library_name()
        (self.results.folder / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
        run([sys.executable, "-m", "vlmkernels.info"], until - time.monotonic(), self.results.log)
        return True

    # ---- what is done with it --------------------------------------------------------------------

    def kernels(self) -> dict[str, list[str]]:
        """The command of each."""
        command = [sys.executable, "-m", "tools.gpu_check.kernels"]
        return {name: [*command, name] for name in ask([*command, "--list"], 60)}

    def smoke(self, until: float) -> bool:
        commands, at_once = self.kernels(), max(1, min(8, CPUS // 2))
        return run_each(
            self.results, "smoke", commands, limit=KERNEL_SECONDS, until=until, at_once=at_once
        )

    def attention(self, until: float) -> bool:
        return self.benchmark("attention", until, "--no-compile")

    def benchmark(self, name: str, until: float, *options: str, step: str = "") -> bool:
        """Its rows go to rows.jsonl one by one; a process for each part. `step`: as what its
        outcomes are noted, if not by its name."""
        rows = self.results.folder / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.run", name, "--device", "cuda"]
        command += ["--seconds", "4", "--child", str(rows), *options]
        parts = self.parts if name == "attention" else []
        commands = {part: [*command, "--part", part] for part in parts} or {name: command}
        return run_each(self.results, step or name, commands, until=until, aloud=True)

    def accuracy(self, until: float) -> bool | str:
        if lacking := missing("pytest", "hypothesis"):
            return lacking
        processes = max(1, min(6, CPUS // 2))
        runner = Runner(
            self.results,
            "accuracy",
            limit=45,
            until=until - 10,
            processes=processes,
            OMP_NUM_THREADS=str(max(1, CPUS // processes)),
        )
        return runner.run(collect(["tests/gpu"]))

    def timeline(self, until: float) -> bool:
        command = [sys.executable, "-m", "benchmarks.timeline", "--device", "cuda", "--no-pictures"]
        commands = {"timeline": [*command, "--output", str(self.results.folder)]}
        return run_each(self.results, "timeline", commands, until=until, aloud=True)

    def sanitizer(self, until: float) -> bool | str:
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not os.access(tool, os.X_OK):
            return "compute-sanitizer is not installed"
        code = "import torch; torch.ones(4, device='cuda').sum().item()"
        if run([tool, sys.executable, "-c", code], 60, self.results.log) != 0:
            return "compute-sanitizer does not work on this machine"
        commands = {}
        for (name, of), check in itertools.product(self.kernels().items(), SANITIZERS):
            case = f"{check}, {name}"
            if check in UNKNOWN and UNKNOWN[check][0] in name:
                self.results.add("sanitizer", case, SKIP, 0, f"{check} {UNKNOWN[check][1]}")
            else:
                commands[case] = [tool, "--tool", check, "--error-exitcode", "9", *of, "--alone"]
        return run_each(
            self.results,
            "sanitizer",
            commands,
            limit=90,
            until=until,
            at_once=4,
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",  # every tensor has bounds of its own
        )


def copy(source: Path, target: Path) -> None:
    """By a new file: another process may have the old one loaded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    shutil.copy(source, part)
    part.replace(target)


def look() -> dict[str, Any]:
    """This machine's GPU. Ends with one sentence where there is none, or no torch."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(f"gpu-check: {sys.executable} has no torch; set PYTHON to one that has")
    try:
        return ask([sys.executable, "-c", LOOK], 180)
    except RuntimeError as error:
        raise SystemExit(f"gpu-check: {error}") from error


def main(arguments: list[str] | None = None, limits: dict[str, float] | None = None) -> int:
    """`limits`: seconds of steps, for tests."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check")
    names = list(Check(None, {}).steps)  # type: ignore[arg-type]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(names)}")
    folder = Path(os.environ.get("OUT") or ROOT / "gpu-check")
    parser.add_argument("--results", type=Path, default=folder, help="default: $OUT or gpu-check")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all steps together")
    options = parser.parse_args(arguments)
    if unknown := set(options.steps) - set(names):
        parser.error(f"no step is called {', '.join(unknown)}; there are {', '.join(names)}")
    began = time.monotonic()
    gpu = look()
    results = Results(options.results.resolve())
    check = Check(results, gpu)
    wanted = options.steps or [name for name in names if name != "sanitizer"]
    if "build" not in wanted:
        wanted.insert(0, "build")  # or rather the library that was brought
    results.say(f"{gpu['gpu']}, torch {gpu['torch']}, Python {sys.version.split()[0]}")
    failed, left_out = [], []
    for name in wanted:
        limit, work = check.steps[name]
        limit = (limits or {}).get(name, limit)
        left = 60 * options.minutes - (time.monotonic() - began)
        if left < 20 or ("build" in failed and not check.parts):
            left_out.append(name)
        elif not step_of(results, name, min(limit, left), work):
            failed.append(name)
    if left_out:
        why = "there is no library" if "build" in failed else "no time was left"
        results.say(f"not done, as {why}: python -m tools.gpu_check {' '.join(left_out)}")
    results.say(f"failed: {', '.join(failed) or 'nothing'}; results are in {results.folder}")
    return 1 if failed or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
