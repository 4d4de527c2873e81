"""Two small worlds to run protocol code in: an in-memory network in virtual time, and real gRPC on the loop thread.

A test body takes a `world` and runs on both; a test for one of them says why in its name or docstring.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from swarm.config import PeerConfig
from swarm.identity import KeyPair
from swarm.net.loop import loop_thread
from swarm.net.memory import MemoryTransport
from swarm.net.memory_network import MemoryNetwork
from swarm.net.security import Authorizer, OpenAuthorizer
from swarm.net.transport import Contact, Transport
from swarm.roles import ALL_ROLES, Role
from swarm.runtime import Runtime
from swarm.simulation.virtual import VirtualLoop, VirtualRuntime, close_virtual

if TYPE_CHECKING:
    from swarm.endpoint import Endpoint

T = TypeVar("T")

RUN_ID = hashlib.sha256(b"the run of the tests").digest()
REAL_TIMEOUT_S = 50.0


def deterministic_identity(name: str) -> KeyPair:
    """A key pair that is the same in every test run."""
    return KeyPair.from_private_bytes(hashlib.sha256(f"test identity {name}".encode()).digest())


class World(ABC):
    """Where a test's peers live. Everything made through it is closed when the test ends."""

    kind: ClassVar[str]

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.made = 0
        self._closers: list[Callable[[], Awaitable[None]]] = []

    @abstractmethod
    def run(self, main: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = REAL_TIMEOUT_S) -> T:
        """Run `await main()` on the world's loop, within `timeout_s` of real time."""

    @abstractmethod
    def runtime(self, name: str) -> Runtime:
        """Surroundings for one more peer."""

    @abstractmethod
    def make_transport(
        self, identity: KeyPair, authorizer: Authorizer, config: PeerConfig, runtime: Runtime
    ) -> Transport:
        """A transport that is not started."""

    @abstractmethod
    def close(self) -> None:
        """Close everything; called by the fixture."""

    async def transport(
        self,
        *,
        roles: Iterable[Role] = ALL_ROLES,
        run_id: bytes = RUN_ID,
        identity: KeyPair | None = None,
        authorizer: Authorizer | None = None,
        config: PeerConfig | None = None,
        runtime: Runtime | None = None,
    ) -> Transport:
        """A started transport; by default of a new peer that the open policy admits in all roles."""
        self.made += 1
        name = f"{self.seed}/{self.made}"
        transport = self.make_transport(
            identity or deterministic_identity(name),
            authorizer or OpenAuthorizer(run_id, roles),
            config or PeerConfig.preset("local"),
            runtime or self.runtime(name),
        )
        await transport.start()
        self._closers.append(lambda: transport.close(grace_s=0.2))
        return transport

    async def endpoint(
        self,
        *,
        roles: Iterable[Role] = ALL_ROLES,
        bootstrap: Sequence[Contact] = (),
        run_id: bytes = RUN_ID,
        identity: KeyPair | None = None,
        authorizer: Authorizer | None = None,
        config: PeerConfig | None = None,
    ) -> Endpoint:
        """A transport with a DHT on it, started and bootstrapped."""
        from swarm.dht.node import Dht
        from swarm.endpoint import Endpoint

        config = config or PeerConfig.preset("local")
        transport = await self.transport(
            roles=roles, run_id=run_id, identity=identity, authorizer=authorizer, config=config
        )
        dht = Dht(transport, config.dht, transport.runtime)
        await dht.start()
        self._closers.append(dht.close)
        if bootstrap:
            await dht.bootstrap(bootstrap)
        return Endpoint(
            run_id=run_id,
            roles=frozenset(roles),
            identity=transport.identity,
            config=config,
            runtime=transport.runtime,
            transport=transport,
            dht=dht,
            loop=None if self.kind == "memory" else loop_thread(),
        )

    def at_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Have `closer` awaited on the world's loop at the end, before what was made earlier is closed."""
        self._closers.append(closer)

    async def _close_all(self) -> None:
        while self._closers:
            await self._closers.pop()()


class MemoryWorld(World):
    """Peers on a `MemoryNetwork` (`world.network`) in virtual time."""

    kind = "memory"

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.loop = VirtualLoop(seed)
        self.network = MemoryNetwork(seed)

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = REAL_TIMEOUT_S) -> T:
        self.loop.limit_real_time(timeout_s)
        return self.loop.run_until_complete(main())

    def runtime(self, name: str) -> Runtime:
        return VirtualRuntime(self.loop, self.seed, name)

    def make_transport(
        self, identity: KeyPair, authorizer: Authorizer, config: PeerConfig, runtime: Runtime
    ) -> Transport:
        return MemoryTransport(identity, authorizer, config, runtime, self.network)

    def close(self) -> None:
        try:
            self.run(self._close_all, timeout_s=10.0)
        finally:
            close_virtual(self.loop)


class GrpcWorld(World):
    """Peers that listen on loopback ports, on the process's loop thread."""

    kind = "grpc"

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = REAL_TIMEOUT_S) -> T:
        return loop_thread().run(main(), timeout_s)

    def runtime(self, name: str) -> Runtime:
        return Runtime()

    def make_transport(
        self, identity: KeyPair, authorizer: Authorizer, config: PeerConfig, runtime: Runtime
    ) -> Transport:
        from swarm.net.grpc import GrpcTransport

        return GrpcTransport(identity, authorizer, config, runtime)

    def close(self) -> None:
        self.run(self._close_all, timeout_s=20.0)


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0, poll_s: float = 0.01) -> None:
    """Wait until a condition holds; fails the test when it does not within `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(poll_s)
