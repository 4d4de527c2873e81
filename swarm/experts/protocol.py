"""The wire protocol of expert calls: methods, header fields and their validation. No I/O.

A request and a response are frames of `swarm.tensors.wire`: a header (the dataclasses here) and the tensors of all
parts, concatenated in order. A part is the work for one expert; parts succeed and fail on their own. The call as a
whole fails only for a malformed frame, a missing right, or an overloaded host.

Gradients apply at most once: `apply=True` is sent to one replica only, and a host applies an id once per expert. Ids
carry a nonce of the client's process and a rising sequence number, so that a host can refuse what is older than its
memory (`StaleRequestError`) instead of applying it again.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from swarm.config import MIB
from swarm.errors import MalformedFrameError, SwarmError, error_from_wire
from swarm.experts.spec import parse_uid
from swarm.net.transport import StreamMethod, UnaryMethod
from swarm.roles import Role

VERSION = 1
REQUEST_ID_BYTES = 16
NONCE_BYTES = 8
MAX_PARTS = 4096
MAX_TENSORS_PER_PART = 64
MAX_TIMEOUT_S = 3600.0
MAX_UNARY_BYTES = 4 * MIB
MAX_CALL_PAYLOAD_BYTES = 1024 * MIB
OK: Literal["ok"] = "ok"

CALLERS = frozenset({Role.TRAINER, Role.HOST})
CALL: UnaryMethod[bytes, bytes] = UnaryMethod(
    "/swarm.pb.Experts/Call", bytes, bytes, roles=CALLERS, max_bytes=MAX_UNARY_BYTES, adaptive=False
)
"""A small call as one frame each way; both frames must fit into `MAX_UNARY_BYTES`."""
CALL_STREAM = StreamMethod("/swarm.pb.Experts/CallStream", roles=CALLERS)
"""The same frames as streams, of any size up to `MAX_CALL_PAYLOAD_BYTES`."""
OFFER: UnaryMethod[bytes, bytes] = UnaryMethod("/swarm.pb.Experts/Offer", bytes, bytes, roles=CALLERS)
"""Ask a holder to publish the newest agreement about an expert as a snapshot; see `swarm.experts.syncing`."""
CAPTURE: UnaryMethod[bytes, bytes] = UnaryMethod("/swarm.pb.Experts/Capture", bytes, bytes, roles=CALLERS)
"""Ask a holder to publish what it has done since the last agreement as a snapshot."""

Pass = Literal["forward", "backward"]
T = TypeVar("T")


class RequestIds:
    """Makes the request ids of one client process: 8 random bytes, then a rising 64-bit number."""

    def __init__(self) -> None:
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._last = 0

    def next(self) -> bytes:
        self._last += 1
        return self._nonce + struct.pack(">Q", self._last)


def split_request_id(request_id: bytes) -> tuple[bytes, int]:
    """Nonce and sequence number of an id."""
    return request_id[:NONCE_BYTES], int.from_bytes(request_id[NONCE_BYTES:], "big")


def _field(meta: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    value = meta.get(name, default)
    if type(value) is kind:
        return value
    # bool is an int to isinstance; on the wire they differ
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise MalformedFrameError(f"The field {name!r} of an expert call is missing or not of type {kind.__name__}.")
    return value


def _number(meta: dict[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = _field(meta, name, float, default)
    if not (math.isfinite(value) and low <= value <= high):
        raise MalformedFrameError(f"The field {name!r} of an expert call is not between {low} and {high}.")
    return value


def _count(meta: dict[str, Any], name: str, high: int) -> int:
    value = _field(meta, name, int)
    if not 0 <= value <= high:
        raise MalformedFrameError(f"The field {name!r} of an expert call is not between 0 and {high}.")
    return value


def _identified(meta: Any) -> tuple[str, bytes]:
    """Uid and request id of a part's table."""
    if not isinstance(meta, dict):
        raise MalformedFrameError("A part of an expert call is not a table.")
    uid, request_id = _field(meta, "uid", str), _field(meta, "request_id", bytes)
    parse_uid(uid)
    if len(request_id) != REQUEST_ID_BYTES:
        raise MalformedFrameError(f"A request id is {REQUEST_ID_BYTES} bytes long.")
    return uid, request_id


def _tables(meta: dict[str, Any]) -> list[Any]:
    parts = _field(meta, "parts", list)
    if not 1 <= len(parts) <= MAX_PARTS:
        raise MalformedFrameError(f"An expert call has {len(parts)} parts; 1 to {MAX_PARTS} are allowed.")
    return parts


def _split(tensors: Sequence[T], counts: Sequence[int]) -> list[list[T]]:
    if sum(counts) != len(tensors):
        raise MalformedFrameError(f"The parts name {sum(counts)} tensors, the frame holds {len(tensors)}.")
    start, result = 0, []
    for n in counts:
        result.append(list(tensors[start : start + n]))
        start += n
    return result


@dataclass(frozen=True, slots=True)
class PartRequest:
    """The work for one expert.

    Attributes:
        uid: The expert.
        request_id: 16 bytes from `RequestIds`; a backward pass carries the id of its forward pass.
        n: How many tensors of the frame belong to this part: forward, the inputs; backward, the gradients of the
            outputs, preceded by the inputs when `with_inputs`.
        apply: Backward only: apply the parameters' gradients (at most once). Without it, only input gradients return.
        with_inputs: Backward only: the inputs come along, for a host that no longer (or never) had them.
        defer: With `apply`: add the gradients to those of the expert's next step instead of making a step now, because
            more parts of the same batch follow.
    """

    uid: str
    request_id: bytes
    n: int
    apply: bool = False
    with_inputs: bool = False
    defer: bool = False

    def to_meta(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "request_id": self.request_id,
            "n": self.n,
            "apply": self.apply,
            "with_inputs": self.with_inputs,
            "defer": self.defer,
        }

    @classmethod
    def from_meta(cls, meta: Any) -> PartRequest:
        """Raises `MalformedFrameError`."""
        uid, request_id = _identified(meta)
        return cls(
            uid,
            request_id,
            n=_count(meta, "n", MAX_TENSORS_PER_PART),
            apply=_field(meta, "apply", bool, False),
            with_inputs=_field(meta, "with_inputs", bool, False),
            defer=_field(meta, "defer", bool, False),
        )


@dataclass(frozen=True, slots=True)
class CallRequest:
    """The header of a request.

    Attributes:
        direction: `forward` or `backward` (`pass` on the wire).
        parts: One per expert.
        train: Forward only: a backward pass will come, keep what it needs; also the module's training mode.
        timeout_s: The caller stops waiting after this; the host drops what it has not begun by then.
        grad_scale: Backward only: what the loss was multiplied by (AMP's GradScaler). The host divides the parameters'
            gradients by it; the gradients of the inputs stay scaled.
        reply_codec: Codec of the tensors of the response.
    """

    direction: Pass
    parts: tuple[PartRequest, ...]
    train: bool = True
    timeout_s: float = 30.0
    grad_scale: float = 1.0
    reply_codec: str = "none"

    def to_meta(self) -> dict[str, Any]:
        return {
            "v": VERSION,
            "pass": self.direction,
            "parts": [p.to_meta() for p in self.parts],
            "train": self.train,
            "timeout_s": self.timeout_s,
            "grad_scale": self.grad_scale,
            "reply_codec": self.reply_codec,
        }

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> CallRequest:
        """Raises `MalformedFrameError`."""
        if _field(meta, "v", int) != VERSION:
            raise MalformedFrameError(
                f"Expert calls of version {meta['v']} are not understood.", fix="Upgrade swarm-train."
            )
        direction = _field(meta, "pass", str)
        if direction != "forward" and direction != "backward":
            raise MalformedFrameError("The field 'pass' of an expert call is neither 'forward' nor 'backward'.")
        codec = _field(meta, "reply_codec", str, "none")
        if len(codec) > 32:
            raise MalformedFrameError("The field 'reply_codec' of an expert call is too long.")
        return cls(
            "forward" if direction == "forward" else "backward",
            tuple(PartRequest.from_meta(p) for p in _tables(meta)),
            train=_field(meta, "train", bool, True),
            timeout_s=_number(meta, "timeout_s", 1e-3, MAX_TIMEOUT_S, 30.0),
            grad_scale=_number(meta, "grad_scale", 1e-30, 1e30, 1.0),
            reply_codec=codec,
        )

    def split(self, tensors: Sequence[T]) -> list[list[T]]:
        """The frame's tensors, part by part. Raises `MalformedFrameError` when the counts do not add up."""
        return _split(tensors, [p.n for p in self.parts])


@dataclass(frozen=True, slots=True)
class PartResponse:
    """What became of one part: `status` is `ok`, or the code of the error whose text is `message`.

    Attributes:
        n: Tensors of the frame that belong to this part: outputs (forward), or gradients of the inputs (backward); a
            gradient of an input that has none (integers) is a tensor with zero elements.
        applied: Backward: the gradients of the parameters were applied by this very call.
        weight_version: Of the expert after this part.
    """

    uid: str
    request_id: bytes
    status: Literal["ok"] | int = OK
    message: str = ""
    n: int = 0
    applied: bool = False
    weight_version: int = 0

    @classmethod
    def failed(cls, part: PartRequest, error: SwarmError, weight_version: int = 0) -> PartResponse:
        message = error.message[:400] + (f" Fix: {error.fix[:200]}" if error.fix else "")
        return cls(part.uid, part.request_id, status=error.code, message=message, weight_version=weight_version)

    def error(self, remote: str) -> SwarmError | None:
        """The typed error of a failed part, raised by peer `remote`; none if it went well."""
        return None if self.status == OK else error_from_wire({"code": self.status, "message": self.message}, remote)

    def to_meta(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "request_id": self.request_id,
            "status": self.status,
            "message": self.message,
            "n": self.n,
            "applied": self.applied,
            "weight_version": self.weight_version,
        }

    @classmethod
    def from_meta(cls, meta: Any) -> PartResponse:
        """Raises `MalformedFrameError`."""
        uid, request_id = _identified(meta)
        status = meta.get("status")
        if status != OK and type(status) is not int:
            raise MalformedFrameError("The field 'status' of an expert's answer is neither 'ok' nor a number.")
        return cls(
            uid,
            request_id,
            status=status,
            message=_field(meta, "message", str, "")[:1000],
            n=_count(meta, "n", MAX_TENSORS_PER_PART),
            applied=_field(meta, "applied", bool, False),
            weight_version=_count(meta, "weight_version", 1 << 62),
        )


@dataclass(frozen=True, slots=True)
class CallResponse:
    """The header of a response: one part per part of the request, in its order.

    Attributes:
        queue_s: Longest time a part waited for the device.
        compute_s: Time the device spent on the batches that held the parts.
    """

    parts: tuple[PartResponse, ...]
    queue_s: float = 0.0
    compute_s: float = 0.0

    def to_meta(self) -> dict[str, Any]:
        return {"parts": [p.to_meta() for p in self.parts], "queue_s": self.queue_s, "compute_s": self.compute_s}

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> CallResponse:
        """Raises `MalformedFrameError`."""
        return cls(
            tuple(PartResponse.from_meta(p) for p in _tables(meta)),
            queue_s=_number(meta, "queue_s", 0.0, 1e9, 0.0),
            compute_s=_number(meta, "compute_s", 0.0, 1e9, 0.0),
        )

    def check_answers(self, request: CallRequest) -> None:
        """Raises `MalformedFrameError` unless this answers exactly the parts of `request`."""
        asked = [(p.uid, p.request_id) for p in request.parts]
        if [(p.uid, p.request_id) for p in self.parts] != asked:
            raise MalformedFrameError("The answer of an expert call names other parts than the request.")

    def split(self, tensors: Sequence[T]) -> list[list[T]]:
        """The frame's tensors, part by part. Raises `MalformedFrameError` when the counts do not add up."""
        return _split(tensors, [p.n for p in self.parts])
