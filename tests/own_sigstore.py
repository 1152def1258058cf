"""OwnSigstore is a Sigstore instance for tests: it signs files as a workflow would, without a network.

It holds three keys: that of a certificate authority (Fulcio), of a certificate log and of a signature log (Rekor). `trust_config` publishes
them in the form that `sigstore --trust-config` reads. Written after RFC 6962 (logs), the signed-note format of checkpoints and Sigstore's
bundle format 0.3; it shares no code with the client that verifies.
"""

import base64
import hashlib
import json
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Object = dict[str, Any]
ISSUER = "https://token.actions.githubusercontent.com"
_SIGNED_AT = datetime(2026, 11, 1, 12, tzinfo=UTC)
_OIDC_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS_OF_CERTIFICATE_LOGS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_ORIGIN = "log.example.com - 1"
_VALID = {"start": "2026-01-01T00:00:00Z"}
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True)
class OwnSigstore:
    authority: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    certificate_log: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    signature_log: ec.EllipticCurvePrivateKey = field(default_factory=_key)

    def trust_config(self) -> Object:
        """Return what a client must know to verify this instance's bundles."""
        chain = {"certificates": [{"rawBytes": _b64(self._root().public_bytes(Encoding.DER))}]}
        subject = {"organization": "test", "commonName": "test"}
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [_log("https://log.example.com", self.signature_log)],
                "ctlogs": [_log("https://certificates.example.com", self.certificate_log)],
                "certificateAuthorities": [{"subject": subject, "certChain": chain, "validFor": _VALID}],
            },
            "signingConfig": {"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"},
        }

    def bundle(self, content: bytes, identity: str, *, issuer: str = ISSUER) -> Object:
        """Return the bundle that says: `identity`, as whom `issuer` knows it, signed `content` at _SIGNED_AT."""
        key = _key()
        certificate = self._certificate(key.public_key(), identity, issuer)
        signature = _sign(key, content)
        digest = hashlib.sha256(content)
        body = {
            "apiVersion": "0.0.1",
            "kind": "hashedrekord",
            "spec": {
                "data": {"hash": {"algorithm": "sha256", "value": digest.hexdigest()}},
                "signature": {
                    "content": _b64(signature),
                    "publicKey": {"content": _b64(certificate.public_bytes(Encoding.PEM))},
                },
            },
        }
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": _b64(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [self._log_entry(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())],
            },
            "messageSignature": {
                "messageDigest": {"algorithm": "SHA2_256", "digest": _b64(digest.digest())},
                "signature": _b64(signature),
            },
        }

    def _root(self) -> x509.Certificate:
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        public = self.authority.public_key()
        return (
            _certificate_of(public, _AUTHORITY, timedelta(days=3650))
            .serial_number(1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def _certificate(self, public: ec.EllipticCurvePublicKey, identity: str, issuer: str) -> x509.Certificate:
        """Return a certificate of ten minutes, with the timestamp of the certificate log in it."""
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        to_log = (
            _certificate_of(public, x509.Name([]), timedelta(minutes=10))
            .serial_number(2)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_OIDC_ISSUER, issuer.encode()), critical=False)
        )
        logged = to_log.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        at = int(_SIGNED_AT.timestamp() * 1000)
        entry = _digest(_der(self.authority.public_key())) + len(logged).to_bytes(3) + logged
        signature = _sign(self.certificate_log, struct.pack("!BBQH", 0, 0, at, 1) + entry + bytes(2))
        # Version 1, the log, the time, no extensions; the algorithms are SHA-256 (4) and ECDSA (3).
        stamp = (
            bytes(1) + _digest(_der(self.certificate_log.public_key())) + struct.pack("!QHBB", at, 0, 4, 3) + _sized(signature)
        )
        stamps = _sized(_sized(stamp))
        in_der = b"\x04" + (bytes([len(stamps)]) if len(stamps) < 128 else b"\x81" + bytes([len(stamps)])) + stamps
        extension = x509.UnrecognizedExtension(_TIMESTAMPS_OF_CERTIFICATE_LOGS, in_der)
        return to_log.add_extension(extension, critical=False).sign(self.authority, hashes.SHA256())

    def _log_entry(self, body: bytes) -> Object:
        """Return the second entry of a log of two, with the promise and the proof that it is there."""
        at, log_id = int(_SIGNED_AT.timestamp()), _digest(_der(self.signature_log.public_key()))
        promised = {"body": _b64(body), "integratedTime": at, "logID": log_id.hex(), "logIndex": 1}
        first = _digest(b"\0another entry")
        root = _digest(b"\1" + first + _digest(b"\0" + body))
        note = f"{_ORIGIN}\n2\n{_b64(root)}\n"
        signature = log_id[:4] + _sign(self.signature_log, note.encode())
        return {
            "logIndex": "1",
            "logId": {"keyId": _b64(log_id)},
            "kindVersion": {"kind": "hashedrekord", "version": "0.0.1"},
            "integratedTime": str(at),
            "inclusionPromise": {
                "signedEntryTimestamp": _b64(
                    _sign(self.signature_log, json.dumps(promised, sort_keys=True, separators=(",", ":")).encode())
                )
            },
            "inclusionProof": {
                "logIndex": "1",
                "rootHash": _b64(root),
                "treeSize": "2",
                "hashes": [_b64(first)],
                "checkpoint": {"envelope": f"{note}\n\N{EM DASH} {_ORIGIN.split()[0]} {_b64(signature)}\n"},
            },
            "canonicalizedBody": _b64(body),
        }


def _certificate_of(public: ec.EllipticCurvePublicKey, subject: x509.Name, valid_for: timedelta) -> x509.CertificateBuilder:
    start = _SIGNED_AT - valid_for / 2
    return x509.CertificateBuilder(_AUTHORITY, subject, public, None, start, start + valid_for)


def _log(url: str, key: ec.EllipticCurvePrivateKey) -> Object:
    public = _der(key.public_key())
    described = {"rawBytes": _b64(public), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": _VALID}
    return {"baseUrl": url, "hashAlgorithm": "SHA2_256", "publicKey": described, "logId": {"keyId": _b64(_digest(public))}}


def _sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    return key.sign(content, ec.ECDSA(hashes.SHA256()))


def _der(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _sized(content: bytes) -> bytes:
    return len(content).to_bytes(2) + content


def _b64(content: bytes) -> str:
    return base64.b64encode(content).decode()
