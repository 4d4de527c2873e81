"""Signed, expiring records: what they contain, how they travel, when they are refused, and which of two wins."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import msgpack

from swarm.config import KIB
from swarm.errors import BadSignatureError, RecordRefusedError
from swarm.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, KeyPair, PeerId, verify
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
MAX_NESTING = 32
"""Levels of lists and tables in a body."""
_OPENING = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
_EXTENSIONS = bytes([0xC1, *range(0xC7, 0xCA), *range(0xD4, 0xD9)])
_PLAIN = bytes(code for code in range(256) if code not in _EXTENSIONS)
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Bytes that follow the code of a number."""
_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the length that follows the code of raw bytes, a text, a list, a table."""
VERIFIED_KEPT = 8192
SIGNATURE_DOMAIN = "record"

EntryId = tuple[PeerId, str]
"""(author, subkey): an entry's place under its key."""
PlaceId = tuple[str, PeerId, str]
"""(key, author, subkey): an entry's place in the run."""


class Refusal(IntEnum):
    """Why a record was not taken; travels in store answers (all but the last, which only a reader meets)."""

    NONE = 0
    MALFORMED = 1
    TOO_LARGE = 2
    BAD_SIGNATURE = 3
    FOREIGN = 4
    """Signed for another run."""
    OUTDATED = 5
    """A newer version is known: a replay, or an author that lost its memory."""
    EXPIRED = 6
    QUOTA = 7
    FUTURE = 8
    """Of a format that newer software writes."""
    SCHEMA = 9
    """The key belongs to a namespace of ours, and the body is not what is kept there."""
    UNSIGNED = 10
    MISPLACED = 11
    """Of another key than the one asked for."""

    @property
    def reason(self) -> str:
        return self.name.lower()


def refused(refusal: Refusal, message: str, fix: str | None = None, record_version: int = 0) -> RecordRefusedError:
    """The error for a refusal."""
    return RecordRefusedError(message, fix=fix, reason=refusal.reason, record_version=record_version)


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


def merge(copies: Iterable[Copy], into: dict[EntryId, Copy] | None = None) -> dict[EntryId, Copy]:
    """The newest copy of every entry. Order and repetition of the input do not matter."""
    result = {} if into is None else into
    for copy in copies:
        held = result.get(copy.record.entry_id)
        if held is None or copy.rank > held.rank:
            result[copy.record.entry_id] = copy
    return result


def encode_body(body: Any) -> bytes:
    """Body to msgpack. Raises `RecordRefusedError` for values that msgpack has no form for, or that nest too deep."""
    try:
        encoded = bytes(msgpack.packb(body))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise refused(
            Refusal.MALFORMED, f"The body cannot be written as msgpack: {error}.", "Use plain values."
        ) from error
    decode_body(encoded)
    return encoded


def decode_body(body: bytes) -> Any:
    """Msgpack to plain values. Raises `RecordRefusedError`; anything may be in there.

    Lists and tables nest at most `MAX_NESTING` deep and never claim more items than there are bytes: a claim is
    allocated before its items are read, so that a few bytes could otherwise ask for megabytes.
    """
    try:
        # Cheap for almost all bodies: so few bytes that could open a level cannot nest any deeper.
        if len(body) - len(body.translate(None, _OPENING)) > MAX_NESTING or body.translate(None, _PLAIN):
            _scan(body)
        return msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, IndexError, msgpack.UnpackException) as error:
        raise refused(Refusal.MALFORMED, f"The body of a record is no msgpack of plain values: {error}.") from error


def _scan(body: bytes) -> None:
    """Walk over msgpack without building anything. Raises `ValueError` or `IndexError`."""
    at, end = 0, len(body)
    open_items = [1]  # items still to come, by level
    owed = 1  # in all levels
    while open_items:
        if not open_items[-1]:
            open_items.pop()
            continue
        code = body[at]
        at += 1
        open_items[-1] -= 1
        owed -= 1
        items = -1
        if code <= 0x7F or code >= 0xE0 or code in (0xC0, 0xC2, 0xC3):
            continue
        if code <= 0x8F:
            items = 2 * (code & 0x0F)
        elif code <= 0x9F:
            items = code & 0x0F
        elif code <= 0xBF:
            at += code & 0x1F
        elif code in _FIXED:
            at += _FIXED[code]
        elif code in _COUNTED:
            width = _COUNTED[code]
            count = int.from_bytes(body[at : at + width], "big")
            at += width
            if code <= 0xDB:
                at += count
            else:
                items = 2 * count if code >= 0xDE else count
        else:
            raise ValueError(f"an extension type, or no code of msgpack: {code:#x}")
        if at > end:
            raise ValueError("it ends too early")
        if items >= 0:
            owed += items
            open_items.append(items)
            if owed > end - at or len(open_items) > MAX_NESTING + 1:
                raise ValueError(f"more items than bytes, or more than {MAX_NESTING} levels")


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


def _check_fields(record: Record, max_body_bytes: int) -> None:
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
    _check_fields(draft, max_body_bytes)
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


class Checker:
    """Checks records that arrive, remembering signatures it has verified (bounded).

    Args:
        run_id: The run whose records are accepted.
        max_body_bytes: Largest body accepted.
        check_body: Raises `RecordRefusedError` where a decoded body does not belong under its author, key and subkey.
    """

    def __init__(
        self, run_id: bytes, max_body_bytes: int, check_body: Callable[[PeerId, str, str, Any], None] | None = None
    ) -> None:
        self._run_id = run_id
        self._check_body = check_body
        self._max_body_bytes = max_body_bytes
        self._verified: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, message: pb.DhtRecord, now_s: float, key: str | None = None) -> Copy:
        """The copy that a message carries.

        Args:
            now_s: Local time, from which the remaining lifetime counts.
            key: The only key that is acceptable, if any.

        Raises:
            RecordRefusedError: Malformed, too large, expired, of another run or key, of a later format, or not signed
                by its author; or its body is not what is kept under its key.
        """
        if message.format > RECORD_FORMAT:
            raise refused(
                Refusal.FUTURE, f"The record has format {message.format}; this peer reads {RECORD_FORMAT}.",
                "Update swarm on this peer.",
            )  # fmt: skip
        if message.format != RECORD_FORMAT:
            raise refused(Refusal.MALFORMED, "The record names no format.")
        record = Record(
            message.author, message.key, message.subkey, message.body, message.record_version, message.ttl_ms,
            message.deleted, message.signature, message.incarnation, message.run,
        )  # fmt: skip
        _check_fields(record, self._max_body_bytes)
        if record.run != self._run_id[:RUN_TAG_BYTES]:
            raise refused(Refusal.FOREIGN, "The record belongs to another run.")
        if key is not None and record.key != key:
            raise refused(Refusal.MISPLACED, "A record of another key than the one asked for.")
        if message.remaining_ms == 0:
            raise refused(Refusal.EXPIRED, "The record has expired.")
        self._verify(record)
        return Copy(record, now_s + min(message.remaining_ms, record.ttl_ms) / 1000)

    def knows(self, message: pb.DhtRecord) -> bool:
        """Whether this signature has been verified before, so that the check is cheap. A hint; `check` decides."""
        return message.signature in self._verified

    def _verify(self, record: Record) -> None:
        payload = record.payload(self._run_id)
        digest = hashlib.sha256(payload).digest()
        if self._verified.get(record.signature) == digest:
            return
        try:
            verify(record.author, SIGNATURE_DOMAIN, payload, record.signature)
        except BadSignatureError as error:
            raise refused(Refusal.BAD_SIGNATURE, "The record is not signed by its author for this run.") from error
        if not record.deleted:
            body = decode_body(record.body)
            if self._check_body is not None:
                self._check_body(record.author_id, record.key, record.subkey, body)
        with self._lock:
            self._verified[record.signature] = digest
            while len(self._verified) > VERIFIED_KEPT:
                self._verified.popitem(last=False)


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
