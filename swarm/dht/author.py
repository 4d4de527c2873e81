"""A peer as the author of records: it signs them, chooses their versions, renews and deletes them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.dht.operations import Operations
from swarm.dht.records import (
    MAX_ADOPTED_VERSION,
    MAX_VERSION,
    Copy,
    Record,
    Refusal,
    check_names,
    refused,
    sign_record,
)
from swarm.identity import KeyPair

ATTEMPTS = 3
"""Times that a record is signed anew because a holder knows a higher version."""
INLINE_SIGNATURES = 8
"""So many records are signed on the loop (0.02 ms each); more of them elsewhere."""
JITTER = 0.2
"""Renewals come up to this fraction early, so that they do not all come together."""
EAGER = 0.25
"""A renewal that nobody took is repeated after this part of the usual interval."""
TOGETHER = 0.1
"""Records due within this part of the republish interval are renewed together."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A statement to sign: an entry's body and lifetime, or its deletion."""

    key: str
    subkey: str
    body: bytes
    ttl_ms: int
    renew: bool
    deleted: bool = False


@dataclass(slots=True)
class _Published:
    draft: Draft
    record: Record
    expires_s: float
    due_s: float


class Author:
    """Our own records, from publication until they expire or are deleted.

    Args:
        operations: The network.
        identity: Signs.
        run_id: Bound into every signature.
    """

    def __init__(self, operations: Operations, identity: KeyPair, run_id: bytes) -> None:
        self._do = operations
        self._identity = identity
        self._run_id = run_id
        self._published: dict[tuple[str, str], _Published] = {}
        self._earlier = asyncio.Event()
        self._next_s = math.inf

    def own(self, key: str) -> list[Copy]:
        """Our live records of a key, deletions included."""
        now_s = self._now()
        mine = [p for (k, _), p in self._published.items() if k == key and p.expires_s > now_s]
        return [Copy(p.record, p.expires_s) for p in mine]

    def _now(self) -> float:
        return self._do.runtime.clock.time()

    async def publish(self, drafts: Sequence[Draft]) -> list[int]:
        """Sign and place; how many peers hold each.

        Raises:
            RecordRefusedError: One of them is too large or malformed, or we have too many; nothing was published.
        """
        for draft in drafts:
            check_names(draft.key, draft.subkey)
            if len(draft.body) > self._do.config.max_body_bytes:
                raise refused(
                    Refusal.TOO_LARGE,
                    f"The body has {len(draft.body)} bytes, more than {self._do.config.max_body_bytes}.",
                    "Split it over several subkeys, or store where to fetch it from.",
                )
        self._check_quota(drafts)
        accepted = [0] * len(drafts)
        todo = list(range(len(drafts)))
        floors = [0] * len(drafts)
        for _ in range(ATTEMPTS):
            copies = await self._sign([drafts[i] for i in todo], [floors[i] for i in todo])
            placed = await self._do.place(copies)
            again: list[int] = []
            for i, copy in zip(todo, copies, strict=True):
                outcome = placed[copy.record.place_id]
                accepted[i] = max(accepted[i], outcome.accepted)
                newest = self._published.get((copy.record.key, copy.record.subkey))
                if newest is None or newest.record is not copy.record:
                    continue  # we have published a newer one meanwhile
                if copy.record.record_version <= outcome.outdated_by <= MAX_ADOPTED_VERSION:
                    floors[i] = outcome.outdated_by
                    again.append(i)
            if not again:
                break
            todo = again
        return accepted

    def _check_quota(self, drafts: Sequence[Draft]) -> None:
        now_s, limit = self._now(), self._do.config.max_entries_per_author
        names = {(draft.key, draft.subkey): None for draft in drafts}
        if len(self._published) + len(names) > limit:
            self._published = {n: p for n, p in self._published.items() if p.expires_s > now_s}
        if len(self._published) + sum(name not in self._published for name in names) > limit:
            raise refused(Refusal.QUOTA, f"One peer publishes at most {limit} entries.", "Delete some.")

    async def _sign(self, drafts: Sequence[Draft], floors: Sequence[int]) -> list[Copy]:
        """Records with versions above everything we know of: our last one, our wall clock, and what a holder named."""
        wall_ms = max(1, min(int(self._do.runtime.clock.wall() * 1000), MAX_ADOPTED_VERSION))
        versions = []
        for draft, floor in zip(drafts, floors, strict=True):
            last = self._published.get((draft.key, draft.subkey))
            known = max(floor, last.record.record_version if last else 0)
            versions.append(min(MAX_VERSION - 1, max(known + 1, wall_ms)))

        def sign_all() -> list[Record]:
            return [
                sign_record(self._identity, self._run_id, d.key, d.subkey, d.body, version, d.ttl_ms, deleted=d.deleted,
                            max_body_bytes=self._do.config.max_body_bytes)
                for d, version in zip(drafts, versions, strict=True)
            ]  # fmt: skip

        records = sign_all() if len(drafts) <= INLINE_SIGNATURES else await self._do.runtime.offload(sign_all)
        now_s = self._now()
        copies = []
        for draft, record in zip(drafts, records, strict=True):
            copy = Copy(record, now_s + record.ttl_ms / 1000)
            due_s = now_s + self._interval_s(draft) if draft.renew else math.inf
            self._published[draft.key, draft.subkey] = _Published(draft, record, copy.expires_s, due_s)
            if due_s < self._next_s:
                self._earlier.set()
            copies.append(copy)
        return copies

    def _interval_s(self, draft: Draft) -> float:
        config = self._do.config
        return draft.ttl_ms / 1000 * config.republish_fraction * (1 - JITTER * self._do.runtime.rng.random())

    async def delete(self, key: str, subkey: str) -> None:
        """Replace our entry by a tombstone that outlives every copy of it. Nothing happens where there is none."""
        check_names(key, subkey)
        last = self._published.get((key, subkey))
        if last is None or last.expires_s <= self._now():
            entries = (await self._do.read({key: ()}, full=True))[key]
            found = entries.get((self._identity.peer_id, subkey))
            if found is None or found.record.deleted:
                return
            record = found.record
            last = _Published(
                Draft(key, subkey, record.body, record.ttl_ms, renew=False), record, found.expires_s, math.inf
            )
            self._published[key, subkey] = last
        if not last.draft.deleted:
            await self.publish([Draft(key, subkey, b"", last.draft.ttl_ms, renew=False, deleted=True)])

    async def withdraw(self) -> None:
        """Delete everything that we have published, in one go."""
        now_s = self._now()
        live = [p.draft for p in self._published.values() if p.expires_s > now_s and not p.draft.deleted]
        await self.publish([Draft(d.key, d.subkey, b"", d.ttl_ms, renew=False, deleted=True) for d in live])

    async def run(self) -> None:
        """Renew records when they are due, until cancelled."""
        while True:
            self._earlier.clear()
            self._next_s = min((p.due_s for p in self._published.values()), default=math.inf)
            try:
                async with asyncio.timeout_at(None if math.isinf(self._next_s) else self._next_s):
                    await self._earlier.wait()
            except TimeoutError:
                await self._renew_due()

    async def _renew_due(self) -> None:
        now_s = self._now()
        due = []
        for published in list(self._published.values()):
            if published.due_s <= now_s + TOGETHER * self._interval_s(published.draft):
                due.append(published.draft)
        for draft, accepted in zip(due, await self.publish(due), strict=True):
            published_now = self._published.get((draft.key, draft.subkey))
            if not accepted and published_now is not None and published_now.draft is draft:
                published_now.due_s = self._now() + EAGER * self._interval_s(draft)
