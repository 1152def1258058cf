"""``python -m benchmarks.static_batching FILE --port P`` runs the static server on a Ray cluster of its own, until Ctrl-C.

After SIGHUP it reads FILE again, and prints a line when Serve has applied it. A refused file changes nothing.
"""

import argparse
import logging
import signal
import sys
from pathlib import Path
from queue import SimpleQueue

from benchmarks.static_batching.settings import load_static
from serve_app.cli.cluster import local_cluster
from serve_app.config import parse_settings
from serve_app.errors import ServingError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.static_batching", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, default=8020)
    arguments = parser.parse_args()
    try:
        settings = load_static(arguments.file)
        cluster = parse_settings({"name": "static-batching", "models": {settings.name: {"model": settings.model}}})
        with local_cluster(cluster):
            _serve(arguments.file, arguments.port)
    except ServingError as exc:
        sys.exit(f"error: {exc}")


def _serve(file: Path, port: int) -> None:
    from ray import serve  # imported here: Ray reads its token on import

    from benchmarks.static_batching.deployment import build

    signals: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # after Ray, which installs its own handlers
        signal.signal(number, lambda number, _: signals.put(number))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(load_static(file).model_dump(mode="json")), name="static", route_prefix="/")
    while True:
        print(f"serving at http://127.0.0.1:{port}", flush=True)
        if signals.get() != signal.SIGHUP:
            break
        try:
            serve.run(build(load_static(file).model_dump(mode="json")), name="static", route_prefix="/")
        except ServingError as exc:
            print(f"error: {exc}; nothing is changed", file=sys.stderr, flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
