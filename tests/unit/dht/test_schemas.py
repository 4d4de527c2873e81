"""Schemas: what fits, what is refused and how it is named; the declared ones take what their owners write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from swarm.averaging.board import ROUNDS_SCHEMA
from swarm.dht import checking
from swarm.dht.bodies import encode_body
from swarm.dht.messages import STORE
from swarm.dht.records import Copy, sign_record, to_wire
from swarm.dht.refusals import Refusal
from swarm.dht.schemas import (
    Check,
    Schema,
    Schemas,
    addresses,
    flag,
    integer,
    items,
    namespace_of,
    number,
    only_subkey,
    raw,
    table,
    text,
)
from swarm.errors import RecordRefusedError
from swarm.experts.records import HOST_SCHEMA, HostRecord, record_key
from swarm.pb import dht_pb2 as pb
from swarm.runs.membership import PEER_SCHEMA, peer_key
from swarm.training.progress import PROGRESS_SCHEMA, progress_key
from swarm.training.state import STATE_SCHEMA, state_key
from tests.support import RUN_ID, MemoryWorld, World, deterministic_identity

AUTHOR = deterministic_identity("author").peer_id
OTHER = next(
    peer_id for i in range(100) if peer_key(peer_id := deterministic_identity(f"other {i}").peer_id) != peer_key(AUTHOR)
)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (text(3), ["", "abc", "äöü"], ["abcd", b"abc", 1, None]),
        (raw(2), [b"", b"ab"], [b"abc", "ab"]),
        (integer(-1, 5), [-1, 0, 5], [-2, 6, True, 1.0, "1", 2**70]),
        (number(0, 2), [0, 1.5, 2], [-1, 2.1, math.nan, math.inf, True, "1"]),
        (number(), [-1e300, 0], [math.inf, -math.inf, math.nan]),
        (flag(), [True, False], [0, 1, None]),
        (items(integer(0, 9), 2), [[], [1, 2], (3,)], [[1, 2, 3], [10], "12", {1: 2}, None]),
        (table(text(1), flag(), 1), [{}, {"a": True}], [{"a": 1}, {"ab": True}, {"a": True, "b": True}, []]),
        (addresses(), [[], ["10.0.0.1:7"] * 8], [["a"] * 9, ["a" * 300], ["a", 1], "a:1", None]),
    ],
)
def test_checks_take_what_fits_and_say_what_does_not(check: Check, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if check(value) is not None] == []
    assert [value for value in bad if check(value) is None] == []


def test_a_complaint_names_the_field_and_unknown_fields_pass() -> None:
    schema = Schema(required={"step": integer(0, 9)}, optional={"loss": number()})
    assert schema.complaint({"step": 1, "later": object()}) is None
    assert schema.complaint({"step": 1, "loss": 0.5}) is None
    assert schema.complaint([1]) == "the body is not a table"
    assert schema.complaint({}) == "'step' is missing"
    assert (schema.complaint({"step": 10}) or "").startswith("'step' is not")
    assert (schema.complaint({"step": 1, "loss": "low"}) or "").startswith("'loss' is not")


@pytest.mark.parametrize(
    ("key", "namespace"),
    [("peers/a", "peers"), ("rounds.7/x.y/z", "rounds"), ("peers", ""), ("mine", ""), ("/x", ""), ("a.b", "")],
)
def test_a_namespace_ends_at_the_first_slash_or_dot(key: str, namespace: str) -> None:
    assert namespace_of(key) == namespace


def test_only_declared_namespaces_are_checked() -> None:
    schemas = Schemas()
    schemas.add("steps", Schema(required={"step": integer(0, 9)}, place=only_subkey("", "x")))
    schemas.check(AUTHOR, "steps/a", "x", {"step": 1})
    schemas.check(AUTHOR, "steps", "anything", None)
    schemas.check(AUTHOR, "stepson/a", "anything", None)
    for key, subkey, body in (("steps/a", "", 1), ("steps.2/a", "", {"step": "1"}), ("steps/a", "y", {"step": 1})):
        with pytest.raises(RecordRefusedError, match="'steps'") as caught:
            schemas.check(AUTHOR, key, subkey, body)
        assert caught.value.reason == "schema"
    for bad in ("", "a/b", "a.b"):
        with pytest.raises(ValueError, match="namespace"):
            schemas.add(bad, Schema())


@pytest.mark.parametrize(
    ("schema", "key", "body"),
    [
        (PROGRESS_SCHEMA, progress_key("lm"), {"step": 3, "samples": 1 << 40, "speed": 12.5, "loss": 2.0, "new": [1]}),
        (STATE_SCHEMA, state_key("lm"), {"addresses": ["10.0.0.1:7"], "step": 0}),
        (ROUNDS_SCHEMA, "rounds/lm", {"addresses": []}),
        (HOST_SCHEMA, record_key("ffn"), HostRecord(AUTHOR, ("a:1",), {"ffn.0": 1}, 0.25, 9, 1).to_bodies(4096)["0"]),
        (
            PEER_SCHEMA,
            peer_key(AUTHOR),
            {"name": "ann", "roles": ["host"], "addresses": ["a:1"], "state": "ONLINE", "metrics": {"loss": 1.0}},
        ),
    ],
)
def test_our_schemas_take_what_is_written_and_refuse_each_field_that_is_not(
    schema: Schema, key: str, body: dict[str, Any]
) -> None:
    schemas = Schemas()
    schemas.add(namespace_of(key), schema)
    subkey = "0" if schema is HOST_SCHEMA else ""
    schemas.check(AUTHOR, key, subkey, body)
    for name in [*schema.required, *(n for n in schema.optional if n in body)]:
        with pytest.raises(RecordRefusedError, match=repr(name)):
            schemas.check(AUTHOR, key, subkey, {**body, name: object()})
    with pytest.raises(RecordRefusedError, match=r"subkey|place"):
        schemas.check(AUTHOR, key, "elsewhere", body)
    if schema is PEER_SCHEMA:
        with pytest.raises(RecordRefusedError, match="place"):
            schemas.check(OTHER, key, "", body)


def test_what_does_not_fit_is_neither_published_nor_held_nor_read(world: World) -> None:
    async def main() -> None:
        first = await world.endpoint()
        peers = [first, *[await world.endpoint(bootstrap=[first.contact]) for _ in range(2)]]
        careless = peers[2]  # has no schema: an older peer, or a liar
        for peer in peers[:2]:
            peer.dht.declare("steps", Schema(required={"step": integer(0, 9)}))
        with pytest.raises(RecordRefusedError, match="'step' is missing"):
            await first.dht.put("steps/a", {"stop": 1}, ttl_s=60)
        assert await first.dht.put("steps/a", {"step": 1, "more": "x"}, ttl_s=60) == 3
        assert await first.dht.put("anything", [1], ttl_s=60) == 3
        record = sign_record(careless.identity, RUN_ID, "steps/a", "", encode_body({"step": "1"}), 1, 60_000)
        request = pb.DhtStoreRequest(records=[to_wire(Copy(record, 60.0), 0.0)])
        answer = await careless.transport.call(first.contact, STORE, request, timeout_s=5.0)
        assert answer.results[0].status == Refusal.SCHEMA
        assert await careless.dht.put("steps/a", {"step": "1"}, ttl_s=60) == 1  # by itself
        entries = await peers[1].dht.get("steps/a", fresh=True)
        assert [e.body for e in entries] == [{"step": 1, "more": "x"}]
        reasons = [
            s.event.to_dict()["reason"] for s in peers[1].runtime.events.recent() if "sender" in s.event.to_dict()
        ]
        assert "schema" in reasons

    world.run(main)


def test_a_body_is_decoded_once_for_all_checks(memory_world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again the same record: its signature vouches for the body."""

    async def main() -> None:
        holder = await memory_world.endpoint()
        writer = await memory_world.endpoint(bootstrap=[holder.contact])
        decoded: list[bytes] = []
        real: Callable[[bytes], Any] = checking.decode_body
        monkeypatch.setattr(checking, "decode_body", lambda body: decoded.append(body) or real(body))
        record = sign_record(writer.identity, RUN_ID, "k", "", encode_body("once"), 1, 60_000)
        decoded.clear()
        request = pb.DhtStoreRequest(records=[to_wire(Copy(record, 60.0), 0.0)] * 5)
        for _ in range(3):
            await writer.transport.call(holder.contact, STORE, request, timeout_s=5.0)
        assert decoded == [record.body]

    memory_world.run(main)
