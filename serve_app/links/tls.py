"""`LinkTls` makes the TLS contexts of links: both sides present a certificate of the deployment's own authority and check the other's."""

import logging
import ssl

from serve_app.config import TlsSettings
from serve_app.errors import ConfigError

logger = logging.getLogger(__name__)


class LinkTls:
    """One side's certificate, key and authority. They are read again when one of the three files changes.

    Raises:
        OSError: A file cannot be read, or has other content (ssl.SSLError).
    """

    def __init__(self, settings: TlsSettings, protocol: int) -> None:
        self._settings = settings
        self._protocol = protocol
        self._seen = self._stamp()
        self._reported: list[tuple[int, int, int] | None] | None = None
        """The stamps of the files when it was last reported that they could not be used."""
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection; open connections keep theirs.

        Files that cannot be used are reported once, and the certificate read before stays in use: a renewal may be half written.
        """
        if (stamp := self._stamp()) != self._seen:
            try:
                self._context = self._read()
            except OSError as exc:
                # The next call tries again: the cause may end without a change of the files, as a lack of descriptors does.
                if stamp != self._reported:
                    self._reported = stamp
                    logger.error(
                        "protocol.tls: %s cannot be used: %s; the certificate read before stays in use", self._files(), exc
                    )
            else:
                self._seen = stamp
                logger.info("protocol.tls: %s have changed; the next link uses them", self._files())
        return self._context

    def _read(self) -> ssl.SSLContext:
        # A new context each time: a context in use could only get a further authority.
        context = ssl.SSLContext(self._protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._settings.ca_file)
        # With a password, if an empty one, OpenSSL does not ask the terminal for an encrypted key's.
        context.load_cert_chain(self._settings.cert_file, self._settings.key_file, password="")
        return context

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        stamps: list[tuple[int, int, int] | None] = []
        for path in (self._settings.cert_file, self._settings.key_file, self._settings.ca_file):
            try:
                status = path.stat()  # follows symbolic links: Kubernetes updates a mounted Secret by changing one
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return stamps

    def _files(self) -> str:
        return f"{self._settings.cert_file}, {self._settings.key_file} and {self._settings.ca_file}"


def replica_tls(settings: TlsSettings | None) -> LinkTls | None:
    """Return the TLS of the side that listens, a replica; None without certificates."""
    return None if settings is None else LinkTls(settings, ssl.PROTOCOL_TLS_SERVER)


def ingress_tls(settings: TlsSettings | None) -> LinkTls | None:
    """Return the TLS of the side that connects: an ingress, or a shard (replica/group.py); None without certificates.

    Host names are not checked: pods come and go, and only the authority is trusted.
    """
    return None if settings is None else LinkTls(settings, ssl.PROTOCOL_TLS_CLIENT)


def try_files(settings: TlsSettings) -> None:
    """Let the two sides of a link shake hands in memory, each with these files.

    Raises:
        ConfigError: The files cannot be used, or a side refuses the other's certificate.
    """
    cert = settings.cert_file
    files = f"{cert}, {settings.key_file} and {settings.ca_file}"
    try:
        client, server = (LinkTls(settings, kind).context() for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as exc:
        problem = f"{cert} is refused by the other side of a link: {exc.verify_message}"
        raise ConfigError("protocol.tls.cert_file", problem, f"renew it, signed by the authority in {settings.ca_file}") from exc
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            problem = f"{settings.key_file} is not the key of {cert}"
            raise ConfigError("protocol.tls.key_file", problem, "give the key with which the certificate was made") from exc
        if b"ENCRYPTED" in settings.key_file.read_bytes():
            problem = f"{settings.key_file} is encrypted, and no ingress or replica has a passphrase"
            raise ConfigError("protocol.tls.key_file", problem, "decrypt it: openssl pkey -in KEY -out NEW_KEY") from exc
        problem = f"{files} cannot be used: {exc.reason or exc}"
        raise ConfigError("protocol.tls", problem, "each has to be in PEM form: -----BEGIN ...") from exc
    except OSError as exc:
        raise ConfigError("protocol.tls", f"one of {files} cannot be read: {exc.strerror}") from exc


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
