"""Hello: the mutual handshake that yields a session, as two state machines without I/O.

Both sides sign one statement (both nonces, both ids, the hash of the listener's TLS certificate, run id, protocol
version), each in its own domain, and show their credentials. Fresh nonces make a replay worthless; the certificate hash
makes a relayed handshake worthless to whoever terminates the TLS connection in between.

    dialer                          listener
      │ opening()  ── Opening ──►  challenge()
      │ answer()   ◄─ Challenge ──  │
      │            ── Proof ────►  accept()
      │ finish()   ◄─ Welcome ───  welcome()
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from swarm.errors import (
    IdentityMismatchError,
    MalformedFrameError,
    ProtocolVersionError,
    WrongRunError,
)
from swarm.identity import PUBLIC_KEY_BYTES, KeyPair, PeerId, verify
from swarm.net.security import MAX_CREDENTIAL_BYTES, Admission, Authorizer
from swarm.net.transport import PROTOCOL_VERSION
from swarm.pb import hello_pb2 as pb

HELLO_PATH = "/swarm.pb.Hello/Hello"
HELLO_LIFETIME_S = 5.0
MAX_HELLO_BYTES = 16 * 1024
NONCE_BYTES = 32
TOKEN_BYTES = 32
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 262

M = TypeVar("M", pb.HelloFromDialer, pb.HelloFromListener)

_DIALER_DOMAIN = "hello-dialer"
_LISTENER_DOMAIN = "hello-listener"


def statement(
    version: int, run_id: bytes, dialer: PeerId, listener: PeerId, nonces: tuple[bytes, bytes], certificate_hash: bytes
) -> bytes:
    """The bytes that both sides sign. Every part has a fixed length, so that no two statements read alike."""
    run = hashlib.sha256(run_id).digest()
    return struct.pack(">I", version) + run + dialer.digest + listener.digest + b"".join(nonces) + certificate_hash


@dataclass(frozen=True, slots=True)
class Met:
    """The other side, proven and admitted."""

    peer_id: PeerId
    public_key: bytes
    admission: Admission


@dataclass(frozen=True, slots=True)
class Welcomed:
    """What a dialer holds after hello."""

    met: Met
    token: bytes
    idle_s: float
    addresses: tuple[str, ...]


class DialerHello:
    """The dialer's side.

    Args:
        identity: Our key pair.
        authorizer: Our policy; also judges the listener.
        listener_id: Identity that the listener's certificate carries; whoever answers must hold its key.
        certificate_hash: SHA-256 of the certificate that the connection is pinned to.
    """

    def __init__(self, identity: KeyPair, authorizer: Authorizer, listener_id: PeerId, certificate_hash: bytes) -> None:
        self._identity = identity
        self._authorizer = authorizer
        self._listener_id = listener_id
        self._certificate_hash = certificate_hash
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._met: Met | None = None
        self._addresses: tuple[str, ...] = ()

    def opening(self) -> bytes:
        """The first message."""
        opening = pb.Opening(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._authorizer.run_id,
            public_key=self._identity.public_key,
            nonce=self._nonce,
        )
        return pb.HelloFromDialer(opening=opening).SerializeToString()

    def answer(self, message: bytes) -> bytes:
        """Check the listener's challenge and prove ourselves. Raises `SecurityError`, `MalformedFrameError`."""
        challenge = _listener_step(message, "challenge").challenge
        _check_version(challenge.protocol_version)
        _check_length(challenge.nonce, NONCE_BYTES, "nonce")
        _check_credential(challenge.credential)
        listener = PeerId.of(challenge.public_key)
        if listener != self._listener_id:
            raise IdentityMismatchError(
                f"Peer {listener.short} says hello on the connection of peer {self._listener_id.short}.",
                fix="Somebody may be in the middle of the connection; get a fresh ticket from the run's owner.",
            )
        signed = statement(
            PROTOCOL_VERSION,
            self._authorizer.run_id,
            self._identity.peer_id,
            listener,
            (self._nonce, challenge.nonce),
            self._certificate_hash,
        )
        verify(challenge.public_key, _LISTENER_DOMAIN, signed, challenge.signature)
        admission = self._authorizer.admit(listener, challenge.public_key, challenge.credential)
        self._met = Met(listener, challenge.public_key, admission)
        self._addresses = tuple(a for a in challenge.addresses[:MAX_ADDRESSES] if len(a) <= MAX_ADDRESS_CHARS)
        proof = pb.Proof(
            signature=self._identity.sign(_DIALER_DOMAIN, signed), credential=self._authorizer.credential()
        )
        return pb.HelloFromDialer(proof=proof).SerializeToString()

    def finish(self, message: bytes) -> Welcomed:
        """Take the session that the listener grants. Raises `MalformedFrameError`."""
        assert self._met is not None, "finish() follows answer()"
        welcome = _listener_step(message, "welcome").welcome
        _check_length(welcome.token, TOKEN_BYTES, "session token")
        return Welcomed(self._met, welcome.token, max(0.0, welcome.idle_s), self._addresses)


class ListenerHello:
    """The listener's side. Lives for one hello stream, at most `HELLO_LIFETIME_S`.

    Args:
        identity: Our key pair.
        authorizer: Our policy.
        certificate_hash: SHA-256 of our TLS certificate.
        addresses: Where we can be dialled.
    """

    def __init__(
        self, identity: KeyPair, authorizer: Authorizer, certificate_hash: bytes, addresses: tuple[str, ...]
    ) -> None:
        self._identity = identity
        self._authorizer = authorizer
        self._certificate_hash = certificate_hash
        self._addresses = addresses
        self._dialer_key = b""
        self._signed = b""

    def challenge(self, message: bytes) -> bytes:
        """Answer an opening. Raises `SecurityError`, `MalformedFrameError`."""
        opening = _dialer_step(message, "opening").opening
        _check_version(opening.protocol_version)
        self._check_run(opening.run_id)
        _check_length(opening.nonce, NONCE_BYTES, "nonce")
        _check_length(opening.public_key, PUBLIC_KEY_BYTES, "public key")
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._dialer_key = opening.public_key
        self._signed = statement(
            PROTOCOL_VERSION,
            self._authorizer.run_id,
            PeerId.of(opening.public_key),
            self._identity.peer_id,
            (opening.nonce, nonce),
            self._certificate_hash,
        )
        challenge = pb.Challenge(
            protocol_version=PROTOCOL_VERSION,
            public_key=self._identity.public_key,
            nonce=nonce,
            signature=self._identity.sign(_LISTENER_DOMAIN, self._signed),
            credential=self._authorizer.credential(),
            addresses=self._addresses[:MAX_ADDRESSES],
        )
        return pb.HelloFromListener(challenge=challenge).SerializeToString()

    def accept(self, message: bytes) -> Met:
        """Check the dialer's proof and admit it. Raises `SecurityError`, `MalformedFrameError`."""
        if not self._signed:
            raise MalformedFrameError("A proof came before its opening.")
        proof = _dialer_step(message, "proof").proof
        signed, self._signed = self._signed, b""  # one proof per challenge
        verify(self._dialer_key, _DIALER_DOMAIN, signed, proof.signature)
        return self._admit(self._dialer_key, proof.credential)

    def meet(self, run_id: bytes, public_key: bytes, credential: bytes) -> Met:
        """Admit a dialer whose identity is proven otherwise. Raises `SecurityError`, `MalformedFrameError`."""
        self._check_run(run_id)
        return self._admit(public_key, credential)

    def _check_run(self, run_id: bytes) -> None:
        if run_id != self._authorizer.run_id:
            raise WrongRunError(
                f"This peer belongs to run {self._authorizer.run_id.hex()[:8]}, not to {run_id.hex()[:8]}.",
                fix="Use an invite of the run that you want to join.",
            )

    def _admit(self, public_key: bytes, credential: bytes) -> Met:
        _check_credential(credential)
        dialer = PeerId.of(public_key)
        return Met(dialer, public_key, self._authorizer.admit(dialer, public_key, credential))

    def welcome(self, token: bytes, idle_s: float) -> bytes:
        """The last message: the session."""
        return pb.HelloFromListener(welcome=pb.Welcome(token=token, idle_s=idle_s)).SerializeToString()


def _dialer_step(message: bytes, step: str) -> pb.HelloFromDialer:
    return _step(pb.HelloFromDialer, message, step)


def _listener_step(message: bytes, step: str) -> pb.HelloFromListener:
    return _step(pb.HelloFromListener, message, step)


def _step(kind: type[M], message: bytes, step: str) -> M:
    if len(message) > MAX_HELLO_BYTES:
        raise MalformedFrameError("A hello message is larger than 16 KiB.")
    try:
        parsed = kind.FromString(message)
    except DecodeError as error:
        raise MalformedFrameError("A hello message cannot be parsed.") from error
    if parsed.WhichOneof("step") != step:
        raise MalformedFrameError(f"Hello expected {step}, got {parsed.WhichOneof('step') or 'nothing'}.")
    return parsed


def _check_version(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        older = "the other peer" if theirs < PROTOCOL_VERSION else "this peer"
        raise ProtocolVersionError(
            f"Protocol versions differ: {theirs} there, {PROTOCOL_VERSION} here.",
            fix=f"Upgrade {older}: pip install --upgrade swarm-train.",
        )


def _check_length(value: bytes, expected: int, what: str) -> None:
    if len(value) != expected:
        raise MalformedFrameError(f"The {what} in a hello message is {len(value)} bytes long instead of {expected}.")


def _check_credential(credential: bytes) -> None:
    if len(credential) > MAX_CREDENTIAL_BYTES:
        raise MalformedFrameError("A credential is larger than 4 KiB.")
