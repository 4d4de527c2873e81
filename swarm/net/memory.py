"""A transport inside one process: thousands of peers in virtual time, with the real hello, sessions and limits.

Messages are serialised to bytes and back, so that malformed input and size limits behave as they do over gRPC. How they
travel is up to `swarm.net.memory_network`.
"""

from __future__ import annotations

import asyncio
import hashlib
import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from swarm.config import PeerConfig
from swarm.errors import (
    CallTimeoutError,
    ConnectionLostError,
    PeerUnreachableError,
    SwarmError,
    UnknownSessionError,
    error_from_wire,
)
from swarm.identity import KeyPair, PeerId
from swarm.net.base import BaseTransport, HeldSession, HelloService, identity_mismatch
from swarm.net.hello import HELLO_PATH
from swarm.net.memory_network import MemoryNetwork
from swarm.net.memory_stream import ClientStream
from swarm.net.security import Authorizer
from swarm.net.transport import ByteStream, Contact, StreamMethod
from swarm.runtime import Runtime

_CONNECT_ROUND_TRIPS = 3  # TCP and TLS to fetch the certificate, TLS again on the pinned channel
_ERROR_BYTES = 256
_HELLO_BYTES = 256  # of a message of a modelled hello


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
