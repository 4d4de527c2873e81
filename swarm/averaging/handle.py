"""A round in the background, and how what it changed gets into the tensors."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from torch import Tensor

from swarm.averaging.rounds import Round
from swarm.errors import UsageError

if TYPE_CHECKING:
    from swarm.averaging.averager import Averager


class RoundHandle:
    """A round that runs in the background on a copy of the tensors; they may change meanwhile."""

    def __init__(self, averager: Averager, future: Future[Round]) -> None:
        self._averager = averager
        self._future = future
        self._applied = False

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Round:
        """Wait for the round's end.

        Raises:
            TimeoutError: Not by then; the round goes on.
            UsageError: It was given up by `cancel`.
        """
        try:
            return self._future.result(timeout_s)
        except CancelledError as error:
            self._averager._endpoint.run_sync(self._averager.at_rest())
            raise UsageError("The round was cancelled.", fix="Begin another one by step().") from error

    def before(self) -> Tensor:
        """A flat copy of the values when the round began. Valid until it is applied."""
        assert self._averager._before is not None
        return self._averager._before.flat()

    def cancel(self) -> None:
        """Give the round up; nothing is applied, and `apply` says so. Then the averager can be used again."""
        self._future.cancel()

    def apply(self) -> Round:
        """Wait for the end, then add what the round changed: tensor += averaged - value when the round began.

        Call it on the thread that owns the tensors. Later calls do nothing. Without a group nothing changes.

        Raises:
            SchemaMismatchError: A tensor has another shape or dtype than when the round began; none was changed.
            UsageError: The round was given up by `cancel`.
        """
        try:
            outcome = self.result()
        except BaseException:
            if self._future.done() and not self._applied:
                self._applied = True
                self._averager._finish(None)
            raise
        if not self._applied:
            self._applied = True
            self._averager._finish(outcome)
        return outcome
