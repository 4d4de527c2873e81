"""DHT peers that lie, for virtual networks: they are admitted like everybody else and misbehave when they are asked.

A malicious peer runs the real DHT, so that it is known and asked like any other; what its handlers would answer passes
through a list of behaviours, each of which spoils one thing. All of them share a `Cabal`: who belongs to it, every
record that one of them has seen, keys to forge with. Everything is seeded.

    cabal = Cabal(seed=1)
    VirtualDht(200, make=lambda i: cabal.builder(MIXES["replay"]) if i % 5 == 4 else None)
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias, TypeVar

from swarm.config import KIB, DhtConfig
from swarm.dht.bodies import encode_body
from swarm.dht.messages import FIND, MAX_STORED, MAX_TARGETS, PING, STORE
from swarm.dht.node import Dht
from swarm.dht.records import MAX_ADOPTED_VERSION, MAX_TTL_S, SIGNATURE_DOMAIN, Copy, position_of, sign_record, to_wire
from swarm.dht.refusals import Refusal
from swarm.dht.routing import ID_BYTES
from swarm.errors import SwarmError
from swarm.identity import KeyPair, PeerId
from swarm.net.transport import (
    ByteStream,
    CallContext,
    Contact,
    Request,
    Response,
    StreamHandler,
    StreamMethod,
    Transport,
    UnaryHandler,
    UnaryMethod,
)
from swarm.pb import dht_pb2 as pb
from swarm.runtime import Runtime

T = TypeVar("T")
Then: TypeAlias = Callable[[], Awaitable[T]]
"""The answer that would be given without this behaviour."""

ARCHIVE_KEYS = 4096
"""Keys whose records a cabal remembers."""
ARCHIVE_VERSIONS = 8
"""Versions of one entry that a cabal remembers: the oldest, and the newest of the others."""
INVENTED = 20
"""Contacts in an answer that a liar makes up."""
NOWHERE = "240.0.0.1:7"
"""An address at which nobody is: on a `MemoryNetwork` it refuses at once."""


class Cabal:
    """What malicious peers share.

    Args:
        seed: Of their choices and keys.

    Attributes:
        members: Their contacts.
        victims: Honest contacts that one of them has met; lies point there.
        lies: How many answers were spoilt, by behaviour.
        hole: An address where calls vanish, if there is one.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(f"cabal {seed}")
        self.key = KeyPair.from_private_bytes(hashlib.sha256(f"cabal {seed}".encode()).digest())
        self.members: dict[PeerId, Contact] = {}
        self.victims: dict[PeerId, Contact] = {}
        self.lies: dict[str, int] = {}
        self.hole = NOWHERE
        self._archive: dict[str, dict[tuple[bytes, str], list[pb.DhtRecord]]] = {}

    def builder(self, behaviours: Sequence[Behaviour]) -> Callable[[Transport, DhtConfig, Runtime], Dht]:
        """What `VirtualDht` makes a member's DHT with; the first behaviour has the last word."""

        def build(transport: Transport, config: DhtConfig, runtime: Runtime) -> Dht:
            self.members[transport.peer_id] = transport.contact
            return Dht(MaliciousTransport(transport, self, behaviours), config, runtime)

        return build

    def lied(self, behaviour: Behaviour) -> None:
        name = type(behaviour).__name__
        self.lies[name] = self.lies.get(name, 0) + 1

    def met(self, peer_id: PeerId, addresses: Sequence[str]) -> None:
        """Remember an honest peer."""
        if peer_id not in self.members and addresses and len(self.victims) < ARCHIVE_KEYS:
            self.victims[peer_id] = Contact(peer_id, tuple(addresses))

    def archive(self, records: Sequence[pb.DhtRecord]) -> None:
        """Remember what was stated, for ever."""
        for record in records:
            if record.key not in self._archive and len(self._archive) >= ARCHIVE_KEYS:
                continue
            versions = self._archive.setdefault(record.key, {}).setdefault((record.author, record.subkey), [])
            if all(known.signature != record.signature for known in versions):
                versions.append(pb.DhtRecord.FromString(record.SerializeToString()))
                versions.sort(key=lambda known: known.record_version)
                if len(versions) > ARCHIVE_VERSIONS:
                    del versions[1]

    def oldest(self, key: str) -> list[pb.DhtRecord]:
        """The oldest statement of each entry of a key that is no deletion, as fresh as its signature allows."""
        result = []
        for versions in self._archive.get(key, {}).values():
            for known in versions:
                if not known.deleted:
                    record = pb.DhtRecord.FromString(known.SerializeToString())
                    record.remaining_ms = record.ttl_ms
                    result.append(record)
                    break
        return result

    def some_record(self) -> pb.DhtRecord | None:
        """Any record that the cabal has seen."""
        if not self._archive:
            return None
        entries = self._archive[self.rng.choice(list(self._archive))]
        return self.rng.choice(entries[self.rng.choice(list(entries))])

    def near(self, position: bytes, count: int) -> list[Contact]:
        """The members nearest to a position."""
        target = int.from_bytes(position, "big")
        return sorted(self.members.values(), key=lambda c: c.peer_id.node_id ^ target)[:count]

    def invented(self, position: bytes, addresses: Sequence[str] | None = None) -> Contact:
        """Somebody who does not exist, nearer to a position than anybody who does."""
        prefix = position[: ID_BYTES - 8]
        peer_id = PeerId(prefix + self.rng.randbytes(40 - ID_BYTES))
        if addresses is None:
            victims = list(self.victims.values())
            addresses = self.rng.choice(victims).addresses if victims else (NOWHERE,)
        return Contact(peer_id, tuple(addresses))


class Behaviour:
    """One way to misbehave; this one does not. Methods get what would be answered without them as `then`."""

    async def ping(
        self, cabal: Cabal, request: pb.DhtPingRequest, then: Then[pb.DhtPingResponse]
    ) -> pb.DhtPingResponse:
        return await then()

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        return await then()

    async def store(
        self, cabal: Cabal, request: pb.DhtStoreRequest, then: Then[pb.DhtStoreResponse]
    ) -> pb.DhtStoreResponse:
        return await then()


class Silent(Behaviour):
    """Takes the request and never answers, except pings: it wants to stay in tables."""

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        cabal.lied(self)
        await asyncio.get_running_loop().create_future()
        return await then()

    async def store(
        self, cabal: Cabal, request: pb.DhtStoreRequest, then: Then[pb.DhtStoreResponse]
    ) -> pb.DhtStoreResponse:
        cabal.lied(self)
        await asyncio.get_running_loop().create_future()
        return await then()


class Forgetful(Behaviour):
    """Says that it keeps records, and keeps nothing."""

    async def store(
        self, cabal: Cabal, request: pb.DhtStoreRequest, then: Then[pb.DhtStoreResponse]
    ) -> pb.DhtStoreResponse:
        cabal.lied(self)
        return pb.DhtStoreResponse(results=[pb.DhtStored() for _ in request.records])


class Denying(Behaviour):
    """Refuses every record as outdated, by a version that no author has reached."""

    async def store(
        self, cabal: Cabal, request: pb.DhtStoreRequest, then: Then[pb.DhtStoreResponse]
    ) -> pb.DhtStoreResponse:
        cabal.lied(self)
        results = []
        for record in request.records:
            version = min(MAX_ADOPTED_VERSION, record.record_version + 1 + cabal.rng.randrange(1 << 20))
            results.append(pb.DhtStored(status=Refusal.OUTDATED, record_version=version))
        return pb.DhtStoreResponse(results=results)


class Expiring(Behaviour):
    """Refuses every record as one that has expired here in just this version: votes for the end of what lives."""

    async def store(
        self, cabal: Cabal, request: pb.DhtStoreRequest, then: Then[pb.DhtStoreResponse]
    ) -> pb.DhtStoreResponse:
        cabal.lied(self)
        results = [pb.DhtStored(status=Refusal.OUTDATED, record_version=r.record_version) for r in request.records]
        return pb.DhtStoreResponse(results=results)


class Neighbours(Behaviour):
    """Replaces the contacts of find answers; a subclass says by whom."""

    def contacts(self, cabal: Cabal, position: bytes, true: list[Contact]) -> list[Contact]:
        """The contacts to name for a position, given those that would be named."""
        return true

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        cabal.lied(self)
        answer = await then()
        true = [Contact(PeerId(c.peer_id), tuple(c.addresses)) for c in answer.contacts]
        del answer.contacts[:]
        for target, found in zip(request.targets, answer.found, strict=True):
            position = position_of(target.key) if target.key else target.position
            named = self.contacts(cabal, position, [true[i] for i in found.nearest])
            first = len(answer.contacts)
            answer.contacts.extend(pb.DhtContact(peer_id=c.peer_id.digest, addresses=c.addresses) for c in named)
            del found.nearest[:]
            found.nearest.extend(range(first, first + len(named)))
        return answer


class Hiding(Neighbours):
    """Knows nobody."""

    def contacts(self, cabal: Cabal, position: bytes, true: list[Contact]) -> list[Contact]:
        return []


class Colluding(Neighbours):
    """Names only other members, the nearest ones: an eclipse around every key."""

    def contacts(self, cabal: Cabal, position: bytes, true: list[Contact]) -> list[Contact]:
        return cabal.near(position, INVENTED)


class Inventing(Neighbours):
    """Names peers that do not exist, nearer than anybody, at addresses of victims or where calls vanish.

    Args:
        hole: They are said to be where calls vanish; else where honest peers listen.
    """

    def __init__(self, *, hole: bool = False) -> None:
        self._hole = hole

    def contacts(self, cabal: Cabal, position: bytes, true: list[Contact]) -> list[Contact]:
        addresses = (cabal.hole,) if self._hole else None
        return [cabal.invented(position, addresses) for _ in range(INVENTED)]


class Readdressing(Neighbours):
    """Names the right peers at wrong addresses, so that others fail to reach them and hold it against them."""

    def contacts(self, cabal: Cabal, position: bytes, true: list[Contact]) -> list[Contact]:
        return [Contact(c.peer_id, cabal.invented(position).addresses) for c in true]


class Omitting(Behaviour):
    """Holds records and does not show them."""

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        cabal.lied(self)
        answer = await then()
        for found in answer.found:
            _clear(found)
        return answer


class Replaying(Behaviour):
    """Shows the oldest version of every record that a member has ever seen, with its whole lifetime before it."""

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        answer = await then()
        for target, found in zip(request.targets, answer.found, strict=True):
            old = cabal.oldest(target.key) if target.key else []
            if old:
                cabal.lied(self)
                _clear(found)
                found.records.extend(old[:MAX_STORED])
        return answer


class Echoing(Behaviour):
    """Says that it holds just what the asker knows, for as long as can be, and holds nothing."""

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        answer = await then()
        for target, found in zip(request.targets, answer.found, strict=True):
            if target.key:
                cabal.lied(self)
                _clear(found)
                if target.digest:
                    found.digest = target.digest
                    found.remaining_ms.append(int(MAX_TTL_S * 1000))
        return answer


class Forging(Behaviour):
    """Adds records that nobody has signed, or not for this run, this key or this format, and some beyond the limits."""

    def __init__(self, run_id: bytes | None = None) -> None:
        self._foreign_run = run_id or hashlib.sha256(b"another run").digest()

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        answer = await then()
        for target, found in zip(request.targets, answer.found, strict=True):
            if target.key:
                cabal.lied(self)
                found.records.extend(forgeries(cabal, target.key, list(found.records), self._foreign_run))
        return answer


class Rambling(Behaviour):
    """Answers find with what no honest peer would: endless pages, contacts out of range, a part too few."""

    async def find(
        self, cabal: Cabal, request: pb.DhtFindRequest, then: Then[pb.DhtFindResponse]
    ) -> pb.DhtFindResponse:
        cabal.lied(self)
        answer = await then()
        choice = cabal.rng.randrange(3)
        for found in answer.found:
            if choice == 0:
                found.more = True
                found.records.extend(self._page(cabal))
            elif choice == 1:
                found.nearest.extend([1 << 31, (1 << 32) - 1] * 64)
        if choice == 2:
            del answer.found[0]
        return answer

    def _page(self, cabal: Cabal) -> list[pb.DhtRecord]:
        record = cabal.some_record()
        return [] if record is None else [record] * 64


def _clear(found: pb.DhtFound) -> None:
    """Nothing is held here. (Everything but contacts goes, also what later versions of the message add.)"""
    nearest = list(found.nearest)
    found.Clear()
    found.nearest.extend(nearest)


def forgeries(cabal: Cabal, key: str, true: Sequence[pb.DhtRecord], foreign_run: bytes) -> list[pb.DhtRecord]:
    """Records for a key, each refused for a reason of its own.

    Args:
        true: Records of the key, to be altered.
        foreign_run: A run id other than the reader's.
    """
    model = true[0] if true else cabal.some_record()
    forged = []
    if model is not None:
        for change in (
            {
                "key": key,
                "body": encode_body("forged"),
                "record_version": model.record_version + 1,
            },  # its signature breaks
            {"key": key, "record_version": 1 << 63},
            {"key": key, "ttl_ms": (1 << 32) - 1, "remaining_ms": (1 << 32) - 1},
            {"key": f"{key}/other"},
            {"key": key, "remaining_ms": 0},
            {"key": key, "signature": b""},
            {"key": key, "author": cabal.key.public_key},
        ):
            forged.append(_changed(model, change))
    own = sign_record(cabal.key, foreign_run, key, "", encode_body("foreign"), 1, 1000)
    forged.append(to_wire(Copy(own, 1.0), 0.0))
    forged.append(_changed(forged[-1], {"body": bytes(8 * KIB)}))
    future = cabal.key.sign(SIGNATURE_DOMAIN, b"a later format" + key.encode())
    forged.append(_changed(forged[-2], {"signature": future, "format": 99}))
    cabal.rng.shuffle(forged)  # whoever finds the first that proves the lie looks no further
    return forged


def _changed(model: pb.DhtRecord, change: dict[str, Any]) -> pb.DhtRecord:
    record = pb.DhtRecord.FromString(model.SerializeToString())
    for name, value in change.items():
        setattr(record, name, value)
    return record


MIXES: dict[str, tuple[Behaviour, ...]] = {
    "silent": (Silent(),),
    "forgetful": (Forgetful(), Omitting()),
    "hide": (Hiding(), Omitting()),
    "collude": (Colluding(), Omitting(), Forgetful()),
    "invent": (Inventing(), Omitting()),
    "unroutable": (Inventing(hole=True),),
    "readdress": (Readdressing(),),
    "replay": (Replaying(), Forgetful()),
    "collude-replay": (Colluding(), Replaying(), Forgetful()),
    "echo": (Echoing(), Forgetful()),
    "forge": (Forging(),),
    "deny": (Denying(), Omitting()),
    "expire": (Expiring(), Omitting()),
    "ramble": (Rambling(),),
}
"""Kinds of malicious peers by name."""


class MaliciousTransport(Transport):
    """A transport whose DHT handlers lie; everything else is the transport below.

    Args:
        below: The peer's transport.
        cabal: Whom the peer belongs to.
        behaviours: What it does to each answer; the first has the last word.
    """

    def __init__(self, below: Transport, cabal: Cabal, behaviours: Sequence[Behaviour]) -> None:
        self.identity = below.identity
        self.run_id = below.run_id
        self.config = below.config
        self.runtime = below.runtime
        self.deadlines = below.deadlines
        self.stats = below.stats
        self._below = below
        self._cabal = cabal
        self._behaviours = tuple(behaviours)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    @property
    def contact(self) -> Contact:
        return self._below.contact

    def serve(self, method: UnaryMethod[Any, Any], handler: UnaryHandler) -> None:
        names = {PING.path: "ping", FIND.path: "find", STORE.path: "store"}
        name = names.get(method.path)
        self._below.serve(method, handler if name is None else self._spoilt(name, handler))

    def _spoilt(self, name: str, handler: UnaryHandler) -> UnaryHandler:
        async def answer(context: CallContext, request: Any) -> Any:
            self._cabal.met(context.peer_id, request.sender)
            if name == "store":
                self._cabal.archive(request.records)

            def honest() -> Awaitable[Any]:
                return handler(context, request)

            then: Then[Any] = honest
            for behaviour in reversed(self._behaviours):
                then = _link(getattr(behaviour, name), self._cabal, request, then)
            return await then()

        return answer

    def serve_stream(self, method: StreamMethod, handler: StreamHandler) -> None:
        self._below.serve_stream(method, handler)

    async def start(self) -> None:
        await self._below.start()

    async def dial(self, address: str, expect: PeerId | None = None) -> Contact:
        return await self._below.dial(address, expect)

    def reached(self, peer_id: PeerId) -> Contact | None:
        return self._below.reached(peer_id)

    async def call(
        self, to: Contact, method: UnaryMethod[Request, Response], request: Request, *, timeout_s: float | None = None
    ) -> Response:
        return await self._below.call(to, method, request, timeout_s=timeout_s)

    def stream(self, to: Contact, method: StreamMethod, *, timeout_s: float) -> AbstractAsyncContextManager[ByteStream]:
        return self._below.stream(to, method, timeout_s=timeout_s)

    def end_sessions(self, peer_id: PeerId) -> None:
        self._below.end_sessions(peer_id)

    async def close(self, grace_s: float = 1.0) -> None:
        await self._below.close(grace_s)


def _link(method: Callable[..., Awaitable[T]], cabal: Cabal, request: Any, then: Then[T]) -> Then[T]:
    return lambda: method(cabal, request, then)


# Flooding: what a peer does of its own accord, request after request


async def flood_stores(
    transport: Transport, cabal: Cabal, victim: Contact, requests: int, authors: int
) -> AsyncIterator[str]:
    """Store requests full of validly signed records by made-up authors under made-up keys.

    Yields:
        For each request "" if it was answered, else the class of the error that refused it.
    """
    keys = [
        KeyPair.from_private_bytes(hashlib.sha256(b"flood" + cabal.rng.randbytes(8)).digest()) for _ in range(authors)
    ]
    for number in range(requests):
        records = []
        for i in range(MAX_STORED):
            author = keys[(number * MAX_STORED + i) % authors]
            name = f"flood/{number}/{i}"
            record = sign_record(author, transport.run_id, name, "", encode_body(bytes(1024)), 1, 86_400_000)
            records.append(to_wire(Copy(record, 86_400.0), 0.0))
        yield await _attempt(transport, victim, STORE, pb.DhtStoreRequest(records=records))


async def flood_finds(transport: Transport, cabal: Cabal, victim: Contact, requests: int) -> AsyncIterator[str]:
    """Find requests for as many positions as one may name; yields like `flood_stores`."""
    for _ in range(requests):
        targets = [pb.DhtTarget(position=cabal.rng.randbytes(ID_BYTES)) for _ in range(MAX_TARGETS)]
        yield await _attempt(transport, victim, FIND, pb.DhtFindRequest(targets=targets, count=INVENTED))


async def flood_oversized(transport: Transport, cabal: Cabal, victim: Contact, requests: int) -> AsyncIterator[str]:
    """Requests beyond the limits: targets, records, counts, bodies; yields like `flood_stores`."""
    record = to_wire(Copy(sign_record(cabal.key, transport.run_id, "big", "", b"\xc0", 1, 60_000), 60.0), 0.0)
    for number in range(requests):
        choice = number % 3
        if choice == 0:
            targets = [pb.DhtTarget(position=bytes(ID_BYTES))] * (MAX_TARGETS * 8)
            yield await _attempt(transport, victim, FIND, pb.DhtFindRequest(targets=targets, count=(1 << 32) - 1))
        elif choice == 1:
            yield await _attempt(transport, victim, STORE, pb.DhtStoreRequest(records=[record] * (MAX_STORED * 4)))
        else:
            big = _changed(record, {"body": bytes(512 * KIB)})
            yield await _attempt(transport, victim, STORE, pb.DhtStoreRequest(records=[big]))


async def _attempt(
    transport: Transport, victim: Contact, method: UnaryMethod[Request, Response], request: Request
) -> str:
    try:
        await transport.call(victim, method, request, timeout_s=10.0)
    except SwarmError as error:
        return type(error).__name__
    return ""
