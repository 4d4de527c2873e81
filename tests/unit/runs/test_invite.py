"""Tickets and invites: one string, strict reading, a typed error for everything that can be wrong with it."""

from __future__ import annotations

import re

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import (
    BadSignatureError,
    ExpiredInviteError,
    InvalidInviteError,
    SecurityError,
    UsageError,
    WrongRunError,
)
from swarm.identity import KeyPair
from swarm.net.transport import Contact
from swarm.roles import Role
from swarm.runs import invite as module
from swarm.runs.credentials import Credential, Delegation, run_id_of
from swarm.runs.invite import Invite, Ticket, check_address, owner_credential, parse_duration

NOW = 1_800_000_000.0
RUN_KEY = KeyPair.from_private_bytes(b"\x01" * 32)
OTHER_RUN_KEY = KeyPair.from_private_bytes(b"\x02" * 32)
BOOTSTRAP = Contact(KeyPair.from_private_bytes(b"\x03" * 32).peer_id, ("boot.example.org:31337", "[2001:db8::1]:31337"))
INVITE = Invite.issue(RUN_KEY, [BOOTSTRAP], [Role.HOST, Role.TRAINER], "7d", wall_s=NOW)
TEXT = INVITE.encode()
TICKET_TEXT = INVITE.ticket.encode()


def encode_body(body: list[object]) -> str:
    """A string with a right checksum around any body, as a forger would write it."""
    return module._encode("swarmi", body)


def test_an_invite_survives_its_string() -> None:
    read = Invite.decode(TEXT, wall_s=NOW)
    assert read.ticket == INVITE.ticket
    assert read.delegation == INVITE.delegation
    assert read.secret.private_bytes == INVITE.secret.private_bytes
    assert read.roles == (Role.HOST, Role.TRAINER)
    assert read.expires_wall_s == NOW + 7 * 86400
    assert read.encode() == TEXT


def test_a_ticket_survives_its_string_and_names_peer_ids() -> None:
    ticket = Ticket.decode(TICKET_TEXT)
    assert ticket == Ticket(RUN_KEY.public_key, (BOOTSTRAP,))
    assert ticket.run_id == run_id_of(RUN_KEY.public_key)
    assert ticket.addresses == [(address, BOOTSTRAP.peer_id) for address in BOOTSTRAP.addresses]


def test_no_shell_changes_the_strings_and_a_double_click_selects_them() -> None:
    assert re.fullmatch("swarmi1[a-z2-7]+", TEXT)
    assert re.fullmatch("swarmt1[a-z2-7]+", TICKET_TEXT)
    assert len(TEXT) < 700


def test_white_space_from_wrapped_lines_is_ignored() -> None:
    wrapped = "  " + "\r\n ".join(TEXT[i : i + 60] for i in range(0, len(TEXT), 60)) + "\n"
    assert Invite.decode(wrapped, wall_s=NOW).delegation == INVITE.delegation


def test_an_invite_is_a_ticket_too_even_when_it_has_expired() -> None:
    assert Ticket.decode(TEXT) == INVITE.ticket


def test_the_secret_is_in_no_ticket_and_in_no_printed_form() -> None:
    secret = INVITE.secret.private_bytes
    assert secret not in module._decode(TEXT)[1][1]
    assert secret.hex() not in repr(INVITE)
    assert repr(secret) not in repr(INVITE)
    assert "KeyPair" not in repr(INVITE)


@given(st.integers(0, len(TEXT) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_any_altered_character_is_noticed(position: int, character: str) -> None:
    altered = TEXT[:position] + character + TEXT[position + 1 :]
    if altered != TEXT:
        with pytest.raises(InvalidInviteError) as caught:
            Invite.decode(altered, wall_s=NOW)
        assert caught.value.fix


@given(st.integers(0, len(TEXT) - 1))
def test_any_truncation_is_noticed(length: int) -> None:
    with pytest.raises(InvalidInviteError) as caught:
        Invite.decode(TEXT[:length], wall_s=NOW)
    assert caught.value.fix
    if length > 8:
        assert "truncated" in caught.value.message


@given(st.text(max_size=200))
def test_garbage_is_an_invalid_invite(text: str) -> None:
    with pytest.raises(InvalidInviteError):
        Invite.decode(text)
    with pytest.raises(InvalidInviteError):
        Ticket.decode(text)


@given(st.binary(max_size=300))
def test_garbage_with_a_right_checksum_is_an_invalid_invite(body: bytes) -> None:
    import base64

    data = len(body).to_bytes(2, "big") + body + module._checksum("swarmi", body)
    with pytest.raises(InvalidInviteError):
        Invite.decode("swarmi1" + base64.b32encode(data).decode().lower().rstrip("="), wall_s=NOW)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither a ticket"),
        ("https://example.org", "neither a ticket"),
        ("swarmi9" + TEXT[7:], "format 9"),
        ("swarmi", "format version is missing"),
        (TEXT.upper(), "neither a ticket"),
        (TEXT[:7] + TEXT[7:].upper(), "characters that do not belong"),
        (TEXT + "a", "truncated|altered"),
        (TEXT + TEXT[7:], "altered|truncated"),
        (TEXT.replace("swarmi", "swarmt"), "altered"),
        ("swarmi1" + "a" * 9000, "at most 8192 characters"),
    ],
)
def test_the_message_says_what_is_wrong_with_the_string(text: str, says: str) -> None:
    with pytest.raises(InvalidInviteError, match=says) as caught:
        Invite.decode(text, wall_s=NOW)
    assert caught.value.fix


def test_a_newer_format_names_the_upgrade() -> None:
    with pytest.raises(InvalidInviteError) as caught:
        Ticket.decode("swarmt2" + TICKET_TEXT[7:])
    assert "pip install --upgrade swarm-train" in str(caught.value)


def test_a_ticket_does_not_admit() -> None:
    with pytest.raises(InvalidInviteError, match="does not admit"):
        Invite.decode(TICKET_TEXT)


def test_expiry_has_fifteen_minutes_of_tolerance() -> None:
    expires = NOW + 7 * 86400
    assert Invite.decode(TEXT, wall_s=expires + 15 * 60).roles
    with pytest.raises(ExpiredInviteError) as caught:
        Invite.decode(TEXT, wall_s=expires + 15 * 60 + 1)
    assert "clock" in str(caught.value)


def test_a_clock_that_is_behind_does_not_matter() -> None:
    assert Invite.decode(TEXT, wall_s=0.0).roles


def test_an_invite_without_expiry() -> None:
    forever = Invite.issue(RUN_KEY, [BOOTSTRAP], [Role.HOST], None, wall_s=NOW)
    assert Invite.decode(forever.encode(), wall_s=1e12).expires_wall_s is None


def test_a_delegation_that_the_run_did_not_sign() -> None:
    secret = KeyPair.generate()
    payload = msgpack.packb(
        {
            "v": 1,
            "run": run_id_of(RUN_KEY.public_key),
            "key": secret.public_key,
            "roles": ["host"],
            "id": b"i" * 16,
            "expires": None,
        }
    )
    forged = OTHER_RUN_KEY.sign("delegation certificate", payload) + payload
    text = encode_body([INVITE.ticket._body(), forged, secret.private_bytes])
    with pytest.raises(BadSignatureError, match="not signed by the run's key"):
        Invite.decode(text, wall_s=NOW)


def test_a_ticket_of_another_run_around_a_delegation() -> None:
    other = Ticket(OTHER_RUN_KEY.public_key, (BOOTSTRAP,))
    text = encode_body([other._body(), INVITE.delegation.certificate, INVITE.secret.private_bytes])
    with pytest.raises(WrongRunError, match="another run"):
        Invite.decode(text, wall_s=NOW)


def test_a_secret_that_does_not_belong_to_the_delegation() -> None:
    text = encode_body([INVITE.ticket._body(), INVITE.delegation.certificate, b"\x07" * 32])
    with pytest.raises(InvalidInviteError, match="secret does not belong"):
        Invite.decode(text, wall_s=NOW)


@pytest.mark.parametrize(
    "ticket",
    [
        [],
        [RUN_KEY.public_key],
        [RUN_KEY.public_key[:31], [[BOOTSTRAP.peer_id.digest, ["a:1"]]]],
        [RUN_KEY.public_key, []],
        [RUN_KEY.public_key, [[BOOTSTRAP.peer_id.digest, []]]],
        [RUN_KEY.public_key, [[b"short", ["a:1"]]]],
        [RUN_KEY.public_key, [[BOOTSTRAP.peer_id.digest, ["a:0"]]]],
        [RUN_KEY.public_key, [[BOOTSTRAP.peer_id.digest, [7]]]],
        [RUN_KEY.public_key, [[BOOTSTRAP.peer_id.digest, ["a:1"]]] * 17],
        [RUN_KEY.public_key, [[BOOTSTRAP.peer_id.digest, ["a:1"] * 9]]],
        {"key": RUN_KEY.public_key},
    ],
)
def test_a_malformed_ticket_inside(ticket: object) -> None:
    with pytest.raises(InvalidInviteError):
        Invite.decode(encode_body([ticket, INVITE.delegation.certificate, INVITE.secret.private_bytes]), wall_s=NOW)


def test_members_join_in_the_roles_of_the_invite_only() -> None:
    peer = KeyPair.generate()
    assert INVITE.credential(peer).roles == (Role.HOST, Role.TRAINER)
    assert INVITE.credential(peer, [Role.HOST]).roles == (Role.HOST,)
    with pytest.raises(InvalidInviteError, match="as host, trainer, not as bootstrap"):
        INVITE.credential(peer, [Role.BOOTSTRAP])


def test_a_membership_ends_with_its_invite() -> None:
    assert INVITE.credential(KeyPair.generate()).expires_wall_s == INVITE.expires_wall_s


def test_the_owners_credential_needs_no_invite_and_does_not_expire() -> None:
    peer = KeyPair.generate()
    own = owner_credential(RUN_KEY, peer, [Role.BOOTSTRAP, Role.HOST])
    again = Credential.verify(own.encoded, RUN_KEY.public_key)
    assert again.peer_id == peer.peer_id
    assert again.roles == (Role.BOOTSTRAP, Role.HOST)
    assert again.expires_wall_s is None


def test_each_invite_has_its_own_id_and_key() -> None:
    other = Invite.issue(RUN_KEY, [BOOTSTRAP], [Role.HOST], "7d", wall_s=NOW)
    assert other.delegation.invite_id != INVITE.delegation.invite_id
    assert other.delegation.public_key != INVITE.delegation.public_key


def test_issuing_refuses_what_nobody_could_use() -> None:
    with pytest.raises(UsageError, match="at least one role"):
        Invite.issue(RUN_KEY, [BOOTSTRAP], [], "7d")
    with pytest.raises(UsageError, match="bootstrap peers"):
        Invite.issue(RUN_KEY, [], [Role.HOST], "7d")
    with pytest.raises(UsageError, match="addresses"):
        Invite.issue(RUN_KEY, [Contact(BOOTSTRAP.peer_id, ())], [Role.HOST], "7d")
    with pytest.raises(UsageError, match="is not an address"):
        Invite.issue(RUN_KEY, [Contact(BOOTSTRAP.peer_id, ("host:0",))], [Role.HOST], "7d")
    with pytest.raises(UsageError, match="is not a duration"):
        Invite.issue(RUN_KEY, [BOOTSTRAP], [Role.HOST], "soon")


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604800), ("12h", 43200), ("30m", 1800), ("45s", 45), ("2w", 1209600), (" 1 d ", 86400)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "0d", "7 days", "1.5h", "7D", "999999999w", "7d12h", "٧d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration(text)
    assert "7d" in str(caught.value)


@pytest.mark.parametrize("text", ["localhost:1", "10.0.0.1:65535", "a-b.example.org:80", "[::1]:80", "host_1:5"])
def test_addresses(text: str) -> None:
    assert check_address(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:-1",
        "::1:80",
        "a b:80",
        "a;b:80",
        "[::1]",
        "x" * 300 + ":1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        check_address(text)


def test_every_refusal_is_a_security_error() -> None:
    assert issubclass(InvalidInviteError, SecurityError)
    assert issubclass(ExpiredInviteError, SecurityError)
    assert Delegation.verify(INVITE.delegation.certificate, RUN_KEY.public_key) == INVITE.delegation
