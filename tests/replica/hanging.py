"""`HangingExecutor` is a simulated executor whose steps do what a file says: ``deadlock``, or ``compute`` in silence for `COMPUTE_S`.

``deadlock PID`` is meant for one of several engines that read the same file.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from serve_app.simulated.executor import SimulatedExecutor

FILE = "HANGING_FILE"
"""The variable with the path of the file; without the file, steps are as simulated. ``compute`` happens once and removes the file."""
COMPUTE_S = 8.0


class HangingExecutor(SimulatedExecutor):
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        file = Path(os.environ[FILE])
        if file.exists() and file.read_text() in ("deadlock", f"deadlock {os.getpid()}"):
            threading.Event().wait()
        elif file.exists() and file.read_text() == "compute":
            file.unlink()
            until = time.monotonic() + COMPUTE_S
            while time.monotonic() < until:
                pass
        return super().execute_model(*args, **kwargs)
