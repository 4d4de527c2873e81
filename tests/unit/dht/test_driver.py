"""The driver: stragglers are not waited for, failures are told, closing ends everything. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from swarm.clock import LoopClock
from swarm.dht.crawl import Ask, Crawl, Lookup
from swarm.dht.driver import CRAWL_TIMEOUTS, PATIENCE_FRACTION, Driver
from swarm.dht.routing import PeerNode
from swarm.errors import PeerUnreachableError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.runtime import Runtime, TaskFailed
from swarm.simulation.virtual import run_virtual

CALL_TIMEOUT_S = 4.0


def nodes(count: int) -> list[PeerNode]:
    ids = [PeerId(i.to_bytes(20, "big") + bytes(12)) for i in range(1, count + 1)]
    return [PeerNode(Contact(peer_id, ("127.0.0.1:1",))) for peer_id in ids]


def answering(lookup: Lookup, behave: Callable[[int], Awaitable[None]]) -> Callable[[Ask], Awaitable[None]]:
    async def send(ask: Ask) -> None:
        await behave(ask.node.long_id)
        lookup.answered(ask.node, [])

    return send


async def timed(driver: Driver, lookup: Lookup, behave: Callable[[int], Awaitable[None]]) -> float:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await driver.drive(Crawl([lookup], 3), answering(lookup, behave))
    return loop.time() - begun_s


def make() -> tuple[Driver, Runtime]:
    runtime = Runtime(clock=LoopClock(asyncio.get_running_loop()))
    return Driver(runtime, CALL_TIMEOUT_S), runtime


def test_one_slow_peer_costs_the_patience_and_not_its_whole_deadline() -> None:
    async def main() -> None:
        driver, _ = make()

        async def behave(peer: int) -> None:
            await asyncio.sleep(100.0 if peer == 2 else 0.01)

        lookup = Lookup(0, 3, nodes(10))
        took_s = await timed(driver, lookup, behave)
        assert [n.long_id for n in lookup.nearest()] == [1, 3, 4]
        assert took_s <= CALL_TIMEOUT_S * PATIENCE_FRACTION + 0.05
        await driver.close()

    run_virtual(main)


def test_a_crawl_of_silent_peers_ends() -> None:
    async def main() -> None:
        driver, _ = make()

        async def behave(_peer: int) -> None:
            await asyncio.sleep(1e6)

        lookup = Lookup(0, 3, nodes(100))
        assert await timed(driver, lookup, behave) <= CALL_TIMEOUT_S * CRAWL_TIMEOUTS
        assert lookup.nearest() == []
        await driver.close()

    run_virtual(main)


def test_peers_that_fail_are_replaced() -> None:
    async def main() -> None:
        driver, runtime = make()

        async def behave(peer: int) -> None:
            if peer % 2:
                raise PeerUnreachableError("nobody there")

        lookup = Lookup(0, 3, nodes(20))
        await timed(driver, lookup, behave)
        assert [n.long_id for n in lookup.nearest()] == [2, 4, 6]
        assert runtime.events.count(TaskFailed) == 0

    run_virtual(main)


def test_a_mistake_of_ours_is_an_event_and_does_not_hang_the_crawl() -> None:
    async def main() -> None:
        driver, runtime = make()

        async def behave(peer: int) -> None:
            if peer == 1:
                raise ValueError("a bug")

        lookup = Lookup(0, 2, nodes(5))
        await timed(driver, lookup, behave)
        assert [n.long_id for n in lookup.nearest()] == [2, 3]
        assert runtime.events.count(TaskFailed) == 1

    run_virtual(main)


def test_closing_ends_a_crawl_that_is_under_way() -> None:
    async def main() -> None:
        driver, _ = make()

        async def behave(_peer: int) -> None:
            await asyncio.sleep(1e6)

        crawl = asyncio.create_task(timed(driver, Lookup(0, 3, nodes(3)), behave))
        await asyncio.sleep(0.01)
        await driver.close()
        assert await crawl < 1.0

    run_virtual(main)


def test_very_many_positions_do_not_drown_peers_that_need_time_for_each() -> None:
    """All peers together work on one position after the other, as on one machine."""

    async def main() -> None:
        driver, _ = make()
        rng = random.Random(4)
        peers = nodes(12)
        lookups = [Lookup(rng.getrandbits(160), 5, peers) for _ in range(2000)]
        machine = asyncio.Lock()

        async def send(ask: Ask) -> None:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S), machine:
                    await asyncio.sleep(0.001 * len(ask.lookups))
            except TimeoutError as error:
                raise PeerUnreachableError("too late") from error
            for lookup in ask.lookups:
                lookup.answered(ask.node, [])

        await driver.drive(Crawl(lookups, 5), send)
        for lookup in lookups:
            assert lookup.nearest() == sorted(peers, key=lambda n: n.long_id ^ lookup.target)[:5]

    run_virtual(main)
