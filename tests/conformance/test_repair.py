"""Whose values a diverged trainer takes, on both transports: those for which more than half of its group vouch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swarm.averaging.rounds import Group, Round
from swarm.config import PeerConfig
from swarm.endpoint import Endpoint
from swarm.errors import NoDonorError
from swarm.state.snapshot import Snapshot
from swarm.state.transfer import SnapshotStore
from swarm.training.repair import average_key, find_agreed
from swarm.training.state import state_key
from tests.support import World

CONFIG = PeerConfig.preset("local", averaging={"chunk_timeout_s": 1.0})
TRUE, FALSE = torch.arange(4000.0), torch.ones(4000)
MINE = torch.cat([TRUE[:3000], FALSE[3000:]])


def snapshot(values: Tensor, rounds: Sequence[str] = ("n",)) -> Snapshot:
    return Snapshot.build({"param/w": values}, {"rounds": list(rounds)}, chunk_bytes=1024)


async def donors(
    world: World, offers: Sequence[Snapshot | None]
) -> tuple[Endpoint, list[Endpoint], list[SnapshotStore]]:
    me = await world.endpoint(config=CONFIG)
    found, stores = [], []
    for offer in offers:
        endpoint = await world.endpoint(bootstrap=[me.contact], config=CONFIG)
        store = SnapshotStore(endpoint)
        if offer is not None:
            store.publish(average_key("trunk"), offer)
        body = {"addresses": list(endpoint.contact.addresses), "step": 1}
        await endpoint.dht.put(state_key("trunk"), body, ttl_s=30)
        found.append(endpoint)
        stores.append(store)
    return me, found, stores


def diverged(me: Endpoint, agreed: Sequence[Endpoint], others: Sequence[Endpoint] = ()) -> Round:
    names = [str(e.peer_id) for e in agreed]
    apart = [str(me.peer_id), *(str(e.peer_id) for e in others)]
    return Round(Group("n", 3), tuple(names + apart), agreed=tuple(names), others=tuple(apart), diverged=True)


def test_only_what_differs_travels_and_newer_rounds_count(world: World) -> None:
    async def main() -> None:
        offers = [snapshot(TRUE, ["m", "n"]), snapshot(TRUE, ["n", "o"])]
        me, found, _ = await donors(world, offers)
        result = await find_agreed(me, "trunk", diverged(me, found), snapshot(MINE, []), 5.0)
        assert torch.equal(result.snapshot.tensors["param/w"], TRUE)
        assert result.donor in [e.peer_id for e in found]
        assert 4000 <= result.nbytes <= 4000 + 1024

    world.run(main)


def test_donors_that_lie_about_content_find_no_majority_for_it(world: World) -> None:
    async def main() -> None:
        me, found, _ = await donors(world, [snapshot(FALSE), snapshot(TRUE), snapshot(TRUE), snapshot(TRUE)])
        result = await find_agreed(me, "trunk", diverged(me, found), snapshot(MINE, []), 5.0)
        assert torch.equal(result.snapshot.tensors["param/w"], TRUE)
        assert result.donor != found[0].peer_id

    world.run(main)


def test_two_of_five_with_a_word_each_for_the_other_are_not_believed(world: World) -> None:
    async def main() -> None:
        me, found, _ = await donors(world, [snapshot(FALSE), snapshot(FALSE), snapshot(TRUE, ["old"]), None])
        with pytest.raises(NoDonorError, match="2 of the 3"):
            await find_agreed(me, "trunk", diverged(me, found), snapshot(MINE, []), 0.6)

    world.run(main)


def test_who_is_not_among_those_who_agreed_has_no_vote(world: World) -> None:
    async def main() -> None:
        me, found, _ = await donors(world, [snapshot(TRUE), snapshot(FALSE), snapshot(FALSE), snapshot(FALSE)])
        told = diverged(me, found[:3], found[3:])
        with pytest.raises(NoDonorError, match="2 of the 3"):
            await find_agreed(me, "trunk", told, snapshot(MINE, []), 0.6)

    world.run(main)


def test_older_values_are_waited_for_and_other_shapes_refused(world: World) -> None:
    async def main() -> None:
        odd = Snapshot.build({"param/w": torch.zeros(4001)}, {"rounds": ["n"]}, chunk_bytes=1024)
        me, found, stores = await donors(world, [snapshot(MINE, ["m"]), None, odd, odd])

        async def publish() -> None:
            await asyncio.sleep(0.5)
            for store in stores[:2]:
                store.publish(average_key("trunk"), snapshot(TRUE, ["m", "n"]))

        late = asyncio.create_task(publish())
        told = diverged(me, found[:2])
        result = await find_agreed(me, "trunk", told, snapshot(MINE, []), 8.0)
        assert torch.equal(result.snapshot.tensors["param/w"], TRUE)
        await late
        with pytest.raises(NoDonorError):
            await find_agreed(me, "trunk", diverged(me, found[2:]), snapshot(MINE, []), 0.4)

    world.run(main)
