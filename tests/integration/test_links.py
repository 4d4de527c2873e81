"""Real peers behind links: what a link does reaches them as what they know from networks, and nothing worse."""

import asyncio
import time
from contextlib import suppress

import pytest
import torch

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import CallTimeoutError, NetworkError, UsageError
from swarm.identity import KeyPair
from swarm.net.transport import ByteStream, Contact, StreamMethod, Transport, UnaryMethod
from swarm.pb.averaging_pb2 import AveragingAck
from swarm.simulation.proxy import ProxyProcess, free_port
from swarm.simulation.pytest_plugin import LocalSwarmFactory
from tests.support import GrpcWorld

ECHO = UnaryMethod("/test.Links/Echo", AveragingAck, AveragingAck)
PIPE = StreamMethod("/test.Links/Pipe")


def behind(proxy: ProxyProcess, name: str, **shape: float) -> PeerConfig:
    """Settings of a peer whose port is behind a new link."""
    port = free_port()
    address = proxy.add(name, f"127.0.0.1:{port}", **shape)
    averaging = {"matchmaking_s": 5.0, "round_timeout_s": 20.0, "chunk_timeout_s": 10.0}
    return PeerConfig.preset("local", transport={"port": port, "announce": (address,)}, averaging=averaging)


def test_calls_through_a_link_are_late_and_survive_resets_and_stalls(grpc_world: GrpcWorld) -> None:
    with ProxyProcess(seed=1) as proxy:
        config = behind(proxy, "far", latency_ms=30.0)

        async def main() -> None:
            server = await grpc_world.transport(config=config)
            client: Transport = await grpc_world.transport()

            async def echo(context: object, request: AveragingAck) -> AveragingAck:
                return request

            server.serve(ECHO, echo)
            assert server.contact.addresses == config.transport.announce
            contact = Contact(server.peer_id, server.contact.addresses)

            async def call() -> float:
                begun = time.monotonic()
                await client.call(contact, ECHO, AveragingAck(), timeout_s=5.0)
                return time.monotonic() - begun

            await call()  # connects
            assert await call() >= 0.060
            assert proxy.reset("far") > 0
            for _ in range(2):  # the first call may notice only now that its connection broke
                with suppress(NetworkError):
                    await call()
            assert await call() >= 0.060
            proxy.stall("far", seconds=0.3)
            assert await call() >= 0.2

        grpc_world.run(main)


def test_a_connection_that_fell_silent_is_replaced_after_two_calls(grpc_world: GrpcWorld) -> None:
    with ProxyProcess() as proxy:
        config = behind(proxy, "far")

        async def main() -> None:
            server = await grpc_world.transport(config=config)
            client: Transport = await grpc_world.transport()
            contact = Contact(server.peer_id, server.contact.addresses)

            async def echo(context: object, request: AveragingAck) -> AveragingAck:
                return request

            async def echo_stream(context: object, stream: ByteStream) -> None:
                async for chunk in stream:
                    await stream.send(chunk)

            server.serve(ECHO, echo)
            server.serve_stream(PIPE, echo_stream)

            async def call() -> None:
                await client.call(contact, ECHO, AveragingAck(), timeout_s=0.3)

            async def pipe() -> bytes | None:
                async with asyncio.timeout(0.4), client.stream(contact, PIPE, timeout_s=20.0) as stream:
                    await stream.send(b"x")
                    return await stream.receive()

            await client.call(contact, ECHO, AveragingAck(), timeout_s=5.0)
            assert await pipe() == b"x"
            async with client.stream(contact, PIPE, timeout_s=20.0) as running:
                proxy.swallow("far", direction="up")
                for _ in range(2):
                    with pytest.raises(CallTimeoutError):
                        await call()
                    with pytest.raises(TimeoutError):
                        await pipe()
                proxy.heal("far")
                assert client._links[server.peer_id].channels == 3, "the stream that runs keeps its channel"  # type: ignore[attr-defined]
                await client.call(contact, ECHO, AveragingAck(), timeout_s=5.0)
                assert await pipe() == b"x"
                await running.finish()
            assert client._links[server.peer_id].channels == 2  # type: ignore[attr-defined]

        grpc_world.run(main)


def test_groups_average_exactly_through_shaped_links(grpc_world: GrpcWorld) -> None:
    with ProxyProcess(seed=2) as proxy:
        configs = [behind(proxy, f"peer-{i}", latency_ms=5.0, jitter_ms=2.0, down_mbit=40.0) for i in range(3)]
        endpoints: list[Endpoint] = []

        async def start() -> None:
            for i, config in enumerate(configs):
                known = [endpoints[0].contact] if endpoints else []
                identity = KeyPair.generate()
                endpoints.append(await grpc_world.endpoint(bootstrap=known, config=config, identity=identity))
                assert endpoints[i].contact.addresses == config.transport.announce

        grpc_world.run(start)
        numel = 300_000
        values = [torch.full((numel,), float(i)) for i in range(3)]

        async def average() -> list[float]:
            averagers = []
            for endpoint, mine in zip(endpoints, values, strict=True):
                service = AveragingService(endpoint)
                grpc_world.at_close(service.close)

                class Peer:
                    averaging = service

                averagers.append(Averager(Peer(), [mine], "links", AllReduce(min_group=3, max_group=3)))
            rounds = await asyncio.gather(*(averager.step_async() for averager in averagers))
            assert all(r.averaged and not r.degraded for r in rounds)
            return [r.exchange_s for r in rounds]

        exchange_s = grpc_world.run(average)
        assert all(torch.equal(mine, torch.ones(numel)) for mine in values)
        # Two others send their values of a third of the vector through each link, at 5 MB/s.
        assert max(exchange_s) >= 2 * numel * 4 / 3 / 5e6
        assert all(proxy.stats(f"peer-{i}")["down_bytes"] > 2 * numel * 4 / 3 for i in range(3))


@pytest.mark.timeout(150)
def test_processes_of_a_local_swarm_behind_links(local_swarm: LocalSwarmFactory) -> None:
    with local_swarm(hosts=1, links=True) as s:
        assert s.links is not None
        s.wait_until(lambda view: len(view.by_role("host")) == 1)
        assert s.links.stats("host-0")["accepted"] > 0  # we reach it through its link
        s.shape("host-0", latency_ms=20.0, up_mbit=50.0)
        with pytest.raises(UsageError, match="host-7"):
            s.shape("host-7", latency_ms=20.0)
        with pytest.raises(UsageError, match="width"):
            s.shape("host-0", width=2)
        assert s.links.reset("host-0") > 0
        s.wait_until(lambda view: len(view.by_role("host")) == 1)
