"""The harness's arithmetic, the rows' form and the report. Nothing here measures anything."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ceilings, harness, report, run
from benchmarks.harness import Ceiling, Comparison, Context, Row, Timings

ROOT = Path(__file__).resolve().parents[1]


def timings(*seconds: float, waited: tuple[float, ...] = ()) -> Timings:
    return Timings(list(seconds), list(waited or [0.0] * len(seconds)))


def nothing() -> None:
    pass


# ---- arithmetic ----------------------------------------------------------------------------------


def test_median_is_of_quiet_repetitions() -> None:
    t = timings(1.0, 2.0, 3.0, 100.0, waited=(0.0, 0.049, 0.0, 0.05))
    assert t.kept == 3 and t.median == 2.0
    assert timings(1.0, 9.0, 5.0, waited=(1, 1, 1)).median == 5.0  # none quiet: of all


def test_ratio_is_paired_by_round() -> None:
    """The machine is three times slower in half of the rounds: the ratio doesn't see it."""
    ours = timings(1.0, 3.0, 1.0, 3.0, 3.0)
    other = timings(2.0, 6.0, 2.0, 6.0, 6.0)
    assert harness.ratio(other, ours) == 2.0
    # Rounds in which either was disturbed don't count...
    disturbed = timings(2.0, 6.0, 2.0, 600.0, 6.0, waited=(0, 0, 0, 0.9, 0))
    assert harness.ratio(disturbed, ours) == 2.0
    # ... and with fewer than three left it is the quotient of the medians.
    few = timings(2.0, 6.0, 4.0, 4.0, 4.0, waited=(0, 0, 1, 1, 1))
    assert harness.ratio(few, ours) == 4.0 / 3.0


def test_measure_interleaves_until_enough_are_quiet() -> None:
    order: list[str] = []

    def timer(call: Any, calls: int) -> tuple[float, float]:
        call()
        return float(calls), 0.5 if len(order) <= 6 else 0.0  # the first two rounds are disturbed

    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    calls = {"a": 1, "b": 2, "c": 3}
    actual = harness.measure(
        runs, repetitions=4, seconds=60, calls=calls, timer=timer, seed=1
    )  # fmt: skip
    assert [t.kept for t in actual.values()] == [4, 4, 4]
    assert actual["b"].seconds == [2.0] * 6
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 6 and all(sorted(r) == list("abc") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "always the same order"


def test_measure_stops_in_time_but_after_three_rounds() -> None:
    actual = harness.measure(
        {"a": nothing}, repetitions=9, seconds=0, calls={"a": 1}, timer=lambda r, n: (1.0, 1.0)
    )
    assert len(actual["a"].seconds) == 3 and actual["a"].kept == 0


def test_row_arithmetic() -> None:
    comparison = Comparison(
        op="op",
        shape="s",
        dtype="float32",
        ours=nothing,
        peers={},
        # Ours does four times the work of one run of "far" and twice that of "near".
        ceilings={
            "near": Ceiling(nothing, scale=2.0, work=10.0, unit="GB/s"),
            "far": Ceiling(nothing, scale=4.0, work=30.0, unit="GB/s"),
        },
        tokens=100,
        bar=2.0,
        ceiling_bar=99.0,
    )
    actual = {
        "ours": timings(0.1, 0.1, 0.1),
        "slow": timings(0.5, 0.5, 0.5),
        "fast": timings(0.2, 0.2, 0.2, waited=(0, 0, 1)),
        "ceiling: near": timings(0.04, 0.04, 0.04),  # 80 ms for our work
        "ceiling: far": timings(0.015, 0.015, 0.015),  # 60 ms: the tighter bound
    }
    context = Context(threads=2, memory=harness.FAULT_FREE)
    row = harness.make_row(comparison, context, actual, ["slow", "fast"], {"odd": "can't"})
    assert row.best_peer == "fast" and row.ratio == pytest.approx(2.0)
    assert row.ours_ms == pytest.approx(100) and row.best_peer_ms == pytest.approx(200)
    assert row.ceiling == "far, 2000 GB/s" and row.percent_of_ceiling == pytest.approx(60)
    assert row.peers_ms == pytest.approx({"slow": 500, "fast": 200})
    assert (row.kept, row.rounds, row.skipped) == (2, 3, {"odd": "can't"})
    assert row.tokens_per_second == pytest.approx(1000)
    assert row.peer_tokens_per_second == pytest.approx(500)
    assert report._verdict(row) == "misses 99%"
    assert row.noisy and "NOISY: 2 of 3" in report.line(row)


def test_which_rows_have_bars() -> None:
    assert Context(memory=harness.FAULT_FREE).has_bars and Context(device="cuda").has_bars
    assert not Context().has_bars and not Context(memory=harness.FAULT_FREE, quick=True).has_bars


def test_compare_leaves_out_wrong_failing_and_hopeless_peers() -> None:
    def fails() -> int:
        raise RuntimeError("no such kernel\nand more")

    def take(seconds: float) -> Any:
        def sleeps() -> int:
            time.sleep(seconds)
            return 1

        return sleeps

    row = harness.compare(
        Comparison(
            op="op",
            shape="s",
            dtype="float32",
            ours=take(0.002),
            peers={"good": take(0.004), "wrong": lambda: 2, "fails": fails, "slow": take(0.05)},
            check=lambda theirs, ours: None if theirs == ours else f"{theirs} is not {ours}",
        ),
        Context(quick=True, seconds=1.0),
    )
    assert row.best_peer == "good" and set(row.peers_ms) == {"good"}
    assert row.skipped["wrong"] == "2 is not 1"
    assert row.skipped["fails"] == "RuntimeError: no such kernel"
    assert "best peer" in row.skipped["slow"]
    assert row.ceiling is None and row.percent_of_ceiling is None
    assert row.ratio is not None and row.ratio > 0  # its value is the machine's


@pytest.mark.slow
def test_memory_beside_results() -> None:
    """In a process of its own: what other tests freed, this one's allocator may have kept."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        pool.submit(check_memory_beside_results).result()


def check_memory_beside_results() -> None:
    """What a contestant holds at most and gives back, less its results."""

    def needs(megabytes: int) -> Any:
        return lambda: torch.ones(megabytes, 250_000).sum()

    comparison = Comparison(
        op="op",
        shape="s",
        dtype="float32",
        ours=needs(40),  # glibc keeps what is below 32 MB
        peers={"peer": needs(160)},
        results_bytes=1_000_000,
        memory_bar=8.0,
    )
    row = harness.compare(comparison, Context(quick=True, seconds=0.5))
    assert row.extra_mb is not None and row.memory_ratio is not None
    assert 38.5 <= row.extra_mb["ours"] < 45 and 158.5 <= row.extra_mb["peer"] < 165
    assert 3.4 < row.memory_ratio < 4.4 and "misses 1/8 of the memory" in report._verdict(row)
    assert "MB beside results: ours " in report._memory([row])[1]
    fault_free = Context(quick=True, seconds=0.5, memory=harness.FAULT_FREE)
    assert harness.compare(comparison, fault_free).extra_mb is None


def test_run_delay_counts_up() -> None:
    looks = [(harness.run_delay(), harness.run_delay()) for _ in range(5)]
    # A thread of an earlier test that ends between two looks takes its seconds with it.
    assert any(0 <= first <= second for first, second in looks), looks


# ---- rows, results, report -----------------------------------------------------------------------


def example(**changes: Any) -> Row:
    values: dict[str, Any] = dict(
        op="attention, forward",
        shape="256 windows of 64",
        dtype="bfloat16",
        device="cpu",
        threads=2,
        memory=harness.FAULT_FREE,
        ours_ms=12.345,
        best_peer="SDPA | per length",
        best_peer_ms=49.0,
        ratio=3.97,
        ceiling="bf16 dot products, 1081 GFLOP/s",
        percent_of_ceiling=77.4,
        peers_ms={"SDPA | per length": 49.0, "eager": 55.5},
        skipped={"nested tensor": "RuntimeError: no"},
        kept=9,
        rounds=10,
        date="2026-01-02",
        commit="abc1234",
        bar=3.5,
    )
    return Row(**(values | changes))


MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "kernels": "avx512",
    "system": "Linux x86_64",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
}


def test_rows_survive_json() -> None:
    row = example(tokens_per_second=10.0, cores_ns=[30.5])
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row
    with pytest.raises(ValueError, match="ratio"):
        Row.from_json({k: v for k, v in row.to_json().items() if k != "ratio"})
    with pytest.raises(ValueError, match="speed"):
        Row.from_json(row.to_json() | {"speed": 1})


def test_store_replaces_rows_of_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "results" / "machine.json"
    report.store(path, MACHINE, [example(), example(threads=1)])
    report.store(path, MACHINE, [example(ours_ms=1.0), example(dtype="float32")])
    machine, rows = report.load(path)
    assert machine == MACHINE
    assert [(r.dtype, r.threads, r.ours_ms) for r in rows] == [
        ("bfloat16", 2, 1.0),
        ("bfloat16", 1, 12.345),
        ("float32", 2, 12.345),
    ]
    path.write_text("[]")
    with pytest.raises(ValueError, match="machine.json"):
        report.load(path)


def test_report(tmp_path: Path) -> None:
    noisy = example(memory=harness.AS_IT_COMES, ratio=1.0, kept=4, tokens_per_second=321.0)
    first = example(cores_ns=[31.2, 164.8])
    report.store(tmp_path / "a-cpu.json", MACHINE, [first, noisy])
    whole = example(shape="4 packs", tokens_per_second=5.0, ratio=0.9, percent_of_ceiling=45.0)
    whole.best_peer, whole.ceiling = "x, one padded batch a step", "products, 200 GFLOP/s"
    report.store(tmp_path / "a-cpu.json", MACHINE, [whole])
    gpu = example(memory="device", device="cuda", best_peer=None, best_peer_ms=None, ratio=None)
    report.store(tmp_path / "a-gpu.json", MACHINE | {"gpu": "A GPU"}, [gpu])
    job = dict(size="2B", gigabytes=4.42, rss=1.17, limit=1.5, date="2026-01-02", commit="abc1234")
    report.store_conversions(MACHINE, "2B", [job | dict(job="old", seconds=1.0)], tmp_path)
    report.store_conversions(MACHINE, "2B", [job | dict(job="verify", seconds=20.0)], tmp_path)
    report.write(tmp_path, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    lines = text.splitlines()
    table = [line for line in lines if line.startswith("| attention")]
    assert len(table) == 4
    header = next(line for line in lines if line.startswith("| op"))
    assert {line.count("|") for line in [header, *table]} == {header.count("|")}
    parts = [
        "12.3",
        "49",
        "SDPA / per length",
        "3.97x",
        "77%",
        "met",
        "31, 165",
        "2026-01-02, abc1234",
    ]
    for part in parts:
        assert part in table[0], part
    assert "4/10 (noisy)" in table[2] and "misses 3.5x (1.29x at the ceiling)" in table[2]
    assert text.count("Ours makes a pass for each pack") == 1
    assert text.count("nothing but its products would be at 2.00.") == 1
    assert "321 tokens/s" in text and "nested tensor (RuntimeError: no)" in text
    assert "| 2B | verify | 4.42 | 20 | 221 | 1.17 | 1.5 | 2026-01-02, abc1234 |" in lines
    assert "old" not in text
    assert "## A GPU" in text and "## A CPU, 2 cores" in text
    assert "Nothing has been measured" in report.render({})


def test_results_in_the_tree_are_valid(tmp_path: Path) -> None:
    """Every stored row loads, and RESULTS.md is made of just those."""
    files = {path.name: report.load(path) for path in sorted(report.RESULTS.glob("*.json"))}
    for _, rows in files.values():
        for row in rows:
            assert row.ours_ms > 0 and row.kept <= row.rounds and row.best_peer != "ours"
    if report.REPORT.exists():
        report.write(target=tmp_path / "RESULTS.md")
        assert report.REPORT.read_text() == (tmp_path / "RESULTS.md").read_text()


def test_slug() -> None:
    machine = MACHINE | {"cpu": "Intel(R) Xeon(R) Processor", "gpu": "NVIDIA H200"}
    assert report.machine_slug(machine, "cpu") == "intel-xeon-processor-2-cores"
    assert report.machine_slug(machine, "cuda") == "nvidia-h200"


# ---- the benchmarks ------------------------------------------------------------------------------


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.parse([]).names == list(run.NAMES)
    options = run.parse(["adam", "--quick", "--memory", "fault-free"])
    assert options.names == ["adam"] and options.quick
    for arguments in (["nonsense"], ["--threads", "0"]):
        with pytest.raises(SystemExit):
            run.parse(arguments)
    assert "no benchmark is called nonsense" in capsys.readouterr().err
    for name in run.NAMES:
        assert callable(importlib.import_module(f"benchmarks.{name}").rows)


def test_parts_get_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of attention belongs to one part; the windows alone are measured with faults."""
    attention = importlib.import_module("benchmarks.attention")
    parts = run.parts_of("attention", run.parse([]), "fault-free")
    assert parts == ["vision windows", "packed samples", *attention.SHAPES]
    short = [name for name, lengths in attention.SHAPES.items() if max(lengths) <= 64]
    assert run.parts_of("attention", run.parse([]), "as-it-comes") == ["vision windows", *short]
    assert run.parts_of("adam", run.parse([]), "fault-free") == [None]
    assert run.parts_of("attention", run.parse(["--device", "cuda"]), "as-it-comes") == [None]
    assert run.main(["attention", "--part", "nonsense", "--quick"]) == 2
    assert '(fault-free) has no part "nonsense"; it has "vision windows"' in capsys.readouterr().err


def test_memory_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "5")
    plain = run.environment("as-it-comes", 3)
    assert "MALLOC_MMAP_MAX_" not in plain and plain["OMP_NUM_THREADS"] == "3"
    faultless = run.environment("fault-free", 1)
    assert faultless["MALLOC_MMAP_MAX_"] == "0"
    assert faultless["MALLOC_TRIM_THRESHOLD_"] == "34359738368"


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no AMX to refuse"
)
def test_refused_amx() -> None:
    """Linux gives the tile registers no more; other requests of the same call go on."""
    code = """if True:
        import ctypes
        from benchmarks.no_amx import refuse_amx
        refuse_amx()
        libc = ctypes.CDLL(None, use_errno=True)
        place = ctypes.c_ulong()
        tiles = libc.syscall(158, 0x1023, 18), ctypes.get_errno()
        base = libc.syscall(158, 0x1003, ctypes.byref(place))
        from vlmkernels import _native
        print(tiles, base, place.value != 0, _native._C.isa().startswith("amx"))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "(-1, 1) 0 True False"


def test_amx_that_cannot_be_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert run.main(["product", "--no-amx", "--quick"]) == 2
    assert "--no-amx: no AMX to refuse on Linux aarch64" in "".join(capsys.readouterr())


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the ceilings")
def test_ceilings_compute_what_they_say() -> None:
    context = Context(threads=1)
    arrays = tuple(torch.randn(1000) for _ in range(4))
    before = [a.clone() for a in arrays]
    streams = ceilings.adam(arrays, 28.0 * 3000, context)
    for ceiling in streams.values():
        ceiling.run()
        assert ceiling.scale == 3.0 and ceiling.work == pytest.approx(28e-6)
    assert all(torch.equal(a, b) for a, b in zip(arrays, before, strict=True))
    to, from_ = torch.zeros(100_003, dtype=torch.int8), torch.ones(100_003, dtype=torch.int8)
    for nontemporal in (0, 1):
        to.zero_()
        ceilings.library().copy_stream(to.data_ptr(), from_.data_ptr(), len(to), nontemporal, 2)
        assert torch.equal(to, from_)
    peaks = ceilings.arithmetic(1e9, torch.float32, context)
    assert len(peaks) == 1 + ceilings.on_amx()
    for name, peak in peaks.items():
        assert peak.scale * peak.work == pytest.approx(1.0)  # 1 GFLOP asked for
        start = time.perf_counter()
        peak.run()
        speed = peak.work / (time.perf_counter() - start)
        assert 1 < speed < 1000, f"{name}: {speed} GFLOP/s on one core"
    assert ceilings.core_distance(context) is None
    apart = ceilings.core_distance(Context(threads=2))
    assert apart is None or 1 < apart < 1e6, f"{apart} ns from core to core"


def test_attention_peers_agree() -> None:
    """All ways of attending within segments give one answer, so that a row compares like with
    like."""
    attention = importlib.import_module("benchmarks.attention")
    lengths = [7, 12, 7, 1, 12, 7]
    q, k, v = (torch.randn(46, attention.HEADS, attention.HEAD_DIM) for _ in range(3))
    cu_seqlens = torch.tensor([0, 7, 19, 26, 27, 39, 46], dtype=torch.int32)
    expected = [attention.varlen_attention(q, k, v, cu_seqlens)]
    actual = attention.peers(lengths, "cpu", compiled=False)
    assert len(actual) == 7
    for name, attend in actual.items():
        assert attention._close(torch.float32)([attend(q, k, v)], expected) is None, name
    wrong = [expected[0] + 0.1]
    assert "differs" in attention._close(torch.float32)(wrong, expected)


def test_embedding_peers_agree() -> None:
    embedding = importlib.import_module("benchmarks.embedding")
    inputs = embedding.make(512, 16, 300, "cpu")
    assert 0.7 < inputs.mask.float().mean() < 0.8
    for part in (embedding.forward, embedding.backward, embedding.repetitions):
        for comparison in part(inputs, Context(quick=True)):
            expected = comparison.ours()
            assert len(comparison.peers) >= 5 or part is embedding.repetitions
            for name, peer in comparison.peers.items():
                assert embedding._same(peer(), expected) is None, f"{comparison.op}: {name}"
    step = embedding.in_a_step([(inputs.ids, inputs.index)] * 2, 300, 16)
    (bridge,) = step.peers.values()
    assert embedding._same(bridge(), step.ours()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_peers_agree(dtype: torch.dtype) -> None:
    loss = importlib.import_module("benchmarks.loss")
    inputs = loss.make(128, 64, 300, dtype, 0.25)
    assert inputs.counted == 32
    for comparison in (loss.dense, loss.into_main_grad):
        row = comparison(inputs, Context(quick=True), 1.0)
        expected = row.ours()
        assert len(row.peers) >= 2
        for name, peer in row.peers.items():
            assert row.check(peer(), expected) is None, f"{row.op}: {name}"


def test_adam_contestants_do_the_same() -> None:
    adam = importlib.import_module("benchmarks.adam")
    results = []
    for make in (adam.our_step, lambda p: adam.torch_step(p, fused=True)):
        problem = adam.Problem([100, 37, 2048])
        make(problem)()
        results.append(torch.cat([p.detach() for p in problem.params]))
    assert torch.allclose(results[0], results[1], rtol=1e-6, atol=0)
    assert 90e6 < sum(adam.model_sizes()) < 120e6
