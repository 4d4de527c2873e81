"""The chain run key -> delegation -> membership: every broken link is refused with its own error."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BadSignatureError, ExpiredInviteError, InvalidInviteError, SecurityError, WrongRunError
from swarm.identity import KeyPair
from swarm.roles import Role
from swarm.runs.credentials import MAX_CREDENTIAL_BYTES, Credential, Delegation, check_expiry, run_id_of

RUN = KeyPair.from_private_bytes(b"\x01" * 32)
OTHER_RUN = KeyPair.from_private_bytes(b"\x02" * 32)
SECRET = KeyPair.from_private_bytes(b"\x03" * 32)
PEER = KeyPair.from_private_bytes(b"\x04" * 32)
STRANGER = KeyPair.from_private_bytes(b"\x05" * 32)
UNTIL = 1_800_000_000
DELEGATION = Delegation.issue(RUN, SECRET.public_key, [Role.HOST, Role.MONITOR], b"i" * 16, UNTIL)
CREDENTIAL = Credential.issue(DELEGATION, SECRET, PEER.public_key, [Role.HOST], RUN.public_key)


def signed(key: KeyPair, domain: str, fields: Any) -> bytes:
    payload = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    return key.sign(domain, payload) + payload


def delegation(signer: KeyPair = RUN, /, **changes: Any) -> bytes:
    fields = {
        "v": 1,
        "run": run_id_of(RUN.public_key),
        "key": SECRET.public_key,
        "roles": ["host"],
        "id": b"i" * 16,
        "expires": UNTIL,
    }
    return signed(signer, "delegation certificate", {**fields, **changes})


def membership(signer: KeyPair = SECRET, /, **changes: Any) -> bytes:
    fields = {
        "v": 1,
        "run": run_id_of(RUN.public_key),
        "peer": PEER.public_key,
        "roles": ["host"],
        "expires": None,
    }
    return signed(signer, "membership certificate", {**fields, **changes})


def credential(first: bytes, second: bytes) -> bytes:
    return msgpack.packb([1, first, second])


def test_a_credential_survives_its_bytes() -> None:
    assert Credential.verify(CREDENTIAL.encoded, RUN.public_key) == CREDENTIAL
    assert CREDENTIAL.peer_id == PEER.peer_id
    assert CREDENTIAL.expires_wall_s == UNTIL
    assert SECRET.private_bytes not in CREDENTIAL.encoded
    assert len(CREDENTIAL.encoded) < 600


def test_hand_made_certificates_are_what_the_library_makes() -> None:
    made = Credential.verify(credential(delegation(), membership()), RUN.public_key)
    assert (made.roles, made.peer_public_key, made.expires_wall_s) == ((Role.HOST,), PEER.public_key, UNTIL)


def test_the_earlier_expiry_holds() -> None:
    early = Credential.issue(DELEGATION, SECRET, PEER.public_key, [Role.HOST], RUN.public_key, UNTIL - 5)
    late = Credential.issue(DELEGATION, SECRET, PEER.public_key, [Role.HOST], RUN.public_key, UNTIL + 5)
    assert (early.expires_wall_s, late.expires_wall_s) == (UNTIL - 5, UNTIL)


def test_a_delegation_not_signed_by_the_run_key() -> None:
    with pytest.raises(BadSignatureError, match="run's key") as caught:
        Credential.verify(credential(delegation(STRANGER), membership()), RUN.public_key)
    assert caught.value.fix


def test_a_membership_not_signed_by_the_delegation_key() -> None:
    with pytest.raises(BadSignatureError, match="invite's key"):
        Credential.verify(credential(delegation(), membership(STRANGER)), RUN.public_key)


def test_the_run_key_itself_cannot_sign_a_membership() -> None:
    with pytest.raises(BadSignatureError):
        Credential.verify(credential(delegation(), membership(RUN)), RUN.public_key)


def test_a_signature_of_another_kind_of_statement_does_not_count() -> None:
    payload = delegation()[64:]
    wrong_domain = RUN.sign("manifest", payload) + payload
    with pytest.raises(BadSignatureError):
        Credential.verify(credential(wrong_domain, membership()), RUN.public_key)


def test_certificates_of_another_run() -> None:
    with pytest.raises(WrongRunError):
        Credential.verify(CREDENTIAL.encoded, OTHER_RUN.public_key)
    with pytest.raises(WrongRunError):
        Credential.verify(credential(delegation(run=b"r" * 32), membership()), RUN.public_key)
    with pytest.raises(WrongRunError):
        Credential.verify(credential(delegation(), membership(run=b"r" * 32)), RUN.public_key)


def test_a_membership_that_claims_more_than_its_delegation() -> None:
    with pytest.raises(InvalidInviteError, match="as host, not as bootstrap"):
        Credential.verify(credential(delegation(), membership(roles=["bootstrap", "host"])), RUN.public_key)


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": True},
        {"v": 1.0},
        {"v": None},
        {"key": b"short"},
        {"key": "text"},
        {"run": b"short"},
        {"roles": []},
        {"roles": "host"},
        {"roles": [1]},
        {"roles": ["host", "host"]},
        {"roles": ["trainer", "host"]},
        {"roles": ["emperor"]},
        {"id": b""},
        {"expires": "soon"},
        {"expires": -1},
        {"expires": True},
        {"expires": 2**60},
        {"expires": 1.5},
        {"more": 1},
    ],
)
def test_fields_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises((InvalidInviteError, WrongRunError)) as caught:
        Credential.verify(credential(delegation(**changes), membership()), RUN.public_key)
    assert caught.value.fix


@pytest.mark.parametrize("changes", [{"peer": b"short"}, {"roles": []}, {"v": 9}, {"expires": []}, {"x": 1}])
def test_membership_fields_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInviteError):
        Credential.verify(credential(delegation(), membership(**changes)), RUN.public_key)


@pytest.mark.parametrize("what", ["role", "certificate", "credential"])
def test_what_a_later_version_wrote_names_the_upgrade(what: str) -> None:
    later = {
        "role": credential(delegation(roles=["emperor"]), membership()),
        "certificate": credential(delegation(v=2, limit=3), membership()),
        "credential": msgpack.packb([2, b"", b"", b""]),
    }[what]
    with pytest.raises(InvalidInviteError) as caught:
        Credential.verify(later, RUN.public_key)
    assert "pip install --upgrade" in str(caught.value)


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgpack.packb({}),
        msgpack.packb([1, b"", b""]),
        msgpack.packb([1, b"x" * 64, b"x" * 64]),
        msgpack.packb([1, "text", b""]),
        msgpack.packb([0, delegation(), membership()]),
        msgpack.packb([1, delegation(), membership(), b""]),
        msgpack.packb([1, delegation(), membership()]) + b"\0",
        b"\xdd\x7f\xff\xff\xff" + b"a" * 100,
        b"\x91" * 1500,
        CREDENTIAL.encoded[:-1],
        CREDENTIAL.encoded + b"\0" * (MAX_CREDENTIAL_BYTES - len(CREDENTIAL.encoded) + 1),
        b"\xdc\x00\x03" + CREDENTIAL.encoded[1:],
    ],
)
def test_bytes_that_are_no_credential(encoded: bytes) -> None:
    with pytest.raises(InvalidInviteError):
        Credential.verify(encoded, RUN.public_key)


@given(st.integers(0, len(CREDENTIAL.encoded) - 1), st.integers(1, 255))
def test_any_altered_byte_is_refused(position: int, change: int) -> None:
    altered = bytearray(CREDENTIAL.encoded)
    altered[position] ^= change
    with pytest.raises(SecurityError):
        Credential.verify(bytes(altered), RUN.public_key)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidInviteError):
        Credential.verify(encoded, RUN.public_key)


def test_expiry() -> None:
    check_expiry("invite", None, 1e15)
    check_expiry("invite", UNTIL, UNTIL + 900.0)
    for late, words in ((901.0, "15 minutes"), (7300.0, "2 hours"), (200_000.0, "2 days"), (950.0, "15 minutes")):
        with pytest.raises(ExpiredInviteError, match=words):
            check_expiry("invite", UNTIL, UNTIL + late)


def test_a_run_key_has_32_bytes() -> None:
    with pytest.raises(InvalidInviteError):
        run_id_of(b"short")
