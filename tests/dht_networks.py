"""Small DHT networks for tests, and who in them is near a key."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.config import PeerConfig
from swarm.dht.records import position_of
from swarm.endpoint import Endpoint
from tests.support import World


async def network(world: World, count: int, config: PeerConfig) -> list[Endpoint]:
    """Peers that joined one after the other through the first."""
    peers = [await world.endpoint(config=config)]
    while len(peers) < count:
        peers.append(await world.endpoint(bootstrap=[peers[0].contact], config=config))
    return peers


def nearest(peers: Sequence[Endpoint], key: str) -> list[Endpoint]:
    """The peers by distance to a key."""
    target = int.from_bytes(position_of(key), "big")
    return sorted(peers, key=lambda p: p.peer_id.node_id ^ target)
