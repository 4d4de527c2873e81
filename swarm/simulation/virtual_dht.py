"""Thousands of DHT peers on one virtual loop: they really join, publish and read, through loss, churn and partitions.

    async def main():
        async with VirtualDht(1000, seed=3, loss=0.05) as swarm:
            await swarm.peers[7].dht.put("greeting", "hello", ttl_s=600)
            swarm.kill(swarm.peers[7])
            assert await swarm.peers[500].dht.get("greeting")

    run_virtual(main, real_timeout_s=None)

Every peer has a seeded identity, so that ids are uniform and a run can be repeated, and bootstraps through a few random
peers that joined before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, cast

from swarm.config import DhtConfig, PeerConfig
from swarm.dht.node import Dht
from swarm.endpoint import Endpoint
from swarm.errors import BootstrapError, SwarmError
from swarm.identity import KeyPair, PeerId
from swarm.net.memory import MemoryTransport
from swarm.net.memory_network import MemoryNetwork
from swarm.net.security import OpenAuthorizer
from swarm.net.transport import Contact, Transport
from swarm.roles import ALL_ROLES
from swarm.runtime import Runtime
from swarm.simulation.virtual import VirtualLoop, VirtualRuntime

T = TypeVar("T")
Builder: TypeAlias = Callable[[Transport, DhtConfig, Runtime], Dht]
"""Makes a peer's DHT in place of `Dht` itself."""

CONTACTS = 3
"""Earlier peers that a new one is told of."""
JOINING = 32
JOINING_FRACTION = 0.25
"""Peers that join at the same time: so many while there are few, later this part of those who are there."""
ATTEMPTS = 5
"""Times that a peer tries to join, each time through other peers."""


class VirtualDht:
    """A network of peers in virtual time; an async context manager on a `VirtualLoop`.

    Args:
        peers: How many have joined when the context is entered.
        seed: Of everything random: identities, delays, losses, choices.
        config: Settings of every peer; the `wan` preset by default.
        latency_s: Bounds of the one-way delay of a message, uniform.
        loss: This part of all calls times out: the request or the answer is lost.
        clock_skew_s: Wall clocks differ from the true time by up to half of this, either way.
        make: Called with a peer's number (in the order of joining); returns what builds its DHT, or none for `Dht`.

    Attributes:
        peers: Everybody alive, in the order of joining.
        network: What connects them.
        rng: For choices that the scenario makes.
    """

    def __init__(
        self,
        peers: int,
        *,
        seed: int = 0,
        config: PeerConfig | None = None,
        latency_s: tuple[float, float] = (0.02, 0.2),
        loss: float = 0.0,
        clock_skew_s: float = 0.0,
        make: Callable[[int], Builder | None] | None = None,
    ) -> None:
        low_s, high_s = latency_s
        self.seed = seed
        self.config = config or PeerConfig.preset("wan")
        self.network = MemoryNetwork(
            seed, lambda source, target, rng: low_s + (high_s - low_s) * rng.random(), modelled_hello=True
        )
        self.network.call_loss = loss
        self.rng = random.Random(f"scenario {seed}")
        self.peers: list[Endpoint] = []
        self._run_id = hashlib.sha256(f"virtual run {seed}".encode()).digest()
        self._clock_skew_s = clock_skew_s
        self._make = make
        self._target = peers
        self._made = 0
        self._built: dict[PeerId, None] = {}

    async def __aenter__(self) -> Self:
        await self.grow(self._target)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in list(self.peers):
            self.kill(peer)

    @property
    def honest(self) -> list[Endpoint]:
        """Everybody alive whose DHT is the usual one."""
        return [peer for peer in self.peers if peer.peer_id not in self._built]

    @property
    def messages(self) -> int:
        """Messages sent so far: requests, answers, and those of connections and hellos."""
        return self.network.messages

    async def grow(self, count: int) -> list[Endpoint]:
        """Have more peers join, some at a time, each through random peers that were there before.

        Returns:
            The new ones.
        """
        joining: dict[asyncio.Task[Endpoint], None] = {}
        new: list[asyncio.Task[Endpoint]] = []
        while len(new) < count or joining:
            # a network that has just begun grows slowly, lest everybody meets nobody
            present = len(self.peers)
            limit = max(1, min(present, JOINING), int(JOINING_FRACTION * present))
            while len(new) < count and len(joining) < limit:
                task = asyncio.get_running_loop().create_task(self._join(), name="join")
                joining[task] = None
                new.append(task)
            await asyncio.wait(list(joining), return_when=asyncio.FIRST_COMPLETED)
            joining = {task: None for task in joining if not task.done()}
        return [task.result() for task in new]

    async def _join(self) -> Endpoint:
        number = self._made
        self._made += 1
        identity = KeyPair.from_private_bytes(hashlib.sha256(f"virtual peer {self.seed}/{number}".encode()).digest())
        skew_s = random.Random(f"skew {self.seed}/{number}").uniform(-0.5, 0.5) * self._clock_skew_s
        builder = self._make(number) if self._make else None
        return await self.admit(identity, str(number), builder=builder, skew_s=skew_s)

    async def admit(
        self,
        identity: KeyPair,
        name: str,
        *,
        config: PeerConfig | None = None,
        builder: Builder | None = None,
        skew_s: float = 0.0,
        through: Sequence[Contact] = (),
    ) -> Endpoint:
        """Have one more peer join.

        Args:
            identity: Who it is.
            name: Of its stream of randomness.
            config: Its settings; everybody's by default.
            builder: Makes its DHT.
            skew_s: Its wall clock is fast by this.
            through: Whom it is told of; a few random peers by default.
        """
        loop, config = asyncio.get_running_loop(), config or self.config
        assert isinstance(loop, VirtualLoop)
        runtime = VirtualRuntime(loop, self.seed, name, wall_offset_s=skew_s)
        transport = MemoryTransport(identity, OpenAuthorizer(self._run_id, ALL_ROLES), config, runtime, self.network)
        if builder is not None:
            self._built[identity.peer_id] = None
        await transport.start()
        dht = (builder or Dht)(transport, config.dht, runtime)
        await dht.start()
        peer = Endpoint(
            run_id=self._run_id,
            roles=ALL_ROLES,
            identity=identity,
            config=config,
            runtime=runtime,
            transport=transport,
            dht=dht,
        )
        for attempt in range(ATTEMPTS):
            some = self.rng.sample(self.peers, min(CONTACTS, len(self.peers)))
            try:
                await dht.bootstrap(through or [p.contact for p in some])
                break
            except BootstrapError:
                if attempt == ATTEMPTS - 1:
                    raise
        self.peers.append(peer)
        return peer

    async def does(self, peer: Endpoint, action: Coroutine[Any, Any, T]) -> T | None:
        """What a peer's action returns; none if it ends in a `SwarmError` or the peer is killed meanwhile."""
        task = peer.runtime.spawn(_or_none(action), "scenario")
        await asyncio.wait([task])
        return None if task.cancelled() else cast("T | None", task.result())

    def kill(self, peer: Endpoint, *, silent: bool = False) -> None:
        """End a peer without a word; if `silent`, its machine too, so that calls to it are not refused but time out."""
        self.peers.remove(peer)
        self.network.kill(peer.peer_id, silent=silent)

    async def leave(self, peer: Endpoint) -> None:
        """Have a peer withdraw its records, hand over those of others, and go."""
        self.peers.remove(peer)
        await peer.dht.close(withdraw=True, handover=True)
        await peer.transport.close(grace_s=0)

    def partition(self, one: Iterable[Endpoint], other: Iterable[Endpoint]) -> None:
        """Lose every message between two groups of peers (and a third: those in neither) until `heal`."""
        self.network.partition([[p.peer_id for p in one], [p.peer_id for p in other]])

    def heal(self) -> None:
        self.network.partition(None)


async def _or_none(action: Coroutine[Any, Any, T]) -> T | None:
    try:
        return await action
    except SwarmError:
        return None
