"""The networked half of a peer: what averaging, state, experts and training need from it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm.config import PeerConfig
from swarm.dht.node import Dht
from swarm.identity import KeyPair, PeerId
from swarm.net.loop import LoopThread
from swarm.net.transport import Contact, Transport
from swarm.roles import Role
from swarm.runtime import Runtime

T = TypeVar("T")


class Endpoint:
    """Identity, transport and DHT of one peer in one run. `Peer` (swarm.peer) is an `Endpoint` with services on top.

    Attributes:
        run_id: Hash of the run's public key (32 bytes).
        loop: The loop thread that runs this endpoint; none when the endpoint lives on a virtual loop.
    """

    def __init__(
        self,
        *,
        run_id: bytes,
        roles: frozenset[Role],
        identity: KeyPair,
        config: PeerConfig,
        runtime: Runtime,
        transport: Transport,
        dht: Dht,
        loop: LoopThread | None = None,
    ) -> None:
        self.run_id = run_id
        self.roles = roles
        self.identity = identity
        self.config = config
        self.runtime = runtime
        self.transport = transport
        self.dht = dht
        self.loop = loop

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def contact(self) -> Contact:
        """How others reach this peer."""
        return self.transport.contact

    @property
    def name(self) -> str:
        """What people call this peer."""
        return self.config.name or self.peer_id.short

    def run_sync(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop thread and wait for it (the synchronous facade).

        Raises:
            LoopThreadError: Called on the loop thread itself.
            TimeoutError: Not done within `timeout_s`; the coroutine is cancelled.
        """
        if self.loop is None:
            coroutine.close()
            raise RuntimeError("An endpoint on a virtual loop has no synchronous facade.")
        return self.loop.run(coroutine, timeout_s)
