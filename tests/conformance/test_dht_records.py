"""Every reason to refuse a record, over both transports: where records are stored, and where they are read."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm.config import PeerConfig
from swarm.dht.bodies import encode_body
from swarm.dht.events import RecordEvicted, RecordRefused
from swarm.dht.messages import FIND, STORE
from swarm.dht.records import Copy, sign_record, to_wire
from swarm.dht.refusals import Refusal
from swarm.dht.schemas import Schema, integer
from swarm.endpoint import Endpoint
from swarm.pb import dht_pb2 as pb
from tests.support import RUN_ID, World, deterministic_identity, eventually

CONFIG = PeerConfig.preset(
    "wan",
    transport={"listen_host": "127.0.0.1"},
    dht={"max_entries": 6, "max_entries_per_author": 3, "max_entries_per_key_and_author": 2},
)
AUTHOR = deterministic_identity("author")
NEVER_READ = {"quota"}
"""Only who holds records has bounds on how many."""


def signed(
    key: str = "k", *, version: int = 5, body: bytes = b"\x01", run_id: bytes = RUN_ID, subkey: str = ""
) -> pb.DhtRecord:
    record = sign_record(AUTHOR, run_id, key, subkey, body, version, 60_000, max_body_bytes=1 << 20)
    return to_wire(Copy(record, 60.0), 0.0)


def altered(**fields: object) -> pb.DhtRecord:
    message = signed()
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def refusable() -> dict[str, pb.DhtRecord]:
    """One record for each reason that a record itself may give."""
    return {
        "malformed": signed(body=b"\xc1"),
        "too_large": signed(body=encode_body(bytes(5000))),
        "bad_signature": altered(body=b"\x02"),
        "foreign": signed(run_id=bytes(32)),
        "expired": altered(remaining_ms=0),
        "future": altered(format=2),
        "schema": signed("steps/a", body=encode_body({"step": -1})),
        "unsigned": altered(signature=b""),
        "misplaced": signed("another key"),
    }


async def pair(world: World) -> tuple[Endpoint, Endpoint]:
    first = await world.endpoint(config=CONFIG)
    second = await world.endpoint(bootstrap=[first.contact], config=CONFIG)
    first.dht.declare("steps", Schema(required={"step": integer(0, 9)}))
    return first, second


def reasons(peer: Endpoint) -> Counter[str]:
    return Counter(stamped.event.reason for stamped in peer.runtime.events.recent(RecordRefused))


async def store(by: Endpoint, at: Endpoint, *records: pb.DhtRecord) -> list[str]:
    answer = await by.transport.call(at.contact, STORE, pb.DhtStoreRequest(records=records), timeout_s=5.0)
    return [Refusal(result.status).reason for result in answer.results]


def test_what_must_not_be_held_is_refused_for_its_own_reason(world: World) -> None:
    async def main() -> None:
        holder, writer = await pair(world)
        records = {reason: record for reason, record in refusable().items() if reason != "misplaced"}
        assert await store(writer, holder, *records.values()) == list(records)
        assert await store(writer, holder, signed(), signed(version=4)) == ["none", "outdated"]
        of_key = [signed(subkey=str(i)) for i in range(2)]
        assert await store(writer, holder, *of_key) == ["none", "quota"]  # a third one of this author under this key
        assert await store(writer, holder, signed("x"), signed("y")) == ["none", "quota"]  # a fourth one anywhere
        expected = Counter({**dict.fromkeys(records, 1), "outdated": 1, "quota": 2})
        assert reasons(holder) == expected
        assert {Refusal(i).reason for i in Refusal} == set(expected) | {"none", "misplaced"}

    world.run(main)


@pytest.mark.parametrize("reason", [*refusable(), "outdated"])
def test_what_must_not_be_believed_is_dropped_by_the_reader_and_counted(world: World, reason: str) -> None:
    async def main() -> None:
        reader, liar = await pair(world)
        key = "steps/a" if reason == "schema" else "k"
        shown = [signed(version=7)]

        async def answer(_context: object, request: pb.DhtFindRequest) -> pb.DhtFindResponse:
            return pb.DhtFindResponse(
                found=[pb.DhtFound(records=shown if t.key == key else []) for t in request.targets]
            )

        liar.transport.serve(FIND, answer)
        if reason == "outdated":
            assert [entry.record_version for entry in await reader.dht.get(key, fresh=True)] == [7]
            await eventually(lambda: reader.dht.held == 1)  # it is a replica too, and was repaired
            reader.dht._storage.expire(1e12)
            shown[:] = [signed(version=6)]
        else:
            shown[:] = [refusable()[reason]]
        assert await reader.dht.get(key, fresh=True) == []
        assert reasons(reader)[reason] >= 1

    world.run(main)


def test_a_full_holder_tells_whose_records_gave_way(world: World) -> None:
    async def main() -> None:
        holder, writer = await pair(world)
        for author in ("one", "two"):
            identity = deterministic_identity(author)
            for i in range(3):
                record = sign_record(identity, RUN_ID, f"{author} {i}", "", b"\x01", 1, 60_000)
                assert await store(writer, holder, to_wire(Copy(record, 60.0), 0.0)) == ["none"]
        assert await store(writer, holder, signed("late")) == ["none"]
        (evicted,) = holder.runtime.events.recent(RecordEvicted)
        assert evicted.event.author in {str(deterministic_identity(a).peer_id) for a in ("one", "two")}
        assert "entries" in evicted.event.reason
        assert holder.dht.held == 6

    world.run(main)
