"""Calls to remote experts: which host gets which work, what happens when it fails, and at most one applied gradient.

Everything here runs on the endpoint's loop and knows nothing of autograd; `swarm.experts.remote` puts it behind
`torch.autograd`. One pass over a layer is one RPC per host, all hosts at once. What a host does not answer in time goes
to the next replica while time remains.

A gradient is applied at most once: `apply` goes to one replica, the one that answered the forward pass. After a failure
that leaves open whether the host applied it (a timeout, a lost connection), other replicas are asked for the gradients
of the inputs only, and the update counts as lost. After a definite refusal another replica may apply it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torch import Tensor

from swarm.endpoint import Endpoint
from swarm.errors import (
    CallTimeoutError,
    HostBusyError,
    StaleRequestError,
    SwarmError,
    UnknownExpertError,
    UnknownRequestError,
    UsageError,
)
from swarm.experts.attempts import Attempts
from swarm.experts.calls import (
    CallOptions,
    ExpertCall,
    ExpertCallFailed,
    ExpertsMasked,
    GradientMissing,
    UpdateLost,
    is_definite,
    shows_unhealthy_peer,
)
from swarm.experts.choice import HostLoads
from swarm.experts.directory import ExpertDirectory
from swarm.experts.hedging import Hedging
from swarm.experts.protocol import CALL, CallRequest, PartRequest, Pass, RequestIds
from swarm.experts.racing import Racing, answered
from swarm.experts.registry import ExpertProfile, profile
from swarm.experts.spec import ExpertGrid
from swarm.identity import PeerId
from swarm.net.transport import Contact
from swarm.tensors.wire import to_frame

MIN_ATTEMPT_S = 0.005
"""No attempt is begun with less time than this left."""
BUSY_PAUSE_S = 0.05
MAX_BUSY_RETRIES = 4
PROBE_PATH = "probe"
"""What deadlines of the directory's small calls are learned for."""


class ExpertClient:
    """Calls the experts of a run. A peer has one, as `peer.experts`.

    Args:
        endpoint: Whose transport, DHT and settings are used.
        grids: The run's grids by name.
        hedging: Another budget of second requests than the usual one.

    Attributes:
        directory: Which hosts hold which experts.
        grids: The run's grids by name.
        attempts: Makes the requests; knows their deadlines.
        loads: What hosts are expected to take.
        hedging: The budget of second requests.
    """

    def __init__(self, endpoint: Endpoint, grids: Mapping[str, ExpertGrid], *, hedging: Hedging | None = None) -> None:
        self.endpoint = endpoint
        self.grids = dict(grids)
        self.loads = HostLoads()
        self.hedging = Hedging() if hedging is None else hedging
        self.directory = ExpertDirectory(endpoint, self.grids, self._probe, self.loads)
        self.attempts = Attempts(endpoint, self.loads, self.profile)
        self._racing = Racing(endpoint.runtime, self.directory, self.attempts, self.hedging, self._lose_update)
        self._runtime = endpoint.runtime
        self._config = endpoint.config.client
        self._ids = RequestIds()
        self._profiles: dict[str, ExpertProfile] = {}

    async def start(self) -> None:
        """Read the directory and keep it fresh."""
        await self.directory.start()

    async def close(self) -> None:
        """Stop the background work. Idempotent."""
        await self._racing.close()
        await self.directory.close()

    def profile(self, grid: str) -> ExpertProfile:
        """What the experts of a grid take and give.

        Raises:
            UnknownExpertError: The run has no such grid.
            UnknownExpertClassError: Their class is not installed here.
        """
        known = self._profiles.get(grid)
        if known is None:
            known = self._profiles[grid] = profile(self.directory.grid(grid))
        return known

    def new_call(self, uid: str, tokens: int, inputs: Sequence[Tensor]) -> ExpertCall:
        """The work for one expert. `inputs` must not change until both passes are over."""
        return ExpertCall(uid, tokens, self._ids.next(), inputs)

    # The two passes

    async def forward(self, calls: Sequence[ExpertCall], options: CallOptions) -> None:
        """Ask hosts for the outputs of every call; sets `outputs` and `contact` where one answered."""
        started_s = self._runtime.clock.time()
        await self._spread(calls, "forward", options, started_s + self._limit_s(options))
        options.stats.routed(calls)
        options.stats.took("forward", self._runtime.clock.time() - started_s)
        masked = [call for call in calls if not call.answered]
        if masked:
            self._runtime.emit(
                ExpertsMasked(
                    layer=options.layer,
                    uids=tuple(c.uid for c in masked),
                    tokens=sum(c.tokens for c in masked),
                    reason=masked[0].why(),
                )
            )

    async def backward(self, calls: Sequence[ExpertCall], options: CallOptions) -> None:
        """Send `grad_outputs` to the hosts that answered the forward pass; sets `grad_inputs` and `applied`.

        Never raises for what hosts do: a call that nobody answers keeps `grad_inputs=None`, with an event.
        """
        started_s = self._runtime.clock.time()
        for call in calls:
            if call.passes_back:
                call.request_id = self._ids.next()  # another gradient for the same forward pass: not a repetition
            call.next_pass(apply=options.train, with_inputs=not options.train or call.passes_back > 0)
        await self._spread(calls, "backward", options, started_s + self._limit_s(options), first=True)
        options.stats.took("backward", self._runtime.clock.time() - started_s)
        for call in calls:
            if options.train and not call.applied and not call.settling:
                self._lose_update(call.uid, call.tokens, call.why(), options)
            if call.grad_inputs is None:
                options.stats.missing_gradient()
                self._runtime.emit(
                    GradientMissing(layer=options.layer, uid=call.uid, tokens=call.tokens, reason=call.why())
                )

    def _limit_s(self, options: CallOptions) -> float:
        return self._config.deadline.cap_s if options.timeout_s is None else options.timeout_s

    # Attempts

    async def _spread(
        self, calls: Sequence[ExpertCall], direction: Pass, options: CallOptions, end_s: float, *, first: bool = False
    ) -> None:
        """Make the next attempt at every call, grouped by host, and all that follows from its failures."""
        if first:
            groups: dict[PeerId, tuple[Contact, list[ExpertCall]]] = {}
            for call in calls:
                if call.contact is not None:
                    groups.setdefault(call.contact.peer_id, (call.contact, []))[1].append(call)
        else:
            groups = self._racing.choose([(call, call.tried) for call in calls])
        if len(groups) == 1:
            [(contact, group)] = groups.values()
            await self._attempt(contact, group, direction, options, end_s)
        elif groups:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for contact, group in groups.values():
                        tasks.create_task(self._attempt(contact, group, direction, options, end_s))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _attempt(
        self, contact: Contact, calls: list[ExpertCall], direction: Pass, options: CallOptions, end_s: float
    ) -> None:
        left_s = end_s - self._runtime.clock.time()
        if left_s < MIN_ATTEMPT_S:
            for call in calls:
                call.problems.append("no time was left")
            return
        attempt = self.attempts.prepare(contact, calls, direction)
        options.stats.called(len(calls))
        options.stats.requested()
        self.hedging.requested()
        p95_s = self.attempts.p95_s(attempt)
        try:
            if p95_s is None or not any(self.directory.has_other(c.uid, contact.peer_id) for c in calls):
                answer = await self.attempts.send(attempt, options, left_s)
            else:
                raced = await self._racing.race(attempt, options, end_s, p95_s)
                if raced is None:
                    return
                answer = raced
        except SwarmError as error:
            if isinstance(error, UsageError) and error.remote is None:
                raise  # our own side is closed or misused: no host is to blame
            failed = [(call, error) for call in calls]
            if shows_unhealthy_peer(error):
                self.directory.mark_failed(contact.peer_id, error.message)
        else:
            failed = await self._racing.settle(attempt, answer)
        if failed:
            await self._after_failure(contact, failed, direction, options, end_s)

    # Failures

    def _lose_update(self, uid: str, tokens: int, reason: str, options: CallOptions) -> None:
        if not self.profile(uid.split(".", 1)[0]).parameters:
            return
        options.stats.lost_update()
        self._runtime.emit(UpdateLost(layer=options.layer, uid=uid, tokens=tokens, reason=reason))

    async def _after_failure(
        self,
        contact: Contact,
        failed: Sequence[tuple[ExpertCall, SwarmError]],
        direction: Pass,
        options: CallOptions,
        end_s: float,
    ) -> None:
        """Note why calls failed at a host, and attempt again those that some host may still answer."""
        again: list[ExpertCall] = []
        pause_s = 0.0
        by_reason: dict[tuple[str, bool], list[str]] = {}
        left_s = end_s - self._runtime.clock.time()
        for call, error in failed:
            call.problems.append(f"{contact.peer_id.short}: {error.message}")
            busy_s = self._prepare_next(call, contact, error)
            pause_s = max(pause_s, busy_s)
            done = answered(call, direction)  # by a hedge
            retried = done or (
                left_s > MIN_ATTEMPT_S + pause_s and self.directory.next_host(call.uid, call.tried) is not None
            )
            by_reason.setdefault((error.message, retried), []).append(call.uid)
            if retried and not done:
                again.append(call)
        options.stats.failed(len(failed), len(again))
        for (reason, retried), uids in by_reason.items():
            self._runtime.emit(
                ExpertCallFailed(
                    layer=options.layer,
                    uids=tuple(uids),
                    peer=str(contact.peer_id),
                    direction=direction,
                    reason=reason,
                    retried=retried,
                )
            )
        if again:
            if pause_s:
                await asyncio.sleep(pause_s)
            await self._spread(again, direction, options, end_s)

    def _prepare_next(self, call: ExpertCall, contact: Contact, error: SwarmError) -> float:
        """Decide how a failed call may be attempted again; returns how long to wait before."""
        if isinstance(error, UnknownRequestError) and not call.with_inputs:
            call.with_inputs = True  # the host is fine, it only forgot: ask it again
            return 0.0
        if isinstance(error, StaleRequestError) and call.may_apply:
            # applied before, perhaps: the same host still has the gradients of the inputs to give
            call.may_apply, call.with_inputs = False, True
            return 0.0
        if not is_definite(error):
            call.may_apply = False
        if isinstance(error, UnknownExpertError):
            self.directory.mark_gone(call.uid, contact.peer_id)
        if isinstance(error, HostBusyError):
            self.hedging.refused(contact.peer_id, self._runtime.clock.time())
        tried = [*call.tried, contact.peer_id]
        nobody_else = self.directory.next_host(call.uid, tried) is None
        if isinstance(error, HostBusyError) and nobody_else and call.busy < MAX_BUSY_RETRIES:
            call.busy += 1
            return BUSY_PAUSE_S * 2.0 ** (call.busy - 1) * self._runtime.rng.uniform(0.75, 1.25)
        call.tried, call.with_inputs = tried, True
        call.defer = False  # nobody else has the rest of the step
        return 0.0

    async def _probe(self, contact: Contact) -> None:
        """A call for an expert that nobody holds: any answer, also a refusal, shows that the host is alive."""
        part = PartRequest("probe", self._ids.next(), 0)
        timeout_s = self.attempts.deadlines.budget_s(contact.peer_id, PROBE_PATH)
        request = CallRequest("forward", (part,), train=False, timeout_s=timeout_s)
        clock = self._runtime.clock
        begun_s = clock.time()
        try:
            await self.endpoint.transport.call(contact, CALL, to_frame(request.to_meta(), []), timeout_s=timeout_s)
        except SwarmError as error:
            if isinstance(error, CallTimeoutError):
                self.attempts.deadlines.record_timeout(contact.peer_id, PROBE_PATH, 0)
            if error.remote is None:
                raise
        now_s = clock.time()
        self.attempts.deadlines.record(contact.peer_id, PROBE_PATH, 0, now_s - begun_s)
        self.loads.probed(contact.peer_id, now_s - begun_s, now_s)
