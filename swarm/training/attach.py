"""`attach`: an ordinary torch training loop becomes a trainer of the run, by hooks on its optimizer."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from swarm.averaging.averager import Averager
from swarm.averaging.gossip import PushSum
from swarm.averaging.handle import RoundHandle
from swarm.averaging.rounds import Group, Round
from swarm.averaging.service import AveragingService
from swarm.errors import ClosedError, SwarmError, UsageError
from swarm.events import Event
from swarm.state.snapshot import Snapshot
from swarm.state.transfer import SnapshotStore
from swarm.training.averaging import ParameterAveraging, RoundPlanner
from swarm.training.repair import KEPT_ROUNDS, Repair, RepairFailure, StateNotRepaired, average_key
from swarm.training.state import (
    PARAMETER,
    StateNotAnnounced,
    build_snapshot,
    load_newest,
    state_key,
    trainable,
)

__all__ = ["Attachment", "OnRound", "ParameterAveraging", "RoundBroke", "TrainingPeer", "TrainingStats", "attach"]

OnRound = Callable[[Round, Tensor, Tensor], None]
"""Called on the training thread after a round with it and the flat values before and after; the latter are copies."""


class TrainingPeer(Protocol):
    """What a trainer needs of a peer."""

    @property
    def averaging(self) -> AveragingService: ...

    @property
    def state(self) -> SnapshotStore: ...


@dataclass(frozen=True, slots=True)
class RoundBroke(Event):
    """A round ended with an error; local values stand and training goes on."""

    key: str
    reason: str


@dataclass(slots=True)
class TrainingStats:
    """Totals of one attachment.

    Attributes:
        rounds: Rounds that ended, with or without a group.
        outcomes: How many rounds ended how, by name of the outcome.
        last: The last round.
        pause_s: Time for which the training thread was held up, in total: copies, blocking rounds, snapshots, repairs.
    """

    rounds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    last: Round | None = None
    pause_s: float = 0.0


class Attachment:
    """A model and its optimizer in a run. Made by `attach`; close it, or use it as a context manager.

    Attributes:
        step: Optimizer steps so far, including those of the state that was downloaded.
        synced_from: Id of the peer whose state was downloaded at the start; none if this trainer began by itself.
        stats: Totals.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        peer: TrainingPeer,
        averaging: ParameterAveraging,
        key: str,
        on_round: OnRound | None,
    ) -> None:
        self.key = key
        self.step = 0
        self.synced_from: str | None = None
        self.stats = TrainingStats()
        self._model = model
        self._optimizer = optimizer
        self._store = peer.state
        self._endpoint = peer.averaging.endpoint
        self._averaging = averaging
        self._on_round = on_round
        self._parameters = list(trainable(model).values())
        self._names = [PARAMETER + name for name in trainable(model)]
        if not self._parameters:
            raise UsageError(
                "The model has no trainable parameters.", fix="Attach a model with some that need gradients."
            )
        self._planner = RoundPlanner(averaging.every, self._endpoint.config.averaging.matchmaking_s)
        self._handle: RoundHandle | None = None
        self._before: Tensor | None = None
        self._repair: Repair | None = None
        self._rounds: deque[str] = deque(maxlen=KEPT_ROUNDS)
        """Nonces of the last rounds whose agreed values we held."""
        self._begun_at_step = 0
        self._since_attempt = 0
        self._since_average = 0
        self._paused = False
        self._closed = False
        self._load_state()
        self._averager = Averager(peer, self._parameters, key, averaging.strategy)
        self._hook = optimizer.register_step_post_hook(self._after_step)
        if self.synced_from is None:
            self._publish(None)

    # Step boundaries -------------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_real_step():
            return
        self.step += 1
        self._since_attempt += 1
        self._since_average += 1
        started = time.perf_counter()
        if self._handle is not None and self._handle.done:
            self._finish_round(self._handle)
        if self._handle is None and self._repair is not None and self._repair.done:
            self._apply_repair(self._repair)
        self._planner.stepped(started)
        if self._handle is None and not self._paused:
            if self._is_due():
                self._begin_round()
            elif self._averaging.prepare and (in_s := self._planner.due(self._since_attempt)) is not None:
                steps_left = self._averaging.every - self._since_attempt
                self._averager.prepare(float(self._since_average + steps_left), in_s)
        self.stats.pause_s += time.perf_counter() - started

    def _is_real_step(self) -> bool:
        """Tools step an optimizer without gradients or with a learning rate of zero to create its state."""
        has_gradients = any(p.grad is not None for p in self._parameters)
        return has_gradients and any(float(group.get("lr", 1.0)) != 0.0 for group in self._optimizer.param_groups)

    def _is_due(self) -> bool:
        every = self._averaging.every
        if self._since_attempt >= every:
            return True
        return 2 * self._since_attempt >= every and self._averager.others_waiting

    def _begin_round(self) -> None:
        weight = 1.0 if isinstance(self._averaging.strategy, PushSum) else float(self._since_average)
        self._planner.round_began()
        self._since_attempt, self._begun_at_step = 0, self.step
        if self._averaging.overlap:
            self._handle = self._averager.step(weight, wait=False)
            return
        if self._on_round is not None:
            self._averager.vector.load(self._parameters)
            self._before = self._averager.vector.flat()
        try:
            outcome = self._averager.step(weight)
        except (SwarmError, ExceptionGroup) as error:
            self._endpoint.runtime.emit(RoundBroke(self.key, repr(error)))
            return
        self._round_ended(outcome)
        if self._repair is not None:
            self._repair.wait(self._endpoint.config.averaging.round_timeout_s)
            if self._repair.done:
                self._apply_repair(self._repair)

    def _finish_round(self, handle: RoundHandle) -> None:
        self._handle = None
        if self._on_round is not None:
            self._before = handle.before()
        try:
            outcome = handle.apply()
        except (SwarmError, ExceptionGroup) as error:
            self._endpoint.runtime.emit(RoundBroke(self.key, repr(error)))
            return
        self._round_ended(outcome)

    def _round_ended(self, outcome: Round) -> None:
        self.stats.rounds += 1
        self.stats.outcomes[type(outcome.outcome).__name__] += 1
        self.stats.last = outcome
        self._planner.searched(self._averager.search_s)
        if outcome.averaged:
            self._since_average = self.step - self._begun_at_step
        if self._on_round is not None and self._before is not None:
            self._on_round(outcome, self._before, self._averager.vector.flat() if outcome.averaged else self._before)
            self._before = None
        agreed = self._averager.vector.views() if outcome.averaged else None
        if not isinstance(outcome.outcome, Group):
            self._publish(agreed)
        elif not self._diverged(outcome, outcome.outcome.nonce):
            self._rounds.append(outcome.outcome.nonce)
            self._publish(agreed)

    # Repair ----------------------------------------------------------------------------------------------------------

    def _diverged(self, outcome: Round, nonce: str) -> bool:
        """Whether most of the group hold other values than we do; then what they hold is looked for."""
        earlier, self._repair = self._repair, None
        diverged = outcome.diverged and outcome.majority
        if earlier is not None:
            earlier.cancel() if outcome.others else earlier.overtaken()
        if outcome.others and not outcome.majority:
            self._endpoint.runtime.emit(StateNotRepaired(self.key, nonce, RepairFailure.NO_MAJORITY))
        if diverged:
            ours = Snapshot.build(dict(zip(self._names, self._averager.vector.views(), strict=True)), {})
            timeout_s = 2 * self._endpoint.config.averaging.round_timeout_s
            self._repair = Repair(self._endpoint, self.key, outcome, ours, timeout_s)
        return diverged

    def _apply_repair(self, repair: Repair) -> None:
        self._repair = None
        theirs = repair.apply(self._parameters)
        if theirs is not None:
            self._rounds.extend(theirs.metadata["rounds"][-KEPT_ROUNDS:])
            self._publish(list(theirs.tensors.values()))

    # State -----------------------------------------------------------------------------------------------------------

    def _load_state(self) -> None:
        loaded = load_newest(self._endpoint, self.key, self._model, self._optimizer)
        if loaded is not None:
            self.step, self.synced_from = loaded.step, loaded.donor

    def _publish(self, agreed: list[Tensor] | None) -> None:
        """Offer the last agreed values (without a group: ours) with our optimizer state to joiners."""
        state = build_snapshot(self._model, self._optimizer, self.step, agreed)
        self._store.publish(state_key(self.key), state)
        if agreed is not None and self._rounds:
            average = state.first(len(self._parameters), {"rounds": list(self._rounds)})
            self._store.publish(average_key(self.key), average)
        else:
            self._store.withdraw(average_key(self.key))
        if self._endpoint.loop is not None:
            self._endpoint.loop.submit(self._announce(self.step))

    async def _announce(self, step: int) -> None:
        body = {"addresses": list(self._endpoint.contact.addresses[:8]), "step": step}
        try:
            await self._endpoint.dht.put(state_key(self.key), body, ttl_s=3 * self._endpoint.config.heartbeat_s)
        except SwarmError as error:
            self._endpoint.runtime.emit(StateNotAnnounced(self.key, error.message))

    async def _withdraw(self) -> None:
        try:
            await self._endpoint.dht.delete(state_key(self.key))
        except SwarmError as error:
            self._endpoint.runtime.emit(StateNotAnnounced(self.key, error.message))

    # Life ------------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Begin no more rounds; one that runs is still applied. Local steps go on."""
        self._paused = True

    def resume(self) -> None:
        """Begin rounds again."""
        self._paused = False

    def close(self) -> None:
        """Wait for a running round, within its budget, apply it, take back hooks and announcements. Idempotent."""
        self._close(drain=True)

    def _close(self, drain: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        handle, self._handle = self._handle, None
        if handle is not None:
            config = self._endpoint.config.averaging
            budget_s = 3 * config.matchmaking_s + config.round_timeout_s + 2 * config.chunk_timeout_s
            try:
                if drain:
                    handle.result(budget_s)
                    self._finish_round(handle)
                else:
                    handle.cancel()
            except TimeoutError:
                handle.cancel()
                self._endpoint.runtime.emit(RoundBroke(self.key, "it was not done when training ended"))
        repair, self._repair = self._repair, None
        if repair is not None:
            repair.cancel(RepairFailure.ENDED)
        self._averager.close()
        self._store.withdraw(state_key(self.key))
        self._store.withdraw(average_key(self.key))
        with suppress(ClosedError):  # the announcement went with the peer
            self._endpoint.run_sync(self._withdraw())

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(drain=kind is None)


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    peer: TrainingPeer,
    averaging: ParameterAveraging | None = None,
    key: str = "trunk",
    on_round: OnRound | None = None,
) -> Attachment:
    """Let an ordinary training loop take part in the run.

    At the start the newest state that another trainer offers under `key` is downloaded: parameters, buffers, optimizer
    state and step. Without one, training begins with the model's own weights, which are offered to later trainers at
    once; build the model under `swarm.seeded`, so that trainers which start at the same moment agree too. After that
    nothing changes in your loop: a hook after `optimizer.step()` averages the trainable parameters every
    `averaging.every` steps and publishes the state for joiners. Parameters are written in place, on the thread that
    calls `step`, between steps. A lone trainer trains alone; nothing that other peers do raises.

    A trainer that ends a round with other values than more than half of its group downloads what differs
    (`swarm.training.repair`): in the background, or, where training waits for rounds anyway, for at most
    `round_timeout_s` before it goes on.

    Memory on the CPU: one copy of the trainable parameters, a second one with `overlap`, and the published snapshot
    (parameters and optimizer state).

    Args:
        model: Its trainable parameters are averaged; frozen ones stay where they are.
        optimizer: Any torch optimizer over them. Its groups, state and `state_dict` stay its own.
        peer: A started trainer.
        averaging: Default `ParameterAveraging()`.
        key: Trainers that use the same key average together.
        on_round: Called after every round with it and the flat values before and after, e.g. to watch the spread.

    Raises:
        UsageError: The model has no trainable parameters, or the peer trains under this key already.
        SchemaMismatchError: The run's state belongs to another model: no donor's fits.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"attach(model, optimizer, peer) got a {type(model).__name__} and a {type(optimizer).__name__}.",
            fix="Pass the module first, then its torch optimizer.",
        )
    if averaging is not None and not isinstance(averaging, ParameterAveraging):
        raise UsageError(
            f"averaging is a {type(averaging).__name__}.",
            fix="Write averaging=swarm.ParameterAveraging(every=50, strategy=swarm.AllReduce()).",
        )
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise UsageError("The optimizer holds none of the model's parameters.", fix="Make it from model.parameters().")
    return Attachment(model, optimizer, peer, averaging or ParameterAveraging(), key, on_round)
