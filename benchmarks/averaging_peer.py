"""A peer for benchmarks of averaging: one process, no run and no roles to check, met through a file of the parent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.net.loop import disable_grpc_fork_handlers, loop_thread, switch_interval

disable_grpc_fork_handlers()

import torch  # noqa: E402

from swarm.averaging.service import AveragingService  # noqa: E402
from swarm.config import PeerConfig  # noqa: E402
from swarm.dht.node import Dht  # noqa: E402
from swarm.endpoint import Endpoint  # noqa: E402
from swarm.identity import KeyPair  # noqa: E402
from swarm.net.grpc import GrpcTransport  # noqa: E402
from swarm.net.security import OpenAuthorizer  # noqa: E402
from swarm.roles import ALL_ROLES  # noqa: E402
from swarm.runtime import Runtime  # noqa: E402
from swarm.state.transfer import SnapshotStore  # noqa: E402


class BenchmarkPeer:
    """What `Averager` and `attach` need of a peer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.averaging = AveragingService(endpoint)
        self.state = SnapshotStore(endpoint)


async def start_endpoint(config: PeerConfig) -> Endpoint:
    """An endpoint on a transport of its own, that has joined nobody yet."""
    run_id, runtime, identity = hashlib.sha256(b"benchmark").digest(), Runtime(), KeyPair.generate()
    transport = GrpcTransport(identity, OpenAuthorizer(run_id, ALL_ROLES), config, runtime)
    await transport.start()
    dht = Dht(transport, config.dht, runtime)
    await dht.start()
    return Endpoint(
        run_id=run_id,
        roles=ALL_ROLES,
        identity=identity,
        config=config,
        runtime=runtime,
        transport=transport,
        dht=dht,
        loop=loop_thread(),
    )


@contextmanager
def started_peer(rank: int, folder: Path, link: str = "") -> Iterator[BenchmarkPeer]:
    """A peer that knows the others; torch runs on one thread.

    Args:
        folder: Where the first peer leaves its address for the others.
        link: `port/address` of a peer behind a link: where it listens, and what it announces.
    """
    torch.set_num_threads(1)
    port, _, announced = link.partition("/")
    transport_settings = {"port": int(port), "announce": (announced,)} if link else {}
    averaging = {"matchmaking_s": 10.0, "round_timeout_s": 60.0, "chunk_timeout_s": 20.0 if link else 3.0}
    config = PeerConfig.preset("local", averaging=averaging, transport=transport_settings)

    async def start() -> Endpoint:
        endpoint = await start_endpoint(config)
        address = folder / "address"
        if rank == 0:
            part = folder / "address.part"
            part.write_text(endpoint.contact.addresses[0])
            part.rename(address)
        else:
            while not address.exists():
                await asyncio.sleep(0.01)
            await endpoint.dht.bootstrap([await endpoint.transport.dial(address.read_text())])
        return endpoint

    with switch_interval():
        endpoint = loop_thread().run(start())
        yield BenchmarkPeer(endpoint)

        async def stop() -> None:
            await endpoint.dht.close()
            await endpoint.transport.close()

        loop_thread().run(stop())
