"""Who a peer is: an Ed25519 key pair, the id derived from it, and domain-separated signatures."""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.errors import BadSignatureError, ConfigError, MalformedFrameError

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """SHA-256 of an Ed25519 public key. Written as 52 characters of lowercase base32, which is also a DNS label."""

    digest: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes) or len(self.digest) != 32:
            raise MalformedFrameError("A peer id is 32 bytes long.")

    @classmethod
    def of(cls, public_key: bytes) -> PeerId:
        """The id that belongs to a raw Ed25519 public key (32 bytes)."""
        if len(public_key) != PUBLIC_KEY_BYTES:
            raise MalformedFrameError("An Ed25519 public key is 32 bytes long.")
        return cls(hashlib.sha256(public_key).digest())

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """Read the written form. Raises `MalformedFrameError`."""
        try:
            return cls(base64.b32decode(text.upper() + "=" * (-len(text) % 8)))
        except ValueError as error:
            raise MalformedFrameError(f"{text[:60]!r} is not a peer id: expected 52 characters of base32.") from error

    # ids are keys everywhere: bytes remember their hash, and the generated comparison would build two tuples

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerId) and self.digest == other.digest

    @property
    def node_id(self) -> int:
        """Position in the DHT: the first 160 bits."""
        return int.from_bytes(self.digest[:20], "big")

    @property
    def short(self) -> str:
        """The first 8 characters, for people."""
        return str(self)[:8]

    def __str__(self) -> str:
        return _written(self.digest)

    def __repr__(self) -> str:
        return f"PeerId({self.short}…)"


@lru_cache(maxsize=4096)
def _written(digest: bytes) -> str:
    return base64.b32encode(digest).decode().lower().rstrip("=")


def _domain_separated(domain: str, payload: bytes) -> bytes:
    return b"swarm/" + domain.encode() + b"\0" + payload


def verify(public_key: bytes, domain: str, payload: bytes, signature: bytes) -> None:
    """Check a signature made by `KeyPair.sign` for the same domain. Raises `BadSignatureError`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _domain_separated(domain, payload))
    except (InvalidSignature, ValueError) as error:
        raise BadSignatureError(f"The signature of this {domain} is not by the key it names.") from error


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, in one atomic step; makes the folder. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    os.replace(part, path)


class KeyPair:
    """An Ed25519 key pair: a peer's identity, a run's key, or the secret of an invite.

    A signature is bound to a `domain` (what kind of statement it is), so that it cannot be replayed as another kind.
    """

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> KeyPair:
        """A new key from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_private_bytes(cls, seed: bytes) -> KeyPair:
        """The key of a 32-byte secret."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> KeyPair:
        """Read a PEM file, or write a new key to it that only the owner may read. Raises `ConfigError`."""
        try:
            if not path.exists():
                key = cls.generate()
                key.save(path)
                return key
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error}", fix="Use a data directory that this user may write to."
            ) from error
        try:
            private = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(
                f"{path} holds no readable private key: {error}",
                fix="Restore it from a backup, or move it away to get a new key.",
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(
                f"{path} holds a key of another kind than Ed25519.", fix="Name the file that swarm wrote."
            )
        return cls(private)

    def save(self, path: Path) -> None:
        """Write the private key as PEM, readable by its owner only, in one atomic step."""
        pem = self._private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(path, pem)

    @property
    def private_bytes(self) -> bytes:
        """The 32-byte secret. Never send it."""
        return self._private_key.private_bytes_raw()

    @cached_property
    def peer_id(self) -> PeerId:
        return PeerId.of(self.public_key)

    def sign(self, domain: str, payload: bytes) -> bytes:
        """A 64-byte signature over `payload`, valid for this domain only."""
        return self._private_key.sign(_domain_separated(domain, payload))
