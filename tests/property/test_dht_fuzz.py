"""Damaged DHT messages through the real handlers, a few hundred from fixed seeds; tests/long has minutes of them."""

from __future__ import annotations

import random

import pytest

from swarm.dht.events import RecordRefused
from swarm.dht.messages import MAX_FOUND, MAX_NEAREST, Want
from swarm.dht.routing import PeerNode
from swarm.errors import MalformedFrameError
from swarm.net.transport import Contact
from swarm.pb import dht_pb2 as pb
from swarm.runtime import TaskFailed
from tests.fuzzing import DhtFuzz, rounds
from tests.support import MemoryWorld


@pytest.mark.parametrize("seed", range(3))
def test_damaged_messages_end_in_a_typed_error_and_harm_nobody(memory_world: MemoryWorld, seed: int) -> None:
    async def main() -> None:
        fuzz = DhtFuzz(memory_world)
        await fuzz.open()
        tried, refused = await rounds(fuzz, random.Random(seed), 600)
        assert 0.1 * tried < refused < 0.95 * tried  # damaged, but not beyond being read
        assert await fuzz.still_well()
        reasons = {s.event.reason for s in fuzz.victim.runtime.events.recent(RecordRefused)}
        assert {"malformed", "schema", "bad_signature"} <= reasons
        for peer in (fuzz.victim, fuzz.liar):
            assert not peer.runtime.events.recent(TaskFailed)

    memory_world.run(main)


@pytest.mark.parametrize(
    "answer",
    [
        pb.DhtFindResponse(found=[pb.DhtFound(records=[pb.DhtRecord()] * (MAX_FOUND + 1))]),
        pb.DhtFindResponse(found=[pb.DhtFound(nearest=[0] * (MAX_NEAREST + 1))]),
        pb.DhtFindResponse(found=[pb.DhtFound()], contacts=[pb.DhtContact()] * (MAX_NEAREST + 1)),
        pb.DhtFindResponse(found=[pb.DhtFound(digest=b"short")]),
        pb.DhtFindResponse(found=[pb.DhtFound()] * 2),
        pb.DhtFindResponse(),
    ],
)
def test_an_answer_out_of_proportion_is_refused_as_a_whole(
    memory_world: MemoryWorld, answer: pb.DhtFindResponse
) -> None:
    async def main() -> None:
        fuzz = DhtFuzz(memory_world)
        await fuzz.open()
        fuzz._answer = answer.SerializeToString()
        node = PeerNode(Contact(fuzz.liar.peer_id, fuzz.liar.contact.addresses))
        with pytest.raises(MalformedFrameError):
            await fuzz.victim.dht._protocol.find(node, [Want("k", bytes(16), 500)], 5)
        assert fuzz.victim.runtime.events.count(RecordRefused) == 0

    memory_world.run(main)
