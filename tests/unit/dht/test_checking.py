"""Records that arrive: signatures cover everything, bad ones are refused with a reason, lifetimes only fall."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.dht.bodies import encode_body
from swarm.dht.checking import VERIFIED_KEPT, Checker
from swarm.dht.records import MAX_VERSION, Copy, sign_record, to_entry, to_wire
from swarm.errors import RecordRefusedError
from swarm.pb import dht_pb2 as pb
from tests.support import RUN_ID, deterministic_identity

AUTHOR = deterministic_identity("author")


def signed(body: object = None, version: int = 7, ttl_ms: int = 60_000, key: str = "key", subkey: str = "s") -> Copy:
    record = sign_record(AUTHOR, RUN_ID, key, subkey, encode_body(body), version, ttl_ms)
    return Copy(record, 100.0 + ttl_ms / 1000)


def checker() -> Checker:
    return Checker(RUN_ID, 4096)


def test_a_signed_record_passes_and_reads_back() -> None:
    body = {"addresses": ["10.0.0.1:7"], "experts": {"ffn.0.1": 3}, "queue_s": 0.5, "raw": b"\0\1"}
    copy = checker().check(to_wire(signed(body), 110.0), 200.0, "key")
    entry = to_entry(copy, 210.0)
    assert entry.body == body
    assert (entry.author, entry.subkey, entry.record_version) == (AUTHOR.peer_id, "s", 7)
    assert entry.ttl_s == pytest.approx(40.0)  # ten seconds passed at the sender, ten at the receiver


Tamper = Callable[[pb.DhtRecord], None]


def _set(**fields: object) -> Tamper:
    def tamper(message: pb.DhtRecord) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return tamper


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (_set(signature=bytes(64)), "bad_signature"),
        (_set(signature=b""), "unsigned"),
        (_set(signature=b"short"), "malformed"),
        (_set(author=deterministic_identity("other").public_key), "bad_signature"),
        (_set(author=b"short"), "malformed"),
        (_set(subkey="t"), "bad_signature"),
        (_set(body=b"\x05"), "bad_signature"),
        (_set(record_version=8), "bad_signature"),
        (_set(record_version=0), "malformed"),
        (_set(record_version=MAX_VERSION), "malformed"),
        (_set(ttl_ms=60_001), "bad_signature"),
        (_set(ttl_ms=0), "malformed"),
        (_set(ttl_ms=2**32 - 1), "malformed"),
        (_set(deleted=True), "malformed"),
        (_set(deleted=True, body=b""), "bad_signature"),
        (_set(body=bytes(5000)), "too_large"),
        (_set(subkey="x" * 300), "too_large"),
        (_set(key=""), "too_large"),
        (_set(key="elsewhere"), "misplaced"),
        (_set(remaining_ms=0), "expired"),
        (_set(format=2), "future"),
        (_set(format=2, body=bytes(5000), signature=b""), "future"),
        (_set(format=0), "malformed"),
        (_set(incarnation=b"12345678"), "bad_signature"),
        (_set(incarnation=b""), "malformed"),
        (_set(run=b"another "), "foreign"),
        (_set(run=b""), "foreign"),
    ],
)
def test_altered_records_are_refused_with_a_reason(tamper: Tamper, reason: str) -> None:
    message = to_wire(signed(1), 100.0)
    tamper(message)
    with pytest.raises(RecordRefusedError) as caught:
        checker().check(message, 0.0, "key")
    assert caught.value.reason == reason


def test_a_record_of_another_run_is_refused() -> None:
    message = to_wire(signed(1), 100.0)
    with pytest.raises(RecordRefusedError) as caught:
        Checker(bytes(32), 4096).check(message, 0.0)
    assert caught.value.reason == "foreign"
    message.run = bytes(8)  # saying that it is of this run does not make it so
    with pytest.raises(RecordRefusedError, match="for this run"):
        Checker(bytes(32), 4096).check(message, 0.0)


def test_a_verified_signature_does_not_vouch_for_other_fields() -> None:
    check, message = checker(), to_wire(signed(1), 100.0)
    check.check(message, 0.0)
    assert check.knows(message)
    message.body = b"\x02"
    with pytest.raises(RecordRefusedError, match="not signed"):
        check.check(message, 0.0)


def test_the_memory_of_verified_signatures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VERIFIED_KEPT < 100_000
    monkeypatch.setattr("swarm.dht.checking.VERIFIED_KEPT", 2)
    check, messages = checker(), [to_wire(signed(i), 100.0) for i in range(3)]
    for message in messages:
        check.check(message, 0.0)
    assert [check.knows(message) for message in messages] == [False, True, True]


def test_what_is_left_of_a_lifetime_never_exceeds_what_was_signed() -> None:
    message = to_wire(signed(1, ttl_ms=1000), 100.0)
    message.remaining_ms = 999_999
    assert checker().check(message, 5.0).expires_s == pytest.approx(6.0)
    assert to_wire(Copy(signed(1, ttl_ms=1000).record, 1e9), 0.0).remaining_ms == 1000
