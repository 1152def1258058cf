"""This module makes a certificate authority for one test."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from serve_app.config import TlsSettings


def make_tls(directory: Path, name: str) -> TlsSettings:
    """Return settings with a fresh authority and a certificate of it for 127.0.0.1, in ``directory / name``."""
    folder = directory / name
    folder.mkdir()
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate(f"{name} authority", f"{name} authority", key=authority_key, signed_by=authority_key, is_ca=True)
    leaf = _certificate(name, f"{name} authority", key=key, signed_by=authority_key, is_ca=False)
    (folder / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (folder / "cert.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return TlsSettings(cert_file=folder / "cert.pem", key_file=folder / "key.pem", ca_file=folder / "ca.pem")


def _certificate(
    subject: str,
    issuer: str,
    *,
    key: ec.EllipticCurvePrivateKey,
    signed_by: ec.EllipticCurvePrivateKey,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(signed_by, hashes.SHA256())
    )
