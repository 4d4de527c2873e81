"""How a simulated link treats what passes through it: when bytes arrive and which are damaged, decided without I/O."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import UsageError

BYTES_PER_MBIT = 1e6 / 8
PIECE_S = 0.02
"""A piece takes a link at most about this long, so that connections share it evenly and changes take effect soon."""
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 1460, 64 * 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """What a link is like; `up` is what the peer behind it sends, `down` what it receives.

    Attributes:
        latency_ms: Delay of every byte, in each direction: a round trip through one link takes twice that longer.
        jitter_ms: Up to so much more, drawn for each piece; bytes of a connection keep their order.
        up_mbit, down_mbit: 10^6 bits a second, for all connections of the peer together; none = no limit.
        corrupt_per_mb: How many bytes of 10^6 have a bit flipped, on average.
        refuse: Whether new connections are reset at once.
        blackhole: Whether new connections are accepted and then lead nowhere.

    Raises:
        UsageError: A number that cannot be.
    """

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    up_mbit: float | None = None
    down_mbit: float | None = None
    corrupt_per_mb: float = 0.0
    refuse: bool = False
    blackhole: bool = False

    def __post_init__(self) -> None:
        for name in ("latency_ms", "jitter_ms", "corrupt_per_mb"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"A link's {name} of {getattr(self, name)} cannot be.", fix="Use 0 or more.")
        for name in ("up_mbit", "down_mbit"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise UsageError(f"A link's {name} of {rate} cannot be.", fix="Use more than 0, or None for no limit.")


class Lane:
    """One direction of a link. Bytes leave it one after the other, at its rate, whosever they are.

    Attributes:
        rate: Bytes a second; none = no limit.
        nbytes: What has passed.
        swallows: Whether all that comes is lost.
    """

    def __init__(self, mbit: float | None = None) -> None:
        self.rate: float | None = None
        self.nbytes = 0
        self.swallows = False
        self._free_s = -math.inf
        self.set(mbit)

    def set(self, mbit: float | None) -> None:
        """Change the rate for what comes from now on."""
        self.rate = None if mbit is None else mbit * BYTES_PER_MBIT

    def reserve(self, at_s: float, nbytes: int) -> float:
        """When a piece that gets here at `at_s` has left."""
        self.nbytes += nbytes
        if self.rate is None:
            return at_s
        self._free_s = max(self._free_s, at_s) + nbytes / self.rate
        return self._free_s


def piece_bytes(lanes: Sequence[Lane]) -> int:
    """How much of a connection passes these lanes at a time."""
    slowest = min((lane.rate for lane in lanes if lane.rate is not None), default=math.inf)
    return int(min(max(slowest * PIECE_S, LEAST_PIECE_BYTES), MOST_PIECE_BYTES))


class Corruptor:
    """Flips bits at random places of one direction of a connection. The same generator finds the same places.

    Attributes:
        flipped: How many bytes were damaged so far.
    """

    def __init__(self, rng: random.Random) -> None:
        self.flipped = 0
        self._rng = rng
        self._left = rng.expovariate(1.0)
        """Expected number of damaged bytes until the next one."""

    def apply(self, data: bytes, per_mb: float) -> bytes:
        """The next bytes of the stream, some of them damaged."""
        rate, at, found = per_mb / 1e6, 0, bytearray()
        while rate > 0:
            skip = max(0, int(self._left / rate))
            if at + skip >= len(data):
                self._left -= (len(data) - at) * rate
                break
            at += skip
            found = found or bytearray(data)
            found[at] ^= 1 << self._rng.randrange(8)
            self.flipped += 1
            self._left = self._rng.expovariate(1.0)
            at += 1
        return bytes(found) if found else data
