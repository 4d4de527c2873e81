"""`Averager`: averages a list of tensors with other peers, in one call, now or in the background."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Literal, Protocol, overload

import torch
from torch import Tensor

from swarm.averaging.allreduce import AllReduce, choose_codecs, make_feedback
from swarm.averaging.arguments import check_unchanged, checked_key, checked_seconds, checked_tensors, checked_weight
from swarm.averaging.decisions import Terms
from swarm.averaging.exchange import Exchange
from swarm.averaging.gossip import Gossip, PushSum, Strategy
from swarm.averaging.handle import RoundHandle
from swarm.averaging.pushing import PushSeat
from swarm.averaging.rounds import (
    Group,
    ResultsDiverged,
    Round,
    RoundDegraded,
    RoundFinished,
    RoundReport,
    describe,
)
from swarm.averaging.service import AveragingService, Seat
from swarm.averaging.vector import FlatVector
from swarm.errors import ClosedError, UsageError
from swarm.tensors.schema import TensorMeta, schema_hash
from swarm.tensors.staging import add_all


class AveragingPeer(Protocol):
    """What an averager needs of a peer."""

    @property
    def averaging(self) -> AveragingService: ...


class Averager:
    """Averages tensors in place with the other peers that do so under the same key.

    Memory, besides the tensors: a blocking round works in place on contiguous CPU tensors and needs its own part as it
    travels (the tensors divided by the members, and by the codec's rate) and a window of `WINDOW_CHUNKS` chunks for
    every member; other tensors cost one copy on the CPU. A background round costs two copies (the one that is averaged
    and the values from before), kept for the next. Error feedback costs an fp32 copy of the tensors that it covers.
    gRPC and the allocator hold on to some 100 to 150 MB besides, however large the tensors are (as measured by
    `benchmarks.averaging_memory`; `MALLOC_ARENA_MAX=1` brings that to 60 MB).

    Args:
        peer: A started peer; its `averaging` service carries the rounds.
        tensors: Float tensors, averaged in place under `no_grad`; all members need the same shapes and dtypes in order.
        key: Who averages with whom.
        strategy: `AllReduce(...)`, `Gossip(...)` or `PushSum(...)`; part of what members must agree on.

    Raises:
        UsageError: No tensors, tensors that cannot be written in place or whose elements share memory, a key or a
            strategy that cannot be, or this peer averages under this key already.
        UnsupportedDtypeError: A tensor is not of a floating dtype that can travel with the strategy's codec.
    """

    def __init__(self, peer: AveragingPeer, tensors: Sequence[Tensor], key: str, strategy: Strategy) -> None:
        tensors = checked_tensors(tensors)
        if not isinstance(strategy, AllReduce | Gossip | PushSum):
            raise UsageError(
                f"A strategy of type {type(strategy).__name__} cannot be.",
                fix="Use AllReduce(...), Gossip(...) or PushSum(...).",
            )
        self.key = checked_key(key)
        self.strategy = strategy
        self._service = peer.averaging
        self._endpoint = self._service.endpoint
        self._tensors = tensors
        metas = [TensorMeta.of(tensor) for tensor in tensors]
        self._verifies = isinstance(strategy, AllReduce) and strategy.verify_parts
        self._codecs = choose_codecs(strategy.codec, strategy.role, metas)
        self._pinned = any(tensor.is_cuda for tensor in tensors)
        self._vector = self._vector_over(metas)
        self._copy: FlatVector | None = None if self._vector.in_place else self._vector
        self._before: FlatVector | None = None
        config = self._endpoint.config.averaging
        kinds = [strategy_spec(strategy), str(config.chunk_bytes), *(codec.name for codec in self._codecs)]
        layout = "/".join(kinds).encode() + b"\0" + schema_hash(metas)
        self.schema_hash = hashlib.sha256(b"swarm/averaging/2\0" + layout).digest()
        """Equal for peers that can be in a group: shapes, dtypes, codecs, how values are reduced, size of messages."""
        self.feedback = make_feedback(
            False if self._verifies else strategy.error_feedback, self._vector, self.schema_hash
        )
        """What lossy codecs left out so far; its `state()` belongs into checkpoints. None without error feedback."""
        self._seat: Seat | PushSeat | None = None
        self._busy = threading.Lock()
        self._background = asyncio.Lock()
        self._closed = False
        if self._endpoint.loop is not None and not _on_a_loop():
            self._endpoint.run_sync(self.open())

    @property
    def vector(self) -> FlatVector:
        """The values of the last round (before the first: the tensors themselves, where they allow that)."""
        return self._vector

    def _vector_over(self, metas: Sequence[TensorMeta]) -> FlatVector:
        """A vector for a blocking round: over the tensors where they allow that, else of its own memory."""
        over = self._tensors if FlatVector.fits_over(self._tensors) else None
        return FlatVector(metas, self._codecs, over, self._pinned)

    def _to_average(self, blocking: bool) -> FlatVector:
        """The vector of the round that begins, with the tensors' values."""
        metas = self._vector.metas
        if blocking and FlatVector.fits_over(self._tensors):
            self._vector = self._vector_over(metas)  # their memory may be another than before
        else:
            self._copy = self._copy or FlatVector(metas, self._codecs, pinned=self._pinned)
            self._vector = self._copy
            self._vector.load(self._tensors)
        return self._vector

    @property
    def others_waiting(self) -> bool:
        """Whether another peer looks for a group under this key while we do not, or waits for us in a prepared one."""
        return self._seat is not None and self._seat.others_waiting

    @property
    def search_s(self) -> float:
        """How long the last search for a group took, whether `prepare` or a round began it."""
        return self._seat.search_s if self._seat is not None else 0.0

    async def open(self) -> None:
        """Announce this peer under the key. The first round does it too."""
        self._check_open()
        if self._seat is None:
            if isinstance(self.strategy, PushSum):
                self._seat = await self._service.open_push(self.key, self.strategy, self._vector, self.schema_hash)
            else:
                self._seat = await self._service.open(self.key, self.strategy)

    @overload
    def step(self, weight: float = 1.0, wait: Literal[True] = True, timeout_s: float | None = None) -> Round: ...

    @overload
    def step(self, weight: float = 1.0, *, wait: Literal[False], timeout_s: float | None = None) -> RoundHandle: ...

    def step(self, weight: float = 1.0, wait: bool = True, timeout_s: float | None = None) -> Round | RoundHandle:
        """Run one round. What others do never raises: see `Round.outcome` and `Round.degraded`.

        Args:
            weight: Of this peer's values in the mean, usually samples or steps; 0 only receives. 1 with `PushSum`.
            wait: Block, then write averages into the tensors. False: return a `RoundHandle` at once.
            timeout_s: Cap of the search for a group; the configured window applies below it.

        Raises:
            UsageError: A weight or timeout that cannot be, or a round that is still running.
            SchemaMismatchError: A tensor has another shape or dtype than when the averager was made.
            KeyboardInterrupt: Ctrl-C ended a blocking round. Each chunk of tensors that are averaged in place is the
                average or what it was; other tensors are unchanged. The averager can be used again.
            ClosedError: The averager or its peer is closed.
        """
        weight = self._start(weight, timeout_s)
        if wait:
            try:
                vector = self._to_average(blocking=True)
                outcome = self._endpoint.run_sync(self.average(vector, weight, timeout_s))
                if outcome.averaged and not vector.in_place:
                    vector.store(self._tensors)
                return outcome
            finally:
                self._busy.release()
        if self._endpoint.loop is None:
            self._busy.release()
            raise RuntimeError("An endpoint on a virtual loop has no background rounds.")
        vector = self._to_average(blocking=False)
        self._before = self._before or FlatVector(vector.metas, pinned=self._pinned)
        self._before.copy_from(vector)
        future = self._endpoint.loop.submit(self._in_background(vector, weight, timeout_s))
        return RoundHandle(self, future)

    async def _in_background(self, vector: FlatVector, weight: float, timeout_s: float | None) -> Round:
        async with self._background:
            return await self.average(vector, weight, timeout_s)

    async def at_rest(self) -> None:
        """Wait until a background round that was cancelled has let go of its memory."""
        async with self._background:
            pass

    async def step_async(self, weight: float = 1.0, timeout_s: float | None = None) -> Round:
        """Like `step`, for code on the event loop."""
        weight = self._start(weight, timeout_s)
        try:
            vector = self._to_average(blocking=True)
            outcome = await self.average(vector, weight, timeout_s)
            if outcome.averaged and not vector.in_place:
                vector.store(self._tensors)
            return outcome
        finally:
            self._busy.release()

    def prepare(self, weight_hint: float | None = None, at_s: float | None = None) -> None:
        """Begin to look for the next round's group now, while you compute, so that `step` costs the exchange only.

        Returns at once. A sealed group waits for this peer until `at_s` and `chunk_timeout_s` more; who does not come
        by then is left out of it, and the others go on. `step` says which weight counts. A second call before `step`
        does nothing.

        Args:
            weight_hint: The weight that `step` will probably get.
            at_s: In how many seconds `step` will be called; by default within the matchmaking window.

        Raises:
            UsageError: A weight or time that cannot be.
            ClosedError: The averager or its peer is closed.
        """
        if self._endpoint.loop is None:
            raise RuntimeError("An endpoint on a virtual loop has no synchronous facade.")
        self._check_open()
        weight, at_s = self._checked_plan(weight_hint, at_s)
        self._endpoint.loop.submit(self._prepare(weight, at_s))

    async def prepare_async(self, weight_hint: float | None = None, at_s: float | None = None) -> bool:
        """Like `prepare`, for code on the event loop; whether a search began."""
        self._check_open()
        return await self._prepare(*self._checked_plan(weight_hint, at_s))

    def _checked_plan(self, weight_hint: float | None, at_s: float | None) -> tuple[float, float]:
        plan_s = checked_seconds(self._endpoint.config.averaging.matchmaking_s if at_s is None else at_s, "A time")
        if plan_s == math.inf:
            raise UsageError(f"A round in {plan_s} s cannot be prepared.", fix="Use a time that is not negative.")
        return checked_weight(1.0 if weight_hint is None else weight_hint), plan_s

    async def _prepare(self, weight: float, at_s: float) -> bool:
        try:
            await self.open()
        except ClosedError:
            return False  # closed since the call
        return isinstance(self._seat, Seat) and self._seat.prepare(self._terms(weight), at_s)

    def _terms(self, weight: float) -> Terms:
        strategy = self.strategy
        assert not isinstance(strategy, PushSum), "push-sum has no groups"
        return Terms(self.schema_hash, weight, self._vector.numel, strategy.min_group, strategy.max_group)

    def _check_open(self) -> None:
        if self._closed or self._service.closed:
            raise ClosedError("The averager is closed, or its peer.")

    def _start(self, weight: float, timeout_s: float | None) -> float:
        """Begin a round; the checked weight."""
        self._check_open()
        weight = self._checked_weight(weight)
        if timeout_s is not None:
            checked_seconds(timeout_s, "A timeout")
        check_unchanged(self._tensors, self._vector.metas)
        if not self._busy.acquire(blocking=False):
            raise UsageError("A round of this averager is running.", fix="Wait for it, and apply its handle.")
        return weight

    def _checked_weight(self, weight: float) -> float:
        weight = checked_weight(weight)
        if isinstance(self.strategy, PushSum) and weight != 1.0:
            raise UsageError(
                f"Push-sum weighs all peers alike, so that a weight of {weight:g} cannot count.",
                fix="Leave the weight out, or average in groups, by AllReduce or Gossip.",
            )
        return weight

    def _finish(self, outcome: Round | None) -> None:
        assert self._before is not None
        try:
            if outcome is not None and outcome.averaged:
                check_unchanged(self._tensors, self._vector.metas)
                pairs = zip(self._vector.views(), self._before.views(), strict=True)
                # In place: memory for the difference would be as large as the tensor, and fresh each time.
                changes = (torch.sub(after, before, out=before) for after, before in pairs)
                add_all(zip(self._tensors, changes, strict=True))
        finally:
            self._busy.release()

    async def average(self, vector: FlatVector, weight: float, timeout_s: float | None = None) -> Round:
        """Run one round on a flat vector of the averager's layout, in place. The building block of `step`."""
        weight = self._checked_weight(weight)
        await self.open()
        seat = self._seat
        if isinstance(seat, PushSeat):
            result = await seat.round(vector)
            self._tell(result, RoundReport())
            return result
        assert seat is not None
        clock, config = self._endpoint.runtime.clock, self._endpoint.config
        begun, report = clock.time(), RoundReport()
        concluded = await seat.match(self._terms(weight), timeout_s)
        outcome, seal, exchange_s = concluded.outcome, concluded.seal, 0.0
        if seal is not None:
            sealed_at = clock.time()
            exchange = Exchange(
                seal,
                vector,
                weight,
                report,
                transport=self._endpoint.transport,
                runtime=self._endpoint.runtime,
                config=config.averaging,
                feedback=self.feedback,
                stochastic=self.strategy.role == "gradients",
                verify=self._verifies,
                reducer=self.strategy.reducer if isinstance(self.strategy, AllReduce) else "mean",
                bandwidth=self._service.bandwidth,
                on_offender=self._service.report,
            )
            seat.enter(seal.nonce, exchange)
            try:
                await exchange.run()
            finally:
                seat.leave(seal.nonce)
            exchange_s = clock.time() - sealed_at
            outcome = Group(seal.nonce.hex(), report.contributors)
        result = Round(
            outcome=outcome,
            members=tuple(str(m.peer_id) for m in seal.members) if seal is not None else (),
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            seconds=clock.time() - begun,
            degraded=tuple(report.problems),
            exchange_s=exchange_s,
            agreed=tuple(map(str, report.agreed)),
            others=tuple(map(str, report.others)),
            diverged=bool(report.agreed) and self._endpoint.peer_id not in report.agreed,
        )
        self._tell(result, report)
        return result

    def _tell(self, result: Round, report: RoundReport) -> None:
        runtime = self._endpoint.runtime
        if report.others:
            runtime.emit(ResultsDiverged(self.key, result.agreed, result.others))
        for problem in result.degraded:
            runtime.emit(RoundDegraded(self.key, problem))
        runtime.emit(
            RoundFinished(
                key=self.key,
                outcome=type(result.outcome).__name__,
                members=len(result.members),
                seconds=result.seconds,
                bytes_sent=result.bytes_sent,
                bytes_received=result.bytes_received,
                reason=describe(result.outcome),
            )
        )

    async def aclose(self) -> None:
        """Withdraw the announcement. Idempotent; a running round ends first in its own time.

        With push-sum everything that this peer holds goes to another one, within twice `chunk_timeout_s`.
        """
        if not self._closed:
            self._closed = True
            if isinstance(self._seat, PushSeat) and self._busy.acquire(blocking=False):
                try:
                    await self._seat.hand_over(self._to_average(blocking=True))
                finally:
                    self._busy.release()
            if self._seat is not None:
                await self._service.shut(self.key)

    def close(self) -> None:
        """`aclose` for code outside the event loop."""
        if self._service.closed:
            self._closed = True  # the announcement went with the peer
        if not self._closed:
            self._endpoint.run_sync(self.aclose())


def strategy_spec(strategy: Strategy) -> str:
    """What members must agree on besides tensors and codecs."""
    kind = type(strategy).__name__
    if not isinstance(strategy, AllReduce):
        return kind
    reducer = strategy.reducer if isinstance(strategy.reducer, str) else strategy.reducer.spec
    return f"{kind} {reducer} {'verified' if strategy.verify_parts else 'unverified'}"


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
