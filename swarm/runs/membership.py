"""Who belongs to a run: admission by credential, and the list of peers that say they are here.

`CredentialAuthorizer` decides, from the run's public key alone, whom this peer lets in and what they may call.
`PeerAnnouncer` keeps this peer's own record in the DHT fresh; `list_peers` reads everybody's. Records are hints: a
hello confirms them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from swarm.clock import Clock
from swarm.dht.node import Dht
from swarm.dht.schemas import MAX_ADDRESSES, Schema, addresses, anything, items, number, table, text
from swarm.dht.views import is_view
from swarm.endpoint import Endpoint
from swarm.errors import AdmissionRefusedError, DhtError, InvalidInviteError, NetworkError
from swarm.events import Event
from swarm.identity import KeyPair, PeerId
from swarm.net.security import Admission, require_role
from swarm.net.transport import CallContext, Contact
from swarm.roles import Role
from swarm.runs.credentials import CLOCK_TOLERANCE_S, Credential, check_expiry, run_id_of

MAX_NAME_CHARS = 64
MAX_METRICS = 32
MAX_METRIC_CHARS = 40
MAX_ROLES = 16
MAX_WORD_CHARS = 32
LEAVE_TIMEOUT_S = 3.0
VIEW_BEATS = 2
"""In every so many heartbeats a peer checks that the author of some record is in the same network."""


class PeerState(StrEnum):
    """What a peer is doing, in the words that people see."""

    JOINING = "JOINING"
    SYNCING = "SYNCING"
    ONLINE = "ONLINE"
    PAUSED = "PAUSED"
    LEAVING = "LEAVING"


class CredentialAuthorizer:
    """Admits peers whose credential chains up to the run's key. Implements `swarm.net.security.Authorizer`.

    Args:
        run_public_key: The run (32 bytes).
        credential: This peer's own credential, which it shows to others.
        identity: This peer's key pair, which the credential must be for.
        clock: Where the present is read for expiry.

    Raises:
        SecurityError: Our own credential is not valid here; better now than at the first hello.
    """

    def __init__(self, run_public_key: bytes, credential: bytes | Credential, identity: KeyPair, clock: Clock) -> None:
        self.run_id: bytes = run_id_of(run_public_key)
        self._run_public_key = run_public_key
        self._clock = clock
        encoded = credential.encoded if isinstance(credential, Credential) else credential
        self._own = Credential.verify(encoded, run_public_key)
        self._check(self._own, identity.public_key)

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that our own credential grants."""
        return frozenset(self._own.roles)

    @property
    def membership_ends_wall_s(self) -> float | None:
        """Unix seconds from which others refuse us, tolerance included; none for never."""
        expires = self._own.expires_wall_s
        return None if expires is None else expires + CLOCK_TOLERANCE_S

    def credential(self) -> bytes:
        """What we show in hello."""
        return self._own.encoded

    def admit(self, peer_id: PeerId, public_key: bytes, credential: bytes) -> Admission:
        """Decide about a peer that has proved, in hello, that it owns `public_key`.

        Raises:
            AdmissionRefusedError: It showed none, or the key is not the id's.
            InvalidInviteError: Malformed, for another peer, or beyond what its invite allows.
            WrongRunError, BadSignatureError, ExpiredInviteError: As they say.
        """
        if not credential:
            raise AdmissionRefusedError("The peer showed no credential.", fix="Join with an invite of the run.")
        if PeerId.of(public_key) != peer_id:
            raise AdmissionRefusedError("The peer's public key does not belong to its id.")
        shown = Credential.verify(credential, self._run_public_key)
        self._check(shown, public_key)
        expires = None if shown.expires_wall_s is None else shown.expires_wall_s + CLOCK_TOLERANCE_S
        return Admission(roles=frozenset(shown.roles), expires_wall_s=expires)

    def authorize(self, context: CallContext, roles: frozenset[Role]) -> None:
        """Raise `NotAuthorizedError` unless the caller has one of `roles`."""
        require_role(context, roles)

    def _check(self, credential: Credential, public_key: bytes) -> None:
        if credential.peer_public_key != public_key:
            raise InvalidInviteError(
                f"The credential was made for peer {credential.peer_id.short}, not for this one.",
                fix="Join with the invite again.",
            )
        check_expiry("credential", credential.expires_wall_s, self._clock.wall())


@dataclass(frozen=True, slots=True)
class AnnounceFailed(Event):
    """This peer's record could not be stored; others may not see it until the next heartbeat."""

    reason: str


@dataclass(frozen=True, slots=True)
class MembershipEnded(Event):
    """Our credential has expired: other peers refuse us from now on."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerStateChanged(Event):
    """This peer moved to another state."""

    state: str


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What a peer says about itself.

    Attributes:
        contact: Its id and addresses.
        name: What people call it.
        roles: What it says it does (hello tells what it may do).
        state: What it is doing.
        metrics: Numbers it publishes, e.g. `step`, `loss`, `tokens_per_s`.
        view: Which network it is in, see `swarm.dht.views`.
        record_version: Its author's count; higher is newer.
        ttl_s: How long the record still counts.
    """

    contact: Contact
    name: str
    roles: frozenset[Role]
    state: PeerState
    metrics: Mapping[str, float]
    view: bytes
    record_version: int
    ttl_s: float

    @property
    def peer_id(self) -> PeerId:
        return self.contact.peer_id


def _own_key(author: PeerId, key: str, subkey: str) -> str | None:
    return None if key == peer_key(author) and not subkey else "everybody has one place of its own"


PEERS = "peers"
"""The namespace of peers' records."""
PEER_SCHEMA = Schema(
    required={
        "name": text(MAX_NAME_CHARS),
        "roles": items(anything(), MAX_ROLES),
        "addresses": addresses(),
        "state": text(MAX_WORD_CHARS),
        "metrics": table(text(MAX_METRIC_CHARS), number(), MAX_METRICS),
    },
    optional={"view": lambda view: None if is_view(view) else "is no view"},
    place=_own_key,
)
"""What is kept there. States and roles that we do not know are let through: newer peers may have some."""


def peer_key(peer_id: PeerId) -> str:
    """The DHT key that lists this peer: the membership list is spread over 16 keys by the id's first digit."""
    return f"{PEERS}/{peer_id.digest[0] >> 4:x}"


ALL_PEER_KEYS: tuple[str, ...] = tuple(f"{PEERS}/{digit:x}" for digit in range(16))


class PeerAnnouncer:
    """Keeps this peer's record alive: written at every heartbeat and state change, withdrawn on close.

    Args:
        endpoint: The peer.
        metrics: Called at every heartbeat for the numbers to publish; at most `MAX_METRICS`, finite ones are kept.
    """

    def __init__(self, endpoint: Endpoint, metrics: Callable[[], Mapping[str, float]] = dict) -> None:
        self._endpoint = endpoint
        self._metrics = metrics
        self._state = PeerState.JOINING
        self._task: asyncio.Task[Any] | None = None
        self._writing = asyncio.Lock()

    @property
    def state(self) -> PeerState:
        return self._state

    async def start(self) -> None:
        """Announce now and at every heartbeat."""
        if self._task is None:
            await self.announce()
            self._task = self._endpoint.runtime.spawn(self._beat(), "peer announcer")

    async def set_state(self, state: PeerState) -> None:
        """Change the state and tell everybody."""
        if state != self._state:
            self._state = state
            self._endpoint.runtime.emit(PeerStateChanged(state=state.value))
            if self._task is not None:
                await self.announce()

    async def announce(self) -> bool:
        """Write the record once; says whether somebody stored it (a failure is an `AnnounceFailed` event)."""
        endpoint = self._endpoint
        if endpoint.roles <= {Role.MONITOR}:
            return False  # monitors write no records
        async with self._writing:
            try:
                await endpoint.dht.put(peer_key(endpoint.peer_id), self._body(), ttl_s=3 * endpoint.config.heartbeat_s)
            except (DhtError, NetworkError) as error:
                endpoint.runtime.emit(AnnounceFailed(reason=error.message))
                return False
        return True

    async def close(self) -> None:
        """Stop, and withdraw the record within `LEAVE_TIMEOUT_S`. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._endpoint.dht.delete(peer_key(self._endpoint.peer_id))
        except (DhtError, NetworkError) as error:
            self._endpoint.runtime.emit(AnnounceFailed(reason=f"The record could not be withdrawn: {error.message}"))
        except TimeoutError:
            self._endpoint.runtime.emit(AnnounceFailed(reason="The record could not be withdrawn in time."))

    async def _beat(self) -> None:
        runtime = self._endpoint.runtime
        beats = 0
        while True:
            await asyncio.sleep(self._endpoint.config.heartbeat_s * runtime.rng.uniform(0.8, 1.0))
            await self.announce()
            beats += 1
            if beats % VIEW_BEATS == 0:
                await self._compare_view()

    async def _compare_view(self) -> None:
        """Whether somebody whose record we keep sees the network that we see. Who keeps such records checks for all."""
        dht = self._endpoint.dht
        records = []
        for key in ALL_PEER_KEYS:
            records += [(entry.author, entry.body) for entry in dht.held_entries(key) if peer_key(entry.author) == key]
        if records:
            record = _record(*self._endpoint.runtime.rng.choice(records), record_version=0, ttl_s=0.0)
            if record is not None and record.state is not PeerState.LEAVING:
                await dht.compare_view(record.contact, record.view)

    def _body(self) -> dict[str, Any]:
        endpoint = self._endpoint
        metrics = {str(k)[:MAX_METRIC_CHARS]: float(v) for k, v in self._metrics().items()}
        finite = [(k, v) for k, v in sorted(metrics.items()) if math.isfinite(v)]
        return {
            "name": endpoint.name[:MAX_NAME_CHARS],
            "roles": sorted(r.value for r in endpoint.roles),
            "addresses": list(endpoint.contact.addresses[:MAX_ADDRESSES]),
            "state": self._state.value,
            "metrics": dict(finite[:MAX_METRICS]),
            "view": endpoint.dht.view(),
        }


async def list_peers(dht: Dht, *, max_age_s: float = 0.0) -> list[PeerRecord]:
    """Everybody who announced itself, ordered by peer id; malformed records are left out.

    Args:
        dht: The DHT of the run.
        max_age_s: How old what an earlier call read may be; 0 asks all replicas of the network.
    """
    found = await dht.get_many(ALL_PEER_KEYS, fresh=max_age_s <= 0, max_age_s=max_age_s)
    records = []
    for key in ALL_PEER_KEYS:
        for entry in found.get(key, []):
            record = _record(entry.author, entry.body, entry.record_version, entry.ttl_s)
            if record is not None and entry.subkey == "" and peer_key(entry.author) == key:
                records.append(record)
    return sorted(records, key=lambda r: r.peer_id)


def _record(author: PeerId, body: Any, record_version: int, ttl_s: float) -> PeerRecord | None:
    """The record in a body that anybody may have written, or none."""
    if PEER_SCHEMA.complaint(body) is not None or body["state"] not in {m.value for m in PeerState}:
        return None
    known_roles = frozenset(Role(r) for r in body["roles"] if isinstance(r, str) and r in {m.value for m in Role})
    numbers = {name: float(value) for name, value in body["metrics"].items()}
    shown_name = "".join(c for c in body["name"] if c.isprintable())
    return PeerRecord(
        Contact(author, tuple(body["addresses"])),
        shown_name,
        known_roles,
        PeerState(body["state"]),
        numbers,
        body.get("view", b""),
        record_version,
        ttl_s,
    )
