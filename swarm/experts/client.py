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

from swarm.config import MIB
from swarm.endpoint import Endpoint
from swarm.errors import (
    CallTimeoutError,
    HostBusyError,
    NonFiniteError,
    SchemaMismatchError,
    StaleRequestError,
    SwarmError,
    UnknownExpertError,
    UnknownRequestError,
    UsageError,
)
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
from swarm.experts.directory import ExpertDirectory
from swarm.experts.protocol import (
    CALL,
    OK,
    CallRequest,
    CallResponse,
    PartRequest,
    Pass,
    RequestIds,
)
from swarm.experts.registry import ExpertProfile, dtype_name, profile, torch_dtype
from swarm.experts.rpc import call_host
from swarm.experts.spec import ExpertGrid
from swarm.identity import PeerId
from swarm.net.deadlines import Deadlines
from swarm.net.transport import Contact
from swarm.tensors.schema import is_finite
from swarm.tensors.wire import to_frame

OFFLOAD_BYTES = 1 * MIB
"""Checks of more than this run on the codec pool."""
MIN_ATTEMPT_S = 0.005
"""No attempt is begun with less time than this left."""
BUSY_PAUSE_S = 0.05
MAX_BUSY_RETRIES = 4


class ExpertClient:
    """Calls the experts of a run. A peer has one, as `peer.experts`.

    Args:
        endpoint: Whose transport, DHT and settings are used.
        grids: The run's grids by name.

    Attributes:
        directory: Which hosts hold which experts.
        grids: The run's grids by name.
    """

    def __init__(self, endpoint: Endpoint, grids: Mapping[str, ExpertGrid]) -> None:
        self.endpoint = endpoint
        self.grids = dict(grids)
        self.directory = ExpertDirectory(endpoint, self.grids, self._probe)
        self._runtime = endpoint.runtime
        self._config = endpoint.config.client
        self._deadlines = Deadlines(self._config.deadline)
        self._ids = RequestIds()
        self._queue_s: dict[PeerId, float] = {}
        self._profiles: dict[str, ExpertProfile] = {}

    async def start(self) -> None:
        """Read the directory and keep it fresh."""
        await self.directory.start()

    async def close(self) -> None:
        """Stop the background work. Idempotent."""
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
            if options.train and not call.applied and self.profile(_grid_of(call)).parameters:
                options.stats.lost_update()
                self._runtime.emit(UpdateLost(layer=options.layer, uid=call.uid, tokens=call.tokens, reason=call.why()))
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
        groups: dict[PeerId, tuple[Contact, list[ExpertCall]]] = {}
        for call in calls:
            contact = call.contact if first else self.directory.next_host(call.uid, call.tried)
            if contact is not None:
                groups.setdefault(contact.peer_id, (contact, []))[1].append(call)
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
        tensors = [t for call in calls for t in self._tensors(call, direction)]
        reply_bytes = sum(self._reply_bytes(call, direction) for call in calls)
        options.stats.called(len(calls))
        try:
            response, parts = await self._exchange(contact, calls, direction, options, tensors, reply_bytes, left_s)
        except SwarmError as error:
            if isinstance(error, UsageError) and error.remote is None:
                raise  # our own side is closed or misused: no host is to blame
            failed = [(call, error) for call in calls]
            if shows_unhealthy_peer(error):
                self.directory.mark_failed(contact.peer_id, error.message)
        else:
            self.directory.mark_answered(contact.peer_id)
            failed = await self._settle(contact, calls, direction, response, parts)
        if failed:
            await self._after_failure(contact, failed, direction, options, end_s)

    def _tensors(self, call: ExpertCall, direction: Pass) -> list[Tensor]:
        if direction == "forward":
            return list(call.inputs)
        return [*call.inputs, *call.grad_outputs] if call.with_inputs else list(call.grad_outputs)

    def _reply_bytes(self, call: ExpertCall, direction: Pass) -> int:
        if direction == "backward":
            return sum(t.nbytes for t in call.inputs)
        expert = self.profile(_grid_of(call))
        total = 0
        for spec in expert.outputs:
            row = torch_dtype(spec.dtype).itemsize
            for size in spec.shape[1:]:
                # an open size depends on the inputs, whose largest size is a fair guess
                row *= max((s for t in call.inputs for s in t.shape[1:]), default=1) if size is None else size
            total += row * call.tokens
        return total

    async def _exchange(
        self,
        contact: Contact,
        calls: Sequence[ExpertCall],
        direction: Pass,
        options: CallOptions,
        tensors: Sequence[Tensor],
        reply_bytes: int,
        left_s: float,
    ) -> tuple[CallResponse, list[list[Tensor]]]:
        """One RPC within its adaptive deadline. Raises `SwarmError`."""
        request_bytes = sum(t.nbytes for t in tensors)
        # experts of other grids on the same host take another time to compute
        path = f"{CALL.path}/{direction}/{_grid_of(calls[0])}"
        size = request_bytes + reply_bytes
        learned_s = self._deadlines.budget_s(
            contact.peer_id, path, size, advertised_s=self._queue_s.get(contact.peer_id, 0.0)
        )
        budget_s = min(learned_s, left_s)
        backward = direction == "backward"
        request = CallRequest(
            direction,
            tuple(
                PartRequest(
                    call.uid,
                    call.request_id,
                    len(self._tensors(call, direction)),
                    apply=backward and call.may_apply,
                    with_inputs=backward and call.with_inputs,
                    defer=backward and call.defer,
                )
                for call in calls
            ),
            train=options.train,
            timeout_s=min(3600.0, max(1e-3, budget_s)),
            grad_scale=options.grad_scale,
            reply_codec=options.codec,
        )
        started_s = self._runtime.clock.time()
        try:
            response, parts = await self.call(
                contact, request, tensors, codec=options.codec, reply_bytes=reply_bytes, timeout_s=budget_s
            )
        except CallTimeoutError:
            if budget_s >= learned_s:
                self._deadlines.record_timeout(contact.peer_id, path, size)
            raise
        self._deadlines.record(contact.peer_id, path, size, self._runtime.clock.time() - started_s)
        if len(self._queue_s) > 4096:
            self._queue_s.clear()
        self._queue_s[contact.peer_id] = min(response.queue_s, 60.0)
        return response, parts

    async def call(
        self,
        contact: Contact,
        request: CallRequest,
        tensors: Sequence[Tensor],
        *,
        codec: str = "none",
        reply_bytes: int = 0,
        timeout_s: float,
    ) -> tuple[CallResponse, list[list[Tensor]]]:
        """Make one RPC: the building block of both passes.

        Args:
            contact: The host.
            request: What it shall do.
            tensors: The tensors of all parts, in order.
            codec: How floating-point tensors travel there; the request names the codec back.
            reply_bytes: Expected size of the answer, if known: bounds what is accepted, and decides with the request's
                size between a message and a stream.
            timeout_s: Deadline of the whole exchange.

        Returns:
            The response's header and its tensors by part.

        Raises:
            NetworkError: The host could not be reached or did not answer.
            WireError: The answer is malformed.
            SwarmError: What the host refused the whole call with.
        """
        return await call_host(
            self.endpoint, contact, request, tensors, codec=codec, reply_bytes=reply_bytes, timeout_s=timeout_s
        )

    # Outcomes

    async def _settle(
        self,
        contact: Contact,
        calls: Sequence[ExpertCall],
        direction: Pass,
        response: CallResponse,
        parts: Sequence[list[Tensor]],
    ) -> list[tuple[ExpertCall, SwarmError]]:
        """Take over the good parts of an answer; returns the others with their errors."""
        failed: list[tuple[ExpertCall, SwarmError]] = []
        for call, part, tensors in zip(calls, response.parts, parts, strict=True):
            error = None if part.status == OK else part.error(str(contact.peer_id))
            if error is None:
                call.applied = call.applied or part.applied
                if part.applied:
                    call.may_apply = False
                error = await self._check(call, direction, tensors)
                if error is not None:
                    # An answer that makes no sense says nothing about what the host did with the gradient.
                    call.may_apply = False
                    self.directory.mark_failed(contact.peer_id, error.message)
            if error is not None:
                failed.append((call, error))
            elif direction == "forward":
                call.outputs, call.contact = tensors, contact
            else:
                call.grad_inputs = [
                    t if t.numel() or not x.numel() else None for t, x in zip(tensors, call.inputs, strict=True)
                ]
        return failed

    async def _check(self, call: ExpertCall, direction: Pass, tensors: Sequence[Tensor]) -> SwarmError | None:
        """What is wrong with the tensors of a part that the host calls good."""
        if direction == "forward":
            specs = self.profile(_grid_of(call)).outputs
            fits = len(tensors) == len(specs) and all(
                s.matches(t.shape, dtype_name(t.dtype)) and t.shape[0] == call.tokens
                for t, s in zip(tensors, specs, strict=True)
            )
        else:
            fits = len(tensors) == len(call.inputs) and all(
                (t.shape == x.shape and t.dtype == x.dtype) or (not t.numel() and not x.is_floating_point())
                for t, x in zip(tensors, call.inputs, strict=True)
            )
        what = "outputs" if direction == "forward" else "input gradients"
        if not fits:
            return SchemaMismatchError(f"The {what} that came back for {call.uid} have the wrong shape or dtype.")
        for tensor in tensors:
            large = tensor.nbytes > OFFLOAD_BYTES
            if not (await self._runtime.offload(is_finite, tensor) if large else is_finite(tensor)):
                return NonFiniteError(f"The {what} that came back for {call.uid} hold NaN or infinity.")
        return None

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
            retried = left_s > MIN_ATTEMPT_S + pause_s and self.directory.next_host(call.uid, call.tried) is not None
            by_reason.setdefault((error.message, retried), []).append(call.uid)
            if retried:
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
        request = CallRequest("forward", (part,), train=False, timeout_s=self._config.deadline.initial_s)
        await self.endpoint.transport.call(
            contact, CALL, to_frame(request.to_meta(), []), timeout_s=self._config.deadline.initial_s
        )


def _grid_of(call: ExpertCall) -> str:
    return call.uid.partition(".")[0]
