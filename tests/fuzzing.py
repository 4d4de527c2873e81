"""Damaged input: bytes a little off what is right, and DHT messages of that kind fed to the real handlers.

The default suite feeds a few hundred from a fixed seed; tests/long goes on for minutes with new ones.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from google.protobuf.message import DecodeError, Message

from swarm.config import PeerConfig
from swarm.dht.bodies import encode_body
from swarm.dht.messages import FIND, PING, STORE, Want
from swarm.dht.records import Copy, position_of, sign_record, to_wire
from swarm.dht.routing import PeerNode
from swarm.dht.schemas import Schema, integer
from swarm.endpoint import Endpoint
from swarm.errors import RateLimitedError, RemoteFailureError, SwarmError
from swarm.identity import KeyPair
from swarm.net.transport import CallContext, Contact
from swarm.pb import dht_pb2 as pb
from tests.support import RUN_ID, World, deterministic_identity

CONFIG = PeerConfig.preset(
    "local",
    dht={"max_work_per_s": 1e9, "max_entries": 200, "max_entries_per_author": 50},
    transport={"max_calls_per_s": 1e9},
)


def damaged(good: bytes, rng: random.Random) -> bytes:
    """Some bytes of `good` changed, removed, inserted, set to large lengths, cut off or repeated."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0 if data:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 9)]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                data[at : at + 4] = rng.choice(
                    (b"\xff\xff\xff\xff", b"\xdd\xff\xff\xff", b"\xc9\x7f\xff\xff", b"\0" * 4)
                )
            case _:
                data = data[:at] if rng.random() < 0.5 else data + data[at:]
    return bytes(data)


def signed(author: KeyPair, key: str, version: int, body: bytes, **more: Any) -> pb.DhtRecord:
    record = sign_record(author, RUN_ID, key, more.pop("subkey", ""), body, version, 60_000, **more)
    return to_wire(Copy(record, 60.0), 0.0)


class DhtFuzz:
    """A peer that answers calls with damaged requests, and reads from one whose answers are damaged."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._author = deterministic_identity("fuzz author")
        self._seen = 0

    async def open(self) -> None:
        """Start the peers."""
        self.victim = await self._world.endpoint(config=CONFIG)
        self.liar = await self._world.endpoint(bootstrap=[self.victim.contact], config=CONFIG)
        self.victim.dht.declare("steps", Schema(required={"step": integer(0, 9)}))
        self._answer: bytes = b""
        await self.victim.dht.put("k", "held", ttl_s=600)

        async def answer_find(_context: CallContext, _request: Message) -> pb.DhtFindResponse:
            return pb.DhtFindResponse.FromString(self._answer)

        async def answer_store(_context: CallContext, _request: Message) -> pb.DhtStoreResponse:
            return pb.DhtStoreResponse.FromString(self._answer)

        self.liar.transport.serve(FIND, answer_find)
        self.liar.transport.serve(STORE, answer_store)

    def _record(self, rng: random.Random) -> pb.DhtRecord:
        """A record that is right, or signed by somebody who has no regard for bodies."""
        self._seen += 1
        body = rng.choice((encode_body({"step": 1}), encode_body(["x", 1.5, {"a": b"b"}]), rng.randbytes(20), b""))
        if rng.random() < 0.3:
            body = damaged(body or b"\xdd", rng)[:4096]
        key = rng.choice(("k", "steps/a", "steps/a", "another key"))
        return signed(self._author, key, self._seen, body, subkey=rng.choice(("", "a", "ß")))

    def _contacts(self, rng: random.Random) -> list[pb.DhtContact]:
        return [pb.DhtContact(peer_id=rng.randbytes(32), addresses=["127.0.0.1:1"]) for _ in range(rng.randrange(4))]

    def _request(self, rng: random.Random) -> tuple[Any, Message]:
        sender = [f"127.0.0.1:{rng.randrange(70_000)}"]
        targets = [
            pb.DhtTarget(key="k", digest=rng.randbytes(rng.choice((0, 16))), inline_bytes=rng.randrange(2) * 500),
            pb.DhtTarget(position=position_of("x")),
            pb.DhtTarget(key="steps/a", after=rng.randbytes(rng.randrange(40))),
        ]
        return rng.choice(
            (
                (PING, pb.DhtPingRequest(sender=sender)),
                (FIND, pb.DhtFindRequest(sender=sender, targets=targets, count=rng.choice((0, 5, 2**32 - 1)))),
                (STORE, pb.DhtStoreRequest(sender=sender, records=[self._record(rng) for _ in range(2)], count=5)),
            )
        )

    async def ask(self, rng: random.Random) -> bool:
        """Call the victim with a damaged request. False if the message could not even be parsed or was refused."""
        method, good = self._request(rng)
        try:
            request = type(good).FromString(damaged(good.SerializeToString(), rng))
        except DecodeError:
            return False  # the transport refuses these
        try:
            await self.liar.transport.call(self.victim.contact, method, request, timeout_s=5.0)
        except (RemoteFailureError, RateLimitedError):
            raise  # the handler has failed, which no input may bring about; or it was not even called
        except SwarmError:
            return False
        return True

    async def answer(self, rng: random.Random) -> bool:
        """Have the victim read from, and store with, a peer whose answer is damaged. False if it was refused."""
        node = PeerNode(Contact(self.liar.peer_id, self.liar.contact.addresses))
        protocol = self.victim.dht._protocol
        contacts = self._contacts(rng)
        if rng.random() < 0.7:
            found = [
                pb.DhtFound(nearest=[0, 1], records=[self._record(rng)], more=rng.random() < 0.2),
                pb.DhtFound(digest=rng.randbytes(16), remaining_ms=[1, 2**32 - 1]),
            ]
            good: Message = pb.DhtFindResponse(contacts=contacts, found=found)
        else:
            part = pb.DhtStored(status=rng.randrange(20), record_version=2**63, nearest=[0], other=self._record(rng))
            good = pb.DhtStoreResponse(contacts=contacts, results=[part])
        data = damaged(good.SerializeToString(), rng)
        try:
            type(good).FromString(data)
        except DecodeError:
            return False
        self._answer = data
        try:
            if isinstance(good, pb.DhtFindResponse):
                await protocol.find(node, [Want("k"), Want("k", bytes(16), 500)], 5)
            else:
                record = sign_record(self._author, RUN_ID, "k", "", b"\x01", 1, 60_000)
                await protocol.store(node, [Copy(record, self.victim.runtime.clock.time() + 60.0)], 5)
        except SwarmError:
            return False
        return True

    async def still_well(self) -> bool:
        """Whether the victim still works, and holds no more than it may."""
        await self.victim.dht.put("after", 1, ttl_s=60)
        return self.victim.dht.held <= CONFIG.dht.max_entries and await reads(self.victim, "after") == [1]


async def reads(peer: Endpoint, key: str) -> list[Any]:
    return [entry.body for entry in await peer.dht.get(key) if entry.author == peer.peer_id]


async def rounds(fuzz: DhtFuzz, rng: random.Random, count: int) -> tuple[int, int]:
    """So many damaged requests and answers; how many were tried and how many refused."""
    refused = 0
    for _ in range(count):
        refused += not await fuzz.ask(rng)
        refused += not await fuzz.answer(rng)
        await asyncio.sleep(0)
    return 2 * count, refused
