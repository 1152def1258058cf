import ssl
from pathlib import Path

import pytest

from serve_app.protocol.errors import MalformedMessage, ProtocolError
from serve_app.testing.certificates import make_tls
from serve_app.testing.fleet import in_loop, settings, start_replica, until
from serve_app.testing.probe import Probe
from serve_app.tls import client_context, server_context


def test_without_certificates_there_is_no_tls() -> None:
    assert (server_context(None), client_context(None)) == (None, None)


@in_loop
async def test_both_sides_of_one_authority_have_an_encrypted_link(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=server_context(tls))
    probe = Probe()
    link = await probe.connect(replica.lease.port, tls=client_context(tls))
    assert link._transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    await until(lambda: probe.messages)
    await replica.close()


@in_loop
async def test_certificates_of_another_authority_are_refused(tmp_path: Path) -> None:
    ours, theirs = make_tls(tmp_path, "ours"), make_tls(tmp_path, "theirs")
    replica = await start_replica(settings(), "a", tls=server_context(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        await Probe().connect(replica.lease.port, tls=client_context(theirs))
    await replica.close()


@in_loop
async def test_a_peer_without_a_certificate_is_refused(tmp_path: Path) -> None:
    tls = make_tls(tmp_path, "fleet")
    replica = await start_replica(settings(), "a", tls=server_context(tls))
    anonymous = ssl.create_default_context(cafile=str(tls.ca_file))
    anonymous.check_hostname = False
    probe = Probe()
    with pytest.raises((OSError, MalformedMessage)):  # in TLS 1.3 the refusal comes after the client's handshake
        await probe.connect(replica.lease.port, tls=anonymous)
    assert probe.opened == 0
    await replica.close()


@in_loop
async def test_a_peer_that_speaks_no_tls_is_refused(tmp_path: Path) -> None:
    replica = await start_replica(settings(), "a", tls=server_context(make_tls(tmp_path, "fleet")))
    probe = Probe()
    with pytest.raises((OSError, ProtocolError)):
        await probe.connect(replica.lease.port)
    assert probe.opened == 0
    await replica.close()
