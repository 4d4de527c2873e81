"""The exchanges of the groups to which this peer pledged itself: streams of other members wait until it enters."""

from __future__ import annotations

import asyncio

from swarm.averaging.exchange import Exchange
from swarm.errors import NoGroupError

KEPT_EXCHANGES = 4


class Entries:
    """One for each averaging key; groups by their nonces."""

    def __init__(self) -> None:
        self._exchanges: dict[bytes, asyncio.Future[Exchange]] = {}

    def __contains__(self, nonce: bytes) -> bool:
        """Whether this peer pledged itself to the group, or is in it."""
        return nonce in self._exchanges

    def expect(self, nonce: bytes) -> asyncio.Future[Exchange]:
        """This peer pledged itself to a group."""
        if nonce not in self._exchanges:
            while len(self._exchanges) >= KEPT_EXCHANGES:
                self._exchanges.pop(next(iter(self._exchanges))).cancel()
            self._exchanges[nonce] = asyncio.get_running_loop().create_future()
        return self._exchanges[nonce]

    def enter(self, nonce: bytes, exchange: Exchange) -> None:
        """Let streams of the sealed group reach the exchange."""
        self.expect(nonce).set_result(exchange)

    def entered(self, nonce: bytes) -> bool:
        """Whether nobody has to wait for this peer in that group."""
        future = self._exchanges.get(nonce)
        return future is None or future.done()

    def leave(self, nonce: bytes) -> None:
        """This peer is not in that group, or no longer."""
        future = self._exchanges.pop(nonce, None)
        if future is not None:
            future.cancel()

    async def get(self, nonce: bytes, patience_s: float) -> Exchange:
        """The exchange of a group, once this peer enters it. Raises `NoGroupError` if it is in no such group."""
        future = self._exchanges.get(nonce)
        if future is None:
            raise NoGroupError("This peer is in no such group.")
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(future)
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not future.cancelled():
                raise
            raise NoGroupError("This peer left the group before the exchange.") from error
