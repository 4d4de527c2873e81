"""What a peer declares of itself for one round: signed, so that a leader can pass it on in its seal but not change it.

Parts of the vector follow from these declarations alone, by arithmetic that is the same everywhere. So a leader has
nothing to say about others, and cannot make them seem unreachable or slow to get more of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarm.averaging.bandwidth import REPORTED_PEERS, Rate
from swarm.averaging.decisions import Terms
from swarm.averaging.rounds import Member
from swarm.averaging.seals import MAX_ENTER_S, MAX_GROUP
from swarm.errors import MalformedFrameError
from swarm.identity import KeyPair, PeerId, verify
from swarm.pb import averaging_pb2 as pb
from swarm.runtime import Runtime

DOMAIN = "averaging declaration"
MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 260
MAX_CELL_CHARS = 40
KEPT_CHECKED = 4 * MAX_GROUP


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one peer declared.

    Attributes:
        member: The peer, without a part.
    """

    member: Member
    schema_hash: bytes
    cell: str


def checked_addresses(raw: Iterable[object]) -> tuple[str, ...]:
    """Addresses from a record or message. Raises `MalformedFrameError` if there are too many or too long ones."""
    addresses = tuple(str(a) for a in raw)
    if len(addresses) > MAX_ADDRESSES or any(len(a) > MAX_ADDRESS_CHARS for a in addresses):
        raise MalformedFrameError("Too many or too long addresses.")
    return addresses


def declare(identity: KeyPair, key: str, addresses: tuple[str, ...], terms: Terms) -> Member:
    """This peer as others will know it in the round for which it looks."""
    declaration = pb.MemberDeclaration(
        key=key,
        schema_hash=terms.schema_hash,
        weight=terms.weight,
        addresses=addresses,
        cell=terms.cell,
        sends_only=terms.sends_only,
        enters_in_s=terms.enters_in_s,
        measured=[pb.MeasuredRate(peer_id=r.peer.digest, up=r.up, down=r.down) for r in terms.measured],
    ).SerializeToString(deterministic=True)
    signed = pb.SignedDeclaration(
        declaration=declaration, public_key=identity.public_key, signature=identity.sign(DOMAIN, declaration)
    )
    return Member(
        identity.peer_id,
        addresses,
        terms.weight,
        sends_only=terms.sends_only,
        enters_in_s=terms.enters_in_s,
        measured=terms.measured,
        signed=signed.SerializeToString(deterministic=True),
    )


def read(key: str, signed: pb.SignedDeclaration) -> Declaration:
    """A declaration for this key, its signature unchecked. Raises `MalformedFrameError` for what no peer declares."""
    found = pb.MemberDeclaration()
    try:
        found.ParseFromString(signed.declaration)
    except DecodeError as error:
        raise MalformedFrameError("A declaration cannot be read.") from error
    if found.key != key:
        raise MalformedFrameError("A declaration is for another key.")
    if not 0 <= found.weight < math.inf or len(found.schema_hash) != 32:
        raise MalformedFrameError("The weight or the schema hash of a declaration cannot be.")
    if not 0 <= found.enters_in_s <= MAX_ENTER_S or len(found.cell) > MAX_CELL_CHARS:
        raise MalformedFrameError("The time or the cell of a declaration cannot be.")
    if len(found.measured) > REPORTED_PEERS or any(
        not (0 <= r.up < math.inf and 0 <= r.down < math.inf) for r in found.measured
    ):
        raise MalformedFrameError("The measured rates of a declaration cannot be.")
    member = Member(
        PeerId.of(signed.public_key),
        checked_addresses(found.addresses),
        found.weight,
        sends_only=found.sends_only,
        enters_in_s=found.enters_in_s,
        measured=tuple(Rate(PeerId(r.peer_id), r.up, r.down) for r in found.measured),
        signed=signed.SerializeToString(deterministic=True),
    )
    return Declaration(member, found.schema_hash, found.cell)


def verify_all(signed: list[bytes]) -> None:
    """Check signatures, at about 0.1 ms each. Raises `BadSignatureError`."""
    for data in signed:
        envelope = pb.SignedDeclaration.FromString(data)
        verify(envelope.public_key, DOMAIN, envelope.declaration, envelope.signature)


class Declarations:
    """Reads declarations under one key, and checks each signature once. Bounded."""

    def __init__(self, runtime: Runtime, key: str) -> None:
        self._runtime = runtime
        self._key = key
        self._checked: dict[bytes, None] = {}

    async def of(self, caller: PeerId, signed: pb.SignedDeclaration) -> Declaration:
        """What a caller declares. Raises `MalformedFrameError` or `BadSignatureError`."""
        declaration = read(self._key, signed)
        if declaration.member.peer_id != caller:
            raise MalformedFrameError("The declaration is another peer's.")
        await self._check([declaration])
        return declaration

    async def of_members(self, signed: Iterable[pb.SignedDeclaration]) -> list[Declaration]:
        """What the members of a seal declared, for the same tensors in the same cell.

        Raises:
            MalformedFrameError: A declaration cannot be, is for another round, or there are none or too many.
            BadSignatureError: A member did not say so.
        """
        found = [read(self._key, one) for one in signed]
        if not 1 <= len(found) <= MAX_GROUP:
            raise MalformedFrameError("The group is too large, or empty.")
        if any((d.schema_hash, d.cell) != (found[0].schema_hash, found[0].cell) for d in found):
            raise MalformedFrameError("The members of the seal look for different groups.")
        await self._check(found)
        return found

    async def _check(self, declarations: list[Declaration]) -> None:
        new = [d.member.signed for d in declarations if d.member.signed not in self._checked]
        if len(new) > 1:
            await self._runtime.offload(verify_all, new)
        else:
            verify_all(new)
        self._checked.update(dict.fromkeys(new))
        while len(self._checked) > KEPT_CHECKED:
            del self._checked[next(iter(self._checked))]
