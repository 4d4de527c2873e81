"""Answers expert calls: admits each part to the device's queue, and turns results and failures into one response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swarm.endpoint import Endpoint
from swarm.errors import (
    CallTimeoutError,
    HostBusyError,
    SchemaMismatchError,
    SwarmError,
    UnknownExpertError,
    UnknownRequestError,
)
from swarm.events import Event
from swarm.experts.backend import (
    BackwardJob,
    BackwardResult,
    ExpertBackend,
    ForwardJob,
    ForwardResult,
    tokens_of,
)
from swarm.experts.batching import BatchKey, Work
from swarm.experts.cache import CachedForward, ForwardCache
from swarm.experts.limits import InflightBudget
from swarm.experts.protocol import (
    CALL,
    CALL_STREAM,
    MAX_CALL_PAYLOAD_BYTES,
    MAX_UNARY_BYTES,
    CallRequest,
    CallResponse,
    PartRequest,
    PartResponse,
)
from swarm.experts.registry import dtype_name
from swarm.experts.spec import TensorSpec
from swarm.experts.workers import Worker
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, CallContext
from swarm.tensors.codecs import codec
from swarm.tensors.streaming import receive_tensors, send_tensors
from swarm.tensors.wire import DEFAULT_CHUNK_BYTES, Admit, Limits, from_frame, to_frame

_UNARY_LIMITS = Limits(max_payload_bytes=MAX_UNARY_BYTES)
_STREAM_LIMITS = Limits(max_header_bytes=4 << 20, max_tensors=16384, max_payload_bytes=MAX_CALL_PAYLOAD_BYTES)
_GRAPH_SHARE = 4
_MAX_COUNTED_PEERS = 1024


@dataclass(frozen=True, slots=True)
class PartFailed(Event):
    """A part of a call failed; the caller got `code` and `reason`."""

    uid: str
    peer: str
    code: int
    reason: str


@dataclass(slots=True)
class ServingStats:
    """Totals since the start."""

    calls: int = 0
    forward_parts: int = 0
    backward_parts: int = 0
    failed_parts: int = 0
    applied_parts: int = 0
    limited_parts: int = 0
    recomputed_parts: int = 0


@dataclass(frozen=True, slots=True)
class GradientLimited(Event):
    """A trainer's gradient for an expert was unusually large; it was multiplied by `factor`."""

    uid: str
    peer: str
    factor: float


class _Upload(ByteStream):
    """One request on a stream, its first message taken already; none of the others may be late."""

    def __init__(self, first: bytes, stream: ByteStream, stall_s: float, bytes_s: float) -> None:
        self._first: bytes | None = first
        self._stream = stream
        self._stall_s = self._patience_s = stall_s
        self._bytes_s = bytes_s
        self._ends_s = float("inf")

    def announced(self, nbytes: int) -> None:
        """The request takes so many bytes: it has to be here by a certain time, as has each message."""
        self._patience_s = self._stall_s + min(nbytes, DEFAULT_CHUNK_BYTES) / self._bytes_s
        self._ends_s = asyncio.get_running_loop().time() + self._stall_s + nbytes / self._bytes_s

    async def send(self, chunk: bytes) -> None:
        await self._stream.send(chunk)

    async def finish(self) -> None:
        await self._stream.finish()

    async def receive(self) -> bytes | None:
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + self._patience_s, self._ends_s)):
                return await self._stream.receive()
        except TimeoutError as error:
            fix = "Send smaller requests, or check the link."
            raise CallTimeoutError("The request did not arrive in time.", fix=fix) from error


def compute(works: Sequence[Work]) -> Sequence[ForwardResult | BackwardResult | SwarmError]:
    """One batch, on the device's thread."""
    backend: ExpertBackend = works[0].job[0]
    key = works[0].key
    assert isinstance(key, BatchKey)
    jobs = [w.job[1] for w in works]
    return backend.forward(jobs) if key.direction == "forward" else backend.backward(jobs, key.grad_scale)


def prepare(works: Sequence[Work]) -> None:
    """Begin to copy a batch to the device."""
    backend: ExpertBackend = works[0].job[0]
    backend.prepare([w.job[1] for w in works])


def _fits(what: str, tensors: Sequence[Tensor], specs: Sequence[TensorSpec], rows: int | None = None) -> int:
    """The common number of tokens. Raises `SchemaMismatchError`."""
    if len(tensors) != len(specs):
        raise SchemaMismatchError(f"{what}: {len(tensors)} tensors where {len(specs)} are expected.")
    for tensor, spec in zip(tensors, specs, strict=True):
        if not spec.matches(tensor.shape, dtype_name(tensor.dtype)):
            found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            raise SchemaMismatchError(f"{what}: {found} where {spec} is expected.")
        rows = tensor.shape[0] if rows is None else rows
        if tensor.shape[0] != rows:
            raise SchemaMismatchError(f"{what}: {tensor.shape[0]} tokens where {rows} are expected.")
    assert rows is not None
    return rows


class ExpertServer:
    """Serves `CALL` and `CALL_STREAM` for the experts of a host.

    `limited_by_peer` counts the gradients of each trainer that were scaled down, of the trainers limited lately.

    Args:
        experts: The held experts; the host changes it.
        worker: Computes `compute` on the device.
        cache_bytes: Size of the forward cache.
        max_inflight_bytes: Bound of the requests that arrive or are not answered yet.
        stall_s, upload_bytes_s: A request whose next chunk takes longer, or which arrives more slowly, is given up.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        experts: Mapping[str, ExpertBackend],
        worker: Worker,
        cache_bytes: int,
        max_inflight_bytes: int = 1 << 30,
        stall_s: float = 10.0,
        upload_bytes_s: float = 65536.0,
    ) -> None:
        self._stall_s = stall_s
        self._upload_bytes_s = upload_bytes_s
        self._runtime = endpoint.runtime
        self._experts = experts
        self._worker = worker
        self._graph_limit_bytes = cache_bytes // _GRAPH_SHARE
        self.cache = ForwardCache(cache_bytes)
        self.inflight = InflightBudget(max_inflight_bytes)
        self.stats = ServingStats()
        self.retiring: set[str] = set()
        """Experts that other hosts hold and this one is about to give up: they get no new forward passes here."""
        self.limited_by_peer: dict[PeerId, int] = {}
        endpoint.transport.serve(CALL, self._call)
        endpoint.transport.serve_stream(CALL_STREAM, self._call_stream)

    async def _call(self, context: CallContext, data: bytes) -> bytes:
        with self.inflight.hold(context.peer_id) as admit:
            meta, tensors = from_frame(data, _UNARY_LIMITS, admit)
            request = CallRequest.from_meta(meta)
            response, outputs = await self._answer(context.peer_id, request, tensors)
            return to_frame(response.to_meta(), outputs, request.reply_codec)

    async def _call_stream(self, context: CallContext, stream: ByteStream) -> None:
        """Any number of calls, one after the other."""
        while (first := await stream.receive()) is not None:
            with self.inflight.hold(context.peer_id) as hold:
                upload = _Upload(first, stream, self._stall_s, self._upload_bytes_s)

                def admit(nbytes: int, hold: Admit = hold, upload: _Upload = upload) -> None:
                    hold(nbytes)
                    upload.announced(nbytes)

                meta, tensors = await receive_tensors(upload, self._runtime, _STREAM_LIMITS, admit)
                request = CallRequest.from_meta(meta)
                ends_s = asyncio.get_running_loop().time() + request.timeout_s
                response, outputs = await self._answer(context.peer_id, request, tensors)
                del tensors
                try:
                    async with asyncio.timeout_at(max(ends_s, asyncio.get_running_loop().time() + self._stall_s)):
                        await send_tensors(stream, self._runtime, response.to_meta(), outputs, request.reply_codec)
                except TimeoutError as error:
                    raise CallTimeoutError("The caller did not take its answer in time.") from error

    async def _answer(
        self, peer_id: PeerId, request: CallRequest, tensors: Sequence[Tensor]
    ) -> tuple[CallResponse, list[Tensor]]:
        codec(request.reply_codec)
        self.stats.calls += 1
        admitted: list[Work | SwarmError] = []
        try:
            for part, its in zip(request.parts, request.split(tensors), strict=True):
                try:
                    admitted.append(self._admit(peer_id, request, part, its))
                except SwarmError as error:
                    admitted.append(error)
            if all(isinstance(a, HostBusyError) for a in admitted):
                assert isinstance(admitted[0], HostBusyError)
                raise admitted[0]
            works = [a for a in admitted if isinstance(a, Work)]
            for work in works:
                await work.future
        finally:
            # what a caller no longer waits for is dropped when its turn comes
            for a in admitted:
                if isinstance(a, Work) and not a.future.done():
                    a.future.cancel()
        parts: list[PartResponse] = []
        outputs: list[Tensor] = []
        for part, a in zip(request.parts, admitted, strict=True):
            result = a.future.result() if isinstance(a, Work) else a
            response, its = self._respond(peer_id, request, part, a, result)
            parts.append(response)
            outputs += its
        queue_s = max((w.queue_s for w in works), default=0.0)
        return CallResponse(tuple(parts), queue_s, sum(w.compute_s for w in works)), outputs

    def _admit(self, peer_id: PeerId, request: CallRequest, part: PartRequest, tensors: list[Tensor]) -> Work:
        """Check a part and queue it. Raises the part's error."""
        backend = self._experts.get(part.uid)
        if backend is None or (part.uid in self.retiring and request.direction == "forward"):
            raise UnknownExpertError(f"This host does not hold {part.uid}.", fix="Refresh the directory of experts.")
        if request.direction == "forward":
            job, tensors = self._forward_job(request, part, backend, tensors)
        else:
            job, tensors = self._backward_job(peer_id, part, backend, tensors)
        work = Work(
            key=BatchKey(
                part.uid,
                request.direction,
                request.train,
                request.grad_scale,
                tuple(tuple(t.shape[1:]) for t in tensors),
            ),
            tokens=tokens_of(tensors),
            expires_s=self._runtime.clock.time() + request.timeout_s,
            job=(backend, job),
            future=asyncio.get_running_loop().create_future(),
            caller=peer_id,
        )
        self._worker.submit(work)
        return work

    # both return the job, and all tensors whose sizes decide what it can be computed together with
    def _forward_job(
        self, request: CallRequest, part: PartRequest, backend: ExpertBackend, tensors: list[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        self.stats.forward_parts += 1
        rows = _fits(f"The inputs of {part.uid}", tensors, backend.profile.inputs)
        keep = request.train and backend.profile.graph_bytes * rows <= self._graph_limit_bytes
        return ForwardJob(part.request_id, tensors, request.train, keep), tensors

    def _backward_job(
        self, peer_id: PeerId, part: PartRequest, backend: ExpertBackend, tensors: list[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        self.stats.backward_parts += 1
        profile = backend.profile
        graph = None
        if part.with_inputs:
            inputs, grads = tensors[: len(profile.inputs)], tensors[len(profile.inputs) :]
            _fits(f"The inputs of {part.uid}", inputs, profile.inputs)
        else:
            cached = self.cache.take((peer_id, part.uid, part.request_id))
            if cached is None:
                raise UnknownRequestError("The inputs of this request are gone.", fix="Send them again (with_inputs).")
            (inputs, graph), grads = cached, tensors
        _fits(f"The gradients for {part.uid}", grads, profile.outputs, rows=inputs[0].shape[0])
        if graph is None:
            self.stats.recomputed_parts += 1
        job = BackwardJob(
            *(peer_id, part.request_id, inputs, grads, part.apply, graph, part.defer), checked=not part.with_inputs
        )
        return job, [*inputs, *grads]

    def _respond(
        self,
        peer_id: PeerId,
        request: CallRequest,
        part: PartRequest,
        admitted: Work | SwarmError,
        result: ForwardResult | BackwardResult | SwarmError,
    ) -> tuple[PartResponse, list[Tensor]]:
        backend = admitted.job[0] if isinstance(admitted, Work) else self._experts.get(part.uid)
        version = backend.weight_version if backend is not None else 0
        while backend is not None and backend.notices:
            self._runtime.emit(backend.notices.popleft())
        if isinstance(result, SwarmError):
            self.stats.failed_parts += 1
            self._runtime.emit(PartFailed(part.uid, str(peer_id), result.code, result.message))
            return PartResponse.failed(part, result, version), []
        if isinstance(result, ForwardResult):
            if request.train and isinstance(admitted, Work):
                rows = result.outputs[0].shape[0] if result.outputs else 0
                graph_bytes = admitted.job[0].profile.graph_bytes * rows
                entry = CachedForward(admitted.job[1].inputs, result.graph, graph_bytes)
                self.cache.put((peer_id, part.uid, part.request_id), entry)
            outputs, applied = result.outputs, False
        else:
            outputs, applied = result.grad_inputs, result.applied
            if result.limit != 1.0:
                self._limited(part.uid, peer_id, result.limit)
            if applied:
                self.stats.applied_parts += 1
                if not part.defer:
                    self.cache.drop_graphs(part.uid)
        return PartResponse(part.uid, part.request_id, n=len(outputs), applied=applied, weight_version=version), outputs

    def _limited(self, uid: str, peer_id: PeerId, factor: float) -> None:
        self.stats.limited_parts += 1
        counts = self.limited_by_peer
        counts[peer_id] = counts.pop(peer_id, 0) + 1
        if len(counts) > _MAX_COUNTED_PEERS:
            del counts[next(iter(counts))]
        self._runtime.emit(GradientLimited(uid, str(peer_id), factor))
