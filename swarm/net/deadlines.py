"""Adaptive deadlines: how long to wait for a peer, learned from how long it took before.

Per (peer, method, size class), over the last 64 samples: `max(median + 4 * 1.4826 * MAD, 2 * median, p99)` plus the
queue and compute time that the host advertised, between a floor and a cap; until 8 samples, a preset, or the longest of
them. A timeout is a sample at twice the deadline, and the deadline doubles until a success: learning from successes
alone would never recover from a step in load, and median + k * MAD alone would give up on one in five answers of a peer
with two modes.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from swarm.config import DeadlineConfig
from swarm.identity import PeerId

WINDOW = 64
MIN_SAMPLES = 8
MAX_WINDOWS = 8192
_RELEARN_EVERY = 8
_MAD_FACTOR = 4 * 1.4826
_SMALL_BYTES_LOG2 = 14
_EWMA = 0.2

_Key = tuple[PeerId, str, int]


def size_class(size_bytes: int) -> int:
    """Class of a message size: one up to 16 KiB, then one for every factor of four."""
    return ((size_bytes >> _SMALL_BYTES_LOG2).bit_length() + 1) // 2


class _Samples:
    """The last samples of one key, in order of arrival and of size, and the deadline learned from them."""

    __slots__ = ("arrived", "backoff_s", "learned_s", "oldest", "ordered", "p95_s", "unlearned")

    def __init__(self) -> None:
        self.arrived: list[float] = []  # a ring once it is full; a deque would take more memory than all else
        self.oldest = 0
        self.ordered: list[float] = []
        self.learned_s = 0.0
        self.p95_s = 0.0
        self.unlearned = 0
        self.backoff_s = 0.0

    def add(self, elapsed_s: float) -> None:
        insort(self.ordered, elapsed_s)
        if len(self.arrived) < WINDOW:
            self.arrived.append(elapsed_s)
        else:
            self.ordered.remove(self.arrived[self.oldest])
            self.arrived[self.oldest] = elapsed_s
            self.oldest = (self.oldest + 1) % WINDOW
        self.unlearned += 1

    @property
    def longest_s(self) -> float:
        return self.ordered[-1] if self.ordered else 0.0

    def deadline_s(self) -> float:
        """The learned deadline before bounds. Statistics are refreshed every few samples: they cost microseconds."""
        if self.unlearned >= _RELEARN_EVERY or (self.unlearned and self.ordered[-1] > self.learned_s):
            self.unlearned = 0
            values = self.ordered
            median = values[len(values) // 2]
            mad = sorted(abs(v - median) for v in values)[len(values) // 2]
            p99 = values[-(-99 * len(values) // 100) - 1]
            self.p95_s = values[-(-95 * len(values) // 100) - 1]
            self.learned_s = max(median + _MAD_FACTOR * mad, 2 * median, p99)
        return self.learned_s


class Deadlines:
    """Deadlines for calls to many peers, in bounded memory (the least recently used keys are forgotten).

    Args:
        config: The preset deadline, floor and cap.
    """

    def __init__(self, config: DeadlineConfig) -> None:
        self._config = config
        self._windows: OrderedDict[_Key, _Samples] = OrderedDict()
        self._latency: OrderedDict[tuple[PeerId, str], float] = OrderedDict()

    def budget_s(
        self, peer_id: PeerId, path: str, size_bytes: int = 0, *, advertised_s: float = 0.0, cap_s: float | None = None
    ) -> float:
        """How long to wait for an answer.

        Args:
            size_bytes: Size of the request (and response, where known): calls of different sizes learn apart.
            advertised_s: Queue and compute time that the peer told us to expect.
            cap_s: The caller's own limit; wins over the configured floor.
        """
        config = self._config
        samples = self._windows.get((peer_id, path, size_class(size_bytes)))
        if samples is None or len(samples.ordered) < MIN_SAMPLES:
            wanted = (
                config.initial_s if samples is None else max(config.initial_s, samples.backoff_s, samples.longest_s)
            )
        else:
            wanted = max(samples.deadline_s(), samples.backoff_s)
        budget = min(max(wanted + advertised_s, config.floor_s), config.cap_s)
        return budget if cap_s is None else min(budget, cap_s)

    def record(self, peer_id: PeerId, path: str, size_bytes: int, elapsed_s: float) -> None:
        """Learn from an answer that came after `elapsed_s`."""
        samples = self._samples(peer_id, path, size_bytes)
        samples.add(elapsed_s)
        samples.backoff_s = 0.0
        latency, key = self._latency, (peer_id, path)
        before = latency.get(key)
        latency[key] = elapsed_s if before is None else before + _EWMA * (elapsed_s - before)
        if before is None and len(latency) > MAX_WINDOWS:
            latency.popitem(last=False)

    def record_timeout(self, peer_id: PeerId, path: str, size_bytes: int) -> None:
        """Learn from an answer that did not come within `budget_s`. Not for waits that a caller's cap cut short."""
        deadline = self.budget_s(peer_id, path, size_bytes)
        samples = self._samples(peer_id, path, size_bytes)
        samples.add(2 * deadline)
        samples.backoff_s = 2 * deadline

    def p95_s(self, peer_id: PeerId, path: str, size_bytes: int = 0) -> float | None:
        """The 95th percentile of the answer times of such calls; none until there are enough of them."""
        samples = self._windows.get((peer_id, path, size_class(size_bytes)))
        if samples is None or len(samples.ordered) < MIN_SAMPLES:
            return None
        samples.deadline_s()
        return samples.p95_s

    def latency_s(self, peer_id: PeerId, path: str) -> float | None:
        """Moving average of the answer times of this method, over all sizes; none before the first answer."""
        return self._latency.get((peer_id, path))

    def _samples(self, peer_id: PeerId, path: str, size_bytes: int) -> _Samples:
        key = (peer_id, path, size_class(size_bytes))
        samples = self._windows.get(key)
        if samples is None:
            samples = self._windows[key] = _Samples()
            if len(self._windows) > MAX_WINDOWS:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(key)
        return samples
