"""State transfer: a peer publishes snapshots, another downloads one in verified chunks and resumes where it broke off.

The donor answers two methods: `Describe` with the manifest of what it publishes under a key, and `Chunks`, a stream on
which it sends the chunks that each request names. It holds one chunk per running download in memory, besides the
snapshot itself, and keeps a replaced snapshot for as long as somebody who asked about it may be downloading it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarm.endpoint import Endpoint
from swarm.errors import (
    CallTimeoutError,
    CorruptStateError,
    MalformedFrameError,
    MethodNotServedError,
    NetworkError,
    NoDonorError,
    PeerUnreachableError,
    RateLimitedError,
    SnapshotGoneError,
    TransferInterruptedError,
    TruncatedStreamError,
)
from swarm.events import Event
from swarm.identity import PeerId
from swarm.net.transport import ByteStream, CallContext, Contact, StreamMethod, UnaryMethod
from swarm.pb import state_pb2 as pb
from swarm.roles import Role
from swarm.runtime import Runtime
from swarm.state.snapshot import ChunkManifest, PartialSnapshot, Snapshot, to_ranges
from swarm.tensors.wire import Limits

__all__ = [
    "STATE_LIMITS",
    "ChunkRefetched",
    "PartialSnapshot",
    "Snapshot",
    "SnapshotStore",
    "StateFetched",
    "StateServed",
    "fetch_manifest",
    "fetch_snapshot",
]

_ROLES = frozenset({Role.HOST, Role.TRAINER})
DESCRIBE = UnaryMethod(
    "/swarm.pb.State/Describe", pb.SnapshotRequest, pb.SnapshotManifest, roles=_ROLES, max_bytes=32 << 20
)
CHUNKS = StreamMethod("/swarm.pb.State/Chunks", roles=_ROLES)

STATE_LIMITS = Limits(max_header_bytes=4 << 20, max_tensors=65536, max_payload_bytes=16 << 30)
"""What a download accepts unless the caller says otherwise."""

LEASE_S = 60.0
"""A replaced snapshot is served this long after somebody asked for its manifest or a chunk."""
MAX_UPLOADS = 8
"""Downloads served at once; more wait for their turn."""
MAX_UPLOADS_PER_PEER = 2
"""Downloads served at once to one peer, so that nobody takes all the turns."""
MAX_QUEUED_PER_PEER = 64
"""Downloads of one peer that run or wait; more are refused."""
VERIFY_WINDOW = 4
"""Chunks that are being verified while more arrive."""
_MAX_KEY_CHARS = 256
_ID_BYTES = 32

Progress = Callable[[int, int], None]
"""Called on the loop with verified and total bytes."""


@dataclass(frozen=True, slots=True)
class StateServed(Event):
    """A download from us ended, completely or not."""

    key: str
    to_peer: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateFetched(Event):
    """A snapshot was downloaded and verified."""

    key: str
    donor: str
    snapshot_id: str
    nbytes: int
    reused_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkRefetched(Event):
    """A chunk did not match its hash and was asked for again."""

    key: str
    donor: str
    index: int
    reason: str


class _Published:
    """A snapshot under its key, and until when somebody may still be downloading it."""

    __slots__ = ("key", "lease_until_s", "snapshot")

    def __init__(self, key: str, snapshot: Snapshot) -> None:
        self.key = key
        self.snapshot = snapshot
        self.lease_until_s = 0.0


class _PeerQueue:
    """The turns of one downloading peer."""

    __slots__ = ("turn", "users")

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(MAX_UPLOADS_PER_PEER)
        self.users = 0


class SnapshotStore:
    """Publishes snapshots of this peer and serves them to others. Publishing is thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._runtime: Runtime = endpoint.runtime
        self._patience_s = endpoint.config.deadline.cap_s
        self._lock = threading.Lock()
        self._current: dict[str, _Published] = {}
        self._replaced: dict[str, _Published] = {}
        self._slots = asyncio.Semaphore(MAX_UPLOADS)
        self._queues: dict[PeerId, _PeerQueue] = {}
        endpoint.transport.serve(DESCRIBE, self._describe)
        endpoint.transport.serve_stream(CHUNKS, self._chunks)

    def publish(self, key: str, snapshot: Snapshot) -> None:
        """Offer a snapshot under a key in place of the one before. The snapshot's tensors must not change any more.

        Raises:
            ValueError: The key is empty or longer than 256 characters.
        """
        if not 0 < len(key) <= _MAX_KEY_CHARS:
            raise ValueError(f"A key has 1 to {_MAX_KEY_CHARS} characters, not {len(key)}.")
        now = self._runtime.clock.time()
        with self._lock:
            before = self._current.get(key)
            self._current[key] = _Published(key, snapshot)
            if before is not None and before.lease_until_s > now:
                self._replaced[key] = before
            self._expire(now)

    def withdraw(self, key: str) -> None:
        """Stop offering a key. Downloads that are running end normally."""
        with self._lock:
            self._current.pop(key, None)
            self._replaced.pop(key, None)

    def get(self, key: str) -> Snapshot | None:
        """The snapshot that is offered under a key."""
        with self._lock:
            published = self._current.get(key)
        return published.snapshot if published is not None else None

    def keys(self) -> list[str]:
        """Keys on offer, in the order they were first published."""
        with self._lock:
            return list(self._current)

    def _expire(self, now: float) -> None:
        for key in [k for k, p in self._replaced.items() if p.lease_until_s <= now]:
            del self._replaced[key]

    async def _describe(self, context: CallContext, request: pb.SnapshotRequest) -> pb.SnapshotManifest:
        now = self._runtime.clock.time()
        with self._lock:
            self._expire(now)
            published = self._current.get(request.key)
            if published is not None:
                published.lease_until_s = now + LEASE_S
        if published is None:
            raise NoDonorError(f"This peer publishes no snapshot under {request.key[:80]!r}.")
        snapshot = published.snapshot
        manifest = snapshot.manifest if snapshot.is_hashed else await self._runtime.offload(_manifest_of, snapshot)
        published.lease_until_s = self._runtime.clock.time() + LEASE_S
        return manifest.to_pb()

    def _find(self, snapshot_id: bytes) -> _Published:
        now = self._runtime.clock.time()
        with self._lock:
            self._expire(now)
            for published in (*self._current.values(), *self._replaced.values()):
                # Whoever asks for an id was told it, so the hash is there already.
                if published.snapshot.is_hashed and published.snapshot.manifest.id == snapshot_id:
                    published.lease_until_s = now + LEASE_S
                    return published
        raise SnapshotGoneError(
            "This peer no longer serves the snapshot.", fix="Ask for the manifest again: matching chunks are kept."
        )

    async def _chunks(self, context: CallContext, stream: ByteStream) -> None:
        queue = self._queues.setdefault(context.peer_id, _PeerQueue())
        if queue.users >= MAX_QUEUED_PER_PEER:
            raise RateLimitedError(f"{MAX_QUEUED_PER_PEER} downloads of this peer are running or waiting already.")
        queue.users += 1
        try:
            async with queue.turn, self._slots:
                await self._serve(context, stream)
        finally:
            queue.users -= 1
            if not queue.users:
                del self._queues[context.peer_id]

    async def _serve(self, context: CallContext, stream: ByteStream) -> None:
        """Answer requests until the other side is done. A side that neither asks nor reads loses its slot."""
        sent, key = 0, ""
        try:
            while True:
                async with asyncio.timeout(self._patience_s):
                    message = await stream.receive()
                if message is None:
                    return
                snapshot_id, indexes_of = _parse_request(message)
                published = self._find(snapshot_id)
                key = published.key
                for index in indexes_of(published.snapshot.manifest.chunk_count):
                    chunk = published.snapshot.chunk(index)
                    async with asyncio.timeout(self._patience_s):
                        await stream.send(chunk)
                    sent += len(chunk)
        except TimeoutError as error:
            raise CallTimeoutError(f"Nothing was asked for or read for {self._patience_s:.0f} s.") from error
        finally:
            if key:
                self._runtime.emit(StateServed(key=key, to_peer=str(context.peer_id), nbytes=sent))


def _manifest_of(snapshot: Snapshot) -> ChunkManifest:
    return snapshot.manifest


def _parse_request(message: bytes) -> tuple[bytes, Callable[[int], list[int]]]:
    try:
        request = pb.ChunksRequest.FromString(message)
    except DecodeError as error:
        raise MalformedFrameError("A request for chunks cannot be parsed.") from error
    if len(request.snapshot_id) != _ID_BYTES:
        raise MalformedFrameError("A request for chunks names no snapshot.")

    def indexes(chunk_count: int) -> list[int]:
        """Checked against the snapshot before anything is built, so that a request costs at most one list of it."""
        total = 0
        for span in request.ranges:
            total += span.count
            if span.first + span.count > chunk_count or total > chunk_count:
                raise MalformedFrameError(f"A request for chunks beyond the {chunk_count} of the snapshot.")
        return [i for span in request.ranges for i in range(span.first, span.first + span.count)]

    return request.snapshot_id, indexes


async def fetch_snapshot(
    endpoint: Endpoint,
    donor: Contact,
    key: str,
    *,
    limits: Limits = STATE_LIMITS,
    timeout_s: float,
    resume: PartialSnapshot | None = None,
    progress: Progress | None = None,
) -> Snapshot:
    """Download what a donor publishes under a key; every chunk is verified on arrival.

    Args:
        limits: Largest content, metadata and number of tensors accepted; checked before memory is allocated.
        timeout_s: Cap of the whole transfer; a donor that sends nothing for the deadline's cap is given up earlier.
        resume: What an earlier attempt left, or an empty one to be left with something on any failure (also when
            cancelled). Chunks whose hash is still the same are not fetched again.
        progress: Called with verified and total bytes after every chunk.

    Raises:
        NoDonorError: The donor cannot be reached or publishes nothing under the key.
        SnapshotGoneError: The donor replaced the snapshot and dropped it meanwhile; try again with `resume`.
        TransferInterruptedError: The stream broke or stalled; try again with `resume`.
        CorruptStateError: A chunk did not match its hash twice.
        WireError: The manifest is malformed or exceeds the limits.
    """
    partial = resume if resume is not None else PartialSnapshot()
    started = endpoint.runtime.clock.time()
    try:
        async with asyncio.timeout(timeout_s):
            manifest = await fetch_manifest(endpoint, donor, key, limits, timeout_s)
            partial.begin(manifest)
            reused = partial.done_bytes
            if progress is not None:
                progress(reused, partial.total_bytes)
            if partial.missing:
                await _Download(endpoint, donor, key, manifest, partial, progress).run(timeout_s)
    except TimeoutError as error:
        raise TransferInterruptedError(
            f"The download of {key!r} took longer than {timeout_s:.0f} s.", fix="Try again with `resume`."
        ) from error
    snapshot = partial.to_snapshot()
    seconds = endpoint.runtime.clock.time() - started
    endpoint.runtime.emit(StateFetched(key, str(donor.peer_id), snapshot.id, snapshot.nbytes, reused, seconds))
    return snapshot


async def fetch_manifest(
    endpoint: Endpoint, donor: Contact, key: str, limits: Limits, timeout_s: float
) -> ChunkManifest:
    """What a donor publishes under a key, without its content.

    Raises:
        NoDonorError: The donor cannot be reached or publishes nothing under the key.
        WireError: The manifest is malformed or exceeds the limits.
    """
    try:
        described = await endpoint.transport.call(donor, DESCRIBE, pb.SnapshotRequest(key=key), timeout_s=timeout_s)
    except (PeerUnreachableError, MethodNotServedError, CallTimeoutError) as error:
        raise NoDonorError(
            f"{donor.peer_id.short} cannot give {key!r}: {error.message}", fix="Ask another peer."
        ) from error
    return await endpoint.runtime.offload(ChunkManifest.from_pb, described, limits)


class _Download:
    """The chunks of one snapshot from one donor."""

    def __init__(
        self,
        endpoint: Endpoint,
        donor: Contact,
        key: str,
        manifest: ChunkManifest,
        partial: PartialSnapshot,
        progress: Progress | None,
    ) -> None:
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._donor = donor
        self._key = key
        self._manifest = manifest
        self._partial = partial
        self._progress = progress
        self._patience_s = endpoint.config.deadline.cap_s

    async def run(self, timeout_s: float) -> None:
        """Fetch what is missing, corrupt chunks a second time."""
        try:
            async with self._endpoint.transport.stream(self._donor, CHUNKS, timeout_s=timeout_s) as stream:
                corrupt = await self._receive(stream, self._partial.missing)
                for index in corrupt:
                    self._runtime.emit(
                        ChunkRefetched(self._key, str(self._donor.peer_id), index, "the chunk does not match its hash")
                    )
                if corrupt:
                    corrupt = await self._receive(stream, corrupt)
                await stream.finish()
        except (NetworkError, TruncatedStreamError) as error:
            raise TransferInterruptedError(
                f"The download of {self._key!r} from {self._donor.peer_id.short} broke off after "
                f"{self._partial.done_bytes} of {self._partial.total_bytes} bytes: {error.message}",
                fix="Try again with `resume`.",
            ) from error
        if corrupt:
            raise CorruptStateError(
                f"{len(corrupt)} chunks of {self._key!r} from {self._donor.peer_id.short} do not match their hashes, "
                "also when fetched again.",
                fix="Take the state from another donor.",
            )

    async def _receive(self, stream: ByteStream, indexes: Sequence[int]) -> list[int]:
        """Ask for chunks and place them; returns those that are corrupt."""
        request = pb.ChunksRequest(snapshot_id=self._manifest.id, ranges=to_ranges(indexes))
        await stream.send(request.SerializeToString())
        verifying: deque[tuple[int, asyncio.Task[bool]]] = deque()
        corrupt: list[int] = []
        try:
            for index in indexes:
                try:
                    async with asyncio.timeout(self._patience_s):
                        chunk = await stream.receive()
                except TimeoutError as error:
                    raise CallTimeoutError(f"Nothing arrived for {self._patience_s:.0f} s.") from error
                if chunk is None:
                    raise TruncatedStreamError(f"The donor ended the stream before chunk {index}.")
                verifying.append((index, asyncio.create_task(self._runtime.offload(self._partial.place, index, chunk))))
                if len(verifying) >= VERIFY_WINDOW:
                    await self._verify_oldest(verifying, corrupt)
            while verifying:
                await self._verify_oldest(verifying, corrupt)
        finally:
            # Threads of the pool write into the partial snapshot: it is the caller's again only when they are done.
            if verifying:
                await asyncio.wait([task for _, task in verifying])
        return corrupt

    async def _verify_oldest(self, verifying: deque[tuple[int, asyncio.Task[bool]]], corrupt: list[int]) -> None:
        index, task = verifying[0]
        placed = await asyncio.shield(task)
        verifying.popleft()
        if not placed:
            corrupt.append(index)
        elif self._progress is not None:
            self._progress(self._partial.done_bytes, self._partial.total_bytes)
