"""A network inside one process: thousands of peers in virtual time, with the real hello, sessions and limits.

Messages are serialised to bytes and back, so that malformed input and size limits behave as they do over gRPC. Latency,
loss, partitions, frozen and killed peers are hooks of `MemoryNetwork`; the digest of everything that was sent tells
whether two runs were the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from swarm.config import PeerConfig
from swarm.errors import (
    CallTimeoutError,
    ConnectionLostError,
    PeerUnreachableError,
    PortInUseError,
    SwarmError,
    UnknownSessionError,
    error_from_wire,
)
from swarm.identity import KeyPair, PeerId
from swarm.net.base import BaseTransport, HeldSession, HelloService, identity_mismatch
from swarm.net.hello import HELLO_PATH
from swarm.net.memory_stream import ClientStream
from swarm.net.security import Authorizer
from swarm.net.transport import ByteStream, Contact, StreamMethod
from swarm.runtime import Runtime

Latency: TypeAlias = Callable[[PeerId, PeerId, random.Random], float]

_CONNECT_ROUND_TRIPS = 3  # TCP and TLS to fetch the certificate, TLS again on the pinned channel
_ERROR_BYTES = 256


class MemoryNetwork:
    """What connects `MemoryTransport`s.

    Args:
        seed: Of the network's own randomness (latency jitter, loss).
        latency: One-way delay in seconds: a number, or a function of (source, destination, random generator).
        bandwidth_bytes_s: Rate of every one-way path; none is unlimited.

    Attributes:
        drop_probability: Each message is lost with this probability; the call then waits for its deadline.
        call_loss: This part of the unary calls and of the hellos loses its request or its answer: the caller sees a
            timeout, and in half of the cases the call was served.
        corrupt: Called with (source, destination, path, bytes); returns the bytes that arrive.
        messages: How many messages were sent.
    """

    def __init__(self, seed: int = 0, latency: float | Latency = 0.005, bandwidth_bytes_s: float | None = None) -> None:
        self.rng = random.Random(f"network {seed}")
        self.latency: float | Latency = latency
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.drop_probability = 0.0
        self.call_loss = 0.0
        self.corrupt: Callable[[PeerId, PeerId, str, bytes], bytes] | None = None
        self.messages = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._listeners: dict[str, MemoryTransport] = {}
        self._hosts = 0
        self._group_of: dict[PeerId, int] | None = None
        self._frozen: dict[PeerId, list[Callable[[], None]]] = {}
        self._killed: dict[PeerId, None] = {}

    # -- observation -----------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Hash over (virtual time, source, destination, method, size) of every message so far."""
        return self._digest.copy().hexdigest()

    # -- faults ----------------------------------------------------------------------------------------------------

    def partition(self, groups: Iterable[Iterable[PeerId]] | None) -> None:
        """Lose every message between peers of different groups (peers in no group form one more); none heals."""
        if groups is None:
            self._group_of = None
        else:
            self._group_of = {peer: number for number, group in enumerate(groups, 1) for peer in group}

    def freeze(self, peer_id: PeerId) -> None:
        """Hold everything from and to a peer until `thaw`, as if its process were suspended."""
        self._frozen.setdefault(peer_id, [])

    def thaw(self, peer_id: PeerId) -> None:
        for deliver in self._frozen.pop(peer_id, []):
            deliver()

    def kill(self, peer_id: PeerId) -> None:
        """End a peer without a word: its connections break, nobody answers at its address, it sends nothing more."""
        self._killed[peer_id] = None
        self.thaw(peer_id)
        for transport in [t for t in self._listeners.values() if t.peer_id == peer_id]:
            transport.die()

    # -- used by transports ----------------------------------------------------------------------------------------

    def bind(self, transport: MemoryTransport, host: str, port: int) -> str:
        """Give a transport its address. Raises `PortInUseError`."""
        self._hosts += 1
        if host == "0.0.0.0":  # a machine, and a /24 network, of its own
            host = f"10.{self._hosts >> 8 & 255}.{self._hosts & 255}.1"
            port = port or 7000
        address = f"{host}:{port or 10_000 + self._hosts}"
        if address in self._listeners:
            raise PortInUseError(f"Another peer listens on {address}.", fix="Choose another port, or 0 for a free one.")
        self._listeners[address] = transport
        self._killed.pop(transport.peer_id, None)
        return address

    def unbind(self, address: str, transport: MemoryTransport) -> None:
        if self._listeners.get(address) is transport:
            del self._listeners[address]

    def listener(self, address: str) -> MemoryTransport:
        """Who listens at an address. Raises `PeerUnreachableError`."""
        listener = self._listeners.get(address)
        if listener is None:
            raise PeerUnreachableError(f"Nobody listens at {address}.", fix="Check that the peer runs.")
        return listener

    def transmit(self, source: PeerId, target: PeerId, path: str, size: int) -> float | None:
        """Account for one message; returns its delay in seconds, or none when it is lost."""
        self.messages += 1
        now = asyncio.get_running_loop().time()
        self._digest.update(struct.pack("<dI8s8s", now, size, source.digest, target.digest) + path.encode())
        if self._killed and (source in self._killed or target in self._killed):
            return None
        groups = self._group_of
        if groups is not None and groups.get(source, 0) != groups.get(target, 0):
            return None
        if self.drop_probability and self.rng.random() < self.drop_probability:
            return None
        latency = self.latency
        delay = latency(source, target, self.rng) if callable(latency) else latency
        return delay + size / self.bandwidth_bytes_s if self.bandwidth_bytes_s else delay

    async def carry(self, source: PeerId, target: PeerId, path: str, size: int, lost: bool = False) -> None:
        """Return when a message of this size has arrived; never if it is lost."""
        delay = self.transmit(source, target, path, size)
        if delay is None or lost:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(delay)
        if self._frozen:
            thawed = asyncio.get_running_loop().create_future()

            def deliver() -> None:
                if not thawed.done() and not self.hold(source, target, deliver):
                    thawed.set_result(None)

            deliver()
            await thawed

    def hold(self, source: PeerId, target: PeerId, deliver: Callable[[], None]) -> bool:
        """Whether a message must wait; `deliver` is then called again when the frozen peer thaws."""
        for peer in (source, target):
            waiting = self._frozen.get(peer)
            if waiting is not None:
                waiting.append(deliver)
                return True
        return False

    def lose_call(self) -> str:
        """Which message of a call is lost: "request", "answer" or none ("")."""
        if not self.call_loss or self.rng.random() >= self.call_loss:
            return ""
        return "request" if self.rng.random() < 0.5 else "answer"

    def alter(self, source: PeerId, target: PeerId, path: str, data: bytes) -> bytes:
        return data if self.corrupt is None else self.corrupt(source, target, path, data)


class _Line:
    """A hello line: every message is carried to the listener, its answer is carried back."""

    def __init__(self, dialer: MemoryTransport, listener: MemoryTransport, service: HelloService) -> None:
        self.peer_id = listener.peer_id
        self.certificate_hash = listener.certificate_hash
        self.pin = None
        self._dialer = dialer
        self._listener = listener
        self._service = service
        self._replies: deque[bytes | SwarmError] = deque()

    async def send(self, message: bytes) -> None:
        dialer, network = self._dialer, self._dialer.network
        await network.carry(dialer.peer_id, self.peer_id, HELLO_PATH, len(message))
        if not self._listener.listening:
            raise ConnectionLostError(f"Peer {self.peer_id.short} went away during hello.")
        try:
            self._replies.append(self._service.step(network.alter(dialer.peer_id, self.peer_id, HELLO_PATH, message)))
        except SwarmError as error:
            self._replies.append(error_from_wire(error.to_wire(), str(self.peer_id)))

    async def receive(self) -> bytes:
        reply = self._replies.popleft() if self._replies else None
        dialer, network = self._dialer, self._dialer.network
        if reply is None:
            await asyncio.get_running_loop().create_future()
        size = len(reply) if isinstance(reply, bytes) else _ERROR_BYTES
        await network.carry(self.peer_id, dialer.peer_id, HELLO_PATH, size)
        if isinstance(reply, SwarmError):
            raise reply
        assert reply is not None
        return network.alter(self.peer_id, dialer.peer_id, HELLO_PATH, reply)


class MemoryTransport(BaseTransport):
    """A `Transport` on a `MemoryNetwork`.

    Args:
        network: The network; all its transports live on one event loop.
    """

    def __init__(
        self, identity: KeyPair, authorizer: Authorizer, config: PeerConfig, runtime: Runtime, network: MemoryNetwork
    ) -> None:
        super().__init__(identity, authorizer, config, runtime)
        self.network = network
        self.listening = False
        self._address = ""
        self._certificate_hash = hashlib.sha256(b"memory certificate" + identity.public_key).digest()
        self._running: dict[object, Callable[[], None]] = {}
        """What to call for each running handler when this side dies or stops."""
        self._own_streams: dict[ClientStream, PeerId] = {}
        self._idle: asyncio.Event | None = None

    @property
    def contact(self) -> Contact:
        return Contact(self.peer_id, self.config.transport.announce or (self._address,))

    @property
    def certificate_hash(self) -> bytes:
        return self._certificate_hash

    async def start(self) -> None:
        self._check_open()
        settings = self.config.transport
        self._address = self.network.bind(self, settings.listen_host, settings.port)
        self.listening = True

    async def close(self, grace_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        self.network.unbind(self._address, self)
        if self._running and grace_s > 0:
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
            except TimeoutError:
                pass  # the grace is over
        self.die()
        await self._cancel_connecting()

    def die(self) -> None:
        """Break everything at once, without a word to anybody."""
        self.listening = False
        self.network.unbind(self._address, self)
        for stop in list(self._running.values()):
            stop()
        for stream in list(self._own_streams):
            stream.fail(ConnectionLostError("This peer's transport has stopped."))

    def started(self, handler: object, stop: Callable[[], None]) -> None:
        """Remember a running handler."""
        self._running[handler] = stop

    def finished(self, handler: object) -> None:
        self._running.pop(handler, None)
        if not self._running and self._idle is not None:
            self._idle.set()

    # -- calls -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_hello(self, address: str, expect: PeerId | None) -> AsyncIterator[_Line]:
        network = self.network
        listener = network.listener(address)
        lost = bool(network.lose_call())
        for _ in range(_CONNECT_ROUND_TRIPS):
            await network.carry(self.peer_id, listener.peer_id, "connect", 0, lost)
            await network.carry(listener.peer_id, self.peer_id, "connect", 0)
        listener = network.listener(address)
        service = listener._listen_to_hello(self._address)
        try:
            yield _Line(self, listener, service)
        finally:
            service.close()

    async def _exchange(self, held: HeldSession, path: str, data: bytes, budget_s: float) -> bytes:
        network, ours, theirs = self.network, self.peer_id, held.peer_id
        try:
            async with asyncio.timeout(budget_s):
                listener = self._pinned(held)
                lost = network.lose_call()
                await network.carry(ours, theirs, path, len(data), lost == "request")
                if not listener.listening:
                    raise ConnectionLostError(f"The connection to peer {theirs.short} broke.")
                try:
                    reply = await _interruptible(
                        listener, listener._answer(path, held.token, network.alter(ours, theirs, path, data))
                    )
                except _StoppedError:
                    raise ConnectionLostError(f"The connection to peer {theirs.short} broke.") from None
                except SwarmError as error:
                    await network.carry(theirs, ours, path, _ERROR_BYTES, lost == "answer")
                    raise error_from_wire(error.to_wire(), str(theirs)) from None
                await network.carry(theirs, ours, path, len(reply), lost == "answer")
                return network.alter(theirs, ours, path, reply)
        except TimeoutError:
            raise CallTimeoutError(f"Peer {theirs.short} did not answer {path} within {budget_s:.3g} s.") from None

    def _pinned(self, held: HeldSession) -> MemoryTransport:
        """Who listens where a session was granted. Raises `PeerUnreachableError`, `IdentityMismatchError`."""
        listener = self.network.listener(held.address)
        if listener.peer_id != held.peer_id:
            raise identity_mismatch(held.address, held.peer_id, listener.peer_id)
        return listener

    def _drop_connection(self, peer_id: PeerId) -> None:
        for stream in [s for s, to in self._own_streams.items() if to == peer_id]:
            stream.fail(ConnectionLostError(f"The connection to peer {peer_id.short} was closed."))

    # -- streams ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(self, to: Contact, method: StreamMethod, *, timeout_s: float) -> AsyncIterator[ByteStream]:
        self._check_open()
        end_s = self.runtime.clock.time() + timeout_s
        held, listener = await self._session_for_stream(to, timeout_s)
        stream = ClientStream(self, listener, method.path, held.token)
        self._own_streams[stream] = to.peer_id
        timer = asyncio.get_running_loop().call_at(end_s, stream.expire, timeout_s)
        self.stats.calls_made += 1
        try:
            stream.open()
            yield stream
        finally:
            timer.cancel()
            self._own_streams.pop(stream, None)
            stream.cancel()

    async def _session_for_stream(self, to: Contact, timeout_s: float) -> tuple[HeldSession, MemoryTransport]:
        """A session that the other side knows. (A real stream learns this from the first answer; here it may look.)"""
        for attempt in (0, 1):
            held = self._held.get(to.peer_id) or await self._session_for(to, timeout_s)
            try:
                listener = self._pinned(held)
                listener.sessions.find(held.token)
            except (UnknownSessionError, PeerUnreachableError):
                self._forget(held)
                if attempt:
                    raise
            else:
                return held, listener
        raise AssertionError("unreachable")


class _StoppedError(Exception):
    """The serving side stopped while a handler ran."""


async def _interruptible(listener: MemoryTransport, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Run a handler inline in the caller's task, where the serving side can still end it as `asyncio.timeout` does."""
    task = asyncio.current_task()
    assert task is not None
    cancelling, stopped = task.cancelling(), False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            task.cancel()

    key = object()
    listener.started(key, stop)
    try:
        return await answer
    except asyncio.CancelledError:
        if stopped and task.uncancel() <= cancelling:
            raise _StoppedError from None
        raise
    finally:
        listener.finished(key)
