"""Fair measurement on a shared machine, and the rows that come out of it.

The speed of a shared machine changes within minutes, so an absolute figure says little. Ours, its
peers and a measured ceiling therefore run interleaved, in random order, in one process; a
repetition counts only if the scheduler kept our threads waiting for less than 5% of it; and the
ratio is the median of the ratios within rounds, not a quotient of medians taken minutes apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: Largest share of a repetition that our threads may have waited for a core.
QUIET_SHARE = 0.05
#: Medians are of at least this many quiet repetitions; a row with fewer says so.
REPETITIONS = 9
#: A repetition calls the function as often as it takes to last about this long (seconds), so that
#: waking the threads and reading the clock don't count.
SHORTEST = 0.01
#: Peers slower than this many times the best one are timed once and left out of the rounds.
HOPELESS = 1.5

FAULT_FREE = "fault-free"
AS_IT_COMES = "as it comes"
#: With these glibc never gives memory back, so that fresh outputs are old pages: no page faults.
FAULT_FREE_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 * 2**30)}

Run = Callable[[], Any]


@dataclass(frozen=True)
class Context:
    """How a benchmark is run."""

    device: str = "cpu"  # "cpu" or "cuda"
    threads: int = 1
    memory: str = AS_IT_COMES  # FAULT_FREE, AS_IT_COMES; "device" on a GPU
    quick: bool = False  # small shapes, three repetitions: for developing, never for conclusions
    seconds: float = 120.0  # for the rounds of one row
    part: str | None = None  # of a benchmark that names parts(): only its rows
    compiled: bool = True  # peers that torch.compile makes, for which it takes its time

    @property
    def repetitions(self) -> int:
        return 3 if self.quick else REPETITIONS

    @property
    def has_bars(self) -> bool:
        """Whether single ops have bars: at real shapes, on a CPU without page faults, which can
        take longer than the op."""
        return not self.quick and (self.device == "cuda" or self.memory == FAULT_FREE)

    @property
    def row_seconds(self) -> float:
        return min(self.seconds, 10.0) if self.quick else self.seconds


# ---- timing --------------------------------------------------------------------------------------


def run_delay() -> float:
    """Seconds that our threads were ready to run without a core, in all; 0 where unknown."""
    total = 0
    try:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    except OSError:
        return 0.0
    return total * 1e-9


def wait_for_quiet(longest: float = 0.2) -> None:
    """Returns when nothing else has been running for three looks, or after `longest` seconds."""
    end, looks = time.perf_counter() + longest, 0
    while looks < 3 and time.perf_counter() < end:
        try:
            stat = Path("/proc/stat").read_text()
            running = int(stat.split("procs_running", 1)[1].split()[0])
        except (OSError, IndexError, ValueError):
            return
        looks = looks + 1 if running <= 1 else 0
        time.sleep(0.0015)


@dataclass
class Timings:
    """One contestant: seconds a call and the share of waiting, one of each a round."""

    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def quiet(self, i: int) -> bool:
        return self.waited[i] < QUIET_SHARE

    @property
    def kept(self) -> int:
        return sum(self.quiet(i) for i in range(len(self.seconds)))

    @property
    def median(self) -> float:
        """Of the quiet repetitions; of all where none was quiet."""
        kept = [s for i, s in enumerate(self.seconds) if self.quiet(i)]
        return statistics.median(kept or self.seconds)


def ratio(other: Timings, ours: Timings) -> float:
    """How many times as long `other` takes: the median over the rounds in which both were quiet,
    the quotient of the medians where fewer than three rounds were."""
    pairs = [
        o / u
        for i, (o, u) in enumerate(zip(other.seconds, ours.seconds, strict=True))
        if other.quiet(i) and ours.quiet(i)
    ]
    return statistics.median(pairs) if len(pairs) >= 3 else other.median / ours.median


def _time_cpu(run: Run, calls: int) -> tuple[float, float]:
    wait_for_quiet()
    waited, start = run_delay(), time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - start
    return seconds / calls, (run_delay() - waited) / seconds


_flush: Any = None


def _time_cuda(run: Run, calls: int) -> tuple[float, float]:
    """By events, each call after the L2 cache was overwritten."""
    import torch

    global _flush
    if _flush is None:
        _flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(calls):
        _flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) * 1e-3, 0.0


def measure(
    runs: Mapping[str, Run],
    *,
    repetitions: int,
    seconds: float,
    calls: Mapping[str, int],
    timer: Callable[[Run, int], tuple[float, float]] = _time_cpu,
    seed: int | None = None,
) -> dict[str, Timings]:
    """Rounds of all `runs` in random order, until each has `repetitions` quiet ones or `seconds`
    have passed (at least three rounds)."""
    order = random.Random(seed)
    timings = {name: Timings() for name in runs}
    end = time.perf_counter() + seconds
    rounds = 0
    while any(t.kept < repetitions for t in timings.values()):
        if rounds >= 3 and time.perf_counter() > end:
            break
        names = list(runs)
        order.shuffle(names)
        for name in names:
            spent, waited = timer(runs[name], calls[name])
            timings[name].seconds.append(spent)
            timings[name].waited.append(waited)
        rounds += 1
    return timings


# ---- rows ----------------------------------------------------------------------------------------


@dataclass
class Ceiling:
    """Work at the machine's speed: `run` takes time t for work w; ours, of work W, can't be faster
    than t * W / w, where `scale` is W / w. `work` is w, in GB or GFLOP by `unit`."""

    run: Run
    scale: float
    work: float
    unit: str  # "GB/s" or "GFLOP/s"


@dataclass
class Comparison:
    """What makes a row: ours against its peers and the ceilings, of which the fastest counts."""

    op: str
    shape: str
    dtype: str
    ours: Run
    peers: dict[str, Run]
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    #: of a contestant's first result against ours: None if equal enough, else what is wrong
    check: Callable[[Any, Any], str | None] | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # peers that can't run, and why
    tokens: int | None = None  # tokens a call, for tokens/s
    bar: float | None = None  # the ratio to reach
    ceiling_bar: float | None = None  # the percentage of the ceiling to reach
    results_bytes: int | None = None  # if known: the memory needed beside them is measured
    memory_bar: float | None = None  # how many times as much the best peer must need
    first_counts: bool = False  # calls of seconds, nothing to compile: the first is timed


@dataclass
class Row:
    """One line of the results; times in milliseconds."""

    op: str
    shape: str
    dtype: str
    device: str
    threads: int
    memory: str
    ours_ms: float
    best_peer: str | None
    best_peer_ms: float | None
    ratio: float | None  # best peer / ours: above 1 we are faster
    ceiling: str | None  # which one, and its speed in this run
    percent_of_ceiling: float | None
    peers_ms: dict[str, float]
    skipped: dict[str, str]
    kept: int  # quiet repetitions of ours and its best peer, the fewer
    rounds: int
    date: str
    commit: str
    tokens_per_second: float | None = None
    peer_tokens_per_second: float | None = None
    bar: float | None = None
    ceiling_bar: float | None = None
    extra_mb: dict[str, float] | None = None  # "ours" and peers: most memory beside results
    memory_bar: float | None = None
    #: A word's way from one core to another, before the first round and behind the last.
    cores_ns: list[float] | None = None

    @property
    def memory_ratio(self) -> float | None:
        """Best peer's / ours."""
        if not self.extra_mb or self.best_peer is None:
            return None
        return self.extra_mb[self.best_peer] / max(self.extra_mb["ours"], 1e-3)

    @property
    def key(self) -> tuple[Any, ...]:
        """Rows of the same key replace each other."""
        return self.op, self.shape, self.dtype, self.device, self.threads, self.memory

    @property
    def noisy(self) -> bool:
        return self.kept < REPETITIONS

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """Raises ValueError naming what is missing or unknown."""
        known = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.name in ROW_REQUIRED}
        if wrong := sorted((needed - set(values)) | (set(values) - known)):
            raise ValueError(f"a row's keys don't fit: {', '.join(wrong)}")
        return cls(**values)


ROW_REQUIRED = frozenset(
    "op shape dtype device threads memory ours_ms best_peer best_peer_ms ratio ceiling "
    "percent_of_ceiling peers_ms skipped kept rounds date commit".split()
)


def difference(theirs: Any, ours: Any, allowed: float) -> str | None:
    """For Comparison.check: how far a peer's tensors are from ours, relative to the norm, if more
    than `allowed`."""
    for a, b in zip(theirs, ours, strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        if not error <= allowed:
            return f"differs from ours by {error:.1e}"
    return None


def commit() -> str:
    """The short hash of HEAD, with + where tracked files differ from it (results aside)."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short", "HEAD")
        results = ":(exclude)benchmarks/results", ":(exclude)benchmarks/RESULTS.md"
        changed = git("status", "--porcelain", "-uno", "--", ".", *results)
    except OSError:
        return "unknown"
    return (head or "unknown") + ("+" if changed else "")


def _first_calls(
    comparison: Comparison, context: Context
) -> tuple[dict[str, Run], dict[str, float], dict[str, str]]:
    """Runs everything once for compilers and caches, checks the results, then times one call.

    Returns the contestants worth rounds, the seconds of every one, and the reasons of the others.
    """
    timer = _time_cuda if context.device == "cuda" else _time_cpu
    runs: dict[str, Run] = {"ours": comparison.ours}
    seconds: dict[str, float] = {}
    skipped = dict(comparison.skipped)
    start = time.perf_counter()
    expected = comparison.ours()
    first = {"ours": time.perf_counter() - start}
    for name, run in comparison.peers.items():
        start = time.perf_counter()
        try:
            result = run()
        except Exception as error:  # a peer that can't do this shape is a finding, not a failure
            reason = (str(error).strip().splitlines() or [""])[0]
            skipped[name] = f"{type(error).__name__}: {reason[:100]}"
            continue
        first[name] = time.perf_counter() - start
        wrong = comparison.check(result, expected) if comparison.check else None
        del result
        if wrong:
            skipped[name] = wrong
        else:
            runs[name] = run
    del expected
    for name, run in runs.items():
        seconds[name] = first[name] if comparison.first_counts else timer(run, 1)[0]
        # the better of two: one disturbed call must not cost a peer its place
        if seconds[name] < 2.0:
            seconds[name] = min(seconds[name], timer(run, 1)[0])
    best = min((s for n, s in seconds.items() if n != "ours"), default=0.0)
    for name in [n for n in runs if n != "ours" and seconds[n] > HOPELESS * best]:
        skipped[name] = f"{seconds[name] * 1e3:.1f} ms at first, over {HOPELESS}x the best peer"
        del runs[name]
    return runs, seconds, skipped


def compare(comparison: Comparison, context: Context) -> Row:
    """Measures one row.

    Raises whatever ours raises; a peer that raises or is wrong is noted in `skipped`.
    """
    runs, seconds, skipped = _first_calls(comparison, context)
    peers = [name for name in runs if name != "ours"]
    for name, ceiling in comparison.ceilings.items():
        ceiling.run()
        runs[f"ceiling: {name}"] = ceiling.run
    timer = _time_cuda if context.device == "cuda" else _time_cpu
    calls = {}
    for name, run in runs.items():
        spent = seconds.get(name) or timer(run, 1)[0]
        calls[name] = max(1, min(1000, math.ceil(SHORTEST / max(spent, 1e-7))))
    from benchmarks.ceilings import core_distance  # which needs this module

    before = core_distance(context)
    timings = measure(
        runs,
        repetitions=context.repetitions,
        seconds=context.row_seconds,
        calls=calls,
        timer=timer,
    )
    row = make_row(comparison, context, timings, peers, skipped)
    looks = [x for x in (before, core_distance(context)) if x is not None]
    row.cores_ns = looks or None
    # Where glibc never gives memory back there is nothing to be seen.
    if comparison.results_bytes is not None and context.memory != FAULT_FREE:
        row.extra_mb = {
            name: (peak_memory(runs[name], context.device) - comparison.results_bytes) / 1e6
            for name in ["ours", *peers]
        }
        row.memory_bar = comparison.memory_bar
    return row


def peak_memory(run: Run, device: str = "cpu") -> int:
    """Bytes by which this process (Linux), or what torch holds on the GPU, grows at most while
    `run` runs."""
    if device == "cuda":
        import torch

        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith(name)).split()[1])

    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what was freed
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def make_row(
    comparison: Comparison,
    context: Context,
    timings: Mapping[str, Timings],
    peers: list[str],
    skipped: dict[str, str],
) -> Row:
    """The arithmetic of a row: pure, for tests."""
    ours = timings["ours"]
    best = min(peers, key=lambda name: timings[name].median) if peers else None
    floors = {
        name: ratio(timings[f"ceiling: {name}"], ours) * ceiling.scale
        for name, ceiling in comparison.ceilings.items()
    }
    fastest = min(floors, key=lambda name: floors[name]) if floors else None
    label = None
    if fastest is not None:
        ceiling = comparison.ceilings[fastest]
        speed = ceiling.work / timings[f"ceiling: {fastest}"].median
        label = f"{fastest}, {speed:.0f} {ceiling.unit}"
    tokens = comparison.tokens
    peer_seconds = timings[best].median if best else None
    return Row(
        op=comparison.op,
        shape=comparison.shape,
        dtype=comparison.dtype,
        device=context.device,
        threads=context.threads,
        memory=context.memory,
        ours_ms=ours.median * 1e3,
        best_peer=best,
        best_peer_ms=peer_seconds * 1e3 if peer_seconds else None,
        ratio=ratio(timings[best], ours) if best else None,
        ceiling=label,
        percent_of_ceiling=100 * floors[fastest] if fastest is not None else None,
        peers_ms={name: timings[name].median * 1e3 for name in peers},
        skipped=skipped,
        kept=min(t.kept for t in ([ours, timings[best]] if best else [ours])),
        rounds=len(ours.seconds),
        date=date.today().isoformat(),
        commit=commit(),
        tokens_per_second=tokens / ours.median if tokens else None,
        peer_tokens_per_second=tokens / peer_seconds if tokens and peer_seconds else None,
        bar=comparison.bar,
        ceiling_bar=comparison.ceiling_bar,
    )


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Runs the block with this many threads: torch's, and so the OpenMP kernels' too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def say(text: str) -> None:
    """Progress, on stderr: stdout is for rows."""
    print(text, file=sys.stderr, flush=True)
