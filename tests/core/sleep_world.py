"""`SleepWorld` runs the pure state machines of sleeping replicas in virtual time, with the GPUs that they share and requests for them."""

import math
from dataclasses import dataclass, field

from serve_app.core.places import Applicant, Places
from serve_app.core.sleep import Asked, Ended, EngineChanged, Event, Instruction, Looked, Ordered, Phase, Sleep

EXPIRY_S = 6.0
TURN_S = 0.05
"""A replica looks at its attempts this often, and an answer of the board takes no longer."""
ASK_EVERY_S = 1.0
DRAIN_S = 30.0


@dataclass
class Engine:
    """One model's only replica, its engine's times, and its requests."""

    name: str
    applicant: Applicant
    sleep: Sleep
    start_s: float
    sleep_s: float
    wake_s: float
    waiting: list[float] = field(default_factory=list)
    """When each request that waits at the ingress came."""
    running: list[float] = field(default_factory=list)
    """When each attempt will end."""
    in_flight: list[float] = field(default_factory=list)
    """When each attempt arrives that its ingress sent before it heard of a drain."""
    draining: bool = True
    changes_at: float = math.inf
    """When the engine will have done what it was told last."""
    asked_at: float = -math.inf
    is_gone: bool = False


class SleepWorld:
    """Engines by name. `turn` advances time by `TURN_S`."""

    def __init__(self, *, after_s: float) -> None:
        self.now = 0.0
        self.after_s = after_s
        self.places = Places(EXPIRY_S, now=-EXPIRY_S)
        self.engines: dict[str, Engine] = {}
        self.served: list[tuple[float, str, float]] = []
        """When each request's attempt began, at which engine, and how long the request had waited."""
        self.phases: list[tuple[float, str, Phase]] = []
        """When each engine entered which phase."""
        self.num_starts = 0

    @property
    def ttfts_s(self) -> list[float]:
        return [ttft_s for _, _, ttft_s in self.served]

    def add(
        self, name: str, gpu: str, *, start_s: float = 5.0, sleep_s: float = 0.5, wake_s: float = 0.5, priority: int = 0
    ) -> Engine:
        gpus = (gpu,) if gpu else ()
        sleep = Sleep(self.after_s, drain_s=DRAIN_S, expiry_s=EXPIRY_S, now=self.now)
        applicant = Applicant(name, gpus, priority)
        engine = Engine(name, applicant, sleep, start_s, sleep_s, wake_s)
        self.engines[name] = engine
        return engine

    def remove(self, name: str) -> None:
        """Kill the replica: its claim ends when the board no longer hears of it, and its requests wait for another replica."""
        engine = self.engines.pop(name)
        engine.is_gone = True

    def ask(self, name: str) -> None:
        self.engines[name].waiting.append(self.now)

    def turn(self, *, lasting_s: float = 20.0) -> None:
        """Let `TURN_S` pass. ``lasting_s``: how long an attempt that starts now runs."""
        self.now += TURN_S
        for engine in self.engines.values():
            self._serve(engine, lasting_s)
            self._step(engine)
        self.validate()

    def pass_quiet(self, until: float) -> None:
        """Let time pass up to ``until`` while nothing happens, in steps within which each replica renews its claim."""
        engines = list(self.engines.values())
        while not any(
            e.waiting or e.in_flight or e.running or e.changes_at < math.inf or e.sleep.phase not in _QUIET for e in engines
        ):
            if until - self.now <= EXPIRY_S / 2:
                return
            self.now += EXPIRY_S / 2
            for engine in engines:
                self._step(engine)

    def _serve(self, engine: Engine, lasting_s: float) -> None:
        engine.running = [end for end in engine.running if end > self.now]
        if engine.sleep.phase not in (Phase.STARTING, Phase.ENDING):
            engine.running += [self.now + lasting_s for arrives_at in engine.in_flight if arrives_at <= self.now]
        engine.in_flight = [arrives_at for arrives_at in engine.in_flight if arrives_at > self.now]
        if not engine.draining:
            self.served += [(self.now, engine.name, self.now - came) for came in engine.waiting]
            engine.running += [self.now + lasting_s] * len(engine.waiting)
            engine.waiting.clear()
        elif engine.waiting and self.now - engine.asked_at >= ASK_EVERY_S and engine.sleep.phase is not Phase.STARTING:
            engine.asked_at = self.now
            self.tell(engine, Asked())

    def _step(self, engine: Engine) -> None:
        if engine.changes_at <= self.now:
            engine.changes_at = math.inf
            was_starting = engine.sleep.phase is Phase.STARTING
            self.tell(engine, EngineChanged())
            if was_starting:
                engine.draining = False
        self.tell(engine, Looked(len(engine.running)))
        self.places.report(engine.applicant, engine.sleep.claim(self.now), now=self.now)
        self.tell(engine, Ordered(self.places.order(engine.name, now=self.now)))
        if engine.sleep.phase is Phase.STARTING and engine.sleep.claim(self.now).holds and engine.changes_at == math.inf:
            engine.changes_at = self.now + engine.start_s
            self.num_starts += 1

    def tell(self, engine: Engine, event: Event) -> None:
        before = engine.sleep.phase
        self._obey(engine, event)
        if engine.sleep.phase is not before:
            self.phases.append((self.now, engine.name, engine.sleep.phase))

    def _obey(self, engine: Engine, event: Event) -> None:
        for instruction in engine.sleep.handle(event, now=self.now):
            match instruction:
                case Instruction.START_DRAIN:
                    engine.draining = True
                case Instruction.END_DRAIN:
                    engine.draining = False
                case Instruction.LET_GO:
                    engine.waiting += [self.now] * len(engine.running)
                    engine.running.clear()
                case Instruction.PUT_TO_SLEEP:
                    assert not engine.running, "an engine falls asleep under a request"
                    engine.changes_at = self.now + engine.sleep_s
                case Instruction.WAKE_UP:
                    engine.changes_at = self.now + engine.wake_s

    def end(self, name: str) -> None:
        """Begin the replica's last drain."""
        engine = self.engines[name]
        engine.draining = True
        self.tell(engine, Ended())

    def on_gpu(self, gpu: str) -> list[str]:
        """Return the engines whose weights are on the GPU, or are moving there or away."""
        return [
            e.name
            for e in self.engines.values()
            if gpu in e.applicant.gpus
            and (e.sleep.phase in _ON_GPU or (e.sleep.phase is Phase.STARTING and e.changes_at < math.inf))
        ]

    def validate(self) -> None:
        self.places.validate()
        for engine in self.engines.values():
            engine.sleep.validate()
            if engine.sleep.phase in (Phase.FALLING_ASLEEP, Phase.ASLEEP, Phase.WAKING):
                assert engine.draining
            if engine.sleep.phase in (Phase.FALLING_ASLEEP, Phase.ASLEEP):
                assert not engine.running, "nothing limits the wait of an attempt at an engine that sleeps"
        for gpu in {gpu for e in self.engines.values() for gpu in e.applicant.gpus}:
            assert len(self.on_gpu(gpu)) <= 1, f"{self.on_gpu(gpu)} are on GPU {gpu} together"


_QUIET = (Phase.AWAKE, Phase.ASLEEP)
_ON_GPU = (Phase.AWAKE, Phase.DRAINING, Phase.FALLING_ASLEEP, Phase.WAKING)
