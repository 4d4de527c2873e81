"""What connects the peers of one process: who listens where, how long messages take, which are lost, who is dead.

Latency, loss, partitions, frozen and killed peers are hooks of `MemoryNetwork`; the digest of everything that was sent
tells whether two runs were the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from swarm.errors import PeerUnreachableError, PortInUseError
from swarm.identity import PeerId
from swarm.net.hello import HELLO_PATH

if TYPE_CHECKING:
    from swarm.net.memory import MemoryTransport

Latency: TypeAlias = Callable[[PeerId, PeerId, random.Random], float]

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
