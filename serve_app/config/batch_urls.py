"""This module checks the URLs of shared batch storage, and reports problems without the URL's password."""

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

from serve_app.config.checks import refuse, wrong
from serve_app.errors import ConfigError

_DATABASES = ("postgresql", "postgres")
_PLACES = ("s3", "gs", "file")
_SECRETS = ("password", "secret", "access_key", "token", "signature")
_DATABASE_HINT = "write postgresql://USER@HOST:5432/DATABASE"
_FILES_HINT = "write s3://BUCKET/PREFIX?region=REGION, gs://BUCKET/PREFIX or file:///FOLDER"
_MASK = "***"
_OPTIONS = {
    "s3": (
        *("region", "scheme", "endpoint_override", "allow_bucket_creation", "allow_delayed_open", "smart_defaults"),
        *("tls_ca_file_path", "tls_verify_certificates"),
    ),
    "gs": ("scheme", "endpoint_override", "project_id", "retry_limit_seconds"),
    "file": (),
}
"""Scheme -> options that pyarrow's client takes in the query of a URL, without credentials."""


def masked(url: str) -> str:
    """Return the text with everything masked that may be a password, whether or not the text is a URL."""
    url = re.sub(r"(?s)((?:://|^)[^:@/]*:)(?!//).*@", rf"\1{_MASK}@", url)
    return re.sub(rf"(?i)\b([a-z_]*(?:{'|'.join(_SECRETS)})[a-z_]*)\s*=\s*('[^']*'|[^&\s]*)", rf"\1={_MASK}", url)


def checked_database(url: str) -> str:
    """Return the URL; refuse a password in it, because Ray shows an application's configuration to all users of its dashboard."""
    if problem := _database_problem(url):
        refuse([wrong("", f"is {masked(url)!r}, {problem}", _DATABASE_HINT)])
    if masked(url) != url or urlsplit(url).password is not None:
        hint = "set PGPASSWORD in the environment of the ingress, or write the URL into a file and name it in database_file"
        refuse([wrong("", f"is {masked(url)!r}, with a password, which Ray's dashboard would show", hint)])
    return url


def checked_files(url: str) -> str:
    """Return the URL of the place for files; refuse other places, credentials and unknown options."""
    parts = _split(url)
    if parts is None or parts.scheme not in _PLACES or not (_is_folder(parts) if parts.scheme == "file" else parts.netloc):
        refuse([wrong("", f"is {masked(url)!r}, not a place that ingresses can share", _FILES_HINT)])
    elif "@" in parts.netloc or masked(url) != url:
        hint = "give the ingress an identity, such as IRSA on EKS, or the variables of the environment that its client reads"
        refuse([wrong("", f"is {masked(url)!r}, with a credential, which Ray's dashboard would show", hint)])
    elif unknown := sorted(dict(parse_qsl(parts.query, keep_blank_values=True)).keys() - set(_OPTIONS[parts.scheme])):
        known = ", ".join(_OPTIONS[parts.scheme]) or "none"
        refuse([wrong("", f"is {url!r}, with the unknown option {unknown[0]!r}", f"known for {parts.scheme}: {known}")])
    elif parts.scheme != "file" and not parts.path.strip("/"):
        problem = f"is {url!r}, a whole bucket, in which files that the database does not know would be removed"
        refuse(
            [wrong("", problem, f"add a prefix that only this database uses, such as {parts.scheme}://{parts.netloc}/batches")]
        )
    return url


def read_database_url(path: Path) -> str:
    """Return the URL in the file, which may have a password.

    Raises:
        ConfigError: The file cannot be read, or does not hold such a URL.
    """
    key = "ingress.batch.database_file"
    try:
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        problem = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(key, f"{path} cannot be read: {problem}", "mount the Secret with the URL there") from exc
    if problem := _database_problem(url):
        raise ConfigError(key, f"{path} holds {masked(url)!r}, {problem}", _DATABASE_HINT)
    return url


def _database_problem(url: str) -> str:
    parts = _split(url)
    if parts is None or parts.scheme not in _DATABASES:
        return "not a URL of PostgreSQL"
    if re.search(
        r"%(?![0-9A-Fa-f]{2})|%00", url
    ):  # libpq would refuse such a URL, too, and show the part around the %, such as the password
        return "which has a % that is not followed by two hex digits, or %00; write %25 for a %"
    if not parts.path.strip("/") and "dbname" not in dict(parse_qsl(parts.query)):
        return "which names no database"
    return ""


def _split(url: str) -> SplitResult | None:
    """Return the parts of the URL, None if its host or port is invalid."""
    try:
        parts = urlsplit(url)
        return parts if parts.port is None or parts.port > 0 else None
    except ValueError:
        return None


def _is_folder(parts: SplitResult) -> bool:
    """Return whether a `file` URL names a folder of its own. `file://batches/a` names the host `batches`, and `file:///` the whole disk."""
    return not parts.netloc and bool(parts.path.strip("/"))
