"""Properties of the DHT's pure parts, checked on random cases."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import DhtConfig
from swarm.dht.bodies import decode_body, encode_body
from swarm.dht.checking import Checker
from swarm.dht.crawl import Lookup
from swarm.dht.records import Copy, Record, merge, sign_record, to_wire
from swarm.dht.routing import ID_BITS, PeerNode, Table
from swarm.dht.storage import Storage
from swarm.errors import RecordRefusedError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.pb import dht_pb2 as pb
from tests.support import RUN_ID, deterministic_identity

AUTHORS = [deterministic_identity(f"author {i}").public_key for i in range(3)]
IDENTITY = deterministic_identity("author 0")

copies = st.builds(
    lambda author, subkey, version, signature, expires: Copy(
        Record(AUTHORS[author], "k", subkey, b"\x01", version, 100_000, False, bytes([signature]) * 64), float(expires)
    ),
    st.integers(0, 2),
    st.sampled_from(["", "a"]),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 20),
)
positions = st.integers(0, 2**ID_BITS - 1)


def node(position: int) -> PeerNode:
    return PeerNode(Contact(PeerId(position.to_bytes(20, "big") + bytes(12)), ("127.0.0.1:1",)))


@given(st.lists(copies, max_size=12), st.lists(copies, max_size=12), st.lists(copies, max_size=12))
def test_merge_is_commutative_associative_and_idempotent(a: list[Copy], b: list[Copy], c: list[Copy]) -> None:
    left = merge([*merge([*merge(a).values(), *merge(b).values()]).values(), *c])
    right = merge([*a, *merge([*merge(b).values(), *merge(c).values()]).values()])
    assert left == right == merge([*c, *b, *a])
    assert merge([*left.values(), *left.values()]) == left


@given(st.lists(copies, max_size=20), st.randoms(use_true_random=False))
def test_holders_that_saw_the_same_records_hold_the_same(offered: list[Copy], rng: random.Random) -> None:
    def held(order: list[Copy]) -> list[Record]:
        storage = Storage(DhtConfig())
        for copy in order:
            try:
                storage.offer(copy, 0.0)
            except RecordRefusedError as error:
                assert error.reason == "outdated"  # noqa: PT017 - the only refusal there is here
        return [copy.record for copy in storage.entries("k", 0.0)]

    shuffled = list(offered)
    rng.shuffle(shuffled)
    assert held(offered) == held(shuffled)


@given(st.lists(st.tuples(st.floats(0, 5), copies), max_size=25))
def test_a_held_statement_never_gains_lifetime_nor_an_entry_an_older_version(steps: list[tuple[float, Copy]]) -> None:
    storage, now_s = Storage(DhtConfig()), 0.0
    expiry: dict[tuple[object, ...], float] = {}
    newest: dict[object, int] = {}
    for wait_s, copy in steps:
        now_s += wait_s
        try:
            storage.offer(copy, now_s)
        except RecordRefusedError as error:
            assert error.reason in ("outdated", "expired")  # noqa: PT017 - nothing else may be refused here
        for held in storage.entries("k", now_s):
            statement = (held.record.entry_id, held.record.rank)
            assert held.expires_s <= expiry.setdefault(statement, held.expires_s)
            assert held.record.record_version >= newest.get(held.record.entry_id, 0)
            newest[held.record.entry_id] = held.record.record_version
            assert held.expires_s > now_s


@given(st.integers(1, 10_000), st.lists(st.floats(0, 3), min_size=1, max_size=6))
@settings(max_examples=50)
def test_a_lifetime_never_rises_on_its_way_through_peers(ttl_ms: int, delays: list[float]) -> None:
    record = sign_record(IDENTITY, RUN_ID, "k", "", b"\x01", 1, ttl_ms)
    copy, now_s, last_s = Copy(record, ttl_ms / 1000), 0.0, ttl_ms / 1000
    for i, delay_s in enumerate(delays):
        now_s += delay_s
        message = to_wire(copy, now_s)
        local_s = 1000.0 * i  # clocks of different peers have nothing to do with each other
        try:
            copy = Checker(RUN_ID, 4096).check(message, local_s)
        except RecordRefusedError:
            assert last_s - delay_s < 0.002  # only what has expired is refused
            return
        now_s = local_s
        assert copy.remaining_s(now_s) <= last_s - delay_s + 1e-6
        last_s = copy.remaining_s(now_s)


@given(positions, st.lists(positions, max_size=120), positions, st.integers(1, 12))
@settings(max_examples=150)
def test_the_table_names_exactly_the_nearest_it_knows(own: int, known: list[int], target: int, k: int) -> None:
    table = Table(node(own), 3, lambda: 0.0)
    for position in known:
        table.add_contact(node(position))
    everybody = [n.long_id for n in table.all_nodes()]
    assert len(set(everybody)) == len(everybody)
    assert [n.long_id for n in table.nearest(target, k)] == sorted(everybody, key=lambda p: p ^ target)[:k]


@given(st.sets(positions, min_size=1, max_size=60), positions, st.integers(1, 8), st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_a_lookup_ends_with_the_nearest_that_are_alive(
    known: set[int], target: int, width: int, parallelism: int, data: st.DataObject
) -> None:
    """Every peer knows everybody here; any of them may be dead or slow."""
    ordered = sorted(known, key=lambda p: p ^ target)
    nodes = [node(p) for p in ordered]
    dead = data.draw(st.sets(st.sampled_from(ordered), max_size=len(ordered) - 1))
    lookup = Lookup(target, width, nodes[-1:])
    lookup._candidates.push(nodes)
    in_flight: list[PeerNode] = []
    steps = 0
    while not lookup.done:
        in_flight += lookup.next(parallelism)
        assert len(in_flight) <= parallelism
        peer = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
        if peer.long_id in dead:
            lookup.failed(peer)
        else:
            lookup.answered(peer, nodes)
        steps += 1
        assert steps <= len(ordered)
    assert [n.long_id for n in lookup.nearest()][:width] == [p for p in ordered if p not in dead][:width]


@given(st.binary(max_size=300))
def test_any_bytes_as_a_body_give_a_value_or_a_refusal(body: bytes) -> None:
    try:
        decode_body(body)
    except RecordRefusedError as error:
        assert error.reason == "malformed"  # noqa: PT017 - the refusal names its reason


@given(
    st.builds(
        pb.DhtRecord,
        author=st.binary(max_size=40),
        key=st.text(max_size=10),
        subkey=st.text(max_size=10),
        body=st.binary(max_size=50),
        record_version=st.integers(0, 2**64 - 1),
        ttl_ms=st.integers(0, 2**32 - 1),
        deleted=st.booleans(),
        signature=st.binary(max_size=70),
        remaining_ms=st.integers(0, 2**32 - 1),
    )
)
def test_any_record_message_is_refused_with_a_reason(message: pb.DhtRecord) -> None:
    try:
        Checker(RUN_ID, 4096).check(message, 0.0)
    except RecordRefusedError as error:
        assert error.reason != "refused"  # noqa: PT017 - one of the named reasons
    else:
        raise AssertionError("nobody signed this")


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(plain)
def test_plain_values_survive_as_bodies(body: object) -> None:
    assert decode_body(encode_body(body)) == body
