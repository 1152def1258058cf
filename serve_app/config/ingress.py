"""`IngressSettings` is the HTTP side of the configuration."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from serve_app.config.base import AbsolutePath, Int, Real, Section
from serve_app.config.batch_urls import checked_database, checked_files, read_database_url
from serve_app.config.checks import checked_origin, checked_resources, refuse, refuse_port_of_ray, wrong
from serve_app.config.oidc import OidcSettings
from serve_app.config.scaling import Bounds


class IngressScalingSettings(Bounds):
    """The number of ingress replicas, and the autoscaler's target."""

    min: Int = Field(default=1, ge=1)
    """Replicas that always run. At least 1: without an ingress, nothing listens."""
    target_streams: Int = Field(default=400, ge=1)
    """Open streams per ingress replica that the autoscaler aims at."""


class LedgerSettings(Section):
    """A JSON line for each request at its outcome, without any of its text. `serve-app ledger verify` reads the ledger."""

    dir: AbsolutePath
    """Folder on the ingress's node; each ingress process writes files of its own there. The folder is made if it is missing."""
    max_bytes: Int = Field(default=1 << 30, ge=1 << 20)
    """Most bytes of all files in the folder. The oldest files are removed, also those of ingresses that have ended. A line has about
    400 bytes."""
    file_bytes: Int = Field(default=64 << 20, ge=1 << 16)
    """Size at which an ingress begins a new file. max_bytes should hold two or more files of each ingress on the node."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_bytes < 2 * self.file_bytes:
            problem = f"is {self.file_bytes} and max_bytes is {self.max_bytes}: a new file would remove all earlier lines"
            refuse([wrong("file_bytes", problem, f"set it to {self.max_bytes // 2} or less, or raise max_bytes")])
        return self


class BatchSettings(Section):
    """OpenAI's Files and Batches API on the ingress. Its storage is the folder `dir`, for one ingress replica; or a database (`database`
    or `database_file`) and `files`, which several ingress replicas share."""

    dir: AbsolutePath | None = None
    """Folder on the ingress's node for files, answers and the database. It is made if it is missing, and must outlive the ingress."""
    database: Annotated[str, AfterValidator(checked_database)] | None = None
    """URL of a PostgreSQL database of its own, without a password: `postgresql://USER@HOST/DATABASE`. Each ingress takes the password
    from its environment, as libpq does (`PGPASSWORD`, `PGPASSFILE`)."""
    database_file: AbsolutePath | None = None
    """File on the ingress's node with the database's URL, which may have a password. Use it in place of `database`."""
    files: Annotated[str, AfterValidator(checked_files)] | None = None
    """URL under which files are kept: `s3://BUCKET/PREFIX?region=REGION`, `gs://BUCKET/PREFIX`, or `file:///FOLDER` on a volume that all
    ingresses mount. The prefix or folder belongs to this database alone: files there that the database does not know are removed.
    Credentials come from the environment, never from the URL."""
    lease_s: Real = Field(default=30.0, ge=5, le=3600)
    """With shared storage: seconds after which another ingress takes over the batches of an ingress that has died or lost the database."""
    max_file_bytes: Int = Field(default=200 << 20, ge=1)
    """Largest file that may be uploaded; a larger file is answered with 413. It replaces max_body_bytes for uploads."""
    max_stored_bytes: Int = Field(default=20 << 30, ge=1)
    """Most bytes of all files together, including answers; an upload beyond it is answered with 507."""
    max_lines: Int = Field(default=50_000, ge=1, le=1_000_000)
    """Most lines of one batch's input."""
    max_open_batches: Int = Field(default=100, ge=1)
    """Most batches of one tenant that have not ended; one more is answered with 429."""
    concurrency: Int = Field(default=32, ge=1, le=4096)
    """Most requests at once of one batch. An ingress runs one batch of each tenant at once, of 16 tenants at most. Keep the requests of all
    batches well below an engine's max_num_seqs, so that chats find a place."""
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
        """Return the URL of the shared database. It may have a password and must not be shown.

        Raises:
            ConfigError: The file of the URL cannot be read, or does not hold such a URL.
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
    """Port to listen on; ingress replicas on one host share it by SO_REUSEPORT. An ingress of another application does not start on it."""
    replicas: IngressScalingSettings = IngressScalingSettings()
    """The number of ingress replicas."""
    num_cpus: Real = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for one ingress replica."""
    resources: Annotated[dict[str, Real], AfterValidator(checked_resources)] = Field(default_factory=dict)
    """Custom Ray resources of one ingress replica, which bind it to nodes that offer them, with one replica on a node."""
    api_keys_file: AbsolutePath | None = None
    """File with the clients' keys, one a line, plain or `sha256:<hex>`; read again when it changes. Each key is a tenant of its own
    with weight 1 and no quotas. Without it and tenants_file, clients need no key."""
    tenants_file: AbsolutePath | None = None
    """File with tenants, their keys' digests, rights and limits, in place of api_keys_file; read again when it changes: docs/tenants.md."""
    oidc: OidcSettings | None = None
    """Tokens that identify callers beside the keys of tenants_file, which it needs. None: keys alone."""
    shared_prefix_cache: bool = Field(default=False, strict=True)
    """Whether tenants share cached prompt prefixes. By default each has its own, so that none can learn another's prompts from response
    times; a system prompt that all send is then cached once for each tenant."""
    cors_origins: tuple[Annotated[str, AfterValidator(checked_origin)], ...] = ()
    """Origins whose pages may call the API from a browser, such as `https://app.example.com`; `*` for all. Empty: none."""
    key_latencies: Int = Field(default=0, ge=0, le=1000)
    """Number of keys for which `/metrics` has latencies, about 30 values for each key and model; further keys share the name `others`."""
    ledger: LedgerSettings | None = None
    """Where each request is recorded. None: nowhere."""
    receipts: bool = Field(default=False, strict=True)
    """Whether the answer to a request with the header `X-Serve-App-Receipt: 1` lists its phases and replicas: docs/receipts.md."""
    sagemaker_routes: bool = Field(default=False, strict=True)
    """Whether the routes of Amazon SageMaker, `/ping` and `/invocations`, exist: docs/migration.md."""
    shortcuts: bool = Field(default=True, strict=True)
    """Whether common requests take shortcuts past parts of vLLM's front end. Without them, answers are the same, only slower."""
    generate_delimiter: Literal["newline", "nul"] = "newline"
    """The delimiter behind each value of a stream of `/generate`. nul: for clients of vLLM's first server, which split at the byte 0."""
    batch: BatchSettings | None = None
    """OpenAI's Files and Batches API: its storage and limits. None: the routes do not exist."""
    max_body_bytes: Int = Field(default=10 << 20, ge=1)
    """Largest accepted request body; a larger body is answered with 413. Also the longest line of a batch's input. While they are read,
    bodies above 256 KiB share 32 MiB of an ingress, or one body's worth; the others wait. One for which others wait gets 10 s."""
    max_waiting_requests: Int = Field(default=1000, ge=0)
    """Most requests per model and ingress that wait for a place at a replica; if one more comes, the last in order gets 503."""
    max_loop_lag_s: Real = Field(default=2.0, ge=0.05, le=60)
    """Seconds by which the event loop of an ingress may be late, twice in a row, before new requests are answered with 503. Streams
    continue."""
    keep_alive_s: Real = Field(default=65.0, gt=0)
    """Seconds that a connection without a request stays open, rounded up to whole seconds. 65 exceeds the 60 s of many load balancers."""
    stalled_client_s: Real = Field(default=60.0, ge=1, le=86400)
    """Seconds for which a client may read nothing of its answer before its connection is dropped."""
    quarantine_s: Real = Field(default=600.0, gt=0, le=86400)
    """Seconds for which requests like a suspect are refused with 422. A request is a suspect if it seems to end engines: two replicas
    were lost while they worked on it, and the second replica worked on no other suspect."""
    unready_s: Real = Field(default=1.0, ge=0, le=120)
    """Seconds for which a stopping ingress still accepts requests while /readyz answers 503, so that load balancers turn away first."""

    @property
    def keys_file(self) -> Path | None:
        """The file of tenants or of API keys; None if clients need no key."""
        return self.tenants_file or self.api_keys_file

    @property
    def needs_keys(self) -> bool:
        """Whether clients need an API key."""
        return self.keys_file is not None

    @property
    def counts_gpu_time(self) -> bool:
        """Whether the GPU-seconds of requests are recorded, for which replicas measure their engines' steps."""
        return self.ledger is not None or self.needs_keys

    @property
    def local_url(self) -> str:
        """The URL by which this machine reaches the ingress. If the ingress listens on all addresses, this is the loopback address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @field_validator("port")
    @classmethod
    def _refuse_ports_of_ray(cls, port: int) -> int:
        return refuse_port_of_ray(port, way_out="choose another, for example 8010")

    @model_validator(mode="after")
    def _keys_come_from_one_file(self) -> Self:
        if self.api_keys_file is not None and self.tenants_file is not None:
            problem = f"is {str(self.tenants_file)!r}, and api_keys_file is {str(self.api_keys_file)!r}: keys come from one file"
            refuse([wrong("tenants_file", problem, "give each key of api_keys_file a tenant, and remove api_keys_file")])
        if self.oidc is not None and self.tenants_file is None:
            problem = "is there without tenants_file: a token has to name a tenant"
            refuse([wrong("oidc", problem, "set ingress.tenants_file, in which a tenant need not have keys")])
        if self.needs_keys:
            return self
        hint = "set ingress.tenants_file or ingress.api_keys_file"
        if self.key_latencies:
            refuse([wrong("key_latencies", f"is {self.key_latencies}, and no request has a key", f"{hint}, or 0")])
        if self.shared_prefix_cache:
            refuse(
                [wrong("shared_prefix_cache", "is true, and no request has a key: all share already", f"{hint}, or remove it")]
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
