"""This script, run in a model pod, prints the process ids of the engine cores, and stops them first if its argument is `stop`."""

import os
import signal
import sys
from pathlib import Path

ENGINE = b"serve_app.replica.engine"

for folder in Path("/proc").glob("[0-9]*"):
    if ENGINE in (folder / "cmdline").read_bytes().split(b"\0"):
        if sys.argv[1:] == ["stop"]:
            os.kill(int(folder.name), signal.SIGSTOP)
        print(folder.name)
