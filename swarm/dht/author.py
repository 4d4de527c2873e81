"""A peer as the author of records: it signs them, chooses their versions, renews and deletes them."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.dht.bodies import decode_body
from swarm.dht.events import DuplicateIdentity, RenewalFailed
from swarm.dht.incarnations import COOLDOWN_S, Claimed, Incarnations
from swarm.dht.operations import Operations, Placed
from swarm.dht.records import (
    INCARNATION_BYTES,
    MAX_ADOPTED_VERSION,
    MAX_TTL_S,
    MAX_VERSION,
    Copy,
    Record,
    check_names,
    sign_record,
)
from swarm.dht.refusals import Refusal, refused
from swarm.identity import KeyPair

ATTEMPTS = 3
"""Times that a record is signed anew because a holder knows a higher version."""
INLINE_SIGNATURES = 8
"""So many records are signed on the loop (0.02 ms each); more of them elsewhere."""
JITTER = 0.3
"""Renewals come up to this fraction early, so that records published together are not renewed together."""
TRANSIT_TIMEOUTS = 2.0
"""Call timeouts that a record may have been under way without its lifetime falling."""
CONTESTED_PAUSE = 2.0
"""Renewals of an entry that another process of our identity writes too take this many times the usual interval."""
STORED_KEPT = 1024
"""Entries of which the version is remembered that our former self has left."""
REPEAT_TIMEOUTS = 5.0
"""Call timeouts after which a record that most of its holders did not take is placed again; each pause is twice the
one before."""
REPEATS = 4
"""So many times it is placed once enough have taken it, that first time included."""
EAGER = 0.25
"""A renewal that nobody took is repeated after this part of the usual interval."""
TOGETHER = 0.02
"""Records due within this part of the republish interval are renewed together."""
BATCH = 64
"""So many records at most are renewed together; the next ones when these have been placed."""


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
    longest_s: float
    """When the last copy of any version of this entry has expired; a tombstone must last as long."""
    first: Claimed
    contested_until_s: float = 0.0
    """Until then another process of our identity is taken to be writing this entry too."""


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
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self._incarnations = Incarnations(self.incarnation, TRANSIT_TIMEOUTS * operations.config.call_timeout_s)
        self._stored: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._published: dict[tuple[str, str], _Published] = {}
        self._subkeys: dict[str, dict[str, None]] = {}
        self._signing = asyncio.Lock()
        self._unsettled: dict[tuple[str, str], int] = {}
        """Placings still to come of records that too few took."""
        self._earlier = asyncio.Event()
        self._next_s = math.inf

    def own(self, keys: Iterable[str]) -> dict[str, list[Copy]]:
        """Our live records of each key, deletions included."""
        now_s = self._now()
        mine: dict[str, list[Copy]] = {key: [] for key in keys}
        for key, copies in mine.items():
            for subkey in self._subkeys.get(key, ()):
                published = self._published[key, subkey]
                if published.expires_s > now_s:
                    copies.append(Copy(published.record, published.expires_s))
        return mine

    def _keep(self, published: _Published) -> None:
        draft = published.draft
        self._published[draft.key, draft.subkey] = published
        self._subkeys.setdefault(draft.key, {})[draft.subkey] = None

    def _forget_expired(self) -> None:
        now_s = self._now()
        for name in [name for name, published in self._published.items() if published.expires_s <= now_s]:
            del self._published[name]
            self._unsettled.pop(name, None)
            del self._subkeys[name[0]][name[1]]
            if not self._subkeys[name[0]]:
                del self._subkeys[name[0]]

    def _now(self) -> float:
        return self._do.runtime.clock.time()

    async def publish(self, drafts: Sequence[Draft]) -> list[int]:
        """Sign and place; how many peers hold each.

        Raises:
            RecordRefusedError: One of them is too large or malformed, or we have too many; nothing was published.
            NotAuthorizedError: Our role writes no records.
        """
        if drafts:
            self._do.check_writer()
        for draft in drafts:
            check_names(draft.key, draft.subkey)
            if len(draft.body) > self._do.config.max_body_bytes:
                raise refused(
                    Refusal.TOO_LARGE,
                    f"The body has {len(draft.body)} bytes, more than {self._do.config.max_body_bytes}.",
                    "Split it over several subkeys, or store where to fetch it from.",
                )
            if not draft.deleted:
                body = decode_body(draft.body)
                self._do.protocol.schemas.check(self._identity.peer_id, draft.key, draft.subkey, body)
        self._check_quota(drafts)
        return await self._publish(drafts, again=False)

    async def _publish(self, drafts: Sequence[Draft], *, again: bool) -> list[int]:
        accepted = [0] * len(drafts)
        todo = dict.fromkeys(range(len(drafts)), 0)  # index of a draft: the version that it must exceed
        for attempt in range(ATTEMPTS):
            copies = await self._sign([(i, drafts[i], floor) for i, floor in todo.items()], again=again or attempt > 0)
            placed = await self._do.place(list(copies.values()))
            todo = {}
            for i, copy in copies.items():
                outcome = placed[copy.record.place_id]
                accepted[i] = max(accepted[i], outcome.accepted)
                self.notice(outcome.others)
                if again and self._contested(copy.record):
                    continue  # no race of versions: the other process holds the entry until it ends or stops
                newer = self._newer(outcome)
                if copy.record.record_version <= newer <= MAX_ADOPTED_VERSION:
                    todo[i] = newer
            if not todo:
                break
        for draft, count in zip(drafts, accepted, strict=True):
            self._repeat_soon(draft, count)
        return accepted

    def _repeat_soon(self, draft: Draft, accepted: int) -> None:
        """Place a renewed record or a tombstone again soon where a majority of its holders did not take it.

        And some times more after that: who could not be reached a while ago is left out of lookups for a while.
        """
        name = (draft.key, draft.subkey)
        published = self._published.get(name)
        if published is None or published.draft is not draft or not (draft.renew or draft.deleted):
            return
        enough = min(self._do.config.replication // 2 + 1, len(self._do.book.table.all_nodes()) + 1)
        left = REPEATS if accepted < enough else self._unsettled.get(name, 0) - 1
        if left <= 0 or published.contested_until_s > self._now():
            self._unsettled.pop(name, None)
            return
        self._unsettled[name] = left
        pause_s = REPEAT_TIMEOUTS * self._do.config.call_timeout_s * 2 ** (REPEATS - left)
        published.due_s = min(published.due_s, self._now() + pause_s * (1 + JITTER * self._do.runtime.rng.random()))
        if published.due_s < self._next_s:
            self._earlier.set()

    def _newer(self, outcome: Placed) -> int:
        """The version that we must exceed, or 0.

        Holders that refuse a record as outdated show the one of ours that they hold. A version that is only claimed (it
        may have ended there, or the holder lies) matters where most did not take the record.
        """
        if outcome.accepted <= self._do.config.replication // 2:
            return outcome.outdated_by
        own = (c.record.record_version for c in outcome.others if c.record.author_id == self._identity.peer_id)
        return max(own, default=0)

    def _check_quota(self, drafts: Sequence[Draft]) -> None:
        config = self._do.config
        limit, limit_of_key = config.max_entries_per_author, config.max_entries_per_key_and_author
        names = {(draft.key, draft.subkey): None for draft in drafts}
        most_of_key = max(Counter(key for key, _ in names).values(), default=0)
        most_held = max((len(self._subkeys.get(key, ())) for key, _ in names), default=0)
        if len(self._published) + len(names) > limit or most_held + most_of_key > limit_of_key:
            self._forget_expired()
        if len(self._published) + sum(name not in self._published for name in names) > limit:
            raise refused(Refusal.QUOTA, f"One peer publishes at most {limit} entries.", "Delete some.")
        of_key = Counter(key for key, subkey in names if subkey not in self._subkeys.get(key, ()))
        for key, more in of_key.items():
            if len(self._subkeys.get(key, ())) + more > limit_of_key:
                raise refused(
                    Refusal.QUOTA, f"One peer publishes at most {limit_of_key} entries under one key.",
                    "Spread them over several keys.",
                )  # fmt: skip

    async def _sign(self, wanted: Sequence[tuple[int, Draft, int]], *, again: bool) -> dict[int, Copy]:
        """Records with versions above everything we know of: our last one, our wall clock, and what a holder named.

        Args:
            wanted: Index, draft, and the version that it must exceed.
            again: These have been published before; those that were replaced since are left out, lest they come back.
        """
        async with self._signing:
            wanted = [w for w in wanted if not again or self._is_current(w[1])]
            wall_ms = max(1, min(int(self._do.runtime.clock.wall() * 1000), MAX_ADOPTED_VERSION))
            versions = []
            for _, draft, floor in wanted:
                last = self._published.get((draft.key, draft.subkey))
                known = max(
                    floor, last.record.record_version if last else 0, self._stored.get((draft.key, draft.subkey), 0)
                )
                versions.append(min(MAX_VERSION - 1, max(known + 1, wall_ms)))

            def sign_all() -> list[Record]:
                return [
                    sign_record(
                        self._identity, self._run_id, d.key, d.subkey, d.body, version, d.ttl_ms, deleted=d.deleted,
                        max_body_bytes=self._do.config.max_body_bytes, incarnation=self.incarnation,
                    )
                    for (_, d, _), version in zip(wanted, versions, strict=True)
                ]  # fmt: skip

            few = len(wanted) <= INLINE_SIGNATURES
            records = sign_all() if few else await self._do.runtime.offload(sign_all)
            return {i: self._remember(draft, record) for (i, draft, _), record in zip(wanted, records, strict=True)}

    def notice(self, copies: Iterable[Copy]) -> None:
        """Look at records that the network holds: what our former self has left there, or a second process writes."""
        now_s = self._now()
        for copy in copies:
            record = copy.record
            if record.author_id != self._identity.peer_id or not self._incarnations.is_foreign(copy):
                continue
            name = (record.key, record.subkey)
            self._stored[name] = max(record.record_version, self._stored.pop(name, 0))
            while len(self._stored) > STORED_KEPT:
                self._stored.popitem(last=False)
            published = self._published.get(name)
            if published is None or not self._incarnations.is_rival(copy, published.first, now_s):
                continue
            published.contested_until_s = now_s + COOLDOWN_S
            if self._incarnations.may_tell(now_s):
                self._do.runtime.emit(
                    DuplicateIdentity(
                        key=record.key,
                        reason="another process with this peer's identity has published after this one had",
                        fix="Two processes use one data directory or a copy of it. Stop one of them, or start it with "
                        "an empty data directory of its own, where it makes itself a new identity.",
                    )
                )

    def _contested(self, record: Record) -> bool:
        published = self._published.get((record.key, record.subkey))
        return published is not None and published.contested_until_s > self._now()

    def _is_current(self, draft: Draft) -> bool:
        published = self._published.get((draft.key, draft.subkey))
        return published is not None and published.draft is draft

    def _remember(self, draft: Draft, record: Record) -> Copy:
        now_s = self._now()
        copy = Copy(record, now_s + record.ttl_ms / 1000)
        due_s = now_s + self._interval_s(draft) if draft.renew else math.inf
        last = self._published.get((draft.key, draft.subkey))
        longest_s = max(copy.expires_s, last.longest_s if last else 0.0)
        first = last.first if last else Claimed(record.record_version, now_s)
        contested_until_s = last.contested_until_s if last else 0.0
        if draft.renew and contested_until_s > now_s:
            due_s = now_s + CONTESTED_PAUSE * (due_s - now_s)
        self._keep(_Published(draft, record, copy.expires_s, due_s, longest_s, first, contested_until_s))
        if due_s < self._next_s:
            self._earlier.set()
        return copy

    def _interval_s(self, draft: Draft) -> float:
        return self._longest_interval_s(draft) * (1 - JITTER * self._do.runtime.rng.random())

    def _longest_interval_s(self, draft: Draft) -> float:
        return draft.ttl_ms / 1000 * self._do.config.republish_fraction

    async def delete(self, key: str, subkey: str) -> None:
        """Replace our entry by a tombstone that outlives every copy of it. Nothing happens where there is none."""
        check_names(key, subkey)
        last = self._published.get((key, subkey))
        if last is None or last.expires_s <= self._now():
            entries = (await self._do.read({key: ()}, full=True))[key]
            found = entries.get((self._identity.peer_id, subkey))
            if found is None or found.record.deleted:
                return
            draft = Draft(key, subkey, found.record.body, found.record.ttl_ms, renew=False)
            first = Claimed(found.record.record_version, self._now())
            last = _Published(draft, found.record, found.expires_s, math.inf, found.expires_s, first)
            self._keep(last)
        if not last.draft.deleted or last.due_s < math.inf:  # the latter: too few have taken the tombstone so far
            await self.publish([self._tombstone(last)])

    def _tombstone(self, last: _Published) -> Draft:
        longest_s = last.longest_s - self._now() + TRANSIT_TIMEOUTS * self._do.config.call_timeout_s
        ttl_ms = max(last.draft.ttl_ms, math.ceil(min(longest_s, MAX_TTL_S) * 1000))
        return Draft(last.draft.key, last.draft.subkey, b"", ttl_ms, renew=False, deleted=True)

    async def withdraw(self) -> None:
        """Delete everything that we have published, in one go."""
        now_s = self._now()
        live = [p for p in self._published.values() if p.expires_s > now_s and not p.draft.deleted]
        await self.publish([self._tombstone(published) for published in live])

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

    def renew_all(self) -> None:
        """Renew every record and tombstone now: others may have lost it while they could not reach us."""
        now_s = self._now()
        for published in self._published.values():
            if published.draft.renew or (published.draft.deleted and published.expires_s > now_s):
                published.due_s = now_s
        self._earlier.set()

    async def _renew_due(self) -> None:
        """Renew what is due, and what will be in a moment, as far as it fits into one batch."""
        now_s = self._now()
        due = [p for p in self._published.values() if p.due_s <= now_s + TOGETHER * self._longest_interval_s(p.draft)]
        due.sort(key=lambda published: published.due_s)
        drafts = [published.draft for published in due[:BATCH]]
        for draft, accepted in zip(drafts, await self._publish(drafts, again=True), strict=True):
            published = self._published.get((draft.key, draft.subkey))
            if accepted or published is None or published.draft is not draft:
                continue
            now_s = self._now()
            published.due_s = min(published.due_s, now_s + EAGER * self._interval_s(draft))
            if published.contested_until_s <= now_s:
                reason = "no peer took it: none is reachable, or all refuse it"
                self._do.runtime.emit(RenewalFailed(key=draft.key, reason=reason))
