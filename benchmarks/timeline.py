"""What overlaps in a training step whose optimizer state is in host memory, as a picture; and the
device memory it takes beside what theory says.

python -m benchmarks.timeline [--device cuda] [--microbatches 1] [--output FOLDER]

On a GPU the bars are pairs of CUDA events. Without one, copies made by two threads at a set speed
stand in for it: that shows the order of things, and no speed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.harness import say
from benchmarks.offload import CLIP, SETTINGS, Stack
from vlmkernels import HybridDeviceOptimizer
from vlmkernels.optim.transfer import CudaTransfers, Transfers, Waitable

Tensors = list[Tensor]
LANES = {
    "device": "GPU",
    "d2h": "gradients D2H",
    "host": "Adam on the host",
    "h2d": "weights H2D",
}
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "step": "#c6dbef",
    "d2h": "#fdae6b",
    "host": "#74c476",
    "h2d": "#9e9ac8",
}
FRACTIONS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Span:
    """Something that took place, in seconds from the beginning of the step."""

    lane: str
    name: str
    start: float
    end: float


class Timeline:
    """Spans by the host's clock and by CUDA events, on one axis."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._found: list[tuple[str, str, Any, Any]] = []
        if cuda:
            torch.cuda.synchronize()
            self._zero = self.event()
            torch.cuda.synchronize()
        self._start = time.perf_counter()

    @staticmethod
    def event(stream: Any = None) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def add(self, lane: str, name: str, start: Any, end: Any) -> None:
        """Moments of the host's clock (float) or events."""
        self._found.append((lane, name, start, end))

    @contextmanager
    def on_device(self, name: str) -> Iterator[None]:
        start = self.event() if self.cuda else time.perf_counter()
        yield
        self.add("device", name, start, self.event() if self.cuda else time.perf_counter())

    def read(self) -> list[Span]:
        """All spans; on a GPU its work must be done."""

        def seconds(moment: Any) -> float:
            if isinstance(moment, float):
                return moment - self._start
            return self._zero.elapsed_time(moment) * 1e-3

        return [Span(lane, name, seconds(a), seconds(b)) for lane, name, a, b in self._found]


class TimedCuda(CudaTransfers):
    """Copies between events."""

    timeline: Timeline

    def d2h(self, sources: Tensors, targets: Tensors, after: Waitable | None = None) -> Any:
        self._d2h.wait_stream(torch.cuda.current_stream(self.device))
        start = Timeline.event(self._d2h)
        ticket = super().d2h(sources, targets, after)
        self.timeline.add("d2h", "d2h", start, Timeline.event(self._d2h))
        return ticket

    def h2d(self, sources: Tensors, targets: Tensors, unread: bool = False) -> Any:
        if not unread:
            self._h2d.wait_stream(torch.cuda.current_stream(self.device))
        start = Timeline.event(self._h2d)
        ticket = super().h2d(sources, targets, unread=True)
        self.timeline.add("h2d", "h2d", start, Timeline.event(self._h2d))
        return ticket


class Paced:
    """Copies by a thread for each way, that many bytes a second."""

    timeline: Timeline

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._threads = {way: ThreadPoolExecutor(1, way) for way in ("d2h", "h2d")}

    def d2h(self, sources: Tensors, targets: Tensors, after: Waitable | None = None) -> Any:
        return self._copy("d2h", sources, targets)

    def h2d(self, sources: Tensors, targets: Tensors, unread: bool = False) -> Any:
        return self._copy("h2d", sources, targets)

    def _copy(self, way: str, sources: Tensors, targets: Tensors) -> Future[None]:
        def work() -> None:
            start = time.perf_counter()
            time.sleep(sum(x.numel() * x.element_size() for x in targets) / self.speed)
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
            self.timeline.add(way, way, start, time.perf_counter())

        return self._threads[way].submit(work)

    def wait(self, ticket: Any) -> None:
        ticket.result()

    device_wait = wait


def trace(
    model: Stack, data: list[Tensor], optimizer: HybridDeviceOptimizer, transfers: Any
) -> list[Span]:
    """One step."""
    timeline = transfers.timeline = Timeline(data[0].is_cuda)
    engine = optimizer._host
    plain: Callable[..., None] = type(engine)._step_bucket

    def step_bucket(*arguments: Any) -> None:
        start = time.perf_counter()
        plain(engine, *arguments)
        timeline.add("host", "host", start, time.perf_counter())

    engine._step_bucket = step_bucket  # type: ignore

    def passes(x: Tensor) -> None:
        with timeline.on_device("forward"):
            loss = model(x)
        with timeline.on_device("backward"):
            loss.backward()

    with optimizer.accumulating():
        for x in data[:-1]:
            passes(x)
    passes(data[-1])
    with timeline.on_device("step"):
        optimizer.step()
    if data[0].is_cuda:
        torch.cuda.synchronize()
    optimizer.zero_grad()
    return timeline.read()


def summary(spans: list[Span]) -> dict[str, float]:
    """Seconds: the step, each lane's work, what of it lies within the passes, and what is left to
    do when the backward pass has ended."""
    passes = [s for s in spans if s.name in ("forward", "backward")]
    over = max(s.end for s in passes)
    found = {"step": max(s.end for s in spans), "passes": sum(s.end - s.start for s in passes)}
    for lane in ("d2h", "host", "h2d"):
        work = [s for s in spans if s.lane == lane]
        found[lane] = sum(s.end - s.start for s in work)
        found[f"{lane} during passes"] = sum(max(min(s.end, over) - s.start, 0.0) for s in work)
    found["after the passes"] = found["step"] - over
    return found


def draw(spans: list[Span], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.add_subplot()
    for row, (lane, label) in enumerate(reversed(LANES.items())):
        for span in (s for s in spans if s.lane == lane):
            bar = [(span.start * 1e3, (span.end - span.start) * 1e3)]
            axes.broken_barh(bar, (row + 0.1, 0.8), color=COLOURS[span.name])
            if span.lane == "device" and span.end - span.start > 0.05 * max(s.end for s in spans):
                middle = (span.start + span.end) * 500
                axes.text(middle, row + 0.5, span.name, ha="center", va="center", fontsize=8)
        axes.text(
            -0.01, row + 0.5, label, ha="right", va="center", transform=axes.get_yaxis_transform()
        )
    axes.set(yticks=[], xlabel="ms", title=title, ylim=(0, len(LANES)))
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.savefig(path, dpi=120)


def pictures(path: Path) -> None:
    """Draws the steps of a file of main's beside it."""
    for step in json.loads(path.read_text(encoding="utf-8"))["steps"]:
        target = path.with_name(f"{path.stem}-{step['name'].replace(' ', '-')}.png")
        try:
            draw([Span(**span) for span in step["spans"]], step["title"], target)
        except ImportError:
            say(f"no {target.name}: matplotlib is not installed")


def memory(make: Callable[[], Stack], data: list[Tensor], fraction: float) -> dict[str, float]:
    """Peak bytes of a step on the device, and theory: what forward and backward pass take, and 12
    bytes a parameter that stays. Without a GPU: of state only."""
    model, cuda = make(), data[0].is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        model(data[0]).backward()
        passes = torch.cuda.max_memory_allocated()
        model.zero_grad()
    optimizer = HybridDeviceOptimizer(
        model.parameters(), **SETTINGS, offload_fraction=fraction, max_norm=CLIP
    )
    for _ in range(2):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        model(data[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    elements = {kept: 0 for kept in (False, True)}
    for param in model.parameters():
        elements[param not in optimizer._offloaded] += param.numel()
    theory = 12.0 * elements[True]
    measured = float(optimizer.memory()["device_state"])
    if cuda:
        torch.cuda.synchronize()
        measured, theory = float(torch.cuda.max_memory_allocated()), theory + passes
    return {
        "fraction": fraction,
        "offloaded": elements[False] / sum(elements.values()),
        "bytes": measured,
        "theory": theory,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--layers", type=int, help="default: 30 on a GPU (0.5 billion weights)")
    parser.add_argument("--output", type=Path, help="folder; default: benchmarks/results/timelines")
    parser.add_argument("--no-pictures", action="store_true", help="gpu-report draws them later")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    width, tokens = (4096, 8192) if cuda else (512, 512)
    layers = options.layers or (30 if cuda else 12)
    device = torch.device(options.device, torch.cuda.current_device() if cuda else None)

    def make() -> Stack:
        return Stack(width, layers, options.device)

    data = [
        torch.randn(tokens, width, device=device).bfloat16() * 0.1
        for _ in range(options.microbatches)
    ]
    machine = report.describe_machine(options.device)
    folder = options.output or report.RESULTS / report.TIMELINES
    path = folder / f"offload-{report.machine_slug(machine, options.device)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine, "steps": [], "memory": []}
    for name, settings in (
        ("clipped", {"max_norm": CLIP, "overlap": True}),
        ("in backward", {"in_backward": True}),
    ):
        model = make()
        transfers: Transfers = TimedCuda(device) if cuda else Paced(2e9)
        optimizer = HybridDeviceOptimizer(
            model.parameters(),
            **SETTINGS,
            **settings,  # type: ignore[arg-type]
            bucket_bytes=(32 << 20) if cuda else (1 << 20),
            transfers=transfers,
        )
        for _ in range(3):  # the first makes state, the second has warm caches
            spans = trace(model, data, optimizer, transfers)
        figures = summary(spans)
        found["steps"].append(
            {"name": name, "seconds": figures, "spans": [asdict(s) for s in spans]}
        )
        say(f"{name}: " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in figures.items()))
        title = f"{name}: {options.microbatches} x {tokens:,} tokens, {width**2 * layers:,} weights"
        found["steps"][-1]["title"] = title + ("" if cuda else " (a stand-in for a GPU)")
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        del model, optimizer
    for fraction in FRACTIONS:
        row = memory(make, data, fraction)
        found["memory"].append(row)
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        say(
            f"offload_fraction {fraction}: {row['bytes'] / 1e9:.3f} GB on the device, theory "
            f"{row['theory'] / 1e9:.3f} GB"
        )
        if cuda:
            torch.cuda.empty_cache()
    if not options.no_pictures:
        pictures(path)
    say(f"{path} written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
