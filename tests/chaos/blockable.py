"""This module lets a test block the event loop of a running replica by SIGUSR2, like a call that does not return.

`path` is a folder for PYTHONPATH. Python imports the module ``sitecustomize`` in it when a process starts, which sets the handler in the
main thread. Serve runs the replica's loop in another thread, so the signal reaches a process whose loop is blocked, too.
"""

from pathlib import Path

_SOURCE = """
import signal

def block(*_):
    import asyncio, time
    for task in list(asyncio.tasks._all_tasks):
        if task.get_name() == "heartbeats":
            task.get_loop().call_soon_threadsafe(time.sleep, 3600)

signal.signal(signal.SIGUSR2, block)
"""


def path(folder: Path) -> str:
    """Write the module and return the folder."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SOURCE)
    return str(folder)
