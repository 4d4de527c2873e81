"""What the DHT stands: liars among the peers, a network cut in two, floods, and many peers of one owner. Virtual time.

Every function runs one seeded scenario on the current `VirtualLoop` and returns its figures; the bars that they must
reach are asserted by tests and printed by `benchmarks.dht_virtual`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.clock import LoopClock
from swarm.config import DhtConfig, PeerConfig
from swarm.dht.events import ContactDropped, RecordRefused
from swarm.dht.node import Dht
from swarm.dht.records import Entry
from swarm.endpoint import Endpoint
from swarm.errors import SwarmError
from swarm.net.transport import Transport
from swarm.runtime import Runtime, TaskFailed
from swarm.simulation.adversaries import MIXES, Cabal
from swarm.simulation.virtual import WALL_EPOCH_S
from swarm.simulation.virtual_dht import Builder, VirtualDht

T = TypeVar("T")

SETTLE_S = 90.0
"""Virtual time between the last join and the first operation, so that upkeep has run a few times."""
AT_ONCE = 50
"""Operations under way together."""
LONG_S = 3600.0
"""Lifetime of records that outlive the scenario."""
SHORT_S = 60.0
"""Lifetime of records that expire in it."""


@dataclass(frozen=True)
class MaliciousFigures:
    """Honest peers among liars.

    Attributes:
        puts, gets: How many were tried; `put_rate` and `get_rate` are the parts that succeeded. A put counts when a
            peer took it, a get when it returned the author's latest statement and nothing else.
        forged: Entries returned that no author had signed for this key and run.
        replayed: Entries returned in an older version than the latest that was put.
        replayed_to_witness: Those returned to a reader that had itself seen a newer one.
        deleted, expired: Entries returned after their deletion or the end of their lifetime.
        missing: Live entries that a get did not return.
        messages_per_put, messages_per_get: Requests sent and answers received by the acting peer for its operations.
        lies: Spoilt answers by kind.
        refused: Records that honest peers refused, by reason.
        dropped: Contacts that left honest tables.
    """

    peers: int
    fraction: float
    puts: int
    put_rate: float
    gets: int
    get_rate: float
    forged: int
    replayed: int
    replayed_to_witness: int
    deleted: int
    expired: int
    missing: int
    messages_per_put: float
    messages_per_get: float
    slowest_put_s: float
    slowest_get_s: float
    median_get_s: float
    failures: int
    lies: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    dropped: int = 0


@dataclass
class _Tally:
    puts: list[bool] = field(default_factory=list)
    gets: list[bool] = field(default_factory=list)
    put_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)
    put_messages: list[int] = field(default_factory=list)
    get_messages: list[int] = field(default_factory=list)
    bad: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str) -> None:
        self.bad[kind] = self.bad.get(kind, 0) + 1


async def together(
    act: Callable[..., Awaitable[T]], each: Iterable[tuple[Any, ...]], at_once: int = AT_ONCE
) -> list[T]:
    """`act(*arguments)` for each, so many at a time; the results in order."""
    arguments = list(each)
    results: list[T] = []
    for first in range(0, len(arguments), at_once):
        results += await asyncio.gather(*(act(*one) for one in arguments[first : first + at_once]))
    return results


def rate(outcomes: Iterable[bool]) -> float:
    """The part of them that is true."""
    results = list(outcomes)
    return sum(results) / len(results)


class Ledger:
    """What honest authors have really stated, against which answers are judged.

    Args:
        swarm: The network.
    """

    def __init__(self, swarm: VirtualDht) -> None:
        self._swarm = swarm
        self.tally = _Tally()
        self.stated: dict[str, list[int]] = {}
        """Key: numbers stated so far, oldest first; its author is `author[key]`."""
        self.author: dict[str, Endpoint] = {}
        self.deleted: dict[str, None] = {}
        self.expires_s: dict[str, float] = {}
        self.seen: dict[tuple[bytes, str], int] = {}
        """(reader, key): highest number that the reader got."""

    async def put(self, author: Endpoint, key: str, number: int, ttl_s: float) -> bool:
        """State a number under a key, renewed if it is to live long; whether anybody took it."""
        self.author[key] = author
        self.stated.setdefault(key, []).append(number)
        loop, messages, renew = asyncio.get_running_loop(), author.dht.stats.messages, ttl_s >= LONG_S
        begun_s = loop.time()
        try:
            await author.dht.put(key, number, ttl_s=ttl_s, renew=renew)
            done = True
        except SwarmError:
            done = False
        # a holder's refusal makes the author sign anew, so that the lifetime may begin late in the operation
        self.expires_s[key] = math.inf if renew else loop.time() + ttl_s
        self.tally.puts.append(done)
        self.tally.put_s.append(loop.time() - begun_s)
        self.tally.put_messages.append(author.dht.stats.messages - messages)
        return done

    async def delete(self, key: str) -> None:
        """Withdraw a key's statement."""
        await self.author[key].dht.delete(key)
        self.deleted[key] = None

    async def get(self, reader: Endpoint, key: str) -> bool:
        """Read a key and judge the answer; whether it was right."""
        loop, messages = asyncio.get_running_loop(), reader.dht.stats.messages
        begun_s = loop.time()
        entries = await reader.dht.get(key)
        self.tally.get_s.append(loop.time() - begun_s)
        self.tally.get_messages.append(reader.dht.stats.messages - messages)
        right = self._judge(reader, key, entries, begun_s)
        self.tally.gets.append(right)
        return right

    def _judge(self, reader: Endpoint, key: str, entries: Sequence[Entry], begun_s: float) -> bool:
        author, stated = self.author[key], self.stated[key]
        bad, found = self.tally, False
        right = True
        for entry in entries:
            if entry.author != author.peer_id or entry.body not in stated:
                bad.count("forged")
                right = False
            elif key in self.deleted:
                bad.count("deleted")
                right = False
            elif begun_s > self.expires_s[key]:
                bad.count("expired")
                right = False
            elif entry.body != stated[-1]:
                bad.count("replayed")
                right = False
                if self.seen.get((reader.peer_id.digest, key), 0) > entry.body:
                    bad.count("replayed_to_witness")
            else:
                found = True
            if isinstance(entry.body, int):
                seen = (reader.peer_id.digest, key)
                self.seen[seen] = max(entry.body, self.seen.get(seen, 0))
        gone = key in self.deleted or begun_s > self.expires_s[key]
        if not found and not gone:
            bad.count("missing")
        return right and (found or gone)


def infiltrated(
    cabal: Cabal, kinds: Sequence[str], fraction: float, peers: int, seed: int, *, wrong_day: bool = False
) -> Callable[[int], Builder | None]:
    """`VirtualDht`'s `make`: a part of the peers is malicious, never the first, through which the others begin.

    Args:
        kinds: Names in `MIXES`, dealt out in turn.
        wrong_day: The second peer's wall clock is a day fast (it is honest).
    """
    rng = random.Random(f"liars {seed}")
    chosen = rng.sample(range(2, peers), round(fraction * peers))
    kind_of = {number: kinds[i % len(kinds)] for i, number in enumerate(chosen)}

    def make(number: int) -> Builder | None:
        if number in kind_of:
            return cabal.builder(MIXES[kind_of[number]])
        return _a_day_fast if wrong_day and number == 1 else None

    return make


def _a_day_fast(transport: Transport, config: DhtConfig, runtime: Runtime) -> Dht:
    runtime.clock = LoopClock(asyncio.get_running_loop(), WALL_EPOCH_S + 86_400.0)
    return Dht(transport, config, runtime)


async def malicious(
    peers: int,
    fraction: float,
    *,
    kinds: Sequence[str] = tuple(MIXES),
    records: int = 100,
    seed: int = 0,
    clock_skew_s: float = 0.0,
    loss: float = 0.0,
    config: PeerConfig | None = None,
) -> MaliciousFigures:
    """Honest peers put, read, replace, delete and let expire, while a part of all peers lies in every way it can.

    Args:
        peers: All of them.
        fraction: So many are malicious.
        kinds: Names in `MIXES`, dealt out in turn.
        records: Keys of each sort: updated, deleted, expired.
        clock_skew_s: How far apart wall clocks are; if at all, one more is a day wrong.
        loss: Part of the calls that time out.
    """
    cabal = Cabal(seed)
    make = infiltrated(cabal, kinds, fraction, peers, seed, wrong_day=clock_skew_s > 0)
    async with VirtualDht(peers, seed=seed, config=config, loss=loss, clock_skew_s=clock_skew_s, make=make) as swarm:
        (vanished,) = await swarm.grow(1)
        cabal.hole = vanished.contact.addresses[0]
        swarm.kill(vanished, silent=True)
        honest = [peer for peer in swarm.peers if peer.peer_id not in cabal.members]
        rng = swarm.rng
        ledger = Ledger(swarm)
        await asyncio.sleep(SETTLE_S)

        def authors() -> list[Endpoint]:
            return [rng.choice(honest) for _ in range(records)]

        async def read_all(keys: Sequence[str], readers: Sequence[Endpoint]) -> None:
            await together(ledger.get, zip(readers, keys, strict=True))

        updated, deleted, expired = ([f"{sort}/{i}" for i in range(records)] for sort in ("update", "delete", "expire"))
        for keys, ttl_s in ((updated, LONG_S), (deleted, LONG_S), (expired, SHORT_S)):
            await together(ledger.put, [(author, key, 1, ttl_s) for author, key in zip(authors(), keys, strict=True)])
        witnesses = authors()
        for keys in (updated, deleted):
            await read_all(keys, witnesses)
            await read_all(keys, authors())
        await together(ledger.put, [(ledger.author[key], key, 2, LONG_S) for key in updated])
        await together(ledger.delete, [(key,) for key in deleted])
        for keys in (updated, deleted):
            await read_all(keys, authors())
        await read_all(updated, witnesses)
        await asyncio.sleep(max(0.0, max(ledger.expires_s[k] for k in expired) + 1 - asyncio.get_running_loop().time()))
        for keys in (expired, updated, deleted):
            await read_all(keys, authors())
            await read_all(keys, witnesses)
        return _figures(peers, fraction, ledger.tally, cabal, honest)


def _figures(peers: int, fraction: float, tally: _Tally, cabal: Cabal, honest: Sequence[Endpoint]) -> MaliciousFigures:
    refused: dict[str, int] = {}
    for peer in honest:
        for kept in peer.runtime.events.recent(RecordRefused):
            assert isinstance(kept.event, RecordRefused)
            reason = kept.event.reason
            refused[reason] = refused.get(reason, 0) + 1
    bad = tally.bad
    return MaliciousFigures(
        peers=peers,
        fraction=fraction,
        puts=len(tally.puts),
        put_rate=sum(tally.puts) / len(tally.puts),
        gets=len(tally.gets),
        get_rate=sum(tally.gets) / len(tally.gets),
        forged=bad.get("forged", 0),
        replayed=bad.get("replayed", 0),
        replayed_to_witness=bad.get("replayed_to_witness", 0),
        deleted=bad.get("deleted", 0),
        expired=bad.get("expired", 0),
        missing=bad.get("missing", 0),
        messages_per_put=sum(tally.put_messages) / len(tally.put_messages),
        messages_per_get=sum(tally.get_messages) / len(tally.get_messages),
        slowest_put_s=max(tally.put_s),
        slowest_get_s=max(tally.get_s),
        median_get_s=sorted(tally.get_s)[len(tally.get_s) // 2],
        failures=sum(peer.runtime.events.count(TaskFailed) for peer in honest),
        lies=dict(sorted(cabal.lies.items())),
        refused=refused,
        dropped=sum(peer.runtime.events.count(ContactDropped) for peer in honest),
    )
