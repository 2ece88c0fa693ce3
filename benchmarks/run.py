"""`make bench`: python -m benchmarks.run [NAME...] [--quick]

Measures the rows of the named benchmarks (all by default), prints them, stores them in
benchmarks/results/<machine>.json and writes benchmarks/RESULTS.md anew. A row replaces the older
one of the same op, shape, dtype, threads and memory. Each benchmark, or each of its parts where it
has some, runs in a process of its own, on the CPU twice: fault-free (glibc keeps what it has, so
that fresh outputs cost no page faults) and as it comes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.harness import (
    AS_IT_COMES,
    FAULT_FREE,
    FAULT_FREE_ENVIRONMENT,
    ROOT,
    Context,
    Row,
    say,
)
from benchmarks.no_amx import refuse_amx

NAMES = (
    "attention",
    "embedding",
    "product",
    "layer",
    "loss",
    "adam",
    "offload",
    "data",
    "train_step",
)
MODES = {"fault-free": FAULT_FREE, "as-it-comes": AS_IT_COMES}


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small shapes, 3 repetitions: to see that it runs; not stored unless --results is set",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument("--memory", choices=(*MODES, "both"), default="both")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest a row may take")
    parser.add_argument("--results", type=Path, help="the JSON file to store rows in")
    parser.add_argument(
        "--profile",
        metavar="PART",
        help='instead: profile a part of train_step, as "demo, bfloat16"',
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="without peers that torch.compile makes"
    )
    parser.add_argument(
        "--no-amx", action="store_true", help="as on a processor without AMX, for torch too"
    )
    parser.add_argument("--part", help="of one benchmark with parts: only this one")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in NAMES:
            parser.error(f"no benchmark is called {name}; there are {', '.join(NAMES)}")
    options.names = options.names or list(NAMES)
    if options.threads < 1:
        parser.error(f"--threads is {options.threads}; it must be at least 1")
    return options


def context_of(options: argparse.Namespace, memory: str, part: str | None = None) -> Context:
    return Context(
        device=options.device,
        threads=options.threads,
        memory="device" if options.device == "cuda" else MODES[memory],
        quick=options.quick,
        seconds=options.seconds,
        part=part,
        compiled=not options.no_compile,
    )


def parts_of(name: str, options: argparse.Namespace, memory: str) -> list[str | None]:
    """The parts of a benchmark that get a process each; [None]: it is one. Processes are for the
    host's memory: on a GPU all parts share one.

    Raises ValueError where options.part is none of them.
    """
    module = importlib.import_module(f"benchmarks.{name}")
    found = module.parts(context_of(options, memory)) if hasattr(module, "parts") else [None]
    if options.part is None:
        return [None] if options.device == "cuda" else found
    if options.part not in found:
        names = ", ".join(f'"{part}"' for part in found if part) or "no part"
        raise ValueError(f'{name} ({memory}) has no part "{options.part}"; it has {names}')
    return [options.part]


def child(options: argparse.Namespace) -> None:
    """One benchmark, or a part of it, in one memory mode: appends a JSON line to options.child for
    each row."""
    import torch

    torch.set_num_threads(options.threads)
    context = context_of(options, options.memory, options.part)
    module = importlib.import_module(f"benchmarks.{options.names[0]}")
    with open(options.child, "a", encoding="utf-8") as file:
        for row in module.rows(context):
            print(report.line(row), flush=True)
            file.write(json.dumps(row.to_json()) + "\n")
            file.flush()


def environment(memory: str, threads: int) -> dict[str, str]:
    """Of a child: glibc's settings apply from the start of a process."""
    kept = {k: v for k, v in os.environ.items() if k not in FAULT_FREE_ENVIRONMENT}
    kept["OMP_NUM_THREADS"] = str(threads)
    return kept | (FAULT_FREE_ENVIRONMENT if memory == "fault-free" else {})


def run_child(
    name: str, part: str | None, memory: str, options: argparse.Namespace
) -> tuple[list[Row], bool]:
    """The rows it finished, and whether it ended well."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.touch()
        command = [sys.executable, "-m", "benchmarks.run", name, "--child", str(path)]
        command += ["--memory", memory, "--device", options.device]
        command += ["--threads", str(options.threads), "--seconds", str(options.seconds)]
        command += ["--quick"] if options.quick else []
        command += ["--no-compile"] if options.no_compile else []
        command += ["--part", part] if part else []
        code = subprocess.run(
            command, cwd=ROOT, env=environment(memory, options.threads)
        ).returncode
        rows = [Row.from_json(json.loads(text)) for text in path.read_text().splitlines()]
    if code:
        called = f"{name}, {part}" if part else name
        say(f"{called} ({memory}) failed with exit status {code}; its finished rows are kept")
    return rows, code == 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        child(options)
        return 0
    if options.no_amx:  # to the processes started from here too
        try:
            refuse_amx()
        except (OSError, RuntimeError) as error:
            say(f"--no-amx: {error}")
            return 2
    if options.profile:
        import torch

        from benchmarks import train_step

        torch.set_num_threads(options.threads)
        print(train_step.profile(options.profile))
        return 0
    memories = list(MODES) if options.memory == "both" else [options.memory]
    if options.device == "cuda":
        memories = ["as-it-comes"]  # host allocations don't matter there
    machine = report.describe_machine(options.device)
    if options.no_amx:
        machine["cpu"] += ", AMX refused"
    target = options.results
    if target is None and not options.quick:
        target = report.RESULTS / f"{report.machine_slug(machine, options.device)}.json"
    ok = True
    print(report.HEADER)
    for name in options.names:
        for memory in memories:
            try:
                parts = parts_of(name, options, memory)
            except ValueError as error:
                say(str(error))
                return 2
            for part in parts:
                rows, ended_well = run_child(name, part, memory, options)
                ok = ok and ended_well
                if target is not None and rows:
                    report.store(target, machine, rows)
    if target is None:
        say("--quick: nothing stored; these figures prove nothing but that the benchmarks run")
    elif target.parent == report.RESULTS:
        report.write()
        say(f"{target} and {report.REPORT} written")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
