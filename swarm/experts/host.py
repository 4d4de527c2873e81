"""A host of experts: takes its share of the manifest's experts, serves and trains them, keeps replicas alike.

The parts: `placement` decides what to hold, `serving` answers calls, `batching` computes them on the device's thread,
`replicas` copies states between hosts, `keeping` saves them, `announcing` writes and reads the records. This module
owns their lifetime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from swarm.endpoint import Endpoint
from swarm.errors import SwarmError, UnknownExpertClassError, UnknownOptimizerError
from swarm.experts.announcing import Announcer
from swarm.experts.backend import ComputeOptions, ExpertBackend
from swarm.experts.batching import Batcher, BatcherStats
from swarm.experts.checkpoints import checkpoints_of
from swarm.experts.devices import memory_capacity, resolve_device
from swarm.experts.happenings import (
    ExpertDropped,
    ExpertNotTaken,
    ExpertTaken,
    GradientsLost,
    GridSkipped,
    HandOverIncomplete,
)
from swarm.experts.keeping import ExpertKeeper
from swarm.experts.placement import Drop, Placement, Take
from swarm.experts.records import HostRecord
from swarm.experts.registry import check_grid
from swarm.experts.serving import ExpertServer, ServingStats, compute, prepare
from swarm.experts.spec import ExpertGrid, parse_uid
from swarm.experts.spread import Spread
from swarm.experts.statistics import ExpertUse, Statistics
from swarm.experts.syncing import ReplicaExchange
from swarm.experts.workers import DeviceWorker, InlineWorker, Worker
from swarm.runtime import TaskFailed
from swarm.state.transfer import SnapshotStore

_JITTER = 0.2
_ANNOUNCEMENTS_PER_TTL = 3
_MAX_EXPERTS = 65536


@dataclass(frozen=True, slots=True)
class HostStats:
    """A moment's view of a host."""

    experts: int
    capacity: int
    queued_tokens: int
    expected_wait_s: float
    cache_bytes: int
    serving: ServingStats
    batching: BatcherStats
    per_expert: dict[str, ExpertUse]


class ExpertHost:
    """See the module's docstring. Lives on the event loop of its endpoint.

    Args:
        endpoint: Started and bootstrapped.
        grids: The manifest's grids by name.
        store: The endpoint's snapshots.
    """

    def __init__(self, endpoint: Endpoint, grids: Mapping[str, ExpertGrid], store: SnapshotStore) -> None:
        self._endpoint = endpoint
        self._runtime = endpoint.runtime
        self._config = endpoint.config.host
        self._grids = dict(grids)
        self._store = store
        self._experts: dict[str, ExpertBackend] = {}
        self._view: list[HostRecord] = []
        self._taking: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._synchronising = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        self._closed = False
        self._capacity = 0
        self._worker: Worker | None = None
        self._device = torch.device("cpu")
        self._statistics = Statistics()
        self._options = ComputeOptions(
            autocast=self._config.autocast,
            compile_backend="inductor" if self._config.compile else None,
            gradient_norm_ratio=self._config.max_gradient_norm_ratio,
        )

    @property
    def held(self) -> dict[str, int]:
        """Held experts and their weight versions."""
        return {uid: backend.weight_version for uid, backend in sorted(self._experts.items())}

    @property
    def capacity(self) -> int:
        """Experts that this host is willing to hold."""
        return self._capacity

    @property
    def stats(self) -> HostStats:
        """Counters, and what waits now. Valid after `start`."""
        batcher = self._started().batcher
        use = self._statistics.use(sorted(self._experts), self._runtime.clock.time())
        steppers = {uid: backend.stepper for uid, backend in self._experts.items()}
        return HostStats(
            experts=len(self._experts),
            capacity=self._capacity,
            queued_tokens=batcher.queued_tokens,
            expected_wait_s=batcher.expected_wait_s,
            cache_bytes=self._server.cache.nbytes,
            serving=self._server.stats,
            batching=batcher.stats,
            per_expert={
                uid: replace(one, steps=steppers[uid].made, pending_tokens=steppers[uid].pending_tokens)
                for uid, one in use.items()
            },
        )

    def backend(self, uid: str) -> ExpertBackend:
        """A held expert, for inspection. Raises `KeyError`."""
        return self._experts[uid]

    def _started(self) -> Worker:
        assert self._worker is not None, "start() comes first"
        return self._worker

    # ---- lifetime

    async def start(self) -> None:
        """Serve, announce this host, and begin to take experts; returns before it holds any.

        Raises:
            ConfigError: The device cannot be used, or a grid cannot be built.
            UnknownExpertClassError, UnknownOptimizerError: No grid's class and optimizer are installed.
        """
        self._device = resolve_device(self._config.device)
        await self._choose_grids()
        runtime = self._runtime
        batcher = Batcher(self._config.max_batch_tokens, self._config.max_queued_tokens, self._statistics.observe)
        if runtime.virtual:
            self._worker = InlineWorker(batcher, compute, runtime)
        else:
            ahead = prepare if self._device.type == "cuda" else None
            self._worker = DeviceWorker(batcher, compute, runtime.clock, prepare=ahead)
        self._server = ExpertServer(
            self._endpoint,
            self._experts,
            self._worker,
            self._config.forward_cache_bytes,
            self._config.max_inflight_bytes,
            self._config.upload_stall_s,
            self._config.upload_bytes_s,
        )
        self._replicas = ReplicaExchange(
            self._endpoint, self._store, self._worker, self._experts, refresh_s=self._config.replica_sync_s / 2
        )
        above = self._config.announce_prefixes_above
        self._spread = Spread(list(self._grids.values()), above)
        self._placement = Placement(self._endpoint.peer_id, {}, self._capacity)
        ttl_s = self._config.announce_ttl_s
        searched = [grid for grid in self._grids.values() if grid.size > above]
        self._announcer = Announcer(self._endpoint, list(self._grids), self._capacity, ttl_s, searched)
        self._keeper = ExpertKeeper(
            self._endpoint, self._store, self._worker, self._replicas, self._experts, checkpoints_of(self._endpoint)
        )
        await self._keeper.start()
        await self._announce()
        self._tasks = [
            runtime.spawn(self._announcements(ttl_s / _ANNOUNCEMENTS_PER_TTL), "experts-announce"),
            runtime.spawn(self._every(self._config.placement_s, self._place), "experts-place"),
            runtime.spawn(self._every(self._config.replica_sync_s, self._synchronise), "experts-sync"),
            runtime.spawn(self._every(self._config.checkpoint_s, self._keeper.save), "experts-save"),
        ]

    async def _choose_grids(self) -> None:
        """Keep the grids whose class is installed, and derive the capacity."""
        expert_bytes, missing = 0, None
        for name, grid in list(self._grids.items()):
            try:
                profile = await self._runtime.offload(check_grid, grid)
            except (UnknownExpertClassError, UnknownOptimizerError) as error:
                self._runtime.emit(GridSkipped(name, error.message))
                del self._grids[name]
                missing = error
            else:
                expert_bytes = max(expert_bytes, profile.parameter_bytes)
        if missing is not None and not self._grids:
            raise missing
        limit = self._config.max_experts
        self._capacity = limit if limit is not None else memory_capacity(expert_bytes, self._device)
        self._capacity = min(self._capacity, _MAX_EXPERTS)

    async def close(self, drain: bool = True) -> None:
        """Leave: with `drain`, hand experts over first; then withdraw the announcements and stop. Idempotent, bounded.

        While it hands over, the host goes on serving; other hosts take what would be missing and copy what is newer.
        """
        if self._closed or self._worker is None:
            return
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if drain and self._experts:
                for backend in list(self._experts.values()):
                    await self._flush(backend)
                # first, since patience may end while others take over; then what has changed meanwhile
                await self._keeper.save_within(self._config.drain_timeout_s / 2)
                await self._hand_over()
                await self._keeper.save_within(self._config.drain_timeout_s / 2)
            await self._announcer.withdraw()
        finally:
            # also when the caller's patience ends first
            for uid, backend in sorted(self._experts.items()):
                if tokens := backend.stepper.pending_tokens:
                    self._runtime.emit(GradientsLost(uid, tokens, "The host has left."))
            self._experts.clear()
            self._replicas.sweep()
            self._server.cache.clear()
            await self._worker.close()

    async def _every(self, interval_s: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(interval_s * (1 + _JITTER * (2 * self._runtime.rng.random() - 1)))
            try:
                await act()
            except Exception as error:  # noqa: BLE001 - a host that stops looking after its experts is worse; reported
                self._runtime.emit(TaskFailed(task=act.__name__, reason=repr(error)))

    # ---- announcements

    async def _announcements(self, interval_s: float) -> None:
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await self._announce()

    async def _announce(self) -> None:
        await self._announcer.announce(
            self.held,
            self._started().batcher.expected_wait_s,
            self._leaving,
            throughput=self._started().batcher.tokens_per_s,
            busy=self._statistics.busy(self._runtime.clock.time()),
            kept=self._keeper.kept,
            taking=self._taking,
        )

    async def _look(self) -> bool:
        """Read the other hosts' announcements; false if that failed."""
        found = await self._announcer.look()
        self._view = found if found is not None else self._view
        self._keeper.observe(self._view)
        self._replicas.observe(self._view)
        return found is not None

    # ---- placement

    async def _place(self) -> None:
        if not await self._look():
            return
        for uid in await self._keeper.catch_up(self._view):
            self._server.cache.drop_graphs(uid)
            self._changed.set()
        held = self.held
        busy = self._statistics.busy(self._runtime.clock.time())
        kept = self._keeper.kept
        self._placement.replicas = await self._runtime.offload(
            self._spread.replicas, self._capacity, {**kept, **held}, self._view
        )
        view = await self._runtime.offload(self._placement.overview, held, self._view, kept, busy)
        actions = self._placement.decide_on(view, held)
        self._taking = {action.uid: 1 for action in actions if isinstance(action, Take)}
        if self._taking:
            self._changed.set()
        self._server.retiring &= {action.uid for action in actions if isinstance(action, Drop)}
        for action in actions:
            if isinstance(action, Take):
                await self._take(action)
                self._taking.pop(action.uid, None)
            else:
                await self._drop(action)
        if any(isinstance(action, Take) for action in actions):
            await self._keeper.save_new()
        if any(host.leaving for host in self._view):
            # whoever leaves waits until its newest versions are safe
            await self._synchronise()

    async def _take(self, take: Take) -> None:
        name, _ = parse_uid(take.uid)
        try:
            backend = await self._runtime.offload(
                ExpertBackend, self._grids[name], take.uid, self._endpoint.run_id, self._device, self._options
            )
            source = await self._keeper.fill(backend, take.donors, take.keepers)
        except SwarmError as error:
            self._runtime.emit(ExpertNotTaken(take.uid, error.message))
            return
        except RuntimeError as error:  # out of memory, mostly
            self._runtime.emit(ExpertNotTaken(take.uid, f"{type(error).__name__}: {str(error)[:200]}"))
            return
        if self._grids[name].replicas > 1:
            await self._replicas.track(backend)
        self._experts[take.uid] = backend
        self._changed.set()
        self._runtime.emit(ExpertTaken(take.uid, backend.weight_version, source))

    async def _drop(self, drop: Drop) -> None:
        """Give a surplus replica up, once every other holder has confirmed that it has it, at our version at least."""
        backend = self._experts.get(drop.uid)
        if backend is None:
            return
        await self._flush(backend)
        self._server.retiring.add(drop.uid)
        if await self._replicas.unsynced(backend):
            await self._synchronise()
            return  # until the others have our steps
        own = await self._replicas.base_version(backend)
        try:
            versions = [await self._replicas.version_at(host, drop.uid, have=1 << 61) for host in drop.others]
        except SwarmError:
            return  # the record of a holder was wrong; the next tick sees it
        if max(versions) < own or await self._replicas.unsynced(backend):
            return
        del self._experts[drop.uid]
        self._server.retiring.discard(drop.uid)
        self._server.cache.drop_expert(drop.uid)
        self._statistics.forget(drop.uid)
        self._replicas.forget(drop.uid)
        self._changed.set()
        self._runtime.emit(ExpertDropped(drop.uid, f"{len(drop.others)} other hosts hold it."))

    async def _flush(self, backend: ExpertBackend) -> None:
        """What a replica has collected for its next step must not end with it: make the step now."""
        tokens = backend.stepper.pending_tokens
        try:
            await self._started().call(backend.flush)
        except SwarmError as error:
            self._runtime.emit(GradientsLost(backend.uid, tokens, error.message))

    # ---- replicas

    async def _synchronise(self) -> None:
        """Bring the replicas of every held expert into agreement with those of the other holders."""
        async with self._synchronising:
            for uid in await self._replicas.synchronise(leaving=self._leaving):
                self._server.cache.drop_graphs(uid)
                self._changed.set()

    # ---- leaving

    async def _hand_over(self) -> None:
        """Go on serving until other hosts hold our experts and our steps, nobody could, or patience ends."""
        self._leaving = True
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._announce()
                while await self._look():
                    waiting = await self._not_handed_over()
                    if not waiting or not self._anybody_could(waiting):
                        break
                    await self._synchronise()
                    await asyncio.sleep(self._config.placement_s / 2)
                    await self._announce()
        except TimeoutError:
            pass
        left = await self._not_handed_over()
        if left:
            reason = "nobody else hosts experts" if not self._others() else "no other host took them in time"
            self._runtime.emit(HandOverIncomplete(tuple(left[:8]), len(left), reason))

    def _others(self) -> list[HostRecord]:
        return [host for host in self._view if not host.leaving and host.capacity > 0]

    async def _not_handed_over(self) -> list[str]:
        """Experts that no other host holds, or of which it lacks steps of ours. New work for the others is refused."""
        others, left = self._others(), []
        for uid, backend in sorted(self._experts.items()):
            versions = [host.experts[uid] for host in others if uid in host.experts]
            if versions:
                self._server.retiring.add(uid)
            behind = max(versions, default=-1) < await self._replicas.base_version(backend)
            if behind or await self._replicas.unsynced(backend):
                left.append(uid)
        return left

    def _anybody_could(self, uids: list[str]) -> bool:
        """Whether some host holds, or has room for, one of these."""
        return any(h.load < h.capacity or any(uid in h.experts for uid in uids) for h in self._others())
