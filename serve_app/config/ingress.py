"""`IngressSettings` is the HTTP side of the configuration."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from serve_app.config.base import AbsolutePath, Int, Real, Section
from serve_app.config.batch_urls import checked_database, checked_files, read_database_url
from serve_app.config.checks import checked_resources, refuse, refuse_port_of_ray, wrong
from serve_app.config.model import Bounds


class IngressScalingSettings(Bounds):
    """How many ingress replicas there are, and what the autoscaler aims at."""

    min: Int = Field(default=1, ge=1)
    """Replicas that are always there. At least 1: without one nothing listens."""
    target_streams: Int = Field(default=400, ge=1)
    """Open streams per ingress replica that the autoscaler aims at."""


class LedgerSettings(Section):
    """A line per request at its one outcome, as JSON, without a word of its text. `serve-app ledger verify` reads it."""

    dir: AbsolutePath
    """Folder on the ingress's node; each ingress process writes files of its own there. It is made when it is missing."""
    max_bytes: Int = Field(default=1 << 30, ge=1 << 20)
    """What all files in the folder may hold together; the oldest are removed, of ingresses that have ended too. A line has some 400."""
    file_bytes: Int = Field(default=64 << 20, ge=1 << 16)
    """Size at which an ingress begins a new file; max_bytes holds two or more for each ingress of a node."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_bytes < 2 * self.file_bytes:
            problem = (
                f"is {self.file_bytes} and max_bytes is {self.max_bytes}: with a new file, all that was written would be removed"
            )
            refuse([wrong("file_bytes", problem, f"set it to {self.max_bytes // 2} or less, or raise max_bytes")])
        return self


class BatchSettings(Section):
    """OpenAI's Files and Batches API on the ingress. Its storage is a folder, `dir`, for one ingress replica; or `database` or
    `database_file`, and `files`, which several ingress replicas share."""

    dir: AbsolutePath | None = None
    """Folder on the ingress's node for files, answers and the database. It is made when it is missing, and must outlive the ingress."""
    database: Annotated[str, AfterValidator(checked_database)] | None = None
    """URL of a PostgreSQL database of its own, without a password: `postgresql://USER@HOST/DATABASE`. Each ingress takes the password
    from its environment, as libpq does (`PGPASSWORD`, `PGPASSFILE`)."""
    database_file: AbsolutePath | None = None
    """File on the ingress's node with that URL, which may have a password. In place of `database`."""
    files: Annotated[str, AfterValidator(checked_files)] | None = None
    """URL under which files are kept: `s3://BUCKET/PREFIX?region=REGION`, `gs://BUCKET/PREFIX`, or `file:///FOLDER` on a volume that all
    ingresses mount. The prefix or folder belongs to this one database: files there that the database does not know are removed.
    Credentials are those of the environment, and never part of the URL."""
    lease_s: Real = Field(default=30.0, ge=5, le=3600)
    """Seconds after which another ingress takes over the batches of one that has died or has lost the database. Of shared storage."""
    max_file_bytes: Int = Field(default=200 << 20, ge=1)
    """Largest file that may be uploaded; a larger one is answered with 413. Stands in for max_body_bytes there."""
    max_stored_bytes: Int = Field(default=20 << 30, ge=1)
    """What all files together, answers included, may hold; an upload beyond it is answered with 507."""
    max_lines: Int = Field(default=50_000, ge=1, le=1_000_000)
    """Lines of one batch's input."""
    max_open_batches: Int = Field(default=100, ge=1)
    """Batches of one API key that have not ended; one more is answered with 429."""
    concurrency: Int = Field(default=32, ge=1, le=4096)
    """Most requests at once of all batches together. Keep it well below an engine's max_num_seqs, so that chats find a place."""
    max_window_s: Real = Field(default=7 * 86400.0, ge=1, le=3660 * 86400.0)
    """Longest `completion_window` that a batch may ask for, in seconds."""
    keep_s: Real = Field(default=30 * 86400.0, ge=3600, le=3660 * 86400.0)
    """Seconds for which files are kept after their upload, and batches after their end. A request may ask for less."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_stored_bytes < self.max_file_bytes:
            problem = f"is {self.max_stored_bytes} and max_file_bytes is {self.max_file_bytes}: the largest file would never fit"
            refuse([wrong("max_stored_bytes", problem, f"set it to {self.max_file_bytes} or more, or lower max_file_bytes")])
        return self

    @model_validator(mode="after")
    def _has_one_storage(self) -> Self:
        given = {name for name in ("dir", "database", "database_file", "files") if getattr(self, name) is not None}
        if given not in ({"dir"}, {"database", "files"}, {"database_file", "files"}):
            problem = f"names {', '.join(sorted(given)) or 'no storage'}"
            refuse([wrong("", problem, "give dir for one ingress; or files and one of database and database_file for several")])
        return self

    def database_url(self) -> str:
        """Return the URL of the shared database. It may have a password: show it to nobody.

        Raises:
            ConfigError: The file of the URL cannot be read, or has no such URL in it.
        """
        if self.database is not None:
            return self.database
        assert self.database_file is not None
        return read_database_url(self.database_file)


class IngressSettings(Section):
    """The HTTP side: vLLM's OpenAI front end on a listener of its own."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. 0.0.0.0 lets other hosts in."""
    port: Int = Field(default=8010, ge=1024, le=65535)
    """Port to listen on; replicas on one host share it by SO_REUSEPORT. An ingress of another application on it does not start."""
    replicas: IngressScalingSettings = IngressScalingSettings()
    """How many ingress replicas there are."""
    num_cpus: Real = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for one ingress replica."""
    resources: Annotated[dict[str, Real], AfterValidator(checked_resources)] = Field(default_factory=dict)
    """Custom Ray resources of one ingress replica, which bind it to nodes that offer them, then one to a node."""
    api_keys_file: AbsolutePath | None = None
    """File with the keys of clients, one a line, plain or `sha256:<hex>`; read again when it changes. None: no key is asked for."""
    key_latencies: Int = Field(default=0, ge=0, le=1000)
    """For how many keys `/metrics` has latencies by key, some 30 values for each key and model; further keys share the name `others`."""
    ledger: LedgerSettings | None = None
    """Where each request is accounted for. None: nowhere."""
    receipts: bool = Field(default=False, strict=True)
    """Whether a request with the header `X-Serve-App-Receipt: 1` is told its phases and replicas: docs/receipts.md."""
    sagemaker_routes: bool = Field(default=False, strict=True)
    """Whether `/ping` and `/invocations` exist, as Amazon SageMaker calls them: docs/migration.md."""
    shortcuts: bool = Field(default=True, strict=True)
    """Whether common requests take shortcuts past parts of vLLM's front end. Without them, answers are the same, only slower."""
    generate_delimiter: Literal["newline", "nul"] = "newline"
    """What is behind each value of a stream of `/generate`. nul: for clients of vLLM's first server, which split at the byte 0."""
    batch: BatchSettings | None = None
    """Where files and batches are kept, of OpenAI's Batch API. None: there are no such routes."""
    max_body_bytes: Int = Field(default=10 << 20, ge=1)
    """Largest accepted request body; a larger one is answered with 413. Also the longest line of a batch's input."""
    max_waiting_requests: Int = Field(default=1000, ge=0)
    """Requests per model and ingress that may wait for a replica; one more is answered with 503."""
    max_loop_lag_s: Real = Field(default=2.0, ge=0.05, le=60)
    """Seconds by which the event loop of an ingress may be late, twice in a row, before it answers new requests with 503. Streams go on.
    Set it below protocol.heartbeat_timeout_s: a loop that is later than that has lost the links to all its replicas already."""
    keep_alive_s: Real = Field(default=65.0, gt=0)
    """Seconds a connection without a request stays open, rounded up to whole ones. 65 exceeds the 60 s of many load balancers."""
    stalled_client_s: Real = Field(default=60.0, ge=1, le=86400)
    """Seconds for which a client may take nothing of the answer that is being sent to it; then its connection is dropped."""
    quarantine_s: Real = Field(default=600.0, gt=0, le=86400)
    """Seconds for which requests are refused with 422 that are like one which seems to end engines: two replicas were lost while they
    worked on it, the second time on no other suspect."""
    unready_s: Real = Field(default=1.0, ge=0, le=120)
    """Seconds a stopping ingress still accepts while /readyz says 503, so that load balancers turn away first."""

    @property
    def local_url(self) -> str:
        """The URL by which this machine reaches the ingress; an address for everybody is reached by loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @field_validator("port")
    @classmethod
    def _refuse_ports_of_ray(cls, port: int) -> int:
        return refuse_port_of_ray(port, way_out="choose another, for example 8010")

    @model_validator(mode="after")
    def _latencies_by_key_need_keys(self) -> Self:
        if self.key_latencies and self.api_keys_file is None:
            refuse(
                [wrong("key_latencies", f"is {self.key_latencies}, and no request has a key", "set ingress.api_keys_file, or 0")]
            )
        return self

    @model_validator(mode="after")
    def _a_folder_of_batches_has_one_ingress(self) -> Self:
        if self.batch is not None and self.batch.dir is not None and self.replicas.max > 1:
            problem = (
                f"is {str(self.batch.dir)!r}, and replicas.max is {self.replicas.max}: each ingress would know only its own files"
            )
            hint = "set batch.database and batch.files, which ingresses share, in place of batch.dir, or set replicas.max: 1"
            refuse([wrong("batch.dir", problem, hint)])
        return self
