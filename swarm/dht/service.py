"""What this peer answers to the DHT's calls: whom it knows near a position, what it holds there, what it takes."""

from __future__ import annotations

from swarm.config import DhtConfig
from swarm.dht.callers import Callers
from swarm.dht.checking import Checker
from swarm.dht.digests import DIGEST_BYTES, digest_of
from swarm.dht.events import RecordEvicted, RecordRefused
from swarm.dht.messages import FIND, MAX_STORED, MAX_TARGETS, PING, STORE, Contacts, position_in
from swarm.dht.records import Copy, position_of, remaining_ms, to_wire
from swarm.dht.refusals import Refusal
from swarm.dht.routing import ID_BYTES, AddressBook
from swarm.dht.storage import Storage
from swarm.errors import MalformedFrameError, RecordRefusedError
from swarm.net.transport import CallContext, Transport
from swarm.pb import dht_pb2 as pb
from swarm.runtime import Runtime

CALL_COST = 1.0
"""Units of work (see `DhtConfig.max_work_per_s`) of a call; a record to check is one more."""
TARGET_COST = 0.25
HASHED_ENTRIES = 100.0
"""Entries whose digest costs one unit."""
LIFETIME_BYTES = 5
"""Of one lifetime in an answer by digest."""


class Service:
    """Answers the DHT's calls; every byte that arrives is checked, every answer bounded.

    Args:
        transport: Where calls come in.
        config: Bounds.
        runtime: Clock and events.
        book: Who is known.
        storage: What is held.
        callers: Accounts for calls.
        checker: Checks records.
        budget_bytes: Of records in one answer.
    """

    def __init__(
        self, transport: Transport, config: DhtConfig, runtime: Runtime, book: AddressBook, storage: Storage,
        callers: Callers, checker: Checker, budget_bytes: int,
    ) -> None:  # fmt: skip
        self._transport = transport
        self._config = config
        self._runtime = runtime
        self._book = book
        self._storage = storage
        self._callers = callers
        self._checker = checker
        self._budget_bytes = budget_bytes
        storage.on_evicted = self._evicted
        self.serving = False

    def start(self) -> None:
        """Answer from now on."""
        self.serving = True
        self._transport.serve(PING, self._on_ping)
        self._transport.serve(FIND, self._on_find)
        self._transport.serve(STORE, self._on_store)

    def _evicted(self, copy: Copy, bound: str) -> None:
        reason = f"the storage's bound on {bound} is reached"
        self._runtime.emit(RecordEvicted(key=copy.record.key, author=str(copy.record.author_id), reason=reason))

    async def _on_ping(self, context: CallContext, request: pb.DhtPingRequest) -> pb.DhtPingResponse:
        await self._callers.accept(context, request.sender, CALL_COST)
        return pb.DhtPingResponse()

    async def _on_find(self, context: CallContext, request: pb.DhtFindRequest) -> pb.DhtFindResponse:
        if len(request.targets) > MAX_TARGETS:
            raise MalformedFrameError(f"More than {MAX_TARGETS} targets in one find request.")
        keys = [target.key for target in request.targets if target.key]
        if len(dict.fromkeys(keys)) < len(keys):
            raise MalformedFrameError("A find request asks for one key twice.")
        hashed = sum(self._storage.count(t.key) for t in request.targets if t.key and (t.digest or t.inline_bytes))
        cost = CALL_COST + TARGET_COST * len(request.targets) + hashed / HASHED_ENTRIES
        await self._callers.accept(context, request.sender, cost)
        count = min(request.count, self._config.bucket_size)
        contacts = Contacts()
        found = []
        now_s = self._runtime.clock.time()
        budget = self._budget_bytes
        for target in request.targets:
            position = position_in(target)
            near = self._book.table.nearest(int.from_bytes(position, "big"), count, context.peer_id.digest[:ID_BYTES])
            part = pb.DhtFound(nearest=contacts.add(near))
            if target.key:
                if budget > 0 and not target.after and self._told(target, part, now_s):
                    budget -= DIGEST_BYTES + LIFETIME_BYTES * len(part.remaining_ms)
                elif budget > 0:
                    copies, part.more = self._storage.page(target.key, now_s, target.after, budget)
                    part.records.extend(to_wire(copy, now_s) for copy in copies)
                    budget -= sum(copy.wire_bytes for copy in copies)
                else:
                    part.more = bool(self._storage.entries(target.key, now_s))
            found.append(part)
        return pb.DhtFindResponse(contacts=contacts.messages, found=found)

    def _told(self, target: pb.DhtTarget, part: pb.DhtFound, now_s: float) -> bool:
        """Answer by a digest, where the asker knows the same entries or they are more than it wants to have at once."""
        if len(target.digest) not in (0, DIGEST_BYTES):
            raise MalformedFrameError(f"A digest has {DIGEST_BYTES} bytes.")
        entries = self._storage.entries(target.key, now_s) if target.digest or target.inline_bytes else []
        large = 0 < target.inline_bytes < sum(copy.wire_bytes for copy in entries)
        if not entries or not (target.digest or large):
            return False
        digest = digest_of(entries)
        if not large and digest != target.digest:
            return False
        part.digest = digest
        part.remaining_ms.extend(remaining_ms(copy, now_s) for copy in entries)
        return True

    async def _on_store(self, context: CallContext, request: pb.DhtStoreRequest) -> pb.DhtStoreResponse:
        if len(request.records) > MAX_STORED:
            raise MalformedFrameError(f"More than {MAX_STORED} records in one store request.")
        await self._callers.accept(context, request.sender, CALL_COST + len(request.records))
        count = min(request.count, self._config.bucket_size)
        contacts = Contacts()
        results = []
        sender = str(context.peer_id)
        budget = self._budget_bytes
        for copy in await self._checker.check_many(request.records, self._runtime.clock.time(), self._runtime):
            result = pb.DhtStored()
            try:
                if isinstance(copy, RecordRefusedError):
                    raise copy
                other = self._other(copy) if copy.record.author_id == context.peer_id else None
                if other is not None and other.wire_bytes <= budget:
                    budget -= other.wire_bytes
                    result.other.CopyFrom(to_wire(other, self._runtime.clock.time()))
                take = self._storage.check if request.probe else self._storage.offer
                take(copy, self._runtime.clock.time())
            except RecordRefusedError as error:
                result.status = Refusal[error.reason.upper()]
                result.record_version = error.record_version
                self._runtime.emit(RecordRefused(reason=error.reason, sender=sender))
            if count and isinstance(copy, Copy):
                position = int.from_bytes(position_of(copy.record.key), "big")
                result.nearest.extend(
                    contacts.add(self._book.table.nearest(position, count, context.peer_id.digest[:ID_BYTES]))
                )
            results.append(result)
        return pb.DhtStoreResponse(contacts=contacts.messages, results=results)

    def _other(self, copy: Copy) -> Copy | None:
        """What is held in a copy's place, if another process of its author wrote that."""
        held = self._storage.get(*copy.record.place_id)
        if held is None or held.expires_s <= self._runtime.clock.time():
            return None
        return held if held.record.incarnation != copy.record.incarnation else None
