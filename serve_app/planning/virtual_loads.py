"""`Load` is what a tenant of a `VirtualFleet` sends, and `Asked` is one of its requests as its client sees it."""

from dataclasses import dataclass, field

from serve_app.core.request import RequestState


@dataclass(eq=False)
class Load:
    """The load of one tenant: ``rate`` requests a second, or ``depth`` clients that each send one request after the other."""

    tenant: str
    """Its name in the figures."""
    rate: float = 0.0
    depth: int = 0
    weight: float = 1.0
    shared: int = 256
    """Tokens of the beginning of each prompt, a multiple of 256: one of four texts."""
    own: tuple[int, int] = (32, 96)
    """Least and most tokens of the prompt's own part."""
    answer: tuple[int, int] = (16, 48)
    account: str | None = None
    """The tenant that the fleet sees; None: ``tenant``. "" is a request without a key."""
    first_token_s: float | None = None
    """The tenant's limit for the first token; None for no limit."""

    @property
    def of_tenant(self) -> str:
        """Return whose requests these are at the fleet."""
        return self.tenant if self.account is None else self.account


@dataclass(eq=False)
class Asked:
    """One request at its client. A time is None until the event has happened."""

    load: Load
    at: float
    connection: int
    prompt: list[int]
    answer: int
    state: RequestState | None = None
    begun_at: float | None = None
    token_at: float = 0.0
    """When the latest token came."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens that came one after the other."""
    is_complete: bool = False
    refused_at: float | None = None
    retry_after_s: float = 0.0
    """Retry-After as the client got it, in seconds; ``said_s`` is the same without `jitter`."""
    said_s: float = 0.0
    late_at: float | None = None
    """When it was ended because it would begin too late."""

    @property
    def is_late(self) -> bool:
        """Return whether it was admitted, and its first token came too late or not at all."""
        within_s = self.load.first_token_s
        return self.late_at is not None or (
            within_s is not None and self.begun_at is not None and self.begun_at - self.at > within_s
        )
