"""`FleetSettings` holds the limits of one ingress for one model."""

from dataclasses import dataclass

from serve_app.core.pool_sizes import PoolSizes


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Limits of one ingress for one model. Times in seconds."""

    model: str
    max_waiting_requests: int = 1000
    no_replica_s: float = 30.0
    heartbeat_timeout_s: float = 5.0
    max_deaths: int = 4
    """A request ends with an error once this many engines died while they ran it, even if it had passed its trial before each death."""
    max_standstill_s: float = 60.0
    """A request that lost its replica is tried again until this long after the first loss without a new token."""
    quarantine_s: float = 600.0
    """How long requests are refused that are like a suspect at whose trial a replica was lost."""
    retry_after_s: float = 5.0
    """Retry-After for refused clients while there are replicas, or while no start of a replica has been measured."""
    engines_yield: bool = False
    """Whether engines give their steps to chats first (`ModelSettings.yields_to_chats`)."""
    engines_preempt: bool = False
    """Whether running requests pause for those to which they give way (`ingress/fleet/from_settings.py`)."""
    ttft_s: float = 2.0
    """A first token later than this after the request's arrival is counted as late."""
    apart: bool = False
    """Whether long prompts go where they slow few answers, and answers move with their KV (`Apart`)."""
    pools: PoolSizes | None = None
    """Bounds of the replicas that compute prompts, and of those that make answers (`Pools`); None: no replica has a role."""
    max_replicas: int = 1
    """With fewer replicas, more may be on their way: the p90 of their starts is added to `RequestArrived.max_wait_s`."""
