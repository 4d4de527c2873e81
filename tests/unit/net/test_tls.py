"""Certificates that carry identities."""

from __future__ import annotations

import asyncio
import datetime
import socket
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.errors import BadSignatureError, PeerUnreachableError
from swarm.identity import KeyPair
from swarm.net.loop import loop_thread
from swarm.net.tls import IDENTITY_OID, PinnedCertificate, TlsIdentity, fetch_certificate


def der_of(tls: TlsIdentity) -> bytes:
    return x509.load_pem_x509_certificate(tls.certificate.pem).public_bytes(serialization.Encoding.DER)


def forged(extension: bytes | None) -> bytes:
    """A self-signed certificate with this identity extension."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
    )
    if extension is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(IDENTITY_OID, extension), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_certificate_carries_the_identity_and_has_a_fixed_validity() -> None:
    identity = KeyPair.generate()
    tls = TlsIdentity.generate(identity)
    checked = PinnedCertificate.check(der_of(tls))
    assert checked == tls.certificate
    assert checked.peer_id == identity.peer_id
    certificate = x509.load_pem_x509_certificate(checked.pem)
    assert certificate.not_valid_before_utc.year == 1970
    assert certificate.not_valid_after_utc.year == 9999


def test_identity_of_another_key_is_refused() -> None:
    stolen = x509.load_pem_x509_certificate(TlsIdentity.generate(KeyPair.generate()).certificate.pem)
    value = stolen.extensions.get_extension_for_oid(IDENTITY_OID).value
    assert isinstance(value, x509.UnrecognizedExtension)
    with pytest.raises(BadSignatureError):
        PinnedCertificate.check(forged(value.value))


@pytest.mark.parametrize("extension", [None, b"", b"x" * 96, b"x" * 5000], ids=["none", "empty", "noise", "long"])
def test_certificate_without_a_valid_identity_is_refused(extension: bytes | None) -> None:
    with pytest.raises(BadSignatureError):
        PinnedCertificate.check(forged(extension))


@pytest.mark.parametrize("garbage", [b"", b"\x30\x82", b"\xff" * 100_000], ids=["empty", "short", "large"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(BadSignatureError, match="no swarm identity"):
        PinnedCertificate.check(garbage)


def test_key_and_certificate_persist(tmp_path: Path) -> None:
    identity, path = KeyPair.generate(), tmp_path / "new folder" / "tls.pem"
    first = TlsIdentity.load_or_create(path, identity)
    assert TlsIdentity.load_or_create(path, identity) == first
    assert path.stat().st_mode & 0o077 == 0
    other = TlsIdentity.load_or_create(path, KeyPair.generate())  # a file of another identity is of no use
    assert other.certificate.peer_id != first.certificate.peer_id
    path.write_bytes(b"damaged")
    assert TlsIdentity.load_or_create(path, identity).certificate.peer_id == identity.peer_id


def test_fetching_from_something_else_than_a_peer_is_typed() -> None:
    async def fetch(port: int) -> None:
        await fetch_certificate("127.0.0.1", port, None)

    async def answers_in_plain_text() -> None:
        async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail server\r\n" * 10)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(shout, "127.0.0.1", 0)
        try:
            await fetch(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    with pytest.raises(PeerUnreachableError, match=r"TLS|reached"):
        loop_thread().run(answers_in_plain_text(), 10)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerUnreachableError, match="cannot be reached") as caught:
        loop_thread().run(fetch(port), 10)
    assert caught.value.fix
