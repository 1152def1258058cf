"""The errors room holds the whole error tree: each class says whose fault the error is, and what an HTTP client is sent.

Each theme has its module in this package; links between ingress and replica have `links/protocol/errors.py`. This table shows every code
and status, so that no code is used twice. Import from the package, not from a theme: `from serve_app.errors import QueueFull`.

    ServingError                 500  serving_error
      ConfigError                500  config_error            the operator's file; never sent over HTTP
        FileUnreadable           500  file_unreadable         the same file, where the system does not let it be read
      BadRequest                 400  bad_request             the client's request
      NotSupported               400  not_supported
      InvalidApiKey              401  invalid_api_key
      InvalidToken               401  invalid_token           a token of OIDC that is expired, forged, or for another server
      NoTenant                   403  no_tenant               a valid token that does not name one tenant
      MissingScope               403  missing_scope           the API key or token has no right to the route
      ModelNotFound              404  model_not_found         not served, or not to this tenant
      NotStored                  404  not_stored              a file or a batch that is not there, or another tenant's
      RequestQuarantined         422  request_quarantined     a request like it seems to end engines
      RequestTooLarge            413  request_too_large
      BodyTooSlow                408  body_too_slow
      NoReplica                  503  no_replica              there is no capacity now; carries Retry-After
      QuotaExceeded              429  rate_limit_exceeded     a tenant's requests or tokens a minute or day, or requests at once
      TooManyBatches             429  too_many_batches
      TooManyUploads             429  too_many_uploads
      StorageFailed              500  storage_failed          of files and batches
        StorageAway              503  storage_away            the shared database or object store does not answer now
        StorageFull              507  storage_full
      QueueFull                  503  queue_full
      CannotStartInTime          503  cannot_start_in_time    the first token comes too late for its tenant or model
      DeadlinePassed             504  deadline_passed         the answer took longer than the tenant's total_s
      NoFreePlace                503  no_free_place           a batch's request, which only gets places that no other request wants
      TooManyConnections         503  too_many_connections    an ingress has nearly no file descriptors left
      GrammarsBusy               503  grammars_busy           a grammar was not compiled in time, because the ingress is busy
      IngressOverloaded          503  ingress_overloaded      the event loop of an ingress is far behind
      IssuerAway                 503  issuer_away             the issuer's keys are not known yet, so that no token can be checked
      LeaseBoardSilent           503  lease_board_silent      the fleet's members are unknown now; requests for models do not need them
      ServerStopping             503  server_stopping         an ingress ends; another ingress, now or soon, takes the request
      ReplicaLost                502  replica_lost            a replica failed while it held the request
      ResumeDiverged             502  resume_diverged
      SendFailed                 500  send_failed             our own fault while a request was sent to a replica
      EngineStartFailed          500  engine_start_failed     never over HTTP: the replica does not come up
      FrontEndStartFailed        500  front_end_start_failed  never over HTTP: the ingress does not come up
      EngineLost                 500  engine_lost             never over HTTP: a replica ends its links, and its requests resume elsewhere
        EngineDied               500  engine_dead
          EngineOutOfMemory      500  engine_out_of_memory    the kernel killed it
        EngineHung               500  engine_hung             its supervisor killed it
          EngineStopped          500  engine_stopped
          EngineSilent           500  engine_silent
          StepTooLong            500  step_too_long
      ListenFailed               500  listen_failed           never over HTTP: an ingress or a replica does not come up
      CheckpointError            500  checkpoint_error        never over HTTP: a model's files
      DecisionLogError           500  decision_log_error      never over HTTP: a log of the autoscaler
      BatchError                 500  batch_error             never over HTTP: a batch cannot begin or continue
        KeyRefused               500  key_refused             no API key can be read, or the service refuses the key
        JournalBroken            500  journal_broken          the file of the batch's answers is damaged, or not a journal
        LeaseLost                500  lease_lost              another ingress has taken the batch over
        ServiceAway              500  service_away            the service has answered nothing for too long
      ClusterFailed              500  cluster_failed          never over HTTP: a command failed on a Ray cluster
        ClusterSilent            500  cluster_silent          Ray has not answered yet
        ModelFailed              500  model_failed            Serve has given up starting a model's replicas
      ProtocolError              502  protocol_error          a link between ingress and replica: links/protocol/errors.py
        FrameTooLarge            502  frame_too_large
        MalformedMessage         502  malformed_message
        UnexpectedMessage        502  unexpected_message
        VersionMismatch          502  version_mismatch
        WrongModel               502  wrong_model
        FingerprintMismatch      502  fingerprint_mismatch
        AuthenticationFailed     502  authentication_failed
        DuplicateAttempt         502  duplicate_attempt
        CreditExceeded           502  credit_exceeded
        HandshakeTimeout         502  handshake_timeout
        SlotsExhausted           502  slots_exhausted
        PeerClosed               502  peer_closed             the peer closed the link by a Goodbye

`code` goes over the wire in a Goodbye and, where vLLM has no such error, into the `type` of an HTTP error body
(`ingress/http/error_answers.py`): never rename one. Errors keep their fields when pickled, because Ray carries them between processes.
"""

from serve_app.errors.base import ServingError
from serve_app.errors.batch import BatchError, JournalBroken, KeyRefused, LeaseLost, ServiceAway
from serve_app.errors.clients import (
    BadRequest,
    BodyTooSlow,
    InvalidApiKey,
    InvalidToken,
    MissingScope,
    ModelNotFound,
    NoTenant,
    NotStored,
    NotSupported,
    RequestQuarantined,
    RequestTooLarge,
)
from serve_app.errors.cluster import ClusterFailed, ClusterSilent, DecisionLogError, ModelFailed
from serve_app.errors.configuration import ConfigError, FileUnreadable, ListenFailed
from serve_app.errors.engines import (
    EngineDied,
    EngineHung,
    EngineLost,
    EngineOutOfMemory,
    EngineSilent,
    EngineStopped,
    StepTooLong,
)
from serve_app.errors.limits import (
    CannotStartInTime,
    DeadlinePassed,
    GrammarsBusy,
    IngressOverloaded,
    IssuerAway,
    LeaseBoardSilent,
    NoFreePlace,
    NoReplica,
    QueueFull,
    QuotaExceeded,
    ServerStopping,
    TooManyBatches,
    TooManyConnections,
    TooManyUploads,
)
from serve_app.errors.models import CheckpointError, EngineStartFailed, FrontEndStartFailed
from serve_app.errors.replicas import ReplicaLost, ResumeDiverged, SendFailed
from serve_app.errors.storage import StorageAway, StorageFailed, StorageFull

__all__ = [
    "BadRequest",
    "BatchError",
    "BodyTooSlow",
    "CannotStartInTime",
    "CheckpointError",
    "ClusterFailed",
    "ClusterSilent",
    "ConfigError",
    "DeadlinePassed",
    "DecisionLogError",
    "EngineDied",
    "EngineHung",
    "EngineLost",
    "EngineOutOfMemory",
    "EngineSilent",
    "EngineStartFailed",
    "EngineStopped",
    "FileUnreadable",
    "FrontEndStartFailed",
    "GrammarsBusy",
    "IngressOverloaded",
    "InvalidApiKey",
    "InvalidToken",
    "IssuerAway",
    "JournalBroken",
    "KeyRefused",
    "LeaseBoardSilent",
    "LeaseLost",
    "ListenFailed",
    "MissingScope",
    "ModelFailed",
    "ModelNotFound",
    "NoFreePlace",
    "NoReplica",
    "NoTenant",
    "NotStored",
    "NotSupported",
    "QueueFull",
    "QuotaExceeded",
    "ReplicaLost",
    "RequestQuarantined",
    "RequestTooLarge",
    "ResumeDiverged",
    "SendFailed",
    "ServerStopping",
    "ServiceAway",
    "ServingError",
    "StepTooLong",
    "StorageAway",
    "StorageFailed",
    "StorageFull",
    "TooManyBatches",
    "TooManyConnections",
    "TooManyUploads",
]
