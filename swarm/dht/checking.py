"""Records that arrive are checked before anybody looks at them: layout, run, key, lifetime, signature, body."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from swarm.dht.bodies import decode_body
from swarm.dht.records import RECORD_FORMAT, RUN_TAG_BYTES, SIGNATURE_DOMAIN, Copy, Record, check_fields
from swarm.dht.refusals import Refusal, refused
from swarm.errors import BadSignatureError, RecordRefusedError
from swarm.identity import PeerId, verify
from swarm.pb import dht_pb2 as pb
from swarm.runtime import Runtime

VERIFIED_KEPT = 8192
"""Signatures remembered as good."""
INLINE_CHECKS = 3
"""So many signatures are checked on the loop (0.1 ms each); more of them elsewhere."""
LIES = frozenset(
    refusal.reason for refusal in (Refusal.BAD_SIGNATURE, Refusal.UNSIGNED, Refusal.FOREIGN, Refusal.MISPLACED)
)
"""Why an honest holder would have refused a record itself, whatever its settings and age."""


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
        check_fields(record, self._max_body_bytes)
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

    async def check_many(
        self, messages: Sequence[pb.DhtRecord], now_s: float, runtime: Runtime, key: str | None = None
    ) -> list[Copy | RecordRefusedError]:
        """`check` for several, off the loop where that takes long.

        Args:
            now_s: Local time, from which the remaining lifetimes count.
            runtime: Knows where else to check.
            key: The only key that is acceptable, if any: then the checks end with the first record that no honest
                holder can have, for the rest of a liar's answer is not worth the signatures.
        """

        def check_all() -> list[Copy | RecordRefusedError]:
            result: list[Copy | RecordRefusedError] = []
            for message in messages:
                try:
                    result.append(self.check(message, now_s, key))
                except RecordRefusedError as error:
                    result.append(error)
                    if key is not None and error.reason in LIES:
                        break
            return result

        if sum(not self.knows(message) for message in messages) <= INLINE_CHECKS:
            return check_all()
        return await runtime.offload(check_all)
