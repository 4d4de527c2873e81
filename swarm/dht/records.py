"""Signed, expiring records: what they contain, how they travel, and which of two wins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgpack

from swarm.config import KIB
from swarm.dht.bodies import decode_body
from swarm.dht.refusals import Refusal, refused
from swarm.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, KeyPair, PeerId
from swarm.pb import dht_pb2 as pb

MAX_NAME_BYTES = 256
"""Longest key or subkey, in UTF-8."""
MAX_TTL_S = 30 * 86_400.0
"""Longest lifetime of a record."""
MAX_VERSION = 1 << 62
"""Record versions are smaller. They start at the author's wall clock in milliseconds (2**41 or so)."""
MAX_ADOPTED_VERSION = 1 << 53
"""The highest version that an author believes when a peer says, unproven, that it holds it (milliseconds until the year
287,000): a liar cannot exhaust the author's versions."""
RECORD_FORMAT = 1
"""Layout of the signed statement. A record of a later one is refused as such: only newer software can read it."""
INCARNATION_BYTES = 8
RUN_TAG_BYTES = 8
"""So much of the run id travels with a record, to tell another run's record from a forged one."""
RECORD_OVERHEAD_BYTES = 256
"""Bound of what a record adds to its key, subkey and body on the wire."""
SHORTEST_S = 0.001
"""What has less of its lifetime left is not worth sending."""
SIGNATURE_DOMAIN = "record"

EntryId = tuple[PeerId, str]
"""(author, subkey): an entry's place under its key."""
PlaceId = tuple[str, PeerId, str]
"""(key, author, subkey): an entry's place in the run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a reader gets: one author's value under a key and subkey, checked against the author's signature."""

    author: PeerId
    subkey: str
    body: Any
    record_version: int
    ttl_s: float
    """What is left of the record's lifetime."""


def position_of(key: str) -> bytes:
    """Where a key lies among the peers: 20 bytes."""
    return hashlib.sha256(b"swarm/key\0" + key.encode()).digest()[:20]


@dataclass(frozen=True)
class Record:
    """One author's signed statement. Everything here is covered by the signature, together with the run id."""

    author: bytes
    key: str
    subkey: str
    body: bytes
    record_version: int
    ttl_ms: int
    deleted: bool
    signature: bytes
    incarnation: bytes = bytes(INCARNATION_BYTES)
    """Of the process that signed: two processes that run under one identity differ in it."""
    run: bytes = b""
    """The run id's first bytes."""

    @cached_property
    def author_id(self) -> PeerId:
        return PeerId.of(self.author)

    @property
    def entry_id(self) -> EntryId:
        return (self.author_id, self.subkey)

    @property
    def place_id(self) -> PlaceId:
        return (self.key, self.author_id, self.subkey)

    @property
    def rank(self) -> tuple[int, bytes]:
        """The larger wins. The signature decides between two statements of one version (an author lost its memory)."""
        return (self.record_version, self.signature)

    def payload(self, run_id: bytes) -> bytes:
        """The bytes that are signed."""
        return bytes(
            msgpack.packb(
                [
                    RECORD_FORMAT, run_id, self.author, self.incarnation, self.key, self.subkey, self.body,
                    self.record_version, self.ttl_ms, self.deleted,
                ]
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copy:
    """A record as one peer holds it: with the local time at which its lifetime ends."""

    record: Record
    expires_s: float

    def remaining_s(self, now_s: float) -> float:
        return self.expires_s - now_s

    @property
    def rank(self) -> tuple[tuple[int, bytes], float]:
        return (self.record.rank, self.expires_s)

    @property
    def wire_bytes(self) -> int:
        """Upper bound of its size in a message."""
        record = self.record
        return RECORD_OVERHEAD_BYTES + 4 * (len(record.key) + len(record.subkey)) + len(record.body)


def worth_sending(copies: Iterable[Copy], now_s: float) -> list[Copy]:
    """Those that are not about to expire."""
    return [copy for copy in copies if copy.remaining_s(now_s) >= SHORTEST_S]


def merge(copies: Iterable[Copy], into: dict[EntryId, Copy] | None = None) -> dict[EntryId, Copy]:
    """The newest copy of every entry. Order and repetition of the input do not matter."""
    result = {} if into is None else into
    for copy in copies:
        held = result.get(copy.record.entry_id)
        if held is None or copy.rank > held.rank:
            result[copy.record.entry_id] = copy
    return result


def check_ttl_ms(ttl_s: float) -> int:
    """A lifetime as it is signed. Raises `RecordRefusedError`."""
    if not 0.001 <= ttl_s <= MAX_TTL_S:
        raise refused(
            Refusal.MALFORMED, f"A lifetime of {ttl_s} s cannot be used.", f"Take 0.001 s to {MAX_TTL_S:.0f} s."
        )
    return int(ttl_s * 1000)


def check_names(key: str, subkey: str = "") -> None:
    """Key and subkey are of acceptable length. Raises `RecordRefusedError`."""
    if not key or len(key.encode()) > MAX_NAME_BYTES or len(subkey.encode()) > MAX_NAME_BYTES:
        raise refused(Refusal.TOO_LARGE, f"Keys and subkeys have at most {MAX_NAME_BYTES} bytes, keys at least one.")


def check_fields(record: Record, max_body_bytes: int) -> None:
    """What can be said without looking at signature and body. Raises `RecordRefusedError`."""
    if not record.signature:
        raise refused(Refusal.UNSIGNED, "The record carries no signature.")
    if (
        len(record.author) != PUBLIC_KEY_BYTES
        or len(record.signature) != SIGNATURE_BYTES
        or len(record.incarnation) != INCARNATION_BYTES
    ):
        raise refused(Refusal.MALFORMED, "A record's author key, signature or incarnation has the wrong length.")
    check_names(record.key, record.subkey)
    if len(record.body) > max_body_bytes:
        raise refused(
            Refusal.TOO_LARGE,
            f"The body has {len(record.body)} bytes, more than {max_body_bytes}.",
            "Split it over several subkeys, or store where to fetch it from.",
        )
    if not 0 < record.record_version < MAX_VERSION or not 0 < record.ttl_ms <= MAX_TTL_S * 1000:
        raise refused(Refusal.MALFORMED, "A record's version or lifetime is out of range.")
    if record.deleted and record.body:
        raise refused(Refusal.MALFORMED, "A tombstone has no body.")


def sign_record(
    author: KeyPair, run_id: bytes, key: str, subkey: str, body: bytes, record_version: int, ttl_ms: int, *,
    deleted: bool = False, max_body_bytes: int = 4 * KIB, incarnation: bytes = bytes(INCARNATION_BYTES),
) -> Record:  # fmt: skip
    """Make a record. Raises `RecordRefusedError` where nobody would take it."""
    draft = Record(
        author.public_key, key, subkey, body, record_version, ttl_ms, deleted, bytes(SIGNATURE_BYTES), incarnation,
        run_id[:RUN_TAG_BYTES],
    )  # fmt: skip
    check_fields(draft, max_body_bytes)
    return replace(draft, signature=author.sign(SIGNATURE_DOMAIN, draft.payload(run_id)))


def to_wire(copy: Copy, now_s: float) -> pb.DhtRecord:
    """The message for a copy, with what is left of its lifetime (rounded down: it only ever falls)."""
    record = copy.record
    return pb.DhtRecord(
        format=RECORD_FORMAT,
        run=record.run,
        author=record.author,
        incarnation=record.incarnation,
        key=record.key,
        subkey=record.subkey,
        body=record.body,
        record_version=record.record_version,
        ttl_ms=record.ttl_ms,
        deleted=record.deleted,
        signature=record.signature,
        remaining_ms=remaining_ms(copy, now_s),
    )


def remaining_ms(copy: Copy, now_s: float) -> int:
    """What is left of a copy's lifetime, as it travels."""
    return max(0, min(copy.record.ttl_ms, int(copy.remaining_s(now_s) * 1000)))


def to_entry(copy: Copy, now_s: float) -> Entry:
    """What a reader gets for a checked copy."""
    record = copy.record
    return Entry(
        record.author_id,
        record.subkey,
        decode_body(record.body),
        record.record_version,
        max(0.0, copy.remaining_s(now_s)),
    )
