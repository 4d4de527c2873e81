"""Typed errors across gRPC: how a `SwarmError` leaves a handler and how a failed call becomes one again."""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import msgpack

from swarm.net.loop import disable_grpc_fork_handlers

disable_grpc_fork_handlers()  # before the first import of grpc

import grpc
from grpc import aio

from swarm.errors import (
    CallTimeoutError,
    ConnectionLostError,
    FrameTooLargeError,
    MethodNotServedError,
    NotAuthorizedError,
    PeerUnreachableError,
    RateLimitedError,
    RemoteFailureError,
    SwarmError,
    UnknownSessionError,
    error_from_wire,
)
from swarm.identity import PeerId

T = TypeVar("T")

ERROR_KEY = "swarm-error-bin"
MAX_ERROR_BYTES = 4096
_STAND_IN = "Internal error from Core"  # what a failed write reports until the real status arrives
_STATUS_WAIT_S = 2.0
_NOT_CONNECTED = ("failed to connect", "connections to all backends failing", "dns resolution failed")
_PIN_MISMATCH = ("certificate_verify_failed", "hostname verification", "peer name", "no match found")
_CODES: dict[type[SwarmError], grpc.StatusCode] = {
    UnknownSessionError: grpc.StatusCode.UNAUTHENTICATED,
    NotAuthorizedError: grpc.StatusCode.PERMISSION_DENIED,
    MethodNotServedError: grpc.StatusCode.UNIMPLEMENTED,
    RateLimitedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RemoteFailureError: grpc.StatusCode.INTERNAL,
}


async def abort(context: aio.ServicerContext[Any, Any], error: SwarmError) -> NoReturn:
    """End a call with a typed error."""
    code = _CODES.get(type(error), grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(code, type(error).__name__, ((ERROR_KEY, msgpack.packb(error.to_wire())),))
    raise AssertionError("abort() raises")


class Ending:
    """Remembers the status with which a streaming call really ended.

    `grpc.aio` replaces the status of a call with a stand-in when a write fails, also after the real one has arrived.
    """

    def __init__(self, call: Any) -> None:
        self._known = asyncio.Event()
        self._error: aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        code, details = _now(call.code()), _now(call.details())
        if self._known.is_set() or (code is grpc.StatusCode.INTERNAL and details == _STAND_IN):
            return
        if code is not grpc.StatusCode.OK:
            self._error = aio.AioRpcError(
                code, _now(call.initial_metadata()), _now(call.trailing_metadata()) or aio.Metadata(), details
            )
        self._known.set()

    async def wait(self) -> aio.AioRpcError | None:
        """The error that ended the call, or none when it ended well. For calls of which an operation has failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_WAIT_S):
                await self._known.wait()
        if not self._known.is_set():
            return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), _STAND_IN)
        return self._error


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not need to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("the call has not ended")


def typed_error(error: aio.AioRpcError, peer_id: PeerId, path: str, timeout_s: float) -> SwarmError:
    """What a failed call means. Trusts nothing that the other side sent."""
    remote = _remote_error(error, peer_id)
    if remote is not None:
        return remote
    code, details, peer = error.code(), (error.details() or "")[:300], peer_id.short
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallTimeoutError(f"Peer {peer} did not answer {path} within {timeout_s:.3g} s.")
    if code is grpc.StatusCode.UNAVAILABLE:
        if any(phrase in details.lower() for phrase in _NOT_CONNECTED):
            return PeerUnreachableError(f"Peer {peer} cannot be reached: {details}.", fix="Check that the peer runs.")
        return ConnectionLostError(f"The connection to peer {peer} broke: {details}.")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return FrameTooLargeError(f"A message of {path} exceeds a limit: {details}.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return MethodNotServedError(f"Peer {peer} does not serve {path}.")
    if code is grpc.StatusCode.CANCELLED:
        return ConnectionLostError(f"The call of {path} to peer {peer} was cancelled: {details}.")
    return RemoteFailureError(f"{path} failed at peer {peer} with {code.name}: {details}.")


def is_pin_mismatch(error: aio.AioRpcError) -> bool:
    """Whether somebody with another certificate than the pinned one answered."""
    details = (error.details() or "").lower()
    return error.code() is grpc.StatusCode.UNAVAILABLE and any(phrase in details for phrase in _PIN_MISMATCH)


def _remote_error(error: aio.AioRpcError, peer_id: PeerId) -> SwarmError | None:
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, bytes) and len(value) <= MAX_ERROR_BYTES:
            try:
                fields = msgpack.unpackb(value)
            except (ValueError, msgpack.UnpackException):
                fields = None
            return error_from_wire(fields if isinstance(fields, dict) else {}, str(peer_id))
    return None
