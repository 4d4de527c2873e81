"""What the client of remote experts keeps about its calls: work for one expert, how it went, a layer's totals."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from swarm.errors import (
    HostBusyError,
    IdentityMismatchError,
    MethodNotServedError,
    NonFiniteError,
    NotAuthorizedError,
    PeerUnreachableError,
    RateLimitedError,
    SchemaMismatchError,
    SwarmError,
    UnknownExpertError,
    UnknownRequestError,
    UnknownSessionError,
    WrongRunError,
)
from swarm.events import Event
from swarm.experts.anomalies import AnswerSizes
from swarm.experts.protocol import Pass
from swarm.identity import PeerId
from swarm.net.transport import Contact

DEFINITE_REFUSALS = (
    PeerUnreachableError,
    MethodNotServedError,
    RateLimitedError,
    IdentityMismatchError,
    WrongRunError,
    UnknownSessionError,
    NotAuthorizedError,
    UnknownExpertError,
    UnknownRequestError,
    HostBusyError,
    SchemaMismatchError,
    NonFiniteError,
)
"""Errors after which the host has certainly applied nothing, so that another replica may be asked to."""

_EWMA = 0.1


@dataclass(frozen=True, slots=True)
class ExpertCallFailed(Event):
    """A host did not do its part of a call; `retried` says whether another attempt follows."""

    layer: str
    uids: tuple[str, ...]
    peer: str
    direction: str
    reason: str
    retried: bool


@dataclass(frozen=True, slots=True)
class ExpertsMasked(Event):
    """Experts did not answer a forward pass; the gate's weights were renormalised over those that did."""

    layer: str
    uids: tuple[str, ...]
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class UpdateLost(Event):
    """A gradient was not applied, or nobody knows whether it was; it is not sent to be applied again."""

    layer: str
    uid: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class GradientMissing(Event):
    """Nobody returned the gradient of some inputs; it counts as zero."""

    layer: str
    uid: str
    tokens: int
    reason: str


@dataclass(slots=True, eq=False)
class ExpertCall:
    """The work for one expert in one pass of a layer, over all attempts.

    Attributes:
        uid: The expert.
        inputs: Its inputs; dense, on the CPU. The first dimension is the tokens. Not needed for a backward pass while
            the host remembers them.
        request_id: Names the work for the host, in both passes.
        outputs: What a host answered to the forward pass.
        contact: The host that answered the forward pass.
        grad_outputs: Gradients of the outputs; backward only.
        grad_inputs: What a host answered to the backward pass; None in the list for an input without a gradient.
        applied: A host confirmed that it applied the gradients of the parameters.
        may_apply: A host may still be asked to apply them: no earlier attempt can have done it.
        sizes: What its answers' sizes are compared with; none accepts any size.
        defer: The host that answered the forward pass shall apply them together with a later call's.
        with_inputs: The next attempt carries the inputs.
        settling: The host that was asked to apply the gradients has not answered, but another has given those of the
            inputs, so that nothing waits for it: whether they were applied is counted when it becomes known.
        passes_back: How many backward passes were begun.
        tried: Hosts that will not be asked again in this pass.
        problems: Why each attempt failed, in order.
    """

    uid: str
    tokens: int
    request_id: bytes
    inputs: Sequence[Tensor] = ()
    outputs: list[Tensor] | None = None
    contact: Contact | None = None
    grad_outputs: Sequence[Tensor] = ()
    grad_inputs: list[Tensor | None] | None = None
    applied: bool = False
    may_apply: bool = False
    sizes: AnswerSizes | None = None
    defer: bool = False
    with_inputs: bool = False
    settling: bool = False
    passes_back: int = 0
    busy: int = 0
    tried: list[PeerId] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether a host answered the forward pass."""
        return self.outputs is not None

    def why(self) -> str:
        """One sentence about the failed attempts."""
        return "; then ".join(self.problems) or "no host holds it"

    def next_pass(self, *, apply: bool, with_inputs: bool) -> None:
        """Forget the attempts of the pass before when a backward pass starts."""
        self.may_apply, self.with_inputs, self.applied, self.settling = apply, with_inputs, False, False
        self.grad_inputs = None
        self.passes_back += 1
        self.busy, self.tried, self.problems = 0, [], []


class LayerStats:
    """Totals of the calls of one layer with so many experts. Thread-safe; `snapshot` for a consistent view."""

    def __init__(self, experts: int = 1) -> None:
        self._experts = experts
        self._lock = threading.Lock()
        self._calls = self._failed = self._retries = self._lost = self._missing = 0
        self._routed = self._masked = self._dropped = 0
        self._requests = self._hedges = self._hedge_wins = 0
        self._latency: dict[Pass, float] = {}
        self._tokens: Counter[str] = Counter()

    def called(self, n: int) -> None:
        with self._lock:
            self._calls += n

    def requested(self) -> None:
        """Count a request to a host."""
        with self._lock:
            self._requests += 1

    def hedged(self) -> None:
        with self._lock:
            self._hedges += 1

    def hedge_won(self) -> None:
        with self._lock:
            self._hedge_wins += 1

    def failed(self, n: int, retried: int) -> None:
        with self._lock:
            self._failed += n
            self._retries += retried

    def lost_update(self) -> None:
        with self._lock:
            self._lost += 1

    def missing_gradient(self) -> None:
        with self._lock:
            self._missing += 1

    def routed(self, calls: Sequence[ExpertCall]) -> None:
        """Count a forward pass by what became of each expert's tokens."""
        with self._lock:
            for call in calls:
                self._routed += call.tokens
                if call.answered:
                    self._tokens[call.uid] += call.tokens
                else:
                    self._masked += call.tokens

    def dropped(self, tokens: int) -> None:
        """Count assignments that were not sent."""
        with self._lock:
            self._routed += tokens
            self._dropped += tokens

    def took(self, direction: Pass, seconds: float) -> None:
        with self._lock:
            before = self._latency.get(direction, seconds)
            self._latency[direction] = before + _EWMA * (seconds - before)

    def snapshot(self) -> LayerSnapshot:
        with self._lock:
            return LayerSnapshot(
                calls=self._calls,
                failed_calls=self._failed,
                retries=self._retries,
                lost_updates=self._lost,
                missing_gradients=self._missing,
                tokens=self._routed,
                masked_tokens=self._masked,
                dropped_tokens=self._dropped,
                forward_s=self._latency.get("forward"),
                backward_s=self._latency.get("backward"),
                expert_tokens=dict(self._tokens),
                experts=self._experts,
                requests=self._requests,
                hedges=self._hedges,
                hedge_wins=self._hedge_wins,
            )


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """A layer's totals since it was made.

    Attributes:
        calls: Attempts, counted per expert and pass.
        failed_calls: Attempts that brought no usable answer.
        retries: Failed attempts that were followed by another one.
        lost_updates: Gradients of one expert's call that are not known to have been applied.
        missing_gradients: Calls whose input gradients nobody returned; zero took their place.
        tokens: Token-to-expert assignments that the gate made.
        masked_tokens: Those that no expert answered.
        dropped_tokens: Those that were not sent, because the expert had its fill of better ones (`capacity_factor`).
        forward_s, backward_s: Moving averages of the time that one pass of the whole layer takes.
        expert_tokens: Answered assignments by expert.
        experts: How many experts the layer has.
        requests: Requests to hosts, each for all experts that the host was asked for at once; without hedges.
        hedges: Requests to another replica because the first had not answered in its usual time.
        hedge_wins: Hedges that answered first.
    """

    calls: int
    failed_calls: int
    retries: int
    lost_updates: int
    missing_gradients: int
    tokens: int
    masked_tokens: int
    dropped_tokens: int
    forward_s: float | None
    backward_s: float | None
    expert_tokens: Mapping[str, int]
    experts: int
    requests: int = 0
    hedges: int = 0
    hedge_wins: int = 0

    @property
    def masked_fraction(self) -> float:
        """Masked assignments as a fraction of all."""
        return self.masked_tokens / self.tokens if self.tokens else 0.0

    @property
    def utilisation(self) -> dict[str, float]:
        """Each expert's share of all answered assignments, for the experts that had any."""
        total = sum(self.expert_tokens.values())
        return {uid: n / total for uid, n in self.expert_tokens.items()} if total else {}

    @property
    def imbalance(self) -> float:
        """The busiest expert's load over the mean of all experts: 1 is even, `experts` is one for all."""
        return max(self.utilisation.values(), default=1.0 / self.experts) * self.experts

    @property
    def entropy(self) -> float:
        """Entropy of the utilisation over that of an even one: 1 is even, 0 is one expert for all."""
        shares = self.utilisation.values()
        return -sum(p * math.log(p) for p in shares) / math.log(self.experts) if shares and self.experts > 1 else 1.0

    def since(self, before: LayerSnapshot) -> LayerSnapshot:
        """What happened after an earlier snapshot of the same layer; the times are the present ones."""
        tokens = Counter(self.expert_tokens)
        tokens.subtract(before.expert_tokens)
        return self._with({f: getattr(self, f) - getattr(before, f) for f in _COUNTS}, +tokens)

    @classmethod
    def total(
        cls, parts: Sequence[LayerSnapshot], *, forward_s: float | None = None, backward_s: float | None = None
    ) -> LayerSnapshot:
        """The sum over the parts of a layer. At least one part."""
        tokens = sum((Counter(p.expert_tokens) for p in parts), Counter[str]())
        total = parts[0]._with({f: sum(getattr(p, f) for p in parts) for f in _COUNTS}, tokens)
        experts = sum(p.experts for p in parts)
        return replace(total, forward_s=forward_s, backward_s=backward_s, experts=experts)

    def _with(self, counts: Mapping[str, int], tokens: Mapping[str, int]) -> LayerSnapshot:
        return replace(self, expert_tokens=dict(tokens), **counts)


_COUNTS = tuple(f.name for f in fields(LayerSnapshot) if f.type == "int" and f.name != "experts")


@dataclass(slots=True)
class CallOptions:
    """How a layer wants its experts called.

    Attributes:
        layer: What events and errors call it.
        train: A backward pass will come that trains the experts.
        timeout_s: Cap of one pass over all attempts; none leaves it to adaptive deadlines and the configured cap.
        codec: How floating-point tensors travel: `none`, `bf16`, `fp16` or `int8`.
        grad_scale: What the loss was multiplied by.
        stats: Where the calls are counted.
        sizes: What the answers' sizes are compared with; none accepts any size.
    """

    layer: str
    train: bool = True
    timeout_s: float | None = None
    codec: str = "none"
    grad_scale: float = 1.0
    stats: LayerStats = field(default_factory=LayerStats)
    sizes: AnswerSizes | None = None


def is_definite(error: SwarmError) -> bool:
    """Whether the host has certainly not applied anything."""
    return isinstance(error, DEFINITE_REFUSALS)


def shows_unhealthy_peer(error: SwarmError) -> bool:
    """Whether the error says that the peer is down, stalled or lying, not that it refused something properly."""
    return error.remote is None
