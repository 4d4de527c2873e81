"""The chain of trust of a run: run key -> delegation (in an invite) -> membership of one peer.

The owner's run key signs a *delegation*: "whoever holds this delegation key may admit peers in these roles until
then". The invite carries the delegation with its secret. A joining peer signs its own *membership* with that secret:
"this peer key belongs to the run in these roles". The two certificates together are its *credential*, which holds no
secret and which every other peer checks with nothing but the run's public key.

A certificate is the exact bytes that were signed plus the signature; the bytes are a msgpack map with a format
version. A certificate grants rights, so a field that this version does not know is refused rather than ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from swarm.errors import BadSignatureError, ExpiredInviteError, InvalidInviteError, WrongRunError
from swarm.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, KeyPair, PeerId, verify
from swarm.roles import Role

FORMAT_VERSION = 1
RUN_ID_BYTES = 32
INVITE_ID_BYTES = 16
MAX_CREDENTIAL_BYTES = 2048
CLOCK_TOLERANCE_S = 15 * 60.0
"""Expiry is the only thing that is compared with the wall clock; clocks may be wrong by this much."""
MAX_WALL_S = 253_402_300_799
"""The last second of the year 9999; no expiry lies beyond it."""

_DELEGATION = "delegation certificate"
_MEMBERSHIP = "membership certificate"
_ASK = "Ask the run's owner for a new invite."
_UPGRADE = "Upgrade with: pip install --upgrade swarm-train"


def run_id_of(run_public_key: bytes) -> bytes:
    """The id of a run (32 bytes): the SHA-256 of its public key."""
    if not isinstance(run_public_key, bytes) or len(run_public_key) != PUBLIC_KEY_BYTES:
        raise InvalidInviteError("A run's public key is 32 bytes long.", fix=_ASK)
    return hashlib.sha256(run_public_key).digest()


def check_expiry(what: str, expires_wall_s: int | None, wall_s: float) -> None:
    """Raise `ExpiredInviteError` when `expires_wall_s` has passed by more than `CLOCK_TOLERANCE_S`."""
    if expires_wall_s is not None and wall_s > expires_wall_s + CLOCK_TOLERANCE_S:
        ago = int(wall_s - expires_wall_s)
        raise ExpiredInviteError(
            f"The {what} expired {_span(ago)} ago by this machine's clock.",
            fix=f"{_ASK} Or correct this machine's clock.",
        )


def _span(seconds: int) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} seconds"


@dataclass(frozen=True, slots=True)
class Delegation:
    """The right to admit peers to a run, given by the run's key to a delegation key.

    Attributes:
        run_id: The run (32 bytes).
        public_key: The delegation key's public half; whoever holds the other half may admit.
        roles: The roles it may admit peers in, sorted.
        invite_id: Names the invite (16 bytes), for the owner's records.
        expires_wall_s: Unix seconds after which neither it nor what it admitted counts; none for never.
        certificate: The signed bytes and their signature.
    """

    run_id: bytes
    public_key: bytes
    roles: tuple[Role, ...]
    invite_id: bytes
    expires_wall_s: int | None
    certificate: bytes

    @classmethod
    def issue(
        cls, run_key: KeyPair, public_key: bytes, roles: Iterable[Role], invite_id: bytes, expires_wall_s: int | None
    ) -> Delegation:
        """Sign a delegation with the run's key."""
        statement = {
            "v": FORMAT_VERSION,
            "run": run_id_of(run_key.public_key),
            "key": public_key,
            "roles": sorted({Role(r).value for r in roles}),
            "id": invite_id,
            "expires": expires_wall_s,
        }
        return cls.verify(_signed(run_key, _DELEGATION, statement), run_key.public_key)

    @classmethod
    def verify(cls, certificate: bytes, run_public_key: bytes) -> Delegation:
        """Read a certificate and check that the run's key signed it.

        Raises:
            InvalidInviteError: It is malformed.
            WrongRunError: It belongs to another run.
            BadSignatureError: The run's key did not sign it. Expiry is checked apart, by `check_expiry`.
        """
        fields = _statement(certificate, _DELEGATION, {"v", "run", "key", "roles", "id", "expires"})
        run_id = _bytes_field(fields, "run", RUN_ID_BYTES, _DELEGATION)
        if run_id != run_id_of(run_public_key):
            raise WrongRunError("The invite or credential belongs to another run.", fix=_ASK)
        _check_signature(certificate, _DELEGATION, run_public_key, "the run's key")
        return cls(
            run_id=run_id,
            public_key=_bytes_field(fields, "key", PUBLIC_KEY_BYTES, _DELEGATION),
            roles=_roles_field(fields, _DELEGATION),
            invite_id=_bytes_field(fields, "id", INVITE_ID_BYTES, _DELEGATION),
            expires_wall_s=_expiry_field(fields, _DELEGATION),
            certificate=certificate,
        )


@dataclass(frozen=True, slots=True)
class Credential:
    """A peer's proof of membership: what it shows in hello. It holds no secret.

    Attributes:
        delegation: Who admitted the peer.
        peer_public_key: The admitted peer's key (32 bytes).
        roles: The roles it was admitted in, sorted; a subset of the delegation's.
        expires_wall_s: The earlier expiry of the two certificates; none for never.
        encoded: The bytes that travel, at most `MAX_CREDENTIAL_BYTES`.
    """

    delegation: Delegation
    peer_public_key: bytes
    roles: tuple[Role, ...]
    expires_wall_s: int | None
    encoded: bytes

    @property
    def peer_id(self) -> PeerId:
        return PeerId.of(self.peer_public_key)

    @classmethod
    def issue(
        cls,
        delegation: Delegation,
        delegation_key: KeyPair,
        peer_public_key: bytes,
        roles: Iterable[Role],
        run_public_key: bytes,
        expires_wall_s: int | None = None,
    ) -> Credential:
        """Admit a peer with a delegation's secret. Raises `InvalidInviteError` for a role outside the delegation."""
        statement = {
            "v": FORMAT_VERSION,
            "run": delegation.run_id,
            "peer": peer_public_key,
            "roles": sorted({Role(r).value for r in roles}),
            "expires": expires_wall_s,
        }
        membership = _signed(delegation_key, _MEMBERSHIP, statement)
        encoded = msgpack.packb([FORMAT_VERSION, delegation.certificate, membership], use_bin_type=True)
        return cls.verify(encoded, run_public_key)

    @classmethod
    def verify(cls, encoded: bytes, run_public_key: bytes) -> Credential:
        """Read a credential and check both links of its chain. Whose it is and its expiry the caller checks.

        Raises:
            InvalidInviteError: Malformed, oversized, or the membership claims more than the delegation grants.
            WrongRunError: Either certificate belongs to another run.
            BadSignatureError: A link is not signed by the key above it.
        """
        if len(encoded) > MAX_CREDENTIAL_BYTES:
            raise InvalidInviteError(
                f"A credential has at most {MAX_CREDENTIAL_BYTES} bytes; this has {len(encoded)}.", fix=_ASK
            )
        outer = unpack(encoded, "credential")
        if isinstance(outer, list) and outer and type(outer[0]) is int and outer[0] > FORMAT_VERSION:
            raise InvalidInviteError(
                "The credential has a format that this version of swarm does not know.", fix=_UPGRADE
            )
        if (
            not isinstance(outer, list)
            or [type(part) for part in outer] != [int, bytes, bytes]
            or outer[0] != FORMAT_VERSION
        ):
            raise InvalidInviteError("The credential is not a pair of certificates.", fix=_ASK)
        delegation = Delegation.verify(outer[1], run_public_key)
        fields = _statement(outer[2], _MEMBERSHIP, {"v", "run", "peer", "roles", "expires"})
        if _bytes_field(fields, "run", RUN_ID_BYTES, _MEMBERSHIP) != delegation.run_id:
            raise WrongRunError("The credential belongs to another run.", fix=_ASK)
        _check_signature(outer[2], _MEMBERSHIP, delegation.public_key, "the invite's key")
        roles = _roles_field(fields, _MEMBERSHIP)
        if beyond := [r.value for r in roles if r not in delegation.roles]:
            allowed = ", ".join(delegation.roles)
            raise InvalidInviteError(
                f"The invite admits peers as {allowed}, not as {', '.join(beyond)}.",
                fix="Ask the run's owner for an invite for that role.",
            )
        expiries = [e for e in (delegation.expires_wall_s, _expiry_field(fields, _MEMBERSHIP)) if e is not None]
        return cls(
            delegation=delegation,
            peer_public_key=_bytes_field(fields, "peer", PUBLIC_KEY_BYTES, _MEMBERSHIP),
            roles=roles,
            expires_wall_s=min(expiries, default=None),
            encoded=encoded,
        )


def unpack(data: bytes, what: str) -> Any:
    """Unpack msgpack strictly: bounded by its own length, text keys, and only in the canonical encoding.

    Raises:
        InvalidInviteError: It is not msgpack, or not canonical.
    """
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
        canonical = msgpack.packb(value, use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidInviteError(f"The {what} is damaged: {type(error).__name__}.", fix=_ASK) from error
    if canonical != data:
        raise InvalidInviteError(f"The {what} is not in canonical form.", fix=_ASK)
    return value


def _signed(key: KeyPair, domain: str, statement: Mapping[str, Any]) -> bytes:
    payload: bytes = msgpack.packb(dict(statement), use_bin_type=True)
    return key.sign(domain, payload) + payload


def _check_signature(certificate: bytes, domain: str, public_key: bytes, signer: str) -> None:
    try:
        verify(public_key, domain, certificate[SIGNATURE_BYTES:], certificate[:SIGNATURE_BYTES])
    except BadSignatureError as error:
        raise BadSignatureError(f"The {domain} is not signed by {signer}.", fix=_ASK) from error


def _statement(certificate: bytes, domain: str, names: set[str]) -> dict[str, Any]:
    if len(certificate) <= SIGNATURE_BYTES:
        raise InvalidInviteError(f"The {domain} is truncated.", fix=_ASK)
    if len(certificate) > MAX_CREDENTIAL_BYTES:
        raise InvalidInviteError(f"The {domain} is larger than {MAX_CREDENTIAL_BYTES} bytes.", fix=_ASK)
    fields = unpack(certificate[SIGNATURE_BYTES:], domain)
    if not isinstance(fields, dict):
        raise InvalidInviteError(f"The {domain} is not a map of fields.", fix=_ASK)
    if type(fields.get("v")) is int and fields["v"] > FORMAT_VERSION:
        raise InvalidInviteError(f"The {domain} has a format that this version of swarm does not know.", fix=_UPGRADE)
    if type(fields.get("v")) is not int or fields["v"] != FORMAT_VERSION or set(fields) != names:
        raise InvalidInviteError(f"The {domain} has missing or unknown fields.", fix=_ASK)
    return fields


def _bytes_field(fields: Mapping[str, Any], name: str, length: int, domain: str) -> bytes:
    value = fields[name]
    if not isinstance(value, bytes) or len(value) != length:
        raise InvalidInviteError(f"Field {name!r} of the {domain} is not {length} bytes.", fix=_ASK)
    return value


def _roles_field(fields: Mapping[str, Any], domain: str) -> tuple[Role, ...]:
    value = fields["roles"]
    known = {r.value for r in Role}
    if not isinstance(value, list) or not value or not all(isinstance(r, str) for r in value):
        raise InvalidInviteError(f"Field 'roles' of the {domain} is not a list of roles.", fix=_ASK)
    if value != sorted(set(value)):
        raise InvalidInviteError(f"Field 'roles' of the {domain} is not sorted.", fix=_ASK)
    if unknown := [r for r in value if r not in known]:
        raise InvalidInviteError(
            f"The {domain} names a role that this version of swarm does not know: {unknown[0][:40]!r}.", fix=_UPGRADE
        )
    return tuple(Role(r) for r in value)


def _expiry_field(fields: Mapping[str, Any], domain: str) -> int | None:
    value = fields["expires"]
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WALL_S:
        raise InvalidInviteError(f"Field 'expires' of the {domain} is not a time.", fix=_ASK)
    return value
