"""Which hosts hold which experts: refreshed from the DHT in the background, read without waiting on the forward path.

A circuit breaker sits in front of it: a peer that failed is avoided, and tried again with a small call of the
directory's own (never with a training step's) after a pause that doubles up to ten refresh intervals. A peer that let a
call wait until another replica had answered is suspected: it comes last among the replicas while a small call finds out
at once whether it is alive. A peer that nobody asks any more because it was slow is measured again in the same way.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.config import ClientConfig
from swarm.dht.records import Entry
from swarm.endpoint import Endpoint
from swarm.errors import (
    ClosedError,
    DhtError,
    ExpertsNotReadyError,
    MalformedFrameError,
    NetworkError,
    SwarmError,
    UnknownExpertError,
    UsageError,
)
from swarm.events import Event
from swarm.experts.beam import Found
from swarm.experts.breaker import CircuitBreaker
from swarm.experts.choice import HostLoads
from swarm.experts.records import HostRecord, merge_records, record_key, rendezvous_order
from swarm.experts.searching import ExpertSearch
from swarm.experts.spec import ExpertGrid, parse_uid
from swarm.identity import PeerId
from swarm.net.transport import Contact

MAX_PAUSE_REFRESHES = 10
"""The longest pause between two attempts at a failed peer, in refresh intervals."""
NAMED_UIDS = 8
MEASURED_AT_ONCE = 4
"""Slow peers that are measured again after one refresh."""
MAX_SUSPECTS = 1024


@dataclass(frozen=True, slots=True)
class PeerAvoided(Event):
    """Calls to a peer failed: for `pause_s` seconds its experts are asked of other replicas, or masked."""

    peer: str
    pause_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class PeerTrusted(Event):
    """A peer that was avoided answers again."""

    peer: str


@dataclass(frozen=True, slots=True)
class DirectoryRefreshFailed(Event):
    """The records of a grid could not be read; what was known before stays in use until it expires."""

    grid: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExpertRecordIgnored(Event):
    """A host's record makes no sense."""

    grid: str
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One host's copy of an expert, as announced."""

    contact: Contact
    weight_version: int
    queue_s: float
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """A record with its local expiry; `missed` counts refreshes in a row that did not show it."""

    record: HostRecord
    record_version: int
    expires_s: float
    missed: int = 0


class ExpertDirectory:
    """The replicas of every expert of some grids, primary first.

    Reading is thread-safe and never waits; everything else belongs on the endpoint's loop.

    Args:
        endpoint: Whose DHT is read.
        grids: The grids to follow, by name.
        probe: Makes a small call to a contact, to see whether it answers; raises `NetworkError` if not.
        loads: What hosts are expected to take; it learns from their records here.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        grids: Mapping[str, ExpertGrid],
        probe: Callable[[Contact], Awaitable[None]],
        loads: HostLoads | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._grids = dict(grids)
        self._probe = probe
        self._loads = HostLoads() if loads is None else loads
        self._suspects: dict[PeerId, None] = {}
        self._probing: dict[PeerId, None] = {}
        self._config: ClientConfig = endpoint.config.client
        refresh_s = self._config.directory_refresh_s
        self._breaker = CircuitBreaker(refresh_s, MAX_PAUSE_REFRESHES * refresh_s)
        self._known: dict[str, dict[tuple[PeerId, str], _Known]] = {}
        self._replicas: dict[str, tuple[Replica, ...]] = {}
        most = self._config.directory_max_experts
        self._whole = {name: grid for name, grid in self._grids.items() if grid.size <= most}
        self._searched = ExpertSearch(
            endpoint, {n: g for n, g in self._grids.items() if n not in self._whole}, self._breaker.avoids
        )
        self._index = {name: {uid: i for i, uid in enumerate(grid.uids())} for name, grid in self._whole.items()}
        self._lock = threading.Lock()
        self._live: dict[str, Tensor] = {}
        self._task: asyncio.Task[None] | None = None
        self._refreshing = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Read every grid once, of those that are searched only the beginning; then keep fresh in the background."""
        await self.refresh()
        await self._searched.start()
        self._task = self._endpoint.runtime.spawn(self._keep_fresh(), "expert-directory")

    async def close(self) -> None:
        """Stop refreshing. Idempotent."""
        self._closed = True
        await self._searched.close()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    # Reading

    def replicas(self, uid: str) -> tuple[Replica, ...]:
        """The announced replicas: primary first, but those of avoided peers last. Empty if nobody holds the expert.

        Raises:
            UnknownExpertError: The run has no such expert.
        """
        self.grid_of(uid)
        return tuple(sorted(self._held(uid), key=lambda r: self._breaker.avoids(r.contact.peer_id)))

    def _held(self, uid: str) -> tuple[Replica, ...]:
        held = self._replicas.get(uid)
        if held is None:
            # what hosts say of prefixes does not change with weights and queues
            held = tuple(Replica(h.contact, 0, 0.0, h.leaving) for h in self._searched.holders(uid))
        return held

    def candidates(self, uid: str, tried: Sequence[PeerId], *, healthy: bool = False) -> list[Contact]:
        """The hosts that are equally fit to be asked next, primary first: those that nothing speaks against.

        If there is none, those that leave soon or are suspected; if there is none either, those that are avoided.

        Args:
            tried: Hosts that are out of the question.
            healthy: Rather none than one that is suspected or avoided.
        """
        avoids, suspects = self._breaker.avoids, self._suspects
        best: list[Contact] = []
        best_rank = 2 if healthy else 4
        for replica in self._held(uid):
            peer_id = replica.contact.peer_id
            if peer_id in tried:
                continue
            rank = 3 if avoids(peer_id) else 2 if peer_id in suspects else 1 if replica.leaving else 0
            if rank < best_rank:
                best, best_rank = [replica.contact], rank
            elif rank == best_rank and best:
                best.append(replica.contact)
        return best

    def next_host(self, uid: str, tried: Sequence[PeerId]) -> Contact | None:
        """The best replica's host that was not tried, one that is not avoided before one that is."""
        found = self.candidates(uid, tried)
        return found[0] if found else None

    def has_other(self, uid: str, peer_id: PeerId) -> bool:
        """Whether another host than this one holds the expert too."""
        return any(r.contact.peer_id != peer_id for r in self._held(uid))

    def live_uids(self, grid: str) -> list[str]:
        """Experts with a replica whose host is not avoided, in row-major order; of a searched grid, those known.

        Raises:
            UnknownExpertError: The run has no such grid.
        """
        if self.is_searched(grid):
            return self._searched.live_uids(grid)
        live = self.live(grid)
        return [uid for uid, index in self._index[grid].items() if live[index]]

    def live(self, grid: str) -> Tensor:
        """Which experts can be called; do not write to it. Not for a grid that is searched. [experts] bool

        Raises:
            UnknownExpertError: The run has no such grid.
        """
        mask = self._live.get(grid)
        if mask is None:
            if grid not in self._grids:
                raise self._no_grid(grid)
            with self._lock:
                avoids = self._breaker.avoids
                mask = torch.tensor(
                    [
                        any(not avoids(r.contact.peer_id) for r in self._replicas.get(uid, ()))
                        for uid in self._index[grid]
                    ],
                    dtype=torch.bool,
                )
                self._live[grid] = mask
        return mask

    def announced(self, grid: str) -> Tensor:
        """Which experts have any replica at all, avoided or not. Not for a grid that is searched. [experts] bool

        Raises:
            UnknownExpertError: The run has no such grid.
        """
        if grid not in self._grids:
            raise self._no_grid(grid)
        return torch.tensor([bool(self._replicas.get(uid)) for uid in self._index[grid]], dtype=torch.bool)

    def is_searched(self, grid: str) -> bool:
        """Whether the grid is too large to be read whole (`directory_max_experts`). Raises `UnknownExpertError`."""
        return self.grid(grid).name in self._searched

    def find(self, grid: str, logits: Sequence[Tensor], k: int) -> Found | None:
        """The best experts for every token in a grid that is searched, without waiting: see `ExpertSearch.find`.

        None while too few are known; `search` then waits for more.
        """
        found = self._searched.find(grid, logits, k)
        return found if found.experts.shape[1] >= k or not found.missing else None

    async def search(self, grid: str, logits: Sequence[Tensor], k: int) -> Found:
        """The same, from the DHT if too few experts are known: see `ExpertSearch.search`."""
        return await self._searched.search(grid, logits, k)

    def grid_of(self, uid: str) -> ExpertGrid:
        """The grid that an expert belongs to. Raises `UnknownExpertError`."""
        try:
            name, _ = parse_uid(uid)
        except MalformedFrameError as error:
            raise UnknownExpertError(f"{uid!r} is not an expert's uid.", fix="Write it as 'ffn.3.17'.") from error
        if name not in self._grids:
            raise self._no_grid(name)
        if uid not in self._grids[name]:
            raise UnknownExpertError(
                f"The grid {name!r} has no expert {uid!r}.", fix=f"Its uids follow {self._grids[name].pattern}."
            )
        if name in self._searched:
            self._searched.holders(uid)  # whoever asks will call it: have its holders read
        return self._grids[name]

    def grid(self, name: str) -> ExpertGrid:
        """The grid of this name. Raises `UnknownExpertError`."""
        if name not in self._grids:
            raise self._no_grid(name)
        return self._grids[name]

    def _no_grid(self, name: str) -> UnknownExpertError:
        known = ", ".join(self._grids) or "none"
        return UnknownExpertError(f"The run has no grid {name!r}.", fix=f"Its grids: {known}.")

    # Outcomes of calls

    def mark_failed(self, peer_id: PeerId, reason: str) -> None:
        """A call to the peer failed: avoid it until a trial call succeeds."""
        self._suspects.pop(peer_id, None)
        pause_s = self._breaker.failed(peer_id, self._endpoint.runtime.clock.time())
        if pause_s is not None:
            self._live_changed()
            self._endpoint.runtime.emit(PeerAvoided(peer=str(peer_id), pause_s=pause_s, reason=reason))

    def mark_answered(self, peer_id: PeerId) -> None:
        """The peer answered a call."""
        self._suspects.pop(peer_id, None)
        if self._breaker.avoids(peer_id) and self._breaker.succeeded(peer_id, self._endpoint.runtime.clock.time()):
            self._live_changed()
            self._endpoint.runtime.emit(PeerTrusted(peer=str(peer_id)))

    def mark_stalled(self, contact: Contact) -> None:
        """The peer let a call wait that another one answered: find out at once whether it is alive."""
        peer_id = contact.peer_id
        if self._closed or peer_id in self._suspects or self._breaker.avoids(peer_id):
            return
        self._suspects[peer_id] = None
        if len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._start_probe(contact)

    def mark_gone(self, uid: str, peer_id: PeerId) -> None:
        """The peer says that it does not hold this expert: forget the replica until it is announced again."""
        left = tuple(r for r in self._replicas.get(uid, ()) if r.contact.peer_id != peer_id)
        if uid in self._replicas:
            self._replicas = {**self._replicas, uid: left}
        self._searched.forget(uid, peer_id)
        self._live_changed()

    def _live_changed(self) -> None:
        with self._lock:
            self._live = {}
        self._searched.live_changed()

    # Refreshing

    async def refresh(self) -> None:
        """Read the records of every grid now."""
        async with self._refreshing:
            found: dict[str, list[Entry]] | None = None
            if not self._whole:
                return
            try:
                found = await self._endpoint.dht.get_many([record_key(name) for name in self._whole], fresh=True)
            except (DhtError, NetworkError) as error:
                for name in self._whole:
                    self._endpoint.runtime.emit(DirectoryRefreshFailed(grid=name, reason=str(error)))
            for name in self._whole:
                self._known[name] = self._merge(name, None if found is None else found[record_key(name)])
            self._rebuild()

    def _merge(self, name: str, entries: Sequence[Entry] | None) -> dict[tuple[PeerId, str], _Known]:
        """What is known of a grid after a read; None is a read that failed."""
        now_s = self._endpoint.runtime.clock.time()
        # One read may miss a record that a holder of it did not show in time; two in a row mean that it is gone.
        known = {
            key: k if entries is None else _Known(k.record, k.record_version, k.expires_s, k.missed + 1)
            for key, k in self._known.get(name, {}).items()
            if k.expires_s > now_s and (entries is None or k.missed < 1)
        }
        for entry in entries or ():
            before = known.get((entry.author, entry.subkey))
            if before is not None and before.record_version > entry.record_version:
                continue
            try:
                record = HostRecord.from_body(entry.author, entry.body)
            except MalformedFrameError as error:
                event = ExpertRecordIgnored(grid=name, peer=str(entry.author), reason=error.message)
                self._endpoint.runtime.emit(event)
                continue
            known[entry.author, entry.subkey] = _Known(record, entry.record_version, now_s + entry.ttl_s)
        return known

    def _rebuild(self) -> None:
        replicas: dict[str, tuple[Replica, ...]] = {}
        now_s = self._endpoint.runtime.clock.time()
        for name in self._whole:
            holders: dict[str, dict[PeerId, HostRecord]] = {}
            for host in merge_records(k.record for k in self._known[name].values()):
                self._loads.announced(host.peer_id, host.queue_s, host.throughput, now_s)
                for uid in host.experts:
                    if uid in self._index[name]:
                        holders.setdefault(uid, {})[host.peer_id] = host
            for uid, by_id in holders.items():
                ordered = [by_id[p] for p in rendezvous_order(uid, by_id)] if len(by_id) > 1 else list(by_id.values())
                ordered.sort(key=lambda host: host.leaving)
                replicas[uid] = tuple(
                    Replica(Contact(h.peer_id, h.addresses), h.experts[uid], h.queue_s, h.leaving) for h in ordered
                )
        self._replicas = replicas
        self._live_changed()

    async def _keep_fresh(self) -> None:
        runtime, refresh_s = self._endpoint.runtime, self._config.directory_refresh_s
        while True:
            await asyncio.sleep(refresh_s * runtime.rng.uniform(0.8, 1.2))
            await self.refresh()
            await self._probe_due()

    async def _probe_due(self) -> None:
        """Half-open: one small call to each avoided peer whose pause is over."""
        now_s = self._endpoint.runtime.clock.time()
        due = self._breaker.take_due(now_s)
        contacts = self._searched.contacts()
        contacts |= {r.contact.peer_id: r.contact for held in self._replicas.values() for r in held}
        for peer_id in due:
            if peer_id in contacts:
                self._start_probe(contacts[peer_id])
            else:
                self._breaker.forget(peer_id)
        others = [p for p in contacts if not self._breaker.avoids(p) and p not in self._suspects]
        for peer_id in self._loads.slow(others, now_s, self._config.directory_refresh_s)[:MEASURED_AT_ONCE]:
            self._start_probe(contacts[peer_id])

    def _start_probe(self, contact: Contact) -> None:
        if contact.peer_id not in self._probing:
            self._probing[contact.peer_id] = None
            self._endpoint.runtime.spawn(self._probe_one(contact), "expert-probe")

    async def _probe_one(self, contact: Contact) -> None:
        try:
            await self._probe(contact)
        except SwarmError as error:
            if error.remote is None:
                self.mark_failed(contact.peer_id, f"A trial call failed: {error.message}")
                return
        finally:
            self._probing.pop(contact.peer_id, None)
        self.mark_answered(contact.peer_id)

    # Waiting

    async def wait_for(
        self,
        grid: str,
        uids: Sequence[str] | None = None,
        min_fraction: float = 1.0,
        timeout_s: float = 300.0,
        *,
        count: int | None = None,
    ) -> None:
        """Wait until enough experts of a grid can be called.

        Args:
            grid: The grid's name.
            uids: Which experts; all of the grid by default.
            min_fraction: How many of them, between 0 and 1.
            timeout_s: Patience.
            count: Any so many experts of the grid, instead of a fraction of certain ones.

        Raises:
            UnknownExpertError: The run has no such grid or expert.
            UsageError: A fraction of a grid that is searched: nobody knows all of its experts.
            ExpertsNotReadyError: Too few were ready in time; names those that are missing.
            ClosedError: The peer left, so that nothing is known any more.
        """
        if count is None and uids is None and self.is_searched(grid):
            raise UsageError(
                f"{grid!r} has {self.grid(grid).size} experts, too many to wait for a fraction of them.",
                fix="Wait for a number of experts (`min_experts`).",
            )
        wanted = list(uids if uids is not None else () if count is not None else self.grid(grid).uids())
        for uid in wanted:
            self.grid_of(uid)
        clock = self._endpoint.runtime.clock
        end_s = clock.time() + timeout_s
        while True:
            if self._closed:
                raise ClosedError("This peer has left the run.", fix="Join again for a new peer.")
            live = dict.fromkeys(self.live_uids(grid))
            missing = [uid for uid in wanted if uid not in live]
            if len(live) >= (count or 0) and len(wanted) - len(missing) >= min_fraction * len(wanted) - 1e-9:
                return
            left_s = end_s - clock.time()
            if left_s <= 0 and count is not None:
                raise ExpertsNotReadyError(
                    f"After {timeout_s:g} s {len(live)} experts of {grid!r} are online where {count} are wanted.",
                    fix="Start more hosts (`swarm join`), or ask for fewer.",
                )
            if left_s <= 0:
                named = ", ".join(missing[:NAMED_UIDS]) + (", …" if len(missing) > NAMED_UIDS else "")
                raise ExpertsNotReadyError(
                    f"After {timeout_s:g} s {len(wanted) - len(missing)} of {len(wanted)} experts of {grid!r} are "
                    f"online; missing: {named}.",
                    fix="Start more hosts (`swarm join`), or ask for a smaller min_fraction.",
                )
            await asyncio.sleep(min(left_s, self._config.directory_refresh_s, 0.25))
            if not self.is_searched(grid):
                await self.refresh()
            elif count is not None:
                await self._searched.look_around(grid, count)
            else:
                await self._searched.look_up(grid, [parse_uid(uid)[1] for uid in wanted])
