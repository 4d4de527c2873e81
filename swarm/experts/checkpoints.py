"""Experts on disk: the last few checkpoints of every expert that this host has held, within a budget of bytes.

Below `<data_dir>/experts/<run>/<expert>/`, in the format of `swarm.state.checkpoint`. Checkpoints of experts that the
host has given up stay until their room is needed: they may be all that is left one day. Everything here blocks on the
disk: call it on the codec pool. Thread-safe: one call waits for another.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.endpoint import Endpoint
from swarm.errors import CorruptStateError, MalformedFrameError, StateError, UnsupportedDtypeError
from swarm.events import EventStream
from swarm.experts.spec import parse_uid
from swarm.state.checkpoint import CheckpointInfo, list_checkpoints, load_checkpoint, remove_checkpoint, save_checkpoint
from swarm.state.snapshot import Snapshot

_RUN_CHARS = 16
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
"""Names that Windows keeps for devices, whatever follows the first dot."""
_OVERHEAD_BYTES = 1 << 16
"""More than a checkpoint takes besides its tensors, for experts of ordinary classes."""


def folder_name(uid: str) -> str:
    """A directory's name for an expert, different for different uids also where file names ignore case."""
    parse_uid(uid)
    lower = "".join(f"+{c.lower()}" if c.isupper() else c for c in uid)
    return f"++{lower}" if _RESERVED.fullmatch(lower) else lower


@dataclass(frozen=True, slots=True)
class _Kept:
    """One checkpoint in the index."""

    uid: str
    weight_version: int
    info: CheckpointInfo


class ExpertCheckpoints:
    """See the module's docstring.

    Args:
        data_dir: The peer's data directory.
        run_id: Checkpoints of other runs are left alone.
        kept: Checkpoints of one expert.
        max_bytes: Of all checkpoints of this run.
        events: Receives a `CheckpointCorrupt` for every damaged checkpoint that is passed over.
    """

    def __init__(self, data_dir: Path, run_id: bytes, kept: int, max_bytes: int, events: EventStream) -> None:
        self._path = data_dir / "experts" / run_id.hex()[:_RUN_CHARS]
        self._kept = kept
        self._max_bytes = max_bytes
        self._events = events
        self._index: dict[str, list[_Kept]] = {}
        self._lock = threading.Lock()

    def scan(self) -> None:
        """Find out what is on disk. Damaged checkpoints show when they are loaded."""
        index: dict[str, list[_Kept]] = {}
        folders = sorted(self._path.iterdir()) if self._path.is_dir() else []
        for folder in folders:
            found = [kept for info in list_checkpoints(folder) if (kept := _kept(info)) is not None]
            if found and folder.name == folder_name(found[0].uid):
                index[found[0].uid] = found
        with self._lock:
            self._index = index

    @property
    def versions(self) -> dict[str, int]:
        """The newest weight version on disk, by uid."""
        return {uid: kept[0].weight_version for uid, kept in list(self._index.items())}

    @property
    def nbytes(self) -> int:
        """Size of all checkpoints."""
        return sum(kept.info.nbytes for checkpoints in self._index.values() for kept in checkpoints)

    def save(self, snapshot: Snapshot, held: Collection[str]) -> None:
        """Write an expert's state, after making room for it.

        Args:
            snapshot: What `swarm.experts.replicas.capture` returned.
            held: Experts whose newest checkpoint must not make room for this one.

        Raises:
            StateError: There is no room, or the disk refused; the checkpoints before are intact.
        """
        uid = snapshot.metadata["uid"]
        folder = self._path / folder_name(uid)
        with self._lock:
            self._make_room(snapshot.nbytes + _OVERHEAD_BYTES, uid, held)
            save_checkpoint(folder, snapshot.tensors, snapshot.metadata, keep=self._kept)
            self._read(uid)

    def load(self, uid: str) -> Snapshot | None:
        """The newest intact checkpoint of an expert; none if there is none. What is damaged is removed."""
        folder = self._path / folder_name(uid)
        with self._lock:
            try:
                checkpoint = load_checkpoint(folder, self._events)
            except CorruptStateError:
                checkpoint = None  # each damaged file is an event already
            for info in list_checkpoints(folder):
                if checkpoint is not None and info.path == checkpoint.path:
                    break
                remove_checkpoint(info.path)
            self._read(uid)
        if checkpoint is None:
            return None
        try:
            return Snapshot.build(checkpoint.tensors, checkpoint.metadata)
        except (UnsupportedDtypeError, ValueError) as error:
            raise StateError(f"The checkpoint {checkpoint.path} cannot be used: {error}") from error

    def _read(self, uid: str) -> None:
        found = [kept for info in list_checkpoints(self._path / folder_name(uid)) if (kept := _kept(info)) is not None]
        if found:
            self._index[uid] = found
        else:
            self._index.pop(uid, None)

    def _make_room(self, nbytes: int, uid: str, held: Collection[str]) -> None:
        """Remove older checkpoints first, then those of experts that are not held, the oldest first."""
        excess = self.nbytes + nbytes - self._max_bytes
        # what the new checkpoint replaces leaves only after it is written
        older = [k for kept in self._index.values() for k in kept[1:]]
        foreign = [kept[0] for u, kept in self._index.items() if u not in held and u != uid]
        for candidates in (older, foreign):
            for kept in sorted(candidates, key=_saved_s):
                if excess <= 0:
                    return
                remove_checkpoint(kept.info.path)
                excess -= kept.info.nbytes
                self._read(kept.uid)
        if excess > 0:
            raise StateError(
                f"The checkpoint of {uid} does not fit: {self._max_bytes} bytes are allowed for all.",
                fix="Raise host.max_checkpoint_bytes, or hold fewer experts.",
            )


def checkpoints_of(endpoint: Endpoint) -> ExpertCheckpoints | None:
    """Where a peer keeps its experts; none if it has no data directory."""
    data_dir, config = endpoint.config.data_dir, endpoint.config.host
    if data_dir is None:
        return None
    events = endpoint.runtime.events
    return ExpertCheckpoints(data_dir, endpoint.run_id, config.checkpoints_kept, config.max_checkpoint_bytes, events)


def _saved_s(kept: _Kept) -> float:
    try:
        return kept.info.path.stat().st_mtime
    except OSError:
        return 0.0


def _kept(info: CheckpointInfo) -> _Kept | None:
    """A line of the index; none for a checkpoint of something else."""
    uid: Any = info.metadata.get("uid")
    version: Any = info.metadata.get("weight_version")
    try:
        parse_uid(uid)
    except MalformedFrameError:
        return None
    return _Kept(uid, version, info) if type(version) is int and 0 <= version < 1 << 62 else None
