"""This benchmark measures what tenants notice of each other, and of too much load: with fairness, and first come first served as before.

    python -m benchmarks.fairness [--parts noisy ...] [--sides fcfs fair] [--ingresses 1] [--seed 1] [--short] [--out results/fairness]
    python -m benchmarks.fairness --read results/fairness     only writes fairness.md, overload.md and the figures again

A run starts one fleet (`benchmarks/tenant_fleet.py`) and plays each part on each side. ``make bench-fairness`` plays all parts:

    noisy     five tenants at half of their share, alone and then beside a sixth that sends ten times its share
    nearly    the same at 0.9 of their share, where each waits for its own earlier requests even if the sixth took no more than its share
    equal     four equal tenants, two with short prompts and long answers, two with long prompts and short answers, want all they can get
    weights   three tenants of weights 1, 2 and 4 want all that they can get
    reference, overload, burst, storm, patient, behind    `benchmarks/overload.py`

Each phase is kept as a file with all its requests, and the tables are made from these files alone. A phase is invalid if the machine or the
generator was too busy (`benchmarks/fairness_figures.py`).
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import overload
from benchmarks.fairness_figures import WEIGHTS, problems
from benchmarks.fairness_report import write_reports
from benchmarks.processes import fleet
from benchmarks.tenant_fleet import PLACES, REPLICAS, SIDES, config_of, read_ledger, served
from benchmarks.tenant_loads import Load, Phase, Player, Shape

CHAT = Shape(shared=256, kinds=4, own=(32, 96), answer=(16, 48))
WRITER, READER = Shape(own=(16, 48), answer=(96, 160)), Shape(own=(768, 1280), answer=(4, 12))
CAPACITY = 26.0
"""Requests of the shape `CHAT` that the replicas of a side answer in a second: the part `capacity` measures it."""
VICTIMS, EXCESS = 5, 10.0
"""Tenants within their share, and the noisy tenant's demand as a multiple of its share."""
FAIR_SHARE = CAPACITY / (VICTIMS + 1)
PHASES = "phases"
WRITERS, READERS = ("writer-1", "writer-2"), ("reader-1", "reader-2")
DEPTH = 3 * REPLICAS * PLACES // 2
"""Requests that a tenant that wants all keeps open, queued ones included. A weight of 4 of 7 has 18 of the 32 places."""
CACHED_S = 15.0
"""Until then, the engines compute shared prompts that no cache has yet."""
SETTLED_S = 30.0
"""Until then the costs of requests are not known yet, and all clients of a tenant began together."""
_NEVER_REFUSED = {"deadlines": {"first_token_s": 120}}
TENANTS: Mapping[str, Mapping[str, Any]] = {
    **{f"victim-{number}": {} for number in range(1, VICTIMS + 1)},
    "noisy": {},
    **dict.fromkeys((*WRITERS, *READERS), _NEVER_REFUSED),
    **{name: {**_NEVER_REFUSED, "weight": weight} for name, weight in WEIGHTS.items()},
    **overload.TENANTS,
}


def capacity(player: Player, short: bool) -> Iterator[Phase]:
    loads = [Load(f"victim-{number}", CHAT, depth=DEPTH // VICTIMS) for number in range(1, VICTIMS + 1)]
    yield player.play("capacity", "closed loop", loads, 15 if short else 40, warmup_s=8)


def noisy(part: str, used: float, player: Player, short: bool) -> Iterator[Phase]:
    """Play the victims alone and beside the noisy tenant; they send ``used`` of their share."""
    victims = [Load(f"victim-{number}", CHAT, rate=used * FAIR_SHARE) for number in range(1, VICTIMS + 1)]
    seconds = 20 if short else 45
    yield player.play(part, "alone", victims, seconds, warmup_s=CACHED_S)
    yield player.play(part, "beside", [*victims, Load("noisy", CHAT, rate=EXCESS * FAIR_SHARE)], seconds, warmup_s=10)


def equal(player: Player, short: bool) -> Iterator[Phase]:
    loads = [
        Load(name, shape, depth=REPLICAS * PLACES) for names, shape in ((WRITERS, WRITER), (READERS, READER)) for name in names
    ]
    yield player.play("equal", "all", loads, 30 if short else 75, warmup_s=SETTLED_S)


def weights(player: Player, short: bool) -> Iterator[Phase]:
    loads = [Load(name, CHAT, depth=DEPTH) for name in WEIGHTS]
    yield player.play("weights", "all", loads, 30 if short else 75, warmup_s=SETTLED_S)


PARTS: Mapping[str, Callable[[Player, bool], Iterator[Phase]]] = {
    "capacity": capacity,
    "noisy": partial(noisy, "noisy", 0.5),
    "nearly": partial(noisy, "nearly", 0.9),
    "equal": equal,
    "weights": weights,
    **overload.parts(CHAT, CAPACITY),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="phases of a third or a quarter of the time")
    parser.add_argument("--port", type=int, default=8096)
    parser.add_argument("--out", type=Path, default=Path("results/fairness"), help="folder of the phases and of the reports")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="only write the reports of this folder's phases again")
    arguments = parser.parse_args()
    if arguments.read is None:
        (arguments.out / PHASES).mkdir(parents=True, exist_ok=True)
        measure(arguments)
    folder: Path = arguments.read or arguments.out
    print(
        write_reports(
            folder, [msgspec.json.decode(path.read_bytes(), type=Phase) for path in sorted((folder / PHASES).glob("*.json"))]
        )
    )


def measure(arguments: argparse.Namespace) -> None:
    """Play the parts on a fleet of their own; write each phase when it is over."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(folder, arguments.port, sides=arguments.sides, ingresses=arguments.ingresses, tenants=TENANTS)
        with fleet(config, folder) as (url, root):
            time.sleep(5)  # until the start's last work is done
            for part in arguments.parts:
                for side in arguments.sides:
                    player = Player(url, root, side, ingresses=arguments.ingresses, seed=arguments.seed)
                    for phase in PARTS[part](player, arguments.short):
                        _keep(phase, folder / "ledger", arguments.out)


def _keep(phase: Phase, ledger: Path, out: Path) -> None:
    time.sleep(2)  # until the requests that were cut have ended, and have their lines
    begin, end = phase.epoch_unix_s + phase.warmup_s, phase.epoch_unix_s + phase.until_s
    phase.served = served(read_ledger(ledger), phase.side, begin, end)
    name = f"{phase.part}-{phase.name.replace(' ', '-')}-{phase.side}-{phase.ingresses}-{phase.seed}.json"
    (out / PHASES / name).write_bytes(msgspec.json.encode(phase))
    print(name, f"{len(phase.sent)} requests", *problems(phase), sep=", ", flush=True)


if __name__ == "__main__":
    main()
