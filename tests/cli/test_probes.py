"""`serve-app doctor` looks at what a configuration names outside of this machine, and says so where it does not look."""

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serve_app.cli import probes
from serve_app.cli.findings import Finding
from serve_app.config import BatchSettings, TlsSettings, TracingSettings
from tests.doubles.certificates import make_tls


def shared(database: str = "postgresql://u@127.0.0.1:1/d", files: str = "s3://b/p") -> list[Finding]:
    return list(probes.shared_storage(BatchSettings(database=database, files=files)))


def test_certificates_that_both_sides_accept_are_ok(tmp_path: Path) -> None:
    assert probes.certificates(make_tls(tmp_path, "fleet")).state == "ok"


def with_end(cert_file: Path, key_file: Path, end: datetime.datetime) -> None:
    """Sign the certificate of an authority again, valid until ``end``."""
    old = x509.load_pem_x509_certificate(cert_file.read_bytes())
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder().subject_name(old.subject).issuer_name(old.subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(end - datetime.timedelta(days=1)).not_valid_after(end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    cert_file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def expired(tls: TlsSettings, _: Path) -> None:
    with_end(tls.cert_file, tls.key_file, datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1))
    tls.ca_file.write_bytes(tls.cert_file.read_bytes())


def of_another_authority(tls: TlsSettings, folder: Path) -> None:
    tls.ca_file.write_bytes(make_tls(folder, "other").ca_file.read_bytes())


def of_another_key(tls: TlsSettings, folder: Path) -> None:
    tls.key_file.write_bytes(make_tls(folder, "other").key_file.read_bytes())


def encrypted(tls: TlsSettings, _: Path) -> None:
    key = serialization.load_pem_private_key(tls.key_file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    way = serialization.BestAvailableEncryption(b"phrase")
    tls.key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, way))


def no_pem(tls: TlsSettings, _: Path) -> None:
    tls.cert_file.write_text("certificate")


def gone(tls: TlsSettings, _: Path) -> None:
    tls.ca_file.unlink()


@pytest.mark.parametrize(
    ("damage", "said", "remedy"),
    [
        (expired, "fleet/cert.pem is refused by the other side of a link: certificate has expired", "renew it, signed by"),
        (of_another_authority, "is refused by the other side of a link: ", "renew it, signed by the authority in "),
        (of_another_key, "fleet/key.pem is not the key of ", "give the key with which the certificate was made"),
        (encrypted, "fleet/key.pem is encrypted, and no ingress or replica has a passphrase", "decrypt it: openssl pkey "),
        (no_pem, "cannot be used: ", "each has to be in PEM form"),
        (gone, "cannot be read: No such file or directory", ""),
    ],
)
def test_certificates_that_no_side_would_accept_are_an_error(
    damage: Callable[[TlsSettings, Path], None], said: str, remedy: str, tmp_path: Path
) -> None:
    tls = make_tls(tmp_path, "fleet")
    damage(tls, tmp_path)
    found = probes.certificates(tls)
    assert (found.state, said in found.said, found.remedy.startswith(remedy)) == ("error", True, True), found


class Collector(BaseHTTPRequestHandler):
    """Takes spans of one account at /v1/traces; /login is a web page."""

    def do_POST(self) -> None:
        right = self.headers["content-type"] == "application/x-protobuf" and self.headers["authorization"] == "Basic abc="
        status, kind = {
            "/v1/traces": (200 if right else 401, "application/x-protobuf"),
            "/login": (200, "text/html; charset=utf-8"),
        }.get(self.path, (404, "application/json"))
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The collector's URL: with TLS by the certificates in tmp_path/fleet if the parameter says so."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    scheme = getattr(request, "param", "http")
    if scheme == "https":
        context, files = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), make_tls(tmp_path, "fleet")
        context.load_cert_chain(files.cert_file, files.key_file)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"{scheme}://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def probed(url: str) -> str:
    found = probes.collector(TracingSettings(endpoint=url))
    return found.state if found.state == "ok" else found.said.removeprefix(f"{url}: ")


@pytest.mark.parametrize(
    "variables",
    [
        {"HEADERS": "authorization=Basic%20abc%3D, tenant=t"},
        {"HEADERS": "Authorization=Basic abc="},
        {"TRACES_HEADERS": "authorization=Basic%20abc%3D", "HEADERS": "authorization=other"},
    ],
)
def test_a_collector_is_asked_with_the_headers_of_the_exporter(
    variables: dict[str, str], collector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probed(f"{collector}/v1/traces") == "it answers 401"
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    settings = TracingSettings(endpoint=f"{collector}/v1/traces")
    assert probes.collector(settings) == Finding("tracing", "ok", f"{collector}/v1/traces takes spans")
    assert probed(f"{collector}/v1/spans") == "it answers 404"


def test_a_web_page_takes_no_spans(collector: str) -> None:
    assert probed(f"{collector}/login") == "it answers with text/html, and a collector with application/x-protobuf"


@pytest.mark.parametrize("collector", ["https"], indirect=True)
@pytest.mark.parametrize("name", ["CERTIFICATE", "TRACES_CERTIFICATE"])
def test_a_collector_is_trusted_by_the_authority_of_the_exporter(
    name: str, collector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc%3D")
    url = f"{collector}/v1/traces"
    assert "certificate verify failed" in probed(url)
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(tmp_path / "fleet" / "ca.pem"))
    assert probed(url) == "ok"
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(tmp_path / "none.pem"))
    assert str(tmp_path / "none.pem") in probed(url)


def test_a_collector_that_is_away_is_a_warning() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = probes.collector(TracingSettings(endpoint=f"http://127.0.0.1:{free.getsockname()[1]}/v1/traces"))
    assert (found.state, found.said.endswith(": no answer: Connection refused")) == ("warning", True)
    assert "until then traces are dropped" in found.remedy


def test_a_database_that_is_away_is_a_warning_and_an_object_store_is_not_called_ok() -> None:
    database, files = shared()
    assert (database.name, database.state) == ("ingress.batch.database", "warning")
    assert "Connection refused" in database.said
    assert "batches are answered with 503" in database.remedy
    assert (files.state, files.said) == ("warning", "s3://b/p was not looked at")


def test_a_database_that_takes_connections_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connection:
        def close(self) -> None:
            pass

    asked: list[str] = []

    def connect(url: str, **_: object) -> Connection:
        asked.append(url)
        return Connection()

    monkeypatch.setattr(psycopg, "connect", connect)
    (database,) = shared(files="file:///mnt/batches")
    assert database == Finding("ingress.batch.database", "ok", "postgresql://u@127.0.0.1:1/d takes connections")
    assert asked == ["postgresql://u@127.0.0.1:1/d"]


def test_a_probe_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    never = threading.Event()
    monkeypatch.setattr(probes, "LIMIT_S", 0.05)
    monkeypatch.setattr(probes, "_problem_of_database", lambda _: str(never.wait(30)))
    monkeypatch.setattr(probes, "_problem_of_collector", lambda _: str(never.wait(30)))
    database, _ = shared()
    tracing = probes.collector(TracingSettings(endpoint="http://collector:4318/v1/traces"))
    assert [found.said.endswith("no answer within 0.05 s") for found in (database, tracing)] == [True, True]
    tls = make_tls(tmp_path, "fleet")
    monkeypatch.setattr(probes, "try_files", lambda _: never.wait(30))
    assert (found := probes.certificates(tls)).said == "the files are not read within 0.05 s", found
    never.set()
