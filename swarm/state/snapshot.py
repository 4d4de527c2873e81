"""Snapshots without I/O: tensors and metadata in one buffer, cut into hashed chunks, rebuilt chunk by chunk elsewhere.

The id of a snapshot is the hash of its chunk hashes, layout and metadata. Peers that hold bit-identical state therefore
hold snapshots of one id, and a chunk from any of them fits.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
import torch
from torch import Tensor

from swarm.errors import FrameTooLargeError, MalformedFrameError, UnsupportedDtypeError
from swarm.pb import state_pb2 as pb
from swarm.tensors.header import Limits, checked_numel
from swarm.tensors.memory import allocate
from swarm.tensors.schema import TensorMeta, dtype_name, parse_dtype

HASH_BYTES = 32
ALIGNMENT = 64
DEFAULT_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES = 1024
MAX_CHUNK_BYTES = 4 << 20
MAX_NAME_CHARS = 512


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Which tensors a snapshot holds, in order, and where each lies in its bytes."""

    entries: tuple[tuple[str, TensorMeta], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor."""
        starts, end = [], 0
        for _, meta in self.entries:
            starts.append(_aligned(end))
            end = starts[-1] + meta.nbytes
        return tuple(starts)

    @cached_property
    def nbytes(self) -> int:
        """Size of the content, gaps included."""
        return self.offsets[-1] + self.entries[-1][1].nbytes if self.entries else 0

    def canonical(self) -> bytes:
        """The bytes that are hashed."""
        rows = [[name, dtype_name(meta.dtype), list(meta.shape)] for name, meta in self.entries]
        packed: bytes = msgpack.packb(rows)
        return packed

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors as views of a buffer of `nbytes` bytes."""
        return {
            name: buffer[start : start + meta.nbytes].view(meta.dtype).view(meta.shape)
            for (name, meta), start in zip(self.entries, self.offsets, strict=True)
        }


@dataclass(frozen=True)
class ChunkManifest:
    """Everything about a snapshot but its content."""

    layout: Layout
    metadata_json: bytes
    chunk_bytes: int
    chunk_hashes: bytes

    @cached_property
    def id(self) -> bytes:
        """SHA-256 over layout, metadata, chunk size and chunk hashes."""
        layout = self.layout.canonical()
        digest = hashlib.sha256(b"swarm/snapshot/1\0")
        digest.update(struct.pack("<IQQQ", self.chunk_bytes, self.layout.nbytes, len(layout), len(self.metadata_json)))
        digest.update(layout + self.metadata_json + self.chunk_hashes)
        return digest.digest()

    @property
    def chunk_count(self) -> int:
        return -(-self.layout.nbytes // self.chunk_bytes)

    def span(self, index: int) -> slice:
        """The bytes of a chunk."""
        start = index * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.layout.nbytes))

    def chunk_hash(self, index: int) -> bytes:
        return self.chunk_hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def metadata(self) -> dict[str, Any]:
        """The metadata as plain values. Raises `MalformedFrameError`."""
        try:
            values = json.loads(self.metadata_json, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise MalformedFrameError(f"A snapshot's metadata is not JSON: {str(error)[:100]}.") from error
        if not isinstance(values, dict):
            raise MalformedFrameError("A snapshot's metadata is not a JSON object.")
        return values

    def to_pb(self) -> pb.SnapshotManifest:
        return pb.SnapshotManifest(
            id=self.id,
            tensors=[
                pb.TensorEntry(name=name, dtype=dtype_name(meta.dtype), shape=meta.shape)
                for name, meta in self.layout.entries
            ],
            metadata_json=self.metadata_json,
            chunk_bytes=self.chunk_bytes,
            chunk_hashes=self.chunk_hashes,
        )

    @classmethod
    def from_pb(cls, message: pb.SnapshotManifest, limits: Limits) -> ChunkManifest:
        """Check a manifest that a peer sent; nothing is allocated for content before.

        Raises:
            FrameTooLargeError: More tensors, metadata or content than `limits` allows.
            MalformedFrameError: Fields contradict each other or cannot be.
            UnsupportedDtypeError: A dtype is unknown here.
        """
        if len(message.tensors) > limits.max_tensors:
            raise FrameTooLargeError(
                f"A snapshot of {len(message.tensors)} tensors; {limits.max_tensors} are accepted."
            )
        if len(message.metadata_json) > limits.max_header_bytes:
            raise FrameTooLargeError(f"A snapshot with {len(message.metadata_json)} bytes of metadata.")
        if not MIN_CHUNK_BYTES <= message.chunk_bytes <= MAX_CHUNK_BYTES:
            raise MalformedFrameError(f"A snapshot with chunks of {message.chunk_bytes} bytes.")
        entries: dict[str, TensorMeta] = {}
        for entry in message.tensors:
            if entry.name in entries or len(entry.name) > MAX_NAME_CHARS:
                raise MalformedFrameError(f"A snapshot names {entry.name[:60]!r} twice or too long.")
            shape = list(entry.shape)
            checked_numel(shape)
            entries[entry.name] = TensorMeta(tuple(shape), parse_dtype(entry.dtype))
        layout = Layout(tuple(entries.items()))
        if layout.nbytes > limits.max_payload_bytes:
            raise FrameTooLargeError(
                f"A snapshot of {layout.nbytes} bytes; at most {limits.max_payload_bytes} are accepted.",
                fix="Raise the limit if this is the state you want.",
            )
        manifest = cls(layout, message.metadata_json, message.chunk_bytes, message.chunk_hashes)
        if len(manifest.chunk_hashes) != manifest.chunk_count * HASH_BYTES:
            raise MalformedFrameError("A snapshot's chunk hashes do not belong to its size.")
        if manifest.id != message.id:
            raise MalformedFrameError("A snapshot's id is not the hash of its manifest.")
        manifest.metadata()
        return manifest


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Metadata as JSON, the same bytes for equal values. Raises `ValueError` for what JSON cannot carry."""
    try:
        return json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except TypeError as error:
        raise ValueError(f"The metadata of a snapshot must be JSON values: {error}.") from error


class Snapshot:
    """Tensors and metadata at one moment. Its content must not be written to once it is published. Thread-safe.

    Attributes:
        metadata: Plain JSON values.
        tensors: Views of the snapshot's own memory, by name, on the CPU.
    """

    def __init__(
        self,
        layout: Layout,
        metadata: dict[str, Any],
        buffer: Tensor,
        chunk_bytes: int,
        manifest: ChunkManifest | None = None,
    ) -> None:
        self.metadata = metadata
        self.tensors: dict[str, Tensor] = layout.views(buffer)
        self._layout = layout
        self._metadata_json = manifest.metadata_json if manifest is not None else encode_metadata(metadata)
        self._chunk_bytes = chunk_bytes
        self._buffer = buffer
        self._view = buffer.numpy().data
        self._manifest = manifest
        self._lock = threading.Lock()

    @classmethod
    def build(
        cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Snapshot:
        """Copy tensors (any layout and device) into a new snapshot: about 0.1 ms per MiB. Hashing waits.

        Args:
            tensors: By name, in the order that the snapshot keeps.
            metadata: Values that JSON can carry.
            chunk_bytes: Unit of transfer and verification.

        Raises:
            UnsupportedDtypeError: A tensor cannot travel.
            ValueError: Metadata, a name or the chunk size cannot be used.
        """
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}, not {chunk_bytes}.")
        for name, tensor in tensors.items():
            dtype_name(tensor.dtype)
            if tensor.layout is not torch.strided or tensor.is_meta:
                raise UnsupportedDtypeError(f"{name!r} is no dense tensor that holds data.")
            if len(name) > MAX_NAME_CHARS:
                raise ValueError(f"The name {name[:40]!r}... is longer than {MAX_NAME_CHARS} characters.")
        layout = Layout(tuple((name, TensorMeta.of(tensor)) for name, tensor in tensors.items()))
        buffer = allocate(layout.nbytes)
        end = 0
        for (name, meta), start in zip(layout.entries, layout.offsets, strict=True):
            buffer[end:start].zero_()
            end = start + meta.nbytes
            buffer[start:end].view(meta.dtype).view(meta.shape).copy_(tensors[name].detach())
        return cls(layout, dict(metadata), buffer, chunk_bytes)

    def first(self, count: int, metadata: Mapping[str, Any]) -> Snapshot:
        """The first `count` tensors as a snapshot of their own, in the same memory."""
        layout = Layout(self._layout.entries[:count])
        return Snapshot(layout, dict(metadata), self._buffer[: layout.nbytes], self._chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Size of the content."""
        return self._layout.nbytes

    @property
    def manifest(self) -> ChunkManifest:
        """Layout and hashes. The first call hashes everything, about 0.7 ms per MiB: make it on the codec pool."""
        with self._lock:
            if self._manifest is None:
                spans = range(0, self.nbytes, self._chunk_bytes)
                hashes = b"".join(
                    hashlib.sha256(self._view[start : start + self._chunk_bytes]).digest() for start in spans
                )
                self._manifest = ChunkManifest(self._layout, self._metadata_json, self._chunk_bytes, hashes)
            return self._manifest

    @property
    def is_hashed(self) -> bool:
        """Whether `manifest` and `id` are at hand without work."""
        return self._manifest is not None

    @property
    def id(self) -> str:
        """Hash of the chunk hashes, layout and metadata, in hex. Equal for bit-identical state. Hashes at first."""
        return self.manifest.id.hex()

    def chunk(self, index: int) -> bytes:
        """A copy of one chunk."""
        return bytes(self._view[index * self._chunk_bytes : (index + 1) * self._chunk_bytes])


class PartialSnapshot:
    """A snapshot that is arriving. Outlives a broken transfer: the next one fetches what is missing."""

    def __init__(self) -> None:
        self._manifest: ChunkManifest | None = None
        self._buffer: Tensor | None = None
        self._view = memoryview(b"")
        self._have = bytearray()
        self._done_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, snapshot: Snapshot) -> PartialSnapshot:
        """A copy of one that is here, so that only chunks that differ need to arrive. Hashes what is not hashed."""
        partial = cls()
        partial.begin(snapshot.manifest)
        for index in range(snapshot.manifest.chunk_count):
            span = snapshot.manifest.span(index)
            partial._view[span] = snapshot.chunk(index)
            partial._mark(index, span)
        return partial

    def begin(self, manifest: ChunkManifest) -> None:
        """Expect this snapshot; chunks that are here already and have the same hash are kept."""
        before, had = self._manifest, self._have
        same = before is not None and (before.layout.nbytes, before.chunk_bytes) == (
            manifest.layout.nbytes,
            manifest.chunk_bytes,
        )
        self._manifest = manifest
        self._have = bytearray(manifest.chunk_count)
        self._done_bytes = 0
        if before is not None and same and self._buffer is not None:
            for index in range(manifest.chunk_count):
                if had[index] and before.chunk_hash(index) == manifest.chunk_hash(index):
                    self._mark(index, manifest.span(index))
            return
        self._buffer = allocate(manifest.layout.nbytes)
        self._view = self._buffer.numpy().data

    @property
    def missing(self) -> list[int]:
        """Chunks that have not arrived."""
        return [i for i, here in enumerate(self._have) if not here]

    @property
    def done_bytes(self) -> int:
        """Verified content."""
        return self._done_bytes

    @property
    def total_bytes(self) -> int:
        return self._manifest.layout.nbytes if self._manifest is not None else 0

    def place(self, index: int, chunk: bytes) -> bool:
        """Verify a chunk and put it where it belongs; false, and nothing changed, if its hash or size is wrong.

        About 0.7 ms per MiB: call it on the codec pool. Thread-safe for different chunks.
        """
        manifest = self._manifest
        assert manifest is not None
        span = manifest.span(index)
        if len(chunk) != span.stop - span.start or hashlib.sha256(chunk).digest() != manifest.chunk_hash(index):
            return False
        self._view[span] = chunk
        with self._lock:
            self._mark(index, span)
        return True

    def _mark(self, index: int, span: slice) -> None:
        if not self._have[index]:
            self._have[index] = 1
            self._done_bytes += span.stop - span.start

    def to_snapshot(self) -> Snapshot:
        """The complete snapshot, which takes the memory over.

        Raises:
            MalformedFrameError: A bool tensor holds bytes other than 0 and 1.
        """
        manifest, buffer = self._manifest, self._buffer
        assert manifest is not None
        assert buffer is not None
        assert not self.missing
        for (_, meta), start in zip(manifest.layout.entries, manifest.layout.offsets, strict=True):
            raw = buffer[start : start + meta.nbytes]
            if meta.dtype is torch.bool and raw.numel() and int(raw.max()) > 1:
                raise MalformedFrameError("A bool tensor of a snapshot holds bytes other than 0 and 1.")
        snapshot = Snapshot(manifest.layout, manifest.metadata(), buffer, manifest.chunk_bytes, manifest)
        self._manifest = self._buffer = None
        self._view = memoryview(b"")
        self._have = bytearray()
        self._done_bytes = 0
        return snapshot


def to_ranges(indexes: Sequence[int]) -> list[pb.ChunkRange]:
    """Ascending indexes as ranges."""
    ranges: list[pb.ChunkRange] = []
    for index in indexes:
        if ranges and ranges[-1].first + ranges[-1].count == index:
            ranges[-1].count += 1
        else:
            ranges.append(pb.ChunkRange(first=index, count=1))
    return ranges
