"""One rank that runs several vlmtrain commands in one process: python commands.py COMMANDS.json

The file holds a list of [port, [argument, ...]]; each command joins the others' ranks on a port of
its own. It saves the start-up of many short runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from vlmtrain import cli

if __name__ == "__main__":
    for port, arguments in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        start = time.perf_counter()
        code = cli.main(arguments)
        print(f"{time.perf_counter() - start:.1f} s: {' '.join(arguments)}", flush=True)
        if code:
            sys.exit(code)
