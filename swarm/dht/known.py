"""Peers to return to: those that were met once, through a time when they cannot be reached, and through a restart.

A peer that everybody else has lost, or half a network that was cut off, comes back through them. They are bounded and
spread over the id space, so that whichever part of the network remains, some of it is known. A few that are not in the
routing table are tried in each round of upkeep, the longest untried first, each after a pause that doubles to a bound.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.dht.routing import MAX_PER_SUBNET, PeerNode
from swarm.errors import ConfigError, SwarmError
from swarm.events import Event
from swarm.identity import PeerId, write_private
from swarm.net.addresses import split_address
from swarm.net.transport import Contact
from swarm.runtime import Runtime

FILE_NAME = "known_peers.json"
FILE_FORMAT = 1
MAX_FILE_BYTES = 256 * 1024
MAX_FILE_PEERS = 1024
SAVED_FRACTION = 0.25
"""Part of the remembered peers that is kept on disk."""
MAX_ADDRESSES = 4
"""Addresses remembered of one peer."""
MAX_ADDRESS_CHARS = 256
PREFIX_BITS = 6
"""Peers whose ids begin with the same bits compete for a place."""
LONGEST_PAUSE = 4.0
"""No pause between two attempts is longer than this, in rounds of upkeep."""


@dataclass(frozen=True, slots=True)
class KnownPeersUnusable(Event):
    """The file of remembered peers could not be read or written; the peer goes on without it."""

    path: str
    reason: str


@dataclass(slots=True)
class _Known:
    contact: Contact
    seen_s: float
    pinned: bool = False
    failures: int = 0
    next_s: float = 0.0


class KnownPeers:
    """Remembered peers. No I/O.

    Args:
        me: Never remembered.
        limit: How many.
        pause_s: The first pause after a failed attempt.
        clock: Seconds, monotonic.
        rng: Jitter.
    """

    def __init__(self, me: PeerId, limit: int, pause_s: float, clock: Callable[[], float], rng: random.Random) -> None:
        self.me = me
        self.most_saved = max(1, int(limit * SAVED_FRACTION))
        """How many are kept on disk."""
        self._limit = limit
        self._pause_s = pause_s
        self._clock = clock
        self._rng = rng
        self._known: dict[PeerId, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def met(self, contact: Contact, seen_s: float | None = None) -> None:
        """The peer has answered us, at these addresses.

        Args:
            seen_s: When; none is now.
        """
        if contact.peer_id == self.me or not contact.addresses:
            return
        seen_s = self._clock() if seen_s is None else seen_s
        known = self._known.get(contact.peer_id)
        if known is None:
            self._known[contact.peer_id] = _Known(_shortened(contact), seen_s)
            self._make_room()
        elif seen_s > known.seen_s:
            known.contact, known.seen_s = _shortened(contact), seen_s
            known.failures, known.next_s = 0, 0.0

    def pin(self, contact: Contact) -> None:
        """Remember a peer for good, whether it has ever answered or not: an invite names it."""
        if contact.peer_id == self.me or not contact.addresses:
            return
        known = self._known.setdefault(contact.peer_id, _Known(_shortened(contact), float("-inf")))
        known.pinned = True
        if known.seen_s == float("-inf"):  # several addresses of a peer that has not answered come one by one
            both = dict.fromkeys((*known.contact.addresses, *contact.addresses))
            known.contact = _shortened(Contact(contact.peer_id, tuple(both)))

    def failed(self, peer_id: PeerId) -> None:
        """The peer did not answer: leave it in peace for a while."""
        known = self._known.get(peer_id)
        if known is not None:
            known.failures += 1
            pause = min(LONGEST_PAUSE, 2.0 ** min(known.failures - 1, 10))
            known.next_s = self._clock() + self._pause_s * pause * self._rng.uniform(0.5, 1.0)

    def due(self, count: int, excluding: Callable[[PeerId], bool], *, patient: bool = True) -> list[Contact]:
        """Peers to try now.

        Args:
            count: At most so many.
            excluding: Says of whom we need not be reminded, because they are in the routing table.
            patient: Leave out those whose pause is not over.
        """
        now_s = self._clock()
        lost = [k for k in self._known.values() if not excluding(k.contact.peer_id)]
        lost = [k for k in lost if not patient or k.next_s <= now_s]
        self._rng.shuffle(lost)  # those that are equally due
        lost.sort(key=lambda k: k.next_s)
        return [k.contact for k in lost[:count]]

    def best(self, count: int) -> list[Contact]:
        """Those most worth trying after a restart, from all over the id space: the last one met of each part first."""
        ranked: list[tuple[int, float, PeerId]] = []
        for members in self._by_prefix(self._known.values()).values():
            members.sort(key=lambda k: -k.seen_s)
            ranked += [(place, -k.seen_s, k.contact.peer_id) for place, k in enumerate(members)]
        taken: Counter[str] = Counter()
        chosen = []
        for _, _, peer_id in sorted(ranked):
            contact = self._known[peer_id].contact
            subnets = PeerNode(contact).subnets
            if all(taken[subnet] < MAX_PER_SUBNET for subnet in subnets):
                taken.update(subnets)
                chosen.append(contact)
        return chosen[:count]

    def _make_room(self) -> None:
        """Over the limit, the crowded part of the id space gives: of it, who has been silent for longest."""
        if len(self._known) <= self._limit:
            return
        loose = self._by_prefix(k for k in self._known.values() if not k.pinned)
        if loose:
            crowd = max(loose.values(), key=len)
            worst = min(crowd, key=lambda k: k.seen_s)
            del self._known[worst.contact.peer_id]

    @staticmethod
    def _by_prefix(known: Iterable[_Known]) -> dict[int, list[_Known]]:
        parts: dict[int, list[_Known]] = {}
        for k in known:
            parts.setdefault(k.contact.peer_id.digest[0] >> (8 - PREFIX_BITS), []).append(k)
        return parts


class KnownPeersFile:
    """Keeps the best of the remembered peers on disk. What goes wrong there is an event, and the peer goes on.

    Args:
        path: The file.
        run_id: Files of other runs are not used.
        known: What is kept.
        runtime: Events; file access happens off the loop.
    """

    def __init__(self, path: Path, run_id: bytes, known: KnownPeers, runtime: Runtime) -> None:
        self._path = path
        self._run_id = run_id
        self._known = known
        self._runtime = runtime
        self._saved: list[Contact] = []

    async def load(self) -> list[Contact]:
        """Remember those of an earlier start, and return them, best first."""
        try:
            found = await self._runtime.offload(read_known, self._path, self._run_id, self._known.most_saved + 1)
        except ConfigError as error:
            self._runtime.emit(KnownPeersUnusable(path=str(self._path), reason=error.message))
            return []
        others = [contact for contact in found if contact.peer_id != self._known.me]
        for place, contact in enumerate(others):
            self._known.met(contact, -1.0 - place)  # before anything that happens from now on, in this order
        return others

    async def save(self, own: Contact) -> None:
        """Write the best, where they have changed; ourselves too, for commands on this machine."""
        best = [*self._known.best(self._known.most_saved), own]
        if best == self._saved:
            return
        self._saved = best
        try:
            await self._runtime.offload(write_known, self._path, self._run_id, best)
        except OSError as error:
            self._runtime.emit(KnownPeersUnusable(path=str(self._path), reason=str(error)))


def _shortened(contact: Contact) -> Contact:
    return Contact(contact.peer_id, contact.addresses[:MAX_ADDRESSES])


def write_known(path: Path, run_id: bytes, contacts: Sequence[Contact]) -> None:
    """Write the file, best first, readable by its owner alone. Raises `OSError`."""
    peers = [{"peer_id": str(c.peer_id), "addresses": list(c.addresses[:MAX_ADDRESSES])} for c in contacts]
    content = {"format": FILE_FORMAT, "run_id": run_id.hex(), "peers": peers}
    write_private(path, json.dumps(content, indent=1).encode())


def read_known(path: Path, run_id: bytes, most: int = MAX_FILE_PEERS) -> list[Contact]:
    """What `write_known` wrote, best first; empty if there is no file.

    Raises:
        ConfigError: The file is unreadable, too large, not what we wrote, or of another run.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")  # noqa: TRY301 - one place words the complaint
        content = json.loads(data)
        match content:
            case {"format": 1, "run_id": str(run), "peers": list(peers)}:
                pass
            case _:
                raise ValueError("it is not a list of peers")  # noqa: TRY301
        if run != run_id.hex():
            raise ValueError("it belongs to another run")  # noqa: TRY301
        return list({c.peer_id: c for c in (_contact(peer) for peer in peers[:most])}.values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError, SwarmError) as error:
        reason = error.message if isinstance(error, SwarmError) else error
        raise ConfigError(
            f"{path} cannot be used: {reason}.", fix="Nothing needs to be done: it is written anew."
        ) from error


def _contact(value: Any) -> Contact:
    match value:
        case {"peer_id": str(peer_id), "addresses": list(addresses)} if 0 < len(addresses) <= MAX_ADDRESSES:
            for address in addresses:
                if not isinstance(address, str) or len(address) > MAX_ADDRESS_CHARS:
                    raise ValueError("it holds something that is no address")
                split_address(address)
            return Contact(PeerId.parse(peer_id), tuple(addresses))
    raise ValueError("it holds something that is no peer")
