"""The ends of a peer's life that no protocol test reaches: closing it from wrong places, and data directories."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import swarm
from swarm.averaging.allreduce import AllReduce
from swarm.averaging.averager import Averager
from swarm.cli.report import Reporter
from swarm.cli.stopping import Stopping
from swarm.cli.watching import run_until_stopped
from swarm.dht.bodies import encode_body
from swarm.dht.messages import STORE
from swarm.dht.records import Copy, sign_record, to_wire
from swarm.dht.refusals import Refusal
from swarm.errors import (
    BootstrapError,
    ClosedError,
    ConfigError,
    ExpiredInviteError,
    LoopThreadError,
    PortInUseError,
    RecordRefusedError,
)
from swarm.net.addresses import split_address
from swarm.net.loop import loop_thread
from swarm.pb import dht_pb2 as pb
from swarm.runs.credentials import CLOCK_TOLERANCE_S
from swarm.runs.membership import MembershipEnded
from tests.support import eventually


@pytest.fixture
def run() -> Iterator[swarm.Run]:
    with swarm.create_run("the-run") as run:
        yield run


def listens(peer: swarm.Peer) -> bool:
    with socket.socket() as client:
        return client.connect_ex(split_address(peer.contact.addresses[0])) == 0


def test_closing_on_the_loop_thread_is_refused_and_can_be_done_elsewhere(run: swarm.Run) -> None:
    peer = run.peer("monitor")

    async def close() -> None:
        peer.close()

    with pytest.raises(LoopThreadError):
        loop_thread().run(close())
    assert not peer.closed
    assert listens(peer)
    peer.close()
    assert peer.closed
    assert not listens(peer)


def test_a_leave_that_is_cut_short_stops_the_peer_all_the_same(run: swarm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = run.peer("monitor")
    begun = asyncio.Event()

    async def hang(_: object) -> None:
        begun.set()
        await asyncio.sleep(1e4)

    async def cut_short() -> None:
        leaving = asyncio.ensure_future(peer._close(drain=True))
        await begun.wait()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        await eventually(lambda: not listens(peer))

    monkeypatch.setattr(peer._announcer, "set_state", hang)
    loop_thread().run(cut_short(), 20.0)
    peer.close()
    assert peer.closed


@pytest.mark.parametrize("inside", [True, False])
def test_a_data_directory_that_cannot_be_used_is_named(run: swarm.Run, tmp_path: Path, inside: bool) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    folder = file / "inside" if inside else file
    with pytest.raises(ConfigError, match="file"):
        swarm.join(run.invite("monitor"), data_dir=folder)
    with pytest.raises(ConfigError, match="file"):
        swarm.create_run("another", data_dir=folder)


def test_two_peers_cannot_have_one_data_directory(run: swarm.Run, tmp_path: Path) -> None:
    invite = run.invite("monitor")
    with swarm.join(invite, data_dir=tmp_path) as first:
        for attempt in (
            lambda: swarm.join(invite, data_dir=tmp_path),
            lambda: swarm.create_run("another", data_dir=tmp_path),
            lambda: run.peer("monitor", config=first.config),
        ):
            with pytest.raises(ConfigError, match=str(os.getpid())):
                attempt()
        assert listens(first)
        assert not (tmp_path / "manifest.json").exists()
    with swarm.join(invite, data_dir=tmp_path) as second:
        assert second.peer_id == first.peer_id


def test_a_peer_that_cannot_start_leaves_its_data_directory_free(run: swarm.Run, tmp_path: Path) -> None:
    _, port = split_address(run.bootstrap.contact.addresses[0])
    config = swarm.PeerConfig.preset("local", data_dir=tmp_path, transport={"port": port})
    with pytest.raises(PortInUseError):
        swarm.create_run("another", config=config)
    with swarm.join(run.invite("monitor"), data_dir=tmp_path):
        pass


def test_peers_of_a_run_with_a_data_directory_have_none_of_their_own(tmp_path: Path) -> None:
    with swarm.create_run("kept", data_dir=tmp_path) as run:
        assert run.peer("monitor").peer_id != run.peer("monitor").peer_id != run.bootstrap.peer_id
    assert not (tmp_path / "in-use").exists()


GRID = swarm.ExpertGrid("ffn.[0:1]", "ffn", config={"hid": 4}, replicas=1)


def test_what_a_closed_peer_is_asked_for_is_an_error_and_what_used_it_can_still_be_closed() -> None:
    with swarm.create_run("closing", [GRID]) as run:
        run.peer("host")
        peer = run.peer("trainer")
        peer.wait_for_experts("ffn", timeout_s=30)
        model = nn.Linear(2, 2)
        attachment = swarm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), peer)
        averager = Averager(peer, [torch.zeros(3)], "other", AllReduce())
        experts, averaging = peer.experts, peer.averaging
        peer.close()
        uses: list[Callable[[], object]] = [
            lambda: peer.wait_for_experts("ffn"),
            lambda: peer.log(loss=1.0),
            lambda: peer.run_sync(peer.dht.get("key")),
            lambda: loop_thread().run(experts.directory.wait_for("ffn")),
            lambda: averager.step(),
            lambda: averager.step(wait=False),
            lambda: Averager(peer, [torch.zeros(3)], "third", AllReduce()),
            lambda: swarm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), peer, key="fourth"),
            lambda: swarm.MixtureOfExperts(peer, "ffn", 4, k=1)(torch.zeros(1, 4)),
        ]
        for use in uses:
            with pytest.raises(ClosedError):
                use()
        assert averaging.closed
        attachment.close()
        averager.close()
    with pytest.raises(ClosedError):
        run.peer("monitor")


def test_waiting_for_experts_ends_when_the_peer_is_closed_meanwhile() -> None:
    with swarm.create_run("closing", [GRID]) as run, ThreadPoolExecutor(1) as pool:
        peer = run.peer("trainer")
        waiting = pool.submit(peer.wait_for_experts, "ffn", 1.0, 300.0)
        peer.close()
        with pytest.raises(ClosedError):
            waiting.result(20.0)


@pytest.mark.parametrize("damage", ["empty", "cut", "altered", "garbage", "folder", "another run"])
def test_a_damaged_manifest_is_named_with_what_to_do(tmp_path: Path, damage: str) -> None:
    swarm.create_run("kept", data_dir=tmp_path).close()
    file = tmp_path / "manifest.json"
    whole = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    elif damage == "another run":
        swarm.create_run("other", data_dir=tmp_path / "other").close()
        file.write_bytes((tmp_path / "other" / "manifest.json").read_bytes())
    else:
        changes = {"empty": b"", "cut": whole[:-9], "altered": whole.replace(b"kept", b"kepT"), "garbage": b"\xff{\n"}
        file.write_bytes(changes[damage])
    with pytest.raises(ConfigError, match=r"manifest\.json") as caught:
        swarm.create_run("kept", data_dir=tmp_path)
    assert caught.value.fix
    if damage == "folder":
        file.rmdir()
    else:
        file.unlink()
    with swarm.create_run("kept", data_dir=tmp_path) as run:
        assert run.manifest.name == "kept"


def test_a_membership_that_ends_is_told_and_ends_the_command(run: swarm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.peer._MEMBERSHIP_POLL_S", 0.01)
    peer = swarm.join(run.invite("monitor", expires="1h"), role="monitor")
    assert not peer.membership_ended
    now_s = peer.runtime.clock.wall()
    monkeypatch.setattr(peer.runtime.clock, "wall", lambda: now_s + 3600 + CLOCK_TOLERANCE_S + 1)
    with pytest.raises(ExpiredInviteError, match="Your membership in the-run has ended"):
        run_until_stopped(Reporter(as_json=False), peer, peer.close)
    assert peer.membership_ended
    assert peer.events.count(MembershipEnded) == 1
    assert peer.closed


def test_a_membership_without_an_end_goes_on(run: swarm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.peer._MEMBERSHIP_POLL_S", 0.01)
    with run.peer("monitor") as peer:
        now_s = peer.runtime.clock.wall()
        monkeypatch.setattr(peer.runtime.clock, "wall", lambda: now_s + 10 * 365 * 86400.0)
        peer.run_sync(asyncio.sleep(0.1))
        assert not peer.membership_ended


def test_the_last_host_says_which_experts_nobody_took_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = swarm.ExpertGrid("ffn.[0:2]", "ffn", config={"hid": 8})
    with swarm.create_run("the-run", experts=[grid]) as run:
        peer = run.peer("host")
        peer.run_sync(eventually(lambda: peer.host is not None and len(peer.host.held) == 2))
        monkeypatch.setattr(Stopping, "asked", property(lambda stop: True))
        run_until_stopped(Reporter(as_json=False), peer, peer.close)
    assert "2 experts were not handed over (ffn.0, ffn.1)" in capsys.readouterr().out


@pytest.mark.parametrize("role", ["bootstrap", "monitor"])
def test_every_peer_takes_under_our_namespaces_only_what_belongs_there(run: swarm.Run, role: str) -> None:
    with run.peer("trainer") as trainer, run.peer(role) as peer:
        for namespace in ("peers", "experts", "rounds", "state", "progress"):
            with pytest.raises(RecordRefusedError, match=namespace):
                trainer.records.put(f"{namespace}/x", "nonsense", ttl_s=60)
            record = sign_record(trainer.identity, run.run_id, f"{namespace}/x", "", encode_body(1), 1, 60_000)
            request = pb.DhtStoreRequest(records=[to_wire(Copy(record, 60.0), 0.0)])
            call = trainer.transport.call(peer.contact, STORE, request, timeout_s=10.0)
            assert trainer.run_sync(call).results[0].status == Refusal.SCHEMA
        assert trainer.records.put("mine/x", "nonsense", ttl_s=60) >= 1


def test_records_are_read_and_written_from_the_users_thread(run: swarm.Run) -> None:
    peer = run.peer("trainer")
    assert peer.records.put("notes", {"lr": 3e-4}, ttl_s=60) == 2
    watch = run.bootstrap.records.watch("notes", timeout_s=30)
    assert [e.body for e in next(watch)] == [{"lr": 3e-4}]
    peer.records.delete("notes")
    assert next(watch) == []
    peer.close()
    with pytest.raises(ClosedError):
        peer.records.get("notes")


def test_a_peer_returns_to_a_run_whose_first_peers_are_gone(tmp_path: Path) -> None:
    run = swarm.create_run("the-run")
    invite = run.invite(["host", "trainer"])
    try:
        with swarm.join(invite, "trainer") as other:
            first = swarm.join(invite, "trainer", data_dir=tmp_path / "mine")
            peer_id = first.peer_id
            first.close()
            run.close()
            with swarm.join(invite, "trainer", data_dir=tmp_path / "mine") as again:
                assert again.peer_id == peer_id
                assert again.manifest.name == "the-run"
                assert [c.peer_id for c in again.dht.peers()] == [other.peer_id]
            other.close()
        with pytest.raises(BootstrapError) as caught:
            swarm.join(invite, "trainer", data_dir=tmp_path / "mine")
        assert set(caught.value.remembered) == {*other.contact.addresses}
        assert set(run.bootstrap.contact.addresses) <= set(caught.value.reasons)
    finally:
        run.close()


def test_the_owners_peer_returns_to_its_run_and_starts_alone_where_nobody_is_left(tmp_path: Path) -> None:
    with swarm.create_run("the-run", data_dir=tmp_path) as run, swarm.join(run.invite("trainer")) as peer:
        run.close()
        with swarm.create_run("the-run", data_dir=tmp_path) as again:
            assert [c.peer_id for c in again.bootstrap.dht.peers()] == [peer.peer_id]
            peer.close()
    with swarm.create_run("the-run", data_dir=tmp_path) as alone:
        assert alone.bootstrap.dht.peers() == []
        assert alone.bootstrap.records.put("k", 1, ttl_s=60) == 1
