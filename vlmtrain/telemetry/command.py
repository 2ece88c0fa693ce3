"""The command line of `vlmtrain report`."""

from __future__ import annotations

from pathlib import Path

import tyro


def report(run: tyro.conf.Positional[Path]) -> int:
    """Write RUN/report.html: loss, throughput, waterfall, balance and memory of a run, one file
    that any browser shows. Works while the run goes on.

    Args:
        run: the --output folder of `vlmtrain train`.

    Raises:
        UserError: no run in that folder, or the file can't be written.
    """
    from vlmtrain.telemetry.report import write_report  # numpy, matplotlib: not for --help

    print(write_report(run))
    return 0


def main(arguments: list[str]) -> int:
    return tyro.cli(report, prog="vlmtrain report", args=arguments, use_underscores=True)
