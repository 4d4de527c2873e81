"""Links that are slow, far or broken: one TCP proxy in front of each peer's port, without root.

A peer listens on a port of its own and announces its link's address (`transport.announce`), so that everybody else
reaches it through the link. Connections that a peer opens itself pass the links of those it calls, and its own one as
well where it is known whose they are (`source`): then both directions of all its traffic share its bandwidth.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from swarm.errors import UsageError
from swarm.net.addresses import join_address, split_address
from swarm.simulation.shaping import Corruptor, Lane, Shape, piece_bytes

BUFFER_BYTES = 4 * 1024 * 1024
"""Under way at most, for each direction of a connection; then its sender has to wait."""
QUEUE_S = 0.1
"""A connection is read ahead of what its links have let pass by about this much."""
SOCKET_BYTES = 256 * 1024
"""Of the kernel's receive buffer, which would else grow and hide a slow link from the sender."""
CONNECT_S = 10.0
CLOSE_GRACE_S = 1.0

End = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Direction = Literal["up", "down", "both"]
"""Of the peer behind the link: what it sends, what it receives."""


class Link:
    """The link in front of one peer. Lives on the loop that starts it.

    Args:
        target: `host:port` on which the peer listens. Connections are tried when somebody comes, not before.
        shape: What the link is like.
        seed: Decides jitter and which bytes are damaged.
        source: Finds the link of whoever connects, if it is known.

    Attributes:
        shape: What the link is like at present; `change` it.
        up, down: What the peer sends and receives.
        accepted: How many connections others have opened through it.
    """

    def __init__(
        self,
        target: str,
        shape: Shape | None = None,
        *,
        seed: int = 0,
        source: Callable[[tuple[str, int], int], Awaitable[Link | None]] | None = None,
    ) -> None:
        self.target = split_address(target)
        self.shape = shape or Shape()
        self.up, self.down = Lane(self.shape.up_mbit), Lane(self.shape.down_mbit)
        self.accepted = 0
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.connections: dict[_Connection, None] = {}
        self._seed = seed
        self._source = source
        self._server: asyncio.Server | None = None
        self._address = ""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._healing: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """`host:port` on which the link listens: what the peer behind it announces."""
        return self._address

    @property
    def buffered_bytes(self) -> int:
        """What is under way."""
        return sum(connection.buffered_bytes for connection in self.connections)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)  # accepted sockets inherit it
        listener.setblocking(False)
        self._server = await asyncio.start_server(self._connected, sock=listener)
        self._address = join_address(*listener.getsockname()[:2])
        return self._address

    # Changes while it runs -------------------------------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Change fields of the shape; what is under way keeps its time of arrival. Raises `UsageError`."""
        known = {field.name for field in dataclasses.fields(Shape)}
        unknown = [name for name in changes if name not in known]
        if unknown:
            raise UsageError(f"A link has no {unknown[0]!r}.", fix=f"Use {', '.join(sorted(known))}.")
        self.shape = dataclasses.replace(self.shape, **changes)
        self.up.set(self.shape.up_mbit)
        self.down.set(self.shape.down_mbit)

    def stall(self, seconds: float | None = None) -> None:
        """Let nothing pass, for `seconds` or until `resume`. Connections stay open."""
        self.resume()
        self.flowing.clear()
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.resume)

    def resume(self) -> None:
        """End a stall."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.flowing.set()

    def reset(self) -> int:
        """Break all connections, for both ends; how many there were. New ones are accepted."""
        connections = list(self.connections)
        for connection in connections:
            connection.reset()
        return len(connections)

    def half_open(self) -> int:
        """Break all connections on the side of the link's peer only; how many there were.

        The others' ends stay open, as after a power cut behind the link: what they send is lost, and nobody tells them.
        """
        connections = list(self.connections)
        for connection in connections:
            connection.half_open(self)
        return len(connections)

    def swallow(self, seconds: float | None = None, direction: Direction = "both") -> None:
        """Lose all that passes in one direction or both, for `seconds` or until `heal`; sockets stay open.

        A connection that lost something stays silent in that direction, also afterwards, as one does whose mapping a
        NAT has forgotten. Those that carried nothing meanwhile, and new ones, work again.
        """
        self.heal()
        self.up.swallows, self.down.swallows = direction != "down", direction != "up"
        if seconds is not None:
            self._healing = asyncio.get_running_loop().call_later(seconds, self.heal)

    def heal(self) -> None:
        """Lose nothing more."""
        if self._healing is not None:
            self._healing.cancel()
            self._healing = None
        self.up.swallows = self.down.swallows = False

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Listen no more and end all connections, within `grace_s`. Idempotent."""
        if self._server is not None:
            self._server.close()
        self.resume()
        self.heal()
        for connection in list(self.connections):
            connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Connections -----------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        self.accepted += 1
        number = self.accepted
        try:
            if self.shape.refuse:
                abort(writer)
                return
            source = None
            if self._source is not None:
                source = await self._source(writer.get_extra_info("peername")[:2], split_address(self._address)[1])
            connection = _Connection(self, source, (reader, writer), f"{self._seed}/{number}")
            await connection.run()
        finally:
            await end(writer)
            del self._tasks[task]


class _Connection:
    """One connection through a link, and through its caller's link where that is known."""

    def __init__(self, link: Link, source: Link | None, client: End, seed: str) -> None:
        self._link = link
        self._links = [link] if source is None or source is link else [source, link]
        self._client = client
        self._target: End | None = None
        self._kept = client
        self._seed = seed
        self._over = asyncio.Event()
        self._swallows = link.shape.blackhole
        self._ways: list[_Way] = []

    @property
    def buffered_bytes(self) -> int:
        return sum(way.buffered_bytes for way in self._ways)

    async def run(self) -> None:
        for link in self._links:
            link.connections[self] = None
        try:
            if not self._swallows:
                await self._carry()
            if self._swallows:
                await self._swallow()
        finally:
            for link in self._links:
                link.connections.pop(self, None)
            if self._target is not None:
                await end(self._target[1])

    async def _carry(self) -> None:
        """Carry bytes both ways until both have ended, one end breaks, or we are told to stop."""
        link = self._link
        try:
            await link.flowing.wait()
            async with asyncio.timeout(CONNECT_S):
                self._target = await asyncio.open_connection(*link.target)
        except (OSError, TimeoutError):  # nobody is there: that is what the caller should see
            abort(self._client[1])
            return
        inward = [*(each.up for each in self._links if each is not link), link.down]
        outward = [link.up, *(each.down for each in self._links if each is not link)]
        self._ways = [
            _Way(self._client[0], self._target[1], self._links, inward, f"{self._seed}/in"),
            _Way(self._target[0], self._client[1], self._links, outward, f"{self._seed}/out"),
        ]
        pumps = asyncio.ensure_future(self._pump())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait([pumps, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            pumps.cancel()
            over.cancel()
            await asyncio.gather(pumps, over, return_exceptions=True)

    async def _pump(self) -> None:
        assert self._target is not None
        try:
            async with asyncio.TaskGroup() as group:
                for way in self._ways:
                    group.create_task(way.take())
                    group.create_task(way.give())
        except* OSError:  # one end broke: so does the other, unless it shall not know
            if not self._swallows:
                self.reset()

    async def _swallow(self) -> None:
        """Keep the end that was not broken open and lose what it sends."""
        reader = self._kept[0]
        over = asyncio.ensure_future(self._over.wait())
        read: asyncio.Future[bytes] | None = None
        try:
            while not over.done():
                read = asyncio.ensure_future(reader.read(65536))
                await asyncio.wait([read, over], return_when=asyncio.FIRST_COMPLETED)
                if read.done() and (read.exception() is not None or not read.result()):
                    return
        finally:
            over.cancel()
            if read is not None:
                read.cancel()
                await asyncio.gather(read, return_exceptions=True)

    def reset(self) -> None:
        abort(self._client[1])
        if self._target is not None:
            abort(self._target[1])
        self._swallows = False
        self._over.set()

    def half_open(self, at: Link) -> None:
        if self._swallows or self._target is None:
            return
        self._swallows = True
        for way in self._ways:
            way.cut = True
        if at is self._link:
            abort(self._target[1])
        else:
            self._kept = self._target
            abort(self._client[1])
        self._over.set()
        self._over = asyncio.Event()

    def close(self) -> None:
        self._swallows = False
        self._over.set()


class _Way:
    """One direction of a connection: bytes are taken, wait until they have passed the links, and are given on."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        links: Sequence[Link],
        lanes: Sequence[Lane],
        seed: str,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._links, self._lanes = links, lanes
        self._rng = random.Random(seed)
        self._corruptor = Corruptor(random.Random(f"{seed}/damage"))
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._last_due_s = 0.0
        self._changed = asyncio.Event()
        self.cut = False
        self.lost = False
        """Something was swallowed: whatever follows cannot arrive."""
        self.buffered_bytes = 0
        writer.transport.set_write_buffer_limits(high=64 * 1024)

    async def take(self) -> None:
        """Read until the end, no further ahead than the links and the other end can follow."""
        clock = asyncio.get_running_loop().time
        while True:
            for link in self._links:
                await link.flowing.wait()
            data = await self._reader.read(piece_bytes(self._lanes))
            self.lost = self.lost or any(lane.swallows for lane in self._lanes)
            if self.lost:
                if not data:
                    self.cut = True
                    self._changed.set()
                    return
                continue
            departs_s = clock()
            for lane in self._lanes:
                departs_s = lane.reserve(departs_s, len(data))
            shapes = [link.shape for link in self._links]
            late_ms = sum(shape.latency_ms + shape.jitter_ms * self._rng.random() for shape in shapes)
            self._last_due_s = max(self._last_due_s, departs_s + late_ms / 1e3)
            data = self._corruptor.apply(data, sum(shape.corrupt_per_mb for shape in shapes))
            self._under_way.append((self._last_due_s, data))
            self.buffered_bytes += len(data)
            self._changed.set()
            if not data:
                return
            while self.buffered_bytes > BUFFER_BYTES:
                self._changed.clear()
                await self._changed.wait()
            ahead_s = departs_s - clock() - QUEUE_S
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)

    async def give(self) -> None:
        """Write what has arrived, until the end, which is passed on as well."""
        clock = asyncio.get_running_loop().time
        while True:
            while not self._under_way:
                if self.cut:
                    return
                self._changed.clear()
                await self._changed.wait()
            due_s, data = self._under_way[0]
            if due_s > clock():
                await asyncio.sleep(due_s - clock())
            for link in self._links:
                await link.flowing.wait()
            if self.cut:
                return
            if not data:
                self._writer.write_eof()
                return
            self._writer.write(data)
            await self._writer.drain()
            self._under_way.popleft()
            self.buffered_bytes -= len(data)
            self._changed.set()


async def end(writer: asyncio.StreamWriter) -> None:
    """Close a connection; who does not take what was written to it is not waited for long."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_GRACE_S / 2):
            await writer.wait_closed()
    except OSError:  # TimeoutError is one: then nothing more can be done for it
        writer.transport.abort()
    except asyncio.CancelledError:
        writer.transport.abort()
        raise


def abort(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset: what is under way is lost, and the other end sees an error."""
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.transport.is_closing():
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        with suppress(OSError):  # it is closed already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()
