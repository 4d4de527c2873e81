"""Real expert hosts and a trainer's client on a small world, with records in a real DHT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.endpoint import Endpoint
from swarm.experts.client import ExpertClient
from swarm.experts.host import ExpertHost
from swarm.experts.spec import ExpertGrid
from swarm.state.transfer import SnapshotStore
from tests.support import World


@dataclass(eq=False)
class Hosting:
    """A trainer's endpoint with its client, and hosts. Layers are made with it as their peer."""

    endpoint: Endpoint
    experts: ExpertClient
    hosts: list[ExpertHost]


async def host_experts(world: World, hosts: int, grids: Mapping[str, ExpertGrid]) -> Hosting:
    """So many hosts that share the experts of some grids, and a client that knows where all of them are."""
    first = await world.endpoint()
    endpoints = [await world.endpoint(bootstrap=[first.contact]) for _ in range(hosts)]
    made = [ExpertHost(e, grids, SnapshotStore(e)) for e in endpoints]
    for host in made:
        await host.start()
        world.at_close(lambda host=host: host.close(drain=False))  # type: ignore[misc]
    client = ExpertClient(first, grids)
    await client.start()
    world.at_close(client.close)
    for name in grids:
        await client.directory.wait_for(name, None, 1.0, 30.0)
    return Hosting(first, client, made)
