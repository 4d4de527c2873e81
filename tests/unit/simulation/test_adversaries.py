"""What malicious peers share, and how their behaviours combine."""

from __future__ import annotations

import pytest

from swarm.dht.checking import Checker
from swarm.dht.messages import FIND
from swarm.dht.records import Copy, position_of, sign_record, to_wire
from swarm.errors import RecordRefusedError
from swarm.net.transport import CallContext, Contact
from swarm.pb import dht_pb2 as pb
from swarm.simulation.adversaries import (
    ARCHIVE_VERSIONS,
    Behaviour,
    Cabal,
    Hiding,
    MaliciousTransport,
    Omitting,
    Replaying,
    forgeries,
)
from tests.support import RUN_ID, MemoryWorld, deterministic_identity

AUTHOR = deterministic_identity("author")


def record(version: int, *, deleted: bool = False) -> pb.DhtRecord:
    body = b"" if deleted else b"\x01"
    signed = sign_record(AUTHOR, RUN_ID, "key", "", body, version, 60_000, deleted=deleted)
    return to_wire(Copy(signed, 1.0), 0.0)


def test_a_cabal_replays_the_oldest_statement_with_its_whole_lifetime() -> None:
    cabal = Cabal()
    cabal.archive([record(3), record(2), record(9, deleted=True), record(2)])
    (oldest,) = cabal.oldest("key")
    assert (oldest.record_version, oldest.remaining_ms) == (2, 60_000)
    cabal.archive([record(i) for i in range(10, 40)])
    assert [known.record_version for known in cabal.oldest("key")] == [2]
    assert ARCHIVE_VERSIONS < 30
    assert cabal.oldest("other") == []


def test_invented_peers_are_nearer_than_any_real_one() -> None:
    cabal = Cabal()
    position = position_of("key")
    target = int.from_bytes(position, "big")
    invented = cabal.invented(position, ["127.0.0.1:1"])
    assert (invented.peer_id.node_id ^ target).bit_length() <= 64
    assert (AUTHOR.peer_id.node_id ^ target).bit_length() > 64


def test_no_forgery_is_a_record_of_the_run() -> None:
    checker, reasons = Checker(RUN_ID, 4096), []
    forged = forgeries(Cabal(), "key", [record(1)], bytes(32))
    for message in forged:
        with pytest.raises(RecordRefusedError) as refusal:
            checker.check(message, 0.0, "key")
        reasons.append(refusal.value.reason)
    assert len(set(reasons)) >= 7


def test_behaviours_combine_and_the_first_has_the_last_word(memory_world: MemoryWorld) -> None:
    cabal = Cabal()
    cabal.archive([record(1)])
    author = Contact(AUTHOR.peer_id, ("127.0.0.1:1",))

    async def honest(_context: CallContext, _request: pb.DhtFindRequest) -> pb.DhtFindResponse:
        contact = pb.DhtContact(peer_id=author.peer_id.digest, addresses=author.addresses)
        return pb.DhtFindResponse(contacts=[contact], found=[pb.DhtFound(nearest=[0], records=[record(5)])])

    async def main() -> None:
        server, client = await memory_world.transport(), await memory_world.transport()

        async def answer(*behaviours: Behaviour) -> pb.DhtFound:
            MaliciousTransport(server, cabal, behaviours).serve(FIND, honest)
            request = pb.DhtFindRequest(sender=client.contact.addresses, targets=[pb.DhtTarget(key="key")], count=5)
            return (await client.call(server.contact, FIND, request, timeout_s=5)).found[0]

        both = await answer(Hiding(), Replaying())
        assert [len(both.nearest), both.records[0].record_version] == [0, 1]
        assert [r.record_version for r in (await answer(Replaying(), Omitting())).records] == [1]
        assert list((await answer(Omitting(), Replaying())).records) == []
        assert list(cabal.victims.values()) == [client.contact]

    memory_world.run(main)
