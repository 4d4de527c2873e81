"""Addresses that callers say they have, until we have reached them there ourselves. No I/O.

Whoever calls us has proved who it is, not where it is: a peer that is believed at once could send everybody else to
addresses of its choice. A claim is verified by dialling it: at once where it matters (a neighbour, or a peer of the
table that has moved), else by and by, and only if the table has a place for the peer. No peer is dialled more often
than once an interval, whatever it claims.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from swarm.identity import PeerId
from swarm.net.transport import Contact

MAX_CLAIMS = 512
"""Claims kept; the oldest are forgotten (their peers call again)."""
MAX_TRIED = 2048


class Claims:
    """Claims in the order in which they came.

    Args:
        again_s: A peer's claims are verified at most once in this time.
        clock: Seconds, monotonic.
    """

    def __init__(self, again_s: float, clock: Callable[[], float]) -> None:
        self._again_s = again_s
        self._clock = clock
        self._open: OrderedDict[PeerId, Contact] = OrderedDict()
        self._tried: OrderedDict[PeerId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, contact: Contact) -> bool:
        """Remember a claim; returns whether it may be verified now."""
        self._open[contact.peer_id] = contact
        self._open.move_to_end(contact.peer_id)
        while len(self._open) > MAX_CLAIMS:
            self._open.popitem(last=False)
        return self._may(contact.peer_id)

    def _may(self, peer_id: PeerId) -> bool:
        tried_s = self._tried.get(peer_id)
        return tried_s is None or self._clock() - tried_s >= self._again_s

    def take(self, count: int, wanted: Callable[[Contact], bool]) -> list[Contact]:
        """Claims to verify now, oldest first; they count as tried. Those that nobody wants any more are dropped."""
        taken: list[Contact] = []
        for peer_id, contact in list(self._open.items()):
            if len(taken) == count:
                break
            if not wanted(contact):
                del self._open[peer_id]
            elif self._may(peer_id):
                taken.append(contact)
                self.begin(peer_id)
        return taken

    def begin(self, peer_id: PeerId) -> None:
        """A claim is being verified: it is settled, however that ends."""
        self._open.pop(peer_id, None)
        self._tried[peer_id] = self._clock()
        self._tried.move_to_end(peer_id)
        while len(self._tried) > MAX_TRIED:
            self._tried.popitem(last=False)
