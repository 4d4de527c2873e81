"""Digests of what is held under a key: whoever knows the same entries already need not be sent them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from swarm.dht.records import Copy

DIGEST_BYTES = 16


def digest_of(copies: Iterable[Copy]) -> bytes:
    """16 bytes over the statements held under one key, deletions included; empty for none.

    Two sets have one digest only if they have the same authors, subkeys, versions and signatures. Lifetimes, which
    differ between holders, do not count.

    Args:
        copies: In any order, at most one for each entry.
    """
    records = [copy.record for copy in sorted(copies, key=lambda copy: copy.record.entry_id)]
    if not records:
        return b""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"swarm entries")
    for record in records:
        subkey = record.subkey.encode()
        digest.update(
            record.author
            + record.record_version.to_bytes(8, "big")
            + record.signature
            + len(subkey).to_bytes(2, "big")
            + subkey
        )
    return digest.digest()
