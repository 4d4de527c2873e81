"""One attempt at one host: a request within its adaptive deadline, what it teaches of the host, the answer checked.

`Attempts` knows nothing of replicas and retries; `swarm.experts.client` decides those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from swarm.config import MIB
from swarm.endpoint import Endpoint
from swarm.errors import CallTimeoutError, ExpertFailedError, NonFiniteError, SchemaMismatchError, SwarmError
from swarm.experts.anomalies import AnomalousAnswer, size_of
from swarm.experts.calls import CallOptions, ExpertCall
from swarm.experts.choice import HostLoads
from swarm.experts.protocol import CALL, OK, CallRequest, CallResponse, PartRequest, Pass
from swarm.experts.registry import ExpertProfile, dtype_name, torch_dtype
from swarm.experts.rpc import Progress, call_host
from swarm.net.deadlines import Deadlines
from swarm.net.transport import Contact
from swarm.tensors.schema import is_finite

OFFLOAD_BYTES = 1 * MIB
"""Checks of more than this run on the codec pool."""
_PATHS: dict[Pass, str] = {"forward": f"{CALL.path}/forward/", "backward": f"{CALL.path}/backward/"}

Answer = tuple[CallResponse, list[list[Tensor]]]


class Attempt:
    """A request to one host for some experts.

    Attributes:
        contact: The host.
        calls: The work for each expert, in the order of the request's parts.
        path, size_bytes: What the deadline is learned for.
        progress: How far it has come.
    """

    __slots__ = ("calls", "contact", "counts", "direction", "path", "progress", "reply_bytes", "size_bytes", "tensors")

    def __init__(
        self, contact: Contact, calls: Sequence[ExpertCall], direction: Pass, profile: Callable[[str], ExpertProfile]
    ) -> None:
        self.contact = contact
        self.calls = calls
        self.direction: Pass = direction
        self.tensors: list[Tensor] = []
        self.counts: list[int] = []
        self.reply_bytes = 0
        for call in calls:
            mine = _tensors(call, direction)
            self.tensors += mine
            self.counts.append(len(mine))
            self.reply_bytes += _reply_bytes(call, direction, profile)
        self.size_bytes = self.reply_bytes + sum(t.nbytes for t in self.tensors)
        # experts of other grids on the same host take another time to compute
        self.path = _PATHS[direction] + grid_of(calls[0])
        self.progress = Progress()

    @property
    def tokens(self) -> int:
        return sum(call.tokens for call in self.calls)


class Attempts:
    """Makes attempts.

    Args:
        endpoint: Whose transport and settings are used.
        loads: Learns what hosts take.
        profile: What the experts of a grid take and give.

    Attributes:
        deadlines: How long each host is waited for.
        loads: What hosts are expected to take.
        timeouts: Requests that were given up at their learned deadline.
    """

    def __init__(self, endpoint: Endpoint, loads: HostLoads, profile: Callable[[str], ExpertProfile]) -> None:
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._profile = profile
        self.deadlines = Deadlines(endpoint.config.client.deadline)
        self.loads = loads
        self.timeouts = 0

    def prepare(self, contact: Contact, calls: Sequence[ExpertCall], direction: Pass) -> Attempt:
        """Put the parts of a request together."""
        return Attempt(contact, calls, direction, self._profile)

    def p95_s(self, attempt: Attempt) -> float | None:
        """Time within which 95 % of such requests to this host were answered; none while too few were made."""
        return self.deadlines.p95_s(attempt.contact.peer_id, attempt.path, attempt.size_bytes)

    async def send(self, attempt: Attempt, options: CallOptions, left_s: float) -> Answer:
        """Make the request within its adaptive deadline and `left_s`, whichever is shorter. Raises `SwarmError`."""
        peer_id, clock = attempt.contact.peer_id, self._runtime.clock
        started_s = clock.time()
        learned_s = self.deadlines.budget_s(
            peer_id, attempt.path, attempt.size_bytes, advertised_s=self.loads.queue_s(peer_id, started_s)
        )
        budget_s = min(learned_s, left_s)
        backward = attempt.direction == "backward"
        request = CallRequest(
            attempt.direction,
            tuple(
                [
                    PartRequest(
                        call.uid,
                        call.request_id,
                        n,
                        apply=backward and call.may_apply,
                        with_inputs=backward and call.with_inputs,
                        defer=backward and call.defer,
                    )
                    for call, n in zip(attempt.calls, attempt.counts, strict=True)
                ]
            ),
            train=options.train,
            timeout_s=min(3600.0, max(1e-3, budget_s)),
            grad_scale=options.grad_scale,
            reply_codec=options.codec,
        )
        tokens = attempt.tokens
        self.loads.asked(peer_id, tokens)
        try:
            answer = await call_host(
                self._endpoint,
                attempt.contact,
                request,
                attempt.tensors,
                codec=options.codec,
                reply_bytes=attempt.reply_bytes,
                timeout_s=budget_s,
                progress=attempt.progress,
            )
        except CallTimeoutError:
            now_s = clock.time()
            if budget_s >= learned_s:
                self.timeouts += 1
                self.deadlines.record_timeout(peer_id, attempt.path, attempt.size_bytes)
            self.loads.waited(peer_id, now_s - started_s, now_s)
            raise
        finally:
            self.loads.done(peer_id, tokens)
        now_s = clock.time()
        self.deadlines.record(peer_id, attempt.path, attempt.size_bytes, now_s - started_s)
        response = answer[0]
        self.loads.answered(
            peer_id,
            grid_of(attempt.calls[0]),
            tokens,
            now_s - started_s,
            response.queue_s,
            response.compute_s,
            now_s,
        )
        return answer

    async def settle(self, attempt: Attempt, answer: Answer) -> list[tuple[ExpertCall, SwarmError, bool]]:
        """Take over the good parts of an answer.

        Returns:
            The calls that failed, with their errors and whether these say that the host is not to be trusted.
        """
        response, parts = answer
        failed: list[tuple[ExpertCall, SwarmError, bool]] = []
        for call, part, tensors in zip(attempt.calls, response.parts, parts, strict=True):
            if part.status != OK:
                error = part.error(str(attempt.contact.peer_id))
                assert error is not None
                failed.append((call, error, False))
                continue
            if part.applied:
                call.applied, call.may_apply = True, False
            senseless = await self._check(call, attempt.direction, tensors)
            senseless = senseless or await self._anomaly(call, attempt, tensors)
            if senseless is not None:
                # An answer that makes no sense says nothing about what the host did with the gradient.
                call.may_apply = False
                failed.append((call, senseless, True))
            elif attempt.direction == "forward":
                call.outputs, call.contact = tensors, attempt.contact
            else:
                call.grad_inputs = [
                    t if t.numel() or not x.numel() else None for t, x in zip(tensors, call.inputs, strict=True)
                ]
        return failed

    async def _check(self, call: ExpertCall, direction: Pass, tensors: Sequence[Tensor]) -> SwarmError | None:
        """What is wrong with the tensors of a part that the host calls good."""
        if direction == "forward":
            specs = self._profile(grid_of(call)).outputs
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

    async def _anomaly(self, call: ExpertCall, attempt: Attempt, tensors: Sequence[Tensor]) -> SwarmError | None:
        """What is suspicious about an answer that makes sense, where the layer wants that looked at."""
        sizes, direction = call.sizes, attempt.direction
        if sizes is None:
            return None
        cause = () if direction == "forward" else call.grad_outputs
        large = sum(t.nbytes for t in tensors) > OFFLOAD_BYTES
        size = await self._runtime.offload(size_of, tensors, cause) if large else size_of(tensors, cause)
        usual = None if size is None else sizes.judge(call.uid, direction, size)
        if size is None or usual is None:
            return None
        peer = str(attempt.contact.peer_id)
        self._runtime.emit(AnomalousAnswer(sizes.layer, call.uid, peer, direction, size, usual))
        return ExpertFailedError(f"The answer of {call.uid} is {size / usual:.1f} times as large as usual.")


def grid_of(call: ExpertCall) -> str:
    """Name of the grid that a call's expert belongs to."""
    return call.uid.split(".", 1)[0]


def _tensors(call: ExpertCall, direction: Pass) -> Sequence[Tensor]:
    if direction == "forward":
        return call.inputs
    return [*call.inputs, *call.grad_outputs] if call.with_inputs else call.grad_outputs


def _reply_bytes(call: ExpertCall, direction: Pass, profile: Callable[[str], ExpertProfile]) -> int:
    if direction == "backward":
        return sum(t.nbytes for t in call.inputs)
    total = 0
    for spec in profile(grid_of(call)).outputs:
        row = torch_dtype(spec.dtype).itemsize
        for size in spec.shape[1:]:
            # an open size depends on the inputs, whose largest size is a fair guess
            row *= max((s for t in call.inputs for s in t.shape[1:]), default=1) if size is None else size
        total += row * call.tokens
    return total
