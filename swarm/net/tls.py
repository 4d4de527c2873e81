"""TLS pinned to identities: a certificate that carries the peer's Ed25519 identity, and how a dialer checks it.

gRPC's TLS stack refuses Ed25519 certificates, so every peer has a second, persistent key (ECDSA P-256) with a
self-signed certificate. An extension holds the identity's public key and its signature over the TLS key. The validity
is fixed (1970 to 9999): peers do not need to agree on the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarm.errors import BadSignatureError, PeerUnreachableError
from swarm.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, KeyPair, PeerId, verify, write_private

IDENTITY_OID = x509.ObjectIdentifier("2.25.221530746352290104561870438573066430317")
_DOMAIN = "tls-key"
_NOT_BEFORE = datetime.datetime(1970, 1, 1)  # certificates hold naive UTC
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59)
_MAX_CERTIFICATE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class PinnedCertificate:
    """A certificate whose identity has been checked."""

    pem: bytes
    peer_id: PeerId
    sha256: bytes

    @classmethod
    def check(cls, der: bytes) -> PinnedCertificate:
        """Read a certificate and check that the identity it carries has signed its key. Raises `BadSignatureError`."""
        try:
            certificate = x509.load_der_x509_certificate(der[:_MAX_CERTIFICATE_BYTES])
            public_key, signature = _carried_identity(certificate)
            verify(public_key, _DOMAIN, _key_bytes(certificate.public_key()), signature)
            return cls(
                certificate.public_bytes(serialization.Encoding.PEM),
                PeerId.of(public_key),
                hashlib.sha256(der).digest(),
            )
        except (ValueError, TypeError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
            raise BadSignatureError(
                f"The certificate carries no swarm identity: {error}.",
                fix="Check the address: something other than a swarm peer may listen there.",
            ) from error


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Our TLS key and certificate, as a gRPC server takes them."""

    key_pem: bytes
    certificate: PinnedCertificate

    @classmethod
    def generate(cls, identity: KeyPair) -> TlsIdentity:
        """A new key with a certificate for `identity`."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity.peer_id))])
        statement = identity.public_key + identity.sign(_DOMAIN, _key_bytes(key.public_key()))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(str(identity.peer_id))]), critical=False)
            .add_extension(x509.UnrecognizedExtension(IDENTITY_OID, statement), critical=False)
            .sign(key, hashes.SHA256())
        )
        key_pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return cls(key_pem, PinnedCertificate.check(certificate.public_bytes(serialization.Encoding.DER)))

    @classmethod
    def load_or_create(cls, path: Path, identity: KeyPair) -> TlsIdentity:
        """Read key and certificate from a file, or write new ones when there are none that fit the identity.

        The certificate is kept with its key, because others have pinned it.
        """
        with contextlib.suppress(OSError, ValueError, TypeError, BadSignatureError):
            pem = path.read_bytes()
            key = serialization.load_pem_private_key(pem, password=None)
            certificate = x509.load_pem_x509_certificate(pem)
            pinned = PinnedCertificate.check(certificate.public_bytes(serialization.Encoding.DER))
            same_key = _key_bytes(key.public_key()) == _key_bytes(certificate.public_key())
            if pinned.peer_id == identity.peer_id and same_key:
                return cls(pem[: pem.index(b"-----BEGIN CERTIFICATE-----")], pinned)
        made = cls.generate(identity)
        write_private(path, made.key_pem + made.certificate.pem)
        return made


def _carried_identity(certificate: x509.Certificate) -> tuple[bytes, bytes]:
    value = certificate.extensions.get_extension_for_oid(IDENTITY_OID).value
    statement = value.value if isinstance(value, x509.UnrecognizedExtension) else b""
    if len(statement) != PUBLIC_KEY_BYTES + SIGNATURE_BYTES:
        raise ValueError("the extension has another length")
    return statement[:PUBLIC_KEY_BYTES], statement[PUBLIC_KEY_BYTES:]


def _key_bytes(public_key: object) -> bytes:
    if not isinstance(public_key, ec.EllipticCurvePublicKey):
        raise TypeError("the TLS key is of another kind than ECDSA")
    return public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@lru_cache(maxsize=1)
def _fetching_context() -> ssl.SSLContext:
    # Authenticity comes from the identity inside the certificate, checked afterwards; no CA is involved.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def fetch_certificate(host: str, port: int, expect: PeerId | None) -> PinnedCertificate:
    """Ask whoever listens at an address for its certificate, by a TLS handshake.

    Raises:
        PeerUnreachableError: Nobody answers, or not with TLS.
        BadSignatureError: The certificate carries no valid identity.
    """
    where = f"{host}:{port}"
    try:
        _, writer = await asyncio.open_connection(
            host, port, ssl=_fetching_context(), server_hostname=str(expect) if expect else "swarm"
        )
    except ssl.SSLError as error:
        raise PeerUnreachableError(
            f"{where} does not speak TLS as a swarm peer does ({error.reason}).", fix="Check the port number."
        ) from error
    except (OSError, ValueError) as error:
        raise PeerUnreachableError(
            f"{where} cannot be reached: {error}.", fix="Check the address, that the peer runs, and firewalls."
        ) from error
    try:
        tls = writer.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    if not der:
        raise PeerUnreachableError(f"{where} shows no certificate.", fix="Check the port number.")
    return PinnedCertificate.check(der)
