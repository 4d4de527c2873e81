"""Tickets and invites: the one string with which somebody finds, or joins, a run.

A *ticket* is public: the run's key and where its bootstrap peers answer. An *invite* is a ticket plus a delegation
and its secret: whoever holds the string may join in its roles until it expires. Both are written as `swarmt1...` or
`swarmi1...`: a kind, a format version and lowercase base32, so that a double click selects the whole and no shell
changes it. White space is ignored when reading, because mail programs and terminals wrap long lines.

Inside the base32: the length of the body (2 bytes), the body (msgpack), and the first 4 bytes of a SHA-256 over kind,
version and body, which tells a slip of the hand from a forgery. Forgeries fail at the signatures.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from swarm.errors import InvalidInviteError, MalformedFrameError, UsageError
from swarm.identity import PUBLIC_KEY_BYTES, KeyPair, PeerId
from swarm.net.transport import Contact
from swarm.roles import Role
from swarm.runs.credentials import INVITE_ID_BYTES, Credential, Delegation, check_expiry, run_id_of, unpack

FORMAT_VERSION = 1
MAX_TEXT_CHARS = 8192
MAX_BOOTSTRAP_PEERS = 16
MAX_ADDRESSES_PER_PEER = 8
MAX_ADDRESS_CHARS = 255
DEFAULT_EXPIRY = "7d"

_KINDS = {"swarmt": "ticket", "swarmi": "invite"}
_CHECKSUM_BYTES = 4
_COPY = "Copy the whole string again, from 'swarm' to its end."
_ASK = "Ask the run's owner for a new one."
_UPGRADE = "Upgrade with: pip install --upgrade swarm-train"
_ADDRESS = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_DURATION = re.compile(r"([0-9]{1,9})\s*([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_DURATION_S = 100 * 366 * 86400


def parse_duration(text: str) -> int:
    """Seconds of a duration such as `"7d"`, `"12h"`, `"30m"`. Raises `UsageError`."""
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_DURATION_S:
        raise UsageError(f"{text!r} is not a duration.", fix="Write a number and a unit, such as 30m, 12h or 7d.")
    return seconds


def check_address(address: str) -> str:
    """Return `address` if it is `host:port` with a port that can be dialled. Raises `UsageError`."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) and len(address) <= MAX_ADDRESS_CHARS else None
    if match is None or not 0 < int(match[1]) <= 65535:
        raise UsageError(f"{str(address)[:80]!r} is not an address.", fix="Write host:port, or [host]:port for IPv6.")
    return address


@dataclass(frozen=True, slots=True)
class Ticket:
    """The public address of a run.

    Attributes:
        run_public_key: The run's key (32 bytes); peers that answer are checked against it.
        bootstrap: First contacts, with the peer ids that must answer there.
    """

    run_public_key: bytes
    bootstrap: tuple[Contact, ...]

    @property
    def run_id(self) -> bytes:
        return run_id_of(self.run_public_key)

    @property
    def addresses(self) -> list[tuple[str, PeerId]]:
        """Every bootstrap address with the peer id expected there."""
        return [(address, contact.peer_id) for contact in self.bootstrap for address in contact.addresses]

    def encode(self) -> str:
        """The one string (`swarmt1...`). Raises `UsageError` for addresses that nobody could dial."""
        return _encode("swarmt", self._body())

    @classmethod
    def decode(cls, text: str) -> Ticket:
        """Read a ticket. An invite is accepted too, expired or not: it contains one. Raises `InvalidInviteError`."""
        kind, body = _decode(text)
        return cls._from_body(body) if kind == "swarmt" else Invite.decode(text, wall_s=0.0).ticket

    def _body(self) -> list[Any]:
        if not 1 <= len(self.bootstrap) <= MAX_BOOTSTRAP_PEERS:
            raise UsageError(f"A ticket names 1 to {MAX_BOOTSTRAP_PEERS} bootstrap peers, not {len(self.bootstrap)}.")
        contacts = []
        for contact in self.bootstrap:
            if not 1 <= len(contact.addresses) <= MAX_ADDRESSES_PER_PEER:
                raise UsageError(
                    f"A bootstrap peer has 1 to {MAX_ADDRESSES_PER_PEER} addresses, not {len(contact.addresses)}."
                )
            contacts.append([contact.peer_id.digest, [check_address(a) for a in contact.addresses]])
        return [self.run_public_key, contacts]

    @classmethod
    def _from_body(cls, body: Any) -> Ticket:
        match body:
            case [bytes() as key, list() as contacts] if (
                len(key) == PUBLIC_KEY_BYTES and 1 <= len(contacts) <= MAX_BOOTSTRAP_PEERS
            ):
                return cls(key, tuple(_contact(c) for c in contacts))
        raise InvalidInviteError("The string does not hold a run's key and bootstrap peers.", fix=_ASK)


@dataclass(frozen=True, slots=True)
class Invite:
    """A ticket with the right to join. Treat its string like a password: it admits whoever holds it.

    Attributes:
        ticket: Where the run is.
        delegation: What the run's key allows the holder.
        secret: The delegation's key pair; it stays on the holder's machine.
    """

    ticket: Ticket
    delegation: Delegation
    secret: KeyPair = field(repr=False)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles in which the holder may join."""
        return self.delegation.roles

    @property
    def expires_wall_s(self) -> int | None:
        return self.delegation.expires_wall_s

    @classmethod
    def issue(
        cls,
        run_key: KeyPair,
        bootstrap: Sequence[Contact],
        roles: Iterable[Role],
        expires: str | None = DEFAULT_EXPIRY,
        *,
        wall_s: float | None = None,
    ) -> Invite:
        """Make an invite with the run's private key.

        Args:
            run_key: The key of the run.
            bootstrap: Where joining peers find the run.
            roles: What they may join as.
            expires: How long the invite and every membership made with it count, such as `"7d"`; none for ever.
            wall_s: The present in Unix seconds; none reads the clock.

        Raises:
            UsageError: The duration, the roles or the bootstrap addresses cannot be used.
        """
        chosen = sorted(set(roles))
        if not chosen:
            raise UsageError("An invite needs at least one role.", fix=f"Use one of {', '.join(Role)}.")
        now = time.time() if wall_s is None else wall_s
        until = None if expires is None else int(now) + parse_duration(expires)
        ticket, secret = Ticket(run_key.public_key, tuple(bootstrap)), KeyPair.generate()
        ticket.encode()
        delegation = Delegation.issue(run_key, secret.public_key, chosen, secrets.token_bytes(INVITE_ID_BYTES), until)
        return cls(ticket, delegation, secret)

    def credential(self, identity: KeyPair, roles: Iterable[Role] | None = None) -> Credential:
        """Make the membership of `identity` in these roles (none: all that the invite allows).

        Raises:
            InvalidInviteError: The invite does not admit peers in one of the roles.
        """
        chosen = self.roles if roles is None else tuple(roles)
        return Credential.issue(self.delegation, self.secret, identity.public_key, chosen, self.ticket.run_public_key)

    def encode(self) -> str:
        """The one string (`swarmi1...`), which holds the secret."""
        return _encode("swarmi", [self.ticket._body(), self.delegation.certificate, self.secret.private_bytes])

    @classmethod
    def decode(cls, text: str, *, wall_s: float | None = None) -> Invite:
        """Read an invite and check its checksum, its signature, its secret and its expiry.

        Args:
            text: The string, with any white space.
            wall_s: The present in Unix seconds; none reads the clock.

        Raises:
            InvalidInviteError: Truncated, altered, oversized, of another kind or of a newer format.
            BadSignatureError, WrongRunError: The delegation is not by the run's key.
            ExpiredInviteError: It expired more than 15 minutes ago.
        """
        kind, body = _decode(text)
        if kind != "swarmi":
            raise InvalidInviteError(
                "This is a ticket: it shows where the run is, but does not admit you.",
                fix="Ask the run's owner for an invite (swarmi1...).",
            )
        match body:
            case [ticket_body, bytes() as certificate, bytes() as seed] if len(seed) == 32:
                ticket = Ticket._from_body(ticket_body)
            case _:
                raise InvalidInviteError("The string does not hold a ticket, a delegation and a secret.", fix=_ASK)
        delegation = Delegation.verify(certificate, ticket.run_public_key)
        secret = KeyPair.from_private_bytes(seed)
        if secret.public_key != delegation.public_key:
            raise InvalidInviteError("The invite's secret does not belong to its delegation.", fix=_ASK)
        check_expiry("invite", delegation.expires_wall_s, time.time() if wall_s is None else wall_s)
        return cls(ticket, delegation, secret)


def owner_credential(run_key: KeyPair, identity: KeyPair, roles: Iterable[Role]) -> Credential:
    """A credential without expiry for a peer of the run's owner, made with the run's private key."""
    chosen, secret = tuple(roles), KeyPair.generate()
    delegation = Delegation.issue(run_key, secret.public_key, chosen, secrets.token_bytes(INVITE_ID_BYTES), None)
    return Credential.issue(delegation, secret, identity.public_key, chosen, run_key.public_key)


def _checksum(kind: str, body: bytes) -> bytes:
    return hashlib.sha256(f"swarm/{kind}{FORMAT_VERSION}\0".encode() + body).digest()[:_CHECKSUM_BYTES]


def _encode(kind: str, body: list[Any]) -> str:
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    data = len(packed).to_bytes(2, "big") + packed + _checksum(kind, packed)
    return f"{kind}{FORMAT_VERSION}{base64.b32encode(data).decode().lower().rstrip('=')}"


def _decode(text: str) -> tuple[str, Any]:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidInviteError(
            f"A ticket or invite has at most {MAX_TEXT_CHARS} characters; this has {len(text)}.", fix=_COPY
        )
    compact = "".join(text.split())
    kind, version, written = compact[:6], compact[6:7], compact[7:]
    if kind not in _KINDS:
        raise InvalidInviteError("This is neither a ticket (swarmt1...) nor an invite (swarmi1...).", fix=_COPY)
    what = _KINDS[kind]
    if version != str(FORMAT_VERSION):
        if version.isdigit():
            raise InvalidInviteError(
                f"The {what} has format {version}, which this version of swarm does not know.", fix=_UPGRADE
            )
        raise InvalidInviteError(f"The {what} is damaged: its format version is missing.", fix=_COPY)
    try:
        if not re.fullmatch("[a-z2-7]*", written):
            raise ValueError("not lowercase base32")  # noqa: TRY301 - one place words the complaint
        data = base64.b32decode(written.upper() + "=" * (-len(written) % 8))
    except ValueError as error:
        if re.fullmatch("[a-z2-7]*", written):  # only the number of characters can be wrong
            raise InvalidInviteError(f"The {what} is truncated.", fix=_COPY) from error
        raise InvalidInviteError(
            f"The {what} was altered: it has characters that do not belong there.", fix=_COPY
        ) from error
    expected = 2 + int.from_bytes(data[:2], "big") + _CHECKSUM_BYTES
    if len(data) < 2 or len(data) < expected:
        raise InvalidInviteError(f"The {what} is truncated: {len(data)} of {expected} bytes are there.", fix=_COPY)
    packed = data[2:-_CHECKSUM_BYTES]
    if len(data) > expected or data[-_CHECKSUM_BYTES:] != _checksum(kind, packed):
        raise InvalidInviteError(f"The {what} was altered: its checksum does not match.", fix=_COPY)
    if base64.b32encode(data).decode().lower().rstrip("=") != written:
        raise InvalidInviteError(f"The {what} was altered: it is not in canonical form.", fix=_COPY)
    return kind, unpack(packed, what)


def _contact(value: Any) -> Contact:
    match value:
        case [bytes() as digest, list() as addresses] if (
            len(digest) == 32 and 1 <= len(addresses) <= MAX_ADDRESSES_PER_PEER
        ):
            try:
                return Contact(PeerId(digest), tuple(check_address(a) for a in addresses))
            except (UsageError, MalformedFrameError) as error:
                raise InvalidInviteError(f"A bootstrap address cannot be used: {error.message}", fix=_ASK) from error
    raise InvalidInviteError("A bootstrap entry is not a peer id with addresses.", fix=_ASK)
