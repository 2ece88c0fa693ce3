"""A plugin of pytest: a line for each test that starts or ends, into the file GPU_CHECK_EVENTS."""

from __future__ import annotations

import json
import os
from typing import Any


def write(**event: Any) -> None:
    with open(os.environ["GPU_CHECK_EVENTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    write(test=nodeid, outcome="started", detail="")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr
        if isinstance(reason, tuple):  # a skip: file, line, reason
            reason = reason[2]
        said = getattr(getattr(report.longrepr, "reprcrash", None), "message", reason)
        write(test=report.nodeid, outcome=report.outcome, detail=str(said or "").split("\n")[0])
