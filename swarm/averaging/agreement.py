"""Whether all members of a group ended a round with the same values: what they compare, and what it means, without I/O.

Each member sums every encoded average that it wrote as 64-bit integers, which costs a fraction of reading it, and
hashes the sums part by part. Equal hashes mean equal bits but for differences that cancel out in a sum: accidents never
do. A reducer that deliberately tells members different things could make them; two reducers for a part find it out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.errors import MalformedFrameError
from swarm.identity import PeerId

HASH_BYTES = 8
_MASK = (1 << 64) - 1
_AGREED_LOCAL, _LOST = b"-", b"?"
_WHOLE, _INCOMPLETE = b"\x02w", b"\x02i"


def checksum(payload: bytes) -> int:
    """The sum of the payload's 64-bit words and its rest, modulo 2^64."""
    words = len(payload) // 8
    total = int(np.frombuffer(payload, np.uint64, words).sum(dtype=np.uint64)) if words else 0
    return (total + int.from_bytes(payload[8 * words :], "little") + len(payload)) & _MASK


class PartTally:
    """What one member holds of one part, chunk by chunk."""

    def __init__(self, chunks: int) -> None:
        self._sums: list[int | None] = [None] * chunks
        self._known = [False] * chunks

    def averaged(self, index: int, total: int) -> None:
        """The chunk holds an average with this `checksum`."""
        self._sums[index], self._known[index] = total, True

    def stays_local(self, index: int) -> None:
        """The reducer says that the chunk has no average for anybody."""
        self._known[index] = True

    @property
    def lost(self) -> int:
        """Chunks of which this member does not know the average."""
        return len(self._known) - sum(self._known)

    def digest(self) -> bytes:
        """Equal for members that hold the same averages of this part."""
        found = hashlib.blake2b(digest_size=HASH_BYTES)
        for known, total in zip(self._known, self._sums, strict=True):
            found.update(_LOST if not known else _AGREED_LOCAL if total is None else struct.pack("<Q", total))
        return found.digest()


@dataclass(frozen=True, slots=True)
class Result:
    """What one member holds after a round.

    Attributes:
        digests: One for each member's part, in the order of the seal.
        whole: It knows the average of every chunk.
    """

    digests: tuple[bytes, ...]
    whole: bool

    @classmethod
    def of(cls, parts: Sequence[PartTally]) -> Result:
        return cls(tuple(part.digest() for part in parts), not any(part.lost for part in parts))

    def to_bytes(self) -> bytes:
        """As it travels at the end of an exchange."""
        return (_WHOLE if self.whole else _INCOMPLETE) + b"".join(self.digests)

    @classmethod
    def from_bytes(cls, data: bytes, members: int) -> Result:
        """Raises `MalformedFrameError`."""
        kind, rest = data[: len(_WHOLE)], data[len(_WHOLE) :]
        if kind not in (_WHOLE, _INCOMPLETE) or len(rest) != members * HASH_BYTES:
            raise MalformedFrameError("A member's summary of the round is malformed.")
        return cls(tuple(rest[i : i + HASH_BYTES] for i in range(0, len(rest), HASH_BYTES)), kind == _WHOLE)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the members' results say together.

    Attributes:
        agreed: Members whose values count. They have the result that most hold (of equally many, rather a whole one).
            Where nobody knows all averages, local values fill the gaps, and those of one member count.
        others: Members with other values.
    """

    agreed: tuple[PeerId, ...]
    others: tuple[PeerId, ...]


def judge(results: Mapping[PeerId, Result]) -> Agreement:
    """Compare results, this member's among them. All who compare the same results come to the same answer."""
    groups: dict[tuple[bytes, ...], list[PeerId]] = {}
    for peer in sorted(results):
        groups.setdefault(results[peer].digests, []).append(peer)

    def rank(digests: tuple[bytes, ...]) -> tuple[int, bool, tuple[bytes, ...]]:
        return -len(groups[digests]), not results[groups[digests][0]].whole, digests

    best = groups[min(groups, key=rank)]
    agreed = best if results[best[0]].whole else best[:1]
    return Agreement(tuple(agreed), tuple(peer for peer in results if peer not in agreed))
