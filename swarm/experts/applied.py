"""Which gradients an expert has applied already, so that each is applied at most once. No I/O.

A request id is a nonce of the client's process and a rising number. The numbers applied last are remembered per
(peer, nonce); what is at or below the largest number forgotten is refused as too old, never applied.
"""

from __future__ import annotations

from collections import OrderedDict

from swarm.errors import StaleRequestError
from swarm.experts.protocol import split_request_id
from swarm.identity import PeerId

WINDOW = 4096
"""Applied ids remembered per client process."""
MAX_CLIENTS = 1024
"""Client processes remembered per expert; the least recently active is forgotten first."""


class _Client:
    __slots__ = ("floor", "numbers")

    def __init__(self) -> None:
        self.floor = -1
        self.numbers: OrderedDict[int, None] = OrderedDict()


class AppliedIds:
    """The dedupe window of one expert."""

    def __init__(self, window: int = WINDOW, max_clients: int = MAX_CLIENTS) -> None:
        self._window = window
        self._max_clients = max_clients
        self._clients: OrderedDict[tuple[PeerId, bytes], _Client] = OrderedDict()

    def claim(self, peer_id: PeerId, request_id: bytes) -> None:
        """Note that the gradient of this id is being applied now.

        Raises:
            StaleRequestError: It was applied before, or is too old to know.
        """
        key = (peer_id, split_request_id(request_id)[0])
        number = split_request_id(request_id)[1]
        client = self._clients.setdefault(key, _Client())
        self._clients.move_to_end(key)
        fix = "Ask again with apply=False for the gradients of the inputs."
        if number in client.numbers:
            raise StaleRequestError("The gradient of this request was applied already.", fix=fix)
        if number <= client.floor:
            raise StaleRequestError("The request is older than the ids that this expert remembers.", fix=fix)
        client.numbers[number] = None
        while len(client.numbers) > self._window:
            client.floor = max(client.floor, client.numbers.popitem(last=False)[0])
        while len(self._clients) > self._max_clients:
            self._clients.popitem(last=False)
