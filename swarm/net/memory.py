"""A network inside one process: thousands of peers in virtual time, with the real hello, sessions and limits.

Messages are serialised to bytes and back, so that malformed input and size limits behave as they do over gRPC. Latency,
loss, partitions, frozen and killed peers are hooks of `MemoryNetwork`; the digest of everything that was sent tells
whether two runs were the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import struct
import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, cast

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
_HELLO_BYTES = 256  # of a message of a modelled hello
_SENT = struct.Struct("<dI8s8s")


class MemoryNetwork:
    """What connects `MemoryTransport`s.

    Args:
        seed: Of the network's own randomness (latency jitter, loss).
        latency: One-way delay in seconds: a number, or a function of (source, destination, random generator).
        bandwidth_bytes_s: Rate of every one-way path; none is unlimited.
        modelled_hello: Hellos take as many round trips and go through the same authorizers, sessions and limits, but
            nothing is signed: identities are taken from the transports. For runs of thousands of peers.

    Attributes:
        drop_probability: Each message is lost with this probability; the call then waits for its deadline.
        call_loss: This part of the unary calls and of the hellos loses its request or its answer: the caller sees a
            timeout, and in half of the cases the call was served.
        corrupt: Called with (source, destination, path, bytes); returns the bytes that arrive.
        messages: How many messages were sent.
    """

    def __init__(
        self,
        seed: int = 0,
        latency: float | Latency = 0.005,
        bandwidth_bytes_s: float | None = None,
        *,
        modelled_hello: bool = False,
    ) -> None:
        self.modelled_hello = modelled_hello
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
        self._killed: dict[PeerId, bool] = {}

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

    def kill(self, peer_id: PeerId, *, silent: bool = False) -> None:
        """End a peer without a word: its tasks end, its connections break, it sends nothing more.

        Args:
            silent: Its machine is gone, not only its process: who calls it waits for an answer in vain, where otherwise
                the connection breaks or is refused.
        """
        self._killed[peer_id] = silent
        self.thaw(peer_id)
        for transport in [t for t in self._listeners.values() if t.peer_id == peer_id]:
            transport.kill(silent=silent)

    # -- used by transports ----------------------------------------------------------------------------------------

    def bind(self, transport: MemoryTransport, host: str, port: int) -> str:
        """Give a transport its address. Raises `PortInUseError`."""
        self._hosts += 1
        if host == "0.0.0.0":  # a machine, and a /24 network, of its own
            host = f"10.{self._hosts >> 8 & 255}.{self._hosts & 255}.1"
            port = port or 7000
        address = f"{host}:{port or 10_000 + self._hosts}"
        holder = self._listeners.get(address)
        if holder is not None and not self._killed.get(holder.peer_id):
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

    def transmit(self, source: PeerId, target: PeerId, path: str, size: int, lost: bool = False) -> float | None:
        """Account for one message; returns its delay in seconds, or none when it is lost."""
        self.messages += 1
        now = asyncio.get_running_loop().time()
        self._digest.update(_SENT.pack(now, size, source.digest, target.digest) + path.encode())
        if lost or (self._killed and (source in self._killed or target in self._killed)):
            return None
        groups = self._group_of
        if groups is not None and groups.get(source, 0) != groups.get(target, 0):
            return None
        if self.drop_probability and self.rng.random() < self.drop_probability:
            return None
        latency = self.latency
        delay = latency(source, target, self.rng) if callable(latency) else latency
        return delay + size / self.bandwidth_bytes_s if self.bandwidth_bytes_s else delay

    def transmit_all(self, ways: Sequence[tuple[PeerId, PeerId]], size: int = 0, *, lost: bool = False) -> float | None:
        """The messages of a modelled hello that follow each other; their delay together, none when one is lost."""
        total_s = 0.0
        for source, target in ways:
            delay_s = self.transmit(source, target, HELLO_PATH, size, lost)
            if delay_s is None:
                return None
            total_s += delay_s
        return total_s

    def is_silent(self, peer_id: PeerId) -> bool:
        """Whether a peer was killed with its machine."""
        return self._killed.get(peer_id, False)

    async def carry(self, source: PeerId, target: PeerId, path: str, size: int) -> None:
        """Return when a message of this size has arrived; never if it is lost."""
        await self.arrive(source, target, self.transmit(source, target, path, size), math.inf)

    async def arrive(self, source: PeerId, target: PeerId, delay_s: float | None, end_s: float) -> None:
        """Wait for a message that was sent just now; none as its delay says that it is lost.

        Raises:
            TimeoutError: It has not arrived by `end_s` (loop time).
        """
        loop = asyncio.get_running_loop()
        if delay_s is None or loop.time() + delay_s > end_s:
            await asyncio.sleep(end_s - loop.time()) if end_s < math.inf else await loop.create_future()
            raise TimeoutError
        await asyncio.sleep(delay_s)
        if self._frozen:
            thawed = loop.create_future()

            def deliver() -> None:
                if not thawed.done() and not self.hold(source, target, deliver):
                    thawed.set_result(None)

            deliver()
            async with asyncio.timeout_at(None if end_s == math.inf else end_s):
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
        self.network.unbind(self._address, self)
        self._stop()

    def kill(self, *, silent: bool) -> None:
        """End this peer: what it has under way stops at once, nothing more can be begun. See `MemoryNetwork.kill`."""
        self._closed = True
        if not silent:
            self.network.unbind(self._address, self)
        self._stop()
        for task in self._connecting.values():
            task.cancel()
        self.runtime.abandon_tasks()

    def _stop(self) -> None:
        self.listening = False
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
        if network.lose_call():
            await asyncio.get_running_loop().create_future()
        for _ in range(_CONNECT_ROUND_TRIPS):
            await network.carry(self.peer_id, listener.peer_id, "connect", 0)
            await network.carry(listener.peer_id, self.peer_id, "connect", 0)
        listener = network.listener(address)
        service = listener._listen_to_hello(self._address)
        try:
            yield _Line(self, listener, service)
        finally:
            service.close()

    async def _hello(self, address: str, expect: PeerId | None) -> HeldSession:
        network = self.network
        if not network.modelled_hello or network.corrupt is not None:
            return await super()._hello(address, expect)
        patience_s = self.config.transport.connect_timeout_s
        try:
            return await self._modelled_hello(address, expect, asyncio.get_running_loop().time() + patience_s)
        except TimeoutError as error:
            raise PeerUnreachableError(f"No hello with {address} within {patience_s:g} s.") from error

    async def _modelled_hello(self, address: str, expect: PeerId | None, end_s: float) -> HeldSession:
        """A hello whose proofs are taken for granted. Raises `TimeoutError` after `end_s`, and what `_hello` raises."""
        network, ours = self.network, self.peer_id
        listener = network.listener(address)
        theirs = listener.peer_id
        lost = bool(network.lose_call())
        there, back = (ours, theirs), (theirs, ours)
        await network.arrive(ours, theirs, network.transmit_all([there, back] * _CONNECT_ROUND_TRIPS, lost=lost), end_s)
        if network.listener(address) is not listener or not listener.listening:
            raise PeerUnreachableError(f"Nobody listens at {address}.", fix="Check that the peer runs.")
        if expect is not None and theirs != expect:
            raise identity_mismatch(address, expect, theirs)
        service = listener._listen_to_hello(self._address)
        try:
            delay_s = network.transmit_all([there, back, there], _HELLO_BYTES)
            await network.arrive(ours, theirs, delay_s, end_s)
            if not listener.listening:
                raise ConnectionLostError(f"Peer {theirs.short} went away during hello.")
            self.authorizer.admit(theirs, listener.identity.public_key, listener.authorizer.credential())
            failure: SwarmError | None = None
            try:
                token = service.take_for_granted(self.run_id, self.identity.public_key, self.authorizer.credential())
            except SwarmError as error:
                failure = error_from_wire(error.to_wire(), str(theirs))
            await network.arrive(theirs, ours, network.transmit(theirs, ours, HELLO_PATH, _HELLO_BYTES), end_s)
            if failure is not None:
                raise failure
        finally:
            service.close()
        return self._hold(HeldSession(theirs, address, token, listener.contact.addresses))

    async def _exchange(self, held: HeldSession, path: str, data: bytes, budget_s: float) -> bytes:
        network, ours, theirs = self.network, self.peer_id, held.peer_id
        end_s = asyncio.get_running_loop().time() + budget_s
        lost = network.lose_call()
        failure: SwarmError | None = None
        reply = b""
        try:
            listener = self._pinned(held)
            await network.arrive(
                ours, theirs, network.transmit(ours, theirs, path, len(data), lost == "request"), end_s
            )
            if not listener.listening:
                raise ConnectionLostError(f"The connection to peer {theirs.short} broke.")
            answer = listener._answer(path, held.token, network.alter(ours, theirs, path, data))
            try:
                reply = await _watched(answer, listener, end_s)
            except _StoppedError:
                if not network.is_silent(theirs):
                    raise ConnectionLostError(f"The connection to peer {theirs.short} broke.") from None
                await network.arrive(theirs, ours, None, end_s)
            except SwarmError as error:
                failure = error_from_wire(error.to_wire(), str(theirs))
            size = _ERROR_BYTES if failure is not None else len(reply)
            await network.arrive(theirs, ours, network.transmit(theirs, ours, path, size, lost == "answer"), end_s)
        except TimeoutError:
            raise CallTimeoutError(f"Peer {theirs.short} did not answer {path} within {budget_s:.3g} s.") from None
        if failure is not None:
            raise failure
        return network.alter(theirs, ours, path, reply)

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


@types.coroutine
def _watched(answer: Coroutine[Any, Any, bytes], listener: MemoryTransport, end_s: float) -> Generator[Any, Any, bytes]:
    """Run a handler in the caller's task, where the serving side and the deadline can end it as `asyncio.timeout` does.

    Most handlers never wait: those cost neither a timer nor a place in the listener's books.
    """
    try:
        waits_for = answer.send(None)
    except StopIteration as end:
        return cast(bytes, end.value)
    task = asyncio.current_task()
    assert task is not None
    cancelling, reason = task.cancelling(), ""

    def stop(why: str) -> None:
        nonlocal reason
        if not reason:
            reason = why
            task.cancel()

    key = object()
    listener.started(key, partial(stop, "stopped"))
    timer = asyncio.get_running_loop().call_at(end_s, stop, "expired")
    try:
        while True:  # as `yield from` would, whose first step has been made
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - the handler gets whatever is thrown into its task
                waits_for = answer.throw(error)
            else:
                waits_for = answer.send(sent)
    except StopIteration as end:
        return cast(bytes, end.value)
    except asyncio.CancelledError:
        if not reason or task.uncancel() > cancelling:
            raise
        raise (TimeoutError if reason == "expired" else _StoppedError) from None
    finally:
        timer.cancel()
        listener.finished(key)
