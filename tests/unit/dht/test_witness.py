"""A reader takes nothing back that it has seen."""

from __future__ import annotations

from swarm.dht.records import Copy, Record, merge
from swarm.dht.witness import WITNESSED_KEPT, Witness
from tests.support import deterministic_identity

AUTHOR = deterministic_identity("author").public_key


def copy(version: int, expires_s: float = 5.0, *, key: str = "key", deleted: bool = False) -> Copy:
    body = b"" if deleted else b"\x01"
    return Copy(Record(AUTHOR, key, "", body, version, 10_000, deleted, version.to_bytes(64, "big")), expires_s)


def admit(witness: Witness, held: Copy, now_s: float = 0.0) -> list[Copy]:
    return list(witness.admit(merge([held]), now_s).values())


def test_an_older_version_is_not_taken_after_a_newer_one() -> None:
    witness = Witness()
    assert admit(witness, copy(2)) == [copy(2)]
    assert admit(witness, copy(1)) == []
    assert admit(witness, copy(2)) == [copy(2)]
    assert admit(witness, copy(3)) == [copy(3)]
    assert admit(witness, copy(2)) == []


def test_what_was_seen_deleted_stays_deleted() -> None:
    witness = Witness()
    admit(witness, copy(1))
    assert [c.record.deleted for c in admit(witness, copy(2, deleted=True))] == [True]
    assert admit(witness, copy(1)) == []


def test_a_version_lives_no_longer_than_its_signed_lifetime_after_it_was_first_seen() -> None:
    witness = Witness()
    assert admit(witness, copy(1, 10.0), 0.0) == [copy(1, 10.0)]
    assert admit(witness, copy(1, 18.0), 8.0) == [copy(1, 10.0)]  # a liar shows it with its whole lifetime again
    assert admit(witness, copy(1, 9.0), 8.5) == [copy(1, 9.0)]
    assert admit(witness, copy(2, 18.0), 8.0) == [copy(2, 18.0)]  # the author has renewed it


def test_memory_is_bounded() -> None:
    witness = Witness()
    admit(witness, copy(2, key="first"))
    for i in range(WITNESSED_KEPT):
        admit(witness, copy(1, key=f"key {i}"))
    assert admit(witness, copy(1, key="first")) == [copy(1, key="first")]
