"""A request to a host, and beside it requests to other replicas when it takes unusually long: the first answer wins.

When and how often to hedge is decided by `swarm.experts.hedging`. In a forward pass the loser is cancelled, and its
host drops the work at dequeue. A hedge of a backward pass never applies gradients. If it answers first, the step goes
on with its gradients of the inputs, and the first host, which was asked to apply those of the parameters, is waited
for in the background, within its deadline, so that a lost update is known and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from swarm.errors import HostBusyError, SwarmError, UsageError
from swarm.experts.attempts import Answer, Attempt, Attempts, grid_of
from swarm.experts.calls import CallOptions, ExpertCall, is_definite, shows_unhealthy_peer
from swarm.experts.choice import Chooser
from swarm.experts.directory import ExpertDirectory
from swarm.experts.hedging import Hedge, Hedging, Wait
from swarm.experts.protocol import OK, Pass
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.runtime import Runtime, TaskFailed

LostUpdate = Callable[[str, int, str, CallOptions], None]
"""Told of an update that was lost: uid, tokens, reason, whose call it was."""


class Racing:
    """Chooses replicas, and lets them race.

    Args:
        runtime: Clock, randomness and background tasks.
        directory: Which hosts hold which experts.
        attempts: Makes the requests.
        hedging: The budget.
        lost_update: Told of updates that turn out to be lost after the step has gone on.
    """

    def __init__(
        self,
        runtime: Runtime,
        directory: ExpertDirectory,
        attempts: Attempts,
        hedging: Hedging,
        lost_update: LostUpdate,
    ) -> None:
        self._runtime = runtime
        self._directory = directory
        self._attempts = attempts
        self._loads = attempts.loads
        self._hedging = hedging
        self._lost_update = lost_update
        self._late: dict[asyncio.Task[Answer], None] = {}

    def choose(
        self, wanted: Sequence[tuple[ExpertCall, Sequence[PeerId]]], *, healthy: bool = False
    ) -> dict[PeerId, tuple[Contact, list[ExpertCall]]]:
        """Hosts for calls, each of which comes with the hosts that are out of the question for it."""
        groups: dict[PeerId, tuple[Contact, list[ExpertCall]]] = {}
        rng = self._runtime.rng
        chooser = Chooser(self._loads, rng, self._runtime.clock.time())
        # Later ones join the hosts of earlier ones: who comes first must not always be the same, for all trainers.
        start = rng.randrange(len(wanted)) if len(wanted) > 1 else 0
        for call, tried in [*wanted[start:], *wanted[:start]]:
            contacts = self._directory.candidates(call.uid, tried, healthy=healthy)
            if not contacts:
                continue
            chosen = chooser.choose([c.peer_id for c in contacts], grid_of(call), call.tokens)
            if chosen not in groups:
                groups[chosen] = (next(c for c in contacts if c.peer_id == chosen), [])
            groups[chosen][1].append(call)
        return groups

    async def settle(self, attempt: Attempt, answer: Answer) -> list[tuple[ExpertCall, SwarmError]]:
        """Take over the good parts of an answer; returns the others with their errors."""
        peer_id = attempt.contact.peer_id
        self._directory.mark_answered(peer_id)
        failed = await self._attempts.settle(attempt, answer)
        for _, error, senseless in failed:
            if senseless:
                self._directory.mark_failed(peer_id, error.message)
        return [(call, error) for call, error, _ in failed]

    async def race(self, attempt: Attempt, options: CallOptions, end_s: float, p95_s: float) -> Answer | None:
        """Make an attempt, and ask other replicas beside it if it takes unusually long.

        Returns:
            The first host's answer, or None if others have answered everything before it did.

        Raises:
            SwarmError: The first host failed; what others answered is set in the calls.
        """
        clock = self._runtime.clock
        begun_s = clock.time()
        original = asyncio.get_running_loop().create_task(
            self._attempts.send(attempt, options, end_s - begun_s), name="expert-call"
        )
        hedges: list[asyncio.Task[None]] = []
        wait_s: float | None = self._hedging.first_look_s(p95_s)
        try:
            while not original.done():
                running = [h for h in hedges if not h.done()]
                await asyncio.wait([original, *running], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if original.done():
                    break
                if all(answered(call, attempt.direction) for call in attempt.calls):
                    self._hedging.won()
                    options.stats.hedge_won()
                    self._overtaken(attempt, original, options, begun_s)
                    return None
                if hedges:
                    wait_s = None
                    continue
                decision = self._hedging.decide(clock.time() - begun_s, p95_s)
                if isinstance(decision, Wait):
                    wait_s = decision.seconds
                else:
                    wait_s = None
                    if isinstance(decision, Hedge):
                        hedges = self._start_hedges(attempt, options, end_s)
            failure = original.exception()
            if isinstance(failure, SwarmError) and not (is_definite(failure) and attempt.direction == "backward"):
                # The hedges are the retry, except of what another host may still be asked to apply.
                running = [h for h in hedges if not h.done()]
                if running:
                    await asyncio.wait(running)
            return original.result()
        except asyncio.CancelledError:
            original.add_done_callback(_look_away)
            original.cancel()
            raise
        finally:
            for hedge in hedges:
                hedge.cancel()

    def _start_hedges(self, attempt: Attempt, options: CallOptions, end_s: float) -> list[asyncio.Task[None]]:
        """Ask other replicas for what an attempt has not brought yet, as far as the budget and their load allow."""
        now_s = self._runtime.clock.time()
        first = attempt.contact.peer_id
        groups = self.choose([(c, [*c.tried, first]) for c in attempt.calls], healthy=True)
        peers = [first, *groups]
        if self._hedging.refusing(peers, now_s) or any(self._loads.congested(p, now_s) for p in peers):
            return []
        hedges: list[asyncio.Task[None]] = []
        for contact, calls in groups.values():
            if not self._hedging.spend():
                break
            options.stats.hedged()
            hedges.append(self._runtime.spawn(self._hedge(contact, calls, attempt.direction, options, end_s), "hedge"))
        return hedges

    async def _hedge(
        self, contact: Contact, calls: Sequence[ExpertCall], direction: Pass, options: CallOptions, end_s: float
    ) -> None:
        """Ask one other replica, once. It never applies gradients: the first host may be doing that."""
        twins = [replace(call, with_inputs=True, may_apply=False, applied=False) for call in calls]
        attempt = self._attempts.prepare(contact, twins, direction)
        try:
            answer = await self._attempts.send(attempt, options, end_s - self._runtime.clock.time())
        except SwarmError as error:
            if shows_unhealthy_peer(error) and not isinstance(error, UsageError):
                self._directory.mark_failed(contact.peer_id, error.message)
            if isinstance(error, HostBusyError):
                self._hedging.refused(contact.peer_id, self._runtime.clock.time())
            return
        await self.settle(attempt, answer)
        for call, twin in zip(calls, twins, strict=True):
            if direction == "forward" and call.outputs is None and twin.outputs is not None:
                call.outputs, call.contact = twin.outputs, twin.contact
            elif direction == "backward" and call.grad_inputs is None:
                call.grad_inputs = twin.grad_inputs

    def _overtaken(
        self, attempt: Attempt, original: asyncio.Task[Answer], options: CallOptions, begun_s: float
    ) -> None:
        """Hedges have answered everything: drop the first host's work, unless it may be applying gradients."""
        now_s = self._runtime.clock.time()
        self._loads.waited(attempt.contact.peer_id, now_s - begun_s, now_s)
        self._directory.mark_stalled(attempt.contact)
        applies = [call for call in attempt.calls if attempt.direction == "backward" and call.may_apply]
        if not applies:
            original.add_done_callback(_look_away)
            original.cancel()
            return
        for call in applies:
            call.settling, call.may_apply = True, False
        late = [(i, call.uid, call.tokens) for i, call in enumerate(attempt.calls) if call.settling]
        self._late[original] = None
        original.add_done_callback(lambda task: self._late_outcome(task, attempt.contact, late, options))
        if not attempt.progress.sent:
            # The caller may change the tensors from here on. The host has not begun: certainly nothing was applied.
            original.cancel()

    def _late_outcome(
        self,
        original: asyncio.Task[Answer],
        contact: Contact,
        late: Sequence[tuple[int, str, int]],
        options: CallOptions,
    ) -> None:
        """A host that was asked to apply gradients has answered or not: count those that it did not apply."""
        self._late.pop(original, None)
        lost = {uid: "nobody waited for the host any more" for _, uid, _ in late}
        error = None if original.cancelled() else original.exception()
        if isinstance(error, SwarmError):
            lost = dict.fromkeys(lost, f"{contact.peer_id.short}: {error.message}")
            if shows_unhealthy_peer(error) and not isinstance(error, UsageError):
                self._directory.mark_failed(contact.peer_id, error.message)
        elif error is not None:
            self._runtime.emit(TaskFailed("expert-call", repr(error)))
        elif not original.cancelled():
            self._directory.mark_answered(contact.peer_id)
            for i, uid, _ in late:
                part = original.result()[0].parts[i]
                if part.applied:
                    del lost[uid]
                elif part.status != OK:
                    lost[uid] = f"{contact.peer_id.short}: {part.message}"
        for _, uid, tokens in late:
            if uid in lost:
                self._lost_update(uid, tokens, lost[uid], options)

    async def close(self) -> None:
        """Wait for nobody any more: updates that are not known to have been applied count as lost. Idempotent."""
        late = list(self._late)
        for original in late:
            original.cancel()
        if late:
            await asyncio.wait(late)


def answered(call: ExpertCall, direction: Pass) -> bool:
    """Whether some host has done its part of the pass."""
    return call.outputs is not None if direction == "forward" else call.grad_inputs is not None


def _look_away(task: asyncio.Task[Answer]) -> None:
    """Take notice of how a cancelled request ended, so that asyncio does not complain that nobody did."""
    if not task.cancelled():
        task.exception()
