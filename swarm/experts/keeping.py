"""Keeps the held experts beyond the death of all their holders: saves them at intervals, finds the newest copy again.

A host announces the checkpoints that are ahead of what it holds (`HostRecord.kept`). Whoever takes an expert copies it
from a live holder; if there is none, from the newest checkpoint, its own or another host's; only if nobody has anything
does the expert start anew. What a host has taken is *provisional* for a while: it may have been restored or started
anew, here or where it was copied from, and hosts that return later may bring a newer checkpoint; that replaces it then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from swarm.endpoint import Endpoint
from swarm.errors import HostBusyError, MalformedFrameError, NoDonorError, StateError, SwarmError, UnknownExpertError
from swarm.events import Event
from swarm.experts.backend import ExpertBackend
from swarm.experts.checkpoints import ExpertCheckpoints
from swarm.experts.overview import keepers_of
from swarm.experts.protocol import CALLERS
from swarm.experts.records import HostRecord
from swarm.experts.replicas import capture, transfer_bounds
from swarm.experts.spec import parse_uid
from swarm.experts.syncing import NEVER, ReplicaExchange
from swarm.experts.workers import Worker
from swarm.net.transport import CallContext, Contact, UnaryMethod
from swarm.state.transfer import Snapshot, SnapshotStore, fetch_snapshot
from swarm.tensors.wire import Limits, from_frame, to_frame

OFFER_KEPT: UnaryMethod[bytes, bytes] = UnaryMethod(
    "/swarm.pb.Experts/OfferKept", bytes, bytes, roles=CALLERS, adaptive=False
)
"""Ask a host to publish its checkpoint of an expert that it need not hold as a snapshot."""

MAX_ANNOUNCED = 1024
"""Checkpoints that a host announces."""
PROVISIONAL_TTLS = 10
"""Lifetimes of a host's record for which an expert just taken gives way to a newer checkpoint."""
_MAX_OFFERED = 4
_KEEP_OFFERS_S = 60.0
_BUSY_S = 10.0
_FRAME_LIMITS = Limits(max_header_bytes=4096, max_tensors=0, max_payload_bytes=0)


@dataclass(frozen=True, slots=True)
class ExpertSaved(Event):
    """An expert was written to disk."""

    uid: str
    weight_version: int


@dataclass(frozen=True, slots=True)
class ExpertNotSaved(Event):
    """An expert could not be written to disk; its checkpoints before are intact, and it is tried again."""

    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExpertRestored(Event):
    """An expert without live holders goes on from a checkpoint; `source` is `disk` or the host that had it."""

    uid: str
    weight_version: int
    source: str


@dataclass(frozen=True, slots=True)
class ExpertNotRestored(Event):
    """A checkpoint could not be used; an older one, or another host's, is tried."""

    uid: str
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExpertLost(Event):
    """An expert starts anew, although it had come to `known_version`: no holder lives, and nobody has a checkpoint."""

    uid: str
    known_version: int


def kept_key(uid: str) -> str:
    """The key under which a host publishes its checkpoint of an expert."""
    return f"kept/{uid}"


class ExpertKeeper:
    """See the module's docstring. Lives on the event loop; the disk is used on the codec pool.

    Args:
        experts: The held experts; the host changes it.
        checkpoints: Where they are saved; none saves nothing, but restores from others.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: SnapshotStore,
        worker: Worker,
        replicas: ReplicaExchange,
        experts: Mapping[str, ExpertBackend],
        checkpoints: ExpertCheckpoints | None,
    ) -> None:
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._store = store
        self._worker = worker
        self._replicas = replicas
        self._experts = experts
        self._checkpoints = checkpoints
        self._disk = asyncio.Lock()
        self._saved: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._provisional: dict[str, float] = {}
        self._offered: dict[str, float] = {}
        endpoint.transport.serve(OFFER_KEPT, self._offer)

    async def start(self) -> None:
        """Find out which checkpoints are on disk."""
        if self._checkpoints is not None:
            try:
                await self._runtime.offload(self._checkpoints.scan)
            except OSError as error:
                raise StateError(
                    f"The checkpoints cannot be read: {error}.", fix="Check the permissions of data_dir."
                ) from error
            self._saved = self._checkpoints.versions

    @property
    def kept(self) -> dict[str, int]:
        """Checkpoints that are ahead of what this host holds, to be announced."""
        ahead = {u: v for u, v in sorted(self._saved.items()) if v > self._version_of(u)}
        return dict(list(ahead.items())[:MAX_ANNOUNCED])

    def _version_of(self, uid: str) -> int:
        backend = self._experts.get(uid)
        return backend.weight_version if backend is not None else NEVER

    def observe(self, hosts: Sequence[HostRecord]) -> None:
        """Remember how far experts have come, so that a loss shows."""
        for host in hosts:
            for versions in (host.experts, host.kept):
                for uid, version in versions.items():
                    if version > self._known.get(uid, 0):
                        self._known[uid] = version

    # ---- saving

    async def save(self) -> None:
        """Write every held expert that has changed since its last checkpoint, one after the other."""
        self.sweep()
        await self._save(sorted(self._experts))

    async def save_new(self) -> None:
        """Write the held experts that are not on this disk yet, so that they need not wait for the interval."""
        await self._save([uid for uid in sorted(self._experts) if uid not in self._saved])

    async def _save(self, uids: Sequence[str]) -> None:
        if self._checkpoints is None:
            return
        for uid in uids:
            backend = self._experts.get(uid)
            if backend is None or backend.weight_version <= max(0, self._saved.get(uid, 0)):
                continue
            try:
                snapshot = await self._worker.call(partial(capture, backend))
                async with self._disk:
                    await self._runtime.offload(self._checkpoints.save, snapshot, frozenset(self._experts))
            except SwarmError as error:
                self._runtime.emit(ExpertNotSaved(uid, error.message))
            except RuntimeError as error:  # out of memory, mostly
                self._runtime.emit(ExpertNotSaved(uid, f"{type(error).__name__}: {str(error)[:200]}"))
            else:
                self._runtime.emit(ExpertSaved(uid, snapshot.metadata["weight_version"]))
            self._saved = self._checkpoints.versions

    async def save_within(self, timeout_s: float) -> None:
        """The same with an end; what was not reached keeps the checkpoint that it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.save()
        except TimeoutError:
            for uid, backend in sorted(self._experts.items()):
                if backend.weight_version > max(0, self._saved.get(uid, 0)):
                    self._runtime.emit(ExpertNotSaved(uid, "There was no time left."))

    # ---- taking

    async def fill(self, backend: ExpertBackend, donors: Sequence[HostRecord], keepers: Sequence[HostRecord]) -> str:
        """Bring a new expert to the newest state there is.

        Args:
            backend: With its initial weights.
            donors: Its live holders, the most advanced first.
            keepers: Hosts that announce checkpoints of it, the most advanced first.

        Returns:
            The host that it was copied from, `disk`, or nothing if it keeps its initial weights.

        Raises:
            NoDonorError: There are holders, or checkpoints, and none could be copied; it is tried again.
        """
        uid = backend.uid
        window_s = PROVISIONAL_TTLS * self._endpoint.config.host.announce_ttl_s
        self._provisional[uid] = self._runtime.clock.time() + window_s
        if donors:
            donor = await self._replicas.copy(backend, donors, NEVER)
            return str(donor.peer_id) if donor is not None else ""
        source = await self._restore(backend, keepers, NEVER)
        if not source and any(uid in host.kept for host in keepers):
            raise NoDonorError(f"No checkpoint of {uid} could be fetched.", fix="It is tried again.")
        if not source and self._known.get(uid, 0) > 0:
            self._runtime.emit(ExpertLost(uid, self._known[uid]))
        return source

    async def catch_up(self, hosts: Sequence[HostRecord]) -> list[str]:
        """Replace provisional experts of which a newer checkpoint has turned up, unless somebody lives who is ahead.

        Returns:
            The experts that changed.
        """
        now_s, changed = self._runtime.clock.time(), []
        newest = dict(self._saved)
        for host in hosts if self._provisional else ():
            for uid, version in host.kept.items():
                newest[uid] = max(version, newest.get(uid, NEVER))
        for uid, until_s in list(self._provisional.items()):
            backend = self._experts.get(uid)
            if now_s > until_s:
                del self._provisional[uid]
            if backend is None or now_s > until_s or newest.get(uid, NEVER) <= backend.weight_version:
                continue
            live = max((h.experts[uid] for h in hosts if uid in h.experts), default=NEVER)
            have = max(live, backend.weight_version)
            if await self._restore(backend, keepers_of(uid, hosts), have):
                changed.append(uid)
        return changed

    async def _restore(self, backend: ExpertBackend, keepers: Sequence[HostRecord], have: int) -> str:
        """Restore the newest checkpoint above `have`, its source tells which; nothing if there is none."""
        uid = backend.uid
        others = [host for host in keepers if host.kept.get(uid, NEVER) > have]
        own = self._saved.get(uid, NEVER)
        sources: list[HostRecord | None] = [h for h in others if h.kept[uid] > own]
        if own > have:
            sources.append(None)  # our own disk
        sources += [h for h in others if h.kept[uid] <= own]
        for source in sources:
            name = "disk" if source is None else str(source.peer_id)
            try:
                snapshot = await self._load(uid) if source is None else await self._fetch(backend, source, have)
                await self._replicas.start_from(backend, snapshot)
            except SwarmError as error:
                self._runtime.emit(ExpertNotRestored(uid, name, error.message))
                continue
            self._runtime.emit(ExpertRestored(uid, backend.weight_version, name))
            return name
        return ""

    async def _load(self, uid: str) -> Snapshot:
        snapshot = None
        if self._checkpoints is not None:
            try:
                async with self._disk:
                    snapshot = await self._runtime.offload(self._checkpoints.load, uid)
            finally:
                self._saved = self._checkpoints.versions
        if snapshot is None:
            raise StateError(f"No checkpoint of {uid} on this disk is intact.", fix="Another host's is used.")
        return snapshot

    # ---- others' checkpoints

    async def _fetch(self, backend: ExpertBackend, source: HostRecord, have: int) -> Snapshot:
        contact = Contact(source.peer_id, source.addresses)
        request = to_frame({"uid": backend.uid}, [])
        limits, patience_s = transfer_bounds(backend)
        # it reads its disk before it answers
        await self._endpoint.transport.call(contact, OFFER_KEPT, request, timeout_s=patience_s)
        snapshot = await fetch_snapshot(
            self._endpoint, contact, kept_key(backend.uid), limits=limits, timeout_s=patience_s
        )
        version = snapshot.metadata.get("weight_version")
        if type(version) is not int or version <= have:
            raise MalformedFrameError(f"The checkpoint of {backend.uid} is not as new as its host announced.")
        return snapshot

    async def _offer(self, context: CallContext, data: bytes) -> bytes:
        meta, _ = from_frame(data, _FRAME_LIMITS)
        uid = meta.get("uid")
        parse_uid(uid if isinstance(uid, str) else "")
        assert isinstance(uid, str)
        if uid not in self._saved:
            raise UnknownExpertError(f"This host has no checkpoint of {uid}.")
        published = self._store.get(kept_key(uid))
        if published is None or published.metadata["weight_version"] < self._saved[uid]:
            self.sweep()
            if uid not in self._offered:
                self._make_place()
            self._offered[uid] = self._runtime.clock.time()
            try:
                published = await self._load(uid)
            except SwarmError:
                self._offered.pop(uid, None)
                raise
            self._store.publish(kept_key(uid), published)
        self._offered[uid] = self._runtime.clock.time()
        return to_frame({"uid": uid, "weight_version": published.metadata["weight_version"]}, [])

    def _make_place(self) -> None:
        """Offer one checkpoint less if as many are in memory as may be. Raises `HostBusyError`."""
        if len(self._offered) < _MAX_OFFERED:
            return
        oldest = min(self._offered, key=lambda uid: self._offered[uid])
        if self._runtime.clock.time() - self._offered[oldest] < _BUSY_S:
            raise HostBusyError("Other checkpoints are being fetched.", fix="Ask again in some seconds.")
        self._withdraw(oldest)

    def _withdraw(self, uid: str) -> None:
        self._offered.pop(uid, None)
        self._store.withdraw(kept_key(uid))

    def sweep(self) -> None:
        """Withdraw checkpoints that nobody has asked for lately."""
        now_s = self._runtime.clock.time()
        for uid, asked_s in list(self._offered.items()):
            if now_s - asked_s > _KEEP_OFFERS_S:
                self._withdraw(uid)
