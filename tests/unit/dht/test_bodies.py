"""Bodies: plain values pass, whatever else arrives is refused before it costs anything."""

from __future__ import annotations

import msgpack
import pytest

from swarm.dht.bodies import decode_body, encode_body
from swarm.dht.checking import Checker
from swarm.dht.records import Copy, sign_record, to_wire
from swarm.errors import RecordRefusedError
from tests.support import RUN_ID, deterministic_identity

AUTHOR = deterministic_identity("author")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x01\x01",
        b"\x91" * 4000,
        msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\x81\x90\x01",
        b"\xa1\xff",
    ],
)
def test_bodies_that_are_no_plain_msgpack_are_refused(body: bytes) -> None:
    record = sign_record(AUTHOR, RUN_ID, "key", "", body, 1, 1000)
    with pytest.raises(RecordRefusedError) as caught:
        Checker(RUN_ID, 4096).check(to_wire(Copy(record, 1.0), 0.0), 0.0)
    assert caught.value.reason == "malformed"
    with pytest.raises(RecordRefusedError):
        decode_body(body)


@pytest.mark.parametrize("body", [object(), {1, 2}, 2**70])
def test_a_body_of_other_values_cannot_be_written(body: object) -> None:
    with pytest.raises(RecordRefusedError, match="msgpack"):
        encode_body(body)
