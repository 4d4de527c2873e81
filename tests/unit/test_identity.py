"""Identities: ids, key files, and signatures that count for one kind of statement only."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BadSignatureError, ConfigError, MalformedFrameError
from swarm.identity import KeyPair, PeerId, verify

KEY = KeyPair.from_private_bytes(b"\x01" * 32)


def test_an_id_is_the_hash_of_the_key_and_a_dns_label() -> None:
    assert KEY.peer_id.digest == hashlib.sha256(KEY.public_key).digest()
    text = str(KEY.peer_id)
    assert len(text) == 52
    assert text == text.lower()
    assert text.isalnum()
    assert KEY.peer_id.short == text[:8]
    assert text[8:] not in repr(KEY.peer_id)


@given(st.binary(min_size=32, max_size=32))
def test_ids_are_read_back(digest: bytes) -> None:
    assert PeerId.parse(str(PeerId(digest))) == PeerId(digest)


@pytest.mark.parametrize("text", ["", "abc", "1" * 52, "a" * 51, "a" * 53, "é" * 52, "a" * 10_000])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(MalformedFrameError):
        PeerId.parse(text)


def test_ids_and_keys_have_their_length() -> None:
    for wrong in (b"", b"x" * 31, b"x" * 33):
        with pytest.raises(MalformedFrameError):
            PeerId(wrong)
        with pytest.raises(MalformedFrameError):
            PeerId.of(wrong)


def test_the_dht_position_is_the_first_160_bits() -> None:
    assert PeerId(b"\xff" * 20 + b"\x00" * 12).node_id == 2**160 - 1


def test_a_signature_counts_for_its_key_domain_and_payload_only() -> None:
    signature = KEY.sign("manifest", b"payload")
    verify(KEY.public_key, "manifest", b"payload", signature)
    other = KeyPair.from_private_bytes(b"\x02" * 32)
    for key, domain, payload, shown in (
        (other.public_key, "manifest", b"payload", signature),
        (KEY.public_key, "record", b"payload", signature),
        (KEY.public_key, "manifest", b"payloae", signature),
        (KEY.public_key, "manifest", b"payload", signature[:-1]),
        (KEY.public_key, "manifest", b"payload", b""),
        (b"", "manifest", b"payload", signature),
    ):
        with pytest.raises(BadSignatureError):
            verify(key, domain, payload, shown)


def test_a_domain_cannot_run_into_its_payload() -> None:
    with pytest.raises(BadSignatureError):
        verify(KEY.public_key, "ab", b"c", KEY.sign("a", b"bc"))


def test_a_key_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.pem"
    made = KeyPair.load_or_create(path)
    again = KeyPair.load_or_create(path)
    assert made.peer_id == again.peer_id
    assert made.private_bytes == again.private_bytes
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["identity.pem"]


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_an_unreadable_key_file_is_kept_and_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"identity\.pem"):
        KeyPair.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(pem)
    with pytest.raises(ConfigError, match="another kind"):
        KeyPair.load_or_create(path)


def test_new_keys_differ_and_hide_their_secret() -> None:
    one, two = KeyPair.generate(), KeyPair.generate()
    assert one.public_key != two.public_key
    assert one.private_bytes.hex() not in repr(one)
