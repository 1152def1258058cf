"""These sections set up the links between ingress and replicas, and the leases by which they find each other."""

from collections.abc import Iterator
from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serve_app.config.base import AbsolutePath, Int, Real, Section
from serve_app.config.checks import is_loopback, refuse, refuse_port_of_ray, wrong

MAX_INGRESSES = 1024


class TlsSettings(Section):
    """TLS of the links between ingress and replicas, and of the cords between a replica's nodes, verified on both sides; what vLLM itself
    exchanges between nodes (pickled messages, tensors) is neither encrypted nor authenticated. Changed files take effect with the next
    link."""

    cert_file: AbsolutePath
    """Certificate chain (PEM) that both sides present."""
    key_file: AbsolutePath
    """Private key (PEM) of the certificate."""
    ca_file: AbsolutePath
    """Certificate authority (PEM) that signed the peers' certificates."""


class ProtocolSettings(Section):
    """The links between ingress and replicas: who may connect, how much may wait, when a link counts as lost."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which a replica listens. 0.0.0.0 on a cluster, or :: with IPv6; both need cluster_token_file. The Helm
    chart sets 0.0.0.0: its cluster needs IPv4, or IPv4 and IPv6 (dual-stack)."""
    port: Int = Field(default=0, ge=0, le=65535)
    """Port on which a replica listens, so that firewalls can name it; a fixed port needs one replica per node. 0: any free port."""
    cluster_token_file: AbsolutePath | None = None
    """File with the secret that both sides prove to know, 16 bytes or more. None: loopback only."""
    max_frame_bytes: Int = Field(default=64 << 20, ge=1 << 20)
    """Largest frame; a longer frame closes the link before it is read. Large requests are multimodal or very long."""
    heartbeat_interval_s: Real = Field(default=1.0, gt=0)
    """Seconds between two heartbeats of a replica."""
    heartbeat_timeout_s: Real = Field(default=5.0, gt=0)
    """Seconds of a replica's silence after which an ingress takes its link for lost. Must exceed 2 x heartbeat_interval_s."""
    ingress_timeout_s: Real = Field(default=60.0, gt=0)
    """Seconds of an ingress's silence after which a replica ends its link and its attempts. Much longer than
    heartbeat_timeout_s: an ingress whose process stood still continues its streams, and no other ingress could take them over."""
    handshake_timeout_s: Real = Field(default=5.0, gt=0)
    """Seconds that a peer may take from connecting to an open link."""
    max_ingresses: Int = Field(default=64, ge=1, le=MAX_INGRESSES)
    """Most links that a replica accepts, one for each ingress. At least 2 x ingress.replicas.max: during an update old and new ingresses
    run at once. Connections without the token do not count."""
    credit: Int = Field(default=2048, ge=1)
    """Most unfinished attempts of one ingress on one replica."""
    send_buffer_bytes: Int = Field(default=64 << 20, ge=1 << 20)
    """Bytes that may wait on a link for its peer to read. While more wait, an ingress sends no new request there.
    If their number has not shrunk in heartbeat_timeout_s, or more wait for 12 times as long, the link is closed. At least
    max_frame_bytes."""
    tls: TlsSettings | None = None
    """TLS of the links. Default: no encryption."""

    @field_validator("port")
    @classmethod
    def _refuse_ports_of_others(cls, port: int) -> int:
        if 0 < port < 1024:
            raise wrong("", f"is {port}, which only root may open", "choose another, for example 8020")
        return refuse_port_of_ray(port, way_out="choose another, for example 8020")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[PydanticCustomError]:
        interval_s, timeout_s = self.heartbeat_interval_s, self.heartbeat_timeout_s
        if timeout_s <= 2 * interval_s:
            problem = f"is {timeout_s} and heartbeat_interval_s is {interval_s}: one late heartbeat would cut the link"
            yield wrong("heartbeat_timeout_s", problem, f"set it above {2 * interval_s}")
        if self.send_buffer_bytes < self.max_frame_bytes:
            problem = f"is {self.send_buffer_bytes} and max_frame_bytes is {self.max_frame_bytes}"
            yield wrong("send_buffer_bytes", problem, f"set it to {self.max_frame_bytes} or more")
        if self.cluster_token_file is None and not is_loopback(self.host):
            problem = f"is {self.host!r} and cluster_token_file is not set: anyone who reaches the port could send work"
            yield wrong("host", problem, "set cluster_token_file, or host: 127.0.0.1")


class MembershipSettings(Section):
    """The leases by which ingresses find replicas."""

    renew_s: Real = Field(default=2.0, gt=0)
    """Seconds between two renewals of a replica's lease."""
    expiry_s: Real = Field(default=6.0, gt=0)
    """Seconds after the last renewal at which a lease ends. Must exceed 2 x renew_s."""

    @model_validator(mode="after")
    def _survives_one_late_renewal(self) -> Self:
        if self.expiry_s <= 2 * self.renew_s:
            problem = f"is {self.expiry_s} and renew_s is {self.renew_s}: one late renewal would end the lease"
            raise wrong("expiry_s", problem, f"set it above {2 * self.renew_s}")
        return self
