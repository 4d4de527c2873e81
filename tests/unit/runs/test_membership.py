"""Admission by credential: who gets in, as what, until when; and what a membership record may hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from swarm.config import PeerConfig
from swarm.dht.records import Entry
from swarm.errors import (
    AdmissionRefusedError,
    BadSignatureError,
    ExpiredInviteError,
    InvalidInviteError,
    NotAuthorizedError,
    NotStoredError,
    PeerUnreachableError,
    WrongRunError,
)
from swarm.events import EventStream
from swarm.identity import KeyPair, PeerId
from swarm.net.transport import CallContext, Contact
from swarm.roles import Role
from swarm.runs.credentials import run_id_of
from swarm.runs.invite import Invite, owner_credential
from swarm.runs.membership import (
    ALL_PEER_KEYS,
    MAX_METRICS,
    AnnounceFailed,
    CredentialAuthorizer,
    PeerAnnouncer,
    PeerState,
    PeerStateChanged,
    _record,
    peer_key,
)
from swarm.runtime import Runtime

NOW = 1_800_000_000.0
DAY = 86400.0
RUN = KeyPair.from_private_bytes(b"\x01" * 32)
OTHER_RUN = KeyPair.from_private_bytes(b"\x02" * 32)
US = KeyPair.from_private_bytes(b"\x03" * 32)
PEER = KeyPair.from_private_bytes(b"\x04" * 32)
STRANGER = KeyPair.from_private_bytes(b"\x05" * 32)
BOOTSTRAP = Contact(US.peer_id, ("127.0.0.1:1",))


class StoppedClock:
    """A clock that stands where a test puts it."""

    def __init__(self, wall_s: float = NOW) -> None:
        self.wall_s = wall_s

    def time(self) -> float:
        return 0.0

    def wall(self) -> float:
        return self.wall_s


def invite(run_key: KeyPair = RUN, roles: tuple[Role, ...] = (Role.HOST,), expires: str | None = "7d") -> Invite:
    return Invite.issue(run_key, [BOOTSTRAP], roles, expires, wall_s=NOW)


def authorizer(clock: StoppedClock | None = None) -> CredentialAuthorizer:
    own = owner_credential(RUN, US, [Role.BOOTSTRAP])
    return CredentialAuthorizer(RUN.public_key, own, US, clock or StoppedClock())


def test_a_member_is_admitted_in_the_roles_of_its_credential() -> None:
    shown = invite(roles=(Role.HOST, Role.MONITOR)).credential(PEER, [Role.HOST])
    admission = authorizer().admit(PEER.peer_id, PEER.public_key, shown.encoded)
    assert admission.roles == {Role.HOST}


def test_a_session_ends_with_the_membership_and_its_tolerance() -> None:
    shown = invite().credential(PEER)
    admission = authorizer().admit(PEER.peer_id, PEER.public_key, shown.encoded)
    assert admission.expires_wall_s == NOW + 7 * DAY + 900
    forever = invite(expires=None).credential(PEER)
    assert authorizer().admit(PEER.peer_id, PEER.public_key, forever.encoded).expires_wall_s is None


def test_two_members_admit_each_other_without_the_owner() -> None:
    clock = StoppedClock()
    first = CredentialAuthorizer(RUN.public_key, invite().credential(PEER), PEER, clock)
    second = CredentialAuthorizer(RUN.public_key, invite().credential(STRANGER), STRANGER, clock)
    assert first.admit(STRANGER.peer_id, STRANGER.public_key, second.credential()).roles == {Role.HOST}
    assert second.admit(PEER.peer_id, PEER.public_key, first.credential()).roles == {Role.HOST}
    assert first.run_id == second.run_id == run_id_of(RUN.public_key)
    assert first.roles == {Role.HOST}


def test_nobody_is_admitted_without_a_credential() -> None:
    with pytest.raises(AdmissionRefusedError, match="no credential") as caught:
        authorizer().admit(PEER.peer_id, PEER.public_key, b"")
    assert caught.value.fix


def test_a_credential_that_somebody_else_was_given() -> None:
    shown = invite().credential(PEER).encoded
    with pytest.raises(InvalidInviteError, match="not for this one"):
        authorizer().admit(STRANGER.peer_id, STRANGER.public_key, shown)


def test_a_key_that_is_not_the_ids() -> None:
    shown = invite().credential(PEER).encoded
    with pytest.raises(AdmissionRefusedError, match="does not belong to its id"):
        authorizer().admit(STRANGER.peer_id, PEER.public_key, shown)


def test_a_member_of_another_run() -> None:
    with pytest.raises(WrongRunError):
        authorizer().admit(PEER.peer_id, PEER.public_key, invite(OTHER_RUN).credential(PEER).encoded)


def test_a_forged_credential() -> None:
    shown = bytearray(invite().credential(PEER).encoded)
    shown[10] ^= 1
    with pytest.raises(BadSignatureError):
        authorizer().admit(PEER.peer_id, PEER.public_key, bytes(shown))


def test_an_expired_member_is_refused_after_the_tolerance() -> None:
    clock, shown = StoppedClock(), invite().credential(PEER).encoded
    judge = authorizer(clock)
    clock.wall_s = NOW + 7 * DAY + 900
    assert judge.admit(PEER.peer_id, PEER.public_key, shown).roles
    clock.wall_s += 1
    with pytest.raises(ExpiredInviteError):
        judge.admit(PEER.peer_id, PEER.public_key, shown)


def test_our_own_credential_is_checked_before_anybody_else_sees_it() -> None:
    with pytest.raises(InvalidInviteError, match="not for this one"):
        CredentialAuthorizer(RUN.public_key, invite().credential(PEER), US, StoppedClock())
    with pytest.raises(WrongRunError):
        CredentialAuthorizer(OTHER_RUN.public_key, invite().credential(PEER), PEER, StoppedClock())
    with pytest.raises(ExpiredInviteError):
        CredentialAuthorizer(RUN.public_key, invite().credential(PEER).encoded, PEER, StoppedClock(NOW + 8 * DAY))


def test_roles_decide_about_methods() -> None:
    judge = authorizer()
    host = CallContext(PEER.peer_id, frozenset({Role.HOST}), "127.0.0.1:1")
    judge.authorize(host, frozenset({Role.HOST, Role.TRAINER}))
    with pytest.raises(NotAuthorizedError, match="needs the role trainer; the caller has host"):
        judge.authorize(host, frozenset({Role.TRAINER}))
    with pytest.raises(NotAuthorizedError, match="no role"):
        judge.authorize(CallContext(PEER.peer_id, frozenset(), "x"), frozenset({Role.TRAINER}))


def test_peers_are_listed_under_the_first_digit_of_their_id() -> None:
    assert peer_key(PeerId(b"\x00" * 32)) == "peers/0"
    assert peer_key(PeerId(b"\xf7" * 32)) == "peers/f"
    assert len(set(ALL_PEER_KEYS)) == 16
    assert {peer_key(PeerId(bytes([b]) * 32)) for b in range(256)} == set(ALL_PEER_KEYS)


BODY: dict[str, Any] = {
    "name": "lab-7",
    "roles": ["host"],
    "addresses": ["127.0.0.1:9"],
    "state": "ONLINE",
    "metrics": {"step": 3},
}


def read(**changes: Any) -> Any:
    return _record(PEER.peer_id, {**BODY, **changes}, 1, 10.0)


def test_a_record_is_read_back() -> None:
    record = read()
    assert (record.name, record.state, record.roles) == ("lab-7", PeerState.ONLINE, {Role.HOST})
    assert record.contact == Contact(PEER.peer_id, ("127.0.0.1:9",))
    assert record.metrics == {"step": 3.0}


def test_later_fields_and_roles_of_a_record_are_ignored() -> None:
    assert read(more=1, roles=["host", "emperor", 7]).roles == {Role.HOST}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 7},
        {"name": "x" * 65},
        {"roles": "host"},
        {"addresses": [7]},
        {"addresses": ["a:1"] * 9},
        {"addresses": ["x" * 300]},
        {"state": "DANCING"},
        {"metrics": []},
        {"metrics": {str(i): 1.0 for i in range(MAX_METRICS + 1)}},
    ],
)
def test_malformed_records_are_left_out(changes: dict[str, Any]) -> None:
    assert read(**changes) is None


def test_a_record_that_is_no_map_is_left_out() -> None:
    assert _record(PEER.peer_id, [1, 2], 1, 10.0) is None


def test_a_name_cannot_move_the_cursor_of_a_terminal() -> None:
    assert read(name="evil\x1b[2J\n").name == "evil[2J"


class StubDht:
    """Takes records, or fails as told."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.puts: list[tuple[str, dict[str, Any], float]] = []
        self.deleted: list[str] = []
        self.held: list[Entry] = []
        self.compared: list[tuple[Contact, bytes]] = []

    def view(self) -> bytes:
        return bytes(range(32))

    def held_entries(self, key: str) -> list[Entry]:
        return [entry for entry in self.held if peer_key(entry.author) == key]

    async def compare_view(self, contact: Contact, view: bytes) -> bool:
        self.compared.append((contact, view))
        return True

    async def put(self, key: str, body: dict[str, Any], *, subkey: str = "", ttl_s: float) -> int:
        if self.failure is not None:
            raise self.failure
        self.puts.append((key, body, ttl_s))
        return 1

    async def delete(self, key: str, subkey: str = "") -> None:
        if self.failure is not None:
            raise self.failure
        self.deleted.append(key)


def announcer(dht: StubDht, metrics: Any = dict, **config: Any) -> tuple[PeerAnnouncer, EventStream]:
    runtime = Runtime()
    endpoint: Any = SimpleNamespace(
        dht=dht,
        runtime=runtime,
        peer_id=PEER.peer_id,
        roles=frozenset({Role.HOST}),
        contact=Contact(PEER.peer_id, tuple(f"10.0.0.{i}:1" for i in range(20))),
        name="n" * 100,
        config=PeerConfig.preset("local", **config),
    )
    return PeerAnnouncer(endpoint, metrics), runtime.events


def test_a_record_stays_within_its_bounds() -> None:
    dht = StubDht()
    numbers = {f"metric {i:03d} {'x' * 100}": float(i) for i in range(100)} | {"a": float("inf"), "b": 2.0}

    async def main() -> None:
        assert await announcer(dht, lambda: numbers)[0].announce()

    asyncio.run(main())
    key, body, ttl_s = dht.puts[0]
    assert key == peer_key(PEER.peer_id)
    assert ttl_s == 3 * PeerConfig.preset("local").heartbeat_s
    assert len(body["name"]) == 64
    assert len(body["addresses"]) == 8
    assert len(body["metrics"]) == MAX_METRICS
    assert "a" not in body["metrics"]
    assert body["metrics"]["b"] == 2.0
    assert len(msgpack.packb(body)) <= PeerConfig().dht.max_body_bytes
    record = _record(PEER.peer_id, body, 1, ttl_s)
    assert record is not None
    assert record.view == dht.view()
    for bad in (b"odd", bytes(36), "text"):
        assert _record(PEER.peer_id, {**body, "view": bad}, 1, ttl_s) is None


def test_the_view_in_somebodys_record_is_compared_with_ours_from_time_to_time() -> None:
    dht = StubDht()

    async def main() -> None:
        other = KeyPair.from_private_bytes(b"\x07" * 32).peer_id
        ours, _ = announcer(dht, heartbeat_s=0.01)
        body = {**ours._body(), "addresses": ["10.9.9.9:1"], "state": "ONLINE"}
        dht.held = [Entry(other, "", body, 1, 9.0), Entry(PEER.peer_id, "", "nonsense", 1, 9.0)]
        await ours.start()
        while not dht.compared:
            await asyncio.sleep(0.005)
        await ours.close()
        assert set(dht.compared) == {(Contact(other, ("10.9.9.9:1",)), dht.view())}

    asyncio.run(main())


@pytest.mark.parametrize("failure", [NotStoredError("Nobody took it."), PeerUnreachableError("Nobody answers.")])
def test_a_record_that_nobody_takes_is_an_event_and_the_peer_goes_on(failure: Exception) -> None:
    dht = StubDht()

    async def main() -> None:
        ours, events = announcer(dht, heartbeat_s=0.01)
        dht.failure = failure
        await ours.start()
        assert events.count(AnnounceFailed) >= 1
        dht.failure = None
        while not dht.puts:
            await asyncio.sleep(0.005)
        dht.failure = failure
        await ours.close()
        assert "could not be withdrawn" in events.recent(AnnounceFailed)[-1].event.reason

    asyncio.run(main())


def test_states_are_told_once_and_only_while_announced() -> None:
    dht = StubDht()

    async def main() -> None:
        ours, events = announcer(dht, heartbeat_s=1000.0)
        await ours.set_state(PeerState.SYNCING)
        assert dht.puts == []
        await ours.start()
        await ours.start()
        await ours.set_state(PeerState.ONLINE)
        await ours.set_state(PeerState.ONLINE)
        await ours.close()
        await ours.close()
        assert [body["state"] for _, body, _ in dht.puts] == ["SYNCING", "ONLINE"]
        assert dht.deleted == [peer_key(PEER.peer_id)]
        assert [s.event.state for s in events.recent(PeerStateChanged)] == ["SYNCING", "ONLINE"]

    asyncio.run(main())
