"""Calling other peers: finding, storing and pinging, with every byte of the answers checked."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.config import DhtConfig
from swarm.dht.callers import Callers
from swarm.dht.checking import LIES, Checker
from swarm.dht.digests import DIGEST_BYTES
from swarm.dht.events import ContactDropped, RecordRefused
from swarm.dht.messages import (
    FIND,
    MAX_FOUND,
    MAX_NEAREST,
    MAX_STORED,
    PING,
    STORE,
    Found,
    Stored,
    Want,
    check_contacts,
    pick,
    to_contact,
    to_target,
)
from swarm.dht.reading import Told
from swarm.dht.records import Copy, to_wire
from swarm.dht.refusals import Refusal
from swarm.dht.routing import AddressBook, PeerNode
from swarm.dht.schemas import Schemas
from swarm.dht.service import Service
from swarm.dht.storage import Storage, cursor
from swarm.errors import (
    CallTimeoutError,
    ClosedError,
    ConnectionLostError,
    MalformedFrameError,
    NotAuthorizedError,
    RateLimitedError,
    RemoteFailureError,
    SwarmError,
)
from swarm.net.transport import Request, Response, Transport, UnaryMethod
from swarm.pb import dht_pb2 as pb
from swarm.runtime import Runtime

TRANSIT_S = 0.5
TRANSIT_SHARE = 0.05
"""What a record that is passed on loses of its lifetime: so many seconds, at most this part of what is left."""
MAX_PAGES = 256
"""Pages of one key that a reader takes from one holder."""

_REFUSALS = {int(refusal): refusal for refusal in Refusal}
_PASSING = (CallTimeoutError, ConnectionLostError, RemoteFailureError)


class Protocol:
    """Sends the DHT's calls and tells the address book who answered and who did not; its service answers others.

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
        self._budget_bytes = transport.config.transport.max_control_bytes * 3 // 4
        self.callers = Callers(transport, config, runtime, book)
        self.schemas = Schemas()
        self.checker = Checker(transport.run_id, config.max_body_bytes, self.schemas.check)
        self._service = Service(
            transport, config, runtime, book, storage, self.callers, self.checker, self._budget_bytes
        )
        self.roles = transport.roles
        """What we are in the run."""
        self.may_store = not self.roles.isdisjoint(STORE.roles)
        """Whether that lets us write records."""

    @property
    def _sender(self) -> Sequence[str]:
        """Where others can ask us; nowhere while we do not answer."""
        return self._transport.contact.addresses if self._service.serving else ()

    def serve(self) -> None:
        """Answer the DHT's calls from now on."""
        self._service.start()

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

    # Checking

    async def _copies(self, messages: Sequence[pb.DhtRecord], key: str, node: PeerNode, asked_s: float) -> list[Copy]:
        """The records of an answer that pass. Raises `MalformedFrameError` where some show that the peer lies.

        Args:
            asked_s: When the request was sent. Lifetimes count from then: what was left when the peer looked can only
                be less by now, however long the answer took.
        """
        good = []
        for copy in await self.checker.check_many(messages, asked_s, self._runtime, key):
            if isinstance(copy, Copy):
                good.append(copy)
                continue
            self._runtime.emit(RecordRefused(reason=copy.reason, sender=str(node.contact.peer_id)))
            if copy.reason in LIES:
                if self._book.failed(node.contact, surely=True):
                    reason = f"it shows records that it cannot have accepted ({copy.reason})"
                    self._runtime.emit(ContactDropped(peer=str(node.contact.peer_id), reason=reason))
                raise MalformedFrameError("An answer contains records that their holder cannot have accepted.")
        return good

    def _hints(self, messages: Sequence[pb.DhtContact]) -> list[PeerNode | None]:
        """Candidates for contacts in an answer, none for those that are malformed or failed lately."""
        result: list[PeerNode | None] = []
        for message in messages:
            contact = to_contact(message.peer_id, message.addresses)
            hints = [] if contact is None else self._book.hints([contact])
            result.append(hints[0] if hints else None)
        return result
