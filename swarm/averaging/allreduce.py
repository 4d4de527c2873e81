"""Butterfly all-reduce without I/O: which chunks are due, and what a reducer does with what arrives.

Each of n members reduces one part of the flat vector. Members send the other parts to their reducers, chunk by chunk,
and receive averages. The reducer encodes an average once and everybody, itself included, decodes that encoding, so
that all members hold the same bits. A sender that stalls is left out of the chunks that it did not send in time, and
counts again when it has caught up; a reducer that dies costs its part. A chunk holds either the weighted mean of those
who sent it or the local values, never a mix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.averaging.robust import Reducer, RobustReducer, bounded_weights, check_reducer
from swarm.averaging.vector import Chunk, FlatVector
from swarm.errors import MalformedFrameError, UsageError
from swarm.identity import PeerId
from swarm.tensors.codecs import Codec, Role, auto
from swarm.tensors.codecs import codec as find_codec
from swarm.tensors.feedback import ErrorFeedback
from swarm.tensors.memory import blank_bytes, peek
from swarm.tensors.schema import TensorMeta, is_finite

NO_VALUES = b"\0"
"""Stands for a chunk without values. No chunk is that short: the smallest averaged element takes two bytes."""
NOT_COUNTED = b"\1"
"""Precedes an average that was made without the values of the member to which it is sent."""
WINDOW_CHUNKS = 4
"""How far a reducer reads a fast sender ahead of the slowest one."""
_COARSE = ("int8", "int4", "topk")
"""What these leave out is worth keeping for the next round."""
_DIFFERENCES_ONLY = "topk"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Strategy: everybody in a group gets the group's weighted mean, in one exchange.

    Attributes:
        min_group: Fewer members do not average. At least 3 with a robust reducer.
        max_group: A group is sealed at once when it has so many.
        codec: How values travel: a name (see `swarm.tensors.codecs`), or `auto`, which chooses for each tensor by role,
            size and dtype. `none` sends every dtype as it is. Sums are always in fp32 or better. Equal weights are
            divided out after the sum: where n members' sum exceeds fp32 (3.4e38; float64's own limit for float64), the
            chunk keeps local values, although the mean itself may be finite.
        role: What the tensors are. Those of `gradients` (and differences) are rounded stochastically, without bias.
        error_feedback: Keep what lossy codecs leave out and send it in the next round, at the price of one fp32 copy of
            the tensors that travel with them. None: with `int8`, `int4` and `topk`, unless parts are verified.
        reducer: `"mean"`, or what bounds the influence of members that lie about their values: `CenteredClip()`,
            `Median()`, `TrimmedMean()`. These average in groups of three or more, and cost more time (see
            docs/benchmarks.md) and memory for one chunk of every member.
        verify_parts: A second member repeats each reduction, and members write only what it confirms: a reducer's false
            averages are not applied. Values are sent twice. Not together with error feedback, which nobody else can
            repeat.
    """

    min_group: int = 2
    max_group: int = 16
    codec: str = "none"
    role: Role = "parameters"
    error_feedback: bool | None = None
    reducer: Reducer = "mean"
    verify_parts: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.min_group <= self.max_group <= 256:
            raise UsageError("An averaging group has 2 to 256 members.", fix="Use 2 <= min_group <= max_group <= 256.")
        check_codec(self.codec, self.role)
        check_reducer(self.reducer)
        if self.reducer != "mean" and self.min_group < LEAST_ROBUST:
            if self.max_group < LEAST_ROBUST:
                raise UsageError(
                    "Of two members nobody can tell which one lies.", fix=f"Use max_group >= {LEAST_ROBUST}."
                )
            object.__setattr__(self, "min_group", LEAST_ROBUST)
        if self.reducer != "mean" and self.codec.startswith(_DIFFERENCES_ONLY):
            raise UsageError(
                f"Members that send their largest values only ({self.codec}) do not send the same coordinates, so that "
                "a robust reducer takes what few sent for lies.",
                fix="Use it with another codec, such as int8.",
            )
        if self.verify_parts and self.error_feedback:
            raise UsageError(
                "Parts cannot be verified with error feedback: nobody else knows what a reducer held back.",
                fix="Leave out error_feedback, or verify_parts.",
            )


LEAST_ROBUST = 3
"""Members that a group with a robust reducer has at least."""


def check_codec(name: str, role: Role) -> None:
    """Raise `UsageError` or `UnsupportedDtypeError` unless tensors of this role can be averaged with the codec."""
    auto(role, 0, torch.float32)  # checks the role
    if name == "auto":
        return
    find_codec(name)
    if name.startswith(_DIFFERENCES_ONLY) and role != "gradients":
        raise UsageError(
            f"Codec {name} sends the largest values only, which turns all other {role} into 0.",
            fix='Average differences with it (role="gradients"), or use int8, bf16 or none.',
        )


def choose_codecs(name: str, role: Role, metas: Sequence[TensorMeta]) -> list[Codec]:
    """The codec of each tensor."""
    return [find_codec(auto(role, meta.numel, meta.dtype) if name == "auto" else name) for meta in metas]


def make_feedback(wanted: bool | None, vector: FlatVector, layout: bytes) -> ErrorFeedback | None:
    """Error feedback for the segments of a vector that it helps; none if there are none, or it is not wanted.

    Args:
        wanted: None leaves it to the codecs.
    """

    def covered(codec: Codec, dtype: torch.dtype) -> bool:
        return not codec.exact(dtype) if wanted is not None else codec.name.startswith(_COARSE)

    if wanted is False:
        return None
    sizes = [s.numel if covered(s.codec, s.dtype) else 0 for s in vector.segments]
    return ErrorFeedback(sizes, layout) if any(sizes) else None


def rounding_seed(nonce: bytes, member: int, part: int, chunk: int) -> int:
    """Seed of the noise with which a member encodes a chunk: its own for every round, member and chunk."""
    place = f"{member}/{part}/{chunk}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8, key=nonce[:64]).digest(), "little") >> 1


@dataclass(slots=True)
class _Sender:
    weight: float | None = None
    """Known from the sender's hello on."""
    next_index: int = 0
    held: dict[int, bytes] = field(default_factory=dict)
    lost: bool = False
    behind: bool = False


class PartReduction:
    """Which chunks of one part have arrived from whom, and which is due. Chunks are reduced in order.

    Args:
        chunks: How many chunks the part has.
        senders: The other members.
    """

    def __init__(self, chunks: int, senders: Sequence[PeerId], window: int = WINDOW_CHUNKS) -> None:
        self.chunks = chunks
        self.cursor = 0
        self._window = window
        self._senders = {peer: _Sender() for peer in senders}

    @property
    def done(self) -> bool:
        return self.cursor >= self.chunks

    def admit(self, peer: PeerId, weight: float) -> None:
        """The peer said what its values weigh; with 0 nothing is expected of it."""
        self._senders[peer].weight = weight

    def weight(self, peer: PeerId) -> float | None:
        """What the peer's values weigh; none before it said so."""
        return self._senders[peer].weight

    def wants(self, peer: PeerId) -> bool:
        """Whether the peer's next chunk may be read now; a fast sender waits for the slowest."""
        return self._senders[peer].next_index < self.cursor + self._window

    def arrived(self, peer: PeerId, payload: bytes) -> None:
        """The peer's next chunk, in order. One that was reduced without it is forgotten; a later one ends its lag."""
        sender = self._senders[peer]
        index, sender.next_index = sender.next_index, sender.next_index + 1
        if index >= self.cursor and not sender.lost:
            sender.held[index] = payload
            sender.behind = False

    def leave_behind(self, peer: PeerId) -> None:
        """Wait for a sender no more until it has caught up."""
        self._senders[peer].behind = True

    def behind(self) -> list[PeerId]:
        """Senders without whose values the next chunk is reduced because they are late."""
        return [peer for peer, s in self._senders.items() if s.behind and not s.lost and self.cursor not in s.held]

    def lose(self, peer: PeerId) -> bool:
        """Drop a sender for every chunk that it did not send; what it sent counts. True if that was news."""
        sender = self._senders.get(peer)
        if sender is None or sender.lost or sender.weight == 0 or sender.next_index >= self.chunks:
            return False
        sender.lost = True
        return True

    def missing(self) -> list[PeerId]:
        """Senders that hold up the next chunk."""
        return [
            peer
            for peer, s in self._senders.items()
            if not (s.lost or s.behind or s.weight == 0 or self.cursor in s.held)
        ]

    def take(self) -> list[tuple[PeerId, float, bytes]]:
        """What arrived for the next chunk; nobody may be missing. Moves on to the following chunk."""
        assert not self.done
        assert not self.missing()
        arrived = [
            (p, s.weight or 0.0, s.held.pop(self.cursor)) for p, s in self._senders.items() if self.cursor in s.held
        ]
        self.cursor += 1
        return [(peer, weight, payload) for peer, weight, payload in arrived if payload != NO_VALUES]


Values = tuple[PeerId | None, float, bytes | None]
"""Whose values (none: the reducer's own), their weight, and how they arrived (none: they are here)."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduced chunk.

    Attributes:
        encoded: The average as everybody decodes it; none where local values stand.
        contributors: Whose values are in it (None stands for the reducer's own).
        offenders: Whose values were not finite.
        malformed: Whose bytes no encoder writes.
    """

    encoded: bytes | None
    contributors: tuple[PeerId | None, ...] = ()
    offenders: tuple[PeerId | None, ...] = ()
    malformed: tuple[PeerId, ...] = ()


class ChunkReducer:
    """Averages chunks of a vector, one at a time, with scratch memory of two chunks that it keeps.

    A robust reducer needs a chunk in fp32 for every member instead, and `CenteredClip` that twice.

    Args:
        vector: This member's values; reduced chunks are replaced by the average.
        feedback: What earlier rounds left out.
        reducer: How values become an average.
    """

    def __init__(self, vector: FlatVector, feedback: ErrorFeedback | None = None, reducer: Reducer = "mean") -> None:
        self._vector = vector
        self._feedback = feedback
        self._robust = reducer if isinstance(reducer, RobustReducer) else None
        self._scratch: dict[str, Tensor] = {}

    def reduce(
        self,
        chunk: Chunk,
        own_weight: float,
        arrived: Sequence[tuple[PeerId, float, bytes]],
        rng: int | None = None,
        write: bool = True,
    ) -> Reduced:
        """Average a chunk and write the decoded average into the vector, or leave local values as they are.

        Args:
            own_weight: Of this member's values; 0 leaves them out.
            arrived: Sender, weight, encoded values.
            rng: Seed for stochastic rounding.
            write: False leaves local values as they are in any case.
        """
        segment = self._vector.segments[chunk.segment]
        own = self._vector.read(chunk)
        candidates: list[Values] = [(None, own_weight, None), *arrived]
        rows = [row for row in candidates if row[1] > 0]
        malformed: list[PeerId] = []
        offenders: tuple[PeerId | None, ...] = ()
        if self._robust is not None:
            mean, total, offenders = self._combine(self._robust, own, rows, segment.codec, malformed)
        else:
            mean, total = self._mean(own, rows, segment.codec, malformed)
            if mean is None and rows:
                bad = [row for row in rows if not is_finite(self._values(own, row[2], segment.codec))]
                offenders = tuple(row[0] for row in bad)
                rows = [row for row in rows if row[0] not in offenders]
                mean, total = self._mean(own, rows, segment.codec, malformed) if bad else (None, 0.0)
        if mean is None:
            return Reduced(None, (), offenders, tuple(malformed))
        encoded = self._conclude(chunk, segment.codec, mean, total, rng, write)
        if encoded is None:
            return Reduced(None, (), offenders, tuple(malformed))
        return Reduced(encoded, tuple(row[0] for row in rows), offenders, tuple(malformed))

    def _conclude(
        self, chunk: Chunk, codec: Codec, mean: Tensor, total: float, rng: int | None, write: bool
    ) -> bytes | None:
        """Encode an average, keep what that leaves out, and write what everybody decodes."""
        vector, feedback = self._vector, self._feedback
        dtype = vector.segments[chunk.segment].dtype
        if codec.is_copy:
            applied = mean.to(dtype)
            if applied is not mean and not is_finite(applied):
                return None  # in a dtype narrower than the sum's
            if write:
                vector.write(chunk, applied)
            return bytes(codec.encode(applied))
        held = feedback if feedback is not None and feedback.covers(chunk.segment) else None
        encoded, memory = blank_bytes(codec.encoded_nbytes(chunk.numel, dtype))
        for tile, span, place in codec.spans(chunk.numel, dtype):
            if held is not None:
                held.add_to_mean(chunk.segment, chunk.start + span.start, mean[span], total)
            codec.encode_into(mean[span], memory[place], rng=rng, tile=tile)
        if held is None:
            if write:
                vector.decode(chunk, memory)
            return encoded
        if not self._is_finite(memory, chunk.numel, dtype, codec):
            return None  # with the residual
        view = vector.view(chunk) if write else None
        into = view if view is not None else self._take("applied", chunk.numel, dtype)
        for _, span, place in codec.spans(chunk.numel, dtype):
            codec.decode_into(memory[place], into[span])
            held.reduced(chunk.segment, chunk.start + span.start, mean[span], total, into[span])
        if write and view is None:
            vector.write(chunk, into)
        return encoded

    def _is_finite(self, encoded: Tensor, numel: int, dtype: torch.dtype, codec: Codec) -> bool:
        finite = codec.finite(encoded, numel, dtype)
        if finite is None:
            decoded = self._take("applied", numel, dtype)
            codec.decode_into(encoded, decoded)
            finite = is_finite(decoded)
        return finite

    def _combine(
        self, robust: RobustReducer, own: Tensor, rows: list[Values], codec: Codec, malformed: list[PeerId]
    ) -> tuple[Tensor | None, float, tuple[PeerId | None, ...]]:
        """A robust average in scratch memory, the total weight, who sent what is not finite. Removes unusable rows."""
        if not rows:
            return None, 0.0, ()
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        matrix = self._take("members", len(rows) * own.numel(), wide).view(len(rows), -1)
        usable: list[Values] = []
        offenders: list[PeerId | None] = []
        for row in rows:
            into = matrix[len(usable)]
            try:
                into.copy_(self._values(own, row[2], codec))
            except MalformedFrameError:
                assert row[0] is not None
                malformed.append(row[0])
                continue
            if is_finite(into):
                usable.append(row)
            else:
                offenders.append(row[0])
        rows[:] = usable
        if not rows:
            return None, 0.0, tuple(offenders)
        average = self._take("sum", own.numel(), wide)
        robust.combine(matrix[: len(rows)], bounded_weights([weight for _, weight, _ in rows]), average)
        total = min(sum(weight for _, weight, _ in rows), 1e300)
        return average if is_finite(average) else None, total, tuple(offenders)

    def _mean(
        self, own: Tensor, rows: list[Values], codec: Codec, malformed: list[PeerId]
    ) -> tuple[Tensor | None, float]:
        """The weighted mean in scratch memory, none if it is not finite, and the total weight.

        Removes rows that cannot be decoded.
        """
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        while rows:
            total = sum(weight for _, weight, _ in rows)
            scale = 1.0
            if total == math.inf:  # each weight is finite, their sum need not be
                scale = 0.5 / len(rows)
                total = sum(weight * scale for _, weight, _ in rows)
            acc = self._take("sum", own.numel(), wide)
            uniform = all(weight == rows[0][1] for _, weight, _ in rows)
            factors = [1.0 if uniform else weight * scale / total for _, weight, _ in rows]
            payloads = [None if row[2] is None else peek(row[2]) for row in rows]
            broken, finite = -1, True
            for _, span, place in codec.spans(own.numel(), own.dtype):
                pieces = [None if payload is None else payload[place] for payload in payloads]
                broken = self._sum(acc[span], own[span], pieces, factors, codec)
                if broken >= 0:
                    break
                if uniform and len(rows) > 1:
                    acc[span].mul_(1.0 / len(rows))
                finite = finite and is_finite(acc[span])
            if broken < 0:
                return acc if finite else None, min(total / scale, 1e300)
            sender = rows.pop(broken)[0]
            assert sender is not None
            malformed.append(sender)
        return None, 0.0

    def _sum(
        self, acc: Tensor, own: Tensor, rows: Sequence[Tensor | None], factors: Sequence[float], codec: Codec
    ) -> int:
        """`acc` = sum of factor * values of one tile; which row cannot be decoded, or -1. `own` stands for None."""
        done = 0
        if rows[0] is None:
            done = 1
            second = rows[1] if len(rows) > 1 else None
            if second is not None and factors[0] == 1.0 and codec.is_copy and own.dtype == acc.dtype:
                torch.add(own, second.view(own.dtype), alpha=factors[1], out=acc)
                done = 2
            else:
                acc.copy_(own).mul_(factors[0]) if factors[0] != 1.0 else acc.copy_(own)
        else:
            acc.zero_()
        for index in range(done, len(rows)):
            row = rows[index]
            assert row is not None
            try:
                codec.decode_add(row, own.dtype, acc, factors[index])
            except MalformedFrameError:
                return index
        return -1

    def _values(self, own: Tensor, payload: bytes | None, codec: Codec) -> Tensor:
        if payload is None:
            return own
        received = peek(payload)
        if codec.is_copy:
            return received.view(own.dtype)
        decoded = self._take("decoded", own.numel(), own.dtype)
        codec.decode_into(received, decoded)
        return decoded

    def _take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        key = f"{name}/{dtype}"
        held = self._scratch.get(key)
        if held is None or held.numel() < numel:
            held = self._scratch[key] = torch.empty(numel, dtype=dtype)
        return held[:numel]
