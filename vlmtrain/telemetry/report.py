"""`vlmtrain report OUTPUT`: loss, throughput, waterfall, balance and memory of a run on one page.

Reads metrics.jsonl and run.json of the run's folder and writes report.html beside them: plain HTML
and SVG that any browser shows from the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from vlmtrain.core.errors import UserError
from vlmtrain.core.files import is_dir, is_file, write_text, writing
from vlmtrain.models.family import FAMILIES
from vlmtrain.telemetry.charts import (
    LOW,
    Bar,
    Series,
    areas,
    bars,
    legend,
    lines,
    number,
    seconds,
    smooth,
)
from vlmtrain.telemetry.ledger import ROWS

Row = dict[str, Any]

COLOURS = {
    "compute": "var(--blue)",
    "padding": "var(--rose)",
    "bubble": "var(--grey)",
    "imbalance": "var(--plum)",
    "data_wait": "var(--amber)",
    "gradients": "var(--violet)",
    "optimizer": "var(--green)",
    "checkpoint": "var(--brown)",
    "evaluation": "var(--teal)",
    "other": "var(--dark)",
}
MEANING = {
    "compute": "forward and backward of tokens and patches that count",
    "padding": "the same for the tails that tensor parallelism adds to packs",
    "bubble": "ranks of the pipeline waiting for others",
    "imbalance": "replicas waiting for the slowest one",
    "data_wait": "waiting for the loader",
    "gradients": "reduction of gradients, not hidden",
    "optimizer": "clearing, norm, update, gathering of weights",
    "checkpoint": "saving",
    "evaluation": "measuring held-out data",
    "other": "moving packs to the device, records, the rest",
}
MEMORY = (
    ("states", "parameters, gradients, optimizer", "var(--dark)"),
    ("activations", "activations", "var(--blue)"),
    ("transient", "short-lived", "var(--violet)"),
    ("batch", "pixels and ids", "var(--amber)"),
)


def write_report(run: Path) -> Path:
    """Write `run`/report.html and return its path.

    Raises:
        UserError: no such folder, no metrics in it, or a folder that can't be written.
    """
    rows, facts = read_run(run)
    path = run / "report.html"
    with writing(path):
        write_text(path, render(rows, facts, run.resolve().name))
    return path


def read_run(run: Path) -> tuple[list[Row], dict[str, Any]]:
    """The steps and the facts of a run's output folder.

    Raises:
        UserError: as `write_report`.
    """
    path = run / "metrics.jsonl"
    if not is_file(path):
        near = sorted(p.parent for p in run.glob("*/metrics.jsonl")) if is_dir(run) else []
        hint = f"; did you mean {near[0]}?" if near else "; name the --output of vlmtrain train"
        raise UserError(f"{run} holds no metrics.jsonl{hint}")
    rows: list[Row] = []
    for count, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # of a killed run the last line may be half-written
        if not isinstance(row, dict) or "waterfall" not in row:
            raise UserError(
                f"{path} line {count} has no waterfall: it was written by an older version of "
                "vlmtrain; train again to get a report"
            )
        rows.append(row)
    if not rows:
        raise UserError(f"{path} has no steps yet; wait for the first one")
    try:
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{run / 'run.json'} can't be read: {error}") from error
    if "device" not in facts:
        raise UserError(
            f"{run / 'run.json'} names no device: it was written by an older version of vlmtrain; "
            "train again to get a report"
        )
    return rows, facts


def column(rows: Sequence[Row], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


def steady(rows: Sequence[Row]) -> list[Row]:
    """Without the first two steps, in which libraries warm up, where there are more."""
    return list(rows[2:] if len(rows) > 4 else rows)


def mean_waterfall(rows: Sequence[Row]) -> dict[str, float]:
    return {name: sum(row["waterfall"][name] for row in rows) / len(rows) for name in ROWS}


def render(rows: Sequence[Row], facts: dict[str, Any], name: str) -> str:
    """The page's HTML."""
    sections = (
        ("Loss", _loss(rows)),
        ("Throughput", _throughput(rows, facts)),
        ("Where a step's seconds go", _waterfall(rows, facts)),
        ("Planned, predicted, measured", _prediction(rows, facts)),
        ("Balance", _balance(rows, facts)),
        ("Memory", _memory(rows, facts)),
    )
    body = "".join(
        f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: training report</title><style>{_STYLE}</style></head><body><main>"
        f"{_head(rows, facts, name)}<div class='grid2'>{body}</div>{_settings(facts)}"
        "</main></body></html>\n"
    )


def _head(rows: Sequence[Row], facts: dict[str, Any], name: str) -> str:
    last, usual = rows[-1], steady(rows)
    family = FAMILIES[facts["family"]].title
    processes = facts["processes"]
    mfu = [row["mfu"] for row in usual if row["mfu"] is not None]
    hfu = [row["hfu"] for row in usual if row["hfu"] is not None]
    total = {k: sum(row[k] for row in rows) for k in ("tokens", "samples", "images", "videos")}
    wall = sum(row["step_seconds"] for row in rows)
    tiles = [
        ("steps", f"{last['step']:,}", f"in {_duration(wall)}"),
        ("loss", f"{last['loss']:.4f}", f"from {rows[0]['loss']:.4f}"),
        (
            "tokens/s per process",
            number(median(row["tokens_per_second_per_gpu"] for row in usual)),
            "median, padding left out",
        ),
        (
            "MFU",
            f"{median(mfu):.1%}" if mfu else "not known",
            f"HFU {median(hfu):.1%}" if hfu else "no peak for this device",
        ),
        (
            "a step",
            seconds(median(row["step_seconds"] for row in usual)),
            f"{median(row['padding_share'] for row in usual):.1%} padding",
        ),
        ("tokens seen", number(total["tokens"]), f"{total['samples']:,} samples"),
        ("images seen", number(total["images"]), f"{total['videos']:,} videos"),
    ]
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span><small>{escape(more)}</small></div>"
        for label, value, more in tiles
    )
    return (
        f"<header><h1>{escape(name)}</h1><p>{family} on {processes} "
        f"process{'es' if processes > 1 else ''}: {escape(facts['layout'])}</p>"
        f"<p class='soft'>Peak: {escape(facts['peak'])}</p></header>"
        f"<div class='tiles'>{cells}</div>"
    )


def _duration(value: float) -> str:
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _loss(rows: Sequence[Row]) -> str:
    xs, losses = column(rows, "step"), column(rows, "loss")
    span = max(1, len(rows) // 25)
    series = [Series("loss of each step", "var(--blue)", losses, faint=span > 1)]
    if span > 1:
        series.append(Series(f"mean of about {span}", "var(--blue)", smooth(losses, span)))
    norms = column(rows, "grad_norm")
    spike = max(4 * median(norms), 1.1 * sorted(norms)[int(0.97 * (len(norms) - 1))])
    return (
        lines(xs, series)
        + "<h3>Gradient norm and learning rate</h3>"
        + lines(xs, [Series("gradient norm", "var(--plum)", norms)], most=spike, height=LOW)
        + lines(xs, [Series("learning rate", "var(--green)", column(rows, "lr"))], height=LOW)
    )


def _throughput(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    xs = column(rows, "step")
    parts = lines(
        xs,
        [Series("tokens/s per process", "var(--blue)", column(rows, "tokens_per_second_per_gpu"))],
    )
    if facts["peak_flops"]:
        parts += "<h3>Share of the peak</h3>" + lines(
            xs,
            [
                Series("HFU: with padding and recomputation", "var(--grey)", column(rows, "hfu")),
                Series("MFU: what the model needs", "var(--green)", column(rows, "mfu")),
            ],
            percent=True,
        )
    parts += "<h3>Samples a second</h3>" + lines(
        xs, [Series("samples/s", "var(--violet)", column(rows, "samples_per_second"))], height=LOW
    )
    return parts


def _waterfall(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    xs = column(rows, "step")
    mean = mean_waterfall(steady(rows))
    total = sum(mean.values())
    layers = [
        Series(name, COLOURS[name], [row["waterfall"][name] for row in rows])
        for name in ROWS
        if mean[name] > 0
    ]
    measured = [(name, COLOURS[name], mean[name]) for name in ROWS]
    drawn: list[Bar] = [("measured", measured)]
    planned = _planned(facts)
    if planned:
        drawn.append(("planned", [(name, COLOURS[name], planned[name]) for name in ROWS]))
    table = "".join(
        f"<tr><td><i style='background:{COLOURS[name]}'></i>{name.replace('_', ' ')}</td>"
        f"<td>{seconds(mean[name])}</td><td>{mean[name] / total:.1%}</td>"
        f"<td class='soft'>{MEANING[name]}</td></tr>"
        for name in ROWS
    )
    return (
        areas(xs, layers)
        + bars(drawn, "mean step by cause", "s")
        + f"<table>{table}</table><p class='soft'>Means over all ranks and over the steps after "
        "the first two; a step ends when the next one begins.</p>"
    )


def _planned(facts: dict[str, Any]) -> dict[str, float] | None:
    """The plan's waterfall, its communication as compute, as the measured one has it."""
    if facts["plan"] is None:
        return None
    parts = facts["plan"]["waterfall"]
    shown = {**dict.fromkeys(ROWS, 0.0), **parts, "compute": parts["compute"] + parts["tensor"]}
    return {name: shown[name] for name in ROWS}


def _prediction(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    xs, taken = column(rows, "step"), column(rows, "step_seconds")
    usual, plan = steady(rows), facts["plan"]
    series = [Series("measured", "var(--blue)", taken)]
    predicted = column(rows, "predicted_seconds")
    if any(predicted):
        series.append(Series("fitted to the steps before", "var(--amber)", predicted))
    if plan:
        flat = [plan["step_seconds"]] * len(rows)
        series.append(Series("planned before the run", "var(--plum)", flat, dashed=True))
    text = lines(xs, series, unit="seconds a step", most=2.2 * median(taken))
    if plan:
        pairs: list[tuple[str, Callable[[float], str], float, float]] = [
            ("step", seconds, plan["step_seconds"], median(column(usual, "step_seconds"))),
            (
                "tokens/s per process",
                number,
                plan["tokens_per_second_per_gpu"],
                median(column(usual, "tokens_per_second_per_gpu")),
            ),
        ]
        if facts["peak_flops"] and any(row["mfu"] is not None for row in usual):
            mfu = median(row["mfu"] for row in usual if row["mfu"] is not None)
            pairs.append(("MFU", lambda share: f"{share:.1%}", plan["mfu"], mfu))
        lined = "".join(
            f"<tr><td>{label}</td><td>{show(ours)}</td><td>{show(real)}</td>"
            f"<td>{real / ours - 1:+.0%}</td></tr>"
            for label, show, ours, real in pairs
        )
        text += (
            "<table><tr><th></th><th>planned</th><th>measured</th><th></th></tr>"
            f"{lined}</table><p class='soft'>Planned for {escape(plan['gpu'])}, within "
            f"{plan['uncertainty']:.0%} (one standard deviation).</p>"
        )
    if facts["fit"]:
        terms = [
            f"{_small(value)} s a {_UNITS[name]}"
            for name, value in facts["fit"].items()
            if value > 0
        ]
        text += (
            f"<p class='soft'>The fit, per replica: {' + '.join(terms)}. Where all packs are "
            "equally long, seconds a step and seconds a token can't be told apart.</p>"
        )
    return text


#: What a coefficient of the fit (drift.COEFFICIENTS) is the seconds of.
_UNITS = {
    "constant": "step",
    "tokens": "token",
    "token pairs": "pair of tokens",
    "patches": "patch",
    "patch pairs": "pair of patches",
    "targets": "target token",
}


def _small(value: float) -> str:
    return f"{value:.2e}" if value < 1e-3 else f"{value:.3g}"


def _balance(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    xs = column(rows, "step")
    one = [1.0] * len(rows)
    series = [
        Series("packs, by expected cost", "var(--amber)", column(rows, "microbatch_balance")),
    ]
    if facts["replicas"] > 1:
        series += [
            Series("replicas, by expected cost", "var(--violet)", column(rows, "rank_balance")),
            Series("replicas, measured", "var(--plum)", column(rows, "replica_balance")),
        ]
    if facts["pipeline"] > 1:
        stage = column(rows, "stage_balance")
        series.append(Series("pipeline ranks, measured", "var(--blue)", stage))
    series.append(Series("even", "var(--grey)", one, dashed=True))
    shown = [
        value
        for one_series in series
        for value in one_series.values[2 if len(rows) > 4 else 0 :]
        if value is not None
    ]
    top = 1 + 1.3 * (max(shown) - 1) if shown else None
    return (
        lines(xs, series, zero=False, unit="heaviest over mean", most=top)
        + "<h3>Padding</h3>"
        + lines(
            xs,
            [Series("share of padded tokens", "var(--rose)", column(rows, "padding_share"))],
            percent=True,
            height=LOW,
        )
    )


def _memory(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    measured = rows[-1]["memory_gb"]
    drawn: list[Bar] = []
    plan = facts["plan"]
    if plan and len(plan["memory_bytes"]) != len(measured):  # of a start that has no step yet
        plan = None
    for rank, peak in enumerate(measured):
        drawn.append((f"rank {rank} measured", [("measured", "var(--green)", peak)]))
        if plan:
            planned = plan["memory_bytes"][rank]
            parts = [(label, colour, planned[key] / 1e9) for key, label, colour in MEMORY]
            drawn.append(("planned", parts))
    text = bars(drawn[:32], "memory of each pipeline rank", "GB")
    text += legend([("measured peak", "var(--green)"), *((n, c) for _, n, c in MEMORY)])
    what = (
        "Measured: peak resident memory of the process, with Python and torch in it; planned: "
        "tensors alone."
        if facts["device"] == "cpu"
        else "Measured: the allocator's peak, the fullest rank of each pipeline rank."
    )
    peaks = lines(
        column(rows, "step"),
        [Series("peak of the fullest rank", "var(--green)", column(rows, "peak_memory_gb"))],
        unit="GB",
        height=LOW,
    )
    return text + f"<p class='soft'>{what}</p>" + peaks


def _settings(facts: dict[str, Any]) -> str:
    lined = []
    for key, value in facts["config"].items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        for inner, setting in pairs:
            name = f"{key}.{inner}" if inner else key
            lined.append(f"<tr><td>{escape(name)}</td><td>{escape(str(setting))}</td></tr>")
    return f"<details><summary>All settings</summary><table>{''.join(lined)}</table></details>"


_STYLE = """
:root{--ink:#1b1f24;--soft:#626c77;--line:#dde2e8;--page:#f5f6f8;--card:#fff;
--blue:#2f77c9;--rose:#e3a3a3;--grey:#b3bcc7;--plum:#b0529b;--amber:#eda23a;--violet:#7a68bd;
--green:#4b9a6a;--brown:#8d6b4f;--teal:#3aa6a0;--dark:#3d4f66}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4af;--line:#343c46;
--page:#14181d;--card:#1d232a;--grey:#6c7681;--dark:#8497b0;--blue:#5b9be3}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1380px;margin:0 auto;padding:28px 24px 48px}
h1{font-size:27px;margin:0 0 2px}h2{font-size:18px;margin:0 0 10px}
h3{font-size:13px;margin:14px 0 2px;color:var(--soft);font-weight:600}
p{margin:4px 0}.soft{color:var(--soft);font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:18px 0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:11px 14px}
.tiles b{display:block;font-size:21px;line-height:1.2}
.tiles span{display:block;font-size:13px}.tiles span:empty::before{content:"\\00a0"}
.tiles small{color:var(--soft);font-size:12px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(560px,100%),1fr));gap:16px}
section,details{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:16px 18px}details{margin-top:16px}summary{cursor:pointer;font-weight:600}
svg{display:block;width:100%;height:auto;overflow:visible}
svg .grid{stroke:var(--line);stroke-width:1}
svg .tick{fill:var(--soft);font-size:11px}svg .name{fill:var(--ink);font-size:12px}
svg .line{fill:none;stroke-width:1.9;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:12.5px;color:var(--soft);
margin:2px 0 6px}
i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-size:13px;margin-top:8px}
td,th{padding:3px 10px 3px 0;border-bottom:1px solid var(--line);text-align:left;font-weight:400}
th{color:var(--soft)}td:nth-child(2),td:nth-child(3){white-space:nowrap;
font-variant-numeric:tabular-nums}
"""
