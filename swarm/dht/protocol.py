"""The DHT's three calls, both sides: finding, storing and pinging, with every byte that arrives checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.config import DhtConfig
from swarm.dht.callers import Callers
from swarm.dht.digests import DIGEST_BYTES, digest_of
from swarm.dht.events import ContactDropped, RecordEvicted, RecordRefused
from swarm.dht.messages import (
    MAX_NEAREST,
    Contacts,
    Found,
    Stored,
    Want,
    check_contacts,
    pick,
    position_in,
    to_contact,
    to_target,
)
from swarm.dht.reading import Told
from swarm.dht.records import Checker, Copy, Refusal, position_of, remaining_ms, to_wire
from swarm.dht.routing import ID_BYTES, AddressBook, PeerNode
from swarm.dht.schemas import Schemas
from swarm.dht.storage import Storage, cursor
from swarm.errors import (
    CallTimeoutError,
    ClosedError,
    ConnectionLostError,
    MalformedFrameError,
    NotAuthorizedError,
    RateLimitedError,
    RecordRefusedError,
    RemoteFailureError,
    SwarmError,
)
from swarm.net.transport import CallContext, Request, Response, Transport, UnaryMethod
from swarm.pb import dht_pb2 as pb
from swarm.roles import ALL_ROLES, Role
from swarm.runtime import Runtime

PING = UnaryMethod("/swarm.pb.Dht/Ping", pb.DhtPingRequest, pb.DhtPingResponse)
FIND = UnaryMethod("/swarm.pb.Dht/Find", pb.DhtFindRequest, pb.DhtFindResponse)
STORE = UnaryMethod("/swarm.pb.Dht/Store", pb.DhtStoreRequest, pb.DhtStoreResponse, roles=ALL_ROLES - {Role.MONITOR})

MAX_TARGETS = 64
"""Positions in one find request."""
MAX_STORED = 256
"""Records in one store request."""
MAX_FOUND = 8192
"""Records in one find answer."""
CALL_COST = 1.0
"""Units of work (see `DhtConfig.max_work_per_s`) of a call; a record to check is one more."""
TARGET_COST = 0.25
LIFETIME_BYTES = 5
"""Of one lifetime in an answer by digest."""
TRANSIT_S = 0.5
TRANSIT_SHARE = 0.05
"""What a record that is passed on loses of its lifetime: so many seconds, at most this part of what is left."""
MAX_PAGES = 256
"""Pages of one key that a reader takes from one holder."""
INLINE_CHECKS = 3
"""So many signatures are checked on the loop (0.1 ms each); more of them elsewhere."""

_REFUSALS = {int(refusal): refusal for refusal in Refusal}
_LIES = frozenset(
    refusal.reason for refusal in (Refusal.BAD_SIGNATURE, Refusal.UNSIGNED, Refusal.FOREIGN, Refusal.MISPLACED)
)
"""Why an honest holder would have refused a record itself, whatever its settings and age."""
_PASSING = (CallTimeoutError, ConnectionLostError, RemoteFailureError)


class Protocol:
    """Sends and answers the DHT's calls; tells the address book who answered and who did not.

    Args:
        transport: Where calls go out and come in.
        config: Bounds and deadlines.
        runtime: Clock and events.
        book: Who is known.
        storage: What is held.
    """

    def __init__(
        self, transport: Transport, config: DhtConfig, runtime: Runtime, book: AddressBook, storage: Storage
    ) -> None:
        self._transport = transport
        self._config = config
        self._runtime = runtime
        self._book = book
        self._storage = storage
        self._budget_bytes = transport.config.transport.max_control_bytes * 3 // 4
        self.callers = Callers(transport, config, runtime, book)
        self.schemas = Schemas()
        self.checker = Checker(transport.run_id, config.max_body_bytes, self.schemas.check)
        storage.on_evicted = self._evicted
        self.on_held: Callable[[str], None] | None = None
        """Called with the key of every record that is newly held here."""
        self._serving = False
        self.roles = transport.roles
        """What we are in the run."""
        self.may_store = not self.roles.isdisjoint(STORE.roles)
        """Whether that lets us write records."""

    @property
    def _sender(self) -> Sequence[str]:
        """Where others can ask us; nowhere while we do not answer."""
        return self._transport.contact.addresses if self._serving else ()

    def serve(self) -> None:
        """Answer the DHT's calls from now on."""
        self._serving = True
        self._transport.serve(PING, self._on_ping)
        self._transport.serve(FIND, self._on_find)
        self._transport.serve(STORE, self._on_store)

    def _evicted(self, copy: Copy, bound: str) -> None:
        reason = f"the storage's bound on {bound} is reached"
        self._runtime.emit(RecordEvicted(key=copy.record.key, author=str(copy.record.author_id), reason=reason))

    # Calling

    async def ping(self, node: PeerNode) -> bool:
        """Whether the peer answers."""
        try:
            await self._call(node, PING, self._ping())
        except SwarmError:
            return False
        return True

    async def greet(self, node: PeerNode) -> None:
        """A first ping, with the patience that a new connection takes. Raises what `Transport.call` raises."""
        patience_s = self._config.call_timeout_s + self._transport.config.transport.connect_timeout_s
        await self._call(node, PING, self._ping(), patience_s)

    def _ping(self) -> pb.DhtPingRequest:
        return pb.DhtPingRequest(sender=self._sender)

    async def find(self, node: PeerNode, targets: Sequence[bytes | Want], count: int) -> list[Found]:
        """Ask a peer about positions (bytes) and keys.

        Returns:
            One answer for each target; records that do not pass are left out, counted and told as events.

        Raises:
            SwarmError: The call failed, or the answer is malformed.
        """
        asked_s = self._runtime.clock.time()
        answer = await self._find(node, [to_target(target) for target in targets], count)
        contacts = self._hints(answer.contacts)
        result = []
        for target, found in zip(targets, answer.found, strict=True):
            nearest = pick(contacts, found.nearest[:count])
            if not isinstance(target, Want):
                result.append(Found(nearest, []))
            elif found.digest:
                result.append(Found(nearest, [], self._checked(target, found, asked_s)))
            else:
                copies = await self._copies(found.records, target.key, node, asked_s)
                if found.more:
                    copies += await self._rest(node, target.key, copies)
                result.append(Found(nearest, copies))
        return result

    def _checked(self, want: Want, found: pb.DhtFound, asked_s: float) -> Told:
        if found.digest != want.digest and not want.inline_bytes:
            raise MalformedFrameError("A find answer has a digest where records were asked for.")
        if len(found.digest) != DIGEST_BYTES or len(found.remaining_ms) > self._config.max_entries_per_key:
            raise MalformedFrameError("A find answer has a digest of the wrong length, or too many lifetimes.")
        lifetimes_s = tuple(left_ms / 1000 for left_ms in found.remaining_ms)
        return Told(found.digest, lifetimes_s, asked_s)

    async def _rest(self, node: PeerNode, key: str, first: list[Copy]) -> list[Copy]:
        """The further pages of a key that does not fit into one answer."""
        rest: list[Copy] = []
        after = cursor(first[-1]) if first else b""
        for _ in range(MAX_PAGES):
            asked_s = self._runtime.clock.time()
            answer = await self._find(node, [pb.DhtTarget(key=key, after=after)], 0)
            page = await self._copies(answer.found[0].records, key, node, asked_s)
            rest += page
            last = cursor(page[-1]) if page else b""
            if not answer.found[0].more or last <= after or len(first) + len(rest) >= self._config.max_entries_per_key:
                break
            after = last
        return rest

    async def _find(self, node: PeerNode, targets: list[pb.DhtTarget], count: int) -> pb.DhtFindResponse:
        request = pb.DhtFindRequest(sender=self._sender, targets=targets, count=count)
        answer = await self._call(node, FIND, request)
        if len(answer.found) != len(targets):
            raise MalformedFrameError(f"A find answer has {len(answer.found)} parts for {len(targets)} targets.")
        records = sum(len(found.records) for found in answer.found)
        if records > MAX_FOUND or any(len(found.nearest) > MAX_NEAREST for found in answer.found):
            raise MalformedFrameError(
                f"A find answer has more than {MAX_FOUND} records or {MAX_NEAREST} nearest peers."
            )
        check_contacts(answer.contacts, len(targets))
        return answer

    async def store(
        self, node: PeerNode, copies: Sequence[Copy], count: int = 0, *, probe: bool = False
    ) -> list[Stored]:
        """Give copies to a peer, in as many requests as their size needs.

        Args:
            count: How many contacts near each record's key are wanted.
            probe: Only ask what of them is outdated there.

        Raises:
            SwarmError: A call failed, or its answer is malformed.
        """
        result: list[Stored] = []
        for batch in self._batches(copies):
            now_s = self._runtime.clock.time()
            records = [to_wire(self._passed_on(copy, now_s), now_s) for copy in batch]
            request = pb.DhtStoreRequest(sender=self._sender, records=records, count=count, probe=probe)
            answer = await self._call(node, STORE, request)
            if len(answer.results) != len(batch):
                raise MalformedFrameError(f"A store answer has {len(answer.results)} parts for {len(batch)} records.")
            if any(len(part.nearest) > MAX_NEAREST for part in answer.results):
                raise MalformedFrameError(f"A store answer has more than {MAX_NEAREST} nearest peers.")
            check_contacts(answer.contacts, len(batch))
            contacts = self._hints(answer.contacts)
            for part, copy in zip(answer.results, batch, strict=True):
                other = await self._copies([part.other], copy.record.key, node, now_s) if part.HasField("other") else []
                refusal = _REFUSALS.get(part.status, Refusal.MALFORMED)
                if refusal is not Refusal.NONE:
                    self._runtime.emit(RecordRefused(reason=refusal.reason, sender=str(node.contact.peer_id)))
                nearest = pick(contacts, part.nearest[:count])
                result.append(Stored(refusal, part.record_version, nearest, other[0] if other else None))
        return result

    def _passed_on(self, copy: Copy, now_s: float) -> Copy:
        """Somebody else's record loses what the way may take, so that passing it on and on never prolongs its life."""
        if copy.record.author == self._transport.identity.public_key:
            return copy
        return Copy(copy.record, copy.expires_s - min(TRANSIT_S, TRANSIT_SHARE * max(0.0, copy.remaining_s(now_s))))

    def _batches(self, copies: Sequence[Copy]) -> list[list[Copy]]:
        batches: list[list[Copy]] = []
        used = self._budget_bytes
        for copy in copies:
            if used + copy.wire_bytes > self._budget_bytes or len(batches[-1]) == MAX_STORED:
                batches.append([])
                used = 0
            batches[-1].append(copy)
            used += copy.wire_bytes
        return batches

    async def _call(
        self, node: PeerNode, method: UnaryMethod[Request, Response], request: Request, timeout_s: float | None = None
    ) -> Response:
        contact, cap_s = node.contact, timeout_s or self._config.call_timeout_s
        begun_s = self._runtime.clock.time()
        try:
            answer = await self._transport.call(contact, method, request, timeout_s=cap_s)
        except (RateLimitedError, ClosedError):
            raise  # a sign of life, or our own end: no reason to forget a peer
        except SwarmError as error:
            if not isinstance(error, NotAuthorizedError):  # it is there
                # a refusal is quick; what took long, be it only to connect, may have been our own fault
                quick = self._runtime.clock.time() - begun_s < cap_s / 2
                if self._book.failed(contact, surely=quick and not isinstance(error, _PASSING)):
                    self._runtime.emit(ContactDropped(peer=str(contact.peer_id), reason=str(error)))
            raise
        self.callers.answered(contact.peer_id)
        return answer

    # Answering

    async def _on_ping(self, context: CallContext, request: pb.DhtPingRequest) -> pb.DhtPingResponse:
        await self.callers.accept(context, request.sender, CALL_COST)
        return pb.DhtPingResponse()

    async def _on_find(self, context: CallContext, request: pb.DhtFindRequest) -> pb.DhtFindResponse:
        if len(request.targets) > MAX_TARGETS:
            raise MalformedFrameError(f"More than {MAX_TARGETS} targets in one find request.")
        await self.callers.accept(context, request.sender, CALL_COST + TARGET_COST * len(request.targets))
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
        await self.callers.accept(context, request.sender, CALL_COST + len(request.records))
        count = min(request.count, self._config.bucket_size)
        contacts = Contacts()
        results = []
        sender = str(context.peer_id)
        budget = self._budget_bytes
        for copy in await self._check(request.records, None, self._runtime.clock.time()):
            result = pb.DhtStored()
            try:
                if isinstance(copy, RecordRefusedError):
                    raise copy
                other = self._other(copy) if copy.record.author_id == context.peer_id else None
                if other is not None and other.wire_bytes <= budget:
                    budget -= other.wire_bytes
                    result.other.CopyFrom(to_wire(other, self._runtime.clock.time()))
                if request.probe:
                    self._storage.check(copy, self._runtime.clock.time())
                elif self._storage.offer(copy, self._runtime.clock.time()) and self.on_held is not None:
                    self.on_held(copy.record.key)
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

    # Checking

    async def _copies(self, messages: Sequence[pb.DhtRecord], key: str, node: PeerNode, asked_s: float) -> list[Copy]:
        """The records of an answer that pass. Raises `MalformedFrameError` where some show that the peer lies.

        Args:
            asked_s: When the request was sent. Lifetimes count from then: what was left when the peer looked can only
                be less by now, however long the answer took.
        """
        good = []
        for copy in await self._check(messages, key, asked_s):
            if isinstance(copy, Copy):
                good.append(copy)
                continue
            self._runtime.emit(RecordRefused(reason=copy.reason, sender=str(node.contact.peer_id)))
            if copy.reason in _LIES:
                if self._book.failed(node.contact, surely=True):
                    reason = f"it shows records that it cannot have accepted ({copy.reason})"
                    self._runtime.emit(ContactDropped(peer=str(node.contact.peer_id), reason=reason))
                raise MalformedFrameError("An answer contains records that their holder cannot have accepted.")
        return good

    async def _check(
        self, messages: Sequence[pb.DhtRecord], key: str | None, now_s: float
    ) -> list[Copy | RecordRefusedError]:
        def check_all() -> list[Copy | RecordRefusedError]:
            result: list[Copy | RecordRefusedError] = []
            for message in messages:
                try:
                    result.append(self.checker.check(message, now_s, key))
                except RecordRefusedError as error:
                    result.append(error)
                    if key is not None and error.reason in _LIES:
                        break  # the rest of a liar's answer is not worth the signatures
            return result

        if sum(not self.checker.knows(message) for message in messages) <= INLINE_CHECKS:
            return check_all()
        return await self._runtime.offload(check_all)

    def _hints(self, messages: Sequence[pb.DhtContact]) -> list[PeerNode | None]:
        """Candidates for contacts in an answer, none for those that are malformed or failed lately."""
        result: list[PeerNode | None] = []
        for message in messages:
            contact = to_contact(message.peer_id, message.addresses)
            hints = [] if contact is None else self._book.hints([contact])
            result.append(hints[0] if hints else None)
        return result
