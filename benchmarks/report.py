"""benchmarks/results/<machine>.json, and benchmarks/RESULTS.md made of them.

python -m benchmarks.report [FOLDER...] writes RESULTS.md anew without measuring anything; first it
takes over what `make gpu-check` left in folders.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import AS_IT_COMES, FAULT_FREE, QUIET_SHARE, REPETITIONS, ROOT, Row

RESULTS = ROOT / "benchmarks" / "results"
#: Its folder for conversions of full-size models, written by `make test-full`.
CONVERSIONS = "conversions"
#: Its folders for what gpu-check found, and for recorded steps of an offloaded optimizer.
CHECKS, TIMELINES = "checks", "timelines"
#: Where gpu-check looks for libraries that it need not build again.
LIBRARIES = ROOT / "build" / "gpu-check"
REPORT = ROOT / "benchmarks" / "RESULTS.md"

HEADER = f"{'op':<40} {'shape':<44} {'dtype':<9} thr {'ours':>10} {'best peer':>10}  ratio  ceiling"


# ---- the machine ---------------------------------------------------------------------------------


#: The best of the instruction sets that it has tells what generation a processor is of.
GENERATIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "generic": "neither AVX2 nor AVX-512",
}


def _cpu_name() -> str:
    """With family and model, where there are such: a hypervisor may give one name to processors of
    several generations."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))
    said = {key.strip(): value.strip() for key, _, value in pairs}
    name = said.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in said:
        return name
    return f"{name} (family {said['cpu family']}, model {said['model']})"


def describe_machine(device: str) -> dict[str, Any]:
    """What figures depend on. Imports torch and, where they are installed, the peers' versions."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from vlmkernels import _native

    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    packages = {}
    for name in ("torch", "transformers", "megatron-core", "deepspeed", "flash-attn"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    best = next(name for name in GENERATIONS if name in _native.available_isas())
    machine = {
        "cpu": f"{_cpu_name()} with {GENERATIONS[best]}",
        "cores": len(affinity) or os.cpu_count() or 1,
        "kernels": _native._C.isa(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": packages,
    }
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    return machine


def machine_slug(machine: dict[str, Any], device: str) -> str:
    """A file name: the GPU's name, or the CPU's and its number of cores."""
    name = machine["gpu"] if device == "cuda" else f"{machine['cpu']} {machine['cores']} cores"
    name = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


# ---- the JSON files ------------------------------------------------------------------------------


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Raises ValueError naming the file, where it is no results file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["machine"], [Row.from_json(row) for row in content["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of benchmark results: {error}") from error


def store(path: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Adds rows; one of the same key replaces the older one."""
    old = load(path)[1] if path.exists() else []
    merged = {row.key: row for row in [*old, *rows]}
    content = {"machine": machine, "rows": [row.to_json() for row in merged.values()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def store_conversions(
    machine: dict[str, Any], size: str, jobs: list[dict[str, Any]], results: Path = RESULTS
) -> None:
    """Replaces the rows of this machine and model size."""
    path = results / CONVERSIONS / f"{machine_slug(machine, 'cpu')}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["jobs"] if path.exists() else []
    content = {"machine": machine, "jobs": [*(j for j in old if j["size"] != size), *jobs]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# ---- what gpu-check left -------------------------------------------------------------------------


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may have been cut off, or not begun."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def take_over(folder: Path, results: Path = RESULTS, libraries: Path = LIBRARIES) -> None:
    """Rows, outcomes and timelines of a folder into `results`, and the library where the next run
    of gpu-check finds it.

    Raises:
        ValueError: it is no such folder, or the run ended before it had a library.
    """
    try:
        machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no machine.json: gpu-check did not come as far as a library that loads; "
            f"see {folder / 'log.txt'}"
        ) from None
    slug = machine_slug(machine, "cuda")
    rows = [Row.from_json(row) for row in _json_lines(folder / "rows.jsonl")]
    sources = "sources " + machine["library"].split("-")[1]  # there may be no git over there
    rows = [replace(row, commit=sources) if row.commit == "unknown" else row for row in rows]
    if rows:
        store(results / f"{slug}.json", machine, rows)
    path = results / CHECKS / f"{slug}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["outcomes"] if path.exists() else []
    new = _json_lines(folder / "outcomes.jsonl")
    for whole in (outcome for outcome in new if outcome["step"] == "step"):
        whole["library"] = machine["library"]  # steps that are kept have older ones
    again = {_step(outcome) for outcome in new}
    kept = [outcome for outcome in before if _step(outcome) not in again]
    outcomes = {(o["step"], o["name"]): o for o in [*kept, *new]}
    content = {"machine": machine, "outcomes": list(outcomes.values())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for timeline in folder.glob("offload-*.json"):
        _copy(timeline, results / TIMELINES)
    for library in folder.glob("_C-*.so"):
        _copy(library, libraries)


def _step(outcome: dict[str, Any]) -> str:
    """The step that an outcome belongs to; "step" marks those of whole steps."""
    return outcome["name"] if outcome["step"] == "step" else outcome["step"]


def _copy(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, folder)


# ---- text ----------------------------------------------------------------------------------------


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def line(row: Row) -> str:
    """One row for the terminal."""
    noisy = f"  NOISY: {row.kept} of {row.rounds} repetitions quiet" if row.noisy else ""
    ceiling = ""
    if row.percent_of_ceiling is not None:
        ceiling = f"{row.percent_of_ceiling:.0f}% of {row.ceiling}"
    elif row.ceiling is not None:
        ceiling = row.ceiling
    tokens = ""
    if row.tokens_per_second:
        peer = _number(row.peer_tokens_per_second, 0)
        tokens = f"  {row.tokens_per_second:.0f} tokens/s, peer {peer}"
    if row.extra_mb:
        others = _number(row.extra_mb.get(row.best_peer or ""), 0)
        tokens += f"  {row.extra_mb['ours']:.0f} MB, peer {others}"
    return (
        f"{row.op:<40} {row.shape:<44} {row.dtype:<9} {row.threads:>3} "
        f"{_milliseconds(row.ours_ms):>7} ms {_milliseconds(row.best_peer_ms):>7} ms "
        f"{_number(row.ratio, 2, 'x'):>6}  {ceiling} [{row.best_peer}; {row.memory}]{tokens}{noisy}"
    )


def _ratio_at_ceiling(row: Row) -> float | None:
    """What best peer / ours would be if ours were as fast as the ceiling."""
    if not row.ratio or not row.percent_of_ceiling:
        return None
    return 100 * row.ratio / row.percent_of_ceiling


def _verdict(row: Row) -> str:
    """Against the bars, if there are any."""
    missed = []
    if row.bar is not None and (row.ratio is None or row.ratio < row.bar):
        limit = _ratio_at_ceiling(row)
        missed.append(f"{row.bar:g}x" + (f" ({limit:.2f}x at the ceiling)" if limit else ""))
    percent = row.percent_of_ceiling
    if row.ceiling_bar is not None and (percent is None or percent < row.ceiling_bar):
        missed.append(f"{row.ceiling_bar:g}%")
    if row.memory_bar is not None and (row.memory_ratio or 0) < row.memory_bar:
        missed.append(f"1/{row.memory_bar:g} of the memory")
    if missed:
        return "misses " + " and ".join(missed)
    bars = row.bar, row.ceiling_bar, row.memory_bar
    return "met" if any(bar is not None for bar in bars) else ""


def _table(rows: list[Row]) -> list[str]:
    out = [
        "| op | shape | dtype | threads | ours, ms | best peer, ms | best peer | ratio "
        "| ceiling | % of it | bar | quiet | cores, ns | date, commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        quiet = f"{row.kept}/{row.rounds}" + (" (noisy)" if row.noisy else "")
        cells = [
            row.op,
            row.shape,
            row.dtype,
            str(row.threads),
            _milliseconds(row.ours_ms),
            _milliseconds(row.best_peer_ms),
            row.best_peer or "-",
            _number(row.ratio, 2, "x"),
            row.ceiling or "-",
            _number(row.percent_of_ceiling, 0, "%"),
            _verdict(row),
            quiet,
            ", ".join(f"{x:.0f}" for x in row.cores_ns or []),
            f"{row.date}, {row.commit}",
        ]
        out.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return out


#: Why ours is behind such a peer: small products and a Python call a layer for each pack.
WHOLE_STEP = (
    " Ours makes a pass for each pack, the peer one for the samples of all packs; a larger "
    "--train.pack_length does the same for ours, see the row of one pack."
)


def _training(rows: list[Row]) -> list[str]:
    """Tokens per second, where a row has them, and what its ceiling would allow."""
    out = []
    for row in rows:
        if row.tokens_per_second is None:
            continue
        text = (
            f"- {row.op}, {row.shape}, {row.dtype}: {row.tokens_per_second:.0f} tokens/s; "
            f"{row.best_peer}: {_number(row.peer_tokens_per_second, 0)} tokens/s; "
            f"ratio {_number(row.ratio, 2)}."
        )
        limit = _ratio_at_ceiling(row)
        if (row.ceiling or "").startswith("products") and limit:
            what = str(row.ceiling).rsplit(",", 1)[0]
            text += f" A step of nothing but its {what} would be at {limit:.2f}."
        if "one padded batch a step" in (row.best_peer or ""):
            text += WHOLE_STEP
        out.append(text)
    return ["", *out] if out else []


def _memory(rows: list[Row]) -> list[str]:
    """The most memory beside results, where a row has it."""
    out = []
    for row in rows:
        if row.extra_mb:
            each = ", ".join(f"{name} {mb:.0f}" for name, mb in row.extra_mb.items())
            out.append(f"- {row.op}, {row.shape}, {row.dtype}: MB beside results: {each}.")
    return ["", *out] if out else []


def _others(rows: list[Row]) -> list[str]:
    """Every peer that is not in the table, once: slower ones and those that could not run."""
    out = []
    for row in rows:
        slower = [
            f"{n} {_milliseconds(t)} ms" for n, t in row.peers_ms.items() if n != row.best_peer
        ]
        out_of_race = [f"{n} ({why})" for n, why in row.skipped.items()]
        if slower or out_of_race:
            text = "; ".join(slower + out_of_race)
            out.append(
                f"- {row.op}, {row.shape}, {row.dtype}, {row.threads} threads, {row.memory}: {text}"
            )
    if not out:
        return []
    return ["", "<details><summary>The other peers</summary>", "", *out, "", "</details>"]


_TITLES = {
    FAULT_FREE: "Fault-free: " + "fresh outputs lie on pages that the process has already",
    AS_IT_COMES: "As it comes: page faults of fresh outputs included",
    "device": "On the GPU",
}


def _conversions(files: dict[str, dict[str, Any]]) -> list[str]:
    out: list[str] = []
    for name, content in sorted(files.items()):
        machine = content["machine"]
        out += [
            "",
            f"## Converting weights: {machine['cpu']}, {machine['cores']} cores",
            "",
            "Random weights in the shapes of the released models, bfloat16, Hugging Face -> "
            "Megatron (TP 2, PP 2) -> one rank -> Hugging Face, compared bit by bit: "
            "`make test-full` (SIZE=7B for the larger). One run each. "
            f"Source: results/conversions/{name}.",
            "",
            "| model | job | GB | seconds | MB/s | peak RSS, GB | at most | date, commit |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for j in content["jobs"]:
            speed = 1e3 * j["gigabytes"] / j["seconds"]
            out.append(
                f"| {j['size']} | {j['job']} | {j['gigabytes']:.2f} | {j['seconds']:.0f} "
                f"| {speed:.0f} | {j['rss']:.2f} | {j['limit']:g} | {j['date']}, {j['commit']} |"
            )
    return out


def _checks(files: dict[str, dict[str, Any]]) -> list[str]:
    """Of each GPU: how many passed of each step, and what did not."""
    out: list[str] = []
    for name, content in sorted(files.items()):
        out += ["", f"## Checked on {content['machine']['gpu']}", ""]
        out += [f"By `make gpu-check`, each step's last run. Source: results/{CHECKS}/{name}.", ""]
        out += ["| step | | PASS | FAIL | HANG | SKIP | seconds | library |"]
        out += ["|---|---|---|---|---|---|---|---|"]
        outcomes = content["outcomes"]
        for step in (o for o in outcomes if o["step"] == "step"):
            counts = Counter(o["outcome"] for o in outcomes if o["step"] == step["name"])
            cells = [step["name"], f"{step['outcome']} {step['detail']}".strip()]
            cells += [str(counts[kind]) for kind in ("PASS", "FAIL", "HANG", "SKIP")]
            cells += [f"{step['seconds']:.0f}", step["library"]]
            out.append("| " + " | ".join(cells) + " |")
        bad = [o for o in outcomes if o["outcome"] in ("FAIL", "HANG") and o["step"] != "step"]
        out += ["", *(f"- {o['outcome']} {o['step']}: {o['name']}. {o['detail']}" for o in bad)]
    return out


def _timelines(files: dict[str, dict[str, Any]]) -> list[str]:
    """Of each machine: seconds of a step with an offloaded optimizer, and its memory."""
    out: list[str] = []
    for name, content in sorted(files.items()):
        machine = content["machine"]
        out += ["", f"## A step with its optimizer offloaded: {machine.get('gpu', machine['cpu'])}"]
        out += ["", f"`python -m benchmarks.timeline`. Source: results/{TIMELINES}/{name}.", ""]
        for step in content["steps"]:
            times = ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in step["seconds"].items())
            out.append(f"- {step['title']}: {times}.")
        for row in content["memory"]:
            peak, theory = (f"{row[k] / 1e9:.2f} GB" for k in ("bytes", "theory"))
            fraction = f"offload_fraction {row['fraction']:g}"
            out.append(f"- {fraction}: at most {peak} on the device, {theory} in theory.")
    return out


def render(
    files: dict[str, tuple[dict[str, Any], list[Row]]],
    conversions: dict[str, dict[str, Any]] | None = None,
    checks: dict[str, dict[str, Any]] | None = None,
    timelines: dict[str, dict[str, Any]] | None = None,
) -> str:
    """RESULTS.md of {file name: (machine, rows)} and the other folders' files; depends on nothing
    else."""
    out = [
        "# Measured",
        "",
        "Made by `make bench` (`python -m benchmarks.run`) and, on a GPU, `make gpu-check`; "
        "written by `python -m benchmarks.report` from benchmarks/results/. Do not edit.",
        "",
        "Ours, its peers and the ceiling run interleaved in random order in one process. A "
        f"repetition counts if the scheduler kept its threads waiting for less than "
        f"{QUIET_SHARE:.0%} of it; times are medians of at least {REPETITIONS} such repetitions; "
        "a row that has fewer is marked noisy. The ratio is the median over rounds of best peer / "
        "ours: above 1 ours is faster. The ceiling is measured in the same rounds, scaled to the "
        "op's work; beside a missed bar stands the ratio that ours would have at that ceiling. A "
        "word takes so many nanoseconds from one core to another, before a row and behind it: a "
        "virtual machine's cores share their last cache at some times and not at others, and rows "
        "of both kinds don't compare.",
    ]
    for name, (machine, rows) in sorted(files.items()):
        packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items())
        title = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
        out += ["", f"## {title}", ""]
        out.append(
            f"{machine['system']}, {machine['kernels']} kernels, Python {machine['python']}, "
            f"{packages}. Source: results/{name}."
        )
        for memory, text in _TITLES.items():
            if chosen := [row for row in rows if row.memory == memory]:
                out += ["", f"### {text}", "", *_table(chosen), *_training(chosen)]
                out += _memory(chosen)
        out += _others(rows)
    out += _checks(checks or {})
    out += _timelines(timelines or {})
    out += _conversions(conversions or {})
    if not files:
        out += ["", "Nothing has been measured yet."]
    return "\n".join(out) + "\n"


def write(results: Path = RESULTS, target: Path = REPORT) -> None:
    files = {path.name: load(path) for path in sorted(results.glob("*.json"))}
    others = (
        {p.name: json.loads(p.read_text(encoding="utf-8")) for p in (results / f).glob("*.json")}
        for f in (CONVERSIONS, CHECKS, TIMELINES)
    )
    target.write_text(render(files, *others), encoding="utf-8")


def main(folders: Iterable[str]) -> int:
    for folder in folders:
        try:
            take_over(Path(folder))
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    write()
    for timeline in (RESULTS / TIMELINES).glob("*.json"):
        from benchmarks.timeline import pictures  # imports torch

        pictures(timeline)
    sys.stdout.write(f"{REPORT} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
