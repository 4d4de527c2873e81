"""Reads as state machines: which replicas of a key to ask, what they agree on, what some of them lack. No I/O.

A read ends early, when the nearest that are alive all say the same: no two stale replicas can outvote a nearer peer
that has not answered. Large keys travel once: replicas answer by a digest, one is asked for the entries, and the others
count as soon as their digest is that of entries already here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.dht.crawl import Lookup, State
from swarm.dht.digests import digest_of
from swarm.dht.records import Copy, EntryId, PlaceId, merge
from swarm.dht.routing import PeerNode
from swarm.errors import MalformedFrameError

INLINE_BYTES = 4096
"""Entries of a key that are larger together are first answered by their digest."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a replica says of its entries without sending them.

    Attributes:
        digest: Of all of them.
        lifetimes_s: What is left of each, in order of author and subkey.
        now_s: Local time from which the lifetimes count.
    """

    digest: bytes
    lifetimes_s: Sequence[float]
    now_s: float

    def copies(self, entries: Mapping[EntryId, Copy]) -> dict[EntryId, Copy]:
        """Entries of this digest (in order) with the replica's lifetimes. Raises `MalformedFrameError`."""
        if len(entries) != len(self.lifetimes_s):
            raise MalformedFrameError(f"An answer has {len(self.lifetimes_s)} lifetimes for {len(entries)} entries.")
        return {
            entry_id: Copy(copy.record, self.now_s + min(lifetime_s, copy.record.ttl_ms / 1000))
            for (entry_id, copy), lifetime_s in zip(entries.items(), self.lifetimes_s, strict=True)
        }


class Read(Lookup):
    """A lookup of the records of one key.

    Args:
        key: The key.
        own: What we hold of it ourselves, as one of the replicas; none when we do not count.
        authored: Our own records of the key, which are merged in but do not count as a replica.
        agreement: So many of the nearest that are alive must hold exactly the merged union for an early end; 0 asks all
            `width`.
        wide: How many must have answered before the key counts as empty.
        known: Entries from an earlier read, which need not travel again where replicas still hold just these.
    """

    def __init__(
        self, key: str, target: int, width: int, seeds: Iterable[PeerNode], *, me: PeerNode, own: Sequence[Copy],
        authored: Sequence[Copy], agreement: int, wide: int = 0, known: Sequence[Copy] = (),
    ) -> None:  # fmt: skip
        self.merged: dict[EntryId, Copy] = merge([*own, *authored])
        self._wide = max(width, wide)
        super().__init__(target, width, seeds, me)
        self.key = key
        self._me = me
        self._agreement = agreement
        self._replies: dict[bytes, dict[EntryId, Copy]] = {me.id: merge(own)}
        self._ranks = {me.id: _ranks(self._replies[me.id])}
        self._union = _ranks(self.merged)
        self._authored = merge(authored)
        self._sets: dict[bytes, dict[EntryId, Copy]] = {}
        """Entries by their digest, as far as others may answer by it."""
        self._told: dict[bytes, tuple[PeerNode, Told]] = {}
        self._whole: dict[bytes, None] = {}
        """Who is asked for all entries, having answered by a digest before."""
        self._learned: dict[bytes, None] = {}
        self._digest: bytes | None = None
        self._agreed: bool | None = False
        if known:
            self._learn(merge(known))
        self._known_digest = next(iter(self._sets), b"")

    @property
    def width(self) -> int:
        return self._width if self.merged else self._wide

    @property
    def satisfied(self) -> bool:
        if self._agreed is None:
            self._agreed = self._agree()
        return self._agreed

    @property
    def done(self) -> bool:
        return super().done and not (self._awaited() and self._disputed())

    def _awaited(self) -> bool:
        """Whether there is a slow peer among the nearest."""
        window = self.window()
        reach = window[-1].long_id ^ self.target if window else 0
        near = (node for distance, node in self._candidates.heap if distance < reach)
        return self._slow > 0 and any(self.state(node) is State.SLOW for node in near)

    def retry(self) -> bool:
        """Ask the nearest that failed once more, where nothing was found; whether there are any.

        Calls get lost by themselves, and a first contact is two: all holders of a key may fail to answer once.
        """
        window = self.window()
        if self.merged or not window:
            return False
        reach = window[-1].long_id ^ self.target
        near = [n for d, n in self._candidates.heap if d < reach and self.state(n) is State.FAILED][: self.width]
        for node in near:
            self._hearsay.forget(node.id)
            self._leave(node, State.NEW)
        return bool(near)

    def _agree(self) -> bool:
        """Whether the nearest that are alive, as many as `agreement` says, all hold just the union."""
        near = self.window()[: self._agreement]
        if not self.merged or len(near) < self._agreement:
            return False
        return all(self._ranks.get(node.id) == self._union for node in near)

    def _useful(self) -> list[PeerNode]:
        """While the answers do not differ, those whose agreement ends the read."""
        window = super()._useful()
        near = window[: self._agreement] if self.merged else []
        return near if near and all(self._ranks.get(n.id, self._union) == self._union for n in near) else window

    def wanted(self, parallelism: int) -> list[PeerNode]:
        self._resolve()
        return super().wanted(parallelism)

    def want(self, node: PeerNode) -> tuple[bytes, int]:
        """What to tell a peer that is asked now: the digest of what is known, and up to which size it should answer
        by records where its digest differs (0: whatever their size)."""
        if self._digest is None:
            self._digest = self._learn(self.merged) if self.merged else self._known_digest
        return self._digest, 0 if node.id in self._whole else INLINE_BYTES

    def reply(self, node: PeerNode, copies: Sequence[Copy], nearer: Iterable[PeerNode]) -> None:
        """A replica answered with these checked copies."""
        self._take(node, merge(copies))
        self.answered(node, nearer)

    def told(self, node: PeerNode, told: Told, nearer: Iterable[PeerNode]) -> None:
        """A replica answered by a digest.

        Raises:
            MalformedFrameError: It names other entries than those that the digest stands for.
        """
        held = self._sets.get(told.digest)
        if held is not None:
            self._take(node, told.copies(held))
            self.answered(node, nearer)
        elif node.id in self._whole:
            raise MalformedFrameError("A peer that was asked for entries answered by a digest.")
        else:
            self._told[node.id] = (node, told)
            self._hear(node, State.TOLD, nearer)

    def _take(self, node: PeerNode, held: dict[EntryId, Copy]) -> None:
        self._replies[node.id] = held
        self._ranks[node.id] = _ranks(held)
        merge(held.values(), self.merged)
        union = _ranks(self.merged)
        if union != self._union:
            self._union = union
            self._digest = None
            self._changed()

    def _learn(self, entries: Mapping[EntryId, Copy]) -> bytes:
        digest = digest_of(entries.values())
        self._sets[digest] = dict(sorted(entries.items()))
        return digest

    def _resolve(self) -> None:
        """Turn digests into entries, or choose a replica to ask for them."""
        if not self._told:
            return
        for node_id, held in self._replies.items():
            if held and node_id not in self._learned:
                self._learned[node_id] = None
                self._learn(held)
        for node, told in list(self._told.values()):
            if told.digest in self._sets:
                del self._told[node.id]
                try:
                    self._take(node, told.copies(self._sets[told.digest]))
                except MalformedFrameError:
                    self._leave(node, State.FAILED)
                else:
                    self._leave(node, State.ANSWERED)
        window = self.window()
        asking = any(n.id in self._whole and self.state(n) in (State.NEW, State.ASKED) for n in window)
        waiting = [n for n in window if self.state(n) is State.TOLD]
        if waiting and not asking:
            del self._told[waiting[0].id]
            self._whole[waiting[0].id] = None
            self._leave(waiting[0], State.NEW)

    def _changed(self) -> None:
        super()._changed()
        self._agreed = None if self._agreement else False

    def result(self) -> dict[EntryId, Copy]:
        """The union, each entry with the (lower) median of the lifetimes that its replicas name.

        A replica that lies about lifetimes, be it to keep what has ended or to end what lives, moves the median by at
        most one place.
        """
        result: dict[EntryId, Copy] = {}
        for entry_id, copy in self.merged.items():
            authored = self._authored.get(entry_id)
            if authored is not None and authored.record.rank == copy.record.rank:
                result[entry_id] = authored
                continue
            ends = sorted(held.expires_s for held in self._of(entry_id) if held.record.rank == copy.record.rank)
            result[entry_id] = Copy(copy.record, ends[(len(ends) - 1) // 2])
        return result

    def _of(self, entry_id: EntryId) -> list[Copy]:
        return [reply[entry_id] for reply in self._replies.values() if entry_id in reply]

    def holders(self) -> Counter[tuple[PlaceId, int]]:
        """How many others show each statement."""
        shown: Counter[tuple[PlaceId, int]] = Counter()
        for reply in self._heard():
            shown.update((copy.record.place_id, copy.record.record_version) for copy in reply.values())
        return shown

    def _heard(self) -> list[dict[EntryId, Copy]]:
        """What the nearest others hold, of those that have answered."""
        near = (node.id for node in self.window() if self.state(node) is State.ANSWERED)
        return [self._replies.get(node_id, {}) for node_id in near if node_id != self._me.id]

    def _disputed(self) -> bool:
        """Whether the nearest hold nothing, or not the same entries: then a slow one of them may decide."""
        heard = self._heard()
        entries = [entry_id for entry_id in self.merged if entry_id not in self._authored]
        return not self.merged or any(entry_id not in reply for reply in heard for entry_id in entries)

    def doubtful(self) -> list[EntryId]:
        """Entries, not our own, that most replicas do not have: they may not have them yet, or have seen them end."""
        replies = [self._replies.get(n.id, {}) for n in self.window() if self.state(n) is State.ANSWERED]
        own = self._replies[self._me.id]
        return [
            entry_id
            for entry_id in self.merged
            if entry_id not in self._authored
            and entry_id not in own
            and 2 * sum(entry_id in reply for reply in replies) < len(replies)
        ]

    def stale(self) -> list[tuple[PeerNode, list[Copy]]]:
        """Replicas among the nearest that lack something of the union, with what they lack."""
        lacked: list[tuple[PeerNode, list[Copy]]] = []
        union = self.result()
        for node in self.window():
            if self.state(node) is not State.ANSWERED:
                continue
            reply = self._replies.get(node.id, {})
            lacking = [
                c for e, c in union.items() if (held := reply.get(e)) is None or held.record.rank < c.record.rank
            ]
            if lacking:
                lacked.append((node, lacking))
        return lacked


def _ranks(entries: Mapping[EntryId, Copy]) -> dict[EntryId, tuple[int, bytes]]:
    return {entry_id: copy.record.rank for entry_id, copy in entries.items()}
