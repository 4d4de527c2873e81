"""A peer: one process's membership in a run, with the services that its roles ask for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, SupportsFloat

import torch

from swarm.averaging.board import ROUNDS, ROUNDS_SCHEMA
from swarm.averaging.service import AveragingService
from swarm.config import PeerConfig
from swarm.datadir import DataDirLock
from swarm.dht.blocking import BlockingDht
from swarm.dht.bootstrap import bootstrap_addresses
from swarm.dht.known import FILE_NAME as KNOWN_PEERS_FILE
from swarm.dht.node import Dht
from swarm.dht.schemas import Schema
from swarm.endpoint import Endpoint, T
from swarm.errors import BootstrapError, ClosedError, UsageError
from swarm.events import Event, EventStream
from swarm.experts.client import ExpertClient
from swarm.experts.host import ExpertHost
from swarm.experts.prefixes import PREFIX_SCHEMA, PREFIXES
from swarm.experts.records import EXPERTS, HOST_SCHEMA
from swarm.experts.spec import ExpertGrid
from swarm.identity import KeyPair, PeerId
from swarm.net.grpc import GrpcTransport
from swarm.net.loop import loop_thread, switch_interval
from swarm.net.transport import Contact
from swarm.roles import Role
from swarm.runs.credentials import Credential
from swarm.runs.manifest import Manifest
from swarm.runs.membership import (
    PEER_SCHEMA,
    PEERS,
    CredentialAuthorizer,
    MembershipEnded,
    PeerAnnouncer,
    PeerState,
)
from swarm.runs.service import ManifestService, fetch_from_any
from swarm.runtime import Runtime
from swarm.state.transfer import SnapshotStore
from swarm.training.progress import PROGRESS, PROGRESS_SCHEMA
from swarm.training.state import STATE, STATE_SCHEMA

CLOSE_TIMEOUT_S = 15.0
"""Longest that a clean leave may take before what is left of it is abandoned."""
START_TIMEOUT_S = 120.0
_MEMBERSHIP_POLL_S = 30.0
SCHEMAS: Mapping[str, Schema] = {
    PEERS: PEER_SCHEMA,
    EXPERTS: HOST_SCHEMA,
    PREFIXES: PREFIX_SCHEMA,
    ROUNDS: ROUNDS_SCHEMA,
    STATE: STATE_SCHEMA,
    PROGRESS: PROGRESS_SCHEMA,
}
"""What every peer, whatever its roles, holds under our own namespaces."""


@dataclass(frozen=True, slots=True)
class ShutdownIncomplete(Event):
    """A step of leaving failed or took too long; it was skipped."""

    step: str
    reason: str


class Peer(Endpoint):
    """One peer of a run. Get one from `swarm.join`, `Run.peer` or `LocalSwarm.peer`; it is a context manager.

    Attributes:
        manifest: The verified description of the run.
        grids: The run's expert grids by name.
        experts: Client of remote experts.
        averaging: Takes part in averaging rounds.
        records: The run's records in the DHT, for threads other than the loop's.
        state: Snapshots that this peer serves to others.
        host: Holds experts; none unless the peer has the role `host`.
    """

    def __init__(
        self,
        *,
        identity: KeyPair,
        run_public_key: bytes,
        credential: Credential,
        config: PeerConfig,
        runtime: Runtime,
    ) -> None:
        authorizer = CredentialAuthorizer(run_public_key, credential, identity, runtime.clock)
        transport = GrpcTransport(identity, authorizer, config, runtime)
        super().__init__(
            run_id=authorizer.run_id,
            roles=authorizer.roles,
            identity=identity,
            config=config,
            runtime=runtime,
            transport=transport,
            dht=Dht(transport, config.dht, runtime, known_file=config.data_dir and config.data_dir / KNOWN_PEERS_FILE),
            loop=loop_thread(),
        )
        for namespace, schema in SCHEMAS.items():
            self.dht.declare(namespace, schema)
        self._run_public_key = run_public_key
        self._authorizer = authorizer
        self._metrics: dict[str, float] = {}
        self._announcer = PeerAnnouncer(self, lambda: dict(self._metrics))
        self._manifest_service: ManifestService | None = None
        self._stack = ExitStack()
        self._closing: asyncio.Future[None] | None = None
        self._abandoning: asyncio.Task[None] | None = None
        self._closed = False
        self.records = BlockingDht(self.dht, self.run_sync)
        self.state = SnapshotStore(self)
        self.averaging = AveragingService(self)
        self.host: ExpertHost | None = None

    # Lifetime

    @classmethod
    def start(
        cls,
        *,
        identity: KeyPair,
        run_public_key: bytes,
        credential: Credential,
        config: PeerConfig,
        bootstrap: Sequence[tuple[str, PeerId | None]] = (),
        signed_manifest: bytes | None = None,
        events: EventStream | None = None,
        data_dir_lock: DataDirLock | None = None,
    ) -> Self:
        """Join a run and return when this peer is online.

        Args:
            identity: This peer's key pair.
            run_public_key: The run (32 bytes).
            credential: Proof that `identity` may take part, and in which roles.
            config: Settings.
            bootstrap: Addresses to join through; none for the first peer of a run.
            signed_manifest: The run's manifest where it is at hand; none fetches it from the peers.
            events: Where to emit events; none makes a new stream.
            data_dir_lock: Holds `config.data_dir`, where the caller has taken it already; released with this peer.

        Raises:
            BootstrapError: No address led into the run; `reasons` has each one's cause.
            ConfigError: Another peer uses `config.data_dir`, or as it says.
            PortInUseError, SecurityError: As they say.
        """
        if data_dir_lock is None and config.data_dir is not None:
            data_dir_lock = DataDirLock(config.data_dir)
        with ExitStack() as until_made:
            if data_dir_lock is not None:
                until_made.enter_context(data_dir_lock)
            peer = cls(
                identity=identity,
                run_public_key=run_public_key,
                credential=credential,
                config=config,
                runtime=Runtime(events=events),
            )
            peer._stack = until_made.pop_all()
        peer._stack.enter_context(switch_interval())
        try:
            peer.run_sync(peer._start(bootstrap, signed_manifest), START_TIMEOUT_S)
        except BaseException:
            peer.close(drain=False)
            raise
        return peer

    async def _start(self, bootstrap: Sequence[tuple[str, PeerId | None]], signed_manifest: bytes | None) -> None:
        await self.transport.start()
        await self.dht.start()
        contacts = await self._enter(bootstrap)
        if signed_manifest is None:
            signed_manifest = await fetch_from_any(self.transport, contacts, self._run_public_key)
        self._manifest_service = ManifestService(self.transport, signed_manifest, self._run_public_key)
        self.grids: dict[str, ExpertGrid] = self.manifest.grids
        self.experts = ExpertClient(self, self.grids)
        self.runtime.spawn(self._watch_membership(), "membership")
        await self._announcer.start()
        await self.experts.start()
        if Role.HOST in self.roles:
            await self._announcer.set_state(PeerState.SYNCING)
            self.host = ExpertHost(self, self.grids, self.state)
            await self.host.start()
        await self._announcer.set_state(PeerState.ONLINE)

    async def _enter(self, bootstrap: Sequence[tuple[str, PeerId | None]]) -> list[Contact]:
        """Join the run's network through the invite's addresses and the peers of an earlier start.

        Raises:
            BootstrapError: An invite was given, and nobody answered.
        """
        contacts: list[Contact] = []
        try:
            if bootstrap or self.dht.remembered:
                contacts = await bootstrap_addresses(self.transport, bootstrap, self.dht.remembered)
                await self.dht.bootstrap(contacts, seeds=bootstrap)
        except BootstrapError:
            if bootstrap:
                raise
            # the run's owner may well be the first to return; whoever comes later is met by the DHT's upkeep
        return contacts

    async def _watch_membership(self) -> None:
        """Say so when our credential expires. The wall clock may jump, so it is read again and again."""
        ends = self._authorizer.membership_ends_wall_s
        if ends is None:
            return
        while True:
            left_s = ends - self.runtime.clock.wall()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, _MEMBERSHIP_POLL_S))
        self.runtime.emit(MembershipEnded(reason="the invite that it was made with has expired"))

    def close(self, drain: bool = True) -> None:
        """Leave the run. Bounded by `CLOSE_TIMEOUT_S`, idempotent, safe to call from any thread but the loop's.

        Args:
            drain: Hand over experts and withdraw records first; False leaves at once.

        Raises:
            LoopThreadError: Called on the loop's thread; nothing was closed.
        """
        if self._closed:
            return
        try:
            self.run_sync(self._close(drain), CLOSE_TIMEOUT_S + 2.0)
        finally:
            if self._closing is not None:  # else nothing has begun: it was called on the loop's thread
                self._closed = True
                self._stack.close()
                self.events.close()

    async def _close(self, drain: bool) -> None:
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = asyncio.get_running_loop().create_future()
        deadline = asyncio.get_running_loop().time() + (CLOSE_TIMEOUT_S if drain else 3.0)
        try:
            if drain:
                await self._step("announcing that we leave", self._announcer.set_state(PeerState.LEAVING), deadline)
            if self.host is not None:
                await self._step("handing over experts", self.host.close(drain=drain), deadline)
            if hasattr(self, "experts"):
                await self._step("closing the expert client", self.experts.close(), deadline)
            await self._step("leaving averaging", self.averaging.close(), deadline)
            if drain:
                await self._step("withdrawing our record", self._announcer.close(), deadline)
            await self._step("leaving the DHT", self.dht.close(withdraw=drain, handover=drain), deadline)
            await self._step("closing connections", self.transport.close(0.5 if drain else 0.0), deadline)
            await self.runtime.cancel_tasks()
        except asyncio.CancelledError:
            # Nobody waits any longer, as after Ctrl-C; what is left must stop all the same.
            self._abandoning = asyncio.get_running_loop().create_task(self._abandon(), name="abandon peer")
            raise
        finally:
            self._closing.set_result(None)

    async def _abandon(self) -> None:
        """Stop everything at once, without a word to anybody."""
        deadline = asyncio.get_running_loop().time()
        if self.host is not None:
            await self._step("stopping the host", self.host.close(drain=False), deadline)
        if hasattr(self, "experts"):
            await self._step("closing the expert client", self.experts.close(), deadline)
        await self._step("leaving the DHT", self.dht.close(withdraw=False), deadline)
        await self._step("closing connections", self.transport.close(0.0), deadline)
        await self.runtime.cancel_tasks()

    async def _step(self, step: str, action: Coroutine[Any, Any, Any], deadline: float) -> None:
        """Run one step of leaving; whatever happens to it, the next one gets its turn."""
        try:
            async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + 0.2)):
                await action
        except TimeoutError:
            self.runtime.emit(ShutdownIncomplete(step=step, reason="took too long"))
        except Exception as error:  # noqa: BLE001 - leaving must go on; the failure is reported
            self.runtime.emit(ShutdownIncomplete(step=step, reason=repr(error)))

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Description

    @property
    def manifest(self) -> Manifest:
        """The newest verified manifest of the run."""
        if self._manifest_service is None:
            raise ClosedError("This peer has not joined its run yet.")
        return self._manifest_service.manifest

    @property
    def events(self) -> EventStream:
        """Everything worth telling about this peer."""
        return self.runtime.events

    @property
    def closed(self) -> bool:
        """Whether this peer has left the run."""
        return self._closed

    @property
    def membership_ended(self) -> bool:
        """Whether our credential has expired, so that other peers refuse us: join again with a new invite."""
        return self.events.count(MembershipEnded) > 0

    @property
    def condition(self) -> PeerState:
        """JOINING, SYNCING, ONLINE, PAUSED or LEAVING."""
        return self._announcer.state

    # For users' threads

    def run_sync(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop thread and wait for it.

        Raises:
            ClosedError: This peer has left the run.
            LoopThreadError: Called on the loop thread itself.
            TimeoutError: Not done within `timeout_s`; the coroutine is cancelled.
        """
        try:
            self._check_open()
        except ClosedError:
            coroutine.close()
            raise
        return super().run_sync(coroutine, timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("This peer has left the run.", fix="Join again for a new peer.")

    def wait_for_experts(
        self, grid: str, min_fraction: float = 1.0, timeout_s: float = 300.0, *, min_experts: int | None = None
    ) -> None:
        """Block until enough experts of a grid are online.

        Args:
            grid: The grid's name, e.g. `"ffn"`.
            min_fraction: Fraction of the grid's experts that must have a live replica.
            timeout_s: Patience in seconds.
            min_experts: Any so many experts, instead of a fraction; the way to wait in a grid of more than
                `client.directory_max_experts`, which is never read whole.

        Raises:
            UsageError: The run has no such grid, or it is too large to wait for a fraction of it.
            ExpertsNotReadyError: Not enough of them came in time; the message names missing ones.
            ClosedError: This peer has left the run, or did so meanwhile.
        """
        self._check_open()
        if grid not in self.grids:
            raise UsageError(
                f"The run has no expert grid {grid!r}.",
                fix=f"Use one of {', '.join(self.grids) or '(there are none)'}.",
            )
        waiting = self.experts.directory.wait_for(grid, None, min_fraction, timeout_s, count=min_experts)
        self.run_sync(waiting, timeout_s + 10.0)

    def log(self, **metrics: SupportsFloat) -> None:
        """Publish numbers about this peer's training, such as `loss`, `step`, `tokens_per_s`.

        They travel with the next heartbeat. Tensors of one element are read out; non-finite values are left out.

        Raises:
            ClosedError: This peer has left the run.
        """
        self._check_open()
        for name, value in metrics.items():
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            if math.isfinite(number):
                self._metrics[name] = number
