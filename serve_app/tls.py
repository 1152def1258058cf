"""TLS contexts of the links: both sides present a certificate of the deployment's own authority and check the other's."""

import ssl

from serve_app.config import TlsSettings


def server_context(settings: TlsSettings | None) -> ssl.SSLContext | None:
    """Return the replica's context; None without certificates."""
    return None if settings is None else _context(settings, ssl.PROTOCOL_TLS_SERVER)


def client_context(settings: TlsSettings | None) -> ssl.SSLContext | None:
    """Return the ingress's context. Host names are not checked: pods come and go, the authority is what is trusted."""
    return None if settings is None else _context(settings, ssl.PROTOCOL_TLS_CLIENT)


def _context(settings: TlsSettings, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(settings.ca_file)
    context.load_cert_chain(settings.cert_file, settings.key_file)
    return context
