"""Our gRPC channels to one peer: which call goes over which, and when one that has fallen silent is replaced.

A connection whose mapping a NAT has forgotten, or behind which the power failed, stays open and answers nothing; gRPC's
keepalive takes 50 s to find that out. So a channel on which calls end in silence, one after the other, gets a
successor for the calls that follow. Those that run on it go on: a peer that is merely slow loses nothing.
"""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from swarm.net.loop import disable_grpc_fork_handlers

disable_grpc_fork_handlers()  # before the first import of grpc

import grpc
from grpc import aio

from swarm.net.addresses import join_address, split_address
from swarm.net.tls import PinnedCertificate

SILENT_CALLS = 2
"""So many calls in a row that heard nothing make a channel suspect."""
SILENT_S = 0.3
"""A stream that was given up sooner says nothing about its channel."""

Options = list[tuple[str, Any]]


class Road:
    """One channel, and what its calls heard."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.running = 0
        self.silent = 0
        self.retired = False
        self._unary: dict[str, Callable[..., Any]] = {}

    def unary(self, path: str) -> Callable[..., Any]:
        """The callable for a unary method."""
        found = self._unary.get(path)
        if found is None:
            found = self._unary[path] = self.channel.unary_unary(path)
        return found


class Link:
    """Our channels to one peer: one for control calls, and `bulk` for streams, opened when needed.

    Args:
        spawn: Runs the closing of a channel.

    Attributes:
        active: Calls and streams that run.
        streams: These streams.
    """

    def __init__(
        self,
        address: str,
        certificate: PinnedCertificate,
        options: Options,
        bulk: int,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self.peer_id = certificate.peer_id
        self.certificate = certificate
        self.active = 0
        self.streams: dict[Any, None] = {}
        host, port = split_address(address)
        self._target = f"dns:///{join_address(host, port)}"
        self._credentials = grpc.ssl_channel_credentials(root_certificates=certificate.pem)
        self._options: Options = [*options, ("grpc.ssl_target_name_override", str(certificate.peer_id))]
        self._spawn = spawn
        self.control = self._road()
        self._bulk: list[Road] = []
        self._bulk_limit = bulk
        self._turn = 0
        self._retired: dict[Road, None] = {}

    @property
    def channels(self) -> int:
        return 1 + len(self._bulk) + len(self._retired)

    def _road(self) -> Road:
        return Road(aio.secure_channel(self._target, self._credentials, options=self._options))

    def bulk(self) -> Road:
        """The channel for the next stream: bulk channels take turns."""
        self._turn += 1
        at = self._turn % self._bulk_limit
        while len(self._bulk) <= at:
            self._bulk.append(self._road())
        return self._bulk[at]

    def begin(self, road: Road) -> None:
        """A call begins on a channel."""
        road.running += 1
        self.active += 1

    def end(self, road: Road, heard: bool | None) -> None:
        """A call has ended.

        Args:
            heard: Whether the peer answered anything; none if that says nothing about the channel.
        """
        road.running -= 1
        self.active -= 1
        if heard is not None:
            road.silent = 0 if heard else road.silent + 1
        if road.silent >= SILENT_CALLS and not road.retired:
            self._replace(road)
        if road.retired and not road.running and road in self._retired:
            del self._retired[road]
            self._spawn(road.channel.close(), f"close silent channel to {self.peer_id.short}")

    def _replace(self, road: Road) -> None:
        if road is self.control:
            self.control = self._road()
        elif road in self._bulk:
            self._bulk[self._bulk.index(road)] = self._road()
        else:
            return
        road.retired = True
        self._retired[road] = None

    async def close(self) -> None:
        """Close all channels; running calls on them end as lost."""
        roads, self._retired = [self.control, *self._bulk, *self._retired], {}
        for road in roads:
            await road.channel.close()
