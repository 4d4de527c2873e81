"""Who calls us, how much work it may cause, and where it can be reached: nobody is believed about that unreached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from swarm.config import DhtConfig
from swarm.dht.claims import Claims
from swarm.dht.events import PeerThrottled
from swarm.dht.flood import FloodGuard
from swarm.dht.messages import MAX_ADDRESS_CHARS, MAX_ADDRESSES, to_contact
from swarm.dht.routing import AddressBook, PeerNode
from swarm.errors import MalformedFrameError, RateLimitedError, SwarmError
from swarm.identity import PeerId
from swarm.net.transport import CallContext, Contact, Transport
from swarm.runtime import Runtime

SETTLE_FRACTION = 0.1
"""A small network's peers answer a new one once they have dialled it, or after this part of the call timeout."""
VERIFY_AT_ONCE = 8
"""Claims that are verified at a time because they matter."""
VERIFY_A_ROUND = 2
"""Further ones that are verified in a round of upkeep: a connection costs more than a call."""


class Callers:
    """Accounts for calls that come in, and verifies where their callers say they are.

    Args:
        transport: Dials them.
        config: Bounds and deadlines.
        runtime: Clock and events.
        book: Who is known; those who were reached enter it.
    """

    def __init__(self, transport: Transport, config: DhtConfig, runtime: Runtime, book: AddressBook) -> None:
        self._transport = transport
        self._runtime = runtime
        self._book = book
        self._patience_s = config.call_timeout_s + transport.config.transport.connect_timeout_s
        self._settle_s = SETTLE_FRACTION * config.call_timeout_s
        self._verifying = 0
        self._to_ping: dict[PeerId, PeerNode] = {}
        self.claims = Claims(config.maintenance_s, runtime.clock.time)
        self.flood = FloodGuard(config.max_work_per_s, runtime.clock)
        self.spawn: Callable[[Contact], asyncio.Task[bool]] | None = None
        """Runs `verify` in the background; without it claims wait for `verify_some`."""

    async def accept(self, context: CallContext, addresses: Sequence[str], cost: float) -> None:
        """Account for a call, and note where its caller says that it is.

        Raises:
            RateLimitedError: The caller asks for more work than one may.
            MalformedFrameError: Its addresses are too many or too long.
        """
        try:
            self.flood.take(context.peer_id, cost)
        except RateLimitedError as error:
            if self.flood.may_tell(context.peer_id):
                self._runtime.emit(PeerThrottled(peer=str(context.peer_id), reason=error.message))
            raise
        contact = to_contact(context.peer_id.digest, addresses)
        if contact is None:
            raise MalformedFrameError(
                f"A caller has at most {MAX_ADDRESSES} addresses of {MAX_ADDRESS_CHARS} characters."
            )
        if self._book.called(contact):
            return
        reached = self._transport.reached(contact.peer_id)
        if reached is not None and set(contact.addresses) <= set(reached.addresses):
            self._seen(reached)
        elif self.claims.add(contact) and self._verifying < VERIFY_AT_ONCE and self._book.matters(contact):
            await self._verify_now(contact)

    async def _verify_now(self, contact: Contact) -> None:
        if self.spawn is None:
            return
        self.claims.begin(contact.peer_id)
        verifying = self.spawn(contact)
        if self._book.table.complete:
            # whoever knows all peers is relied on to name them: the next one to join may ask at once
            await asyncio.wait([verifying], timeout=self._settle_s)

    async def verify(self, contact: Contact) -> bool:
        """Dial a peer at the addresses that it claims; whether it answers at one of them."""
        self._verifying += 1
        try:
            async with asyncio.timeout(self._patience_s):
                for address in contact.addresses:
                    try:
                        await self._transport.dial(address, contact.peer_id)
                    except SwarmError:
                        continue  # it may be at the next one
                    self.answered(contact.peer_id)
                    return True
        except TimeoutError:
            pass  # the same as not being there
        finally:
            self._verifying -= 1
        return False

    async def verify_some(self) -> None:
        """Dial some of those who called us and for whom the table has a place."""
        contacts = self.claims.take(VERIFY_A_ROUND, lambda contact: self._book.table.wants(PeerNode(contact)))
        await asyncio.gather(*(self.verify(contact) for contact in contacts))

    def answered(self, peer_id: PeerId) -> None:
        """A peer has answered. What counts is where we had dialled it and what it then said of itself, not who told us
        what about it."""
        reached = self._transport.reached(peer_id)
        if reached is not None:
            self._seen(Contact(reached.peer_id, reached.addresses[:MAX_ADDRESSES]))

    def _seen(self, contact: Contact) -> None:
        head = self._book.seen(contact)
        if head is not None:
            self._to_ping[head.contact.peer_id] = head

    def take_pings(self) -> list[PeerNode]:
        """Nodes of full buckets that new peers wait to replace; they should be pinged."""
        nodes = list(self._to_ping.values())
        self._to_ping.clear()
        return nodes
