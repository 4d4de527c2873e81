"""The DHT's three calls, and what they ask and answer: between wire and lookups, all of it bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarm.dht.reading import Told
from swarm.dht.records import MAX_NAME_BYTES, Copy, position_of
from swarm.dht.refusals import Refusal
from swarm.dht.routing import ID_BYTES, PeerNode
from swarm.errors import MalformedFrameError
from swarm.identity import PeerId
from swarm.net.transport import Contact, UnaryMethod
from swarm.pb import dht_pb2 as pb
from swarm.roles import ALL_ROLES, Role

PING = UnaryMethod("/swarm.pb.Dht/Ping", pb.DhtPingRequest, pb.DhtPingResponse)
FIND = UnaryMethod("/swarm.pb.Dht/Find", pb.DhtFindRequest, pb.DhtFindResponse)
STORE = UnaryMethod("/swarm.pb.Dht/Store", pb.DhtStoreRequest, pb.DhtStoreResponse, roles=ALL_ROLES - {Role.MONITOR})

MAX_TARGETS = 64
"""Positions in one find request."""
MAX_STORED = 256
"""Records in one store request."""
MAX_FOUND = 8192
"""Records in one find answer."""
MAX_NEAREST = 256
"""Peers named for one target or record in an answer."""
MAX_ADDRESSES = 8
MAX_ADDRESS_CHARS = 256


@dataclass(frozen=True, slots=True)
class Want:
    """A key to be found, by somebody who knows something of it.

    Attributes:
        digest: Of the entries that the asker knows (`swarm.dht.digests`); empty for none.
        inline_bytes: Entries that are larger together are answered by their digest; 0 for no bound.
    """

    key: str
    digest: bytes = b""
    inline_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A peer's answer for one target: the nearest peers it knows, and what it holds under the key or says of it."""

    nearest: list[PeerNode]
    copies: list[Copy]
    told: Told | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A peer's answer for one record."""

    refusal: Refusal
    record_version: int
    nearest: list[PeerNode]
    other: Copy | None = None
    """Where we are the author: what another process of our identity had written in the record's place."""


class Contacts:
    """The contact table of an answer: each contact travels once."""

    def __init__(self) -> None:
        self.messages: list[pb.DhtContact] = []
        self._index: dict[bytes, int] = {}

    def add(self, nodes: Sequence[PeerNode]) -> list[int]:
        indices = []
        for node in nodes:
            index = self._index.setdefault(node.id, len(self.messages))
            if index == len(self.messages):
                contact = node.contact
                self.messages.append(pb.DhtContact(peer_id=contact.peer_id.digest, addresses=contact.addresses))
            indices.append(index)
        return indices


def to_contact(peer_id: bytes, addresses: Sequence[str]) -> Contact | None:
    """The contact that a message names; none if it is malformed."""
    if len(peer_id) != 32 or len(addresses) > MAX_ADDRESSES:
        return None
    for address in addresses:
        if len(address) > MAX_ADDRESS_CHARS:
            return None
    return _interned(peer_id, tuple(addresses))


@lru_cache(maxsize=8192)
def _interned(peer_id: bytes, addresses: tuple[str, ...]) -> Contact:
    """One object for each contact, however many answers name it."""
    return Contact(PeerId(peer_id), addresses)


def check_contacts(contacts: Sequence[pb.DhtContact], parts: int) -> None:
    """Raises `MalformedFrameError` where an answer of so many parts names too many peers."""
    if len(contacts) > MAX_NEAREST * parts:
        raise MalformedFrameError(f"An answer of {parts} parts names {len(contacts)} peers.")


def to_target(target: bytes | Want) -> pb.DhtTarget:
    """The message for a position or a key."""
    if isinstance(target, Want):
        return pb.DhtTarget(key=target.key, digest=target.digest, inline_bytes=target.inline_bytes)
    return pb.DhtTarget(position=target)


def position_in(target: pb.DhtTarget) -> bytes:
    """Where a target lies (20 bytes). Raises `MalformedFrameError`."""
    if target.key and not target.position and len(target.key.encode()) <= MAX_NAME_BYTES:
        return position_of(target.key)
    if len(target.position) != ID_BYTES or target.key:
        raise MalformedFrameError("A target is either a key or a position of 20 bytes.")
    return bytes(target.position)


def pick(contacts: list[PeerNode | None], indices: Sequence[int]) -> list[PeerNode]:
    """The usable contacts of an answer's table that one of its parts names."""
    return [node for i in indices if i < len(contacts) and (node := contacts[i]) is not None]
