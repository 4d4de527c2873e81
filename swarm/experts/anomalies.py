"""Answers that are far larger than usual: what a lying or broken host sends once it has learned to avoid NaN. No I/O.

An answer's size is compared with the median of the same expert's recent answers, or of all experts' while that expert
has given few. A layer whose answers truly grow is followed: an outlier enters the record, at the most that would have
been accepted, so that the median moves when outliers become the rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.events import Event
from swarm.experts.protocol import Pass

WINDOW = 32
FEWEST = 8
"""No judgement on fewer answers than this."""


@dataclass(frozen=True, slots=True)
class AnomalousAnswer(Event):
    """A host's answer was far larger than usual: it counts as none, and the host is avoided for a while.

    `size` is that of the answer's largest row, `usual` the median it was compared with.
    """

    layer: str
    uid: str
    peer: str
    direction: str
    size: float
    usual: float


class AnswerSizes:
    """The recent sizes of a layer's answers. Used from the event loop only; copies of a layer share it.

    Args:
        layer: What events call the layer.
        limit: How many times the usual size is too much.

    Raises:
        ConfigError: The limit is not above 1.
    """

    def __init__(self, layer: str, limit: float) -> None:
        if not (isinstance(limit, int | float) and 1 < limit < math.inf):
            raise ConfigError(f"detect_anomalies={limit!r} is not a number above 1.", fix="Try 10, or None for off.")
        self.layer = layer
        self.limit = float(limit)
        self._recent: dict[tuple[str, Pass], deque[float]] = {}

    def judge(self, uid: str, direction: Pass, size: float) -> float | None:
        """Record the size of an answer. Returns the usual size if this one is an anomaly, else none."""
        own = self._recent.setdefault((uid, direction), deque(maxlen=WINDOW))
        known: Sequence[float] = own
        if len(own) < FEWEST:
            known = [s for key, sizes in self._recent.items() if key[1] == direction for s in islice(sizes, FEWEST)]
        usual = median(known) if len(known) >= FEWEST else None
        anomalous = usual is not None and size > self.limit * usual
        own.append(self.limit * usual if anomalous and usual is not None else size)
        return usual if anomalous else None

    def __deepcopy__(self, memo: dict[int, object]) -> AnswerSizes:
        return self


def size_of(answer: Sequence[Tensor], cause: Sequence[Tensor] = ()) -> float | None:
    """The root mean square of the largest row of an answer; with a cause, as a multiple of the cause's.

    Input gradients are measured against the output gradients that led to them, since these differ from step to step.

    Returns:
        None for an answer, or to a cause, of nothing or of zeros.
    """
    size = _largest_row(answer)
    if not cause:
        return size or None
    caused_by = _largest_row(cause)
    return size / caused_by if size and caused_by else None


def _largest_row(tensors: Sequence[Tensor]) -> float:
    """Over the floating-point tensors of [rows, ...]."""
    sizes = [0.0]
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            rows = torch.linalg.vector_norm(tensor.reshape(tensor.shape[0], -1), dim=1, dtype=torch.float32)
            sizes.append(float(rows.max()) / math.sqrt(tensor[0].numel()))
    return max(sizes)
